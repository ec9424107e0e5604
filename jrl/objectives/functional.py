"""Losses and advantages of arrays, for training loops that keep no ``Batch``.

    advantages = grpo_advantages(rewards)                                # [N, G] -> [N, G]
    loss = grpo_loss(logprobs, old_logprobs, advantages, mask)           # [N, G, T] -> []

Each function binds the parts that the method of that name is made of and adds no formula of its
own: a loss is ``policy_loss`` of those parts. Shapes:

- token losses take ``[..., T]`` with any leading axes, ``advantages`` ``[...]`` (one a completion)
  or ``[..., T]``, and ``mask`` ``[..., T]`` bool, True where the policy sampled the token. They
  return the scalar to minimise. What lies outside the mask is not read.
- advantages of a group take ``rewards`` ``[..., G]`` and, for ragged groups, ``members``
  ``[..., G]`` bool.
- preference losses take ``[N]``, one log-probability a completion (``sequence_logprobs``).

Everything is float32, log-probabilities in nats. Gradients flow through ``logprobs`` (and
``values``, ``entropy``) alone, so ``old_logprobs=logprobs`` is a fresh on-policy step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jrl.errors import unknown_choice
from jrl.objectives import advantages as group
from jrl.objectives import aggregates, pairs, ratios, regularizers, transforms
from jrl.objectives.policy import combine_terms, policy_loss
from jrl.types import Aggregate, Array, Batch, Objective, Regularizer, Stats, Surrogate

# ---------------------------------------------------------------- log-probabilities of tokens


def token_logprobs(logits: Array, tokens: Array) -> Array:
    """Log-probabilities of tokens under the softmax of their logits.

    Args:
      logits: [..., V] float, of the position that predicts the token.
      tokens: [...] int32, ids in [0, V).

    Returns:
      [...] float32, nats.

    >>> logits = jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5]]))
    >>> [round(x, 4) for x in token_logprobs(logits, jnp.array([1, 0])).tolist()]
    [-0.2877, -0.6931]
    """
    chex.assert_type([logits, tokens], [float, int])
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]


def sequence_logprobs(logprobs: Array, mask: Array) -> Array:
    """Log-probabilities of complete sequences: sums over live tokens.

    Args:
      logprobs: [..., T] float, nats.
      mask: [..., T] bool.

    Returns:
      [...] float32, nats; 0 where nothing is live.

    >>> sequence_logprobs(jnp.array([-1.0, -2.0, -9.0]), jnp.array([True, True, False])).tolist()
    -3.0
    """
    _check(mask, logprobs=logprobs)
    return jnp.where(mask, logprobs, 0).sum(axis=-1, dtype=jnp.float32)


def entropy(logits: Array) -> Array:
    """Entropy of the softmax of logits.

    Args:
      logits: [..., V] float; -inf for a token that cannot be sampled.

    Returns:
      [...] float32, nats.

    >>> [round(x, 4) for x in entropy(jnp.array([[0.0, 0.0], [0.0, -jnp.inf]])).tolist()]
    [0.6931, 0.0]
    """
    chex.assert_type(logits, float)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    probability = jnp.exp(logprobs)
    # Without the guard an impossible token is 0 * -inf, and its gradient NaN.
    return (probability * jnp.where(probability > 0, -logprobs, 0)).sum(axis=-1)


# ---------------------------------------------------------------- policy gradients


def reinforce_loss(logprobs: Array, advantages: Array, mask: Array) -> Array:
    """Score-function loss: the mean over completions of ``-sum_t A log pi_t``.

    The loss of ``reinforce``, ``rloo`` and ``remax``, for tokens that the current policy sampled.

    Args:
      logprobs: [..., T] float, nats, under the policy being trained.
      advantages: [...] or [..., T] float, points.
      mask: [..., T] bool.

    Returns:
      [] float32.

    >>> logprobs = jnp.array([[-1.0, -2.0], [-3.0, -9.0]])
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> float(reinforce_loss(logprobs, jnp.array([1.0, -1.0]), mask))  # (3 - 3) / 2
    0.0
    """
    stats = {"logprobs": logprobs}
    return _loss(ratios.reinforce(), aggregates.sequence_sum, stats, advantages, mask)


def ppo_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Array:
    """PPO's clipped surrogate, the mean over live tokens.

    "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), with rho_t = pi_t / pi_old_t:

        loss = -mean over tokens of min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t)

    Args:
      logprobs: [..., T] float, nats, under the policy being trained.
      old_logprobs: [..., T] float, nats, under the policy that sampled the tokens. No gradient.
      advantages: [...] or [..., T] float, points. No gradient.
      mask: [..., T] bool.
      clip_low: the ratio's distance below 1.
      clip_high: the ratio's distance above 1.
      dual_clip: greatest ratio where the advantage is negative, above 1; None for none.

    Returns:
      [] float32. The value loss and an entropy bonus are terms of their own (``ppo_value_loss``,
      ``entropy``).

    >>> old, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    >>> loss = ppo_loss(jnp.array([[0.5, 0.5]]), old, jnp.array([[1.0, -1.0]]), mask)
    >>> round(float(loss), 4)  # (-1.2 + e^0.5) / 2
    0.2244
    """
    surrogate = ratios.clipped_ratio(clip_low, clip_high, dual_clip=dual_clip)
    stats = {"logprobs": logprobs, "sampler_logprobs": old_logprobs}
    return _loss(surrogate, aggregates.token_mean, stats, advantages, mask)


def grpo_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ref_logprobs: Array | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
) -> Array:
    """GRPO's loss: clipped token ratios, the mean over each completion's tokens, then over those.

    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
    (arXiv:2402.03300). Advantages come from ``grpo_advantages``.

    Args:
      logprobs: [..., T] float, nats, under the policy being trained.
      old_logprobs: [..., T] float, nats, under the policy that sampled the tokens. No gradient.
      advantages: [...] or [..., T] float. No gradient.
      mask: [..., T] bool.
      clip_low: the ratio's distance below 1.
      clip_high: the ratio's distance above 1.
      dual_clip: greatest ratio where the advantage is negative, above 1; None for none.
      ref_logprobs: [..., T] float, nats, under the reference policy; read with ``kl_coef``.
      kl_coef: beta, per nat; 0 leaves the divergence out.
      kl_kind: "k2" or "k3", see ``objectives.kl``.

    Returns:
      [] float32.

    Raises:
      TypeError: ``ref_logprobs`` without ``kl_coef``, or ``kl_coef`` without ``ref_logprobs``.

    >>> zeros, mask = jnp.zeros((2, 2)), jnp.array([[True, True], [True, False]])
    >>> float(grpo_loss(zeros, zeros, jnp.array([1.0, -0.5]), mask))
    -0.25
    """
    surrogate = ratios.clipped_ratio(clip_low, clip_high, dual_clip=dual_clip)
    stats = {"logprobs": logprobs, "sampler_logprobs": old_logprobs}
    terms = _kl_term(stats, ref_logprobs, kl_coef, kl_kind)
    return _loss(surrogate, aggregates.sequence_mean, stats, advantages, mask, terms)


def dr_grpo_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    max_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Array:
    """Dr. GRPO's loss: sums of clipped token losses over a constant length.

    "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783). Advantages
    come from ``dr_grpo_advantages``.

    Args:
      logprobs: [..., T] float, nats, under the policy being trained.
      old_logprobs: [..., T] float, nats, under the policy that sampled the tokens. No gradient.
      advantages: [...] or [..., T] float, points. No gradient.
      mask: [..., T] bool.
      max_tokens: the completion limit of the run, the divisor of each completion's sum.
      clip_low: the ratio's distance below 1.
      clip_high: the ratio's distance above 1.

    Returns:
      [] float32. Completions without a live token are not counted in the mean.

    >>> zeros, mask = jnp.zeros((2, 2)), jnp.array([[True, True], [True, False]])
    >>> float(dr_grpo_loss(zeros, zeros, jnp.array([1.0, -0.5]), mask, max_tokens=4))
    -0.1875
    """
    surrogate = ratios.clipped_ratio(clip_low, clip_high)
    stats = {"logprobs": logprobs, "sampler_logprobs": old_logprobs}
    return _loss(surrogate, aggregates.constant_norm(max_tokens), stats, advantages, mask)


def dapo_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Array:
    """DAPO's loss: GRPO's with a higher upper clip and the mean over all tokens of the batch.

    "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476). Arguments
    and result as for ``ppo_loss``.

    >>> zeros, mask = jnp.zeros((2, 2)), jnp.array([[True, True], [True, False]])
    >>> float(dapo_loss(zeros, zeros, jnp.array([1.0, -0.5]), mask))  # -(1 + 1 - 0.5) / 3
    -0.5
    """
    return ppo_loss(
        logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high
    )


def gspo_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Array:
    """GSPO's loss: one ratio per completion, the geometric mean of its tokens', clipped.

    "Group Sequence Policy Optimization" (arXiv:2507.18071). Arguments and result as for
    ``grpo_loss``; advantages ``[...]``, one a completion.

    >>> new, mask = jnp.array([[0.5, -0.5]]), jnp.ones((1, 2), bool)
    >>> float(gspo_loss(new, jnp.zeros((1, 2)), jnp.array([2.0]), mask))  # the ratio is 1
    -2.0
    """
    surrogate = ratios.ratio_loss(ratios.sequence, ratios.clip(clip_low, clip_high))
    stats = {"logprobs": logprobs, "sampler_logprobs": old_logprobs}
    return _loss(surrogate, aggregates.sequence_mean, stats, advantages, mask)


def cispo_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Array:
    """CISPO's loss: ``-sg(clip(rho_t)) A log pi_t``, the mean over all tokens of the batch.

    "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"
    (arXiv:2506.13585). Arguments and result as for ``ppo_loss``; ratios are held within
    ``1 - clip_low`` and ``1 + clip_high`` without gradient, so no token loses its gradient.

    >>> logprobs, mask = jnp.array([[-2.0]]), jnp.ones((1, 1), bool)
    >>> float(cispo_loss(logprobs, logprobs, jnp.array([0.5]), mask))
    1.0
    """
    surrogate = ratios.ratio_loss(rule=ratios.bounded(1 - clip_low, 1 + clip_high))
    stats = {"logprobs": logprobs, "sampler_logprobs": old_logprobs}
    return _loss(surrogate, aggregates.token_mean, stats, advantages, mask)


def ppo_value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, *, clip: float | None = 0.2
) -> Array:
    """Half the squared error of the value network, clipped as in PPO's code; the mean over tokens.

    Args:
      values: [..., T] float, points, under the parameters being trained.
      old_values: [..., T] float, points, at the start of the step. No gradient.
      returns: [..., T] float, points, the targets, as ``gae`` returns them. No gradient.
      mask: [..., T] bool.
      clip: points that a value may move away from its old one; None for the plain error.

    Returns:
      [] float32, squared points. Not scaled by a coefficient.

    >>> zero, mask = jnp.zeros((1, 2)), jnp.array([[True, False]])
    >>> float(ppo_value_loss(jnp.array([[1.0, 7.0]]), zero, zero + 2.0, mask, clip=0.5))
    1.125
    """
    term = regularizers.value_loss(1.0, clip)
    stats = {"values": values, "rollout_values": old_values, "returns": returns}
    return _term(term, stats, mask)


def kl_loss(logprobs: Array, ref_logprobs: Array, mask: Array, *, kind: str = "k3") -> Array:
    """Estimate of the divergence from a reference as a loss term, the mean over tokens.

    "Approximating KL Divergence" (Schulman, 2020; not on arXiv).

    Args:
      logprobs: [..., T] float, nats, of tokens that the policy sampled.
      ref_logprobs: [..., T] float, nats, under the reference. No gradient.
      mask: [..., T] bool.
      kind: "k2", whose gradient is that of KL(policy || reference), or "k3".

    Returns:
      [] float32, nats. Not scaled by a coefficient.

    >>> mask = jnp.ones((1, 1), bool)
    >>> float(kl_loss(jnp.array([[-1.0]]), jnp.array([[-3.0]]), mask, kind="k2"))
    2.0
    """
    term = regularizers.kl_in_loss(kind, 1.0)
    return _term(term, {"logprobs": logprobs, "ref_logprobs": ref_logprobs}, mask)


def sft_loss(logprobs: Array, mask: Array) -> Array:
    """Negative log-likelihood of given completions, the mean over tokens.

    Args:
      logprobs: [..., T] float, nats.
      mask: [..., T] bool.

    Returns:
      [] float32, nats.

    >>> float(sft_loss(jnp.array([[-1.0, -2.0]]), jnp.array([[True, False]])))
    1.0
    """
    stats = {"logprobs": logprobs}
    return _loss(ratios.nll(), aggregates.token_mean, stats, jnp.zeros(mask.shape), mask)


# ---------------------------------------------------------------- advantages


def grpo_advantages(
    rewards: Array, members: Array | None = None, *, eps: float = 1e-6, ddof: int = 1
) -> Array:
    """Rewards minus their group's mean, over the group's standard deviation.

    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
    (arXiv:2402.03300).

    Args:
      rewards: [..., G] float, points, the completions of one prompt along the last axis.
      members: [..., G] bool, True where the completion exists; None for all of them.
      eps: points, added to the deviation.
      ddof: 1 for the sample's deviation, 0 for the population's.

    Returns:
      [..., G] float32; 0 where all rewards of a group are equal.

    >>> grpo_advantages(jnp.array([[3.0, 2.0, 1.0], [1.0, 1.0, 1.0]]), eps=1e-12).tolist()
    [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
    """
    return _by_group(lambda r, m: group.group_mean_std(r, m, eps=eps, ddof=ddof), rewards, members)


def dr_grpo_advantages(rewards: Array, members: Array | None = None) -> Array:
    """Rewards minus their group's mean, not scaled.

    "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783). Arguments as
    for ``grpo_advantages``; returns [..., G] float32, points.

    >>> dr_grpo_advantages(jnp.array([3.0, 0.0, 0.0])).tolist()
    [2.0, -1.0, -1.0]
    """
    return _by_group(group.mean_centred, rewards, members)


def rloo_advantages(rewards: Array, members: Array | None = None) -> Array:
    """Rewards minus the mean reward of the group's other completions.

    "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in
    LLMs" (arXiv:2402.14740). Arguments as for ``grpo_advantages``; returns [..., G] float32,
    points.

    >>> rloo_advantages(jnp.array([3.0, 0.0, 0.0])).tolist()
    [3.0, -1.5, -1.5]
    """
    return _by_group(group.leave_one_out, rewards, members)


def maxrl_advantages(rewards: Array, members: Array | None = None) -> Array:
    """Rewards over their group's mean, minus 1: maximum likelihood of a right answer.

    Of rewards 0 and 1, as ``maxrl`` reads them. Arguments as for ``grpo_advantages``; returns
    [..., G] float32, a pure number, 0 for a group without a success.

    >>> maxrl_advantages(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    return _by_group(group.mean_scaled, rewards, members)


def remax_advantages(rewards: Array, greedy_rewards: Array) -> Array:
    """Rewards minus the reward of the greedy completion of the same prompt.

    "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models" (arXiv:2310.10505).

    Args:
      rewards: [..., G] float, points.
      greedy_rewards: [...] float, points.

    Returns:
      [..., G] float32, points.

    >>> remax_advantages(jnp.array([1.0, 0.0]), jnp.array(0.25)).tolist()
    [0.75, -0.25]
    """
    chex.assert_shape(greedy_rewards, rewards.shape[:-1])
    greedy = jnp.expand_dims(greedy_rewards, -1)
    both = jnp.concatenate([rewards, greedy], axis=-1)
    last = jnp.arange(both.shape[-1]) == rewards.shape[-1]
    advantages = _by_group(lambda r, m: group.greedy_baseline(r, m & ~last, last), both, None)
    return advantages[..., :-1]


def opo_advantages(rewards: Array, lengths: Array, members: Array | None = None) -> Array:
    """Rewards minus their group's mean weighted by length.

    "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585).

    Args:
      rewards: [..., G] float, points.
      lengths: [..., G] int or float, trained tokens of each completion.
      members: [..., G] bool; None for all of them.

    Returns:
      [..., G] float32, points.

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
    (arXiv:1506.02438). A token outside the mask, such as a tool's output, is stepped over at no
    discount.

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
    _check(mask, rewards=rewards, values=values)

    def one(rewards: Array, values: Array, mask: Array) -> tuple[Array, Array]:
        return group.gae(rewards, values, mask, discount, gae_lambda)

    return _by_row(one, rewards.astype(jnp.float32), values.astype(jnp.float32), mask)


def at_last_token(scores: Array, mask: Array) -> Array:
    """Token rewards of completions whose score is assigned to their last live token.

    Args:
      scores: [...] float, points.
      mask: [..., T] bool.

    Returns:
      [..., T] float32, points.

    >>> at_last_token(jnp.array(2.0), jnp.array([True, True, False])).tolist()
    [0.0, 2.0, 0.0]
    """
    chex.assert_shape(scores, mask.shape[:-1])
    rows = jnp.broadcast_to(jnp.expand_dims(scores, -1), mask.shape)
    return _by_row(lambda score, live: group.at_last_token(score[0], live), rows, mask)


def reward_to_go(rewards: Array, mask: Array, *, discount: float = 1.0) -> Array:
    """Discounted sums of rewards from each live token to the end of its completion.

    Args:
      rewards: [..., T] float, points.
      mask: [..., T] bool.
      discount: the factor for one live token, in [0, 1].

    Returns:
      [..., T] float32, points, 0 outside the mask.

    >>> reward_to_go(jnp.array([1.0, 7.0, 4.0]), jnp.array([True, False, True])).tolist()
    [5.0, 0.0, 4.0]
    """
    _check(mask, rewards=rewards)
    return _by_row(lambda r, m: group.reward_to_go(r, m, discount), rewards, mask)


def whiten_tokens(advantages: Array, mask: Array, *, eps: float = 1e-8) -> Array:
    """Advantages minus the mean over all live tokens, over their standard deviation.

    The global normalisation of ``reinforce_plus_plus`` and ``ppo``.

    Args:
      advantages: [...] or [..., T] float.
      mask: [..., T] bool.
      eps: added to the variance.

    Returns:
      [..., T] float32, 0 outside the mask and where all are equal.

    >>> whiten_tokens(jnp.array([3.0, 1.0]), jnp.ones((2, 1), bool)).tolist()
    [[1.0], [-1.0]]
    """
    values = _spread(advantages, mask).reshape(-1, 1, mask.shape[-1])
    batch = _batch(mask.reshape(-1, mask.shape[-1]), {})
    return transforms.whiten("tokens", eps=eps).apply(values, batch, ())[0].reshape(mask.shape)


# ---------------------------------------------------------------- preferences


def dpo_loss(
    chosen: Array,
    rejected: Array,
    ref_chosen: Array,
    ref_rejected: Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
) -> Array:
    """DPO's loss of the difference of implicit rewards, the mean over pairs.

    "Direct Preference Optimization: Your Language Model is Secretly a Reward Model"
    (arXiv:2305.18290).

    Args:
      chosen: [N] float, nats, log pi of the chosen completions (``sequence_logprobs``).
      rejected: [N] float, nats, of the rejected ones.
      ref_chosen: [N] float, nats, under the reference. No gradient.
      ref_rejected: [N] float, nats, under the reference. No gradient.
      beta: per nat of log-ratio.
      label_smoothing: rate of wrong labels; "sigmoid" and "hinge" read it.
      kind: of ``pairs.PAIR_LOSSES``: "sigmoid", "hinge", "ipo", "nca", ...

    Returns:
      [] float32.

    Raises:
      UserError: for another kind.

    >>> zeros = jnp.zeros(2)
    >>> round(float(dpo_loss(zeros, zeros, zeros, zeros)), 4)  # log 2
    0.6931
    """
    if kind not in pairs.PAIR_LOSSES:
        raise unknown_choice("dpo_loss.kind", kind, pairs.PAIR_LOSSES)
    _check_pairs(chosen, rejected, ref_chosen, ref_rejected)
    a = beta * (chosen - jax.lax.stop_gradient(ref_chosen))
    b = beta * (rejected - jax.lax.stop_gradient(ref_rejected))
    return pairs.reward_loss(kind, beta, label_smoothing)(a, b).mean()


def ipo_loss(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, *, tau: float = 0.1
) -> Array:
    """IPO's squared loss of the difference of log-ratios, the mean over pairs.

    "A General Theoretical Paradigm to Understand Learning from Human Preferences"
    (arXiv:2310.12036). Arguments as for ``dpo_loss``, with tau in place of beta.

    >>> zeros = jnp.zeros(2)
    >>> round(float(ipo_loss(zeros, zeros, zeros, zeros, tau=0.5)), 6)  # (1 / (2 tau))^2
    1.0
    """
    return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=tau, kind="ipo")


def simpo_loss(
    chosen: Array,
    rejected: Array,
    chosen_tokens: Array,
    rejected_tokens: Array,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Array:
    """SimPO's logistic loss of mean log-probabilities with a margin, the mean over pairs.

    "SimPO: Simple Preference Optimization with a Reference-Free Reward" (arXiv:2405.14734).

    Args:
      chosen: [N] float, nats, log pi of the chosen completions.
      rejected: [N] float, nats, of the rejected ones.
      chosen_tokens: [N] int or float, live tokens of each, at least 1.
      rejected_tokens: [N] int or float.
      beta: per nat of mean log-probability.
      gamma: the margin.

    Returns:
      [] float32.

    >>> loss = simpo_loss(*(jnp.array([x]) for x in (-2.0, -2.0, 2, 4)), gamma=1.0)
    >>> round(float(loss), 4)  # the margin 2 (-1 + 0.5) - 1 is -2
    2.1269
    """
    _check_pairs(chosen, rejected)
    a, b = beta * chosen / chosen_tokens - gamma, beta * rejected / rejected_tokens
    return pairs.logistic(a, b).mean()


def orpo_loss(
    chosen: Array,
    rejected: Array,
    chosen_tokens: Array,
    rejected_tokens: Array,
    *,
    lambda_: float = 0.1,
) -> Array:
    """ORPO's likelihood of the chosen completion plus its odds-ratio penalty, the mean over pairs.

    "ORPO: Monolithic Preference Optimization without Reference Model" (arXiv:2403.07691).
    Arguments as for ``simpo_loss``, with the penalty's weight ``lambda_``.

    >>> one = jnp.array([1])
    >>> loss = orpo_loss(jnp.array([-1.0]), jnp.array([-1.0]), one, one, lambda_=1.0)
    >>> round(float(loss), 4)  # 1 + log 2
    1.6931
    """
    _check_pairs(chosen, rejected)
    mean = chosen / chosen_tokens, rejected / rejected_tokens
    return pairs.odds_ratio_loss(*mean, lambda_).mean()


def bradley_terry_loss(chosen: Array, rejected: Array) -> Array:
    """Reward-model loss: minus the log-probability that the chosen completion wins.

    Args:
      chosen: [N] float, the reward model's scores of the chosen completions.
      rejected: [N] float, of the rejected ones.

    Returns:
      [] float32, nats, the mean over pairs.

    >>> round(float(bradley_terry_loss(jnp.array([1.0]), jnp.array([1.0]))), 4)
    0.6931
    """
    _check_pairs(chosen, rejected)
    return pairs.logistic(chosen, rejected).mean()


# ---------------------------------------------------------------- how parts are applied


def _loss(
    surrogate: Surrogate,
    aggregate: Aggregate,
    stats: Stats,
    advantages: Array,
    mask: Array,
    regularizers: tuple[Regularizer, ...] = (),
) -> Array:
    """``policy_loss`` of an objective of these parts, divided: [] float32.

    Args:
      surrogate: of one sequence.
      aggregate: of [B, T] losses.
      stats: [..., T] by name; ``logprobs`` alone carries gradient.
      advantages: [...] or [..., T].
      mask: [..., T] bool.
      regularizers: further terms.
    """
    _check(mask, **stats)
    width = mask.shape[-1]
    one = {name: x.reshape(-1, 1, width).astype(jnp.float32) for name, x in stats.items()}
    fixed = {name: jax.lax.stop_gradient(x) for name, x in one.items() if name != "logprobs"}
    objective = Objective(transforms.identity(), surrogate, aggregate, regularizers)
    batch = _batch(mask.reshape(-1, width), fixed)
    values = _spread(advantages, mask).reshape(-1, 1, width)
    state = objective.init()
    terms, _ = policy_loss(objective, {"logprobs": one["logprobs"]}, batch, values, state)
    return combine_terms(objective, terms, state)


def _term(term: Regularizer, stats: Stats, mask: Array) -> Array:
    """The mean over live tokens of a regularizer of coefficient 1: [] float32."""
    _check(mask, **stats)
    live = {"logprobs", "values"}
    stats = {k: x if k in live else jax.lax.stop_gradient(x) for k, x in stats.items()}
    stats = {name: jnp.where(mask, x, 0).astype(jnp.float32) for name, x in stats.items()}
    names = sorted(stats)

    def one(*arrays: Array) -> Array:
        *values, live = arrays
        return term.value(dict(zip(names, values, strict=True)), live)

    rows = _by_row(one, *(stats[name] for name in names), mask)
    width = mask.shape[-1]
    total, count = aggregates.token_mean(rows.reshape(-1, width), mask.reshape(-1, width))
    return total / jnp.maximum(count, 1)


def _kl_term(
    stats: Stats, ref_logprobs: Array | None, coef: float, kind: str
) -> tuple[Regularizer, ...]:
    """The divergence as a term, its statistic added to ``stats``; no term without a reference."""
    penalised = isinstance(coef, jax.Array) or coef != 0
    if penalised != (ref_logprobs is not None):
        raise TypeError("give ref_logprobs and kl_coef together, or neither")
    if ref_logprobs is None:
        return ()
    stats["ref_logprobs"] = ref_logprobs
    return (regularizers.kl_in_loss(kind, coef),)


def _batch(mask: Array, stats: Stats) -> Batch:
    """A record of [B, T] arrays, each row a group of its own; it holds no tokens or rewards."""
    rows, width = mask.shape
    some = jnp.ones((rows, 1), bool)
    return Batch(
        prompt_tokens=jnp.zeros((rows, 1), jnp.int32),
        prompt_lengths=jnp.ones(rows, jnp.int32),
        tokens=jnp.zeros((rows, 1, width), jnp.int32),
        lengths=jnp.full((rows, 1), width, jnp.int32),
        mask=jnp.expand_dims(mask, 1),
        rewards=jnp.zeros((rows, 1, 1), jnp.float32),
        reward_weights=jnp.ones(1, jnp.float32),
        members=some,
        baseline=~some,
        truncated=~some,
        stats=stats,
    )


def _spread(advantages: Array, mask: Array) -> Array:
    """Advantages [..., T] float32, those of complete sequences at each of their tokens."""
    chex.assert_type(advantages, float)
    if advantages.ndim == mask.ndim - 1:
        advantages = jnp.expand_dims(advantages, -1)
        chex.assert_shape(advantages, (*mask.shape[:-1], 1))
        advantages = jnp.broadcast_to(advantages, mask.shape)
    chex.assert_shape(advantages, mask.shape)
    return advantages.astype(jnp.float32)


def _by_group(
    function: Callable[..., Array], rewards: Array, members: Array | None, *more: Array
) -> Array:
    """A function of one group over all leading axes of [..., G]."""
    chex.assert_type(rewards, float)
    live = jnp.ones(rewards.shape, bool) if members is None else members
    chex.assert_equal_shape([rewards, live, *more])
    return _by_row(function, rewards.astype(jnp.float32), live, *more)


def _by_row(function: Callable[..., Any], *arrays: Array) -> Any:
    """A function of one row [T], over all leading axes of [..., T]."""
    for _ in range(arrays[0].ndim - 1):
        function = jax.vmap(function)
    return function(*arrays)


def _check(mask: Array, **arrays: Array) -> None:
    chex.assert_type(mask, bool)
    for name, array in arrays.items():
        chex.assert_shape(array, mask.shape, custom_message=f"{name} beside the mask")
        chex.assert_type(array, float)


def _check_pairs(*arrays: Array) -> None:
    chex.assert_rank(arrays, 1)
    chex.assert_equal_shape(arrays)
    chex.assert_type(arrays, float)
