"""Demonstrations beside the policy's own samples: who is imitated, how much, and with which loss.

The transforms here give every member its weight: an advantage to the policy's own samples and a
multiplier of the negative log-likelihood to demonstrations ("external" tokens), which the surrogate
``imitate_external`` reads. Use them with ``sequence_mean``: the weights are scaled so that each
kind's loss is the mean over its own sequences, whatever the other kind's number. All float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.objectives import advantages as group
from jrl.objectives.transforms import stateless, trained
from jrl.types import Array, Batch, Stats, Surrogate, Transform


def imitate_external(inner: Surrogate) -> Surrogate:
    """Demonstrations are imitated, the policy's own samples get another surrogate.

    On tokens that are ``external`` the loss is -A log pi, with no ratio, for they have no sampler;
    A is what a transform made the demonstration worth, 0 for those not learned from.

    Args:
      inner: a surrogate over sequences, for the other tokens. It is shown a ratio of 1 on external
        ones.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        external = stats["external"] > 0
        logprobs = stats["logprobs"]
        own = dict(stats)
        for name in ("sampler_logprobs", "proximal_logprobs"):
            if name in own:
                own[name] = jnp.where(external, jax.lax.stop_gradient(logprobs), own[name])
        losses, metrics = inner.apply(own, advantages, mask & ~external)
        return jnp.where(external, -advantages * logprobs, losses), metrics

    return inner._replace(apply=apply, needs=inner.needs | {"external"})


def demonstrated(batch: Batch) -> Array:
    """[N, G] bool: the members that are demonstrations."""
    columns = jnp.arange(batch.mask.shape[2])[None, None]
    there = columns < jnp.expand_dims(batch.lengths, 2)
    return (there & (batch.stats["external"] > 0)).any(axis=2)


def relift(right: float = 0.0, coef: float = 1.0) -> Transform:
    """Own samples get normalised advantages; demonstrations of unsolved prompts are imitated.

    Args:
      right: points; a prompt is unsolved when none of its own samples scores more.
      coef: the multiplier of the mean loss of the imitated demonstrations.

    Returns:
      A transform [N, G] -> [N, G] that leaves the demonstrations of solved prompts, and of prompts
      without an own sample, out of ``batch.members``.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        given = demonstrated(batch)
        own = batch.members & ~given
        best = jnp.max(scores, axis=1, where=own, initial=-jnp.inf)
        unsolved = own.any(axis=1) & ~(best > right)
        members = own | (batch.members & given & jnp.expand_dims(unsolved, 1))
        batch = batch.replace(members=members)
        values = jax.vmap(group.group_mean_std)(scores, own)
        return _mixed(values, jnp.float32(1), jnp.float32(coef), given, batch), batch

    return stateless(apply, frozenset({"external"}))


class Balance(NamedTuple):
    """The controller of imitation against exploration, a number mu in [low, high].

    Attributes:
      initial: mu at the start.
      rate: of the utility's slope.
      entropy_rate: of the distance from the target entropy, per nat.
      target_entropy: nats; None for the entropy of the first step.
      low: least mu.
      high: greatest mu.
    """

    initial: float = 0.5
    rate: float = 1e-4
    entropy_rate: float = 5e-4
    target_entropy: float | None = None
    low: float = 0.05
    high: float = 0.95


class BalanceState(NamedTuple):
    """What the controller remembers; all [] float32.

    Attributes:
      mu: the weight of imitation.
      change: how far mu moved in the last step.
      utility: points, the mean score of the last step's own samples.
      target: nats, the target entropy.
      steps: steps done.
    """

    mu: Array
    change: Array
    utility: Array
    target: Array
    steps: Array


_LEAST_CHANGE = 0.01
"""Moves of mu below this count less than in proportion: the slope is then mostly noise."""


def balanced(controller: Balance) -> Transform:
    """(1 - mu) times own samples' normalised advantages, mu times imitation of demonstrations.

    Before each step, with U the mean score of the own samples and H their mean entropy,

        mu <- clip(mu + rate * slope + entropy_rate * (target - H), low, high)
        slope = dU dmu / (dmu^2 + 0.01^2)

    of the last step's changes dU and dmu: the secant of the utility as a function of mu.

    Returns:
      A transform [N, G] -> [N, G] with a ``BalanceState``; it reads ``rollout_entropy``.
    """

    def init() -> BalanceState:
        mu, zero = jnp.float32(controller.initial), jnp.float32(0)
        return BalanceState(mu, zero, zero, jnp.float32(controller.target_entropy or 0), zero)

    def apply(scores: Array, batch: Batch, state: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(scores, 2)
        given = demonstrated(batch)
        own = batch.members & ~given
        state = _steer(controller, state, scores, own, batch)
        values = jax.vmap(group.group_mean_std)(scores, own)
        return _mixed(values, 1 - state.mu, state.mu, given, batch), batch, state

    return Transform(init, apply, frozenset({"external", "rollout_entropy"}))


def _steer(
    controller: Balance, state: BalanceState, scores: Array, own: Array, batch: Batch
) -> BalanceState:
    tokens = trained(batch) & jnp.expand_dims(own, 2)
    entropy = _mean(batch.stats["rollout_entropy"], tokens)
    utility = _mean(scores, own)
    first = state.steps == 0
    target = state.target
    if controller.target_entropy is None:
        target = jnp.where(first, entropy, target)
    gain = jnp.where(first, 0, utility - state.utility)
    slope = gain * state.change / (jnp.square(state.change) + _LEAST_CHANGE**2)
    move = controller.rate * slope + controller.entropy_rate * (target - entropy)
    mu = jnp.clip(state.mu + move, controller.low, controller.high)
    return BalanceState(mu, mu - state.mu, utility, target, state.steps + 1)


def expert_weights(temperature: float) -> Transform:
    """How often each sample is expected when its group is resampled in favour of high scores.

    Args:
      temperature: points; the probability is in proportion to exp(score / temperature).

    Returns:
      A transform [N, G] -> [N, G]: the live members' softmax times their number, so that the mean
      over a group is 1. A member without a trained token is not resampled.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        live = batch.members & batch.mask.any(axis=2)
        share = jax.nn.softmax(scores / temperature, axis=1, where=live)
        weights = share * live.sum(axis=1, keepdims=True)
        return jnp.where(live, weights, 0), batch

    return stateless(apply)


def _mixed(values: Array, own: Array, imitate: Array, given: Array, batch: Batch) -> Array:
    """[N, G]: own advantages and imitation weights, each over its kind's share of the sequences."""
    live = trained(batch).any(axis=2)
    count = live.sum(dtype=jnp.float32)
    copies = (live & given).sum(dtype=jnp.float32)
    return jnp.where(
        given,
        imitate * count / jnp.maximum(copies, 1),
        own * count / jnp.maximum(count - copies, 1) * values,
    )


def _mean(values: Array, live: Array) -> Array:
    return jnp.where(live, values, 0).sum() / jnp.maximum(live.sum(), 1)
