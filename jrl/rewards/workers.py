"""The worker processes of a pool: messages in, results out, each result as soon as it is there.

    workers = Workers(functions, 8, limits)
    jobs = workers.submit(messages)         # returns at once
    for job in workers.finished(jobs):      # in any order
        job.result

A thread hands out one call at a time and looks at the workers ten times a second, so that calls run
while the caller decodes. A call beyond a limit is killed with its process and all descendants; the
other workers continue. Beside a call that takes far longer than calls usually do, or half of its
time, another process is started and takes the next call, and the slow one gets the lowest priority:
those that hang hold up no other.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import queue
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from typing import Protocol

from jrl.errors import UserError
from jrl.rewards.base import Returned, RewardFn
from jrl.rewards.call import Failure
from jrl.rewards.starting import Processes
from jrl.rewards.worker import Lost, RewardWorker

_FAILURES_IN_A_ROW = 8
"""Of one process, which is then replaced; a reward that always fails costs little by it."""
_LOOK_SECONDS, _FLOOD_SECONDS = 0.1, 0.02
"""Between two looks at the workers, and where one prints more than is shown."""
_START_SECONDS = 600
"""Time for a worker to load the functions."""
_SLOW, _SLOW_COPIED, _FAR_BEHIND, _MIN_CALLS = (0.5, 4), (0.1, 8), (0.1, 20), 8
"""A call is slow after this time, and this multiple of the median of the last calls, once so many
have ended; where the process beside it is a copy, which costs little; and so slow that others come
first."""
_BESIDE = 8
"""Slow calls that hold up no other, or ``count`` where that is more. Limits are of wall time, so
those that hang waste less of the processor when they hang together."""
_SPARES = 2
"""Processes that are loaded and idle, once a call was slow or was lost, where none can be copied:
the next one is replaced at once."""
_PRINTED = 1 << 14
"""Bytes that workers may print while one batch is judged; the rest is dropped."""

_NOT_STARTED = (
    "the worker processes of the rewards end as soon as they start (exit code {code}); a training "
    'script whose own functions are rewards must run under if __name__ == "__main__":, because '
    "each worker imports it; or set "
    "reward_pool.workers = 0"
)


class CallLimits(Protocol):
    """Limits of one call: seconds, and GiB of its worker and the worker's descendants."""

    timeout_seconds: float
    memory_gib: float


class Job:
    """A call that is queued, runs, or has ended.

    Attributes:
      message: for the worker.
      result: rewards or a Failure; None before the end.
      error: what ended all calls; None without one.
      cancelled: whether its result is no longer needed.
      inbox: queue for its result; None while no caller waits.
    """

    __slots__ = ("cancelled", "error", "inbox", "message", "result")

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.result: list[Returned] | Failure | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.inbox: queue.SimpleQueue[Job] | None = None


class Workers:
    """The processes of a pool, and their running calls.

    Args:
      functions: the reward functions.
      count: calls at a time.
      limits: read before each look at the workers.

    Raises:
      UserError: a function cannot be sent to a process.

    Attributes:
      printed: bytes that the workers have printed since somebody set it to 0.
    """

    def __init__(self, functions: Mapping[str, RewardFn], count: int, limits: CallLimits) -> None:
        for name, function in functions.items():
            try:
                # Each by itself, so that the error names the function.
                pickle.dumps(function)
            except Exception as error:
                raise UserError(
                    f"rewards.{name} cannot be sent to a worker process ({error}); write it as a "
                    "function of a module or file, or set reward_pool.workers = 0"
                ) from error
        # Pickled once, since workers are started throughout the run.
        self._processes = Processes(pickle.dumps(dict(functions)))
        self._count, self._limits = count, limits
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._closed = self._awake = False
        # The rest is the thread's.
        self._living: list[RewardWorker] = []
        self._failed_starts, self.printed = 0, 0
        self._seconds: deque[float] = deque(maxlen=64)  # of the last calls
        self._beside, self._spares = max(count, _BESIDE), 0
        self._measured, self._measure = 0.0, False  # when memory was last looked at; whether to now
        self._looked = 0.0  # when all workers were
        # A new call must not wait for the next look.
        self._woken, self._waker = multiprocessing.Pipe(duplex=False)

    def submit(self, messages: Sequence[bytes]) -> list[Job]:
        """Queues calls; returns at once."""
        jobs = [Job(message) for message in messages]
        with self._changed:
            if self._closed:
                raise RuntimeError(_CLOSED)
            self._waiting.extend(jobs)
            if self._thread is None and jobs:
                # A daemon, so that a pool that was not closed does not delay Python's exit.
                self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._wake()
        return jobs

    def finished(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Yields jobs as they end; those left when the caller stops reading are cancelled.

        Raises:
          UserError: no process can be started, or the functions cannot be loaded in one.
          RuntimeError: the workers were stopped meanwhile.
        """
        inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        with self._changed:
            for job in jobs:
                job.inbox = inbox
                if job.result is not None or job.error is not None:
                    inbox.put(job)
        try:
            for _ in jobs:
                job = inbox.get()
                if job.error is not None:
                    raise job.error
                yield job
        finally:
            self.cancel(jobs)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drops calls that have not ended; the processes that run them are killed."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
        self._wake()

    def loading(self) -> str:
        """A suffix for a progress line: the number of processes still loading the functions."""
        count = sum(not worker.ready for worker in list(self._living))
        return f", {count} of {len(self._living)} workers loading" if count else ""

    def stop(self) -> None:
        """Ends all processes; calls under way end with a RuntimeError. May be called twice."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify_all()
        self._wake()
        if thread is not None:
            thread.join()
        for worker in list(self._living):
            self._end(worker)
        self._processes.close()

    def _wake(self) -> None:
        with self._changed:
            if not self._awake:  # one message at a time, or the pipe would fill
                self._awake = True
                self._waker.send_bytes(b".")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._next():
                self._start_enough()
                self._hand_out()
                for worker in self._wait():
                    finished = self._look_at(worker)
                    if finished is not None:
                        self._finish(*finished)
        except BaseException as error:
            self._fail(error)
        else:
            self._fail(RuntimeError(_CLOSED))

    def _next(self) -> bool:
        """Waits for a call; False once the workers are closed."""
        with self._changed:
            while not self._closed:
                for worker in list(self._living):
                    if worker.call is not None and worker.call.cancelled:
                        self._end(worker)
                if self._waiting or self._busy():
                    return True
                for worker in self._living[self._count + self._spares :]:
                    self._end(worker)
                self._changed.wait()
        return False

    def _busy(self) -> list[RewardWorker]:
        return [worker for worker in self._living if worker.call is not None]

    def _finish(self, job: Job, result: list[Returned] | Failure) -> None:
        with self._changed:
            job.result = result
            if job.inbox is not None:
                job.inbox.put(job)

    def _fail(self, error: BaseException) -> None:
        """Ends all calls with an error; the next one starts anew."""
        with self._changed:
            busy = self._busy()
            for job in (*self._waiting, *(worker.call for worker in busy)):
                job.error = error
                if job.inbox is not None:
                    job.inbox.put(job)
            self._waiting.clear()
            for worker in busy:
                self._end(worker)
            self._thread = None

    def _slower(self, than: tuple[float, int]) -> list[RewardWorker]:
        """The workers whose call takes longer than a time, and than a multiple of the usual one."""
        # A process that takes its place needs the other half of the limit to start.
        limit = self._limits.timeout_seconds / 2
        if len(self._seconds) >= _MIN_CALLS:
            limit = min(limit, max(than[0], than[1] * statistics.median(self._seconds)))
        return [worker for worker in self._busy() if worker.seconds() > limit]

    def _slow(self) -> int:
        """The number of calls that are slow, as far as others may run beside them."""
        slow = self._slower(_SLOW_COPIED if self._processes.copies else _SLOW)
        if slow:
            self._expect_losses()
        return min(len(slow), self._beside)

    def _put_behind(self) -> None:
        """Lets those that wait have the processor, and not calls that probably hang."""
        # For a worker that was put behind has to be replaced, which only copies make cheap.
        late = self._slower(_FAR_BEHIND) if self._processes.copies and self._waiting else []
        for worker in self._busy():
            worker.put_behind(worker in late)

    def _expect_losses(self) -> None:
        self._processes.expect_losses()
        self._spares = _SPARES

    def _start_enough(self) -> None:
        """Starts processes for the remaining calls, and one beside each call that is slow."""
        busy, waiting = self._busy(), len(self._waiting)
        beside = self._slow() + (self._spares if self._processes.copies is False else 0)
        target = min(self._count, waiting + len(busy)) + min(beside, waiting)
        while len(self._living) < target:
            try:
                # Started without waiting: loading may take minutes, and the others work meanwhile.
                self._living.append(self._processes.start())
            except OSError as error:
                raise UserError(
                    f"rewards: no worker process can be started: {error}; end other processes, or "
                    f"lower reward_pool.workers = {self._count}"
                ) from None

    def _hand_out(self) -> None:
        slow = self._slow()
        for worker in list(self._living):
            # No more calls at a time than workers, but for slow ones.
            if len(self._busy()) - slow >= self._count:
                return
            if not worker.idle:
                continue
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            try:
                worker.send(job, job.message)
            except Lost:
                self._end(worker)
                with self._changed:
                    self._waiting.appendleft(job)

    def _wait(self) -> list[RewardWorker]:
        """The workers that have sent something or are out of time; at times all of them."""
        limit, shows = self._limits.timeout_seconds, self.printed <= _PRINTED
        times = [worker.charged_seconds(limit) for worker in self._busy()]
        rest = limit - max(times, default=0.0)
        pipes = [worker.connection for worker in self._living]
        if shows:  # else those that print would keep this thread busy
            pipes += [worker.output for worker in self._living]
        # At most a tenth of a second, since memory grows without any message.
        period = _LOOK_SECONDS if shows else _FLOOD_SECONDS
        ready = connection.wait([*pipes, self._woken], timeout=max(min(rest, period), 0.001))
        if self._woken in ready:
            with self._changed:
                self._woken.recv_bytes()
                self._awake = False
        # These have clocks of their own: messages may wake this loop thousands of times a second,
        # and calls that hang must not make each of them dear.
        now = time.monotonic()
        self._measure = now - self._measured > _LOOK_SECONDS
        if self._measure:
            self._measured = now
            self._processes.tidy()
            self._put_behind()
        if now - self._looked > period:
            self._looked = now
            return list(self._living)
        return [
            worker
            for worker in self._living
            if worker.connection in ready
            or worker.output in ready
            or (worker.call is not None and worker.charged_seconds(limit) > limit)
        ]

    def _look_at(self, worker: RewardWorker) -> tuple[Job, list[Returned] | Failure] | None:
        """The finished call of a worker, if any; kills the worker if it is beyond a limit."""
        try:
            self._show(worker.read_output())
            reply = worker.receive()
        except Lost:
            return self._lost(worker)
        if reply is not None and not worker.ready:
            # The first message reports whether the functions could be loaded.
            if isinstance(reply, Failure):
                raise UserError(f"rewards: {reply.reason}")
            worker.ready, self._failed_starts = True, 0
        elif reply is not None:
            job, worker.call = worker.call, None
            self._seconds.append(worker.seconds())
            if worker.failures >= _FAILURES_IN_A_ROW or worker.behind:
                # A reward may have broken its interpreter for all that come after it; and a low
                # priority cannot be raised.
                self._end(worker)
            return job, reply
        elif worker.exit_code() is not None:
            return self._lost(worker)
        return self._beyond_limits(worker)

    def _beyond_limits(self, worker: RewardWorker) -> tuple[Job, Failure] | None:
        """The Failure of a call that uses too much time or memory; its worker is killed."""
        limits, failure = self._limits, None
        if not worker.ready and worker.seconds() > _START_SECONDS:
            raise UserError(
                f"rewards: a worker process has not loaded them in {_START_SECONDS} s; look for "
                "what waits in the file of the reward function, or set reward_pool.workers = 0"
            )
        longest = limits.timeout_seconds
        if worker.call is not None and worker.charged_seconds(longest) > longest:
            reason = f"took longer than reward_pool.timeout_seconds = {limits.timeout_seconds:g}"
            failure = Failure(reason, timed_out=True)
        elif self._measure and math.isfinite(limits.memory_gib):
            most = int(limits.memory_gib * 2**30)
            # Proportional set sizes are slow to read, so exact sums are made only near the limit.
            used = worker.memory_bytes(above=most)
            if used > most:
                failure = Failure(
                    f"used {used / 2**30:.2g} GiB of memory, more than reward_pool.memory_gib = "
                    f"{limits.memory_gib:g}, and was ended"
                )
                if not worker.ready:
                    raise UserError(f"rewards: loading them in a worker {failure.reason}")
        if failure is None:
            return None
        job = worker.call
        self._end(worker, its_files=not failure.timed_out)
        return None if job is None else (job, failure)

    def _lost(self, worker: RewardWorker) -> tuple[Job, Failure] | None:
        """The Failure of a worker that died, if it had a call."""
        # It may have closed its pipe a moment before its end.
        job, ready, code = worker.call, worker.ready, worker.exit_code(wait_seconds=1.0)
        self._end(worker)
        if not ready:
            self._failed_starts += 1
            if self._failed_starts > 1:  # one may have been killed by accident
                raise UserError(_NOT_STARTED.format(code=code))
        if job is None:
            return None
        self._expect_losses()
        if code is None:
            return job, Failure("its process stopped in the middle of an answer")
        return job, Failure(f"its process died (exit code {code})")

    def _show(self, printed: bytes) -> None:
        """Prints a worker's output, up to a limit per batch."""
        if not printed or self.printed > _PRINTED:
            return
        visible = printed[: _PRINTED - self.printed]
        self.printed += len(printed)
        sys.stderr.write(visible.decode("utf-8", "backslashreplace"))
        if self.printed > _PRINTED:
            sys.stderr.write(
                f"\n[rewards printed more than {_PRINTED} bytes; the rest is dropped]\n"
            )

    def _end(self, worker: RewardWorker, *, its_files: bool = False) -> None:
        self._living.remove(worker)
        self._processes.end(worker, its_files=its_files)


_CLOSED = "the pool of reward functions is closed"
