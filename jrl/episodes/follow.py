"""The end of a turn: one function for single episodes, branches and searches.

    step = rules.follow_turn(episode, feedback, ids, state_id)

A turn is paid; then the episode ends, continues behind the environment's answer, or writes a
summary because the answer no longer fits into its context.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jrl.episodes.chat import Format
from jrl.episodes.episode import Episode, Pending
from jrl.episodes.host import Feedback, HostEnv, Limits
from jrl.models.chat_frames import Message
from jrl.types import StopReason


class Continue(NamedTuple):
    """The policy samples again.

    Attributes:
      limit: tokens behind the opening, in the context, at which it stops.
      summary: whether it samples a summary, and not a turn.
      new_context: whether a context has just begun, which takes a row of its own.
    """

    limit: int
    summary: bool = False
    new_context: bool = False


Next = Continue | StopReason
"""An episode continues, or ends."""


class Rules(NamedTuple):
    """Limits of episodes, and who is next.

    Attributes:
      limits: of an episode.
      players: take turns.
      done: why an episode has ended that its environment calls done.
      chat: how messages become ids; None where no environment answers.
      summary: the message that asks for a summary.
      reserve: tokens that every context but the last keeps for a summary and what asks for it.
    """

    limits: Limits
    players: int = 1
    done: StopReason = StopReason.DONE
    chat: Format | None = None
    summary: str = ""
    reserve: int = 0

    # ------------------------------------------------------------ after a turn

    def follow_turn(
        self, episode: Episode, feedback: Feedback, ids: Sequence[int], state_id: int
    ) -> Next:
        """Pays the turn that has ended, and appends what the policy sees next.

        Args:
          episode: changed in place.
          feedback: the environment's.
          ids: of its answer.
          state_id: of its state.

        Raises:
          EnvError: the feedback pays turns that were not taken.
        """
        cut, at = episode.turn.stop == StopReason.LENGTH, episode.at
        episode.pay(feedback)
        # Before the room is looked at: an episode may fill it exactly.
        if feedback.done:
            return StopReason.LENGTH if feedback.cut else self.done
        # A turn that was cut by the room itself left none to be answered in.
        if cut and self._last_context(episode) and self._full(episode):
            return StopReason.LENGTH
        # Before the answer is looked at: behind the last turn nothing is said any more.
        if at.turn + 1 >= self.limits.turns:
            return StopReason.TURNS
        player = (at.player + 1) % self.players if feedback.next is None else feedback.next
        if not self._full(episode, ids):
            episode.answer(ids, state_id, player, feedback.messages)
            return Continue(self.turn_limit(episode))
        # Nothing is cut: an answer after which the policy could not speak is not given.
        if self._last_context(episode):
            return StopReason.LENGTH
        assert self.chat is not None
        # The answer waits in the host's memory: it opens the next context, behind the summary.
        request = summary_request(self.chat, self.summary, closed=not cut, first=at.turn == 0)
        episode.ask_summary(request, Pending(feedback.messages, state_id, player))
        return Continue(episode.at.length + self.limits.summary_tokens, summary=True)

    def follow_summary(self, episode: Episode) -> Next:
        """Begins the next context, which the summary and the answer must leave room in."""
        pending, closed = episode.pending, episode.turn.stop != StopReason.LENGTH
        assert pending is not None
        assert self.chat is not None
        episode.end_summary()
        # The answer is framed anew: in this row it follows the summary, not the turn.
        ids = self.chat.following(pending.messages, closed=closed)
        if self._full(episode, ids):
            return StopReason.LENGTH
        episode.answer(ids, pending.state_id, pending.player, pending.messages)
        return Continue(self.turn_limit(episode), new_context=True)

    # ------------------------------------------------------------ room

    def turn_limit(self, episode: Episode) -> int:
        """Tokens behind the opening at which the turn ends that is about to be sampled."""
        # 0 for what is left: a turn may then fill the context.
        most, room = self.limits.turn_tokens, self.usable(episode)
        return min(room, episode.at.length + most) if most else room

    def usable(self, episode: Episode) -> int:
        """Tokens of a context, less those that its summary needs."""
        # The last context is followed by none, and may be filled to its end.
        return episode.room - (0 if self._last_context(episode) else self.reserve)

    def _full(self, episode: Episode, ids: Sequence[int] = ()) -> bool:
        """Whether the policy could not speak behind these ids in the same context."""
        return episode.at.length + len(ids) >= self.usable(episode)

    def _last_context(self, episode: Episode) -> bool:
        return episode.at.context + 1 >= self.limits.contexts


def rules_of(env: HostEnv, chat: Format) -> Rules:
    """The rules of an environment's episodes."""
    reserve = summary_room(env, chat)
    return Rules(env.limits, env.players, StopReason.DONE, chat, env.chat.summary, reserve)


def summary_request(chat: Format, text: str, *, closed: bool, first: bool) -> list[int]:
    """The ids that ask for a summary; see ``Format.following``."""
    message: Message = {"role": "user", "content": text}
    return chat.following([message], closed=closed, first=first)


def summary_room(env: HostEnv, chat: Format) -> int:
    """Tokens that every context but the last keeps for a summary and what asks for it."""
    if env.limits.contexts == 1:
        return 0
    ways = itertools.product((True, False), repeat=2)
    lengths = [
        len(summary_request(chat, env.chat.summary, closed=closed, first=first))
        for closed, first in ways
    ]
    return env.limits.summary_tokens + max(lengths)
