"""Losses of token arrays, for training loops that keep no ``Batch``.

    loss = grpo_loss(logprobs, old_logprobs, advantages, mask)           # [N, G, T] -> []

Each is ``policy_loss`` of the parts of the method of that name, and adds no formula. The arguments
mean the same everywhere; all have any leading axes:

- ``logprobs``: [..., T] float, nats, under the policy being trained.
- ``old_logprobs``, ``ref_logprobs``: [..., T] float, nats, under the policy that sampled the tokens
  and under the reference. No gradient, so ``old_logprobs=logprobs`` is a fresh on-policy step.
- ``advantages``: [...] float, one a completion, or [..., T]. No gradient.
- ``mask``: [..., T] bool, True where the policy sampled the token; nothing outside is read.
- ``clip_low``, ``clip_high``: the ratio's distances below and above 1. ``dual_clip``: greatest
  ratio where the advantage is negative, above 1; None for none.

The losses are [] float32, to be minimised.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.objectives import aggregates, ratios, regularizers, transforms
from jrl.objectives.arrays import batch_of, check, check_types, rows, spread
from jrl.objectives.policy import Pairs, combine_terms, policy_loss
from jrl.types import Aggregate, Array, Objective, Regularizer, Stats, Surrogate

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
    check_types(float, logits=logits)
    check_types(int, tokens=tokens)
    # Tokens [1, T] would be those of every row of the logits, silently.
    chex.assert_shape(tokens, logits.shape[:-1], custom_message="tokens beside logits [..., V]")
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]


def sequence_logprobs(logprobs: Array, mask: Array) -> Array:
    """Log-probabilities [...] of complete sequences: sums over live tokens, 0 without any.

    >>> sequence_logprobs(jnp.array([-1.0, -2.0, -9.0]), jnp.array([True, True, False])).tolist()
    -3.0
    """
    check(mask, logprobs=logprobs)
    return jnp.where(mask, logprobs, 0).sum(axis=-1, dtype=jnp.float32)


def entropy(logits: Array) -> Array:
    """Entropy [...] float32, nats, of the softmax of logits [..., V]; -inf for no chance.

    >>> [round(x, 4) for x in entropy(jnp.array([[0.0, 0.0], [0.0, -jnp.inf]])).tolist()]
    [0.6931, 0.0]
    """
    check_types(float, logits=logits)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    probability = jnp.exp(logprobs)
    # Without the guard an impossible token is 0 * -inf, and its gradient NaN.
    return (probability * jnp.where(probability > 0, -logprobs, 0)).sum(axis=-1)


# ---------------------------------------------------------------- policy gradients


def reinforce_loss(logprobs: Array, advantages: Array, mask: Array) -> Array:
    """Score-function loss: the mean over completions of ``-sum_t A log pi_t``.

    The loss of ``reinforce``, ``rloo`` and ``remax``, for tokens that the current policy sampled.

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

    The value loss and an entropy bonus are terms of their own (``ppo_value_loss``, ``entropy``).

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
    (arXiv:2402.03300). Advantages come from ``grpo_advantages``. ``kl_coef`` (per nat) times the
    estimate ``kl_kind`` ("k2" or "k3", see ``objectives.kl``) of the divergence from
    ``ref_logprobs`` is added; 0 leaves it out.

    Raises:
      TypeError: ``ref_logprobs`` without ``kl_coef``, or ``kl_coef`` without ``ref_logprobs``.

    >>> zeros, mask = jnp.zeros((2, 2)), jnp.array([[True, True], [True, False]])
    >>> float(grpo_loss(zeros, zeros, jnp.array([1.0, -0.5]), mask))
    -0.25
    """
    penalised = isinstance(kl_coef, jax.Array) or kl_coef != 0
    if penalised != (ref_logprobs is not None):
        raise TypeError("give ref_logprobs and kl_coef together, or neither")
    surrogate = ratios.clipped_ratio(clip_low, clip_high, dual_clip=dual_clip)
    stats = {"logprobs": logprobs, "sampler_logprobs": old_logprobs}
    terms: tuple[Regularizer, ...] = ()
    if ref_logprobs is not None:
        stats["ref_logprobs"] = ref_logprobs
        terms = (regularizers.kl_in_loss(kl_kind, kl_coef),)
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
    """Dr. GRPO's loss: sums of clipped token losses over the completion limit ``max_tokens``.

    "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783). Advantages
    come from ``dr_grpo_advantages``. Completions without a live token do not count in the mean.

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
    """DAPO's loss: ``ppo_loss`` with a higher upper clip, the mean over all tokens of the batch.

    "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476).

    >>> zeros, mask = jnp.zeros((2, 2)), jnp.array([[True, True], [True, False]])
    >>> float(dapo_loss(zeros, zeros, jnp.array([1.0, -0.5]), mask))  # -(1 + 1 - 0.5) / 3
    -0.5
    """
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    return ppo_loss(logprobs, old_logprobs, advantages, mask, **clips)


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

    "Group Sequence Policy Optimization" (arXiv:2507.18071); advantages [...], one a completion.

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
    (arXiv:2506.13585). The clip carries no gradient, so no token loses its gradient to it.

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
    stats = {"values": values, "rollout_values": old_values, "returns": returns}
    return _term(regularizers.value_loss(1.0, clip), stats, mask)


def kl_loss(logprobs: Array, ref_logprobs: Array, mask: Array, *, kind: str = "k3") -> Array:
    """Estimate of the divergence from a reference as a loss term, the mean over tokens.

    "Approximating KL Divergence" (Schulman, 2020; not on arXiv). ``kind`` is "k2", whose gradient
    is that of KL(policy || reference), or "k3". Nats, not scaled by a coefficient.

    >>> mask = jnp.ones((1, 1), bool)
    >>> float(kl_loss(jnp.array([[-1.0]]), jnp.array([[-3.0]]), mask, kind="k2"))
    2.0
    """
    stats = {"logprobs": logprobs, "ref_logprobs": ref_logprobs}
    return _term(regularizers.kl_in_loss(kind, 1.0), stats, mask)


def sft_loss(logprobs: Array, mask: Array) -> Array:
    """Negative log-likelihood of given completions, the mean over tokens, nats.

    >>> float(sft_loss(jnp.array([[-1.0, -2.0]]), jnp.array([[True, False]])))
    1.0
    """
    check(mask, logprobs=logprobs)
    unread = jnp.zeros(mask.shape)
    return _loss(ratios.nll(), aggregates.token_mean, {"logprobs": logprobs}, unread, mask)


# ---------------------------------------------------------------- how parts are applied


def _loss(
    surrogate: Surrogate,
    aggregate: Aggregate,
    stats: Stats,
    advantages: Array,
    mask: Array,
    terms: tuple[Regularizer, ...] = (),
) -> Array:
    """``policy_loss`` of an objective of these parts, divided: [] float32.

    Args:
      surrogate: of one sequence.
      aggregate: of [B, T] losses.
      stats: [..., T] by name; ``logprobs`` alone carries gradient.
      advantages: [...] or [..., T].
      mask: [..., T] bool.
      terms: regularizers.
    """
    objective = Objective(transforms.identity(), surrogate, aggregate, terms)
    sums = _sums(objective, stats, advantages, mask)
    return combine_terms(objective, sums, objective.init())


def _term(term: Regularizer, stats: Stats, mask: Array) -> Array:
    """The mean over live tokens of a regularizer of coefficient 1: [] float32."""
    _check(mask, stats)
    unread = jnp.zeros(mask.shape)
    objective = Objective(transforms.identity(), ratios.nll(), aggregates.token_mean, (term,))
    total, count = _sums(objective, {"logprobs": unread, **stats}, unread, mask)[term.name]
    return total / jnp.maximum(count, 1)


def _sums(objective: Objective, stats: Stats, advantages: Array, mask: Array) -> Pairs:
    """The terms of ``policy_loss``: (sum, count) by name."""
    _check(mask, stats)
    stats = {name: rows(x).astype(jnp.float32) for name, x in stats.items()}
    trained = {name: x for name, x in stats.items() if name in ("logprobs", "values")}
    fixed = {name: jax.lax.stop_gradient(x) for name, x in stats.items() if name not in trained}
    values = spread(advantages, mask)
    return policy_loss(objective, trained, batch_of(mask, fixed), values, objective.init())[0]


def _check(mask: Array, stats: Stats) -> None:
    """As ``check``, by the names of the arguments."""
    check(mask, **{_ARGUMENTS.get(name, name): x for name, x in stats.items()})


_ARGUMENTS = {"sampler_logprobs": "old_logprobs", "rollout_values": "old_values"}
"""Names of statistics whose arguments are called otherwise."""
