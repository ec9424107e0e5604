"""SIGINT, SIGTERM and SIGHUP: a run that is asked to stop saves and ends, in bounded time.

Free of JAX, so that the command line can listen before it imports anything.

    starting, last evaluation, report   ends at once; there is nothing to save, or all is saved
    compiling                           the same, in a command, where no step is newer than what is
                                        saved
    rollout, evaluation                 has STEP_SECONDS to end; then the step before is saved
    training step, saving               ends first
    whatever else                       END_SECONDS after the signal the process ends

A second SIGINT ends the run without saving. SIGHUP stays ignored under ``nohup``. A wait that takes
too long (``overdue``) ends a run in the same way.

Python calls handlers in the main thread between two of its own instructions: not while that is in a
compiler, and what they raise in the callback of a garbage collection is lost. A thread hears the
signals too, holds the times, and interrupts again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from jrl.errors import INTERRUPTED, Overdue

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEP_SECONDS = 10.0
END_SECONDS = 300.0
_AGAIN_SECONDS = 1.0
_POKE = signal.SIGURG
"""Sent to the main thread to end a wait that it is in; outside of a run nobody minds it."""


class Stopping:
    """Whether a signal has asked the run to stop, and what it may interrupt; a context manager.

    Outside of the main thread, which alone gets signals, it listens to nothing.

    Args:
      patient: whether rollouts under way are waited for however long they take, as processes that
        must stop together do.

    Attributes:
      at_rest: whether the main thread is in a compiler, which nothing interrupts, and nothing is
        lost where the process ends there; called in another thread after a signal, in a process
        that ``end_at_once`` may end, and not in a notebook.
      saved: what is on disk, said where the process is ended; called in another thread.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._patient = patient
        self._asked = threading.Event()
        self.at_rest: Callable[[], bool] = lambda: False
        self.saved: Callable[[], str] = lambda: "ended without saving"
        self._expired = self._interruptible = self._at_once = False
        self._heard = self._insisted = self._closed = False
        self._overdue = ""
        self._timers: list[threading.Timer] = []
        self._stack = contextlib.ExitStack()
        self._listens = False

    def __enter__(self) -> Self:
        self._listens = self._stack.enter_context(_listening(self._hear, self._begin))
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._stack.close()
        for timer in self._timers:
            timer.cancel()

    def is_set(self) -> bool:
        """Whether the run shall stop."""
        return self._asked.is_set()

    def set(self) -> None:
        """Asks the run to stop, as another process's signal does."""
        self._asked.set()

    def hurries(self) -> bool:
        """Whether the run shall stop and waits for rollouts under way for limited time alone."""
        return self._asked.is_set() and not self._patient

    @property
    def gave_up(self) -> bool:
        """Whether a rollout or an evaluation was interrupted because it took too long."""
        return self._expired and not self._insisted

    @property
    def late(self) -> str:
        """What was waited for too long, a line; "" as a rule."""
        return self._overdue

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises KeyboardInterrupt at once; one that has come raises it first.

        Raises:
          Overdue: instead, where a wait took too long.
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
            if self.is_set():  # some packages turn what interrupts their import into an ImportError
                raise KeyboardInterrupt from None
            raise
        finally:
            self._at_once = False

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, KeyboardInterrupt is raised STEP_SECONDS after the signal.

        Raises:
          Overdue: instead, where a wait took too long.
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

    def overdue(self, said: str) -> None:
        """Ends the run, because a wait took too long; called by another thread than the main one.

        What may be interrupted is. Where nothing is, or saving afterwards waits as well, the
        process ends END_SECONDS later, as it does after a signal.

        Args:
          said: what was waited for, a line.
        """
        if not self._listens:
            return  # in a thread of somebody's program, which is not to be ended
        self._overdue = said
        self._start_timer(END_SECONDS, lambda: self._exit(f"error: {said}", Overdue.exit_code))
        if not self._patient:
            self._give_up()

    def _hear(self, number: int, frame: Any) -> None:
        """Called in the main thread, when that is in Python."""
        if number != _POKE:
            self._insisted |= self._heard and number == signal.SIGINT
            self._heard = True
            self._asked.set()
        if self._insisted or self._may_interrupt():
            raise KeyboardInterrupt

    def _begin(self, number: int) -> None:
        """Called in a thread, for the first signal, whatever the main thread is in."""
        self._asked.set()
        late = f"still not stopped {END_SECONDS:.0f} s after {signal.Signals(number).name}"
        self._start_timer(END_SECONDS, lambda: self._exit(late, INTERRUPTED))
        self._start_timer(_AGAIN_SECONDS, self._interrupt)
        if not self._patient:
            self._start_timer(STEP_SECONDS, self._give_up)

    def _may_interrupt(self) -> bool:
        return self._at_once or (self._expired and self._interruptible)

    def _start_timer(self, seconds: float, call: Any) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _give_up(self) -> None:
        """Rollouts and evaluations have had their time."""
        self._expired = True
        self._interrupt()

    def _interrupt(self) -> None:
        """Interrupts what may be; again and again, because code of users may catch it."""
        if self._closed:
            return
        if self._listens and self._may_interrupt():
            signal.pthread_kill(threading.main_thread().ident or 0, _POKE)
        elif self.is_set() and _ends and not self._patient and self.at_rest():
            self._exit("stopped while compiling", INTERRUPTED)
        self._start_timer(_AGAIN_SECONDS, self._interrupt)

    def _exit(self, said: str, code: int) -> None:
        """Ends the process, soon even where the disk is what hangs."""
        end_within(_AGAIN_SECONDS, code)
        _say(f"{said}; {self.saved()}")
        os._exit(code)


@contextlib.contextmanager
def end_at_once(said: Callable[[], str] = lambda: "stopped") -> Iterator[None]:
    """Inside, the first signal ends the process: there is nothing to save, and nothing to undo.

    Args:
      said: what then stands on standard error.
    """

    def end(number: int) -> None:
        try:
            _say(said())
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
"""Whether the process is a command, which a signal may end."""


def end_within(seconds: float, code: int = INTERRUPTED) -> None:
    """Ends the process with a code if it is still there by then."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def ignore() -> None:
    """From here on no signal does anything; for a process that is about to end."""
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
        heard = False
        while number := reader.recv(1):
            if not heard and number[0] in numbers:
                heard = True
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
