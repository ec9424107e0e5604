"""Surrogates for tokens that the current policy did not draw: replayed, stale, or from a data set.

As in ``surrogates``: each takes ONE sequence's statistics, advantages [T] and mask [T], and returns
losses [T] (not masked, not averaged) with [T] metrics. All float32.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.types import Array, Stats, Surrogate


def recentred_clip(clip_low: float = 0.2, clip_high: float = 0.2) -> Surrogate:
    """PPO's clipped surrogate for old samples, the clip centred on where the policy stands now.

        r_t = pi_t / mu_t,  c_t = pi_start_t / mu_t
        loss_t = -min(r_t A_t, clip(r_t, c_t - clip_low, c_t + clip_high) A_t)

    mu is the policy that drew the token, whichever it was, and pi_start the policy at the start of
    the training step: a stale sample has the room to move that a fresh one has, where a clip around
    1 would leave it none. From "Squeeze the Soaked Sponge: Efficient Off-policy Reinforcement
    Finetuning for Large Language Model" (arXiv:2507.06892). For fresh samples c is 1, and this is
    ``surrogates.clipped_ratio``.

    Args:
      clip_low: how far below its centre the ratio counts, at least 0.
      clip_high: how far above it, at least 0.

    >>> stats = {name: jnp.zeros(1) for name in ("sampler_logprobs", "proximal_logprobs")}
    >>> stats["logprobs"] = jnp.array([0.5])
    >>> loss, _ = recentred_clip().apply(stats, jnp.ones(1), jnp.ones(1, bool))
    >>> round(float(loss[0]), 4)
    -1.2
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        _check(stats, advantages, mask)
        drawn = stats["sampler_logprobs"]
        ratio = bounded_exp(stats["logprobs"] - drawn)
        centre = bounded_exp(stats["proximal_logprobs"] - drawn)
        below = (advantages < 0) & (ratio < centre - clip_low)
        above = (advantages > 0) & (ratio > centre + clip_high)
        kept = jnp.where(below, centre - clip_low, jnp.where(above, centre + clip_high, ratio))
        metrics = {"ratio": ratio, "clip_fraction_low": below, "clip_fraction_high": above}
        return -kept * advantages, _floats(metrics)

    return Surrogate(apply, frozenset({"sampler_logprobs", "proximal_logprobs"}))


def tapered(baseline: float = 0.0, low: float = 0.0, high: float = 1.0) -> Surrogate:
    """REINFORCE on whole sequences, importance-weighted only where the reward is negative.

        R = A - baseline,  rho = pi(y) / mu(y)
        loss_t = -sg(w) R log pi_t,  w = 1 if R >= 0, else clip(rho, low, high)

    "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs"
    (arXiv:2503.14286). Use it with ``sequence_sum`` and with scores as advantages, the same at all
    tokens of a sequence.

    Args:
      baseline: points, taken from every score.
      low: the least weight of a negative sequence.
      high: its greatest weight.

    >>> stats = {"logprobs": jnp.array([-2.0, -2.0]), "sampler_logprobs": jnp.array([-2.0, -1.0])}
    >>> both = [tapered().apply(stats, r * jnp.ones(2), jnp.ones(2, bool))[0] for r in (1.0, -1.0)]
    >>> [[round(x, 4) for x in loss.tolist()] for loss in both]
    [[2.0, 2.0], [-0.7358, -0.7358]]
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        _check(stats, advantages, mask)
        log_ratio = jnp.where(mask, stats["logprobs"] - stats["sampler_logprobs"], 0).sum()
        ratio = jax.lax.stop_gradient(bounded_exp(log_ratio))
        returns = advantages - baseline
        weight = jnp.where(returns < 0, jnp.clip(ratio, low, high), 1)
        # A NaN ratio stays visible also where its weight is not read.
        weight = jnp.where(jnp.isnan(ratio), ratio, weight)
        metrics = {
            "ratio": jnp.broadcast_to(ratio, mask.shape),
            "weight": weight,
            "negative": returns < 0,
        }
        return -weight * returns * stats["logprobs"], _floats(metrics)

    return Surrogate(apply, frozenset({"sampler_logprobs"}))


def preclipped_ratio(
    clip_low: float = 0.2, clip_high: float = 0.2, limit: float = 1e3
) -> Surrogate:
    """PPO's clipped surrogate with the log-ratio held within log(limit) before it is exponentiated.

        r_t = exp(clip(log pi_t - log mu_t, -log limit, log limit))
        loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    The Pre-CLIP of "R1-Reward: Training Multimodal Reward Model Through Stable Reinforcement
    Learning" (arXiv:2505.02835). PPO's own clip leaves the loss of a negative advantage unbounded;
    here it ends at ``limit``, beyond which the token has no gradient.

    Args:
      clip_low: how far below 1 the ratio counts, at least 0.
      clip_high: how far above 1 the ratio counts, at least 0.
      limit: greatest ratio, and one over the least; above 1.

    >>> stats = {"logprobs": jnp.array([9.0]), "sampler_logprobs": jnp.zeros(1)}
    >>> loss, _ = preclipped_ratio().apply(stats, -jnp.ones(1), jnp.ones(1, bool))
    >>> round(float(loss[0]))
    1000
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        _check(stats, advantages, mask)
        bound = jnp.minimum(jnp.log(limit), LOG_RATIO_LIMIT)
        log_ratio = stats["logprobs"] - stats["sampler_logprobs"]
        ratio = jnp.exp(jnp.clip(log_ratio, -bound, bound))
        below = (advantages < 0) & (ratio < 1 - clip_low)
        above = (advantages > 0) & (ratio > 1 + clip_high)
        kept = jnp.where(below, 1 - clip_low, jnp.where(above, 1 + clip_high, ratio))
        metrics = {
            "ratio": ratio,
            "clip_fraction_low": below,
            "clip_fraction_high": above,
            "preclip_fraction": jnp.abs(log_ratio) > bound,
        }
        return -kept * advantages, _floats(metrics)

    return Surrogate(apply, frozenset({"sampler_logprobs"}))


def bounded_exp(log_ratio: Array) -> Array:
    """Exp with its argument clamped to ``LOG_RATIO_LIMIT``; NaN stays NaN.

    >>> [round(float(jnp.log(bounded_exp(jnp.float32(x))))) for x in (-99.0, 3.0, 99.0)]
    [-20, 3, 20]
    """
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _floats(metrics: Stats) -> Stats:
    return {name: value.astype(jnp.float32) for name, value in metrics.items()}


def _check(stats: Stats, advantages: Array, mask: Array) -> None:
    chex.assert_rank([advantages, mask, stats["logprobs"]], 1)
    chex.assert_equal_shape([advantages, mask, *stats.values()])
    chex.assert_type([advantages, mask, stats["logprobs"]], [float, bool, float])
