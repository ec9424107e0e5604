"""Advantages scaled by how hard a prompt is: by the mean accuracy of its group."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from jrl.errors import UserError, choose
from jrl.objectives import segments as seg
from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Transform

CURVES = ("exp", "power", "log")


def difficulty_weight(accuracy: Array, curve: str = "exp", power: float = 2.0) -> Array:
    """A weight that falls as the mean accuracy rises.

    "exp" is exp(1 - m), "power" is (1.05 - m)^power and "log" is -log(0.02 + m), each held at 0
    from below: the options of "UniVG-R1: Reasoning Guided Universal Visual Grounding with
    Reinforcement Learning" (arXiv:2505.14231).

    Args:
      accuracy: [...] float, points in [0, 1].
      curve: one of ``CURVES``.
      power: of "power".

    Returns:
      [...] float32, at least 0.

    >>> [round(float(difficulty_weight(jnp.float32(0.0), c)), 4) for c in CURVES]
    [2.7183, 1.1025, 3.912]
    """
    if curve not in CURVES:
        raise choose("curve", curve, CURVES)
    if curve == "exp":
        return jnp.exp(jnp.clip(1 - accuracy, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    if curve == "power":
        return jnp.maximum(1.05 - accuracy, 0) ** power
    return jnp.maximum(-jnp.log(jnp.maximum(0.02 + accuracy, 1e-6)), 0)


def scale_by_difficulty(
    curve: str = "exp", power: float = 2.0, part: int = 0, over: str = "group"
) -> Transform:
    """Advantages times ``difficulty_weight`` of the mean accuracy.

    Args:
      curve: see ``difficulty_weight``.
      power: see ``difficulty_weight``.
      part: which reward part, counted from 0, is the accuracy.
      over: whose mean it is: "group", or "batch" for one weight for all.

    Returns:
      A transform that keeps the shape of the advantages.

    Raises:
      UserError: for another curve or ``over``; when applied, when there is no such reward part.
    """
    if curve not in CURVES:
        raise choose("curve", curve, CURVES)
    if over not in ("group", "batch"):
        raise choose("over", over, ("group", "batch"))

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, {2, 3})
        n, _, parts = batch.rewards.shape
        if part >= parts:
            raise UserError(f"reward part {part} of {parts}; count them from 0")
        rows = (jnp.arange(n)[:, None],) if over == "group" else ()
        accuracy = seg.mean(batch.rewards[:, :, part], seg.segments(batch.members, *rows))
        weight = difficulty_weight(accuracy, curve, power)
        return values * (weight if values.ndim == 2 else jnp.expand_dims(weight, 2)), batch

    return stateless(apply)
