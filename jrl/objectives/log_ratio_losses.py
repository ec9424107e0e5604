"""Losses on the log-ratio of whole completions: contrast, trajectory balance, mirror descent.

Each constructor returns a ``types.Surrogate``. With l_i the sum over a completion's tokens of
log pi - log pi_ref, or of log pi alone, the losses of a group stand at its first live token, so
that ``aggregates.sequence_sum`` is the mean over groups. A completion without a trained token is
left out of its group. Log-ratios are squared, never exponentiated. All float32.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax.numpy as jnp

from jrl.objectives.advantages import mean_centred
from jrl.types import Array, Stats, Surrogate


def contrastive(beta: float) -> Surrogate:
    """The contrast of all pairs of a group, by reward and by log-ratio.

    "Contrastive Policy Gradient: Aligning LLMs on sequence-level scores in a supervised-friendly
    fashion" (arXiv:2406.19185):

        loss = -mean over pairs (i, j) of [(R_i - R_j) - beta / 2 (l_i - l_j)] (l_i - l_j)

    A member's R is its advantage. A group of one has loss 0.

    Args:
      beta: points per nat.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        members = mask.any(axis=1)
        ratio = _total(stats["logprobs"] - stats["ref_logprobs"], mask)
        gap = mean_centred(ratio, members)
        reward = mean_centred(_score(advantages, mask), members)
        # The sum over pairs of a product of differences is n times that of centred products.
        others = jnp.maximum(members.sum() - 1, 1)
        loss = -2 / others * ((reward - beta / 2 * gap) * gap).sum()
        return _placed(loss, mask), {"log_ratio": ratio}

    return Surrogate(_checked(apply), frozenset({"ref_logprobs"}), over="group")


def log_variance() -> Surrogate:
    """The variance over a group of log pi(y) less a target, which is the advantage.

        loss = mean_i (s_i - mean_j s_j)^2,    s_i = sum_t log pi_t - A_i

    With A = beta log R this is the trajectory balance of a generative flow network over a tree,
    with the group's mean in place of the logarithm of the partition function (VarGrad). It is 0
    when pi is proportional to exp(A) on the group.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        members = mask.any(axis=1)
        score = _total(stats["logprobs"], mask) - _score(advantages, mask)
        gap = mean_centred(score, members)
        loss = jnp.square(gap).sum() / jnp.maximum(members.sum(), 1)
        return _placed(loss, mask), {"balance_gap": jnp.abs(gap)}

    return Surrogate(_checked(apply), frozenset(), over="group")


def squared_log_ratio(tau: float) -> Surrogate:
    """Policy gradient with a squared log-ratio of the whole completion as its rein.

        loss = -A sum_t log pi_t + tau / 2 (sum_t log pi_t - log pi_ref_t)^2

    for ONE sequence; the square stands at its first live token. Use it with ``sequence_sum``. The
    gradient is that of the squared loss of mirror descent, "Kimi k1.5: Scaling Reinforcement
    Learning with LLMs" (arXiv:2501.12599).

    Args:
      tau: points per nat.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        gap = jnp.where(mask, stats["logprobs"] - stats["ref_logprobs"], 0)
        rein = tau / 2 * jnp.square(gap.sum())
        losses = -advantages * stats["logprobs"] + _placed(rein, mask[None])[0]
        return losses, {"log_ratio": gap.sum()}

    return Surrogate(_checked(apply, 1), frozenset({"ref_logprobs"}))


def _checked(apply: Callable[..., tuple[Array, Stats]], rank: int = 2) -> Callable:
    def check_then_apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], rank)
        chex.assert_equal_shape([advantages, mask, *stats.values()])
        chex.assert_type([advantages, mask], [float, bool])
        return apply(stats, advantages, mask)

    return check_then_apply


def _total(values: Array, mask: Array) -> Array:
    """[G]: the sum over each member's live tokens."""
    return jnp.where(mask, values, 0).sum(axis=1)


def _score(advantages: Array, mask: Array) -> Array:
    """[G]: each member's advantage, read at its first live token; 0 where it has none."""
    first = mask & (jnp.cumsum(mask, axis=1) == 1)
    return jnp.where(first, advantages, 0).sum(axis=1)


def _placed(loss: Array, mask: Array) -> Array:
    """[G, T]: the loss at the first live token of the first member that has one, 0 elsewhere."""
    flat = mask.reshape(-1)
    first = flat & (jnp.cumsum(flat) == 1)
    return jnp.where(first, loss, 0).reshape(mask.shape)
