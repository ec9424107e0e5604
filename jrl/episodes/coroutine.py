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
import inspect
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple

from jrl.episodes.check_env import check_episode, check_roles
from jrl.episodes.env_error import FormError
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
)
from jrl.episodes.policy import Outcome, Policy, Turn, roles
from jrl.types import Prompt

EpisodeFunction = Callable[..., Coroutine[Any, Any, Any]]
"""async (policy, prompt) or (policy, prompt, seed) -> number, dict by role, ``Outcome`` or None."""
__all__ = ["EpisodeFunction", "Outcome", "Policy", "coroutine_env", "roles"]

_CANCELS = 3
"""Number of times an episode that keeps asking for turns is cancelled before it is closed."""


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
        # One context for all turns: each call has a context of its own, and what the episode sets
        # in one must be there in the next.
        self._context = contextvars.copy_context()
        self._resumed = self._closing = False
        self.awaited: Turn | None = None

    async def resume(self, reply: Reply | None) -> Turn | _End:
        """The next turn that the episode asks for, or its end."""
        if reply is not None:
            assert self.awaited is not None
            self.policy._players.append(self.awaited.player)
        out = await self._until_turn(self._coroutine.send, reply)
        task = asyncio.current_task()
        assert task is not None
        if isinstance(out, Turn) and (self._closing or task.cancelling()):
            # It swallowed the cancellation of its call, or was closed meanwhile: nobody answers.
            await self.close()
            raise asyncio.CancelledError
        self.awaited = out if isinstance(out, Turn) else None
        return out

    async def close(self) -> None:
        """Cancels the episode where it awaits a turn; its own clean-up runs, and may await."""
        self._closing = True
        if self._resumed:
            return  # the call under way was cancelled, or blocks an event loop that was given up
        # Cancelled, not closed: ``finally`` blocks may await, which GeneratorExit does not allow.
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

    async def _until_turn(self, resume: Callable[[Any], Any], value: Any) -> Turn | _End:
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
) -> Generator[Any, Any, Turn | _End]:
    """Resumes a coroutine until it yields a turn or returns; futures go to the event loop."""
    while True:
        try:
            yielded = context.run(resume, value)
        except StopIteration as end:
            return _End(end.value)
        if isinstance(yielded, Turn):
            return yielded  # the coroutine stays suspended here until the policy has spoken
        try:
            value, resume = (yield yielded), coroutine.send
        except BaseException as error:  # the call was cancelled, or a future failed
            value, resume = error, coroutine.throw


def coroutine_env(
    episode: EpisodeFunction,
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
    check_roles(episode, names, "episode")
    seeded = "seed" in inspect.signature(episode).parameters

    async def init(prompt: Prompt, seed: int) -> tuple[_Run, Feedback]:
        policy = Policy(names, len(parts))
        run = _Run(policy, episode(policy, prompt, **({"seed": seed} if seeded else {})))
        first = await run.resume(None)
        if isinstance(first, _End):
            raise EnvError("the episode ended before its first turn")
        if first.player:
            await run.close()
            raise FormError(
                f"{names[first.player]!r} takes the first turn; name the roles so that the one that"
                f" begins is first, now {names[0]!r}"
            )
        return run, Feedback(first.messages, state_key=first.state_key)

    async def step(run: _Run, reply: Reply) -> tuple[_Run, Feedback]:
        out = await run.resume(reply)
        if isinstance(out, _End):
            return run, run.policy._ended(out.value)
        feedback = run.policy._feedback(
            messages=out.messages, state_key=out.state_key, next=out.player
        )
        return run, feedback

    return HostEnv(
        init=init,
        step=step,
        close=_Run.close,
        fork=None,  # a coroutine cannot be copied
        parts=parts,
        players=len(names),
        limits=limits,
        chat=chat,
        lifecycle=lifecycle,
        extras=extras,
    )
