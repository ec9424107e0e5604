"""One call of a reward function, and the check of what it returns."""

from __future__ import annotations

import math
import os
import signal
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import class_name, error_text
from jrl.rewards.base import Returned, RewardFn, Sample
from jrl.system.float32 import fits_float32

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_TRACE = 4000
"""Characters that a message takes of a traceback."""


class Failure(NamedTuple):
    """Reason why a call returned no rewards.

    Attributes:
      reason: what to say after the function's name.
      trace: the last lines of a traceback, or "".
      timed_out: whether the call was ended at its time limit.
    """

    reason: str
    trace: str = ""
    timed_out: bool = False


def call(function: RewardFn, samples: list[Sample]) -> list[Returned] | Failure:
    """The rewards of one call, each finite in float32, or a Failure.

    Args:
      function: what to call.
      samples: one sample, one group, or those of a step.

    Returns:
      A number, None, or a list of numbers for each sample, or a Failure; only KeyboardInterrupt
      passes.
    """
    caller, running = os.getpid(), [signal.getitimer(timer)[0] for timer in _TIMERS]
    ids = [getattr(sample.prompt, "id", None) for sample in samples]  # it may empty its list
    try:
        return _checked(function(samples), ids)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, which would end the process
        return Failure(f"raised {class_name(error)}: {error_text(error)}", _trace())
    finally:
        if os.getpid() != caller:
            # The function forked, and this is the child, which should have ended itself. Were it to
            # go on, it would answer the caller's calls a second time.
            os._exit(1)
        for timer, seconds in zip(_TIMERS, running, strict=True):
            # An alarm that the function left would go off in the call of another completion.
            if not seconds and signal.getitimer(timer)[0]:
                signal.setitimer(timer, 0)


def _shown(value: object) -> str:
    """The beginning of a value's text; a note if ``repr`` of it raises."""
    try:
        return f"{value!r:.60}"
    except BaseException as error:
        return f"(whose text raises {class_name(error)})"


def _trace() -> str:
    try:
        return traceback.format_exc(limit=-3)[-_TRACE:]
    except BaseException:
        return ""


def _checked(result: Any, ids: Sequence[Any]) -> list[Returned] | Failure:
    """The rewards in a result, for samples of these prompts."""
    if isinstance(result, np.ndarray) or _is_tensor(result):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        kind = class_name(result)
        return Failure(f"returned {kind} {_shown(result)}; return a list with one number a sample")
    values, count = list(result), len(ids)
    if len(values) != count:
        return Failure(f"returned {len(values)} numbers for {count} sample{'s' * (count != 1)}")
    points: list[Returned] = []
    for i, value in enumerate(values):
        point: Returned | Failure = None
        # Also an array without axes, as np.where makes one of a number.
        if _is_tensor(value) or (isinstance(value, np.ndarray) and not value.ndim):
            value = value.tolist()
        if isinstance(value, list | tuple | np.ndarray):
            point = _by_token(value)
        elif value is not None:
            point = _number(value)
        if isinstance(point, Failure):
            of = f" for sample {i} (prompt {ids[i]})" if count > 1 else ""
            return point._replace(reason=point.reason + of)
        points.append(point)
    return points


def _is_tensor(value: Any) -> bool:
    """Whether a value is an array of another library, such as PyTorch's."""
    return hasattr(value, "tolist") and not isinstance(value, np.ndarray | np.generic)


def _by_token(values: Any) -> list[float] | Failure:
    numbers = []
    for value in values:
        number = _number(value)
        if isinstance(number, Failure):
            return number
        numbers.append(number)
    if not fits_float32(sum(numbers)):
        return Failure("returned numbers by token whose sum is infinite in float32")
    return numbers


def _number(value: Any) -> float | Failure:
    # Not np.number: a complex number would lose a part of it, and a time its unit.
    is_number = isinstance(value, int | float | np.integer | np.floating | np.bool_)
    if not is_number or isinstance(value, np.timedelta64):
        kind = class_name(value)
        return Failure(f"returned {kind} {_shown(value)} instead of a number or None")
    if isinstance(value, int) and not fits_float32(value):  # may be too large for a float
        return Failure("returned an integer beyond float32; rewards must be finite there")
    point = float(value)
    if not math.isfinite(point):
        return Failure(f"returned {point}; rewards must be finite")
    if not fits_float32(point):
        return Failure(f"returned {point:g}, infinite in float32; rewards must be finite there")
    return point
