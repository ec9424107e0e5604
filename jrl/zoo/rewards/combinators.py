"""Combinators that single papers published."""

from __future__ import annotations

from typing import Any

from jrl.rewards.combine import Columns


def group_contrast(c: Columns, eps: float = 0.0) -> Any:
    """A behaviour's points with the sign of what it does for the answer in its group.

    The masking of "GeometryZero: Improving Geometry Solving for LLM with Group Contrastive Policy
    Optimization" (arXiv:2506.07160): the first part is 1 where a member shows the behaviour (there
    an auxiliary construction), the second is accuracy. It counts +1 in groups where the members
    with it are more often right than those without, -1 where less often, 0 within ``eps`` or where
    one side is empty. The rule's threshold is a reading of the abstract: the code is not known.

    Args:
      c: behaviour and accuracy, in that order.
      eps: the least difference of mean accuracy.
    """
    xp = c.points.__array_namespace__()
    shown, right = c.points[..., 0], c.points[..., 1]
    live = c.members & ~xp.isnan(shown) & ~xp.isnan(right)

    def mean(where: Any) -> Any:
        count = where.sum(axis=1, keepdims=True)
        return xp.where(where, right, 0).sum(axis=1, keepdims=True) / xp.maximum(count, 1), count

    (with_it, n), (without, m) = mean(live & (shown > 0)), mean(live & (shown <= 0))
    difference = xp.where((n > 0) & (m > 0), with_it - without, 0.0)
    sign = xp.where(xp.abs(difference) > eps, xp.sign(difference), 0.0)
    return xp.where(xp.isnan(shown), shown, sign * shown)
