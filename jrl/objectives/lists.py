"""Losses over whole groups and single completions: rankings, regressions, labels.

Each takes ``members.Members`` and returns a number for the group, or one for each completion.
"Pairs" are the ordered pairs (i, j) of live members with a higher score at i than at j; equal
scores make none. All float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.objectives.members import GroupLoss, Members, mean_over_best, spoilt
from jrl.objectives.pairs import sigmoid, softplus
from jrl.types import Array, Stats


def ordered_pairs(group: Members) -> Array:
    """[G, G] bool: True where member i has a higher score than member j, both live."""
    both = group.live[:, None] & group.live[None, :]
    return both & (group.score[:, None] > group.score[None, :])


def mean_over_pairs(values: Array, pairs: Array) -> Array:
    """[]: the mean of ``values`` [G, G] over ``pairs``; 0 where there are none."""
    return jnp.where(pairs, values, 0).sum() / jnp.maximum(pairs.sum(), 1)


def every_pair(
    reward: Callable[[Members], Array], loss: Callable[[Array, Array], Array]
) -> GroupLoss:
    """The mean over all ordered pairs of a loss of their rewards.

    Args:
      reward: members -> [G].
      loss: (higher, lower) -> [...], elementwise.
    """

    def of_group(group: Members) -> tuple[Array, Stats]:
        rewards, pairs = reward(group), ordered_pairs(group)
        value = mean_over_pairs(loss(rewards[:, None], rewards[None, :]), pairs)
        return spoilt(value, group), ranking_metrics(rewards, pairs)

    return of_group


def ranking_metrics(rewards: Array, pairs: Array) -> Stats:
    """Means over the ordered pairs: accuracy, margin, and the rewards of either side."""
    high = jnp.broadcast_to(rewards[:, None], pairs.shape)
    low = jnp.broadcast_to(rewards[None, :], pairs.shape)
    return {
        "accuracy": mean_over_pairs((high > low).astype(jnp.float32), pairs),
        "margin": mean_over_pairs(high - low, pairs),
        "chosen_reward": mean_over_pairs(high, pairs),
        "rejected_reward": mean_over_pairs(low, pairs),
    }


def list_nll(rewards: Array, pairs: Array, scale: Array | None = None) -> Array:
    """Minus the log-likelihood of a ranking: each member is drawn before all those below it.

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
    own = rewards
    if scale is not None:
        below = below * jnp.where(pairs, scale, 0)
        own = rewards * jnp.where(pairs, scale, 0).max(axis=1)
    some = pairs.any(axis=1)
    # Minus a large finite number, not infinity, whose differences would be NaN.
    rest = jnp.where(pairs, below - own[:, None], -1e30)
    terms = jax.nn.logsumexp(jnp.concatenate([jnp.zeros_like(own)[:, None], rest], axis=1), axis=1)
    return jnp.where(some, terms, 0).sum()


def ranking(beta: float, gap_scale: bool) -> GroupLoss:
    """PRO: the list's likelihood under mean log-probabilities, plus beta times the best one's NLL.

    See ``methods.preference_lists.pro``.
    """

    def of_group(group: Members) -> tuple[Array, Stats]:
        means, pairs = group.mean("logprobs"), ordered_pairs(group)
        gaps = group.score[:, None] - group.score[None, :]
        value = list_nll(means, pairs, gaps if gap_scale else None)
        value = value - beta * mean_over_best(means, group)
        return spoilt(value, group), ranking_metrics(means, pairs)

    return of_group


def hinge_ranking(imitation: float) -> GroupLoss:
    """RRHF: the sum over pairs of max(0, p_j - p_i), and the NLL of the best completion.

    See ``methods.preference_lists.rrhf``.
    """

    def of_group(group: Members) -> tuple[Array, Stats]:
        means, pairs = group.mean("logprobs"), ordered_pairs(group)
        rank = jnp.where(pairs, jnp.maximum(0, means[None, :] - means[:, None]), 0).sum()
        value = rank - imitation * mean_over_best(group.total("logprobs"), group)
        return spoilt(value, group), ranking_metrics(means, pairs)

    return of_group


def labelled(beta: float, loss: Callable[[Array], Array]) -> GroupLoss:
    """A loss of each completion's implicit reward, on the side that its label says.

    The sign of the score is the label and its size the weight:

        |score| loss(sign(score) beta (log pi(y) - log pi_ref(y) - shift))

    Args:
      beta: per nat.
      loss: of the signed reward, elementwise.
    """

    def of_group(group: Members) -> tuple[Array, Stats]:
        reward = beta * (group.log_ratio() - group.first("shift"))
        value = jnp.abs(group.score) * loss(jnp.sign(group.score) * reward)
        right = (jnp.sign(group.score) * reward > 0).astype(jnp.float32)
        return value, {"accuracy": right, "margin": jnp.sign(group.score) * reward}

    return of_group


def saturating(signed_reward: Array) -> Array:
    """1 - sigmoid(x): prospect theory's bounded loss, whose gradient vanishes on both sides."""
    return sigmoid(-signed_reward)


def cross_entropy(signed_reward: Array) -> Array:
    """-log sigmoid(x)."""
    return softplus(-signed_reward)


def regression(scale: float) -> GroupLoss:
    """(log pi(y) - log pi_ref(y) - scale (P - 1/2))^2 with the score P a probability of winning."""

    def of_group(group: Members) -> tuple[Array, Stats]:
        log_ratio = group.log_ratio()
        value = jnp.square(log_ratio - scale * (group.score - 0.5))
        return value, {"margin": log_ratio * jnp.sign(group.score - 0.5)}

    return of_group


def clipped_sequence(clip: float) -> GroupLoss:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A), rho the ratio of a whole completion."""

    def of_group(group: Members) -> tuple[Array, Stats]:
        ratio = _ratio(group.total("logprobs") - group.total("sampler_logprobs"))
        bounded = jnp.clip(ratio, 1 - clip, 1 + clip)
        value = -jnp.minimum(ratio * group.score, bounded * group.score)
        return value, {"ratio": ratio, "clip_fraction": (ratio != bounded).astype(jnp.float32)}

    return of_group


def clipped_pairs(clip: float) -> GroupLoss:
    """The mean over pairs of -(s_i - s_j)/2 times min(rho_i / rho_j, 1 + clip)."""

    def of_group(group: Members) -> tuple[Array, Stats]:
        log_ratio = group.total("logprobs") - group.total("sampler_logprobs")
        ratio = _ratio(log_ratio[:, None] - log_ratio[None, :])
        pairs = ordered_pairs(group)
        half_gap = (group.score[:, None] - group.score[None, :]) / 2
        gains = jnp.where(pairs, half_gap, 0) * jnp.minimum(ratio, 1 + clip)
        # Pairs of one score count in the mean: they are pairs without a gain, not missing ones.
        size = group.live.sum()
        value = -gains.sum() / jnp.maximum(size * (size - 1) / 2, 1)
        clipped = mean_over_pairs((ratio > 1 + clip).astype(jnp.float32), pairs)
        return spoilt(value, group), {"clip_fraction": clipped}

    return of_group


def _ratio(log_ratio: Array) -> Array:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
