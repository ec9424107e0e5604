"""One scheduler of turns: episodes alone, episodes that branch, and searches of both and of text.

    played = play_episodes(rows, world, prompts, seeds, group=8)

A *job* is a row as an episode left it, ids to append and a limit: the policy samples behind them.
A *strategy* says which episodes are to continue: each by itself (``Groups``), some left by others
(``branching``), or the nodes that a search chooses (``search.Searching``).

One thread, the caller's, touches the device. Between two chunks of decoding it takes the answers
that have arrived, gives them to their rows, and fills free slots with the next episodes. A row that
waits for its environment stays in its slot, or makes room for another episode until its answer is
there (``slots``), and the others decode on.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jrl.episodes.branching import EpisodeBranches, tree_of
from jrl.episodes.calls import Answer
from jrl.episodes.episode import (
    ABSENT,
    Call,
    CallKind,
    Ending,
    Episode,
    Sampled,
    shared_start,
)
from jrl.episodes.follow import Continue, Next
from jrl.episodes.host import EnvError
from jrl.episodes.slots import DecodeSlots
from jrl.episodes.transcript import Transcript
from jrl.episodes.world import BLOCKED, GRACE_SECONDS, World
from jrl.sampling.row_costs import ChoosePlace, cheapest
from jrl.sampling.rows import Rows
from jrl.system.wait_reports import waiting
from jrl.types import Params, Prompt, StopReason

_LOOK_SECONDS = 0.05
"""Where nothing can be decoded, how long an answer is waited for between two looks at deadlines."""

Newer = Callable[[], tuple[Params, int] | None]
"""() -> newer parameters and their version, or None to keep those in use."""


def keep_weights() -> tuple[Params, int] | None:
    """A ``Newer`` that has none."""
    return None


BY_TIMING = frozenset(
    {"slot_use", "idle_seconds", "parked", "dropped", "read_tokens", "reread_tokens"}
)
"""Counts that depend on when environments answer; nothing that is sampled does."""


class Device(NamedTuple):
    """What samples, and how its rows are used.

    Attributes:
      rows: with weights.
      newer: asked before each chunk, so that weights may change between tokens. Rows keep the keys
        and values of older weights, but for those that are dropped, which are read by the newest.
      choose: where a row waits whose slot another episode could use.
      policy_of: which policy of several a player is, with rows that sample from several.
    """

    rows: Rows
    newer: Newer = keep_weights
    choose: ChoosePlace = cheapest
    policy_of: Callable[[int], int] | None = None


class Strategy(Protocol):
    """Which episodes are to continue."""

    @property
    def left(self) -> int:
        """Episodes that have begun to play, or could, and have neither ended nor paused."""

    def advance(self, scheduler: Scheduler) -> bool:
        """Begins what can begin now; whether anything is left to play."""

    def opened(self, scheduler: Scheduler, episode: Episode) -> None:
        """An episode has opened, or has failed to."""

    def turn_ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """A turn was sampled, about which nobody has been asked."""

    def copied(self, scheduler: Scheduler, call: Call, answer: Answer) -> None:
        """A copy of an environment's state is there, or could not be made."""

    def continues(self, scheduler: Scheduler, episode: Episode, following: Continue) -> None:
        """An episode could sample behind what was appended to it."""

    def ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """An episode has ended; its row and its state are gone."""


# ---------------------------------------------------------------- the scheduler


class Scheduler:
    """The loop that decodes, calls the world and asks a strategy.

    Attributes:
      world: what answers turns.
      slots: who has a slot.
      counts: numbers by name, which add up.
    """

    def __init__(self, device: Device, world: World, strategy: Strategy) -> None:
        self.world, self.counts = world, collections.defaultdict[str, float](float)
        self.slots = DecodeSlots(device.rows, device.choose, self.counts)
        self._device, self._strategy = device, strategy
        self._calls: dict[int, Call] = {}
        self._next_call = 0

    @property
    def rows(self) -> Rows:
        """The decode slots' rows."""
        return self._device.rows

    @property
    def unanswered(self) -> int:
        """Calls under way."""
        return len(self._calls)

    @property
    def opening(self) -> int:
        """Episodes that are being opened."""
        return sum(call.kind is CallKind.OPEN for call in self._calls.values())

    def run(self) -> None:
        """Plays until the strategy has nothing left and every call is answered."""
        seconds = self.world.rules.limits.call_seconds
        with waiting("environments", self._progress, seconds=seconds):
            while self._strategy.advance(self) or self._calls:
                self.slots.fill()
                running = self.slots.running
                if running:
                    self._decode()
                for answer in self._arrived(wait=not running):
                    self._take(answer)
                self._expire()

    def _progress(self) -> str:
        """How far the episodes are; read by another thread."""
        return (
            f"{self._strategy.left} episodes left, {self.counts.get('turns', 0):.0f} turns played, "
            f"{len(self._calls)} calls unanswered"
        )

    # ------------------------------------------------------------ what strategies ask for

    def open(self, episode: Episode) -> None:
        """Opens its environment."""
        call = self._called(CallKind.OPEN, episode)
        self.world.open(call.number, episode, self.rows.prompt_tokens)

    def ask(self, episode: Episode) -> None:
        """Asks the environment about the turn that has ended."""
        call = self._called(CallKind.STEP, episode)
        self.world.step(call.number, episode)

    def copy(self, state: Any, waits: Episode, copy_for: Episode) -> None:
        """Copies a state for an episode, while another or the same one waits."""
        call = self._called(CallKind.FORK, waits, copy_for)
        self.world.fork(call.number, state)

    def close(self, episode: Episode) -> None:
        """Closes its state, if it has one."""
        if episode.state is not ABSENT:
            self._close(episode.state)
            episode.state = ABSENT

    def begin(self, episode: Episode, parent: Episode | None = None) -> None:
        """Lets the policy sample its first turn, behind a node or its own past."""
        self.slots.add(episode, self.world.rules.turn_limit(episode), parent)

    def resume(self, episode: Episode, following: Continue) -> None:
        """Lets the policy sample behind what was appended."""
        episode.clock.turn_began = time.monotonic()
        if following.new_context:
            self.slots.restart(episode, following.limit)
        else:
            self.slots.resume(episode, following.limit)

    def end(self, episode: Episode, stop: StopReason, reason: str = "") -> None:
        """Ends an episode, frees its slot and closes its environment."""
        episode.ending = Ending(stop, reason)
        self.slots.remove(episode)
        self.close(episode)
        self._strategy.ended(self, episode)

    def fail(self, episode: Episode, reason: str, *, timeout: bool = False) -> None:
        """Ends an episode whose environment failed; it counts in no group."""
        self.counts["env_timeouts" if timeout else "env_errors"] += 1
        self.end(episode, StopReason.TIMEOUT if timeout else StopReason.FAILED, reason)

    # ------------------------------------------------------------ decoding

    def _decode(self) -> None:
        """Samples a chunk, and hands ended turns to the strategy."""
        rows, device = self._device.rows, self._device
        if (newer := device.newer()) is not None:
            rows.set_weights(*newer)
        # Where fewer episodes are left than slots, the others are not in use.
        wanted = min(rows.slots, self._strategy.left)
        policies = None
        if device.policy_of is not None:
            policies = [0 if e is None else device.policy_of(e.at.player) for e in self.slots.slots]
        out = rows.decode(wanted, policies)
        self.counts["slot_steps"] += int(out.steps) * wanted
        for row, episode in enumerate(list(self.slots.slots)):
            if episode is None or episode.call is not None:
                continue
            if count := int(out.counts[row]):
                self.counts["slot_tokens"] += count
                tokens, logprobs = np.asarray(out.tokens), np.asarray(out.logprobs)
                measured = None if out.measured is None else np.asarray(out.measured)[row, :count]
                part = tokens[row, :count], logprobs[row, :count], rows.version, measured
                episode.grow(Sampled(*part))
            episode.turn.stop = StopReason(int(out.stop[row]))
            if episode.turn.stop != StopReason.RUNNING:
                self._stopped(episode)

    def _stopped(self, episode: Episode) -> None:
        """A row has stopped: at the end of a summary, which nobody is asked about, or a turn."""
        if episode.pending is not None:
            self.counts["summaries"] += 1
            self._follow(episode, self.world.rules.follow_summary(episode))
            return
        episode.end_turn()
        self.counts["turns"] += 1
        self._strategy.turn_ended(self, episode)

    def _follow(self, episode: Episode, following: Next) -> None:
        if isinstance(following, StopReason):
            self.end(episode, following)
        elif following.summary:
            self.resume(episode, following)  # a part of the turn, whatever the strategy
        else:
            self._strategy.continues(self, episode, following)

    # ------------------------------------------------------------ calls

    def _called(
        self, kind: CallKind, episode: Episode | None, copy_for: Episode | None = None
    ) -> Call:
        now, number = time.monotonic(), self._next_call
        until = now + self.world.rules.limits.call_seconds
        call = Call(number, kind, now, until, episode, copy_for)
        self._next_call, self._calls[number] = number + 1, call
        if episode is not None:
            episode.call = call
        return call

    def _close(self, state: Any) -> None:
        call = self._called(CallKind.CLOSE, None)
        self.world.close(call.number, state)

    def _arrived(self, *, wait: bool) -> Iterator[Answer]:
        """The answers in the inbox; waits a little for the first where nothing else is to do."""
        inbox = self.world.inbox
        if wait and self._calls:
            began, first = time.monotonic(), None
            with contextlib.suppress(queue.Empty):
                first = inbox.get(timeout=_LOOK_SECONDS)
            # What is closed at the end keeps no slot from decoding.
            self.counts["idle_seconds"] += (time.monotonic() - began) * bool(self._strategy.left)
            if first is None:
                return
            yield first
        with contextlib.suppress(queue.Empty):
            while True:
                yield inbox.get_nowait()

    def _take(self, answer: Answer) -> None:
        """Continues the episode that an answer is for."""
        call = self._calls.pop(answer.number, None)
        if call is None:
            return  # of an event loop that was given up
        episode = call.episode
        if episode is None:
            self.counts["env_close_errors"] += bool(answer.error)
            return
        episode.call = None
        if call.kind is CallKind.FORK:
            self._strategy.copied(self, call, answer)
        elif episode.ending is not None:
            # It ended meanwhile; a late init still wants closing.
            if call.kind is CallKind.OPEN and not answer.error:
                self._close(answer.value[0])
        elif call.kind is CallKind.OPEN:
            self._opened(episode, answer)
        else:
            self._answered(episode, answer)

    def _opened(self, episode: Episode, answer: Answer) -> None:
        if answer.error:
            self.fail(episode, answer.error, timeout=answer.timeout)
        else:
            episode.open(*answer.value)
        self._strategy.opened(self, episode)

    def _answered(self, episode: Episode, answer: Answer) -> None:
        self.rows.costs.record_wait(answer.seconds)
        if answer.error:
            self.fail(episode, answer.error, timeout=answer.timeout)
            return
        episode.state, feedback, ids, state_id = answer.value
        try:
            following = self.world.rules.follow_turn(episode, feedback, ids, state_id)
        except EnvError as error:
            self.fail(episode, str(error))
            return
        self._follow(episode, following)

    def _expire(self) -> None:
        """Ends what is past a deadline of its turn or episode, or of a call that cannot answer."""
        now, limits = time.monotonic(), self.world.rules.limits
        for episode in (
            self.slots.waiting() if limits.turn_seconds or limits.episode_seconds else ()
        ):
            late, clock = "", episode.clock
            if limits.episode_seconds and now > clock.began + limits.episode_seconds:
                late = f"the episode took more than {limits.episode_seconds:g} seconds"
            if limits.turn_seconds and now > clock.turn_began + limits.turn_seconds:
                late = f"turn {episode.at.turn} took more than {limits.turn_seconds:g} seconds"
            if late:
                if episode.call is not None:
                    self.world.cancel(episode.call.number)
                self.fail(episode, late, timeout=True)
        overdue = any(now > call.until + GRACE_SECONDS for call in self._calls.values())
        if overdue and self.world.blocked(GRACE_SECONDS):
            # All that the loop was to answer is lost with it.
            for number in list(self._calls):
                self._take(Answer(number, error=BLOCKED, timeout=True))


# ---------------------------------------------------------------- groups of episodes


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
"""Counts of every play, also where they are 0; and those of where rows waited."""
COUNTED_ROWS = ("parked", "dropped", "read_tokens", "reread_tokens")


def play_episodes(
    device: Device,
    world: World,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    *,
    group: int,
    branches: EpisodeBranches | None = None,
) -> Played:
    """``group`` episodes of each prompt.

    What is sampled depends on the weights, the seed of the prompt, the member and what the
    environment answers; not on when it answers, nor on slots.

    Args:
      device: what samples.
      world: what answers.
      prompts: N of them.
      seeds: [N], below 2**64, of each prompt's tokens, and given to the environment.
      group: members of a group.
      branches: how the members of a group branch off one another, with rows that measure what it
        reads; None to play each by itself.

    Returns:
      All episodes; those whose environment failed have the reason why.
    """
    groups = Groups(prompts, seeds, group, branches)
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


class Groups:
    """The strategy of groups of episodes: each continues by itself, until it ends.

    Attributes:
      episodes: all, those of a group one behind another.
      left: of them.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        group: int,
        branches: EpisodeBranches | None = None,
    ) -> None:
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
            self._starts[index] = new[0].opening[: shared_start([e.opening for e in new])]
        for each in new:
            self._queue(scheduler, each, self._starts[index])

    def _queue(self, scheduler: Scheduler, episode: Episode, start: np.ndarray) -> None:
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
        branch = self._branches.take(episode, self.members(episode.problem.group))
        scheduler.counts["branches"] += 1
        # Of the row and of the environment: both are now as they were when the turn began.
        limit = scheduler.world.rules.turn_limit(branch)
        scheduler.slots.fork(branch, episode, limit)
        scheduler.copy(episode.state, waits=episode, copy_for=branch)

    def copied(self, scheduler: Scheduler, call: Call, answer: Answer) -> None:
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
        if source.ending is None:
            scheduler.ask(source)

    def continues(self, scheduler: Scheduler, episode: Episode, following: Continue) -> None:
        """Every episode does."""
        scheduler.resume(episode, following)

    def ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """Lets those begin that nobody left it for."""
        self.left -= 1
        for number in episode.branch.spare:
            scheduler.open(self.members(episode.problem.group)[number])
        episode.branch.spare = ()


def uncopied(answer: Answer) -> str:
    """Why an episode fails that got no copy of its environment."""
    return f"the environment's state cannot be copied: {answer.error}"
