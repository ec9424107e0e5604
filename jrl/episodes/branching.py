"""Episodes on the host that branch: the points of forking, and training rows of the tree.

Some members of a group, the roots, start from the prompt; each of the others forks from an existing
member after an answer of the environment, with a copy of its state and of the row's cache. Which
member forks where depends only on the tokens that the two sampled, never on slots or on when
environments answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jrl.episodes.episode import Episode
from jrl.episodes.transcript import Transcript, trained_once
from jrl.sampling.places import PLACES
from jrl.sampling.slots import Measure
from jrl.sampling.tree import check_branching
from jrl.types import Branching

MEASURED_TOKENS = 20
"""First tokens of a turn whose mean measure is the policy's uncertainty there."""


class EpisodeBranches:
    """Branching of a group's episodes.

    Args:
      branching: from the method.
      group: G.
      slots: of the rows that they are played in.

    Attributes:
      roots: number of members that start from the prompt.
      measure: of the distributions that tokens are sampled from; None for none.

    Raises:
      UserError: a tree that does not fit the group or the slots.
    """

    def __init__(self, branching: Branching, group: int, slots: int) -> None:
        # Episodes branch as they are played, in one round.
        branching = check_branching(branching._replace(rounds=1), group, slots)
        # Roots have the smallest member numbers, so their samples do not depend on later forks.
        self.roots, self._branching, self._group = branching.roots, branching, group
        self.measure: Measure | None = PLACES[branching.at]

    def deal(self, members: Sequence[Episode]) -> None:
        """Gives each root an equal share of the members that will fork from it.

        Shares on demand would give more to the episodes that play their turns first.
        """
        for i, root in enumerate(members[: self.roots]):
            root.branch.spare = tuple(range(self.roots + i, self._group, self.roots))

    def leaves(self, episode: Episode) -> bool:
        """Whether a member forks from the episode before the turn that has just ended.

        It does if the first tokens of the turn are more uncertain than those of the first turn, by
        more than ``Branching.above``, and the episode has members left in its share.
        """
        rise = np.inf
        if self._branching.at != "even":
            number = float(self._numbers(episode)[:MEASURED_TOKENS].mean())
            if episode.at.turn == 0:
                episode.branch.usual = number
            # Relative to the episode's first turn, not a constant: policies and prompts differ in
            # uncertainty.
            rise = number - episode.branch.usual
        # A branch must not fork at its own first turn: it would resample the turn at which it was
        # itself forked.
        later = episode.at.turn > episode.branch.first
        return later and bool(episode.branch.spare) and bool(rise > self._branching.above)

    def _numbers(self, episode: Episode) -> np.ndarray:
        """[t] float32 of the last turn: the measure, or minus the log-probabilities without one."""
        if self.measure is not None:
            return episode.turn.measured
        logprobs = episode.segments[-1].logprobs
        assert logprobs is not None
        return -logprobs

    def take(self, episode: Episode, members: Sequence[Episode]) -> Episode:
        """Forks the next member off an episode; both get half of the remaining share."""
        # Halved as in a binary tree: the forks then depend only on these two episodes, not on the
        # progress of others.
        number, *rest = episode.branch.spare
        child, half = members[number], len(rest) // 2
        episode.branch_off(child)
        child.branch.spare, episode.branch.spare = tuple(rest[:half]), tuple(rest[half:])
        return child


def tree_of(members: Sequence[Episode]) -> tuple[list[Transcript], int]:
    """The transcripts of a group of episodes that branched, with shared tokens trained once.

    ``Segment.node`` numbers the stretches that are shared by the same members, from 1 on; failed
    members do not count.

    Returns:
      (a transcript for each member, the number of tokens that are the past of another member).
    """
    rows = [episode.transcript() for episode in members]
    alive = [episode for episode, row in zip(members, rows, strict=True) if row.alive]
    origins = [[e.origin(i) for i in range(len(e.segments))] for e in alive]
    through: dict[tuple[int, int], tuple[int, ...]] = {}
    for episode, names in zip(alive, origins, strict=True):
        for name in names:
            through[name] = (*through.get(name, ()), episode.member)
    # In the order of members, then of segments.
    node = {stretch: i for i, stretch in enumerate(dict.fromkeys(through.values()), 1)}
    for episode, names in zip(alive, origins, strict=True):
        pairs = zip(episode.segments, names, strict=True)
        segments = tuple(part._replace(node=node[through[name]]) for part, name in pairs)
        rows[episode.member] = rows[episode.member]._replace(segments=segments)
    # A failed member is not trained, so a living one must train the tokens that they share.
    living = [rows[episode.member] for episode in alive]
    trained, shared = trained_once(living, origins, [True] * len(alive))
    for episode, row in zip(alive, trained, strict=True):
        rows[episode.member] = row
    return rows, shared
