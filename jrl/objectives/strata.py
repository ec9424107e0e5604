"""Advantages among completions of one structure, such as one number of tool calls."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from jrl.objectives import segments as seg
from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Transform


def stratified(blend: float, eps: float = 1e-6, ddof: int = 1) -> Transform:
    """Rewards normalised inside the strata of a group, mixed with those inside the group.

        A = blend (r - mean of the stratum) / (its deviation + eps)
            + (1 - blend) (r - mean of the group) / (its deviation + eps)

    Strata are the labels ``batch.ids["stratum"]`` ([N, G]); where nobody recorded any, a group is
    one stratum.

    Args:
      blend: alpha, in [0, 1].
      eps: points, added to both deviations.
      ddof: as in ``advantages.group_mean_std``.

    Returns:
      A transform [N, G] -> [N, G]. A completion alone in its stratum has 0 for the first term.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        row = jnp.arange(values.shape[0])[:, None]
        stratum = batch.ids.get("stratum", jnp.zeros(values.shape, jnp.int32))

        def normalised(inside: seg.Segments) -> Array:
            gap = jnp.where(batch.members, values - seg.mean(values, inside), 0)
            return gap / (seg.std(values, inside, ddof=ddof) + eps)

        local = normalised(seg.segments(batch.members, row, stratum))
        whole = normalised(seg.segments(batch.members, row))
        return blend * local + (1 - blend) * whole, batch

    return stateless(apply)
