"""A clipped ratio whose bounds open for tokens that the sampler found unlikely."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.types import Array, Stats, Surrogate


def dynamic_bounds(logprobs: Array, low: float, high: float) -> tuple[Array, Array]:
    """The least and the greatest ratio of each token, from its old probability q.

        0.5 + 0.5 sqrt(max(1 - 4 low / q, 0))   and   0.5 + 0.5 sqrt(1 + 4 high / q)

    where |(ratio - 1) ratio q| stays within ``low`` below 1 and within ``high`` above it; "DCPO:
    Dynamic Clipping Policy Optimization" (arXiv:2509.02333).

    Args:
      logprobs: [T] float, nats, under the policy that drew the tokens; clamped at minus
        ``LOG_RATIO_LIMIT``.
      low: at least 0.
      high: at least 0.

    Returns:
      [T] and [T] float, ratios.

    >>> low, high = dynamic_bounds(jnp.log(jnp.array([0.01, 0.9])), 0.16, 0.2)
    >>> [round(x, 3) for x in (*low.tolist(), *high.tolist())]
    [0.5, 0.769, 5.0, 1.187]
    """
    rarity = jnp.exp(-jnp.clip(logprobs, -LOG_RATIO_LIMIT, 0))
    below = 0.5 + 0.5 * jnp.sqrt(jnp.maximum(1 - 4 * low * rarity, 0))
    return below, 0.5 + 0.5 * jnp.sqrt(1 + 4 * high * rarity)


def dynamic_clipped_ratio(
    low: float = 0.16, high: float = 0.2, most: float | None = None
) -> Surrogate:
    """The clipped surrogate within ``dynamic_bounds``, each completion's mean, summed in its group.

        loss of a group = -sum_i 1/|o_i| sum_t min(r_t A_t, clip(r_t, bounds_t) A_t)

    Use it with ``sequence_sum``, whose rows are groups: nothing is divided by the group's size.

    Args:
      low: of the lower bound.
      high: of the upper bound.
      most: the greatest that an upper bound may be; None for no such limit.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 2)
        chex.assert_equal_shape([advantages, mask, *stats.values()])
        drawn = stats["sampler_logprobs"]
        least, greatest = dynamic_bounds(drawn, low, high)
        if most is not None:
            greatest = jnp.minimum(greatest, most)
        gap = jnp.clip(stats["logprobs"] - drawn, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = jnp.exp(gap)
        below = (advantages < 0) & (ratio < least)
        above = (advantages > 0) & (ratio > greatest)
        kept = jnp.where(below, least, jnp.where(above, greatest, ratio))
        lengths = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
        metrics = {"ratio": ratio, "clip_fraction_low": below, "clip_fraction_high": above}
        return -kept * advantages / lengths, jax.tree.map(lambda x: x.astype(jnp.float32), metrics)

    return Surrogate(apply, over="group")
