"""Advantages without their outliers."""

from __future__ import annotations

import jax.numpy as jnp

from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Transform


def drop_outliers(limit: float = 3.0) -> Transform:
    """Sets advantages beyond ``limit`` on either side to 0; put it after a normalisation.

    The advantage filter of "R1-Reward: Training Multimodal Reward Model Through Stable
    Reinforcement Learning" (arXiv:2505.02835). The tokens stay in the loss's counts; a NaN stays.

    Args:
      limit: in the unit of the advantages, deviations after ``whiten``.

    >>> values = jnp.array([[-4.0, -3.0, 2.0]])
    >>> drop_outliers().apply(values, None, ())[0].tolist()
    [[0.0, -3.0, 2.0]]
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        return jnp.where(jnp.abs(values) > limit, 0, values), batch

    return stateless(apply)
