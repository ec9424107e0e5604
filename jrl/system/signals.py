"""SIGINT, SIGTERM and SIGHUP: saves and ends a run in bounded time.

Imports no JAX, so the command line can install the handlers before any slow import.

    starting, last evaluation, report   ends at once: nothing to save, or everything saved
    compiling                           the same, in a command without steps newer than the
                                        last checkpoint
    rollout, evaluation                 gets STEP_SECONDS to finish; then the previous step is saved
    training step, saving               finishes first
    any other state                     the process ends END_SECONDS after the signal

A second SIGINT ends the run without saving. SIGHUP stays ignored under ``nohup``. A wait that takes
too long (``overdue``) ends a run in the same way.

Python runs handlers in the main thread, between two bytecode instructions: not inside a compiler
call, and an exception raised during a garbage-collection callback is lost. A second thread
therefore receives the signals too, keeps the deadlines, and repeats the interrupt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from jrl.errors import INTERRUPTED, Overdue

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEP_SECONDS = 10.0
END_SECONDS = 300.0
_AGAIN_SECONDS = 1.0
_POKE = signal.SIGURG
"""Sent to the main thread to interrupt its wait; it has no effect outside a run."""


class Stopping:
    """Stop requests from signals, and the parts of a run they may interrupt; a context manager.

    Only the main thread receives signals; in another thread this does nothing.

    Args:
      patient: whether running rollouts are waited for without a limit, as processes that must stop
        together need.

    Attributes:
      at_rest: whether the main thread is compiling, which nothing interrupts, and ending the
        process there loses nothing; called in another thread after a signal, in a process that
        ``end_at_once`` may end, never in a notebook.
      saved: a line about the files on disk, printed when the process ends; called in another
        thread.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._patient = patient
        self._requested = threading.Event()
        self.at_rest: Callable[[], bool] = lambda: False
        self.saved: Callable[[], str] = lambda: "ended without saving"
        self._expired = self._interruptible = self._at_once = False
        self._interrupted = self._insisted = self._closed = False
        self._overdue = ""
        self._timers: list[threading.Timer] = []
        self._stack = contextlib.ExitStack()
        self._listens = False

    def __enter__(self) -> Self:
        self._stack.enter_context(self._unsaid_where_lost())
        self._listens = self._stack.enter_context(_listening(self._hear, self._begin))
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._stack.close()
        for timer in self._timers:
            timer.cancel()

    def is_set(self) -> bool:
        """Whether the run was asked to stop."""
        return self._requested.is_set()

    def set(self) -> None:
        """Requests a stop, as another process's signal does."""
        self._requested.set()

    def hurries(self) -> bool:
        """Whether the run shall stop and waits for rollouts under way for limited time alone."""
        return self._requested.is_set() and not self._patient

    @property
    def gave_up(self) -> bool:
        """Whether a rollout or an evaluation was interrupted because it took too long."""
        return self._expired and not self._insisted

    @property
    def late(self) -> str:
        """A line about an overdue wait; "" if there is none."""
        return self._overdue

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raises KeyboardInterrupt on a signal inside the block, or on entry for an earlier one.

        Raises:
          Overdue: instead, if a wait took too long.
        """
        self._at_once = True
        try:
            if self.is_set():
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            if self._overdue and not self.is_set():
                raise Overdue(self._overdue) from None
            raise
        except Exception:
            if self.is_set():  # some packages turn an interrupt of their import into an ImportError
                raise KeyboardInterrupt from None
            raise
        finally:
            self._at_once = False

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raises KeyboardInterrupt inside the block, STEP_SECONDS after a signal.

        Raises:
          Overdue: instead, if a wait took too long.
        """
        self._interruptible = True
        try:
            if self._expired:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            if self._overdue and not self.is_set():
                raise Overdue(self._overdue) from None
            raise
        finally:
            self._interruptible = False

    def overdue(self, reason: str) -> None:
        """Ends the run after an overdue wait; called from another thread than the main one.

        Interruptible work is interrupted. If nothing is interruptible, or saving afterwards waits
        as well, the process ends END_SECONDS later, as after a signal.

        Args:
          reason: a line about the wait.
        """
        if not self._listens:
            return  # the run is a thread of a user's program, which must not be killed
        self._overdue = reason
        self._start_timer(END_SECONDS, lambda: self._exit(f"error: {reason}", Overdue.exit_code))
        if not self._patient:
            self._give_up()

    def _hear(self, number: int, frame: Any) -> None:
        """Python's signal handler, in the main thread between two bytecode instructions."""
        if number != _POKE:
            self._insisted |= self._interrupted and number == signal.SIGINT
            self._interrupted = True
            self._requested.set()
        if self._insisted or self._may_interrupt():
            raise KeyboardInterrupt

    def _begin(self, number: int) -> None:
        """Handles the first signal in a second thread, whatever the main thread executes."""
        self._requested.set()
        late = f"still not stopped {END_SECONDS:.0f} s after {signal.Signals(number).name}"
        self._start_timer(END_SECONDS, lambda: self._exit(late, INTERRUPTED))
        self._start_timer(_AGAIN_SECONDS, self._interrupt)
        if not self._patient:
            self._start_timer(STEP_SECONDS, self._give_up)

    @contextlib.contextmanager
    def _unsaid_where_lost(self) -> Iterator[None]:
        """Prints no traceback where a callback loses an interrupt that comes again."""
        before = sys.unraisablehook

        def hook(lost: Any) -> None:
            if not (isinstance(lost.exc_value, KeyboardInterrupt) and self._may_interrupt()):
                before(lost)

        sys.unraisablehook = hook
        try:
            yield
        finally:
            if sys.unraisablehook is hook:  # else what was set since calls this one
                sys.unraisablehook = before

    def _may_interrupt(self) -> bool:
        return self._at_once or (self._expired and self._interruptible)

    def _start_timer(self, seconds: float, call: Any) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _give_up(self) -> None:
        """Marks the time of rollouts and evaluations as expired."""
        self._expired = True
        self._interrupt()

    def _interrupt(self) -> None:
        """Interrupts interruptible work, repeatedly: user code may catch KeyboardInterrupt."""
        if self._closed:
            return
        if self._listens and self._may_interrupt():
            signal.pthread_kill(threading.main_thread().ident or 0, _POKE)
        elif self.is_set() and _ends and not self._patient and self.at_rest():
            self._exit("stopped while compiling", INTERRUPTED)
        self._start_timer(_AGAIN_SECONDS, self._interrupt)

    def _exit(self, reason: str, code: int) -> None:
        """Ends the process, within a second even if the disk hangs."""
        end_within(_AGAIN_SECONDS, code)
        _say(f"{reason}; {self.saved()}")
        os._exit(code)


@contextlib.contextmanager
def end_at_once(message: Callable[[], str] = lambda: "stopped") -> Iterator[None]:
    """Ends the process on the first signal inside the block, without saving.

    Args:
      message: the line then printed on standard error.
    """

    def end(number: int) -> None:
        try:
            _say(message())
        finally:
            os._exit(INTERRUPTED)

    global _ends
    before, _ends = _ends, True
    try:
        with _listening(lambda number, frame: None, end):
            yield
    finally:
        _ends = before


_ends = False
"""Whether the process is a ``jrl`` command, which a signal may end."""


def end_within(seconds: float, code: int = INTERRUPTED) -> None:
    """Ends the process with an exit code if it still runs after ``seconds``."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def ignore() -> None:
    """Ignores all signals from now on; for a process that is about to end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _listening(handler: Callable[[int, Any], None], first: Callable[[int], None]) -> Iterator[bool]:
    """Hears the signals as long as the block lasts; whether it does, as only the main thread can.

    Args:
      handler: of Python, in the main thread, for each signal.
      first: called in another thread, once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # or a handler of the system could wait in it

    def listen() -> None:
        received = False
        while number := reader.recv(1):
            if not received and number[0] in numbers:
                received = True
                first(number[0])

    numbers = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, handler) for number in [*numbers, _POKE]}
    try:
        yield True
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(descriptor)
        writer.close()
        thread.join()
        reader.close()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"jrl: {text}\n".encode())
