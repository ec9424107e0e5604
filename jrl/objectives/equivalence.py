"""Equivalent demonstrations preferred to inequivalent ones, beside on-policy learning."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.objectives.members import Members
from jrl.objectives.pairs import preference_metrics, softplus
from jrl.objectives.surrogates import clipped_ratio
from jrl.types import Array, Stats, Surrogate


def equivalent_group(members: Members, beta: float, spread_coef: float) -> tuple[Array, Stats]:
    """The preference of equivalent demonstrations over inequivalent ones, as groups.

        -log sigmoid( mean of beta h over equivalent - mean over inequivalent )
            + c * variance of beta h over the equivalent ones

    with h = log pi(y) - log pi_ref(y).

    Args:
      members: demonstrations alone are live; the score is above 1/2 for an equivalent one.
      beta: per nat.
      spread_coef: c, per squared nat.

    Returns:
      The [] loss, 0 where either kind is missing (NaN where a score is), and [] metrics.
    """
    reward = beta * members.log_ratio()
    same, other = members.live & (members.score > 0.5), members.live & (members.score <= 0.5)

    def mean(values: Array, kind: Array) -> Array:
        return jnp.where(kind, values, 0).sum() / jnp.maximum(kind.sum(), 1)

    high, low = mean(reward, same), mean(reward, other)
    spread = mean(jnp.square(reward - high), same)
    both = same.any() & other.any()
    loss = jnp.where(both, softplus(low - high) + spread_coef * spread, 0)
    broken = (members.live & jnp.isnan(members.score)).any()
    return jnp.where(broken, jnp.nan, loss), preference_metrics(high, low)


def clipped_and_equivalent(
    clip_low: float, clip_high: float, coef: float, beta: float, spread_coef: float
) -> Surrogate:
    """GRPO's loss on the policy's own draws plus ``coef`` times ``equivalent_group`` on the rest.

    Use it with ``sequence_sum``, the mean over groups: the own draws' losses are divided by their
    tokens and by the number of own draws.

    Args:
      clip_low: as in ``surrogates.clipped_ratio``, as is ``clip_high``.
      clip_high: how far above 1 the ratio counts.
      coef: of the preference loss.
      beta: as in ``equivalent_group``.
      spread_coef: as in ``equivalent_group``.
    """
    ppo = clipped_ratio(clip_low, clip_high)

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        given = (jnp.where(mask, stats["external"], 0).max(axis=1) > 0)[:, None]
        own, data = mask & ~given, mask & given
        read = {name: stats[name] for name in ("logprobs", "sampler_logprobs")}
        losses, metrics = jax.vmap(ppo.apply)(read, advantages, own)
        tokens = jnp.maximum(own.sum(axis=1, keepdims=True), 1)
        losses = losses / (tokens * jnp.maximum(own.any(axis=1).sum(), 1))
        preference, more = equivalent_group(Members(stats, advantages, data), beta, spread_coef)
        flat = data.reshape(-1)
        at = (flat & (jnp.cumsum(flat) == 1)).reshape(data.shape)
        losses = jnp.where(own, losses, 0) + jnp.where(at, coef * preference, 0)
        return losses, {"clip_fraction": _over(metrics, own), **more}

    needs = frozenset({"sampler_logprobs", "ref_logprobs", "external"})
    return Surrogate(apply, needs, over="group")


def _over(metrics: Stats, own: Array) -> Array:
    clipped = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    return jnp.where(own, clipped, 0).sum() / jnp.maximum(own.sum(), 1)
