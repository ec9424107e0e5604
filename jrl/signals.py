"""SIGINT, SIGTERM and SIGHUP: a run that is asked to stop saves and ends, in bounded time.

Free of JAX, so that the command line can listen before it imports anything.

    starting, last evaluation, report   ends at once; there is nothing to save, or all is saved
    rollout, evaluation                 has STEP_SECONDS to end; then the step before is saved
    training step, saving               ends first
    whatever else                       END_SECONDS after the signal the process ends

A second SIGINT ends the run without saving. SIGHUP stays ignored under ``nohup``. A wait that takes
too long (``overdue``) ends a run in the same way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, Self

from jrl.errors import INTERRUPTED, Overdue

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEP_SECONDS = 10.0
END_SECONDS = 300.0


class Stopping:
    """Whether a signal has asked the run to stop, and what it may interrupt; a context manager.

    Outside of the main thread, which alone gets signals, it listens to nothing.

    Args:
      patient: whether rollouts under way are waited for however long they take, as processes that
        must stop together do.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._patient = patient
        self._asked = threading.Event()
        self._expired = self._interruptible = self._at_once = False
        self._insisted = self._closed = self._poked = False
        self._overdue = ""
        self._timers: list[threading.Timer] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = _listen(self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """Whether the run shall stop."""
        return self._asked.is_set()

    def set(self) -> None:
        """Asks the run to stop, as another process's signal does."""
        self._asked.set()

    @property
    def gave_up(self) -> bool:
        """Whether a rollout or an evaluation was interrupted because it took too long."""
        return self._expired and not self._insisted

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises KeyboardInterrupt at once; one that has come raises it first."""
        self._at_once = True
        try:
            if self.is_set():
                raise KeyboardInterrupt
            yield
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
        if not self._before:
            return  # in a thread of somebody's program, which is not to be ended
        self._overdue = said
        self._start_timer(END_SECONDS, lambda: _exit(f"error: {said}", Overdue.exit_code))
        if not self._patient:
            self._give_up()

    def _hear(self, number: int, frame: Any) -> None:
        if self._poked:  # by ``_give_up``
            self._poked = False
        elif not self.is_set():
            self._asked.set()
            name = signal.Signals(number).name
            late = f"still not stopped {END_SECONDS:.0f} s after {name}"
            self._start_timer(END_SECONDS, lambda: _exit(late, INTERRUPTED))
            if not self._patient:
                self._start_timer(STEP_SECONDS, self._give_up)
        elif number == signal.SIGINT:
            self._insisted = True
        interruptible = self._expired and self._interruptible
        if self._insisted or self._at_once or interruptible:
            raise KeyboardInterrupt

    def _start_timer(self, seconds: float, call: Any) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _give_up(self) -> None:
        """Interrupts what may be; again and again, because code of users may catch it."""
        self._expired = True
        if self._closed:
            return
        if self._interruptible and self._before:
            self._poked = True
            # A real signal, because it ends a wait that the main thread is in.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        self._start_timer(1.0, self._give_up)


@contextlib.contextmanager
def end_at_once() -> Iterator[None]:
    """Inside, every signal raises KeyboardInterrupt, as SIGINT does anyway."""
    heard: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    before = _listen(interrupt)
    try:
        yield
    except Exception:
        if heard:  # see ``Stopping.at_once``
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_within(seconds: float, code: int = INTERRUPTED) -> None:
    """Ends the process with a code if it is still there by then."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def _listen(handler: Any) -> dict[signal.Signals, Any]:
    """Installs a handler; the handlers before it."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _exit(said: str, code: int) -> None:
    text = f"jrl: {said}; ended without saving\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(code)
