"""What a run waits for on the host: said while it lasts, and ended where it takes too long.

    with waiting("rewards", lambda: f"{left} of {calls} calls left"):
        ...

    waiting for the rewards of step 12: 40 s, 3 of 64 calls left

Free of JAX. Where nobody listens (``Waits``), a wait is not said and has no limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

SAY_SECONDS = 30.0
"""A wait is said from here on, again whenever it has doubled, later where it was long before."""

LOOK_SECONDS = 1.0


@dataclasses.dataclass
class Wait:
    """One wait of one thread.

    Attributes:
      what: it is for, after "waiting for the".
      of: what that belongs to, such as "step 12"; None for what the wait around it says.
      detail: how far it is; called from another thread.
      seconds: the least time that it must be given, whatever the limit is.
      began: of ``time.monotonic``.
      moved: when the detail last changed.
      told: the detail of then.
      says: seconds after which it is said next.
    """

    what: str
    of: str | None
    detail: Callable[[], str]
    seconds: float
    began: float
    moved: float
    told: str = ""
    says: float = SAY_SECONDS

    def text(self, now: float) -> str:
        """What is said of it."""
        of = f" of {self.of}" if self.of else ""
        told = f", {self.told}" if self.told else ""
        return f"the {self.what}{of}: {now - self.began:.0f} s{told}"

    def look(self, now: float) -> None:
        """Asks how far it is."""
        with contextlib.suppress(Exception):  # what it looks at changes under it
            told = self.detail()
            if told != self.told:
                self.told, self.moved = told, now


_lock = threading.Lock()
_waits: dict[int, list[Wait]] = {}
_longest: dict[str, float] = {}
"""Seconds that a wait of a name took at most so far, so that what is always slow is said once."""


@contextlib.contextmanager
def waiting(
    what: str,
    detail: Callable[[], str] = str,
    *,
    of: str | None = None,
    seconds: float = 0.0,
) -> Iterator[None]:
    """Notes that this thread waits for something as long as the block lasts.

    Args:
      what: it waits for, after "waiting for the".
      detail: says how far it is, in few words; a change of it is progress. Called from another
        thread.
      of: what that belongs to, such as "step 12"; None for what the wait around it says.
      seconds: the least time that a wait without progress must be given, whatever the limit.
    """
    thread, now = threading.get_ident(), time.monotonic()
    with _lock:
        stack = _waits.setdefault(thread, [])
        of = stack[-1].of if of is None and stack else of
        says = max(SAY_SECONDS, 2 * _longest.get(what, 0.0))
        wait = Wait(what, of, detail, seconds, now, now, says=says)
        stack.append(wait)
    try:
        yield
    finally:
        with _lock:
            stack.remove(wait)
            _longest[what] = max(_longest.get(what, 0.0), time.monotonic() - now)
            if not stack:
                _waits.pop(thread, None)


def moved() -> str:
    """What this process has read and written so far: the progress of a wait for files."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        counts = [line.split() for line in Path("/proc/self/io").read_text().splitlines()]
        kept = {name: int(count) for name, count in counts}
        # What is mapped into memory counts as storage alone.
        total = kept["wchar:"] + max(kept["rchar:"], kept["read_bytes:"])
        return f"{total // 1_000_000:,} MB read and written by now"
    return ""


class Waits:
    """Listens to the waits of all threads, in a thread of its own; a context manager.

    Args:
      limit_seconds: of a wait without progress.
      say: called with "waiting for the ...", a line.
      end: called once, with what was waited for too long; it runs beside the thread that waits.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(5 * LOOK_SECONDS)  # unless a detail hangs

    def _listen(self) -> None:
        ended = False
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
                    # Progress inside is progress of what is around it.
                    moved = max(each.moved for each in stack[stack.index(wait) :])
                    if not ended and now - moved > limit:
                        ended = True
                        self._end(f"waited too long for {stack[-1].text(now)}")

    def _tell(self, wait: Wait, now: float) -> None:
        if now - wait.began >= wait.says:
            wait.says = 2 * (now - wait.began)
            with contextlib.suppress(Exception):  # a terminal that is gone
                self._say(f"waiting for {wait.text(now)}")
