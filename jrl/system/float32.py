"""Whether a number from outside can be trained on: rewards and scores are float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)


def fits_float32(number: float | np.number[Any]) -> bool:
    """Whether a number is finite, also in float32.

    Args:
      number: a Python or NumPy number; a whole one may have any number of digits.

    >>> fits_float32(3e38), fits_float32(1e39), fits_float32(10**400), fits_float32(float("nan"))
    (True, False, False, False)
    """
    try:
        return math.isfinite(number) and abs(float(number)) <= LARGEST
    except OverflowError:  # a whole number beyond float64
        return False


def sum_overflows(rewards: Any, weights: Any) -> np.ndarray:
    """Whether a weighted sum of numbers that float32 holds is itself infinite in float32.

    Args:
      rewards: [..., R] float.
      weights: [R] float.

    Returns:
      [...] bool: a reward, a product, or the sum up to a part, in their order, is beyond float32.
      False where a reward is NaN, which is another fault.

    >>> sum_overflows([[3e38, 2e38], [3e38, -3e38], [3e38, float("nan")]], [1.0, 1.0]).tolist()
    [True, False, False]
    """
    points = np.asarray(rewards, np.float64)
    finite = np.where(np.isinf(points), 0, points)
    each = finite * np.asarray(weights, np.float64)
    most = np.maximum(np.abs(each), np.abs(np.cumsum(each, axis=-1))).max(axis=-1, initial=0)
    return (most > LARGEST) | np.isinf(points).any(axis=-1)
