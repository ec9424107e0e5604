"""The rounds of a search: nodes expanded together until the budget is spent.

    rounds = search_rounds([tree], search_plan("puct", 4))
    chosen = next(rounds)
    chosen = rounds.send(steps)  # sampled after the chosen nodes, and scored

A generator, since the steps of episodes arrive one after another: ``search`` drives it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from jrl.episodes.tree import Backup, SearchPlan, Step, Tree, best_first


class SearchCost(NamedTuple):
    """Cost of a search.

    Attributes:
      expansions: of a node.
      steps: drawn.
      tokens: drawn.
    """

    expansions: int
    steps: int
    tokens: int


class Expansion(NamedTuple):
    """Steps to sample after a node.

    Attributes:
      tree: index of the tree.
      node: number of the node in the tree.
      steps: number of steps.
    """

    tree: int
    node: int
    steps: int


Rounds = Generator[list[Expansion], Sequence[Sequence[Step]], list[SearchCost]]
"""Yields expansions to do together, is sent the steps of each, returns the cost of each tree."""


def search_rounds(
    trees: Sequence[Tree], plan: SearchPlan, rounds: Sequence[int] | None = None
) -> Rounds:
    """The rounds of a search of several trees; the caller samples and scores the steps.

    In a round nodes of all trees are expanded together, and the scores of the new steps are backed
    up. If ``plan.leaves`` asks for more leaves than the search has, open nodes are continued to an
    end, the likeliest most often; so after 0 rounds all leaves are independent paths from the root.

    Args:
      trees: grown in place.
      plan: of the search.
      rounds: of each tree, at most; None for ``plan.rounds`` each.
    """
    # The other trees continue without a tree that has fewer rounds.
    costs = [SearchCost(0, 0, 0)] * len(trees)
    limits = [plan.rounds] * len(trees) if rounds is None else list(rounds)

    def goes_on(i: int) -> bool:
        spent = plan.tokens and costs[i].tokens >= plan.tokens
        enough = plan.leaves and len(trees[i].leaves()) >= plan.leaves
        return not spent and not enough

    for number in range(max(limits, default=0)):
        chosen = [
            Expansion(i, node, plan.width)
            for i, tree in enumerate(trees)
            if number < limits[i] and goes_on(i)
            for node in plan.select(tree)
        ]
        # A beam whose paths have all ended selects nothing, whatever rounds are left.
        if not chosen:
            break
        _grow(trees, chosen, (yield chosen), plan.backup, costs)
    # Groups have a fixed number of members, found by the search or not.
    paths = [Expansion(i, *node) for i, tree in enumerate(trees) for node in _missing(tree, plan)]
    while paths:
        new = _grow(trees, paths, (yield paths), plan.backup, costs)
        paths = [Expansion(i, node, 1) for i, node in new if not trees[i].nodes[node].done]
    return costs


def _grow(
    trees: Sequence[Tree],
    chosen: Sequence[Expansion],
    steps: Sequence[Sequence[Step]],
    backup: Backup,
    costs: list[SearchCost],
) -> list[tuple[int, int]]:
    """Adds the steps and backs up their points; returns (tree, number) of each new node."""
    new = []
    for (i, node, _), sampled in zip(chosen, steps, strict=True):
        trees[i].nodes[node].expanded = True
        for step in sampled:
            new.append((i, trees[i].add(node, step)))
        took = (1, len(sampled), sum(step.tokens for step in sampled))
        costs[i] = SearchCost(*(a + b for a, b in zip(costs[i], took, strict=True)))
    # After all additions, in the order of the steps: a backup reads only its own path.
    for i, node in new:
        points = trees[i].step(node).points
        if points is not None:
            backup(trees[i], node, points)
    return new


def _missing(tree: Tree, plan: SearchPlan) -> list[tuple[int, int]]:
    """Nodes from which a tree is completed, and how often: open ones, the likeliest first."""
    # The likeliest first, since an unlikely prefix would fill the group with unlikely members.
    missing = max(plan.leaves - len(tree.leaves()), 0)
    nodes = best_first(len(tree.nodes))(tree) or [0]
    times = [len(range(i, missing, len(nodes))) for i in range(len(nodes))]
    return [(node, count) for node, count in zip(nodes, times, strict=True) if count]
