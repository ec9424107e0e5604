"""The end of a turn: one function for single episodes, branches and searches.

    step = rules.follow_turn(episode, feedback, ids, state_id)

The turn gets its reward; then the episode ends, continues after the environment's answer, or writes
a summary because the answer no longer fits into its context.
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
      limit: tokens after the opening, in the context, at which it stops.
      summary: whether it samples a summary instead of a turn.
      new_context: whether a context has just begun, which needs a new row.
    """

    limit: int
    summary: bool = False
    new_context: bool = False


Next = Continue | StopReason
"""An episode continues, or ends."""


class TurnRules(NamedTuple):
    """Limits of episodes, and the order of players.

    Attributes:
      limits: of an episode.
      players: number of players, who take turns.
      done: stop reason of an episode that its environment calls done.
      chat: encodes messages as ids; None if no environment answers.
      summary: the message that asks for a summary.
      reserve: tokens that every context but the last keeps for a summary and its request.
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
        """Adds the rewards to the turn that has ended, and appends the answer to the episode.

        Args:
          episode: changed in place.
          feedback: the environment's.
          ids: of its answer.
          state_id: of its state.

        Returns:
          How the policy continues, or why the episode has ended.

        Raises:
          EnvError: the feedback rewards turns that were not taken.
        """
        cut, at = episode.turn.stop == StopReason.LENGTH, episode.at
        episode.pay(feedback)
        # Before the check of room: an episode may fill its context exactly.
        if feedback.done:
            return StopReason.LENGTH if feedback.cut else self.done
        # A turn cut at the end of the last context left no room for an answer.
        if cut and self._last_context(episode) and self._full(episode):
            return StopReason.LENGTH
        # Before the answer is used: after the last turn it is not appended.
        if at.turn + 1 >= self.limits.turns:
            return StopReason.TURNS
        player = (at.player + 1) % self.players if feedback.next is None else feedback.next
        if not self._full(episode, ids):
            episode.answer(ids, state_id, player, feedback.messages)
            return Continue(self.turn_limit(episode))
        # Answers are never cut: one that leaves no room for a turn is not appended.
        if self._last_context(episode):
            return StopReason.LENGTH
        assert self.chat is not None
        # The answer is kept on the host: it opens the next context, after the summary.
        request = summary_request(self.chat, self.summary, closed=not cut, first=at.turn == 0)
        episode.ask_summary(request, Pending(feedback.messages, state_id, player))
        return Continue(episode.at.length + self.limits.summary_tokens, summary=True)

    def follow_summary(self, episode: Episode) -> Next:
        """Begins the next context with the summary and the pending answer, if a turn still fits."""
        pending, closed = episode.pending, episode.turn.stop != StopReason.LENGTH
        assert pending is not None
        assert self.chat is not None
        episode.end_summary()
        # The answer is encoded again: in this row it follows the summary, not the turn.
        ids = self.chat.following(pending.messages, closed=closed)
        if self._full(episode, ids):
            return StopReason.LENGTH
        episode.answer(ids, pending.state_id, pending.player, pending.messages)
        return Continue(self.turn_limit(episode), new_context=True)

    # ------------------------------------------------------------ room

    def turn_limit(self, episode: Episode) -> int:
        """Tokens after the opening at which the next turn ends."""
        # turn_tokens = 0: a turn may fill the context.
        most, room = self.limits.turn_tokens, self.usable(episode)
        return min(room, episode.at.length + most) if most else room

    def usable(self, episode: Episode) -> int:
        """Tokens of a context, minus those reserved for its summary."""
        # The last context needs no summary.
        return episode.room - (0 if self._last_context(episode) else self.reserve)

    def _full(self, episode: Episode, ids: Sequence[int] = ()) -> bool:
        """Whether no token fits after these ids in the same context."""
        return episode.at.length + len(ids) >= self.usable(episode)

    def _last_context(self, episode: Episode) -> bool:
        return episode.at.context + 1 >= self.limits.contexts


def rules_of(env: HostEnv, chat: Format) -> TurnRules:
    """The rules of an environment's episodes."""
    reserve = summary_room(env, chat)
    return TurnRules(env.limits, env.players, StopReason.DONE, chat, env.chat.summary, reserve)


def summary_request(chat: Format, text: str, *, closed: bool, first: bool) -> list[int]:
    """The ids of the message that asks for a summary; see ``Format.following``."""
    message: Message = {"role": "user", "content": text}
    return chat.following([message], closed=closed, first=first)


def summary_room(env: HostEnv, chat: Format) -> int:
    """Tokens that every context but the last keeps for a summary and its request."""
    if env.limits.contexts == 1:
        return 0
    ways = itertools.product((True, False), repeat=2)
    lengths = [
        len(summary_request(chat, env.chat.summary, closed=closed, first=first))
        for closed, first in ways
    ]
    return env.limits.summary_tokens + max(lengths)
