"""Preference losses of arrays, the means over pairs.

    loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected)          # [N] each -> []

``chosen`` and ``rejected`` [N] float are the log-probabilities of completions, nats
(``sequence_logprobs``). The losses are those of ``pairs``, which the methods use too.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.errors import unknown_choice
from jrl.objectives import pairs
from jrl.objectives.arrays import check_types
from jrl.types import Array


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

    Raises:
      UserError: for another kind.

    >>> zeros = jnp.zeros(2)
    >>> round(float(dpo_loss(zeros, zeros, zeros, zeros)), 4)  # log 2
    0.6931
    """
    if kind not in pairs.PAIR_LOSSES:
        raise unknown_choice("dpo_loss.kind", kind, pairs.PAIR_LOSSES)
    loss = pairs.dpo_loss(kind, beta, label_smoothing)
    return _pair_loss(loss, (chosen, rejected), refs=(ref_chosen, ref_rejected))


def ipo_loss(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, *, tau: float = 0.1
) -> Array:
    """IPO's squared loss of the difference of log-ratios: ``dpo_loss`` with ``kind="ipo"``.

    "A General Theoretical Paradigm to Understand Learning from Human Preferences"
    (arXiv:2310.12036), with tau in place of beta.

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
    ``chosen_tokens`` and ``rejected_tokens`` [N] are live tokens, at least 1; ``beta`` is per nat
    of mean log-probability, ``gamma`` the margin.

    >>> loss = simpo_loss(*(jnp.array([x]) for x in (-2.0, -2.0, 2, 4)), gamma=1.0)
    >>> round(float(loss), 4)  # the margin 2 (-1 + 0.5) - 1 is -2
    2.1269
    """
    loss = pairs.dpo_loss("sigmoid", beta, of=lambda side: side.mean, margin=gamma)
    return _pair_loss(loss, (chosen, rejected), tokens=(chosen_tokens, rejected_tokens))


def orpo_loss(
    chosen: Array,
    rejected: Array,
    chosen_tokens: Array,
    rejected_tokens: Array,
    *,
    lambda_: float = 0.1,
) -> Array:
    """ORPO's likelihood of the chosen completion plus ``lambda_`` times its odds-ratio penalty.

    "ORPO: Monolithic Preference Optimization without Reference Model" (arXiv:2403.07691).
    Arguments as for ``simpo_loss``; the mean over pairs.

    >>> one = jnp.array([1])
    >>> loss = orpo_loss(jnp.array([-1.0]), jnp.array([-1.0]), one, one, lambda_=1.0)
    >>> round(float(loss), 4)  # 1 + log 2
    1.6931
    """
    tokens = chosen_tokens, rejected_tokens
    return _pair_loss(pairs.odds_ratio_loss(lambda_), (chosen, rejected), tokens=tokens)


def bradley_terry_loss(chosen: Array, rejected: Array) -> Array:
    """Reward-model loss of scores [N]: minus the log-probability that the chosen completion wins.

    >>> round(float(bradley_terry_loss(jnp.array([1.0]), jnp.array([1.0]))), 4)
    0.6931
    """
    return _pair_loss(lambda a, b: pairs.logistic(a.logprob, b.logprob), (chosen, rejected))


def _pair_loss(
    loss: pairs.PairLoss,
    logprobs: tuple[Array, Array],
    refs: tuple[Array, Array] | None = None,
    tokens: tuple[Array, Array] | None = None,
) -> Array:
    """The mean over pairs of a loss of (chosen, rejected), each [N]: [] float32."""
    check_types(float, chosen=logprobs[0], rejected=logprobs[1])
    chex.assert_rank(logprobs, 1)
    zero = jnp.zeros(logprobs[0].shape, jnp.float32)
    refs, tokens = refs or (zero, zero), tokens or (zero, zero)
    check_types(float, ref_chosen=refs[0], ref_rejected=refs[1])
    chex.assert_equal_shape([*logprobs, *refs, *tokens])
    # In half precision sums over a completion's tokens lose what tells two answers apart.
    sides = [
        pairs.Side(
            logprob.astype(jnp.float32),
            jax.lax.stop_gradient(ref).astype(jnp.float32),
            count,
            *(zero, zero, zero),
        )
        for logprob, ref, count in zip(logprobs, refs, tokens, strict=True)
    ]
    return loss(*sides).mean()
