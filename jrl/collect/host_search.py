"""Searches of episodes on the host: points of their paths, and their leaves as groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jrl.episodes.episode import Episode
from jrl.episodes.groups import Played
from jrl.episodes.search import EpisodeScorer, Searched, leaf_rows, path_of
from jrl.episodes.tree import SearchPlan
from jrl.setup.reward_parts import SUCCESS


def episode_scorer(
    parts: Sequence[str],
    weights: Mapping[str, float],
    estimate: Callable[[Sequence[np.ndarray]], Sequence[float]] | None,
) -> EpisodeScorer:
    """Points of paths: what was paid where one has ended, else what is estimated, if anything.

    Args:
      parts: the environment's reward parts.
      weights: reward part -> weight, "success" included.
      estimate: (ids of openings and paths) -> points of each; None to go by leaves alone.
    """
    # "success" is no part of what an environment pays turn by turn, so it is added at the end.
    part_weights = np.array([weights.get(name, 0.0) for name in parts])

    def score(episodes: Sequence[Episode]) -> list[float | None]:
        points: list[float | None] = [None] * len(episodes)
        unfinished = [i for i, episode in enumerate(episodes) if episode.ending is None]
        for i in set(range(len(episodes))) - set(unfinished):
            paid = sum(part_weights @ s.reward for s in episodes[i].segments if s.reward)
            points[i] = float(paid) + weights.get(SUCCESS, 0.0) * episodes[i].success
        if unfinished and estimate is not None:
            paths = [path_of(episodes[i]) for i in unfinished]
            estimated = estimate([np.concatenate([p.opening, p.tokens]) for p in paths])
            for i, number in zip(unfinished, estimated, strict=True):
                points[i] = float(number)
        return points

    return score


def leaves_played(searched: Searched, plan: SearchPlan) -> Played:
    """The groups of a search: the first leaves of each tree, all failed where it has none.

    Args:
      searched: until each tree had as many leaves.
      plan: of the search, whose ``leaves`` are G.
    """
    groups, shared, group = [], 0, plan.leaves
    for root, tree in zip(searched.roots, searched.trees, strict=True):
        # In the order of sampling: choosing by points would bias the group's baseline.
        leaves = tree.leaves()[:group]
        live = [step.episode.transcript().alive for step in map(tree.step, leaves)]
        # A leaf that failed must not be the member that trains the tokens it shares with others.
        rows, past = leaf_rows(tree, leaves, live, plan.value)
        groups.append(rows if leaves else [root.transcript()] * group)
        shared += past
    counts = searched.counts | {
        "episodes": float(group * len(groups)),
        "tree_shared_tokens": float(shared),
        "search_nodes": float(sum(len(tree.nodes) - 1 for tree in searched.trees)),
        "search_leaves": float(sum(len(tree.leaves()) for tree in searched.trees)),
    }
    return Played(groups, counts)
