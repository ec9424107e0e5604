"""``[tree]``: how members of a group leave one another; a table of keys for each ``tree.kind``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from jrl.config.base import Table, key

TREE_KIND = (
    "branch: members leave one another at tokens, or behind answers of an environment; search: they"
    " are the leaves of a search; none: they are drawn apart; method: as the method has it"
)


class MethodTree(Table):
    """Members are drawn as the method says."""

    kind: Literal["method"] = key("method", TREE_KIND)


class NoTree(Table):
    """Members are drawn apart."""

    kind: Literal["none"] = key("none", TREE_KIND)


class BranchTree(Table):
    """Members branch off one another. A key left out is the method's, if its members branch."""

    kind: Literal["branch"] = key("branch", TREE_KIND)
    at: Literal["entropy", "gap", "surprise", "even"] | None = key(
        None, "which tokens are left; entropy unless the method says otherwise"
    )
    roots: int | None = key(None, "members drawn from the prompt; 0: half of the group", ge=0)
    rounds: int | None = key(
        None, "rounds in which members branch; of a search, in which nodes are expanded", ge=1
    )
    above: float | None = key(
        None,
        "what the number of a token must exceed, in nats for entropy and surprise, in probability"
        " for gap; not read with even",
        ge=0,
    )


class SearchTree(Table):
    """Members are leaves of a search. A key left out is the method's, if it searches."""

    kind: Literal["search"] = key("search", TREE_KIND)
    by: (
        Literal["uct", "puct", "frontier", "best_first", "beam", "greedy", "dvts", "best_of_n"]
        | None
    ) = key(None, "how nodes are chosen; puct unless the method says otherwise")
    rounds: int | None = key(None, BranchTree.model_fields["rounds"].description or "", ge=1)
    width: int | None = key(None, "steps drawn from a node", ge=1)
    tokens: int | None = key(
        None,
        "most tokens of a step of text, which ends with a line, too; not read in episodes",
        ge=1,
    )
    exploration: float | None = key(
        None, "how much uct and puct count that a node was seldom visited", ge=0
    )


def _tree_kind(value: Any) -> str | None:
    """The tag of a dict or of a table; None where a dict has no kind."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return None if kind is None else f"tree.kind = {kind!r}"


Tree = Annotated[
    Annotated[MethodTree, Tag("tree.kind = 'method'")]
    | Annotated[NoTree, Tag("tree.kind = 'none'")]
    | Annotated[BranchTree, Tag("tree.kind = 'branch'")]
    | Annotated[SearchTree, Tag("tree.kind = 'search'")],
    Discriminator(_tree_kind),
]
