"""One member's episode under way, between the device and its environment."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.episodes.host import EnvError, Feedback
from jrl.episodes.transcript import Segment, Transcript, turns_of
from jrl.models.chat_frames import Message
from jrl.sampling.admission import RowStart
from jrl.sampling.rows import SuspendedRow
from jrl.system.float32 import fits_float32
from jrl.types import Prompt, StopReason

ABSENT: Any = object()
"""The state of an episode that has not opened or has ended; an environment's own may be None."""
_CONTEXT_STRIDE = 1 << 20
"""Greater than the members of a group and the nodes of a tree."""


class Position(NamedTuple):
    """Position of an episode, which a fork copies.

    Attributes:
      turn: number of the turn.
      player: index of the player who takes it.
      context: number of the context.
      length: tokens after the opening in this context.
      state_id: of the environment's state.
    """

    turn: int = 0
    player: int = 0
    context: int = 0
    length: int = 0
    state_id: int = 0


class Sampled(NamedTuple):
    """Tokens of one chunk of decoding.

    Attributes:
      tokens: [t] int32.
      logprobs: [t] float32, nats.
      version: of the policy.
      measured: [t] float32, a measure of each distribution, such as its entropy; None for none.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    version: int
    measured: np.ndarray | None = None


@dataclasses.dataclass
class TurnState:
    """The current turn, and the end of the last one.

    Attributes:
      parts: sampled so far.
      stop: why the last one ended.
      measured: [t] float32 of the last one's tokens; empty if nothing was measured.
    """

    parts: list[Sampled] = dataclasses.field(default_factory=list)
    stop: StopReason = StopReason.RUNNING
    measured: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))


class Ending(NamedTuple):
    """End of an episode; ``reason`` names the failure in words, "" without one."""

    stop: StopReason
    reason: str = ""


class Pending(NamedTuple):
    """An answer that waits until the policy has written the summary of a full context.

    Attributes:
      messages: the environment's.
      state_id: of its state.
      player: index of the next player.
    """

    messages: Sequence[Message]
    state_id: int
    player: int


@dataclasses.dataclass
class Clock:
    """Seconds of ``time.monotonic``; waiting for a slot and compiling do not count.

    Attributes:
      began: when the episode first took a slot; 0 before.
      turn_began: when its turn did.
    """

    began: float = 0.0
    turn_began: float = 0.0


@dataclasses.dataclass
class RowState:
    """The row of an episode on the device, in a slot or outside of it.

    Attributes:
      row: its slot, or None.
      suspended: a copy of its row outside the slots, or None.
      runs: whether that copy can run unchanged once it is in a slot.
      computed: tokens of the opening and this context whose keys and values were computed, for it
        or for the episode that it was forked from. An existing row or copy holds them all.
      ready: time from which it could use a slot; None if it cannot.
      limit: tokens after the opening at which the next turn ends.
      parent: the node that it continues; None if it has a row of its own.
      children: episodes that continue it and have not begun.
    """

    row: int | None = None
    suspended: SuspendedRow | None = None
    runs: bool = False
    computed: int = 0
    ready: float | None = None
    limit: int = 0
    parent: Episode | None = None
    children: int = 0


@dataclasses.dataclass
class Branch:
    """Relation of an episode to others of a branching group.

    Attributes:
      source: the episode that it was forked from; None for a root.
      shared: segments that it has from there.
      first: number of the turn that it sampled first.
      usual: what is measured at the beginning of the episode's first turn.
      spare: numbers of the members that may leave it.
    """

    source: Episode | None = None
    shared: int = 0
    first: int = 0
    usual: float = 0.0
    spare: tuple[int, ...] = ()


class Problem(NamedTuple):
    """The problem of an episode.

    Attributes:
      group: index of the prompt.
      prompt: the problem.
      seed: below 2**64, of the prompt's tokens.
    """

    group: int
    prompt: Prompt
    seed: int


class Totals(NamedTuple):
    """Totals of an environment's feedback: metrics and labels by name."""

    metrics: dict[str, float]
    labels: dict[str, int]


class EnvCallKind(enum.Enum):
    """Kind of a call to an environment."""

    OPEN = "open"
    STEP = "step"
    FORK = "fork"
    CLOSE = "close"


class EnvCall(NamedTuple):
    """A call that has not been answered.

    Attributes:
      number: that names it in its answer.
      kind: what was asked for.
      since: seconds of ``time.monotonic``.
      until: its deadline, in the same.
      episode: that waits for it; None for a close.
      copy_for: of a fork, the episode that gets the copy.
    """

    number: int
    kind: EnvCallKind
    since: float
    until: float
    episode: Episode | None = None
    copy_for: Episode | None = None


class Episode:
    """The state of an episode; a node of a search is a paused one.

    Attributes:
      problem: the group, its prompt and its seed.
      member: number in the group, or of the node in its tree; its tokens are keyed by it.
      state: the environment's own, or ``ABSENT``.
      opening: [p] int32, the tokens that the policy sees first.
      room: tokens that fit after the opening; 0 before the group is complete.
      at: its current position.
      segments: all after the opening.
      totals: metrics and labels.
      turn: the current one.
      pending: the waiting answer while a summary is written; None otherwise.
      call: the one that it waits for; None while the policy samples.
      ending: None before the end.
      clock: for limits of time.
      row_state: its row.
      branch: the episode that it was forked from, and those that may fork from it.
    """

    def __init__(self, group: int, member: int, prompt: Prompt, seed: int) -> None:
        self.problem, self.member = Problem(group, prompt, seed), member
        # Not None: an environment's own state may be None, and still has to be closed.
        self.state = ABSENT
        self.opening, self.room = np.zeros(0, np.int32), 0
        self.at, self.segments, self.totals = Position(), list[Segment](), Totals({}, {})
        self.turn, self.clock, self.row_state, self.branch = (
            TurnState(),
            Clock(),
            RowState(),
            Branch(),
        )
        self.pending: Pending | None = None
        self.call: EnvCall | None = None
        self.ending: Ending | None = None

    def open(self, state: Any, opening: np.ndarray, state_id: int) -> None:
        """Sets the state and the opening that the environment returned."""
        self.state, self.opening = state, opening
        self.at = self.at._replace(state_id=state_id)

    @property
    def stop(self) -> StopReason | None:
        """Reason of its end; None before."""
        return None if self.ending is None else self.ending.stop

    @property
    def success(self) -> bool:
        """Whether the environment reported success at the last turn, and nothing failed."""
        alive = self.stop is None or self.stop < StopReason.FAILED
        return alive and self.totals.metrics.get("success", 0.0) > 0

    # ------------------------------------------------------------ turns

    def grow(self, sampled: Sampled) -> None:
        """Appends sampled tokens to the current turn."""
        self.at = self.at._replace(length=self.at.length + len(sampled.tokens))
        self.turn.parts.append(sampled)

    def end_turn(self) -> np.ndarray:
        """Makes a segment of the sampled tokens; returns them, [t] int32."""
        parts = self.turn.parts
        tokens, logprobs = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
        # By chunk: weights may be replaced between two chunks of one turn, and each token is
        # corrected by the version that drew it.
        versions = np.concatenate([np.full(len(p.tokens), p.version, np.int32) for p in parts])
        measured = [p.measured for p in parts if p.measured is not None]
        self.turn.parts = []
        self.turn.measured = np.concatenate(measured) if measured else np.zeros(0, np.float32)
        self.segments.append(self._labelled(Segment(tokens, True, logprobs, versions)))
        # The row has computed all that it sampled.
        self.row_state.computed = len(self.opening) + self.at.length
        return tokens

    def _labelled(self, segment: Segment) -> Segment:
        """The segment with its turn, state, context and player; a summary counts as a turn."""
        at = self.at
        # Every earlier context ended in one summary, which counts as a turn of its own here.
        turn = at.turn + at.context + (self.pending is not None)
        return segment._replace(
            turn=turn, step=turn, state=at.state_id, context=at.context, player=at.player
        )

    def last_turn(self) -> np.ndarray:
        """[t] int32, the tokens of the turn that ended last."""
        return self.segments[-1].tokens

    def answer(
        self,
        ids: Sequence[int],
        state_id: int,
        player: int = 0,
        messages: Sequence[Message] = (),
    ) -> None:
        """Appends the environment's answer, if there is any, and begins this player's turn."""
        # An empty answer makes no segment: two adjacent turns stay two segments without a token
        # between them.
        if len(ids):
            self._append(ids)
            self.segments[-1] = self.segments[-1]._replace(messages=tuple(messages))
        self.at = self.at._replace(turn=self.at.turn + 1, player=player, state_id=state_id)

    def _append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends tokens that were not sampled, as a part of the turn."""
        self.segments.append(self._labelled(Segment(np.array(ids, np.int32), False)))
        self.at = self.at._replace(length=self.at.length + len(ids))

    def ask_summary(self, ids: Sequence[int], pending: Pending) -> None:
        """Appends the request for a summary, in place of the answer."""
        self._append(ids)
        self.pending = pending

    def end_summary(self) -> None:
        """Begins the next context with the sampled summary, before the pending answer.

        The ids are the sampled ones. In the new context they are not trained on, because they are
        trained on where they were sampled.
        """
        ids = self.end_turn()
        # The turn ends before the context changes, or the summary would be labelled with the
        # context that it opens.
        self.at = self.at._replace(context=self.at.context + 1, length=0)
        self.pending = None
        self._append(ids)
        self.row_state.computed = len(self.opening) + len(ids)

    def past(self) -> np.ndarray:
        """[t] int32, all tokens after the opening in this context, sampled or not."""
        parts = [s.tokens for s in self.segments if s.context == self.at.context]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def unread(self) -> list[int]:
        """The end of ``past`` after the first ``row_state.computed`` tokens of the row."""
        return self.past()[max(self.row_state.computed - len(self.opening), 0) :].tolist()

    def row_start(self, limit: int) -> RowStart:
        """Start of a row of the episode.

        Args:
          limit: tokens after the opening at which it stops.
        """
        # A row's draws follow from its number and their places, so each context is another row.
        number = self.member + self.at.context * _CONTEXT_STRIDE
        return RowStart(tuple(self.opening.tolist()), self.problem.seed, number, limit)

    # ------------------------------------------------------------ rewards

    def pay(self, feedback: Feedback) -> None:
        """Puts the turn's reward at its last token, and sums the metrics.

        Rewards for earlier turns are added at the last tokens of those.

        Raises:
          EnvError: there are points for more turns than were taken before this one, or all of them
            together are beyond float32.
        """
        assert isinstance(feedback.reward, tuple)
        token_labels: dict[str, np.ndarray] = {}
        for name, value in feedback.labels.items():
            if isinstance(value, int):
                self.totals.labels[name] = value
            else:
                token_labels[name] = np.array(value, np.int32)
        self.segments[-1] = self.segments[-1]._replace(reward=feedback.reward, labels=token_labels)
        turns = turns_of(self.segments)[:-1]
        if len(feedback.earlier) > len(turns):
            excess = f"points for {len(feedback.earlier)} earlier turns"
            raise EnvError(f"{excess}; {len(turns)} were taken before this one")
        # Fewer rewards than turns are no error: the remaining turns get none.
        for i, points in zip(turns, feedback.earlier, strict=False):
            before = self.segments[i].reward or (0.0,) * len(feedback.reward)
            assert isinstance(points, tuple)
            total = tuple(a + b for a, b in zip(before, points, strict=True))
            self.segments[i] = self.segments[i]._replace(reward=total)
        for part in zip(*(s.reward for s in self.segments if s.reward), strict=True):
            if not fits_float32(sum(part)):
                raise EnvError(
                    f"the rewards of its turns add up to {sum(part):g}, infinite in float32"
                )
        metrics = self.totals.metrics
        for name, number in feedback.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + number
            if not fits_float32(metrics[name]):
                raise EnvError(f"metric {name} adds up to {metrics[name]:g}, infinite in float32")
        # Replaced, not summed: only the last turn decides success.
        metrics["success"] = float(feedback.success)

    # ------------------------------------------------------------ forks

    def branch_off(self, other: Episode) -> None:
        """Gives another member the past of the turn that has just ended, without that turn."""
        shared = len(self.segments) - 1
        self._give_past(other)
        # The turn that has just ended is not shared: the branch samples another one in its place.
        length = self.at.length - len(other.segments.pop().tokens)
        other.at = other.at._replace(length=length)
        other.branch = Branch(self, shared, self.at.turn, self.branch.usual, other.branch.spare)
        # The source has computed everything before the turn, whether or not a copy is kept.
        other.row_state.computed = len(self.opening) + length

    def continued(self, member: int) -> Episode:
        """A new episode with the same past, which continues after the last answer."""
        other = Episode(self.problem.group, member, self.problem.prompt, self.problem.seed)
        self._give_past(other)
        return other

    def _give_past(self, other: Episode) -> None:
        other.opening, other.room, other.at = self.opening, self.room, self.at
        # Segments are immutable and shared; the list is not, since both episodes append to theirs.
        other.segments = list(self.segments)
        other.totals = Totals(dict(self.totals.metrics), dict(self.totals.labels))

    def origin(self, index: int) -> tuple[int, int]:
        """(member that sampled a segment first, its index there): names a shared segment."""
        episode = self
        # A branch of a branch may share a segment with its source's source.
        while index < episode.branch.shared:
            assert episode.branch.source is not None
            episode = episode.branch.source
        return episode.member, index

    def transcript(self) -> Transcript:
        """The episode as it is."""
        return Transcript(
            prompt=self.problem.prompt,
            member=self.member,
            opening=self.opening,
            segments=tuple(self.segments),
            stop=StopReason.FAILED if self.stop is None else self.stop,
            episode=self.member,
            metrics=self.totals.metrics,
            reason="" if self.ending is None else self.ending.reason,
            labels=self.totals.labels,
        )
