"""Aggregation of per-token losses to ``(sum, count)``: the only place that sees ``[B, T]``.

Each function returns float32 scalars that add up over microbatches and devices; the caller divides
once. ``losses`` are [B, T] float32, nats times advantage, ``mask`` [B, T] bool. Losses outside the
mask are not read, NaN or not; a live NaN makes the sum NaN; an empty mask gives ``(0, 0)``. Counts
depend on the mask alone.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.types import Aggregate, Array


def token_mean(losses: Array, mask: Array) -> tuple[Array, Array]:
    """Every live token of the batch weighs the same, as in ``dapo``.

    Returns:
      The sum of the live losses and the number of live tokens.

    >>> mask = jnp.array([[True, True], [True, False]])
    >>> [float(x) for x in token_mean(jnp.array([[1.0, 2.0], [6.0, 9.0]]), mask)]
    [9.0, 3.0]
    """
    _check(losses, mask)
    return _sum(losses, mask), mask.sum(dtype=jnp.float32)


def sequence_mean(losses: Array, mask: Array) -> tuple[Array, Array]:
    """Every sequence weighs the same, its tokens sharing that weight, as in ``grpo``.

    Sequences without a live token count for nothing.

    Returns:
      The sum over sequences of their mean live loss, and the number of sequences with one.

    >>> mask = jnp.array([[True, True], [True, False]])
    >>> [float(x) for x in sequence_mean(jnp.array([[1.0, 2.0], [6.0, 9.0]]), mask)]
    [7.5, 2.0]
    """
    _check(losses, mask)
    lengths = mask.sum(axis=1, dtype=jnp.float32)
    means = jax.vmap(_sum)(losses, mask) / jnp.maximum(lengths, 1)
    return means.sum(), _sequences(mask)


def sequence_sum(losses: Array, mask: Array) -> tuple[Array, Array]:
    """The mean over sequences of the SUM of their tokens' losses: no length normalisation.

    With ``-A * logprob`` as the loss this is the gradient of the expected reward of whole
    completions, as ``rloo`` and ``remax`` write it.

    Returns:
      The sum of the live losses, and the number of sequences with a live token.

    >>> mask = jnp.array([[True, True], [True, False]])
    >>> [float(x) for x in sequence_sum(jnp.array([[1.0, 2.0], [6.0, 9.0]]), mask)]
    [9.0, 2.0]
    """
    _check(losses, mask)
    return _sum(losses, mask), _sequences(mask)


def constant_norm(max_tokens: int) -> Aggregate:
    """Sums of live losses over a constant length, as in ``dr_grpo``.

    Args:
      max_tokens: tokens, the divisor of every sequence's sum: the completion limit of the run, not
        the width of a batch, so that padding changes nothing.

    Returns:
      An aggregate: the sum of the live losses, and ``max_tokens`` for each sequence with a live
      token.

    >>> mask = jnp.array([[True, True], [True, False]])
    >>> [float(x) for x in constant_norm(4)(jnp.array([[1.0, 2.0], [6.0, 9.0]]), mask)]
    [9.0, 8.0]
    """

    def aggregate(losses: Array, mask: Array) -> tuple[Array, Array]:
        _check(losses, mask)
        return _sum(losses, mask), _sequences(mask) * max_tokens

    return aggregate


def _sum(losses: Array, mask: Array) -> Array:
    return jnp.where(mask, losses, 0).sum(dtype=jnp.float32)


def _sequences(mask: Array) -> Array:
    return mask.any(axis=1).sum(dtype=jnp.float32)


def _check(losses: Array, mask: Array) -> None:
    chex.assert_rank([losses, mask], 2)
    chex.assert_equal_shape([losses, mask])
    chex.assert_type([losses, mask], [float, bool])
