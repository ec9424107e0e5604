"""Advantages of arrays: the functions of ``advantages`` over all leading axes.

    advantages = grpo_advantages(rewards)                                # [N, G] -> [N, G]

``rewards`` [..., G] float, points, are the completions of one prompt along the last axis, and
``members`` [..., G] bool is True where the completion exists; None for all of them. Results are
float32 of the shape of the rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import chex
import jax.numpy as jnp

from jrl.objectives import advantages as group
from jrl.objectives import transforms
from jrl.objectives.arrays import batch_of, by_row, check, check_types, spread
from jrl.types import Array


def grpo_advantages(
    rewards: Array, members: Array | None = None, *, eps: float = 1e-6, ddof: int = 1
) -> Array:
    """Rewards minus their group's mean, over the group's standard deviation.

    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
    (arXiv:2402.03300). ``eps``, points, is added to the deviation, which is the sample's with
    ``ddof`` 1 and the population's with 0. Exactly 0 where all rewards of a group are equal.

    >>> grpo_advantages(jnp.array([[3.0, 2.0, 1.0], [1.0, 1.0, 1.0]]), eps=1e-12).tolist()
    [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
    """
    return _by_group(partial(group.group_mean_std, eps=eps, ddof=ddof), rewards, members)


def dr_grpo_advantages(rewards: Array, members: Array | None = None) -> Array:
    """Rewards minus their group's mean, points, not scaled.

    "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783).

    >>> dr_grpo_advantages(jnp.array([3.0, 0.0, 0.0])).tolist()
    [2.0, -1.0, -1.0]
    """
    return _by_group(group.mean_centred, rewards, members)


def rloo_advantages(rewards: Array, members: Array | None = None) -> Array:
    """Rewards minus the mean reward of the group's other completions, points.

    "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in
    LLMs" (arXiv:2402.14740).

    >>> rloo_advantages(jnp.array([3.0, 0.0, 0.0])).tolist()
    [3.0, -1.5, -1.5]
    """
    return _by_group(group.leave_one_out, rewards, members)


def maxrl_advantages(rewards: Array, members: Array | None = None) -> Array:
    """Rewards of 0 and 1 over their group's mean, minus 1: maximum likelihood of a right answer.

    As in ``maxrl``; 0 for a group without a success.

    >>> maxrl_advantages(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    return _by_group(group.mean_scaled, rewards, members)


def remax_advantages(rewards: Array, greedy_rewards: Array) -> Array:
    """Rewards [..., G] minus ``greedy_rewards`` [...], those of each prompt's greedy completion.

    "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models" (arXiv:2310.10505).

    >>> remax_advantages(jnp.array([1.0, 0.0]), jnp.array(0.25)).tolist()
    [0.75, -0.25]
    """
    check_types(float, rewards=rewards)
    chex.assert_shape(greedy_rewards, rewards.shape[:-1], custom_message="greedy_rewards [...]")
    # The greedy completion is the group's last member, as in the records: read, but not live.
    both = jnp.concatenate([rewards, jnp.expand_dims(greedy_rewards, -1)], axis=-1)
    last = jnp.arange(both.shape[-1]) == rewards.shape[-1]
    advantages = _by_group(lambda r, m: group.greedy_baseline(r, m & ~last, last), both, None)
    return advantages[..., :-1]


def opo_advantages(rewards: Array, lengths: Array, members: Array | None = None) -> Array:
    """Rewards minus their group's mean weighted by ``lengths`` [..., G], trained tokens.

    "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585).

    >>> opo_advantages(jnp.array([1.0, 0.0]), jnp.array([3, 1])).tolist()
    [0.25, -0.75]
    """
    lengths = lengths.astype(jnp.float32)
    return _by_group(group.length_weighted_centred, rewards, members, lengths)


def gae(
    rewards: Array, values: Array, mask: Array, *, discount: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Array, Array]:
    """Generalised advantage estimates over live tokens, and the value network's targets.

    "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
    (arXiv:1506.02438). A token outside the mask, such as a tool's output, costs no discount.

    Args:
      rewards: [..., T] float, points, at the tokens where they are paid (``at_last_token``).
      values: [..., T] float, points, the estimate before each token.
      mask: [..., T] bool.
      discount: the factor for one live token, in [0, 1].
      gae_lambda: the factor of later errors, in [0, 1].

    Returns:
      advantages and returns, each [..., T] float32, points, 0 outside the mask. Not whitened.

    >>> mask, values = jnp.array([True, False, True]), jnp.array([0.5, 9.0, 0.25])
    >>> [x.tolist() for x in gae(jnp.array([0.0, 0.0, 1.0]), values, mask, gae_lambda=0.5)]
    [[0.125, 0.0, 0.75], [0.625, 0.0, 1.0]]
    """
    check(mask, rewards=rewards, values=values)
    estimates = partial(group.gae, discount=discount, decay=gae_lambda)
    return by_row(estimates, rewards.astype(jnp.float32), values.astype(jnp.float32), mask)


def at_last_token(scores: Array, mask: Array) -> Array:
    """Token rewards [..., T] of completions whose score [...] is paid at their last live token.

    >>> at_last_token(jnp.array(2.0), jnp.array([True, True, False])).tolist()
    [0.0, 2.0, 0.0]
    """
    check_types(float, scores=scores)
    check_types(bool, mask=mask)
    chex.assert_shape(scores, mask.shape[:-1], custom_message="scores [...] beside mask [..., T]")
    scores = scores.astype(jnp.float32)
    rows = jnp.broadcast_to(jnp.expand_dims(scores, -1), mask.shape)
    return by_row(lambda score, live: group.at_last_token(score[0], live), rows, mask)


def reward_to_go(rewards: Array, mask: Array, *, discount: float = 1.0) -> Array:
    """Discounted sums of rewards [..., T] from each live token to the end of its completion.

    >>> reward_to_go(jnp.array([1.0, 7.0, 4.0]), jnp.array([True, False, True])).tolist()
    [5.0, 0.0, 4.0]
    """
    check(mask, rewards=rewards)
    returns = partial(group.reward_to_go, discount=discount)
    return by_row(returns, rewards.astype(jnp.float32), mask)


def whiten_tokens(advantages: Array, mask: Array, *, eps: float = 1e-8) -> Array:
    """Advantages minus the mean over all live tokens, over their standard deviation.

    The global normalisation of ``reinforce_plus_plus`` and ``ppo``; ``eps`` is added to the
    variance. [..., T], 0 outside the mask and where all are equal.

    >>> whiten_tokens(jnp.array([3.0, 1.0]), jnp.ones((2, 1), bool)).tolist()
    [[1.0], [-1.0]]
    """
    batch, values = batch_of(mask, {}), spread(advantages, mask)
    return transforms.whiten("tokens", eps=eps).apply(values, batch, ())[0].reshape(mask.shape)


def _by_group(
    function: Callable[..., Array], rewards: Array, members: Array | None, *more: Array
) -> Array:
    """A function of one group over all leading axes of [..., G]."""
    check_types(float, rewards=rewards)
    live = jnp.ones(rewards.shape, bool) if members is None else members
    check_types(bool, members=live)
    chex.assert_equal_shape([rewards, live, *more])
    return by_row(function, rewards.astype(jnp.float32), live, *more)
