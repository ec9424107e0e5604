"""Reward functions in worker processes, with limits of time, memory and output for each.

    scores = pool.scores(samples)                  # all calls, and their results

    with pool.begin() as begun:                    # or, while further samples are on their way:
        begun.submit(sample)                       # the calls about this sample alone
        scores = pool.scores(samples, begun=begun) # those, and all others

A function of single samples gives the same points either way; ``workers`` has the processes.
"""

from __future__ import annotations

import collections
import contextlib
import math
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jrl.errors import UserError, class_name, error_text, unknown_choice
from jrl.rewards.base import Returned, RewardFn, Sample, total, unshared
from jrl.rewards.call import Failure, call
from jrl.rewards.rules import Rules
from jrl.rewards.worker import attribute, pickled_call
from jrl.rewards.workers import Job, Workers
from jrl.system.wait_reports import waiting

__all__ = ["RewardFn", "RewardPool", "Sample"]

ACTIONS = ("zero", "drop", "none", "stop")


class _Call(NamedTuple):
    """One call: its column, the function's name, and the samples' indices."""

    column: int
    name: str
    members: list[int]


class CallOutcome(NamedTuple):
    """What came of the calls for B samples, beside their points.

    Attributes:
      dropped: [B] bool, samples to remove from their groups.
      counts: of calls by name, "reward_calls", "reward_timeouts", "reward_errors" and
        "reward_missing", numbers that were None.
      paid: for each sample [n] float32, weighted points of its tokens, from functions that return
        them by token; () without such functions.
    """

    dropped: np.ndarray
    counts: dict[str, float]
    paid: Sequence[np.ndarray] = ()


class Scores(NamedTuple):
    """Rewards of B samples by R functions.

    Attributes:
      points: [B, R] float32; NaN where a function has no opinion.
      outcome: of the calls.
    """

    points: np.ndarray
    outcome: CallOutcome


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
        self._workers = Workers(self.functions, workers, self) if workers else None
        self._prepared = False

    @property
    def over_batch(self) -> bool:
        """Whether a function must see all samples of a step together."""
        return any(_over(function) == "batch" for function in self.functions.values())

    @property
    def by_group(self) -> list[str]:
        """Names of the functions that must see all samples of a prompt together."""
        return [name for name, f in self.functions.items() if _over(f) == "group"]

    @property
    def by_token(self) -> bool:
        """Whether a function may give a number for each token."""
        return any(rules.by_token is not None for rules in self._rules.values())

    def begin(self) -> Begun:
        """Starts calls about single samples before ``scores``; use it in a ``with``."""
        return Begun(self)

    def scores(
        self, samples: Sequence[Sample], *, group: int | None = None, begun: Begun | None = None
    ) -> Scores:
        """Rewards of every sample by every function that is called for it.

        Args:
          samples: B of them, those of one prompt adjacent.
          group: samples of one prompt, for functions over groups; None takes adjacent samples
            with the same ``prompt.id`` as a group.
          begun: calls that began before; those about equal samples are not made again.

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
            waiting("rewards", left, seconds=self.timeout_seconds if self._workers else 0),
            # Closed also on an error, so that no worker continues with a call of a batch that is
            # over.
            contextlib.closing(self._results(calls, samples, begun)) as results,
        ):
            for (column, name, members), result in results:
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
        return Scores(points, CallOutcome(dropped, counts, paid))

    def _calls(self, samples: Sequence[Sample], groups: list[list[int]]) -> list[_Call]:
        """A call for each unit of each function, without samples that ``where`` leaves out."""
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

    def _results(
        self, calls: Sequence[_Call], samples: Sequence[Sample], begun: Begun | None = None
    ) -> Generator[tuple[_Call, list[Returned] | Failure]]:
        """Yields each call with its rewards or its Failure, once, in any order."""
        with_samples = [
            (each, [self._rules[each.name].shown(samples[i]) for i in each.members])
            for each in calls
        ]
        if self._workers is None:
            with self._turn:
                self._prepare()
                for each, theirs in with_samples:
                    yield each, call(self.functions[each.name], [unshared(s) for s in theirs])
            return
        messages: list[tuple[_Call, bytes]] = []
        for each, theirs in with_samples:
            # All messages before the first call: a sample that cannot be sent is a failure of its
            # call only.
            message = pickled_call(each.name, theirs)
            if isinstance(message, Failure):
                yield each, message
            else:
                messages.append((each, message))
        early = [None if begun is None else begun.take(message) for _, message in messages]
        new = iter(
            self._workers.submit(
                [m for (_, m), job in zip(messages, early, strict=True) if not job]
            )
        )
        jobs = [next(new) if job is None else job for job in early]
        of_job = {id(job): each for (each, _), job in zip(messages, jobs, strict=True)}
        try:
            for job in self._workers.finished(jobs):
                assert job.result is not None
                yield of_job[id(job)], job.result
        finally:
            self._workers.printed = 0

    def _prepare(self) -> None:
        """Runs in this process the preparation that workers do before their first call."""
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
            self._workers.stop()

    def __enter__(self) -> RewardPool:
        """Returns the pool."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the pool, also after an error."""
        self.close()


class Begun:
    """Calls for single samples that begin while others are still sampled; see ``RewardPool.begin``.

    Without worker processes none begins: functions then run in the caller's thread, which decodes.

    Attributes:
      calls: that began.
    """

    def __init__(self, pool: RewardPool) -> None:
        self._pool, self.calls = pool, 0
        # Keyed by content, not by place, so that a result never goes to another sample, even if
        # rows have moved. Equal samples have a call each.
        self._jobs = collections.defaultdict[bytes, list[Job]](list)

    def submit(self, sample: Sample) -> None:
        """Begins the calls of all single-sample functions for this sample."""
        if (workers := self._pool._workers) is None:
            return
        for name, function in self._pool.functions.items():
            rules = self._pool._rules[name]
            if _over(function) != "sample" or not rules.asks(sample):
                continue
            message = pickled_call(name, [rules.shown(sample)])
            if not isinstance(message, Failure):
                self._jobs[message] += workers.submit([message])
                self.calls += 1

    def take(self, message: bytes) -> Job | None:
        """The call of a message, if it began; each is returned once."""
        return self._jobs[message].pop() if self._jobs.get(message) else None

    def __enter__(self) -> Begun:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Drops calls whose results were not collected."""
        if self._pool._workers is not None:
            self._pool._workers.cancel([job for jobs in self._jobs.values() for job in jobs])


_CONVERSATION = "string indices must be integers"
_TEXTS = (
    "completions are texts, so write completions[i] where TRL's conversational form has"
    ' completions[i][0]["content"]'
)


def _error(name: str, failure: Failure, sample: Sample, key: str) -> UserError:
    """The error of a failed call; its first sample is named where the reason names none."""
    of = "" if "(prompt " in failure.reason else f" (prompt {sample.prompt.id})"
    return UserError(
        f"rewards.{name}: {failure.reason}{of}; fix the function, or set "
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
