"""Progress reports and time limits for the host's waits.

    with waiting("rewards", lambda: f"{left} of {calls} calls left"):
        ...

    waiting for the rewards of step 12: 40 s, 3 of 64 calls left

Imports no JAX. Outside a ``Waits`` context, waits are not reported and have no limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

SAY_SECONDS = 30.0
"""Report a wait after 30 s and each time it doubles; start later if it has been long before."""

LOOK_SECONDS = 1.0


@dataclasses.dataclass
class Wait:
    """One wait of one thread.

    Attributes:
      subject: the object waited for, after "waiting for the".
      of: its owner, such as "step 12"; None inherits the surrounding wait's.
      detail: progress text; called from another thread.
      seconds: minimum time before the wait may be ended, whatever the limit.
      began: start, of ``time.monotonic``.
      changed: time of the last change of ``last_detail``.
      last_detail: last progress text.
      says: age at which the wait is reported next, seconds.
    """

    subject: str
    of: str | None
    detail: Callable[[], str]
    seconds: float
    began: float
    changed: float
    last_detail: str = ""
    says: float = SAY_SECONDS

    def text(self, now: float) -> str:
        """The wait in words: object, age, progress."""
        of = f" of {self.of}" if self.of else ""
        detail = f", {self.last_detail}" if self.last_detail else ""
        return f"the {self.subject}{of}: {now - self.began:.0f} s{detail}"

    def look(self, now: float) -> None:
        """Updates the progress text."""
        with contextlib.suppress(Exception):  # the main thread changes what ``detail`` reads
            detail = self.detail()
            if detail != self.last_detail:
                self.last_detail, self.changed = detail, now


_lock = threading.Lock()
_waits: dict[int, list[Wait]] = {}
_longest: dict[str, float] = {}
"""Longest wait so far by name, seconds, so that routinely slow waits are reported once."""


@contextlib.contextmanager
def waiting(
    subject: str,
    detail: Callable[[], str] = str,
    *,
    of: str | None = None,
    seconds: float = 0.0,
) -> Iterator[None]:
    """Registers a wait of this thread for the duration of the block.

    Args:
      subject: the object waited for, after "waiting for the".
      detail: a short progress text; a change of it counts as progress. Called from another thread.
      of: its owner, such as "step 12"; None inherits the surrounding wait's.
      seconds: minimum time without progress before the wait may be ended, whatever the limit.
    """
    thread, now = threading.get_ident(), time.monotonic()
    with _lock:
        stack = _waits.setdefault(thread, [])
        of = stack[-1].of if of is None and stack else of
        report_after = max(SAY_SECONDS, 2 * _longest.get(subject, 0.0))
        wait = Wait(subject, of, detail, seconds, now, now, says=report_after)
        stack.append(wait)
    try:
        yield
    finally:
        with _lock:
            stack.remove(wait)
            _longest[subject] = max(_longest.get(subject, 0.0), time.monotonic() - now)
            if not stack:
                _waits.pop(thread, None)


def io_progress() -> str:
    """Bytes read and written by this process so far: the progress of a wait for files."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        counts = [line.split() for line in Path("/proc/self/io").read_text().splitlines()]
        counters = {name: int(count) for name, count in counts}
        # Memory-mapped reads appear in read_bytes only, cached reads in rchar only.
        total = counters["wchar:"] + max(counters["rchar:"], counters["read_bytes:"])
        return f"{total // 1_000_000:,} MB read and written by now"
    return ""


class Waits:
    """Watches the waits of all threads from a separate thread; a context manager.

    Args:
      limit_seconds: of a wait without progress.
      say: called with "waiting for the ...", a line.
      end: called once, with a line about the overdue wait, while the waiting thread still waits.
    """

    def __init__(
        self, limit_seconds: float, say: Callable[[str], object], end: Callable[[str], object]
    ) -> None:
        self._limit, self._say, self._end = limit_seconds, say, end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="waits", daemon=True)

    def __enter__(self) -> Self:
        _longest.clear()  # of another run
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(5 * LOOK_SECONDS)  # unless a detail hangs

    def _listen(self) -> None:
        reported = False
        while not self._over.wait(LOOK_SECONDS):
            now = time.monotonic()
            with _lock:
                stacks = [list(stack) for stack in _waits.values()]
            for stack in stacks:
                for wait in stack:
                    wait.look(now)
                self._tell(stack[-1], now)
                for wait in stack:
                    limit = max(self._limit, wait.seconds)
                    # Progress of an inner wait is progress of the waits around it.
                    progress = max(each.changed for each in stack[stack.index(wait) :])
                    if not reported and now - progress > limit:
                        reported = True
                        self._end(f"waited too long for {stack[-1].text(now)}")

    def _tell(self, wait: Wait, now: float) -> None:
        if now - wait.began >= wait.says:
            wait.says = 2 * (now - wait.began)
            with contextlib.suppress(Exception):  # the terminal may be closed
                self._say(f"waiting for {wait.text(now)}")
