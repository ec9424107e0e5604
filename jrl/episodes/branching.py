"""Episodes on the host that branch: who is left behind which answer, and rows for the tree.

The members of a group begin as some episodes; the others leave these behind an answer of the
environment, with a copy of its state and of the row's cache. Which member leaves whom depends on
what the two of them drew alone, never on when environments answer or on slots.
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
"""Tokens at the beginning of a turn whose mean number says how unsure the policy is there."""


class EpisodeBranches:
    """Branching of a group's episodes.

    Args:
      branching: from the method.
      group: G.
      slots: of the rows that they are played in.

    Attributes:
      roots: members that begin by themselves.
      measure: of the distributions that tokens are drawn from; None where nothing is.

    Raises:
      UserError: a tree that does not fit the group or the slots.
    """

    def __init__(self, branching: Branching, group: int, slots: int) -> None:
        # Episodes branch as they are played, in one round.
        branching = check_branching(branching._replace(rounds=1), group, slots)
        # Roots have the smallest member numbers, so the draws of a root do not depend on whether it
        # is ever left.
        self.roots, self._branching, self._group = branching.roots, branching, group
        self.measure: Measure | None = PLACES[branching.at]

    def deal(self, members: Sequence[Episode]) -> None:
        """Gives the roots of a group equal shares of the members that will leave them.

        Were they shared out as episodes ask for them, the first to play a turn would get more.
        """
        for i, root in enumerate(members[: self.roots]):
            root.branch.spare = tuple(range(self.roots + i, self._group, self.roots))

    def leaves(self, episode: Episode) -> bool:
        """Whether a member leaves the episode before the turn that has just ended.

        It does where the first tokens of the turn are more uncertain than those of the first turn
        were, by more than ``Branching.above``, and if the episode has members to give.
        """
        rise = np.inf
        if self._branching.at != "even":
            number = float(self._numbers(episode)[:MEASURED_TOKENS].mean())
            if episode.at.turn == 0:
                episode.branch.usual = number
            # Against the episode's own first turn, not a constant: policies and prompts differ in
            # how sure they are.
            rise = number - episode.branch.usual
        # Behind its own past a branch would only sample once more what its source was left for.
        later = episode.at.turn > episode.branch.first
        return later and bool(episode.branch.spare) and bool(rise > self._branching.above)

    def _numbers(self, episode: Episode) -> np.ndarray:
        """[t] float32 of the last turn: what is measured, else how surprising each token was."""
        if self.measure is not None:
            return episode.turn.measured
        logprobs = episode.segments[-1].logprobs
        assert logprobs is not None
        return -logprobs

    def take(self, episode: Episode, members: Sequence[Episode]) -> Episode:
        """The member that leaves an episode now; both keep half of the other members to give."""
        # Halved as in a binary tree: which member leaves whom then depends on these two episodes
        # alone, whatever the others do meanwhile.
        number, *rest = episode.branch.spare
        child, half = members[number], len(rest) // 2
        episode.branch_off(child)
        child.branch.spare, episode.branch.spare = tuple(rest[:half]), tuple(rest[half:])
        return child


def tree_of(members: Sequence[Episode]) -> tuple[list[Transcript], int]:
    """The transcripts of a group of episodes that branched, as ``trained_once`` makes rows of them.

    ``Segment.node`` numbers the stretches that the same living members go through, from 1 on.

    Returns:
      A transcript a member, and the tokens that stand in rows as the past of another member.
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
    # A failed member trains nothing, so what it shares must count as drawn in one that is alive.
    living = [rows[episode.member] for episode in alive]
    trained, shared = trained_once(living, origins, [True] * len(alive))
    for episode, row in zip(alive, trained, strict=True):
        rows[episode.member] = row
    return rows, shared
