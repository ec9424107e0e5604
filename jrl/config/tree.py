"""``[tree]``: how members of a group share prefixes; a table of keys for each ``tree.kind``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from jrl.config.base import Table, key

TREE_KIND = (
    "branch: members branch off one another, at tokens or after replies of an environment; search:"
    " members are the leaves of a tree search; none: members are sampled independently; method: the"
    " method's own choice"
)


class MethodTree(Table):
    """Members are sampled as the method chooses."""

    kind: Literal["method"] = key("method", TREE_KIND)


class NoTree(Table):
    """Members are sampled independently."""

    kind: Literal["none"] = key("none", TREE_KIND)


class BranchTree(Table):
    """Members branch off one another. A key left out is the method's, if its members branch."""

    kind: Literal["branch"] = key("branch", TREE_KIND)
    at: Literal["entropy", "gap", "surprise", "even"] | None = key(
        None,
        "token at which a member branches: of the highest entropy, the smallest gap between the"
        " two likeliest tokens, the lowest probability (surprise), or in the middle (even); default"
        " entropy, or the method's choice",
    )
    roots: int | None = key(None, "members sampled from the prompt; 0: half of the group", ge=0)
    rounds: int | None = key(
        None, "rounds in which the tree grows: members branch, or nodes are expanded", ge=1
    )
    above: float | None = key(
        None,
        "branch only where the token's value exceeds this, in nats for entropy and surprise, in"
        " probability for gap; not read with even",
        ge=0,
    )


class SearchTree(Table):
    """Members are leaves of a search. A key left out is the method's, if it searches."""

    kind: Literal["search"] = key("search", TREE_KIND)
    by: (
        Literal["uct", "puct", "frontier", "best_first", "beam", "greedy", "dvts", "best_of_n"]
        | None
    ) = key(None, "search algorithm; default puct, or the method's choice")
    rounds: int | None = key(None, BranchTree.model_fields["rounds"].description or "", ge=1)
    width: int | None = key(None, "steps sampled from a node", ge=1)
    tokens: int | None = key(
        None,
        "most tokens of a step in text, where a newline ends a step, too; not read in episodes",
        ge=1,
    )
    exploration: float | None = key(None, "exploration constant of uct and puct", ge=0)


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
