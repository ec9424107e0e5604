"""Queues for what a limited number may use at a time, and clocks that do not count the queueing.

A call has a limit on its seconds. Those that it spends waiting for others are not its own: a member
must not fail because the machine is busy with its neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
import weakref
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any

from jrl.episodes.env_error import EnvError

QUEUE_SECONDS = 600.0
"""Queue timeout while no call finishes."""

_POLL_SECONDS = 0.05


class _Clock:
    """The seconds of a call, without those in queues; calls inside it stop it too."""

    def __init__(self, outer: _Clock | None) -> None:
        self._outer = outer
        self._began, self._queued = time.monotonic(), 0.0
        self._waiting, self._since = 0, 0.0

    @property
    def stopped(self) -> bool:
        """Whether something of the call waits in a queue."""
        return self._waiting > 0

    def used(self) -> float:
        """Seconds so far."""
        now = time.monotonic()
        return now - self._began - self._queued - (now - self._since if self._waiting else 0.0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the clock stands still."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            with self._outer.paused() if self._outer else contextlib.nullcontext():
                yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._queued += time.monotonic() - self._since


_clock: contextvars.ContextVar[_Clock | None] = contextvars.ContextVar("clock", default=None)


def share_clock(context: contextvars.Context) -> None:
    """Lets code that runs in another context stop the clock of the call under way."""
    context.run(_clock.set, _clock.get())


async def run_within(work: Coroutine[Any, Any, Any], seconds: float) -> asyncio.Task[Any]:
    """The task of a coroutine once it is done, or has used its seconds and is not.

    It is not cancelled, and its errors are not raised. Seconds that it waits at a ``Gate`` do not
    count.

    Args:
      work: what to do.
      seconds: for it.
    """
    clock = _Clock(_clock.get())
    before = _clock.set(clock)
    try:
        task = asyncio.ensure_future(work)  # takes a copy of the context
    finally:
        _clock.reset(before)
    try:
        # Polled while the clock is stopped: nothing wakes this up when it runs again.
        while not task.done():
            left = seconds - clock.used()
            if left <= 0 and not clock.stopped:
                break
            await asyncio.wait({task}, timeout=max(left, _POLL_SECONDS if clock.stopped else 0.0))
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(retrieve_error)
        raise
    return task


def retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieves a late error, or asyncio would log it."""
    if not task.cancelled():
        task.exception()


class Gate:
    """Lets a limited number through at a time, in the order in which they came.

    Args:
      at_once: how many.
      queue: its name, for the error.
      seconds: how long one waits while nobody goes through or comes out.

    Raises:
      EnvError: on entering, after ``seconds``.
    """

    def __init__(self, at_once: int, queue: str, seconds: float = QUEUE_SECONDS) -> None:
        self._at_once, self._queue, self._seconds = at_once, queue, seconds
        self._last_change = 0.0
        self._of_loop: Any = weakref.WeakKeyDictionary()  # a semaphore belongs to an event loop

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        return self._of_loop.setdefault(loop, asyncio.Semaphore(self._at_once))

    async def enter(self) -> None:
        """Waits for a place, with the call's clock stopped."""
        clock, came = _clock.get(), time.monotonic()
        with clock.paused() if clock else contextlib.nullcontext():
            turn = asyncio.ensure_future(self._semaphore().acquire())
            try:
                while not turn.done():
                    # A long queue that moves is no fault, only one in which nobody goes through or
                    # comes out.
                    left = max(came, self._last_change) + self._seconds - time.monotonic()
                    if left <= 0:
                        reason = f"waited {self._seconds:g} seconds in a queue that did not move"
                        raise EnvError(f"{reason}, for {self._queue}")
                    await asyncio.wait({turn}, timeout=left)
            except BaseException:
                # The place may have been given in the moment in which the wait was broken off;
                # kept, it would be lost for the whole run.
                if turn.done() and not turn.cancelled():
                    self.leave()
                turn.cancel()
                raise
        self._last_change = time.monotonic()

    def leave(self) -> None:
        """Gives the place to the next one."""
        self._last_change = time.monotonic()
        self._semaphore().release()

    async def __aenter__(self) -> None:
        """Enters."""
        await self.enter()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves, also after an error."""
        self.leave()
