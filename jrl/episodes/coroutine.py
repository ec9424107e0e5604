"""Environments as coroutines: an episode is a plain program that awaits the policy's turns.

    @roles("writer", "critic")
    async def episode(policy, prompt):
        draft = await policy(prompt.text)
        note = await policy["critic"]("Is that right? Answer yes or no.")
        right = float(prompt.answer in draft.text)
        return {"writer": right, "critic": float(("yes" in note.text) == bool(right))}

``data.env = "FILE.py:episode"`` or ``fit(env=episode)`` plays it; ``coroutine_env`` makes it a
``HostEnv``, whose ``init`` runs the coroutine up to its first turn and whose ``step`` up to the
next one. It shares scheduler, limits and transcript with every other environment on the host.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jrl.episodes.gate import share_clock
from jrl.episodes.host import (
    ChatOptions,
    EnvError,
    EnvExtras,
    Feedback,
    HostEnv,
    Lifecycle,
    Limits,
    Reply,
    reward_parts,
)
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.types import NOTHING, Prompt

Episode = Callable[..., Coroutine[Any, Any, Any]]
"""async (policy, prompt) or (policy, prompt, seed) -> number, dict by role, ``Outcome`` or None."""
Said = str | Message | Sequence[Message]
"""A text, which becomes a message of the user, one message, or several."""

FORM = "async def episode(policy, prompt), perhaps with seed, the seed of the group"
_CANCELS = 3
"""How often an episode that asks for further turns is cancelled before it is closed."""

_F = TypeVar("_F", bound=Callable[..., Any])


class Outcome(NamedTuple):
    """The end of an episode, where a number of points does not say all.

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

    >>> @roles("writer", "critic")
    ... async def episode(policy, prompt): ...
    >>> episode.roles
    ('writer', 'critic')
    """

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
        """How many turns have been taken, of all roles."""
        return len(self._players)

    async def __call__(self, messages: Said, *, state_key: Any = None) -> Reply:
        """A turn of the first role.

        Args:
          messages: said to the policy next. They do not repeat the conversation so far.
          state_key: names the state of the environment, for methods that compare the turns taken
            in one state; None for the text of ``messages``, as always in the first turn.

        Raises:
          EnvError: messages repeat the policy's turns, or the turn is awaited in another task.
        """
        return await self.role(self.roles[0], messages, state_key=state_key)

    def __getitem__(self, role: str) -> Callable[..., Coroutine[Any, Any, Reply]]:
        """The turns of a role: ``await policy["critic"](messages)``."""
        self._index(role)
        return functools.partial(self.role, role)

    async def role(self, role: str, messages: Said, *, state_key: Any = None) -> Reply:
        """A turn of this role; see ``__call__``."""
        return await _Turn(self, self._index(role), self._next_messages(messages), state_key)

    def reward(self, value: Any, *, role: str | None = None, turn: int | None = None) -> None:
        """Adds a reward to a turn.

        Args:
          value: a number, or one for each reward part.
          role: whose last turn it is for.
          turn: its number, ``Reply.turn``. Without role and turn the last turn gets it.

        Raises:
          EnvError: there is no such turn, or the reward is not finite.
        """
        taken = len(self._players)
        if role is not None and turn is not None:
            raise EnvError("policy.reward takes a role or a turn, not both")
        if role is not None:
            player = self._index(role)
            if player not in self._players:
                raise EnvError(f"a reward for {role!r}, which has taken no turn")
            turn = taken - 1 - self._players[::-1].index(player)
        number = taken - 1 if turn is None else turn
        if number not in range(taken):
            raise EnvError(f"a reward for turn {number}; {taken} were taken, from 0 on")
        parts = reward_parts(value, self._parts)
        before = self._rewards.get(number, (0.0,) * self._parts)
        self._rewards[number] = tuple(a + b for a, b in zip(before, parts, strict=True))
        self._total += parts[0] * (self._players[number] == 0)

    def record(self, **metrics: float) -> None:
        """Adds numbers to the metrics of the episode."""
        for name, value in metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value

    def label(self, **labels: int | Sequence[int]) -> None:
        """Sets labels of the episode, or of the last turn's characters; see ``Feedback.labels``."""
        self._labels |= labels

    def _index(self, role: str) -> int:
        if role not in self.roles:
            raise EnvError(
                f"there is no role {role!r}; the episode has {', '.join(self.roles)}. Name all of"
                ' them with @roles("writer", "critic") above it, the first to speak first'
            )
        return self.roles.index(role)

    def _next_messages(self, messages: Said) -> list[Message]:
        if isinstance(messages, str):
            return [{"role": "user", "content": messages}]
        if isinstance(messages, Mapping):
            messages = [messages]
        if not isinstance(messages, list | tuple):
            raise EnvError(f"messages are {messages!r:.60}, not a text or a list of dicts")
        if self._players and any(
            isinstance(m, Mapping) and m.get("role") == "assistant" for m in messages
        ):
            raise EnvError(
                "messages are what comes next in the conversation, which has the policy's turns"
                " already; leave out those with the role 'assistant'"
            )
        return list(messages)

    def _feedback(self, **fields: Any) -> Feedback:
        """The feedback to the last turn, with all that was recorded since the one before."""
        last, zero = len(self._players) - 1, (0.0,) * self._parts
        rewards, metrics, labels = self._rewards, self._metrics, self._labels
        self._rewards, self._metrics, self._labels = {}, {}, {}
        known = max((turn for turn in rewards if turn < last), default=-1)
        by_turn = [rewards.get(turn, zero) for turn in (*range(known + 1), last)]
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
                raise EnvError(f"Outcome.{name} = {field!r:.60}, not a dict")
        rewards = outcome.rewards
        if isinstance(rewards, Mapping):
            for role, points in rewards.items():
                if self._index(role) in self._players or any(reward_parts(points, self._parts)):
                    self.reward(points, role=role)
        elif rewards is not None:
            for player in sorted(set(self._players)):
                self.reward(rewards, role=self.roles[player])
        self.record(**outcome.metrics)
        self.label(**outcome.labels)
        success = self._total >= 1 if outcome.success is None else outcome.success
        return self._feedback(done=True, success=success, cut=outcome.cut)


class _Turn:
    """A request for a turn, which the coroutine yields to ``_Run``."""

    def __init__(
        self, policy: Policy, player: int, messages: list[Message], state_key: Any
    ) -> None:
        self.policy, self.player = policy, player
        self.messages, self.state_key = messages, state_key

    def __await__(self) -> Generator[Any, Any, Reply]:
        # A task of the episode's own would yield this to the event loop, which knows no turns.
        if asyncio.current_task() is not self.policy._task:
            raise EnvError(
                "a turn was awaited in another task (asyncio.gather, create_task); turns follow one"
                " another, so await each in the episode itself"
            )
        return (yield self)


class _End(NamedTuple):
    """The value that an episode returned."""

    value: Any


class _Run:
    """An episode under way: the state of its ``HostEnv``.

    The coroutine has no task of its own. Each call of ``init``, ``step`` and ``close`` resumes it
    within that call's task, so that deadlines, cancellation and clocks of the call are the
    episode's, and nothing of it belongs to an event loop while the policy speaks.
    """

    def __init__(self, policy: Policy, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.policy, self._coroutine = policy, coroutine
        self._context = contextvars.copy_context()  # its variables last from turn to turn
        self._resumed = self._closing = False
        self.asked: _Turn | None = None

    async def resume(self, reply: Reply | None) -> _Turn | _End:
        """The next turn that the episode asks for, or its end."""
        if reply is not None:
            assert self.asked is not None
            self.policy._players.append(self.asked.player)
        out = await self._until_turn(self._coroutine.send, reply)
        task = asyncio.current_task()
        assert task is not None
        if isinstance(out, _Turn) and (self._closing or task.cancelling()):
            # It swallowed the cancellation of its call, or was closed meanwhile: nobody answers.
            await self.close()
            raise asyncio.CancelledError
        self.asked = out if isinstance(out, _Turn) else None
        return out

    async def close(self) -> None:
        """Cancels the episode where it awaits a turn; its own clean-up runs, and may await."""
        self._closing = True
        if self._resumed:
            return  # the call under way was cancelled, or blocks an event loop that was given up
        for _ in range(_CANCELS):
            if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CLOSED:
                return
            try:
                await self._until_turn(self._coroutine.throw, asyncio.CancelledError())
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # this call's own
                    raise
        self._coroutine.close()

    async def _until_turn(self, resume: Callable[[Any], Any], value: Any) -> _Turn | _End:
        self._resumed = True
        self.policy._task = asyncio.current_task()
        share_clock(self._context)
        try:
            return await _drive(self._context, self._coroutine, resume, value)
        finally:
            self._resumed = False
            self.policy._task = None


@types.coroutine
def _drive(
    context: contextvars.Context,
    coroutine: Coroutine[Any, Any, Any],
    resume: Callable[[Any], Any],
    value: Any,
) -> Generator[Any, Any, _Turn | _End]:
    """Resumes a coroutine until it yields a turn or returns; futures go to the event loop."""
    while True:
        try:
            yielded = context.run(resume, value)
        except StopIteration as end:
            return _End(end.value)
        if isinstance(yielded, _Turn):
            return yielded
        try:
            value, resume = (yield yielded), coroutine.send
        except BaseException as error:  # the call was cancelled, or a future failed
            value, resume = error, coroutine.throw


def coroutine_env(
    episode: Episode,
    *,
    roles: Sequence[str] = (),
    parts: tuple[str, ...] = ("reward",),
    limits: Limits = Limits(),  # noqa: B008 - a value that nobody can change
    chat: ChatOptions = ChatOptions(),  # noqa: B008
    lifecycle: Lifecycle = Lifecycle(),  # noqa: B008
    extras: EnvExtras = EnvExtras(),  # noqa: B008
) -> HostEnv:
    """The environment that a coroutine is.

    The same seed and the same turns give the same episode as far as the coroutine's own calls do.
    Its states cannot be copied, so that episodes do not branch (``fork`` is None).

    Args:
      episode: async (policy, prompt) or (policy, prompt, seed) -> a number, which is the reward of
        each role's last turn, a dict of rewards by role, an ``Outcome``, or None where
        ``Policy.reward`` has recorded all. An exception ends its member alone, with its text.
      roles: their names, the one that takes the first turn first; () for those that ``roles``
        named, or the one role "policy". With several each is a player, with rows and rewards of
        its own.
      parts: names of the reward parts.
      limits: of an episode. It is cancelled where it reaches one.
      chat: what the chat template renders beside the messages.
      lifecycle: calls around the episodes of a step and of a run.
      extras: what only some methods read.

    Raises:
      UserError: it is no such coroutine, or a role is named twice.
    """
    check_episode(episode, "episode")
    names = tuple(roles) or tuple(getattr(episode, "roles", ())) or ("policy",)
    if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise UserError(f"episode: roles = {names!r:.80}; give each role a name of its own")
    seeded = "seed" in inspect.signature(episode).parameters

    async def init(prompt: Prompt, seed: int) -> tuple[_Run, list[Message]]:
        policy = Policy(names, len(parts))
        run = _Run(policy, episode(policy, prompt, **({"seed": seed} if seeded else {})))
        first = await run.resume(None)
        if isinstance(first, _End):
            raise EnvError("the episode ended before its first turn")
        if first.player:
            await run.close()
            raise EnvError(
                f"{names[first.player]!r} takes the first turn; name the roles so that the one that"
                f" begins is first, now {names[0]!r}"
            )
        return run, first.messages

    async def step(run: _Run, reply: Reply) -> tuple[_Run, Feedback]:
        out = await run.resume(reply)
        if isinstance(out, _End):
            return run, run.policy._ended(out.value)
        feedback = run.policy._feedback(
            messages=out.messages, state_key=out.state_key, next=out.player
        )
        return run, feedback

    async def close(run: _Run) -> None:
        await run.close()

    return HostEnv(
        init=init,
        step=step,
        close=close,
        fork=None,  # a coroutine cannot be copied
        parts=parts,
        players=len(names),
        limits=limits,
        chat=chat,
        lifecycle=lifecycle,
        extras=extras,
    )


# ---------------------------------------------------------------- functions that are named


def is_episode(function: Callable[..., Any]) -> bool:
    """Whether a function is an episode, or was meant to be one, and no maker of an environment."""
    if _is_async(function) or inspect.isasyncgenfunction(function):
        return True
    return _arguments(function)[:2] == ["policy", "prompt"]


def check_episode(episode: Any, key: str, options: bool = False) -> None:
    """Raises UserError for what cannot be played as an episode.

    Args:
      episode: the function.
      key: that names it, for messages.
      options: whether arguments beside policy, prompt and seed may need a value.
    """
    if not callable(episode):
        raise UserError(f"{key} = {episode!r:.60}; give {FORM}")
    names = _arguments(episode)
    called = f"{getattr(episode, '__name__', 'the episode')}({', '.join(names)})"
    if inspect.isasyncgenfunction(episode):
        raise UserError(f"{key}: {called} yields; an episode awaits its turns and returns: {FORM}")
    if not _is_async(episode):
        raise UserError(f"{key}: {called} is not async; write {FORM}")
    parameters = list(inspect.signature(episode).parameters.values())
    by_place = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    swapped = by_place[:1] == ["prompt"] or by_place[1:2] == ["policy"]
    if len(by_place) < 2 or swapped or "seed" in by_place[:2]:
        raise UserError(f"{key}: {called} must take policy and prompt, in this order; write {FORM}")
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in (*by_place[:2], "seed")
    ]
    if needed and not options:
        raise UserError(f"{key}: {called} needs {needed[0]}, which no episode gets; write {FORM}")


def _is_async(function: Callable[..., Any]) -> bool:
    called = type(function).__call__  # of an object whose __call__ is async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _arguments(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return []  # written in C
