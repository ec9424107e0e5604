"""Estimates of the divergence between two policies from the tokens one of them drew.

With x drawn from ``p`` and d(x) = log p(x) - log q(x), "Approximating KL Divergence" (Schulman,
2020) names three estimators of KL(p || q): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Their VALUES
estimate the same number. Their GRADIENTS as loss terms, when x is drawn from p itself, do not:

| estimator | mean gradient with respect to p | offered in |
| --------- | ------------------------------- | ---------- |
| k1        | 0: the mean score function      | the reward only |
| k2        | that of KL(p || q), exactly     | reward, loss |
| k3        | that of KL(q || p)              | reward, loss |

The claims are about the distribution of one token given what came before it, and hold on-policy; in
the reward, each estimator's value is weighted by the score function of the whole completion
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax.numpy as jnp

from jrl.errors import unknown_choice
from jrl.types import Array

LOG_RATIO_LIMIT = 20.0
"""Nats. Log-ratios are clamped to plus and minus this before ``exp``: e^20 is 4.9e8, so products
with any ordinary advantage and sums over any batch stay finite in float32. The gradient of a
clamped ratio is zero."""


def bounded_exp(log_ratio: Array) -> Array:
    """Exp with its argument clamped to ``LOG_RATIO_LIMIT``; NaN stays NaN.

    >>> [round(float(jnp.log(bounded_exp(jnp.float32(x))))) for x in (-99.0, 3.0, 99.0)]
    [-20, 3, 20]
    """
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def k1(logprobs: Array, ref_logprobs: Array) -> Array:
    """The log-ratio itself: unbiased, of either sign; its mean gradient as a loss is zero.

    Arguments and result as for every estimator: the log-probabilities [...] float, nats, of tokens
    under the policy p that drew them and under q, and [...] float, nats, not masked.

    >>> k1(jnp.array([-1.0]), jnp.array([-3.0])).tolist()
    [2.0]
    """
    return _log_ratio(logprobs, ref_logprobs)


def k2(logprobs: Array, ref_logprobs: Array) -> Array:
    """Half the squared log-ratio: biased, never negative; its gradient is that of KL(p || q).

    >>> k2(jnp.array([-1.0]), jnp.array([-3.0])).tolist()
    [2.0]
    """
    return jnp.square(_log_ratio(logprobs, ref_logprobs)) / 2


def k3(logprobs: Array, ref_logprobs: Array) -> Array:
    """exp(-d) - 1 + d: unbiased, never negative; its gradient is that of KL(q || p).

    The log-ratio d is clamped to ``LOG_RATIO_LIMIT``.

    >>> [round(x, 4) for x in k3(jnp.array([-1.0, -1.0]), jnp.array([-1.0, -2.0])).tolist()]
    [0.0, 0.3679]
    """
    d = jnp.clip(_log_ratio(logprobs, ref_logprobs), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.expm1(-d) + d


KL_ESTIMATORS: dict[str, Callable[[Array, Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}


def estimator(kind: str, key: str = "kind") -> Callable[[Array, Array], Array]:
    """The estimator of that name.

    Args:
      kind: k1, k2 or k3.
      key: what the user calls this choice, for the error.

    Raises:
      UserError: for another name.
    """
    if kind not in KL_ESTIMATORS:
        raise unknown_choice(key, kind, KL_ESTIMATORS)
    return KL_ESTIMATORS[kind]


class AdaptiveCoef(NamedTuple):
    """A coefficient steered so that a divergence stays near a target.

    The controller of ``ppo``'s penalty: each step multiplies the coefficient by
    1 + rate * clip(kl / target - 1, -0.2, 0.2).

    Attributes:
      initial: the coefficient at the start, points per nat.
      target: nats, in the unit of the divergence it is shown (a token's or a sequence's).
      rate: how far one step may go; 0.1 moves at most 2 % a step.
    """

    initial: float
    target: float
    rate: float = 0.1

    def init(self) -> Array:
        """[] float32, the coefficient at the start."""
        return jnp.asarray(self.initial, jnp.float32)

    def next(self, coef: Array, kl: Array) -> Array:
        """[] float32, the coefficient after a step on which the divergence was ``kl`` nats.

        >>> steer = AdaptiveCoef(initial=1.0, target=2.0)
        >>> [round(float(steer.next(steer.init(), jnp.float32(kl))), 3) for kl in (1.9, 2.0, 9.0)]
        [0.995, 1.0, 1.02]
        """
        error = jnp.clip(kl / self.target - 1, -0.2, 0.2)
        return (coef * (1 + self.rate * error)).astype(jnp.float32)


def _log_ratio(logprobs: Array, ref_logprobs: Array) -> Array:
    chex.assert_equal_shape([logprobs, ref_logprobs])
    chex.assert_type([logprobs, ref_logprobs], float)
    return logprobs - ref_logprobs
