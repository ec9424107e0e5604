"""Terms added to the loss: divergence from a reference, entropy, value loss.

``value`` functions see ONE sequence and return [T], not scaled, not masked, not averaged; the
objective's aggregate (or the term's own) reduces them and the coefficient scales the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax.numpy as jnp

from jrl.errors import UserError, unknown_choice
from jrl.objectives.kl import AdaptiveCoef, estimator
from jrl.types import Aggregate, Array, Regularizer, Stats


def term(
    name: str,
    value: Callable[[Stats, Array], Array],
    coef: Any,
    *needs: str,
    aggregate: Aggregate | None = None,
) -> Regularizer:
    """A regularizer without state: ``coef`` times a value of the statistics that it ``needs``."""
    return Regularizer(name, value, lambda state: coef, needs=frozenset(needs), aggregate=aggregate)


def kl_in_loss(
    kind: str = "k3", coef: float | AdaptiveCoef = 0.04, *, aggregate: Aggregate | None = None
) -> Regularizer:
    """``coef`` times an estimate of the divergence from the reference policy, differentiated.

    On tokens that the policy itself drew, the mean gradient of k2 is that of KL(policy ||
    reference), and that of k3 is that of KL(reference || policy); see ``objectives.kl``. No
    importance weight is applied: off-policy both claims hold only approximately.

    Args:
      kind: "k2" or "k3". ``grpo`` uses k3.
      coef: per nat; an ``AdaptiveCoef`` is steered by the metric "kl", the mean over live tokens.
      aggregate: None to use the objective's.

    Returns:
      A regularizer named "kl".

    Raises:
      UserError: for k1, whose gradient in a loss is zero on average, or an unknown kind.
    """
    if kind == "k1":
        raise UserError(
            "kl_in_loss.kind = 'k1'; as a loss term its gradient is the score function, zero on "
            "average: it would add noise and hold nothing back. Choose k2 or k3 here, or put k1 "
            "in the reward (kl_in_reward)"
        )
    if kind not in ("k2", "k3"):
        raise unknown_choice("kl_in_loss.kind", kind, ("k2", "k3"))
    divergence = estimator(kind)

    def value(stats: Stats, mask: Array) -> Array:
        chex.assert_rank(mask, 1)
        return divergence(stats["logprobs"], stats["ref_logprobs"])

    if not isinstance(coef, AdaptiveCoef):
        return term("kl", value, coef, "ref_logprobs", aggregate=aggregate)

    def update(state: Any, metrics: Mapping[str, Array]) -> Any:
        return coef.next(state, metrics["kl"])

    needs = frozenset({"ref_logprobs"})
    return Regularizer("kl", value, lambda state: state, coef.init, update, needs, aggregate)


def entropy_bonus(coef: float = 0.001) -> Regularizer:
    """Minus ``coef`` times the entropy of the policy's distribution at each token, nats.

    Returns:
      A regularizer named "entropy"; its metric is the entropy itself.
    """

    def value(stats: Stats, mask: Array) -> Array:
        chex.assert_rank(mask, 1)
        return stats["entropy"]

    return Regularizer("entropy", value, lambda state: -coef, needs=frozenset({"entropy"}))


def value_loss(
    coef: float = 0.5, clip: float | None = 0.2, *, aggregate: Aggregate | None = None
) -> Regularizer:
    """``coef`` times half the squared error of the value network, clipped as in PPO's code.

        max((V - R)^2, (V0 + clip(V - V0, -clip, clip) - R)^2) / 2

    with V0 the estimate at the start of the training step (``rollout_values``) and R the target
    that the ``gae`` transform wrote (``returns``). The clipping is not in the paper of PPO; it
    comes from its released code.

    Args:
      coef: per squared point.
      clip: points; None for the plain squared error.
      aggregate: None to use the objective's.

    Returns:
      A regularizer named "value_loss".
    """

    def value(stats: Stats, mask: Array) -> Array:
        chex.assert_rank(mask, 1)
        values, returns = stats["values"], stats["returns"]
        error = jnp.square(values - returns)
        if clip is None:
            return error / 2
        before = stats["rollout_values"]
        near = before + jnp.clip(values - before, -clip, clip)
        return jnp.maximum(error, jnp.square(near - returns)) / 2

    needs = ("values", "returns", *(() if clip is None else ("rollout_values",)))
    return term("value_loss", value, coef, *needs, aggregate=aggregate)


def positive_nll(coef: float = 0.1, *, aggregate: Aggregate | None = None) -> Regularizer:
    """``coef`` times the mean negative log-probability of the tokens of good completions.

    The positive-example language-model loss of ``vapo``. It reads the statistic "positive" that
    ``normalizers.mark_positive`` writes, with which a token mean is the mean over those tokens.

    Args:
      coef: mu of the paper, per nat.
      aggregate: None to use the objective's, which has to be ``token_mean``.

    Returns:
      A regularizer named "positive_nll".
    """

    def value(stats: Stats, mask: Array) -> Array:
        chex.assert_rank(mask, 1)
        return -stats["logprobs"] * stats["positive"]

    return term("positive_nll", value, coef, "positive", aggregate=aggregate)
