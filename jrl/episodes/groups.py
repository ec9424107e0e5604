"""Groups of episodes, each played by itself or forked from another: the simplest strategy.

played = play_episodes(device, world, prompts, seeds, group=8)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jrl.episodes.branching import EpisodeBranches, tree_of
from jrl.episodes.calls import Answer
from jrl.episodes.episode import ABSENT, EnvCall, Episode
from jrl.episodes.follow import Continue
from jrl.episodes.play import Device, Scheduler, uncopied
from jrl.episodes.transcript import Transcript, common_prefix
from jrl.episodes.world import World
from jrl.types import Prompt, StopReason


class Played(NamedTuple):
    """Episodes that have ended.

    Attributes:
      groups: a transcript for each member of each prompt.
      counts: numbers by name, which add up: "episodes", "turns", "env_errors", "env_timeouts",
        "env_close_errors", "slot_tokens" (sampled), "slot_steps" (decode steps times slots, or the
        episodes left where these are fewer), "idle_seconds" (in which all slots waited for
        environments), and those of ``slots.DecodeSlots``. With several contexts also "summaries"
        that were sampled. Where episodes branch also "branches", "env_fork_errors" (branches that
        ended because the environment could not be copied) and "tree_shared_tokens", as
        ``branching.tree_of`` counts them.
    """

    groups: list[list[Transcript]]
    counts: dict[str, float]


COUNTED = ("env_errors", "env_timeouts", "env_close_errors", "idle_seconds")
"""Counts of every play, reported even if 0; and those of rows that left their slots."""
COUNTED_ROWS = ("parked", "dropped", "read_tokens", "reread_tokens")


def play_episodes(
    device: Device,
    world: World,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    *,
    group: int,
    branches: EpisodeBranches | None = None,
    ended: Callable[[Transcript], None] | None = None,
) -> Played:
    """``group`` episodes of each prompt.

    Samples depend on the weights, the prompt's seed, the member and the environment's answers; not
    on when it answers, nor on slots.

    Args:
      device: samples.
      world: answers.
      prompts: N of them.
      seeds: [N], below 2**64, of each prompt's tokens, and given to the environment.
      group: members of a group.
      branches: branching of a group's members, with rows that record its measure; None to play each
        by itself.
      ended: called with each row when it has ended, while others are sampled; it must return at
        once. Not called with ``branches``, where a row is complete only with its group.

    Returns:
      All episodes; those whose environment failed have a ``reason``.
    """
    groups = GroupStrategy(prompts, seeds, group, branches, ended if branches is None else None)
    scheduler = Scheduler(device, world, groups)
    scheduler.run()
    counts = dict.fromkeys((*COUNTED, *COUNTED_ROWS), 0.0)
    if world.rules.limits.contexts > 1:
        counts["summaries"] = 0.0
    if branches is not None:
        counts |= dict.fromkeys(["branches", "env_fork_errors", "tree_shared_tokens"], 0.0)
    counts |= {"episodes": float(len(groups.episodes)), **scheduler.counts}
    members = [groups.members(i) for i in range(len(prompts))]
    if branches is None:
        return Played([[e.transcript() for e in each] for each in members], counts)
    trees = [tree_of(each) for each in members]
    counts["tree_shared_tokens"] = float(sum(shared for _, shared in trees))
    return Played([rows for rows, _ in trees], counts)


class GroupStrategy:
    """The strategy of groups of episodes: each continues by itself, until it ends.

    Attributes:
      episodes: all, in the order of their groups.
      left: number of them that have not ended.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        group: int,
        branches: EpisodeBranches | None = None,
        row_ended: Callable[[Transcript], None] | None = None,
    ) -> None:
        self._row_ended = row_ended
        self.episodes = [
            Episode(i, j, prompt, seed)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            for j in range(group)
        ]
        self.left = len(self.episodes)
        self._group, self._branches = group, branches
        self._starts: dict[int, np.ndarray] = {}  # what the openings of a group have in common
        self._next_group = 0
        for i in range(len(prompts) if branches else 0):
            assert branches is not None
            branches.deal(self.members(i))

    def members(self, index: int) -> list[Episode]:
        """The episodes of a group."""
        return self.episodes[index * self._group : (index + 1) * self._group]

    def _roots(self, index: int) -> list[Episode]:
        """The members of a group that begin by themselves, and together."""
        members = self.members(index)
        return members if self._branches is None else members[: self._branches.roots]

    # ------------------------------------------------------------ openings

    def advance(self, scheduler: Scheduler) -> bool:
        """Opens the next groups, so that a free slot finds an episode that can begin."""
        groups, rows = len(self.episodes) // self._group, scheduler.rows
        # As many as all slots begin with together, and twice as many environments as rows.
        most = 2 * (rows.slots + rows.max_suspended)
        opening, opened = scheduler.opening, sum(e.state is not ABSENT for e in self.episodes)
        while (
            self._next_group < groups
            and opening + scheduler.slots.new < rows.slots
            and opening + opened < most
        ):
            # A group opens together: what its openings share is known once all are there.
            for episode in self._roots(self._next_group):
                scheduler.open(episode)
                opening += 1
            self._next_group += 1
        return self.left > 0

    def opened(self, scheduler: Scheduler, episode: Episode) -> None:
        """Queues a group once all that begin together have opened or failed.

        What their openings do not share counts as completion tokens, so the room of each is known
        only then. An episode that opens later, in a group that branches, must begin as they do.
        """
        index = episode.problem.group
        if any(e.ending is None and e.state is ABSENT for e in self._roots(index)):
            return
        # Those that have room were queued before, or branched off one that was.
        members = self.members(index)
        new = [e for e in members if e.ending is None and e.state is not ABSENT and not e.room]
        if not new:
            return
        if index not in self._starts:
            self._starts[index] = common_prefix([e.opening for e in new])
        for each in new:
            self._queue(scheduler, each, self._starts[index])

    def _queue(self, scheduler: Scheduler, episode: Episode, start: np.ndarray) -> None:
        # Rows of a group share their prompt in training, so that what is not common takes room.
        most = scheduler.rows.max_new_tokens
        episode.room = most - (len(episode.opening) - len(start))
        if not len(start) or not np.array_equal(episode.opening[: len(start)], start):
            differs = "the members of a group open with different first tokens"
            scheduler.fail(episode, f"{differs}; let init depend on prompt and seed alone")
        elif scheduler.world.rules.usable(episode) < 1:
            differs = "its opening differs from the group's by a whole completion"
            scheduler.fail(episode, differs)
        else:
            scheduler.begin(episode)

    # ------------------------------------------------------------ turns

    def turn_ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """Lets a branch leave before the turn that has ended, or asks about the turn."""
        if self._branches is None or not self._branches.leaves(episode):
            scheduler.ask(episode)
            return
        # Decided by what the two have sampled alone; neither slots nor clocks choose who leaves.
        branch = self._branches.take(episode, self.members(episode.problem.group))
        scheduler.counts["branches"] += 1
        # Of the row and of the environment: both are now as they were when the turn began.
        limit = scheduler.world.rules.turn_limit(branch)
        scheduler.slots.fork(branch, episode, limit)
        scheduler.copy(episode.state, waits=episode, copy_for=branch)

    def copied(self, scheduler: Scheduler, call: EnvCall, answer: Answer) -> None:
        """Begins a branch with a copy of the environment, or ends it for want of one."""
        source, branch = call.episode, call.copy_for
        assert source is not None
        assert branch is not None
        if not answer.error:
            branch.state = answer.value
            scheduler.begin(branch)
        else:
            scheduler.counts["env_fork_errors"] += 1
            if source.ending is None:  # it may be left by those that would have left the branch
                source.branch.spare = (*source.branch.spare, *branch.branch.spare)
                branch.branch.spare = ()
            scheduler.end(branch, StopReason.FAILED, uncopied(answer))
        # Only now may the source's environment move on: the copy is of its state before the turn.
        if source.ending is None:
            scheduler.ask(source)

    def continues(self, scheduler: Scheduler, episode: Episode, following: Continue) -> None:
        """Every episode does."""
        scheduler.resume(episode, following)

    def ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """Lets those begin that nobody left it for."""
        self.left -= 1
        if self._row_ended is not None:
            self._row_ended(episode.transcript())
        # A group must be full: baselines compare its members.
        for number in episode.branch.spare:
            scheduler.open(self.members(episode.problem.group)[number])
        episode.branch.spare = ()
