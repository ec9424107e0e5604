"""The policy as an episode calls it: turns of one or several roles, and rewards for them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jrl.episodes.env_error import FormError
from jrl.episodes.host import EnvError, Feedback, Reply, reward_parts
from jrl.models.chat_frames import Message
from jrl.types import NOTHING

MessagesLike = str | Message | Sequence[Message]
"""A text, which becomes a message of the user, one message, or several."""

_F = TypeVar("_F", bound=Callable[..., Any])


class Outcome(NamedTuple):
    """The end of an episode, where its reward alone does not say all.

    Attributes:
      rewards: of the last turn of each role: a number for all of them (or one for each reward
        part), or a dict by role. None adds nothing to what ``Policy.reward`` recorded.
      success: whether it ended well; None where that is so if the first role's rewards of the
        episode, in the first reward part, add up to 1 or more.
      metrics: numbers by name, added to those of ``Policy.record``.
      labels: of the episode or of the last turn's characters, as in ``Feedback.labels``.
      cut: whether it ended only because a limit of tokens ended the last turn (``Reply.cut``); it
        then counts as truncated.
    """

    rewards: Any = None
    success: bool | None = None
    metrics: Mapping[str, float] = NOTHING
    labels: Mapping[str, int | Sequence[int]] = NOTHING
    cut: bool = False


def roles(*names: str) -> Callable[[_F], _F]:
    """Names the roles of an episode, the one that takes the first turn first.

    Raises:
      TypeError: a name is no text, as where the decorator is written without its names.

    >>> @roles("writer", "critic")
    ... async def episode(policy, prompt): ...
    >>> episode.roles
    ('writer', 'critic')
    """
    if not all(isinstance(name, str) for name in names):
        raise TypeError('write the names of the roles as texts, such as @roles("writer", "critic")')

    def mark(episode: _F) -> _F:
        episode.roles = names  # type: ignore[attr-defined]
        return episode

    return mark


class Policy:
    """The policy as an episode calls it.

    All roles speak in one conversation: each reads what was said before, and messages are appended
    to it. Turns follow one another; await them in the episode itself, not in tasks of its own.

    Attributes:
      roles: their names.
    """

    def __init__(self, role_names: tuple[str, ...], parts: int) -> None:
        self.roles, self._parts = role_names, parts
        self._players: list[int] = []  # who took each turn
        self._task: asyncio.Task[Any] | None = None  # of the call under way
        self._rewards: dict[int, tuple[float, ...]] = {}  # by turn, since the last feedback
        self._metrics: dict[str, float] = {}
        self._labels: dict[str, Any] = {}
        self._total = 0.0  # of the first role, for success

    @property
    def turns(self) -> int:
        """The number of turns taken, of all roles."""
        return len(self._players)

    async def __call__(self, messages: MessagesLike, *, state_key: Any = None) -> Reply:
        """A turn of the first role.

        Args:
          messages: said to the policy next. They do not repeat the conversation so far.
          state_key: names the state of the environment, for methods that compare the turns taken
            in one state; None for the text of ``messages``.

        Raises:
          EnvError: messages repeat the policy's turns, or the turn is awaited in another task.
        """
        return await self.role(self.roles[0], messages, state_key=state_key)

    def __getitem__(self, role: str) -> Callable[..., Coroutine[Any, Any, Reply]]:
        """The turns of a role: ``await policy["critic"](messages)``."""
        self._index(role)
        return functools.partial(self.role, role)

    async def role(self, role: str, messages: MessagesLike, *, state_key: Any = None) -> Reply:
        """A turn of this role; see ``__call__``."""
        return await Turn(self, self._index(role), self._next_messages(messages), state_key)

    def reward(self, value: Any, *, role: str | None = None, turn: int | None = None) -> None:
        """Adds a reward to a turn.

        Args:
          value: a number, or one for each reward part.
          role: whose last turn it is for.
          turn: its number, ``Reply.turn``. Without role and turn the last turn gets it.

        Raises:
          EnvError: there is no such turn, or the reward is not finite.
        """
        turns = len(self._players)
        # A role's last turn and a numbered one may differ; which of them was meant is not guessed.
        if role is not None and turn is not None:
            raise EnvError("policy.reward takes a role or a turn, not both")
        if role is not None:
            player = self._index(role)
            if player not in self._players:
                raise EnvError(f"a reward for {role!r}, which has taken no turn")
            turn = turns - 1 - self._players[::-1].index(player)
        number = turns - 1 if turn is None else turn
        if number not in range(turns):
            raise EnvError(f"a reward for turn {number}; {turns} were taken, from 0 on")
        parts = reward_parts(value, self._parts)
        before = self._rewards.get(number, (0.0,) * self._parts)
        self._rewards[number] = tuple(a + b for a, b in zip(before, parts, strict=True))
        self._total += parts[0] * (self._players[number] == 0)

    def record(self, **metrics: float) -> None:
        """Adds numbers to the metrics of the episode."""
        for name, value in metrics.items():
            if not isinstance(value, int | float | np.number | np.bool_):
                raise FormError(f"policy.record: {name} is {value!r:.60}, not a number")
            self._metrics[name] = self._metrics.get(name, 0.0) + value

    def label(self, **labels: int | Sequence[int]) -> None:
        """Sets labels of the episode, or of the last turn's characters; see ``Feedback.labels``."""
        self._labels |= labels

    def _index(self, role: str) -> int:
        if role not in self.roles:
            raise FormError(
                f"there is no role {role!r}; the episode has {', '.join(self.roles)}. Name all of"
                ' them with @roles("writer", "critic") above it, the first to speak first'
            )
        return self.roles.index(role)

    def _next_messages(self, messages: MessagesLike) -> list[Message]:
        if isinstance(messages, str):
            return [{"role": "user", "content": messages}]
        if isinstance(messages, Mapping):
            messages = [messages]
        if not isinstance(messages, list | tuple):
            raise FormError(f"messages are {messages!r:.60}, not a text or a list of dicts")
        if self._players and any(
            isinstance(m, Mapping) and m.get("role") == "assistant" for m in messages
        ):
            raise FormError(
                "messages are what comes next in the conversation, which has the policy's turns"
                " already; leave out those with the role 'assistant'"
            )
        return list(messages)

    def _feedback(self, **fields: Any) -> Feedback:
        """The feedback to the last turn, with all that was recorded since the one before."""
        last, zero = len(self._players) - 1, (0.0,) * self._parts
        rewards, metrics, labels = self._rewards, self._metrics, self._labels
        # Emptied here: what a feedback has carried must not be paid again with the next one.
        self._rewards, self._metrics, self._labels = {}, {}, {}
        # Rewards of turns before the last one go into ``earlier``, a list from the first turn on.
        latest = max((turn for turn in rewards if turn < last), default=-1)
        by_turn = [rewards.get(turn, zero) for turn in (*range(latest + 1), last)]
        if self._parts == 1:
            by_turn = [parts[0] for parts in by_turn]  # type: ignore[misc]
        return Feedback(
            reward=by_turn[-1],
            earlier=tuple(by_turn[:-1]),
            metrics=metrics,
            labels=labels,
            **fields,
        )

    def _ended(self, value: Any) -> Feedback:
        """The feedback to the last turn, from what the episode returned."""
        outcome = value if isinstance(value, Outcome) else Outcome(value)
        for name in ("metrics", "labels"):
            if not isinstance(field := getattr(outcome, name), Mapping):
                raise FormError(f"Outcome.{name} = {field!r:.60}, not a dict")
        rewards = outcome.rewards
        if isinstance(rewards, Mapping):
            # A role that had no turn cannot be rewarded, but a 0 for it is no mistake.
            for role, reward in rewards.items():
                if self._index(role) in self._players or any(reward_parts(reward, self._parts)):
                    self.reward(reward, role=role)
        elif rewards is not None:
            for player in sorted(set(self._players)):
                self.reward(rewards, role=self.roles[player])
        self.record(**outcome.metrics)
        self.label(**outcome.labels)
        success = self._total >= 1 if outcome.success is None else outcome.success
        return self._feedback(done=True, success=success, cut=outcome.cut)


class Turn:
    """A request for a turn, which the coroutine yields to what runs it (``coroutine``)."""

    def __init__(
        self, policy: Policy, player: int, messages: list[Message], state_key: Any
    ) -> None:
        self.policy, self.player = policy, player
        self.messages, self.state_key = messages, state_key

    def __await__(self) -> Generator[Any, Any, Reply]:
        # A task of the episode's own would yield this to the event loop, which knows no turns.
        if asyncio.current_task() is not self.policy._task:
            raise FormError(
                "a turn was awaited in another task (asyncio.gather, create_task); turns follow one"
                " another, so await each in the episode itself"
            )
        return (yield self)
