"""Transforms for losses that compare completions: who is compared, and sums over completions.

Scores pass through unless a transform says otherwise; what is not compared is taken out of
``batch.members``. A member without a trained token is never chosen. Statistics that a transform
writes are read by the surrogates of ``pairs`` and ``lists`` under the same name.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp

from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Transform


def comparable(batch: Batch) -> Array:
    """[N, G] bool: live members with a trained token."""
    return batch.members & batch.mask.any(axis=2)


def tie_breakers(batch: Batch) -> Array:
    """[N, G] int32, the random number of each member, fresh in every step; 0 if there are none.

    They travel with the rows, so that a choice does not depend on the order of rows or on how they
    are divided over devices. Without them the first member is chosen.
    """
    return batch.ids.get("tie_breaker", jnp.zeros(batch.members.shape, jnp.int32))


def extremes(scores: Array, batch: Batch) -> tuple[Array, Array]:
    """One-hot [N, G] bool of the best and the worst comparable member; ties are broken at random.

    Args:
      scores: [N, G] float, points.
      batch: its ``ids["tie_breaker"]`` decides between equal scores; without it, the first member
        does.

    Returns:
      best and worst; all False where no member is comparable or a live score is NaN.
    """
    live, tie_breaker = comparable(batch), tie_breakers(batch)

    def top(values: Array) -> Array:
        most = jnp.max(values, axis=1, where=live, initial=-jnp.inf, keepdims=True)
        tied = live & (values == most)
        winner = jnp.argmax(jnp.where(tied, tie_breaker, jnp.iinfo(jnp.int32).min), axis=1)
        return tied & (jnp.arange(live.shape[1])[None] == winner[:, None])

    return top(scores), top(-scores)


def best_and_worst(min_gap: float = 0.0) -> Transform:
    """Leaves two members of each group, the best and the worst by score.

    Args:
      min_gap: points; a group whose two scores differ by no more is left out.

    Returns:
      A transform [N, G] -> the same scores. A group with a NaN among its live scores is left as it
      is, so that the NaN comes to light.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        best, worst = extremes(scores, batch)
        selected = _apart(scores, batch, min_gap) & (best | worst | _broken(scores, batch))
        return scores, batch.replace(members=comparable(batch) & selected)

    return stateless(apply)


def with_gap() -> Transform:
    """Leaves out groups whose scores are all equal, and members without a trained token."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        return scores, batch.replace(members=comparable(batch) & _apart(scores, batch, 0.0))

    return stateless(apply)


def within_gap(max_gap: float) -> Transform:
    """Removes groups whose best and worst scores differ by more than ``max_gap``."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        too_far = _apart(scores, batch, max_gap) & ~_broken(scores, batch)
        return scores, batch.replace(members=batch.members & ~too_far)

    return stateless(apply)


def _broken(scores: Array, batch: Batch) -> Array:
    """[N, 1] bool: a live score is NaN."""
    return (comparable(batch) & jnp.isnan(scores)).any(axis=1, keepdims=True)


def _apart(scores: Array, batch: Batch, gap: float) -> Array:
    """[N, 1] bool: the live scores span more than ``gap``, or one of them is NaN."""
    live = comparable(batch)
    high = jnp.max(scores, axis=1, where=live, initial=-jnp.inf, keepdims=True)
    low = jnp.min(scores, axis=1, where=live, initial=jnp.inf, keepdims=True)
    return ~(high - low <= gap)


def demonstrations(batch: Batch) -> Array:
    """[N, G] bool: demonstrations, also those of whose tokens none is trained on."""
    return batch.stats["external"].max(axis=2) > 0


def own_only(inner: Transform) -> Transform:
    """Applies a transform to the policy's own samples; demonstrations keep their scores.

    Args:
      inner: [N, G] -> [N, G], such as a group's normalisation; it may not edit the batch.
    """

    def apply(scores: Array, batch: Batch, state: tuple) -> tuple[Array, Batch, tuple]:
        outside = demonstrations(batch)
        inside = batch.replace(members=batch.members & ~outside)
        values, _, state = inner.apply(scores, inside, state)
        return jnp.where(outside, scores, values), batch, state

    return inner._replace(apply=apply, needs=inner.needs | {"external"})


# ---------------------------------------------------------------- whole completions

START = frozenset({"proximal_logprobs", "ref_logprobs"})
"""Statistics read by ``start_log_ratio``."""


def sums(name: str, batch: Batch) -> Array:
    """[N, G]: the sum of a statistic over each member's trained tokens."""
    return jnp.where(trained(batch), batch.stats[name], 0).sum(axis=2)


def write(batch: Batch, name: str, values: Array) -> Batch:
    """The batch with a statistic that is the same at all tokens of a member.

    Args:
      batch: any.
      name: of the statistic.
      values: [N, G], [N, 1] or [] float.
    """
    values = jnp.broadcast_to(values, batch.members.shape)
    spread = jnp.broadcast_to(jnp.expand_dims(values, 2), batch.mask.shape)
    return batch.with_stats(**{name: spread.astype(jnp.float32)})


def start_log_ratio(batch: Batch) -> Array:
    """[N, G] nats: log pi(y) - log pi_ref(y) at the start of the step."""
    return sums("proximal_logprobs", batch) - sums("ref_logprobs", batch)
