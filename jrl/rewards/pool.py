"""Reward functions in worker processes, with limits of time, memory and output for each.

The trainer hands out one call at a time and polls the workers ten times a second. A call beyond a
limit is killed with its process and all descendants; the other workers continue with the remaining
calls. When a call has used half of its time another process is started, as a spare in case it must
be killed.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError, unknown_choice
from jrl.rewards import kill
from jrl.rewards.base import Returned, RewardFn, Sample, total
from jrl.rewards.call import Failure, call, class_name, error_text
from jrl.rewards.rules import Rules
from jrl.rewards.worker import Lost, RewardWorker, attribute, pickled_call
from jrl.system.wait_reports import waiting

__all__ = ["RewardFn", "RewardPool", "Sample"]

ACTIONS = ("zero", "drop", "none", "stop")

_FAILURES_IN_A_ROW = 8
"""Of one process, which is then replaced; a reward that always fails costs little by it."""
_LOOK_SECONDS = 0.1
_START_SECONDS = 600
"""Time for a worker to load the functions."""

_PRINTED = 1 << 14
"""Bytes that workers may print while one batch is judged; the rest is dropped."""

_NOT_STARTED = (
    "the worker processes of the rewards end as soon as they start (exit code {code}); a training "
    'script must run under if __name__ == "__main__":, because each worker imports it; or set '
    "reward_pool.workers = 0"
)


class _Call(NamedTuple):
    """One call: its column, the function's name, the samples' indices, and the message."""

    column: int
    name: str
    members: list[int]
    message: bytes = b""


class Scores(NamedTuple):
    """Returned of B samples under R functions.

    Attributes:
      points: [B, R] float32; NaN where a function has no opinion.
      dropped: [B] bool, samples to be taken out of their groups.
      counts: of calls by name, "reward_calls", "reward_timeouts", "reward_errors" and
        "reward_missing", numbers that were None.
      paid: of each sample [n] float32, the weighted points of its tokens, by the functions that
        give them by token; () where none may.
    """

    points: np.ndarray
    dropped: np.ndarray
    counts: dict[str, float]
    paid: Sequence[np.ndarray] = ()


class RewardPool:
    """Reward functions and their worker processes; use it in a ``with`` statement.

    Args:
      functions: reward functions by name; each is called with one sample, with one group if it is
        marked by ``whole_group``, or with all samples if by ``whole_batch``.
      workers: processes; 0 calls the functions in this process, without limits.
      timeout_seconds: of one call; then the worker is killed with all its descendants.
      memory_gib: memory of one worker and its descendants, in GiB, including memfds and files in
        /dev/shm; beyond it they are killed, those files removed, and the call failed.
      on_timeout: reward of the samples of a call that timed out: "zero", "drop", which takes the
        sample out of its group, "none", no opinion, or "stop" with a UserError. "reward_timeouts"
        counts such calls.
      on_error: the same for a call that raises, kills its process, or does not return a number in
        its range, or None, for each sample; "reward_errors" counts them.
      rules: how the numbers of some functions are read, by name.

    Raises:
      UserError: a function cannot be sent to a process.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFn],
        *,
        workers: int,
        timeout_seconds: float,
        memory_gib: float = math.inf,
        on_timeout: str = "zero",
        on_error: str = "stop",
        rules: Mapping[str, Rules] = MappingProxyType({}),
    ) -> None:
        for key, action in (("on_timeout", on_timeout), ("on_error", on_error)):
            if action not in ACTIONS:
                raise unknown_choice(f"reward_pool.{key}", action, ACTIONS)
        self.functions = dict(functions)
        self._rules = {name: rules.get(name, Rules()) for name in functions}
        self.timeout_seconds, self.memory_gib = timeout_seconds, memory_gib
        self.on_timeout, self.on_error = on_timeout, on_error
        self._turn = threading.Lock()  # rollout and evaluation may call from different threads
        self._workers = _Workers(self.functions, workers, self) if workers else None
        self._prepared = False

    @property
    def over_batch(self) -> bool:
        """Whether a function must see all samples of a step together."""
        return any(_over(function) == "batch" for function in self.functions.values())

    @property
    def by_token(self) -> bool:
        """Whether a function may give a number for each token."""
        return any(rules.by_token is not None for rules in self._rules.values())

    def scores(self, samples: Sequence[Sample], *, group: int | None = None) -> Scores:
        """Rewards of every sample under every function that is asked about it.

        Args:
          samples: B of them, those of one prompt adjacent.
          group: samples of one prompt, for functions over groups; None takes adjacent samples
            with the same ``prompt.id`` as a group.

        Raises:
          UserError: a call failed and the run is to stop then; names the function and the prompt.
        """
        calls = self._calls(samples, _groups(samples, group))
        # float32 is what training reads; ``call`` rejects numbers that are infinite in it.
        points = np.full((len(samples), len(self.functions)), np.nan, np.float32)
        dropped = np.zeros(len(samples), bool)
        paid = [np.zeros(len(s.tokens), np.float32) for s in samples if self.by_token]
        names = ("reward_timeouts", "reward_errors", "reward_missing")
        counts = dict.fromkeys(names, 0.0) | {"reward_calls": float(len(calls))}
        finished: list[str] = []

        def left() -> str:
            loading = "" if self._workers is None else self._workers.loading()
            return f"{len(calls) - len(finished)} of {len(calls)} calls left{loading}"

        with (
            self._turn,
            waiting("rewards", left, seconds=self.timeout_seconds if self._workers else 0),
            # Closed also on an error, so that no worker continues with a call of a batch that is
            # over.
            contextlib.closing(self._results(calls, samples)) as results,
        ):
            for (column, name, members, _), result in results:
                finished.append(name)
                rules = self._rules[name]
                if not isinstance(result, Failure):
                    result = rules.check(result, [samples[i] for i in members])
                if isinstance(result, Failure):
                    key = "on_timeout" if result.timed_out else "on_error"
                    action = self.on_timeout if result.timed_out else self.on_error
                    if action == "stop":
                        raise _error(name, result, samples[members[0]], key)
                    # A failure is data, not an exception: one slow sample must not end a run of
                    # days.
                    counts["reward_timeouts" if result.timed_out else "reward_errors"] += 1
                    lost, values = members, np.zeros(len(members))
                else:
                    action = rules.missing
                    lost = [i for i, x in zip(members, result, strict=True) if x is None]
                    counts["reward_missing"] += len(lost)
                    values = np.array([total(x) for x in result])
                    for i, x in zip(members, result, strict=True):
                        if isinstance(x, list) and rules.by_token is not None:
                            paid[i] += np.float32(rules.by_token) * np.array(x, np.float32)
                points[members, column] = values
                if action != "zero":
                    points[lost, column] = np.nan
                dropped[lost] |= action == "drop"
        return Scores(points, dropped, counts, paid)

    def _calls(self, samples: Sequence[Sample], groups: list[list[int]]) -> list[_Call]:
        """A call for each unit of each function, without samples that it is not asked about."""
        calls = []
        for column, (name, function) in enumerate(self.functions.items()):
            over, asks = _over(function), self._rules[name].asks
            units = [[i for group in groups for i in group]] if over == "batch" else groups
            for unit in units:
                members = [i for i in unit if asks(samples[i])]
                if over == "sample":
                    calls += [_Call(column, name, [i]) for i in members]
                elif members:
                    calls.append(_Call(column, name, members))
        return calls

    def probe(self, names: Iterable[str], sample: Sample, group: int) -> None:
        """Calls functions once, to report a broken one before anything compiles.

        A timeout is ignored: the first call may load a model.

        Args:
          names: of the functions.
          sample: what they are called with; functions over groups get ``group`` times the same.
          group: G.

        Raises:
          UserError: a call raises or returns something else than one finite number or None for
            each sample, and the run is to stop then.
        """
        # A run that tolerates errors of rewards must not fail on this call.
        if self.on_error != "stop":
            return
        calls = [
            _Call(0, name, list(range(1 if _over(self.functions[name]) == "sample" else group)))
            for name in names
        ]
        limit = self.timeout_seconds if self._workers else 0
        with (
            self._turn,
            waiting("rewards", lambda: "the first call", seconds=limit),
            contextlib.closing(self._results(calls, [sample] * group)) as results,
        ):
            for (_, name, *_), result in results:
                if not isinstance(result, Failure):
                    result = self._rules[name].check(result, [sample] * len(result))
                if isinstance(result, Failure) and not result.timed_out:
                    if _CONVERSATION in result.reason:
                        raise UserError(f"rewards.{name}: {result.reason}; {_TEXTS}")
                    raise _error(name, result, sample, "on_error")

    def _results(self, calls: Sequence[_Call], samples: Sequence[Sample]) -> Any:
        """A generator of (call, rewards or Failure), each call once, in any order."""
        if self._workers is not None:
            return self._workers.results(calls, samples)
        self._prepare()
        return (
            (each, call(self.functions[each.name], [samples[i] for i in each.members]))
            for each in calls
        )

    def _prepare(self) -> None:
        """In this process, what workers do before their first call."""
        for name, function in self.functions.items() if not self._prepared else ():
            try:
                attribute(function, "prepare", lambda: None)()
            except Exception as error:
                reason = f"{class_name(error)}: {error_text(error)}"
                raise UserError(f"rewards.{name}: its prepare raised {reason}") from error
        self._prepared = True

    def close(self) -> None:
        """Kills the workers; may be called twice, and while another thread waits for rewards."""
        if self._workers is not None:
            self._workers.closed = True
            with self._turn:
                self._workers.stop()

    def __enter__(self) -> RewardPool:
        """Returns the pool."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the pool, also after an error."""
        self.close()


_CONVERSATION = "string indices must be integers"
_TEXTS = (
    "completions are texts, so write completions[i] where TRL's conversational form has"
    ' completions[i][0]["content"]'
)


def _error(name: str, failure: Failure, sample: Sample, key: str) -> UserError:
    """The error of a failed call."""
    return UserError(
        f"rewards.{name}: {failure.reason} (prompt {sample.prompt.id}); fix the function, or set "
        f'reward_pool.{key} = "zero" or "drop"\n{failure.trace}'.rstrip()
    )


def _over(function: RewardFn) -> str:
    """The unit of a call: "sample", "group" or "batch"."""
    return attribute(function, "over", "sample")


def _groups(samples: Sequence[Sample], group: int | None) -> list[list[int]]:
    """Indices of the samples of each prompt."""
    # Given, groups are counted: two groups of one prompt may be adjacent.
    if group is not None:
        if len(samples) % group:
            raise UserError(f"{len(samples)} samples cannot be split into groups of {group}")
        return np.arange(len(samples)).reshape(-1, group).tolist()
    groups: list[list[int]] = []
    for index, sample in enumerate(samples):
        if groups and samples[index - 1].prompt.id == sample.prompt.id:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


# ---------------------------------------------------------------- processes


class _Workers:
    """The processes of a pool, and their running calls."""

    def __init__(self, functions: Mapping[str, RewardFn], count: int, limits: RewardPool) -> None:
        for name, function in functions.items():
            try:
                # Each by itself, so that the error names the function.
                pickle.dumps(function)
            except Exception as error:
                raise UserError(
                    f"rewards.{name} cannot be sent to a worker process ({error}); write it as a "
                    "function of a module or file, or set reward_pool.workers = 0"
                ) from error
        self.closed = False
        # Pickled once, since workers are started throughout the run.
        self._functions, self._count, self._limits = pickle.dumps(dict(functions)), count, limits
        self._living: list[RewardWorker] = []
        self._warden: subprocess.Popen[bytes] | None = None
        self._failed_starts, self._printed = 0, 0
        self._measured, self._measure = 0.0, False  # when memory was last looked at; whether to now

    def results(
        self, calls: Sequence[_Call], samples: Sequence[Sample]
    ) -> Iterator[tuple[_Call, list[Returned] | Failure]]:
        """Yields each call with its rewards or its Failure, in order of completion."""
        self._printed = 0
        waiting: deque[_Call] = deque()
        for each in calls:
            # All messages before the first call: a sample that cannot be sent is a failure of its
            # call only.
            message = pickled_call(each.name, [samples[i] for i in each.members])
            if isinstance(message, Failure):
                yield each, message
            else:
                waiting.append(each._replace(message=message))
        left = len(waiting)
        try:
            while left:
                if self.closed:
                    # ``close`` may come from another thread, for which this generator would
                    # otherwise wait forever.
                    raise RuntimeError("the pool of reward functions is closed")
                self._start_enough(len(waiting), left)
                self._hand_out(waiting)
                self._wait()
                for worker in list(self._living):
                    finished = self._look_at(worker)
                    if finished is not None:
                        left -= 1
                        yield finished
        finally:
            for worker in list(self._living):
                # Abandoned calls, and the spare processes.
                if worker.call is not None or len(self._living) > self._count:
                    self._end(worker)

    def _start_enough(self, waiting: int, left: int) -> None:
        """Starts processes for the remaining calls, and a spare for each that may time out."""
        # A spare gets half of the limit to start, so that it is ready when the call is killed.
        half = self._limits.timeout_seconds / 2
        busy = [worker for worker in self._living if worker.call is not None]
        slow = sum(worker.seconds() > half for worker in busy)
        target = min(self._count, left) + min(slow, waiting)
        while len(self._living) < target:
            try:
                # Started without waiting: loading may take minutes, and the others work meanwhile.
                worker = RewardWorker(self._functions)
            except OSError as error:
                raise UserError(
                    f"rewards: no worker process can be started: {error}; end other processes, or "
                    f"lower reward_pool.workers = {self._count}"
                ) from None
            self._living.append(worker)
            self._tell_warden(worker.pid)

    def _hand_out(self, waiting: deque[_Call]) -> None:
        for worker in list(self._living):
            # No more calls at a time than workers; spares wait for one to be killed.
            if sum(each.call is not None for each in self._living) >= self._count or not waiting:
                return
            if worker.idle:
                try:
                    worker.send(waiting[0], waiting[0].message)
                except Lost:
                    self._end(worker)
                else:
                    waiting.popleft()

    def _wait(self) -> None:
        """Returns when a worker has sent something, after a tenth of a second at most."""
        times = [w.seconds() for w in self._living if w.call is not None]
        rest = self._limits.timeout_seconds - max(times, default=0.0)
        pipes = [pipe for worker in self._living for pipe in (worker.connection, worker.output)]
        # At most a tenth of a second, since memory grows without any message.
        connection.wait(pipes, timeout=max(min(rest, _LOOK_SECONDS), 0.001))
        # Memory is measured on a clock of its own: messages may wake this loop thousands of times a
        # second.
        self._measure = time.monotonic() - self._measured > _LOOK_SECONDS
        if self._measure:
            self._measured = time.monotonic()

    def _look_at(self, worker: RewardWorker) -> tuple[_Call, list[Returned] | Failure] | None:
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
            call, worker.call = worker.call, None
            if worker.failures >= _FAILURES_IN_A_ROW:
                # A reward may have broken its interpreter for all that come after it.
                self._end(worker)
            return call, reply
        elif worker.exit_code() is not None:
            return self._lost(worker)
        return self._beyond_limits(worker)

    def _beyond_limits(self, worker: RewardWorker) -> tuple[_Call, Failure] | None:
        """The Failure of a call that uses too much time or memory; its worker is killed."""
        limits, failure = self._limits, None
        if not worker.ready and worker.seconds() > _START_SECONDS:
            raise UserError(
                f"rewards: a worker process has not loaded them in {_START_SECONDS} s; look for "
                "what waits in the file of the reward function, or set reward_pool.workers = 0"
            )
        if worker.call is not None and worker.seconds() > limits.timeout_seconds:
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
        call = worker.call
        self._end(worker, its_files=not failure.timed_out)
        return None if call is None else (call, failure)

    def _lost(self, worker: RewardWorker) -> tuple[_Call, Failure] | None:
        """The Failure of a worker that died, if it had a call."""
        # It may have closed its pipe a moment before its end.
        call, ready, code = worker.call, worker.ready, worker.exit_code(wait_seconds=1.0)
        self._end(worker)
        if not ready:
            self._failed_starts += 1
            if self._failed_starts > 1:  # one may have been killed by accident
                raise UserError(_NOT_STARTED.format(code=code))
        if call is None:
            return None
        if code is None:
            return call, Failure("its process stopped in the middle of an answer")
        return call, Failure(f"its process died (exit code {code})")

    def _show(self, printed: bytes) -> None:
        """Prints a worker's output, up to a limit per batch."""
        if not printed:
            return
        if self._printed > _PRINTED:
            time.sleep(0.001)  # or a flood of output would keep this thread busy
            return
        visible = printed[: _PRINTED - self._printed]
        self._printed += len(printed)
        sys.stderr.write(visible.decode("utf-8", "backslashreplace"))
        if self._printed > _PRINTED:
            sys.stderr.write(
                f"\n[rewards printed more than {_PRINTED} bytes; the rest is dropped]\n"
            )

    def _tell_warden(self, number: int) -> None:
        """Registers a process for the warden to kill if the trainer dies; negative unregisters."""
        if self._warden is None:
            self._warden = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(kill.__file__))],
                stdin=subprocess.PIPE,
                start_new_session=True,  # not for the terminal's Ctrl-C either
            )
        assert self._warden.stdin is not None
        with contextlib.suppress(OSError):
            self._warden.stdin.write(f"{number}\n".encode())
            self._warden.stdin.flush()

    def _end(self, worker: RewardWorker, *, its_files: bool = False) -> None:
        self._living.remove(worker)
        worker.kill(its_files=its_files)
        self._tell_warden(-worker.pid)

    def loading(self) -> str:
        """A suffix for a progress line: the number of processes still loading the functions."""
        count = sum(not worker.ready for worker in list(self._living))
        return f", {count} of {len(self._living)} workers loading" if count else ""

    def stop(self) -> None:
        """Ends all processes."""
        for worker in list(self._living):
            self._end(worker)
        if self._warden is not None:
            # Closing its input ends it; waiting avoids a zombie.
            self._warden.communicate()
            self._warden = None
