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
