"""Losses over all pairs of a group, and over complete rankings.

"Pairs" are the ordered pairs (i, j) of live members with a higher score at i than at j; equal
scores make none. All float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.objectives.advantages import live_mean
from jrl.objectives.members import GroupLoss, Members, spoilt
from jrl.types import Array, Stats


def ordered_pairs(group: Members) -> Array:
    """[G, G] bool: True where member i has a higher score than member j, both live."""
    both = group.live[:, None] & group.live[None, :]
    return both & (group.score[:, None] > group.score[None, :])


def mean_of_pairs(each: Array, rewards: Array, group: Members) -> tuple[Array, Stats]:
    """([] the mean of ``each`` [G, G] over all ordered pairs, metrics of the rewards [G])."""
    pairs = ordered_pairs(group)
    return spoilt(live_mean(each, pairs), group), ranking_metrics(rewards, pairs)


def every_pair(
    reward: Callable[[Members], Array], loss: Callable[[Array, Array], Array]
) -> GroupLoss:
    """The mean over all ordered pairs of a loss of their rewards.

    Args:
      reward: members -> [G].
      loss: (higher, lower) -> [...], elementwise.
    """

    def of_group(group: Members) -> tuple[Array, Stats]:
        rewards = reward(group)
        return mean_of_pairs(loss(rewards[:, None], rewards[None, :]), rewards, group)

    return of_group


def ranking_metrics(rewards: Array, pairs: Array) -> Stats:
    """Means over the ordered pairs: accuracy, margin, and the rewards of either side."""
    high = jnp.broadcast_to(rewards[:, None], pairs.shape)
    low = jnp.broadcast_to(rewards[None, :], pairs.shape)
    return {
        "accuracy": live_mean((high > low).astype(jnp.float32), pairs),
        "margin": live_mean(high - low, pairs),
        "chosen_reward": live_mean(high, pairs),
        "rejected_reward": live_mean(low, pairs),
    }


def list_nll(rewards: Array, pairs: Array, scale: Array | None = None) -> Array:
    """Negative Plackett-Luce log-likelihood: each member is chosen before all those below it.

        sum over k of -log[ exp(r_k s_k) / (exp(r_k s_k) + sum over i below k of exp(r_i s_ki)) ]

    "The Analysis of Permutations" (Plackett, 1975) with scales s of 1. A member with none below it
    adds nothing; of two with one score, neither is below the other.

    Args:
      rewards: [G] float.
      pairs: [G, G] bool, from ``ordered_pairs``.
      scale: [G, G] float, s_ki; s_k is the greatest of its row. None for 1.

    >>> pairs = jnp.array([[False, True], [False, False]])
    >>> round(float(list_nll(jnp.array([0.0, 0.0]), pairs)), 4)
    0.6931
    """
    below = jnp.broadcast_to(rewards[None, :], pairs.shape)
    scaled = rewards
    if scale is not None:
        below = below * jnp.where(pairs, scale, 0)
        scaled = rewards * jnp.where(pairs, scale, 0).max(axis=1)
    has_pair = pairs.any(axis=1)
    # Minus a large finite number, not infinity, whose differences would be NaN.
    rest = jnp.where(pairs, below - scaled[:, None], -1e30)
    terms = jax.nn.logsumexp(
        jnp.concatenate([jnp.zeros_like(scaled)[:, None], rest], axis=1), axis=1
    )
    return jnp.where(has_pair, terms, 0).sum()
