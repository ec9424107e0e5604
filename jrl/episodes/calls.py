"""Calls of environments beside the thread that decodes: each with a deadline, answers in an inbox.

Async functions run on one event loop in a thread, sync ones in a thread each. The caller of
``submit`` never waits. A call that runs out of time is cancelled and answered with a timeout; that
it may swallow the cancellation, or block, delays nobody else's answer.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from jrl.episodes.gate import retrieve_error, run_within
from jrl.episodes.host import EnvError
from jrl.errors import class_name, error_text


class Answer(NamedTuple):
    """The answer to a call.

    Attributes:
      number: of the call.
      value: what it returned; None where it failed.
      error: why it failed; "" where it did not.
      timeout: whether it failed by running out of time.
      seconds: how long it took.
    """

    number: int
    value: Any = None
    error: str = ""
    timeout: bool = False
    seconds: float = 0.0


class Calls:
    """Calls under way; use it in a ``with`` statement.

    Attributes:
      inbox: answers, in the order in which they come.
    """

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._start()

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run, args=(self._loop,), name="jrl-envs", daemon=True
        )
        self._thread.start()

    def submit(
        self, number: int, function: Callable[..., Any], *arguments: Any, seconds: float
    ) -> None:
        """Calls a function, sync or async; the answer arrives in the inbox within ``seconds``.

        Args:
          number: names the call in its answer.
          function: what to call.
          *arguments: its.
          seconds: the deadline; those that it waits at a ``gate.Gate`` do not count.
        """
        loop = self._loop

        def begin() -> None:
            task = loop.create_task(self._call(number, function, arguments, seconds))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))

        loop.call_soon_threadsafe(begin)

    def cancel(self, number: int) -> None:
        """Cancels a call; its answer says so, unless it had ended."""

        def end() -> None:
            task = self._tasks.get(number)
            if task is not None:
                task.cancel()

        self._loop.call_soon_threadsafe(end)

    async def _call(
        self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float
    ) -> None:
        begin = time.monotonic()
        try:
            # Not wait_for: it would wait for a call that swallows its cancellation.
            inner = await run_within(_guarded(function, arguments), seconds)
        except asyncio.CancelledError:
            self.inbox.put(Answer(number, error="cancelled"))
            raise
        took = time.monotonic() - begin
        if not inner.done():
            inner.cancel()
            inner.add_done_callback(retrieve_error)
            reason = f"no answer within {seconds:g} seconds"
            self.inbox.put(Answer(number, error=reason, timeout=True, seconds=took))
        elif inner.cancelled():
            self.inbox.put(Answer(number, error="the call cancelled itself", seconds=took))
        elif (error := inner.exception()) is not None:
            self.inbox.put(Answer(number, error=_words(error), seconds=took))
        else:
            self.inbox.put(Answer(number, inner.result(), seconds=took))

    def blocked(self, seconds: float) -> bool:
        """Whether the event loop is held by a call; then that loop is given up for a new one.

        Calls of the old loop are not answered any more. Its thread ends when the call returns.

        Args:
          seconds: how long the loop may take to answer.
        """
        beat = threading.Event()
        self._loop.call_soon_threadsafe(beat.set)
        if beat.wait(seconds):
            return False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._tasks = {}
        self._start()
        return True

    def run(self, function: Callable[[], Awaitable[Any]], seconds: float) -> None:
        """Runs an async function on the loop and waits for it, at most ``seconds``."""
        asyncio.run_coroutine_threadsafe(_guarded(function, ()), self._loop).result(seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Cancels every call and ends the loop and its thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)

    def __enter__(self) -> Calls:
        """Returns the calls."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes them, also after an error."""
        self.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(lambda loop, context: None)  # answers say what failed
    try:
        loop.run_forever()
        # Stopped: what still runs is cancelled, and has a moment to clean up. What was
        # cancelled before is in its clean-up, which a second cancellation would break off; it gets
        # one where it is still there after that moment.
        for again in (False, True):
            if tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    if again or not task.cancelling():
                        task.cancel()
                loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def run_either(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """The result of a function, awaited where it is async, else run in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    value = await _in_thread(functools.partial(function, *arguments, **keywords))
    return await value if inspect.isawaitable(value) else value


async def _guarded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The result; SystemExit and the like, which would end the loop, become errors."""
    caller = os.getpid()
    try:
        return await run_either(function, *arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        raise EnvError(_words(error)) from None
    finally:
        _end_child(caller)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """The result of a sync function, run in a daemon thread of its own.

    A thread of a pool would have to be waited for when Python ends, even one that hangs.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return  # cancelled
        if error is None:
            result.set_result(value)
        else:
            # A future takes no StopIteration, and SystemExit and the like would end the loop.
            kind = type(error)  # isinstance reads __class__, which may raise
            taken = issubclass(kind, Exception) and not issubclass(kind, StopIteration)
            result.set_exception(error if taken else EnvError(_words(error)))

    def work() -> None:
        value, failure, caller = None, None, os.getpid()
        try:
            value = function()
        except BaseException as error:
            failure = error
        _end_child(caller)
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            return  # the loop has ended meanwhile

    threading.Thread(target=work, name="jrl-env", daemon=True).start()
    return await result


def _end_child(caller: int) -> None:
    """Ends the process if it is a child that a call forked and that came back from it."""
    if os.getpid() != caller:
        os._exit(1)


def _words(error: BaseException) -> str:
    text = error_text(error).strip().partition("\n")[0]
    own = issubclass(type(error), EnvError)  # isinstance reads __class__, which may raise
    return text if own else f"{class_name(error)}: {text}"[:300]
