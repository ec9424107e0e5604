"""Advantages of ONE group or ONE sequence, as pure functions; lift them with ``jax.vmap``.

Every group function takes ``rewards`` [G] float, points, and ``members`` [G] bool, and returns [G]
float: a member that is False there is left out of all statistics and gets 0, so groups may be
ragged. A live NaN reward makes its whole group NaN and is never averaged away; a NaN reward of a
member that is not live is not read. ``mask`` [T] is True where the policy drew the token.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.types import Array


def live_mean(values: Array, live: Array, axis: int | None = None) -> Array:
    """The mean of values where ``live``, over all axes or one; 0 where nothing is live.

    >>> float(live_mean(jnp.array([3.0, 9.0, 5.0]), jnp.array([True, False, True])))
    4.0
    """
    return jnp.where(live, values, 0).sum(axis=axis) / jnp.maximum(live.sum(axis=axis), 1)


def mean_centred(rewards: Array, members: Array) -> Array:
    """Each member's reward minus the mean reward of its group.

    The advantage of ``dr_grpo``, points. Sums to zero; 0 for a group with one live member, and
    exactly 0 when all live rewards are equal. Not scaled.

    >>> mean_centred(jnp.array([3.0, 0.0, 0.0, 9.0]), jnp.array([True, True, True, False])).tolist()
    [2.0, -1.0, -1.0, 0.0]
    """
    _check_group(rewards, members)
    # Centring on the smallest reward first makes equal rewards cancel exactly; the rounding of
    # their mean, divided by a tiny deviation, would otherwise pass for a signal.
    lowest = jnp.min(rewards, where=members, initial=jnp.inf)
    shifted = jnp.where(members, rewards - lowest, 0)
    mean = shifted.sum() / jnp.maximum(members.sum(), 1)
    return jnp.where(members, shifted - mean, 0)


def group_mean_std(rewards: Array, members: Array, *, eps: float = 1e-6, ddof: int = 1) -> Array:
    """Each member's reward minus the group's mean, over the group's standard deviation plus eps.

    The advantage of ``grpo``. The paper writes ``std`` without saying which; the default is the
    sample deviation (``ddof=1``), which TRL, verl and OpenRLHF compute.

    ``eps`` is in points, above 0; ``ddof`` 1 divides the squares by the live members less one, 0 by
    the live members. 0 for a group with one live member or whose live rewards are all equal.

    >>> ones = jnp.ones(3, bool)
    >>> group_mean_std(jnp.array([3.0, 2.0, 1.0]), ones, eps=1e-12).tolist()
    [1.0, 0.0, -1.0]
    """
    centred = mean_centred(rewards, members)
    freedom = jnp.maximum(members.sum() - ddof, 1)
    scale = square_scale(centred)
    deviation = scale * jnp.sqrt(jnp.square(centred / scale).sum() / freedom)
    return centred / (deviation + eps)


def square_scale(values: Array) -> Array:
    """[] float32: what to divide numbers by before they are squared and added up.

    The square of a reward beyond 1e19 is infinite in float32, and a deviation of infinity would
    make every advantage 0, in silence. Below 1e15 it is 1, which changes no bit.

    >>> float(square_scale(jnp.array([2.0, -3.0]))), float(square_scale(jnp.array([0.0, -1e30])))
    (1.0, 1.0000000150474662e+30)
    """
    largest = jnp.max(jnp.abs(values))
    return jax.lax.stop_gradient(jnp.where(largest > 1e15, largest, 1))


def leave_one_out(rewards: Array, members: Array) -> Array:
    """Each member's reward minus the mean reward of the group's other members.

    The advantage of ``rloo``, points. Sums to zero; 0 for a group with one live member, which has
    no others to compare with. Not scaled by the group's deviation.

    >>> leave_one_out(jnp.array([3.0, 0.0, 0.0]), jnp.ones(3, bool)).tolist()
    [3.0, -1.5, -1.5]
    """
    live = members.sum()
    return mean_centred(rewards, members) * (live / jnp.maximum(live - 1, 1))


def mean_scaled(rewards: Array, members: Array) -> Array:
    """Each member's reward over the mean reward of its group, minus 1.

    The advantage of ``maxrl`` for rewards of 0 and 1: summed against the score function it is the
    mean score function of the right completions less that of all. A pure number, for rewards that
    are not negative; sums to zero; 0 for a group whose mean reward is not above 0 (no success,
    nothing to imitate).

    >>> mean_scaled(jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.ones(4, bool)).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    centred = mean_centred(rewards, members)
    mean = jnp.sum(rewards, where=members) / jnp.maximum(members.sum(), 1)
    # The comparison is false for a NaN, which then stays one.
    return jnp.where(mean <= 0, 0, centred / jnp.where(mean <= 0, 1, mean))


def length_weighted_centred(rewards: Array, members: Array, lengths: Array) -> Array:
    """Each member's reward minus the mean reward of its group, weighted by length.

    The baseline of ``opo``, points, with ``lengths`` [G] trained tokens. 0 for a group with one
    live member, and exactly 0 when all live rewards are equal.

    >>> lengths = jnp.array([3.0, 1.0])
    >>> length_weighted_centred(jnp.array([1.0, 0.0]), jnp.ones(2, bool), lengths).tolist()
    [0.25, -0.75]
    """
    _check_group(rewards, members)
    lowest = jnp.min(rewards, where=members, initial=jnp.inf)
    shifted = jnp.where(members, rewards - lowest, 0)
    weights = jnp.where(members, lengths, 0)
    baseline = (weights * shifted).sum() / jnp.maximum(weights.sum(), 1)
    return jnp.where(members & (members.sum() > 1), shifted - baseline, _kept_nan(shifted))


def greedy_baseline(rewards: Array, members: Array, baseline: Array) -> Array:
    """Each member's reward minus the reward of the group's greedily drawn completion.

    The advantage of ``remax``, points. ``baseline`` [G] bool is True for the greedy completion,
    which is no live member; the mean is taken if there are several. NaN for the live members of a
    group that has none: the advantage is then not defined, and 0 would hide it.

    >>> greedy = jnp.array([False, False, True])
    >>> greedy_baseline(jnp.array([1.0, 0.0, 0.25]), ~greedy, greedy).tolist()
    [0.75, -0.25, 0.0]
    """
    _check_group(rewards, members)
    chex.assert_equal_shape([rewards, baseline])
    chex.assert_type(baseline, bool)
    greedy = jnp.sum(rewards, where=baseline) / baseline.sum()
    return jnp.where(members, rewards - greedy, 0)


def at_last_token(score: Array, mask: Array) -> Array:
    """The rewards [T] of a sequence with its ``score`` [] at the last live token.

    All 0 where nothing is live.

    >>> at_last_token(jnp.float32(2.0), jnp.array([True, True, False])).tolist()
    [0.0, 2.0, 0.0]
    """
    chex.assert_rank([score, mask], [0, 1])
    chex.assert_type([score, mask], [float, bool])
    index = jnp.arange(mask.shape[0])
    last = jnp.max(index, where=mask, initial=-1)
    return jnp.where(index == last, score, 0)


def reward_to_go(rewards: Array, mask: Array, discount: float = 1.0) -> Array:
    """The discounted sum of rewards from each live token to the end of its sequence.

    [T] float, points, 0 outside the mask, where ``rewards`` [T] are not read: such tokens are
    stepped over, and no ``discount``, a factor in [0, 1], is spent on them.

    >>> mask = jnp.array([True, False, True, True])
    >>> reward_to_go(jnp.array([1.0, 7.0, 0.0, 4.0]), mask, 0.5).tolist()
    [2.0, 0.0, 2.0, 4.0]
    """
    zeros = jnp.zeros_like(rewards)
    advantages, _ = gae(rewards, zeros, mask, discount, 1.0)
    return advantages


def gae(
    rewards: Array, values: Array, mask: Array, discount: float, decay: float | Array
) -> tuple[Array, Array]:
    """Generalised advantage estimates and the returns that the values are trained towards.

    Those of ``ppo``, over the live tokens of one completion:

        delta_t = r_t + discount * V_{t+1} - V_t
        A_t     = delta_t + discount * decay * A_{t+1}

    where t + 1 is the next LIVE token, so that tool output between two turns costs no discount,
    and V is 0 after the last one, also when the sequence was cut at the length limit.

    Args:
      rewards: [T] float, points; what lies outside the mask is not read.
      values: [T] float, points, the estimate before each token.
      mask: [T] bool.
      discount: the factor for one live token, in [0, 1].
      decay: lambda, in [0, 1].

    Returns:
      advantages [T] and returns [T] (advantages plus values), points, both 0 outside the mask.

    >>> mask = jnp.array([True, False, True])
    >>> rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 9.0, 0.25])
    >>> [x.tolist() for x in gae(rewards, values, mask, 1.0, 0.5)]
    [[0.125, 0.0, 0.75], [0.625, 0.0, 1.0]]
    """
    chex.assert_rank([rewards, values, mask], 1)
    chex.assert_equal_shape([rewards, values, mask])
    chex.assert_type([rewards, values, mask], [float, float, bool])

    def step(later: tuple[Array, Array], now: tuple[Array, Array, Array]) -> tuple:
        value_later, advantage_later = later
        reward, value, live = now
        delta = reward + discount * value_later - value
        advantage = delta + discount * decay * advantage_later
        carry = (
            jnp.where(live, value, value_later),
            jnp.where(live, advantage, advantage_later),
        )
        return carry, jnp.where(live, advantage, 0)

    zero = jnp.zeros((), rewards.dtype)
    advantages: Array
    _, advantages = jax.lax.scan(step, (zero, zero), (rewards, values, mask), reverse=True)
    return advantages, jnp.where(mask, advantages + values, 0)


def _check_group(rewards: Array, members: Array) -> None:
    chex.assert_rank([rewards, members], 1)
    chex.assert_equal_shape([rewards, members])
    chex.assert_type([rewards, members], [float, bool])


def _kept_nan(values: Array) -> Array:
    """0, but NaN where the value is NaN: ignoring a value must not hide it."""
    return jnp.where(jnp.isnan(values), values, 0)
