"""Inputs of a loss over ONE group, and the conversion of its value to per-token losses.

Preference, ranking and reward-model losses compare whole completions. They are written as functions
of ``Members`` that return one number, and lifted by ``over_group`` (a number for the group) or
``over_sequence`` (a number for each completion). The number stands at the first live token, so that
the aggregate ``sequence_sum`` is the mean over groups, or over completions. All float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import chex
import jax.numpy as jnp

from jrl.objectives.advantages import live_mean
from jrl.types import Array, Statistic, Stats, Surrogate


class Members(NamedTuple):
    """The members of one group, [G, T] as a surrogate gets them.

    Attributes:
      stats: [G, T] float32 by name, ``logprobs`` at least.
      scores: [G, T] float32, points: a member's score at each of its tokens.
      mask: [G, T] bool, True where live.
    """

    stats: Stats
    scores: Array
    mask: Array

    @property
    def live(self) -> Array:
        """[G] bool: members with a live token."""
        return self.mask.any(axis=1)

    @property
    def tokens(self) -> Array:
        """[G] float32: live tokens, at least 1 so that one may divide by it."""
        return jnp.maximum(self.mask.sum(axis=1), 1).astype(jnp.float32)

    @property
    def score(self) -> Array:
        """[G] float32, the value at the first live token; 0 if there is none."""
        return jnp.where(first_token(self.mask), self.scores, 0).sum(axis=1)

    def first(self, name: str) -> Array:
        """[G]: a statistic that is the same at all tokens of a member, read at the first."""
        return jnp.where(first_token(self.mask), self.stats[name], 0).sum(axis=1)

    def last(self, name: str) -> Array:
        """[G]: a statistic at the last live token; 0 where there is none."""
        return jnp.where(last_token(self.mask), self.stats[name], 0).sum(axis=1)

    def total(self, name: str) -> Array:
        """[G]: the sum of a statistic over live tokens."""
        return jnp.where(self.mask, self.stats[name], 0).sum(axis=1)

    def mean(self, name: str) -> Array:
        """[G]: the mean of a statistic over live tokens; 0 where there is none."""
        return self.total(name) / self.tokens

    def log_ratio(self) -> Array:
        """[G] nats: log pi(y) - log pi_ref(y) of complete completions."""
        return self.total("logprobs") - self.total("ref_logprobs")


def value_output(number: int, *, start: bool = False) -> Statistic:
    """Output ``number`` of the value network as a statistic, "values_N".

    With ``start`` that of the start of the training step, "rollout_values_N". Output 0 is "values"
    itself.
    """
    name = f"{'rollout_' * start}values_{number}"
    return Statistic(name, lambda outputs: outputs[number], over="values", start=start)


GroupLoss = Callable[[Members], tuple[Array, Stats]]
"""Members -> (loss, metrics): [] each over a group, [G] each over sequences."""


def over_group(loss: GroupLoss, needs: Iterable[str] = ()) -> Surrogate:
    """A surrogate from one number for the whole group; use it with ``sequence_sum``.

    Args:
      loss: members -> ([] loss, [] metrics by name, averaged over groups with a live token).
      needs: names of the statistics it reads besides ``logprobs``.
    """

    def apply(stats: Stats, scores: Array, mask: Array) -> tuple[Array, Stats]:
        value, metrics = loss(_members(stats, scores, mask))
        chex.assert_rank(value, 0)
        at = first_token(mask.reshape(1, -1)).reshape(mask.shape)
        return jnp.where(at, value, 0), metrics

    return Surrogate(apply, frozenset(needs), over="group")


def over_sequence(loss: GroupLoss, needs: Iterable[str] = ()) -> Surrogate:
    """A surrogate from one number for each completion, which compares it with no other.

    Args:
      loss: members -> ([G] losses, [G] metrics), where no member looks at another one.
      needs: names of the statistics it reads besides ``logprobs``.
    """

    def apply(stats: Stats, scores: Array, mask: Array) -> tuple[Array, Stats]:
        alone = {name: value[None] for name, value in stats.items()}
        value, metrics = loss(_members(alone, scores[None], mask[None]))
        chex.assert_shape(value, (1,))
        losses = jnp.where(first_token(mask[None])[0], value[0], 0)
        return losses, {name: metric[0] for name, metric in metrics.items()}

    return Surrogate(apply, frozenset(needs))


def mean_over_best(values: Array, group: Members) -> Array:
    """[]: the mean of ``values`` [G] over the live members of the highest score."""
    top = jnp.max(group.score, where=group.live, initial=-jnp.inf)
    best = group.live & (group.score == top)
    return live_mean(values, best)


def spoilt(loss: Array, group: Members) -> Array:
    """The loss, or NaN when a live member's score is NaN: comparisons would swallow it."""
    return jnp.where(jnp.isnan(jnp.where(group.live, group.score, 0)).any(), jnp.nan, loss)


def _members(stats: Stats, scores: Array, mask: Array) -> Members:
    chex.assert_rank([scores, mask, stats["logprobs"]], 2)
    chex.assert_equal_shape([scores, mask, *stats.values()])
    chex.assert_type([scores, mask, stats["logprobs"]], [float, bool, float])
    return Members(stats, scores, mask)


def first_token(mask: Array) -> Array:
    """[..., T] bool: True at the first live token of each sequence."""
    return mask & (jnp.cumsum(mask, axis=-1) == 1)


def last_token(mask: Array) -> Array:
    """[..., T] bool: True at the last live token of each sequence."""
    return jnp.flip(first_token(jnp.flip(mask, axis=-1)), axis=-1)
