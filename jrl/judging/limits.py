"""The limits of judges: the time and the counts of one call, and the pace of requests."""

from __future__ import annotations

import collections
import heapq
import math
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple


class Question(NamedTuple):
    """One that is on its way.

    Attributes:
      name: of its verdict.
      entry: the question and the number of its vote.
      attempt: number of the request.
    """

    name: str
    entry: Any
    attempt: int = 0


COUNTS = (
    *("judge_calls", "judge_cached", "judge_retries"),
    *("judge_unreadable", "judge_timeouts", "judge_failures"),
)
"""Requests sent, verdicts of the cache, repeated requests; questions that stay without a verdict
since the reply held none, since there was no time left, or since the judge refused or is down."""


class Batch:
    """The questions of one call, their verdicts, their counts and the end; safe between threads.

    It has no end before ``limit`` says when, so that questions may be asked while others are on
    their way.

    Attributes:
      threads: that take questions.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.threads = 0
        self._queue: collections.deque[Question] = collections.deque()
        self._again: list[tuple[float, int, Question]] = []  # a heap, by when they are due
        self._puts = 0
        self._until, self._over = math.inf, False
        self._ended: dict[str, tuple[str, Any]] = {}
        self._missing: set[str] = set()  # of those that ``wait`` waits for
        self._counts = dict.fromkeys(COUNTS, 0.0)

    def put(self, question: Question, after: float = 0.0) -> None:
        """Queues a question, or one that is repeated after some seconds."""
        with self._changed:
            self._puts += 1
            if after:
                due = time.monotonic() + after
                heapq.heappush(self._again, (due, self._puts, question))
            else:
                self._queue.append(question)
            self._changed.notify_all()

    def take(self) -> Question | None:
        """The next question; None where none is left, or the batch is over: the thread is to end.

        A question that waits for its repetition holds up no other.
        """
        with self._changed:
            while not self._over:
                now = time.monotonic()
                if self._again and self._again[0][0] <= now:
                    return heapq.heappop(self._again)[2]
                if self._queue:
                    return self._queue.popleft()
                if not self._again:
                    break
                if self._again[0][0] >= self._until:  # all would come too late
                    for _, _, question in self._again:
                        self._end(question.name, "judge_timeouts", None)
                    self._again.clear()
                    continue
                self._changed.wait(max(min(self._again[0][0] - now, self.left()), 0.001))
            self.threads -= 1
        return None

    def limit(self, seconds: float) -> None:
        """Ends it in so many seconds at the latest."""
        with self._changed:
            self._until = time.monotonic() + seconds
            self._changed.notify_all()

    def left(self) -> float:
        """Seconds until the end; infinite before there is a limit."""
        return self._until - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing is asked any more."""
        return self._over

    def stop(self) -> None:
        """Ends it now."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def sleep(self, seconds: float) -> bool:
        """Waits for so long, for the end, or for a limit that is new; returns ``over``."""
        with self._changed:
            if not self._over:
                self._changed.wait(max(min(seconds, self.left()), 0))
            return self._over

    def wait(self, names: Collection[str]) -> None:
        """Waits until all questions of these names have ended, or for the end; then it is over."""
        with self._changed:
            self._missing = set(names) - self._ended.keys()
            while not self._over and self.left() > 0 and self._missing:
                self._changed.wait(min(self.left(), threading.TIMEOUT_MAX))
            self._over = True
            self._changed.notify_all()

    def progress(self, names: Collection[str]) -> str:
        """Progress, as text."""
        return f"{sum(name not in self._ended for name in names)} of {len(names)} verdicts left"

    def count(self, name: str) -> None:
        """Adds one."""
        with self._changed:
            self._counts[name] += 1

    def finish(self, name: str, outcome: str, verdict: Any) -> None:
        """Notes the end of a question: what is to be counted besides, and the verdict or None."""
        with self._changed:
            self._end(name, outcome, verdict)

    def _end(self, name: str, outcome: str, verdict: Any) -> None:
        self._ended.setdefault(name, (outcome, verdict))
        if name in self._missing:
            self._missing.remove(name)
            if not self._missing:
                self._changed.notify_all()

    def close(self, names: Collection[str]) -> tuple[dict[str, Any], dict[str, float]]:
        """Verdicts by name, and the counts; questions that did not end are out of time.

        Args:
          names: of the questions whose verdicts are wanted. What else was asked counts as requests
            alone.
        """
        with self._changed:
            ended, counts = dict(self._ended), dict(self._counts)
        for name in names:
            outcome, _ = ended.get(name, ("judge_timeouts", None))
            if outcome:
                counts[outcome] += 1
        return {name: ended[name][1] for name in names if name in ended}, counts


class Pace:
    """When requests may be sent."""

    def __init__(self, per_minute: float) -> None:
        self._gap = 60 / per_minute if per_minute else 0.0
        self._lock, self._next, self._paused_until = threading.Lock(), 0.0, 0.0
        self._serves = False  # since it last refused

    def served(self) -> None:
        """Notes that a request was answered."""
        self._serves = True

    def refused(self, seconds: float) -> None:
        """Notes that a request is to be repeated after some time.

        Then nothing is sent meanwhile, as all others would be refused, too; but for the first of a
        server that has answered others since it last refused one.
        """
        with self._lock:
            if not self._serves:
                self._paused_until = max(self._paused_until, time.monotonic() + seconds)
            self._serves = False

    def wait(self, batch: Batch) -> bool:
        """Waits for one's turn; False where that comes after the batch has ended."""
        while True:
            with self._lock:
                now = time.monotonic()
                turn = max(self._next, self._paused_until, now)
                if turn - now >= batch.left():
                    return False
                if turn <= now:
                    self._next = now + self._gap
                    return not batch.over
            if batch.sleep(turn - now):
                return False
