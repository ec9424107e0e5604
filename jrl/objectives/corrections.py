"""Weights for tokens sampled from another distribution than the policy's.

A surrogate with a ``Correction`` takes its ratios to the policy at the start of the training step,
and multiplies its losses by a weight for what that policy and the sampler differ by: a policy some
steps older, a sampler with fewer bits, or rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.errors import UserError, unknown_choice
from jrl.objectives.kl import bounded_exp
from jrl.types import Array, Stats


class Correction(NamedTuple):
    """Ratios against ``proximal_logprobs``, and a weight from the proximal policy to the sampler.

    Attributes:
      kind: "none" gives weight 1; "truncate" holds the weight between the bounds (truncated
        importance sampling); "mask" drops what is outside them (weight 0, as IcePop does); "reject"
        drops it too and leaves weight 1 to the rest. What is dropped still counts in the loss's
        mean.
      level: the weight of a "token"; of the whole "sequence", the product over its live tokens; or
        their "geometric" mean.
      low: least weight.
      high: greatest weight.
    """

    kind: str = "truncate"
    level: str = "token"
    low: float = 0.0
    high: float = 2.0

    def weight(self, stats: Stats, mask: Array) -> Array:
        """[T] float32, the weight of each token; no gradient passes through it."""
        log_weight = stats["proximal_logprobs"] - stats["sampler_logprobs"]
        if self.level != "token":
            total = jnp.where(mask, log_weight, 0).sum()
            if self.level == "geometric":
                total = total / jnp.maximum(mask.sum(), 1)
            log_weight = jnp.broadcast_to(total, mask.shape)
        weight = jax.lax.stop_gradient(bounded_exp(log_weight))
        one = jnp.where(jnp.isnan(weight), weight, 1)
        if self.kind == "none":
            return one
        if self.kind == "truncate":
            return jnp.clip(weight, self.low, self.high)
        # Written so that a NaN weight is kept rather than dropped.
        outside = (weight < self.low) | (weight > self.high)
        return jnp.where(outside, 0, one if self.kind == "reject" else weight)


CORRECTIONS: dict[str, Callable[[float], Correction | None]] = {
    "none": lambda cap: None,
    "proximal": lambda cap: Correction("none"),
    "decoupled": lambda cap: Correction("truncate", "token", 0.0, math.inf),
    "tis": lambda cap: Correction("truncate", "token", 0.0, cap),
    "mis": lambda cap: Correction("mask", "token", 0.0, cap),
    "icepop": lambda cap: Correction("mask", "token", 1 / cap, cap),
    "sequence_tis": lambda cap: Correction("truncate", "sequence", 0.0, cap),
    "sequence_mis": lambda cap: Correction("mask", "sequence", 0.0, cap),
    "geometric_mis": lambda cap: Correction("reject", "geometric", 1 / cap, cap),
}
"""By name, from the greatest weight. "proximal": no weight; "decoupled": the whole weight, as in
``decoupled_ppo``; "tis": truncated importance sampling; "mis": masked, tokens whose weight
exceeds the cap are dropped; "icepop": those whose weight leaves [1 / cap, cap] are, as in GLM-5
(arXiv:2602.15763, cap 2), while Ring-1T (arXiv:2510.18855), which introduced it, has [0.5, 5];
"sequence_tis", "sequence_mis": the same with the weight of the whole sequence; "geometric_mis":
sequences are dropped whose tokens' geometric mean leaves [1 / cap, cap], the others not weighted,
as in verl, which takes the dropped ones out of the mean too and has a cap of 1.001."""


def named_correction(name: str, cap: float, low: float | None = None) -> Correction | None:
    """The correction of that name with ``cap`` as its greatest weight; None for "none".

    Args:
      name: one of ``CORRECTIONS``.
      cap: greatest weight.
      low: least weight; None for the name's own.

    Raises:
      UserError: for an unknown name, or a band that holds no weight.

    >>> named_correction("icepop", 5.0, 0.5)
    Correction(kind='mask', level='token', low=0.5, high=5.0)
    """
    if name not in CORRECTIONS:
        raise unknown_choice("correction", name, CORRECTIONS)
    correction = CORRECTIONS[name](cap)
    if correction is None:
        return None
    correction = correction if low is None else correction._replace(low=low)
    _check_band(name, correction)
    return correction


def _check_band(name: str, correction: Correction) -> None:
    """Raises UserError where no weight is between the bounds; traced bounds pass."""
    low, high = correction.low, correction.high
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        raise UserError(
            f"objective.correction = {name!r} keeps weights from correction_low = {low:g} to"
            f" correction_cap = {high:g}, which are none; set correction_low below"
            " correction_cap (without it it is 0, or 1 / correction_cap with icepop)"
        )
