"""Losses of a chosen and a rejected completion: direct preference optimisation and its relatives.

The chosen one is the live member of the highest score, the rejected one that of the lowest; put
``comparisons.best_and_worst`` before. An offline pair is a group of two with scores 1 and 0. All
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.objectives.kl import LOG_RATIO_LIMIT
from jrl.objectives.members import Members, over_group
from jrl.types import Array, Stats, Surrogate

sigmoid = jax.nn.sigmoid
softplus = jax.nn.softplus
"""softplus(-x) is -log sigmoid(x)."""


class Side(NamedTuple):
    """One completion of a pair; statistics that were not requested are 0.

    Attributes:
      logprob: [] nats, log pi(y), the sum over its live tokens.
      ref: [] nats, log pi_ref(y).
      tokens: [] live tokens.
      shift: [] nats, what a transform wants subtracted.
      weight: [] how far the pair is trusted.
      external: [] 1 for a completion that the data gave.
    """

    logprob: Array
    ref: Array
    tokens: Array
    shift: Array
    weight: Array
    external: Array

    @property
    def log_ratio(self) -> Array:
        """[] nats: log pi(y) - log pi_ref(y)."""
        return self.logprob - self.ref

    @property
    def mean(self) -> Array:
        """[] nats: the mean log-probability of a token."""
        return self.logprob / self.tokens


PairLoss = Callable[[Side, Side], Array]
Reward = Callable[[Side], Array]


def pair(loss: PairLoss, reward: Reward, needs: Iterable[str] = ("ref_logprobs",)) -> Surrogate:
    """A surrogate over groups from a loss of (chosen, rejected).

    Args:
      loss: (chosen, rejected) -> [] the loss of the pair.
      reward: a side -> [] the implicit reward that the loss is about, for the metrics alone.
      needs: names of the statistics read besides ``logprobs``.

    Returns:
      A surrogate; a group without a gap between scores gives 0. Metrics, averaged over groups:
      ``accuracy`` (1 where the margin is above 0), ``margin`` (the chosen completion's implicit
      reward minus the rejected one's), ``chosen_reward`` and ``rejected_reward``.
    """
    needs = frozenset(needs)

    def of_group(group: Members) -> tuple[Array, Stats]:
        chosen, rejected, gap = _sides(group, needs)
        # A NaN score fails every comparison; it must not pass for a group without a gap.
        value = jnp.where(gap > 0, loss(chosen, rejected), jnp.where(jnp.isnan(gap), gap, 0))
        return value, preference_metrics(reward(chosen), reward(rejected))

    return over_group(of_group, needs)


def preference_metrics(chosen: Array, rejected: Array) -> Stats:
    """Accuracy, margin and the two rewards of a pair, by name."""
    return {
        "accuracy": (chosen > rejected).astype(jnp.float32),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }


def _sides(group: Members, needs: frozenset[str]) -> tuple[Side, Side, Array]:
    """The chosen side, the rejected side and their score gap."""
    zero = jnp.zeros_like(group.tokens)

    def read_if_needed(name: str, read: Callable[[str], Array]) -> Array:
        return read(name) if name in needs else zero

    sides = Side(
        logprob=group.total("logprobs"),
        ref=read_if_needed("ref_logprobs", group.total),
        tokens=group.tokens,
        shift=read_if_needed("shift", group.first),
        weight=read_if_needed("pair_weight", group.first),
        external=read_if_needed("external", group.first),
    )
    best = jnp.argmax(jnp.where(group.live, group.score, -jnp.inf))
    worst = jnp.argmin(jnp.where(group.live, group.score, jnp.inf))
    chosen = Side(*(x[best] for x in sides))
    rejected = Side(*(x[worst] for x in sides))
    return chosen, rejected, group.score[best] - group.score[worst]


def logistic(a: Array, b: Array, noise: Array | float = 0.0) -> Array:
    """-(1 - e) log sigmoid(a - b) - e log sigmoid(b - a), with e the rate of wrong labels.

    >>> round(float(logistic(jnp.float32(0.0), jnp.float32(0.0))), 4)
    0.6931
    """
    return (1 - noise) * softplus(b - a) + noise * softplus(a - b)


# ---------------------------------------------------------------- losses of two implicit rewards


def _hinge(a: Array, b: Array, noise: Any) -> Array:
    right, wrong = jnp.maximum(0, 1 - (a - b)), jnp.maximum(0, 1 + (a - b))
    return (1 - noise) * right + noise * wrong


def _discopop(a: Array, b: Array, noise: Any) -> Array:
    share = sigmoid((a - b) / 0.05)
    exponential = jnp.exp(-jnp.clip(a - b, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return (1 - share) * softplus(b - a) + share * exponential


PAIR_LOSSES: dict[str, Callable[[Array, Array, Any], Array]] = {
    "sigmoid": logistic,
    "hinge": _hinge,
    "ipo": lambda a, b, noise: jnp.square(a - b - 0.5),
    "nca": lambda a, b, noise: softplus(-a) + softplus(a) / 2 + softplus(b) / 2,
    "discopop": _discopop,
    "apo_zero": lambda a, b, noise: sigmoid(-a) + sigmoid(b),
    "apo_down": lambda a, b, noise: sigmoid(a) + sigmoid(b - a),
}
"""Losses of ``dpo`` by name, of (a, b, label_smoothing); "ipo" is still to be divided by beta^2."""


def reward_loss(name: str, beta: float, noise: float = 0.0) -> Callable[[Array, Array], Array]:
    """The loss of ``dpo`` by name, as a function of the two implicit rewards (a, b)."""
    scale = beta**2 if name == "ipo" else 1.0
    return lambda a, b: PAIR_LOSSES[name](a, b, noise) / scale


def dpo_loss(
    name: str,
    beta: float,
    noise: float = 0.0,
    of: Reward = lambda side: side.log_ratio,
    margin: float = 0.0,
) -> PairLoss:
    """The loss of ``dpo`` by name, as a function of the two sides.

    Args:
      name: of ``PAIR_LOSSES``.
      beta: per unit of ``of``.
      noise: ``label_smoothing``.
      of: what of a side times beta is its implicit reward.
      margin: taken from the chosen side's reward.
    """
    loss = reward_loss(name, beta, noise)
    return lambda chosen, rejected: loss(beta * of(chosen) - margin, beta * of(rejected))


def log_odds(mean: Array) -> Array:
    """log(p / (1 - p)) of p = exp(mean), held where p is within 1e-6 of 1.

    Args:
      mean: [...] nats, the mean log-probability of a completion's tokens.

    >>> round(float(log_odds(jnp.log(jnp.float32(0.75)))), 4)  # log 3
    1.0986
    """
    mean = jnp.minimum(mean, -1e-6)
    # Two forms of log(1 - exp(mean)), each where it loses no digits; the argument of the one that
    # is not taken stays in its domain, or its gradient would be NaN.
    near = mean > -0.6931472
    small, large = jnp.where(near, mean, -0.5), jnp.where(near, -1.0, mean)
    complement = jnp.where(near, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))
    return mean - complement


def odds_ratio_loss(coef: float) -> PairLoss:
    """The loss of ``orpo``: the chosen completion's likelihood, and a penalty on the odds ratio.

    Args:
      coef: lambda of the paper.
    """

    def loss(chosen: Side, rejected: Side) -> Array:
        penalty = softplus(log_odds(rejected.mean) - log_odds(chosen.mean))
        return -chosen.mean + coef * penalty

    return loss
