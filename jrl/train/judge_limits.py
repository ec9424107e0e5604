"""The limits of judges: the time and the counts of one call, and the pace of requests."""

from __future__ import annotations

import threading
import time
from typing import Any

COUNTS = (
    *("judge_calls", "judge_cached", "judge_retries"),
    *("judge_unreadable", "judge_timeouts", "judge_failures"),
)
"""Requests sent, verdicts of the cache, repeated requests; questions that stay without a verdict
since the reply held none, since there was no time left, or since the judge refused or is down."""


class Batch:
    """The verdicts, the counts and the end of one call; safe between threads."""

    def __init__(self, until: float) -> None:
        self.over = threading.Event()
        self._until, self._lock, self.finished = until, threading.Lock(), 0
        self._closed = False
        self._verdicts: dict[str, Any] = {}
        self._counts = dict.fromkeys(COUNTS, 0.0)

    def left(self) -> float:
        """Seconds until the end."""
        return self._until - time.monotonic()

    def progress(self, asked: int) -> str:
        """How far it is, for people."""
        return f"{asked - self.finished} of {asked} verdicts left"

    def count(self, name: str) -> None:
        """Adds one; nothing once the batch is closed."""
        with self._lock:
            self._counts[name] += not self._closed

    def finish(self, name: str, outcome: str, verdict: Any) -> None:
        """Notes the end of a question; nothing once the batch is closed."""
        with self._lock:
            if self._closed:
                return
            self.finished += 1
            if outcome:
                self._counts[outcome] += 1
            if verdict is not None:
                self._verdicts[name] = verdict

    def close(self, asked: int) -> tuple[dict[str, Any], dict[str, float]]:
        """Verdicts by name, and the counts; questions that did not end are out of time."""
        with self._lock:
            self._closed = True
            self._counts["judge_timeouts"] += asked - self.finished
            return self._verdicts, self._counts


class Pace:
    """When requests may be sent."""

    def __init__(self, per_minute: float) -> None:
        self._gap = 60 / per_minute if per_minute else 0.0
        self._lock, self._next, self._held = threading.Lock(), 0.0, 0.0

    def hold(self, seconds: float) -> None:
        """Sends nothing for some time."""
        with self._lock:
            self._held = max(self._held, time.monotonic() + seconds)

    def wait(self, batch: Batch) -> bool:
        """Waits for one's turn; False where that comes after the batch has ended."""
        while True:
            with self._lock:
                now = time.monotonic()
                turn = max(self._next, self._held, now)
                if turn - now >= batch.left():
                    return False
                if turn <= now:
                    self._next = now + self._gap
                    return not batch.over.is_set()
            if batch.over.wait(turn - now):
                return False
