"""Reward functions in worker processes that can be killed, with a time limit for each call."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError, choose
from jrl.rewards.base import RewardFn, Sample

__all__ = ["RewardFn", "RewardPool", "Sample"]

ON_ERROR = ("raise", "zero")
TIMEOUT = "timeout"
_NOT_STARTED = (
    "the worker processes of the rewards end as soon as they start; a training script must run "
    'under if __name__ == "__main__":, because each worker imports it; or set '
    "reward_pool.workers = 0"
)


class _Failure(NamedTuple):
    """Why a call gave no points."""

    reason: str
    trace: str = ""


class RewardPool:
    """Reward functions and their worker processes; use it in a ``with`` statement.

    Args:
      functions: reward functions by name; each is called with one sample, or with one group if
        it is marked by ``over_group``.
      workers: processes; 0 calls the functions in this process, without a time limit.
      timeout_seconds: for one call. The worker is killed, every sample of the call gets 0 points,
        and "reward_timeouts" counts it.
      on_error: the result of a call that raises, kills its process, or does not return one finite
        number for each sample: "raise" a UserError, or "zero" points, counted in
        "reward_errors".

    Raises:
      UserError: a function cannot be sent to a process.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFn],
        *,
        workers: int,
        timeout_seconds: float,
        on_error: str = "raise",
    ) -> None:
        if on_error not in ON_ERROR:
            raise choose("reward_pool.on_error", on_error, ON_ERROR)
        self.functions = dict(functions)
        self.workers, self.timeout_seconds, self.on_error = workers, timeout_seconds, on_error
        self._pool: Any = None
        self._closed = False
        self._turn = threading.Lock()  # rollout and evaluation may call from different threads
        if workers:
            self._pool = _start(self.functions, workers)

    def scores(
        self, samples: Sequence[Sample], *, group: int | None = None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """Points of every sample under every function.

        Args:
          samples: B of them, those of one prompt adjacent.
          group: samples of one prompt, for functions over groups; None takes adjacent samples
            with the same ``prompt.id`` as a group.

        Returns:
          (points [B, R] float32, R in the order of the functions; counts of calls by name,
          "reward_calls", "reward_timeouts" and "reward_errors").

        Raises:
          UserError: a call failed and on_error is "raise"; names the function and the prompt.
        """
        groups = _groups(samples, group)
        calls = [
            (column, name, [index] if _over(function) == "sample" else members)
            for column, (name, function) in enumerate(self.functions.items())
            for members in groups
            for index in (members if _over(function) == "sample" else members[:1])
        ]
        points = np.zeros((len(samples), len(self.functions)), np.float32)
        counts = {"reward_timeouts": 0.0, "reward_errors": 0.0, "reward_calls": float(len(calls))}
        with self._turn, contextlib.closing(self._results(calls, samples)) as results:
            for (column, name, members), result in zip(calls, results, strict=True):
                if not isinstance(result, _Failure):
                    points[members, column] = result
                elif result.reason == TIMEOUT:
                    counts["reward_timeouts"] += 1
                elif self.on_error == "zero":
                    counts["reward_errors"] += 1
                else:
                    raise _error(name, result, samples[members[0]])
        return points, counts

    def _results(
        self, calls: Sequence[tuple[int, str, list[int]]], samples: Sequence[Sample]
    ) -> Generator[list[float] | _Failure, None, None]:
        """Yields the points or the _Failure of each call, in order."""
        if self._pool is None:
            for _, name, members in calls:
                yield _call(self.functions[name], [samples[i] for i in members])
            return
        done, broken_at = 0, -1
        while done < len(calls):
            futures = self._schedule(calls[done:], samples)
            try:
                for future in futures:
                    result = _result(future)
                    if result is None:
                        break
                    yield result
                    done += 1
            finally:
                for future in futures:
                    future.cancel()
            if done < len(calls):
                # A process that dies at the wrong moment breaks the pool: retry once in a new one.
                if broken_at == done:
                    raise UserError(_NOT_STARTED)
                broken_at = done
                self._stop()
                self._pool = _start(self.functions, self.workers)

    def _schedule(
        self, calls: Sequence[tuple[int, str, list[int]]], samples: Sequence[Sample]
    ) -> list[Any]:
        """A future for each call; fewer if the pool breaks meanwhile."""
        futures: list[Any] = []
        for _, name, members in calls:
            arguments = (name, [samples[i] for i in members])
            try:
                futures.append(
                    self._pool.schedule(
                        _call_in_worker, args=arguments, timeout=self.timeout_seconds
                    )
                )
            except RuntimeError:
                if self._closed:
                    raise
                break
        return futures

    def close(self) -> None:
        """Kills the workers; may be called twice."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()

    def __enter__(self) -> RewardPool:
        """Returns the pool."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the pool, also after an error."""
        self.close()


def _error(name: str, failure: _Failure, sample: Sample) -> UserError:
    """The error of a failed call."""
    return UserError(
        f"rewards.{name}: {failure.reason} (prompt {sample.prompt.id}); fix the function, or set "
        f'reward_pool.on_error = "zero"\n{failure.trace}'.rstrip()
    )


def _attribute(function: RewardFn, name: str, default: Any) -> Any:
    """An attribute of a function, or of the function that a partial binds."""
    return getattr(function, name, getattr(getattr(function, "func", None), name, default))


def _over(function: RewardFn) -> str:
    """What one call sees: "sample" or "group"."""
    return _attribute(function, "over", "sample")


def _groups(samples: Sequence[Sample], group: int | None) -> list[list[int]]:
    """Indices of the samples of each prompt."""
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


def _call(function: RewardFn, samples: list[Sample]) -> list[float] | _Failure:
    """The points of one call, checked."""
    try:
        result: Any = function(samples)
        if isinstance(result, np.ndarray):
            result = result.tolist()
        if not isinstance(result, list | tuple):
            kind = type(result).__name__
            return _Failure(
                f"returned {kind} {result!r:.60}; return a list with one number a sample"
            )
        if len(result) != len(samples):
            return _Failure(f"returned {len(result)} numbers for {len(samples)} samples")
        for value in result:
            if not isinstance(value, int | float | np.number | np.bool_):
                kind = type(value).__name__
                return _Failure(f"returned {kind} {value!r:.60} instead of a number")
            if not math.isfinite(value):
                return _Failure(f"returned {float(value)}; points must be finite")
        return [float(value) for value in result]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, which would end the worker
        return _Failure(f"raised {type(error).__name__}: {error}", traceback.format_exc(limit=-3))


# ---------------------------------------------------------------- processes


def _start(functions: Mapping[str, RewardFn], workers: int) -> Any:
    """A pool of workers that know the functions."""
    import pebble

    for name, function in functions.items():
        try:
            pickle.dumps(function)
        except Exception as error:
            raise UserError(
                f"rewards.{name} cannot be sent to a worker process ({error}); write it as a "
                "function of a module or file, or set reward_pool.workers = 0"
            ) from error
    return pebble.ProcessPool(
        max_workers=workers,
        initializer=_set_up_worker,
        initargs=(pickle.dumps(dict(functions)),),
        # Forking a process that runs JAX can deadlock; spawning cannot.
        context=multiprocessing.get_context("spawn"),
    )


_functions: dict[str, RewardFn] | _Failure = _Failure("the worker was not set up")


def _set_up_worker(pickled: bytes) -> None:
    """Loads the functions in a worker, outside of the first call's time limit."""
    global _functions
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles interrupts
    os.environ["JAX_PLATFORMS"] = "cpu"  # a reward that uses JAX must not take the accelerator
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        loaded = pickle.loads(pickled)
        for function in loaded.values():
            _attribute(function, "prepare", lambda: None)()
        _functions = loaded
    except Exception as error:
        _functions = _Failure(
            f"could not be loaded in a worker process: {type(error).__name__}: {error}"
        )


def _end_with_parent() -> None:
    """Ends the worker when the trainer ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _call_in_worker(name: str, samples: list[Sample]) -> list[float] | _Failure:
    if isinstance(_functions, _Failure):
        return _functions
    return _call(_functions[name], samples)


def _result(future: Any) -> list[float] | _Failure | None:
    """The result of a scheduled call; None if the pool broke first."""
    import pebble

    try:
        return future.result()
    except BrokenProcessPool:
        return None
    except FutureTimeout:
        return _Failure(TIMEOUT)
    except pebble.ProcessExpired as error:
        return _Failure(f"its process died (exit code {error.exitcode})")
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        return _Failure(f"its samples could not be sent to a worker process: {error}")
