"""The limits of judges: the time and the counts of one call, and the pace of requests."""

from __future__ import annotations

import collections
import heapq
import math
import statistics
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from jrl.judging.cache import Reply

_OVERDUE_SECONDS, _OVERDUE_TIMES, _MIN_REPLIES = 1.0, 10, 8
"""A request is overdue after this time, and this multiple of the median of the last answers, once
there were so many."""


class Question(NamedTuple):
    """One that is on its way.

    Attributes:
      name: of its verdict.
      entry: the question and the number of its vote.
      attempt: number of the request.
      in_vain: attempts before it, in a row, between which no other question was answered.
      answered: ``Pace.answered`` when the attempt before it failed; -1 for the first.
      failed: when that was, of ``time.monotonic``; infinite for the first.
    """

    name: str
    entry: Any
    attempt: int = 0
    in_vain: int = 0
    answered: int = -1
    failed: float = math.inf

    def again(self, answered: int, now: float) -> Question:
        """Its next attempt.

        Args:
          answered: ``Pace.answered`` of now. Where others were answered since the last failure, it
            is not the judge that has to recover.
          now: time of its failure, of ``time.monotonic``.
        """
        in_vain = self.in_vain + 1 if self.answered == answered else 0
        attempt = self.attempt + 1
        return self._replace(attempt=attempt, in_vain=in_vain, answered=answered, failed=now)


COUNTS = (
    *("judge_calls", "judge_cached", "judge_retries"),
    *("judge_unreadable", "judge_timeouts", "judge_failures"),
)
"""Requests sent, verdicts of the cache, repeated requests; questions that stay without a verdict
since the reply held none, since there was no time left, or since the judge refused or is down."""


class QuestionBatch:
    """The questions of one call, their verdicts, their counts and the end; safe between threads.

    It has no end before ``limit`` says when, so that questions may be asked while others are on
    their way.

    Args:
      at_once: requests at the same time.
      beside: requests that may be overdue, far longer under way than others take, and are not among
        those ``at_once``.

    Attributes:
      threads: that ask them.
    """

    def __init__(self, at_once: int, beside: int) -> None:
        self._changed = threading.Condition()
        self.threads = 0
        self._at_once, self._beside = at_once, beside
        self._sent: dict[str, float] = {}  # when the requests that are under way were sent
        self._seconds: collections.deque[float] = collections.deque(maxlen=64)  # of answers
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

        A question that waits for its repetition holds up no other, nor does one whose request is
        overdue. Its request is under way until ``returned``.
        """
        with self._changed:
            while not self._over:
                now = time.monotonic()
                due = self._again and self._again[0][0] <= now
                if due or self._queue:
                    if wait := self._full(now):
                        self._changed.wait(max(min(wait, self.left()), 0.001))
                        continue
                    question = heapq.heappop(self._again)[2] if due else self._queue.popleft()
                    self._sent[question.name] = math.inf
                    return question
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

    def _full(self, now: float) -> float:
        """Seconds until a further request may be under way, if nothing happens; 0 for now."""
        if len(self._sent) < self._at_once:
            return 0.0
        if len(self._sent) >= self._at_once + self._beside or len(self._seconds) < _MIN_REPLIES:
            return threading.TIMEOUT_MAX
        longest = max(_OVERDUE_SECONDS, _OVERDUE_TIMES * statistics.median(self._seconds))
        # All but ``at_once - 1`` have to be overdue, which the oldest are first.
        oldest = sorted(self._sent.values())[len(self._sent) - self._at_once]
        return min(max(oldest + longest - now, 0.0), threading.TIMEOUT_MAX)

    def send(self, name: str) -> bool:
        """Notes that a request is sent now; whether there are more than ``at_once``."""
        with self._changed:
            self._sent[name] = time.monotonic()
            self._changed.notify_all()
            return len(self._sent) > self._at_once

    def works_on_others(self, name: str, since: float) -> bool:
        """Whether a request has been under way since before the last failure of this question.

        Where it has not failed yet, since before it was sent. Requests that are all refused do not
        last so long.
        """
        with self._changed:
            since = min(since, self._sent[name])
            return any(sent < since for sent in self._sent.values())

    def replied(self, name: str) -> None:
        """Notes that a reply came; by the time of these others are overdue."""
        with self._changed:
            self._seconds.append(time.monotonic() - self._sent[name])

    def returned(self, name: str) -> None:
        """Notes the end of a request."""
        with self._changed:
            del self._sent[name]
            self._changed.notify_all()

    def start_thread(self) -> bool:
        """Whether a further thread is to ask; then it counts.

        There is one more than requests, which is free when one is overdue.
        """
        with self._changed:
            most = self._at_once + self._beside
            if self.threads > len(self._sent):
                most = min(self._at_once + 1, most)
            starts = self.threads < most and bool(self._queue or self._again)
            self.threads += starts
            return starts

    def narrow(self) -> None:
        """From here on an overdue request counts like any other."""
        with self._changed:
            self._beside = 0

    def limit(self, seconds: float) -> None:
        """Ends it within this many seconds."""
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

    def finish(self, name: str, outcome: str, reply: Reply | None) -> None:
        """Notes the end of a question: what is to be counted besides, and the reply or None."""
        with self._changed:
            self._end(name, outcome, reply)

    def _end(self, name: str, outcome: str, reply: Reply | None) -> None:
        self._ended.setdefault(name, (outcome, reply))
        if name in self._missing:
            self._missing.remove(name)
            if not self._missing:
                self._changed.notify_all()

    def close(self, names: Collection[str]) -> tuple[dict[str, Reply | None], dict[str, float]]:
        """Replies by name, and the counts; questions that did not end are out of time.

        Args:
          names: of the questions whose replies are wanted. What else was asked counts as requests
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
    """When requests may be sent.

    Attributes:
      answered: number of requests that were.
    """

    def __init__(self, per_minute: float) -> None:
        self._gap = 60 / per_minute if per_minute else 0.0
        self._lock, self._next, self._paused_until = threading.Lock(), 0.0, 0.0
        self._serves = False  # since it last refused
        self.answered = 0

    def served(self) -> None:
        """Notes that a request was answered."""
        with self._lock:
            self._serves, self.answered = True, self.answered + 1

    def refused(self, seconds: float) -> None:
        """Notes that a request is to be repeated after some time.

        Then nothing is sent meanwhile, as all others would be refused, too; but for the first of a
        server that has answered others since it last refused one.
        """
        with self._lock:
            if not self._serves:
                self._paused_until = max(self._paused_until, time.monotonic() + seconds)
            self._serves = False

    def wait(self, batch: QuestionBatch) -> bool:
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
