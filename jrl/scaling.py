"""How performance grows with compute: fitting a sigmoid to the early part of a run.

fit = fit_sigmoid(compute, reward)
fit.predict(10 * compute[-1])                # what the curve says of ten times the compute
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jrl.errors import UserError


class Sigmoid(NamedTuple):
    """R(C) = start + (asymptote - start) / (1 + (middle / C)^exponent).

    Attributes:
      start: R_0, the performance without training.
      asymptote: A, the performance that endless compute would reach.
      middle: C_mid, the compute at which half of the gain is made, in the unit of the data.
      exponent: B, how steeply the gain comes; above 0.
      error: root mean square of the residuals, in the unit of the performance.
    """

    start: float
    asymptote: float
    middle: float
    exponent: float
    error: float = 0.0

    def predict(self, compute: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """The performance at each compute, float64.

        >>> curve = Sigmoid(start=0.25, asymptote=0.75, middle=8.0, exponent=1.0)
        >>> curve.predict([8.0, 24.0]).round(6).tolist()
        [0.5, 0.625]
        """
        return self.start + (self.asymptote - self.start) * _share(
            np.asarray(compute, np.float64), np.log(self.middle), self.exponent
        )


def fit_sigmoid(
    compute: Sequence[float] | np.ndarray,
    performance: Sequence[float] | np.ndarray,
    start: float | None = None,
) -> Sigmoid:
    """The sigmoid nearest to the points, by least squares.

    The curve of "The Art of Scaling Reinforcement Learning Compute for LLMs" (arXiv:2510.13786).
    For given middle and exponent the other two are a linear least-squares problem; the two are
    found on a grid, which is narrowed around its best point, so that no starting guess is needed.
    Leave out the first points of a run, where the paper's curves do not yet hold.

    Args:
      compute: [K] above 0, in any one unit (GPU hours, FLOPs, steps).
      performance: [K], such as the pass rate on held-out prompts.
      start: the performance without training; None to fit it too.

    Raises:
      UserError: for fewer than five points (four with ``start``), compute that is not above 0,
        numbers that are not finite, or points that all have one compute.
    """
    x, y = np.asarray(compute, np.float64), np.asarray(performance, np.float64)
    least = 5 if start is None else 4
    if x.ndim != 1 or x.shape != y.shape or len(x) < least:
        raise UserError(f"fit_sigmoid of {x.shape} and {y.shape}; give {least} pairs or more")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all()):
        raise UserError("fit_sigmoid needs finite numbers, and compute above 0")
    if x.min() == x.max():
        raise UserError(f"fit_sigmoid of points that all have compute {x[0]:g}")
    low, high = np.log(x.min()), np.log(x.max())
    room = high - low
    # A middle far outside the data is not determined by it.
    middles, exponents = (low - room, high + 2 * room), (np.log(0.05), np.log(20.0))
    for _ in range(40):
        grid_m, grid_b = np.linspace(*middles, 21), np.linspace(*exponents, 21)
        errors = [[_solve(x, y, m, np.exp(b), start)[2] for b in grid_b] for m in grid_m]
        i, j = np.unravel_index(np.argmin(errors), (21, 21))
        middles = _narrowed(grid_m, int(i))
        exponents = _narrowed(grid_b, int(j))
    middle, exponent = grid_m[i], np.exp(grid_b[j])
    first, gain, squares = _solve(x, y, middle, exponent, start)
    error = float(np.sqrt(squares / len(x)))
    return Sigmoid(float(first), float(first + gain), float(np.exp(middle)), float(exponent), error)


def _share(compute: np.ndarray, log_middle: float, exponent: float) -> np.ndarray:
    """The share of the gain made at each compute."""
    return 1 / (1 + np.exp(np.clip(exponent * (log_middle - np.log(compute)), -500, 500)))


def _solve(
    x: np.ndarray, y: np.ndarray, log_middle: float, exponent: float, start: float | None
) -> tuple[float, float, float]:
    """(start, gain, sum of squared residuals) of the best curve with this middle and exponent."""
    share = _share(x, log_middle, exponent)
    if start is None:
        spread = share - share.mean()
        power = np.dot(spread, spread)
        gain = np.dot(spread, y) / power if power > 1e-18 else 0.0
        first = y.mean() - gain * share.mean()
    else:
        first, power = start, np.dot(share, share)
        gain = np.dot(share, y - start) / power if power > 1e-18 else 0.0
    return first, gain, float(np.square(y - first - gain * share).sum())


def _narrowed(grid: np.ndarray, best: int) -> tuple[float, float]:
    """A range two thirds as wide around the best point, free to move past the grid's ends."""
    half = (grid[-1] - grid[0]) / 3
    return float(grid[best] - half), float(grid[best] + half)
