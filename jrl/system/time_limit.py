"""A limit on the time of a block of code, by a timer of the system."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def time_limit(
    seconds: float, error: type[BaseException], *, again: float = 0.0, processor: bool = False
) -> Iterator[None]:
    """Inside, an error is raised when the time is over; only the main thread has a limit.

    Args:
      seconds: until then.
      error: to raise; no ``Exception`` where what runs catches many of those.
      again: seconds after which it is raised again, should it be caught; 0 for never.
      processor: whether the processor's time counts, so that a busy machine changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise error

    timer = signal.ITIMER_VIRTUAL if processor else signal.ITIMER_REAL
    number = signal.SIGVTALRM if processor else signal.SIGALRM
    before = signal.signal(number, ring)
    signal.setitimer(timer, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, signal.SIG_DFL if before is None else before)  # None: one of C
