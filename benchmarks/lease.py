"""A record that survives a short lease of a machine: rows written at once, a budget, an end."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clock import rounded


class Record:
    """Rows as JSON lines on stdout and in a file, each flushed as it is added.

    Attributes:
      rows: all of them, as written.
      left_out: names of rows that were not measured.
      summary: (record) -> the text at the end.
    """

    def __init__(self, path: str, summary: Callable[[Record], str]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.summary = summary
        self.path = Path(path) if path else None
        self._ended, self._lock = False, threading.RLock()

    def add(self, row: dict[str, Any]) -> None:
        """Writes a row."""
        row = rounded(row)
        with self._lock:
            self.rows.append(row)
            self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)

    def end(self, reason: str = "") -> None:
        """Writes what was left out and the summary, once.

        Args:
          reason: that it ended before all rows were measured; "" for none.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._write({"kind": "end", "reason": reason, "left_out": self.left_out})
            sys.stdout.write(self.summary(self))
            sys.stdout.flush()


@contextmanager
def ends_in_time(record: Record, seconds: float) -> Iterator[None]:
    """Ends the process with what the record has on SIGTERM, on Ctrl-C, or after some seconds.

    It does so while a compilation or a call of a device blocks Python's main thread, whose own
    signal handlers would only run afterwards: a thread waits for the signal's number in a pipe.

    Args:
      record: is ended.
      seconds: from now on; 0 for no limit.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signals = (signal.SIGTERM, signal.SIGINT)
    old = {number: signal.signal(number, lambda *_: None) for number in signals}
    wakeup = signal.set_wakeup_fd(writes)

    def wait() -> None:
        ready, _, _ = select.select([reads], [], [], seconds or None)
        number = os.read(reads, 1)[0] if ready else 0
        if ready and not number:
            return
        name = signal.Signals(number).name if number else f"--seconds {seconds:g}"
        record.end(f"{name} in the middle of a row")
        os._exit(128 + number if number else 0)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(writes, b"\0")
        thread.join()
        signal.set_wakeup_fd(wakeup)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(reads)
        os.close(writes)


class Cost(NamedTuple):
    """Cost factors of a row: layers to compile, and work of any unit to run."""

    layers: float
    work: float


class Budget:
    """Seconds that are left, and whether a row fits into them, judged by the last of its kind."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock, self.began = seconds, clock, clock()
        self._last: dict[str, tuple[Cost, float, float]] = {}
        self._longest = 0.0

    def left(self) -> float:
        """Seconds; infinity without a budget."""
        spent = self.clock() - self.began
        return self.seconds - spent if self.seconds else float("inf")

    def estimate(self, kind: str, cost: Cost) -> float:
        """Seconds that a row will take; of the first one of its kind, the longest one's so far."""
        if kind not in self._last:
            return self._longest
        last, compile_s, rest_s = self._last[kind]
        return compile_s * cost.layers / last.layers + rest_s * cost.work / last.work

    def fits(self, kind: str, cost: Cost) -> bool:
        """Whether there is time for a row."""
        return self.estimate(kind, cost) < self.left()

    def spent(self, kind: str, cost: Cost, compile_s: float, seconds: float) -> None:
        """Notes a measured row: ``seconds`` in all, ``compile_s`` of them to compile."""
        self._last[kind] = cost, compile_s, max(seconds - compile_s, 0.0)
        self._longest = max(self._longest, seconds)
