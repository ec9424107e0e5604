"""One member's episode under way, between the device and its environment."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.episodes.calls import run_either
from jrl.episodes.chat import Format
from jrl.episodes.host import (
    EnvError,
    Feedback,
    HostEnv,
    Reply,
    check_feedback,
    check_messages,
)
from jrl.episodes.transcript import Segment, Transcript
from jrl.models.chat_frames import Message
from jrl.models.tokenizer import Tokenizer
from jrl.types import Prompt, StopReason


class Episode:
    """What is known of an episode so far.

    Attributes:
      group: index of its prompt.
      member: number in the group.
      prompt: the problem.
      seed: of the prompt.
      state: the environment's own; None before init has returned and after the end.
      has_state: whether init has returned.
      call: number of the call under way; None while the policy draws.
      call_until: its deadline, seconds of ``time.monotonic``.
      began: when it took its slot, 0 before; ``turn_began`` when the turn did.
      opening: [p] int32, what the policy sees first.
      room: tokens that fit behind the opening; 0 before the group is complete.
      length: tokens behind the opening.
      turn: number of the turn.
      player: who takes it.
      last: why the last turn ended.
      row: its slot, or None.
      stop: why it ended; None before.
      reason: what failed, in words.
      numbers: [t] float32, what was measured of the tokens of the turn that ended last; empty where
        nothing was.
      usual: what its first turn began with, of ``numbers``.
      source: the episode that it branched off; None for one that began by itself.
      shared: segments that it has from there.
      first: number of the turn that it drew first.
      spare: numbers of the members that may branch off it.
      context: number of the context; ``length`` counts the tokens of this one.
      asked: what the environment has answered, the id of its state and the next player, while a
        summary is written; None otherwise.
    """

    def __init__(self, group: int, member: int, prompt: Prompt, seed: int) -> None:
        self.group, self.member, self.prompt, self.seed = group, member, prompt, seed
        self.state: Any = None
        self.has_state = False
        self.call: int | None = None
        self.call_until = self.began = self.turn_began = 0.0
        self.opening = np.zeros(0, np.int32)
        self.room = self.length = self.turn = self.player = 0
        self.last = StopReason.RUNNING
        self.row: int | None = None
        self.stop: StopReason | None = None
        self.reason = ""
        self.numbers = np.zeros(0, np.float32)
        self.usual = 0.0
        self.source: Episode | None = None
        self.shared = self.first = 0
        self.spare: tuple[int, ...] = ()
        self.context = 0
        self.asked: tuple[Sequence[Message], int, int] | None = None
        self._measured: list[np.ndarray] = []
        self._state_id = 0
        self._segments: list[Segment] = []
        self._drawn: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._metrics: dict[str, float] = {}
        self._labels: dict[str, int] = {}

    def open(self, state: Any, opening: np.ndarray, state_id: int) -> None:
        """Takes what ``call_init`` returned."""
        self.state, self.opening, self._state_id = state, opening, state_id
        self.has_state = True

    def grow(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: int,
        measured: np.ndarray | None = None,
    ) -> None:
        """Takes tokens [t] that the policy drew, their log-probabilities, and its version.

        Args:
          tokens: [t] int32.
          logprobs: [t] float32, nats.
          version: the policy's.
          measured: [t] float32, for ``numbers``.
        """
        self.length += len(tokens)
        if measured is not None:
            self._measured.append(measured)
        self._drawn.append((tokens, logprobs, np.full(len(tokens), version, np.int32)))

    def end_turn(self) -> np.ndarray:
        """Makes a segment of what was drawn; returns its tokens."""
        tokens, logprobs, versions = map(np.concatenate, zip(*self._drawn, strict=True))
        self._drawn = []
        if self._measured:
            self.numbers, self._measured = np.concatenate(self._measured), []
        self._segments.append(self._labelled(Segment(tokens, True, logprobs, versions)))
        return tokens

    def _labelled(self, segment: Segment) -> Segment:
        """With the ids of now; a summary is a turn of its own, which the environment never sees."""
        turn, state = self.turn + self.context + (self.asked is not None), self._state_id
        return segment._replace(
            turn=turn, step=turn, state=state, context=self.context, player=self.player
        )

    def ask_summary(
        self, ids: Sequence[int], messages: Sequence[Message], state_id: int, player: int
    ) -> None:
        """Appends what asks for a summary, in place of the answer; ``player`` is next then."""
        self._outside(ids)
        self.asked = messages, state_id, player

    def end_summary(self) -> None:
        """Begins the next context, with the summary that was drawn as what the policy said first.

        The ids are those that were drawn; there they are nobody's, since they are trained where
        they were drawn. The answer that they made room for comes next.
        """
        ids = self.end_turn()
        self.context, self.length, self.asked = self.context + 1, 0, None
        self._outside(ids)

    def _outside(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends what nobody drew, as a part of the turn."""
        self._segments.append(self._labelled(Segment(np.array(ids, np.int32), False)))
        self.length += len(ids)

    def past(self) -> np.ndarray:
        """[t] int32, all that lies behind the opening in this context, drawn or not."""
        return np.concatenate([s.tokens for s in self._segments if s.context == self.context])

    def said(self) -> np.ndarray:
        """[t] int32, the tokens of the turn that ended last."""
        return self._segments[-1].tokens

    def pay(self, feedback: Feedback) -> None:
        """Puts the turn's reward at its last token, and adds up the metrics.

        Points for earlier turns are added at theirs.

        Raises:
          EnvError: there are points for more turns than were taken before this one.
        """
        assert isinstance(feedback.reward, tuple)
        own: dict[str, np.ndarray] = {}
        for name, given in feedback.labels.items():
            if isinstance(given, int):
                self._labels[name] = given
            else:
                own[name] = np.array(given, np.int32)
        self._segments[-1] = self._segments[-1]._replace(reward=feedback.reward, labels=own)
        # What was drawn last in a context that another one follows is a summary, and no turn.
        pairs = enumerate(itertools.pairwise(self._segments))
        places = [i for i, (a, b) in pairs if a.drawn and a.context == b.context]
        if len(feedback.earlier) > len(places):
            said = f"points for {len(feedback.earlier)} earlier turns"
            raise EnvError(f"{said}; {len(places)} were taken before this one")
        for i, points in zip(places, feedback.earlier, strict=False):
            before = self._segments[i].reward or (0.0,) * len(feedback.reward)
            assert isinstance(points, tuple)
            total = tuple(a + b for a, b in zip(before, points, strict=True))
            self._segments[i] = self._segments[i]._replace(reward=total)
        for name, value in feedback.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        self._metrics["success"] = float(feedback.success)

    def answer(self, ids: Sequence[int], state_id: int, player: int = 0) -> None:
        """Appends the environment's answer and begins the next turn, of this player."""
        self._outside(ids)
        self.turn += 1
        self.player = player
        self._state_id = state_id

    def branch(self, other: Episode) -> None:
        """Gives another member the past of the turn that has just ended, up to that turn."""
        other.usual, other.source, other.shared = self.usual, self, len(self._segments) - 1
        other.first = self.turn
        self._give_past(other)
        other.length -= len(other._segments.pop().tokens)

    def continued(self, member: int) -> Episode:
        """An episode of its own that begins behind the last answer, with all that was so far."""
        other = Episode(self.group, member, self.prompt, self.seed)
        self._give_past(other)
        return other

    def _give_past(self, other: Episode) -> None:
        other.opening, other.room, other.length = self.opening, self.room, self.length
        other.turn, other.player, other._state_id = self.turn, self.player, self._state_id
        other._segments = list(self._segments)
        other._metrics, other._labels = dict(self._metrics), dict(self._labels)

    def origin(self, index: int) -> tuple[int, int]:
        """Names a segment by the member that came to it first, and its index there."""
        episode = self
        while index < episode.shared:
            assert episode.source is not None
            episode = episode.source
        return episode.member, index

    def transcript(self) -> Transcript:
        """The episode as it is."""
        return Transcript(
            prompt=self.prompt,
            member=self.member,
            opening=self.opening,
            segments=tuple(self._segments),
            stop=StopReason.FAILED if self.stop is None else self.stop,
            episode=self.member,
            metrics=self._metrics,
            reason=self.reason,
            labels=self._labels,
        )


# ---------------------------------------------------------------- in the loop of calls


async def call_init(
    env: HostEnv, chat: Format, prompt: Prompt, seed: int, longest: int
) -> tuple[Any, np.ndarray, int]:
    """Opens an environment: its state, the ids of the opening, and the id of the state.

    Args:
      env: the environment.
      chat: how its messages become ids.
      prompt: the problem.
      seed: of the group.
      longest: tokens of an opening.

    Raises:
      EnvError: what it returned cannot be used.
    """
    state, messages = _pair(await run_either(env.init, prompt, seed), "init", "(state, messages)")
    try:
        messages = check_messages(messages, env.limits)
        opening = np.array(chat.opening(messages), np.int32)
        if not 1 <= len(opening) <= longest:
            raise EnvError(f"opens with {len(opening)} tokens; the limit of a prompt is {longest}")
    except BaseException:
        await run_either(env.close, state)  # nobody else learns of the state
        raise
    return state, opening, _state_id(None, messages)


async def call_step(
    env: HostEnv, chat: Format, tokenizer: Tokenizer, state: Any, turn: int, tokens: Any, cut: bool
) -> tuple[Any, Feedback, list[int], int]:
    """Tells an environment what was said: its state, the feedback, the answer's ids, a state id.

    Args:
      env: the environment.
      chat: how its messages become ids.
      tokenizer: turns the tokens into text.
      state: the environment's own.
      turn: number of the turn.
      tokens: [t] int32, what the policy drew.
      cut: whether a limit of tokens ended the turn.

    Raises:
      EnvError: what it returned cannot be used.
    """
    ids = tokens.tolist()
    text, raw = tokenizer.decode(ids), tokenizer.decode(ids, skip_special=False)
    reply = Reply(text=text, raw=raw, tokens=tokens, turn=turn, cut=cut)
    state, value = _pair(await run_either(env.step, state, reply), "step", "(state, Feedback)")
    feedback = check_feedback(value, env.limits, len(env.parts), env.players)
    feedback = feedback._replace(labels=_labels(env, feedback, tokenizer, ids))
    answer = (
        [] if feedback.done else chat.following(feedback.messages, closed=not cut, first=turn == 0)
    )
    return state, feedback, answer, _state_id(feedback.state_key, feedback.messages)


def _labels(
    env: HostEnv, feedback: Feedback, tokenizer: Tokenizer, ids: Sequence[int]
) -> dict[str, int | list[int]]:
    """The labels of a turn, those of characters as those of its tokens.

    A token has the label of the first character that it adds to the text; if it adds none, -1.

    Raises:
      EnvError: a label that the environment does not declare, or not one for each character.
    """
    found: dict[str, int | list[int]] = {}
    for name, given in feedback.labels.items():
        if name not in (env.extras.labels if isinstance(given, int) else env.extras.token_labels):
            raise EnvError(f"label {name} is not declared by the environment")
        if isinstance(given, int):
            found[name] = given
            continue
        begins = [len(tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
        if len(given) != begins[-1]:
            raise EnvError(f"label {name}: {len(given)} numbers for {begins[-1]} characters")
        found[name] = [given[begin] if begin < begins[-1] else -1 for begin in begins[:-1]]
    return found


def shared_start(openings: Sequence[np.ndarray]) -> int:
    """How many tokens all openings have in common from the start."""
    length = min(map(len, openings))
    same = [len({int(opening[i]) for opening in openings}) == 1 for i in range(length)]
    return same.index(False) if False in same else length


def _pair(value: Any, name: str, form: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise EnvError(f"{name} returned {value!r:.60}, not {form}")
    return value[0], value[1]


def _state_id(key: Any, messages: Sequence[Message]) -> int:
    """A number of 31 bits for a state: by its name, or by what is seen in it."""
    seen = repr(key) if key is not None else "\0".join(m["content"] for m in messages)
    return zlib.crc32(seen.encode("utf-8", "replace")) & 0x7FFFFFFF
