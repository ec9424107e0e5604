"""Combinators that single papers published."""

from __future__ import annotations

from typing import Any

from jrl.errors import UserError
from jrl.rewards.combine import Columns


def group_contrast(c: Columns, eps: float = 0.0) -> Any:
    """A behaviour's points with the sign of what it does for the answer in its group.

    The masking of "GeometryZero: Improving Geometry Solving for LLM with Group Contrastive Policy
    Optimization" (arXiv:2506.07160): the first part is 1 where a member shows the behaviour (there
    an auxiliary construction in <aux> tags), the second is accuracy. It counts +1 in groups where
    the members with it are more often right than those without, -1 where less often, 0 within
    ``eps`` or where one side is empty. GCPO adds accuracy, form and ``chain_length``. Read from
    reviews of the paper, which have the signs and the threshold; its size is not known.

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


def cosine_shift(c: Columns, steps: float, first: float = 1.0, last: float = 0.0) -> Any:
    """A share w of the first part, and 1 - w of the others' mean; w goes down by a cosine.

    The curriculum of "Datarus-R1: An Adaptive Multi-Step Reasoning LLM for Automated Data Analysis"
    (arXiv:2508.13382) from form to content, with the form of the tags as the first part and a
    hierarchical judge's scores of single steps and of the whole as the others:

        r = w(t) r_tag + (1 - w(t)) r_HRM,  w(t) = last + (first - last) (1 + cos(pi t / steps)) / 2

    after ``steps`` w is ``last``. Read from the abstract: what w(t) is exactly, and how scores of
    steps make one, are not known. Where either side has no opinion, the sum has none.

    Args:
      c: the form, then the rest.
      steps: training steps until w is ``last``, above 0.
      first: w of the first step.
      last: w in the end.
    """
    if not steps > 0 or c.points.shape[-1] < 2:
        raise UserError(
            f"steps = {steps} of {c.points.shape[-1]} parts; give two parts, and steps > 0"
        )
    xp = c.points.__array_namespace__()
    done = xp.minimum(xp.asarray(c.step, dtype=c.points.dtype) / steps, 1.0)
    share = last + (first - last) * (1 + xp.cos(xp.pi * done)) / 2
    rest = c.points[..., 1:]
    valid = ~xp.isnan(rest)
    count = valid.sum(-1)
    mean = xp.where(valid, rest, 0).sum(-1) / xp.maximum(count, 1)
    return share * c.points[..., 0] + (1 - share) * xp.where(count > 0, mean, xp.nan)
