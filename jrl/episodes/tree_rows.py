"""Rows to train on from a search: siblings for preferences, paths with step values.

    rows = rows_of_tree(tree, prompt, {leaf: points, ...})

The rows are those of ``data.records``, in token ids: what was drawn is never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jrl.episodes.tree import Backup, Tree, mean_backup, siblings


class TreeRows(NamedTuple):
    """Rows of one tree, each with "prompt" and "responses" as lists of ids, and "scores", points.

    Attributes:
      siblings: of each node with children whose values differ: the path to it is part of the
        prompt, the responses are steps, the scores their values, and "visits" the number of leaves
        after each. For ``mcts_dpo``, ``step_q``, ``tp_llama`` and other preferences.
      paths: all paths that ended, as one row: the scores are their leaves' points; "steps" holds
        the sizes of each path's steps, tokens, and "step_values" their values. For ``prm``,
        ``rest_mcts`` and ``alphamath``. Empty where no path ended, and for episodes, of which a
        response would hold what environments said.
    """

    siblings: list[dict[str, Any]]
    paths: list[dict[str, Any]]


def rows_of_tree(
    tree: Tree,
    prompt: Sequence[int],
    points: Mapping[int, float],
    backup: Backup = mean_backup,
) -> TreeRows:
    """The rows of a tree whose leaves were judged.

    A node's value is what ``backup`` makes of the judged leaves below it, such as the fraction that
    is right: the estimate of "Math-Shepherd: Verify and Reinforce LLMs Step-by-step without Human
    Annotations" (arXiv:2312.08935). What guided the search does not count, and nodes without a
    judged leaf below them are left out. Equal steps of one node count as one.

    Args:
      tree: of a search, each step's content its ids; it stays as it is.
      prompt: ids.
      points: of leaves, by the number of their node.
      backup: of the points, in the order of the leaves' numbers.
    """
    # Values are computed anew on a copy: those that guided the search may hold estimates of a value
    # network and a backup of another kind.
    judged, place = _merged(tree)
    total: dict[int, list[float]] = {}
    for leaf in sorted(points):
        # Leaves that merged into one node are backed up each: a step drawn twice counts twice in
        # the means of its ancestors.
        backup(judged, place[leaf], float(points[leaf]))
        total.setdefault(place[leaf], []).append(float(points[leaf]))
    rows = [
        {
            "prompt": [*map(int, prompt), *_ids(group.path)],
            "responses": [_ids([step]) for step in group.steps],
            "scores": group.values,
            "visits": group.visits,
        }
        for group in siblings(judged)
    ]
    paths = [judged.path(leaf) for leaf in total]
    # A response of a path is what the policy drew; with an environment's answers in between it
    # would teach the policy to write those too.
    if not paths or any(len(judged.step(i).answer) for i in range(1, len(judged.nodes))):
        return TreeRows(rows, [])
    steps = [[_ids([judged.step(i).content]) for i in path] for path in paths]
    of_paths = {
        "prompt": [int(token) for token in prompt],
        "responses": [_ids(path) for path in steps],
        # Equal completions are one response; its score is the mean, since a sampled judge may
        # differ.
        "scores": [sum(points_here) / len(points_here) for points_here in total.values()],
        "steps": [[len(step) for step in path] for path in steps],
        "step_values": [[judged.nodes[i].value for i in path] for path in paths],
    }
    return TreeRows(rows, [of_paths])


def _merged(tree: Tree) -> tuple[Tree, dict[int, int]]:
    """The tree with equal steps of a node as one, never visited, and where each node went to.

    A search may sample the same step more than once; that is one action, with all their leaves.
    """
    merged, place, copy_of = Tree(), {0: 0}, {}
    for i, node in enumerate(tree.nodes[1:], 1):
        step = tree.step(i)
        # After two summaries of one turn the policy sees different contexts: these are two nodes.
        after = () if step.restart is None else (-1, *_ids([step.restart]))
        at = (place[node.parent], *_ids([step.content]), *after)
        if at not in copy_of:
            copy_of[at] = merged.add(place[node.parent], step)
        place[i] = copy_of[at]
    return merged, place


def _ids(contents: Sequence[Any]) -> list[int]:
    return [int(token) for content in contents for token in content]
