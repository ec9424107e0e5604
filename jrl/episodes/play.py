"""One scheduler of turns: episodes alone, episodes that branch, and searches of both and of text.

A *job* is a row as an episode left it, ids to append and a limit: the policy samples after them.
A *strategy* chooses the episodes to continue: each by itself, some forked from others (``groups``,
``branching``), or the nodes that a search selects (``search``).

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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from jrl.episodes.calls import Answer
from jrl.episodes.episode import (
    ABSENT,
    Ending,
    EnvCall,
    EnvCallKind,
    Episode,
    Sampled,
)
from jrl.episodes.follow import Continue, Next
from jrl.episodes.host import EnvError
from jrl.episodes.slots import DecodeSlots
from jrl.episodes.world import BLOCKED, GRACE_SECONDS, World
from jrl.sampling.row_costs import ChoosePlace, cheapest
from jrl.sampling.rows import Rows
from jrl.system.wait_reports import waiting
from jrl.types import Params, StopReason

_LOOK_SECONDS = 0.05
"""Wait for an answer between two checks of deadlines, when nothing can be decoded."""

Newer = Callable[[], tuple[Params, int] | None]
"""() -> newer parameters and their version, or None to keep those in use."""


def keep_weights() -> tuple[Params, int] | None:
    """A ``Newer`` that never has newer weights."""
    return None


BY_TIMING = frozenset(
    {"slot_use", "idle_seconds", "parked", "dropped", "read_tokens", "reread_tokens"}
)
"""Counts that depend on when environments answer; samples never do."""


class Device(NamedTuple):
    """The row engine of a scheduler, and how its rows are used.

    Attributes:
      rows: with weights.
      newer: called before each chunk, so that weights may change between tokens. Rows keep keys and
        values of older weights, except dropped rows, which are prefilled with the newest.
      choose: keeps, parks or drops a waiting row whose slot another episode could use.
      policy_of: player -> index of its policy, if rows sample from several; None for one policy.
    """

    rows: Rows
    newer: Newer = keep_weights
    choose: ChoosePlace = cheapest
    policy_of: Callable[[int], int] | None = None


class Strategy(Protocol):
    """Policy of a scheduler: the episodes to continue."""

    @property
    def left(self) -> int:
        """Number of episodes that are playing or can start; ended and paused ones do not count."""

    def advance(self, scheduler: Scheduler) -> bool:
        """Starts the episodes that can start; returns whether any is left to play."""

    def opened(self, scheduler: Scheduler, episode: Episode) -> None:
        """Called when an episode has opened, or has failed to."""

    def turn_ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """Called when a turn has been sampled, before the world is asked."""

    def copied(self, scheduler: Scheduler, call: EnvCall, answer: Answer) -> None:
        """Called when a copy of an environment's state has been made, or has failed."""

    def continues(self, scheduler: Scheduler, episode: Episode, following: Continue) -> None:
        """Called when an episode can sample after an appended answer."""

    def ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """Called when an episode has ended; its row and its state are freed."""


# ---------------------------------------------------------------- the scheduler


class Scheduler:
    """The loop that decodes, calls the world and asks a strategy.

    Attributes:
      world: answers turns.
      slots: the episodes in decode slots.
      counts: counters by name, which add up.
    """

    def __init__(self, device: Device, world: World, strategy: Strategy) -> None:
        self.world, self.counts = world, collections.defaultdict[str, float](float)
        self.slots = DecodeSlots(device.rows, device.choose, self.counts)
        self._device, self._strategy = device, strategy
        self._calls: dict[int, EnvCall] = {}
        self._next_call = 0

    @property
    def rows(self) -> Rows:
        """The decode slots' rows."""
        return self._device.rows

    @property
    def opening(self) -> int:
        """Episodes that are being opened."""
        return sum(call.kind is EnvCallKind.OPEN for call in self._calls.values())

    def run(self) -> None:
        """Plays until the strategy has nothing left and every call is answered."""
        seconds = self.world.rules.limits.call_seconds
        with waiting(self.world.name, self._progress, seconds=seconds):
            # Waits for the last closes too: the environment may be shut down after this play.
            while self._strategy.advance(self) or self._calls:
                # Slots first, then a chunk, then answers: an answer that arrives while the device
                # decodes gets its slot before the next chunk.
                with self._compiling_uncounted():
                    self.slots.fill()
                    running = self.slots.running
                    if running:
                        self._decode()
                for answer in self._arrived(wait=not running):
                    self._take(answer)
                self._expire()

    def _progress(self) -> str:
        """Progress of the episodes; read by another thread."""
        return (
            f"{self._strategy.left} episodes left, {self.counts.get('turns', 0):.0f} turns played, "
            f"{len(self._calls)} calls unanswered"
        )

    # ------------------------------------------------------------ what strategies ask for

    def open(self, episode: Episode) -> None:
        """Opens its environment."""
        call = self._called(EnvCallKind.OPEN, episode)
        self.world.open(call.number, episode, self.rows.prompt_tokens)

    def ask(self, episode: Episode) -> None:
        """Asks the environment about the turn that has ended."""
        call = self._called(EnvCallKind.STEP, episode)
        self.world.step(call.number, episode)

    def copy(self, state: Any, waits: Episode, copy_for: Episode) -> None:
        """Copies a state for ``copy_for``, while the episode ``waits`` (perhaps the same) waits."""
        call = self._called(EnvCallKind.FORK, waits, copy_for)
        self.world.fork(call.number, state)

    def close(self, episode: Episode) -> None:
        """Closes its state, if it has one."""
        if episode.state is not ABSENT:
            self._close(episode.state)
            episode.state = ABSENT

    def begin(self, episode: Episode, parent: Episode | None = None) -> None:
        """Starts sampling of the first turn, after a node or its own past."""
        self.slots.add(episode, self.world.rules.turn_limit(episode), parent)

    def resume(self, episode: Episode, following: Continue) -> None:
        """Resumes sampling after an appended answer."""
        episode.clock.turn_began = time.monotonic()
        # The row still holds the old context, which the policy must no longer see.
        if following.new_context:
            self.slots.restart(episode, following.limit)
        else:
            self.slots.resume(episode, following.limit)

    def end(self, episode: Episode, stop: StopReason, reason: str = "") -> None:
        """Ends an episode, frees its slot and closes its environment."""
        episode.ending = Ending(stop, reason)
        # The slot first, so that an episode that the strategy starts now can use it at once.
        self.slots.remove(episode)
        self.close(episode)
        self._strategy.ended(self, episode)

    def fail(self, episode: Episode, reason: str, *, timeout: bool = False) -> None:
        """Ends an episode whose environment failed; it leaves its group."""
        self.counts["env_timeouts" if timeout else "env_errors"] += 1
        self.end(episode, StopReason.TIMEOUT if timeout else StopReason.FAILED, reason)

    # ------------------------------------------------------------ decoding

    @contextlib.contextmanager
    def _compiling_uncounted(self) -> Iterator[None]:
        """Inside, the clocks of episodes stand still where a program is compiled.

        Programs are compiled where a shape comes up first, which can take minutes: a limit of
        seconds would end all episodes under way for what is no fault of theirs.
        """
        began, compiled = time.monotonic(), self.rows.executables
        yield
        if self.rows.executables > compiled:
            self.slots.delay(time.monotonic() - began)

    def _decode(self) -> None:
        """Samples a chunk, and hands ended turns to the strategy."""
        rows, device = self._device.rows, self._device
        if (newer := device.newer()) is not None:
            rows.set_weights(*newer)
        # With fewer episodes left than slots, the other slots are not in use.
        running = min(rows.slots, self._strategy.left)
        policies = None
        # By player, not by row: a slot serves the turns of all players of an episode.
        if device.policy_of is not None:
            policies = [0 if e is None else device.policy_of(e.at.player) for e in self.slots.slots]
        out = rows.decode(running, policies)
        self.counts["slot_steps"] += int(out.steps) * running
        for row, episode in enumerate(list(self.slots.slots)):
            if episode is None or episode.call is not None:
                continue
            # The output is on the host already: one transfer per chunk for all rows.
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
        """Handles a row that has stopped: at the end of a turn, or of a summary."""
        if episode.pending is not None:
            self.counts["summaries"] += 1
            self._follow(episode, self.world.rules.follow_summary(episode))
            return
        # The turn becomes a segment before the world is asked, so that a fork has it, too.
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
        self, kind: EnvCallKind, episode: Episode | None, copy_for: Episode | None = None
    ) -> EnvCall:
        now, number = time.monotonic(), self._next_call
        until = now + self.world.rules.limits.call_seconds
        # Numbers are never reused, so that a late answer matches no other call.
        call = EnvCall(number, kind, now, until, episode, copy_for)
        self._next_call, self._calls[number] = number + 1, call
        if episode is not None:
            episode.call = call
        return call

    def _close(self, state: Any) -> None:
        call = self._called(EnvCallKind.CLOSE, None)
        self.world.close(call.number, state)

    def _arrived(self, *, wait: bool) -> Iterator[Answer]:
        """The answers in the inbox; waits briefly for the first if nothing can be decoded."""
        inbox = self.world.inbox
        # While rows run, the inbox is only polled: waiting would idle the device.
        if wait and self._calls:
            began, first = time.monotonic(), None
            with contextlib.suppress(queue.Empty):
                first = inbox.get(timeout=_LOOK_SECONDS)
            # Waiting for the last closes is not idle time: no slot could decode.
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
            return  # from an event loop that was abandoned
        episode = call.episode
        if episode is None:
            self.counts["env_close_errors"] += bool(answer.error)
            return
        episode.call = None
        # The copy is for another episode, even if the one that waited has ended.
        if call.kind is EnvCallKind.FORK:
            self._strategy.copied(self, call, answer)
        elif episode.ending is not None:
            # It ended meanwhile; a state opened too late must still be closed.
            if call.kind is EnvCallKind.OPEN and not answer.error:
                self._close(answer.value[0])
        elif call.kind is EnvCallKind.OPEN:
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
        # Invalid feedback is a fault of this environment, and ends only this member.
        try:
            following = self.world.rules.follow_turn(episode, feedback, ids, state_id)
        except EnvError as error:
            self.fail(episode, str(error))
            return
        self._follow(episode, following)

    def _expire(self) -> None:
        """Ends episodes past a deadline, and calls that can no longer be answered."""
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
        # ``Calls`` itself answers a late call, unless another call blocks its event loop.
        overdue = any(now > call.until + GRACE_SECONDS for call in self._calls.values())
        if overdue and self.world.blocked(GRACE_SECONDS):
            # All calls under way on that loop are lost with it.
            for number in list(self._calls):
                self._take(Answer(number, error=BLOCKED, timeout=True))


def uncopied(answer: Answer) -> str:
    """The error of an episode that got no copy of its environment."""
    return f"the environment's state cannot be copied: {answer.error}"
