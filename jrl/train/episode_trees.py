"""Groups of episodes that are the leaves of a search: what is played with ``Draw.search``.

The twin of ``tree_search`` for environments on the host: a step is a turn. What is left of a group
are rows as of any episodes, in which a turn that several go through is drawn in the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jrl.episodes.episode import Episode
from jrl.episodes.transcript import Transcript
from jrl.episodes.tree import SEARCHES, Tree, grow_leaves
from jrl.train.episode_search import EpisodeForest, EpisodeSearch, Turn, path_of, turn_of
from jrl.train.host_play import Played
from jrl.types import Search

PathEstimate = Callable[[Sequence[np.ndarray]], Sequence[float]]
"""(ids of openings and paths) -> points of each."""


class EpisodeTrees:
    """How the episodes of a group are searched.

    Args:
      search: how; ``tokens`` is not read.
      parts: the environment's reward parts.
      success: the reward part that is 1 where an episode ends well.
      weights: reward part -> weight.
    """

    def __init__(
        self, search: Search, parts: Sequence[str], success: str, weights: Mapping[str, float]
    ) -> None:
        self._search, self._named = search, SEARCHES[search.by]
        self._worth = np.array([weights.get(name, 0.0) for name in parts])
        self._success = weights.get(success, 0.0)

    def play(
        self,
        search: EpisodeSearch,
        episodes: Sequence[Episode],
        group: int,
        apart: Sequence[bool],
        estimate: PathEstimate | None = None,
    ) -> Played:
        """Searches from each episode until there are ``group`` leaves.

        Args:
          search: what plays turns.
          episodes: N, of ``EpisodeSearch.opened``. Where one failed to open, so have all members.
          group: G.
          apart: [N], whose members are played by themselves, without a search.
          estimate: points of paths that have not ended, backed up as those of leaves are; None to
            go by leaves alone.

        Returns:
          The groups; ``Segment.node`` numbers the turns of a tree, and ``Segment.value`` is what
          the backup of all its leaves left of one.
        """
        there = [i for i, episode in enumerate(episodes) if episode.has_state]
        score = lambda paths: self._points(paths, estimate)  # noqa: E731
        with search.forest([episodes[i] for i in there], score) as forest:
            grow_leaves(
                forest.trees,
                self._named.select(self._search.width, self._search.exploration),
                lambda chosen: self._expand(forest, chosen),
                leaves=group,
                width=self._search.width,
                rounds=[0 if apart[i] else self._search.rounds for i in there],
            )
        trees = dict(zip(there, forest.trees, strict=True))
        found = [
            self._rows(trees[i], group) if i in trees else ([episode.transcript()] * group, 0)
            for i, episode in enumerate(episodes)
        ]
        turns = sum(len(tree.nodes) - 1 for tree in forest.trees)
        leaves = sum(len(tree.leaves()) for tree in forest.trees)
        closed = [episode for i, episode in enumerate(episodes) if i not in there]
        counts = forest.counts | {
            "env_errors": forest.counts["env_errors"] + len(closed),
            "episodes": float(group * len(episodes)),
            "turns": float(turns),
            "tree_shared_tokens": float(sum(shared for _, shared in found)),
            "search_nodes": float(turns),
            "search_leaves": float(leaves),
        }
        return Played([rows for rows, _ in found], counts)

    def _points(
        self, paths: Sequence[tuple[int, Sequence[Turn]]], estimate: PathEstimate | None
    ) -> list[float | None]:
        """What was paid on the way where a path has ended, else what is estimated, if anything."""
        points: list[float | None] = [None] * len(paths)
        going = []
        for i, (_, path) in enumerate(paths):
            if path[-1].state is None:
                segments = path[-1].episode.transcript().segments
                paid = sum(self._worth @ part.reward for part in segments if part.reward)
                points[i] = float(paid) + self._success * path[-1].success
            else:
                going.append(i)
        if going and estimate is not None:
            whole = []
            for i in going:
                tree, path = paths[i]
                whole.append(np.concatenate([path[-1].episode.opening, path_of(tree, path).tokens]))
            for i, number in zip(going, estimate(whole), strict=True):
                points[i] = float(number)
        return points

    def _expand(
        self, forest: EpisodeForest, chosen: Sequence[tuple[int, int, int]]
    ) -> list[tuple[int, int]]:
        """Plays turns behind nodes, and backs up what is known; (tree, number) of all."""
        trees, new = forest.trees, []
        paths = [(i, [turn_of(trees[i], n) for n in trees[i].path(node)]) for i, node, _ in chosen]
        played = forest.expand(paths, [count for *_, count in chosen])
        for (i, node, _), steps in zip(chosen, played, strict=True):
            new += [(i, trees[i].add(node, step)) for step in steps]
        for i, node in new:
            step = trees[i].nodes[node].step
            if step is not None and step.points is not None:
                self._named.backup(trees[i], node, step.points)
        return new

    def _rows(self, tree: Tree, group: int) -> tuple[list[Transcript], int]:
        """The rows of a group, and how many tokens stand in them as another member's past.

        A turn is drawn in the first row that goes through it, of those that are alive.
        """
        rows, owned, shared = [], set[int](), 0
        for member, leaf in enumerate(tree.leaves()[:group]):
            path = tree.path(leaf)
            row = turn_of(tree, leaf).episode.transcript()
            row = row._replace(member=member, episode=member)
            rows.append(row)
            if not row.alive:
                continue
            segments = []
            for segment in row.segments:
                node = path[segment.turn]
                value = self._named.value(tree.nodes[node])
                part = segment._replace(node=node, value=value)
                if node in owned:
                    shared += len(part.tokens)
                    part = part._replace(drawn=False, logprobs=None, versions=None)
                segments.append(part)
            owned |= set(path)
            rows[-1] = row._replace(segments=tuple(segments))
        return rows, shared
