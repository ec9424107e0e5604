"""Per-token losses of ONE sequence from probability ratios: ratio, bounding rule, correction.

    ratio_loss(ratio=sequence, rule=clip(3e-4, 4e-4), correction=None)      # GSPO

A ``Ratio`` chooses the unit: each token, the sequence's mean or product, or a segment. A ``Rule``
turns it into a loss (clip, weight without gradient, gate, none). A ``Correction`` takes the ratio
to the policy at the start of the step (``proximal_logprobs``) instead of the sampler, and weighs
losses for the difference between those two. Every variant of PPO here is one choice of each.

As in all surrogates ``apply`` takes the statistics of a sequence, its advantages [T] and its mask
[T], and returns losses [T] (not masked, not averaged) with [T] metrics. Statistics outside the mask
must be finite (``policy_loss`` sets them to 0). All float32. A NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.errors import UserError
from jrl.objectives import segments
from jrl.objectives.advantages import live_mean
from jrl.objectives.corrections import Correction
from jrl.objectives.kl import LOG_RATIO_LIMIT, bounded_exp
from jrl.system.readable import readable
from jrl.types import Array, Stats, Surrogate

Reweighting = Callable[[Array, Array, Array, Stats], tuple[Array, Stats]]
"""(log_ratio [T] nats, advantages [T], mask [T], stats) -> ([T], metrics), of one sequence."""


class Ratio(NamedTuple):
    """The unit whose probability ratio a token's loss uses.

    Attributes:
      apply: from the token's log-ratios to those of the unit, [T] nats, with metrics.
      needs: names of further statistics that it reads.
      labels: names of the labels in ``Batch.ids`` that it reads, among the statistics.
    """

    apply: Reweighting
    needs: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """The parts by name."""
        return readable(self)


class Rule(NamedTuple):
    """The loss as a function of the ratio.

    Attributes:
      apply: from log-ratios, as a ``Ratio`` returns them, to losses [T].
      needs: names of further statistics that it reads.
    """

    apply: Reweighting
    needs: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """The parts by name."""
        return readable(self)


# ---------------------------------------------------------------- ratios


def _token(log_ratio: Array, *_: Any) -> tuple[Array, Stats]:
    return log_ratio, {}


def _sequence(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
    # Length-normalised, so that long and short sequences share one clip range.
    return jnp.broadcast_to(live_mean(log_ratio, mask), mask.shape), {}


def _sequence_token(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
    logprobs = stats["logprobs"]
    # Value 0, gradient 1: the mean's value with the gradient of this token's log-probability.
    straight_through = logprobs - jax.lax.stop_gradient(logprobs)
    return jax.lax.stop_gradient(live_mean(log_ratio, mask)) + straight_through, {}


def _product(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
    # Each factor is limited before the sum: one infinite token would make the product NaN.
    limited = jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.broadcast_to(jnp.where(mask, limited, 0).sum(), mask.shape), {}


token = Ratio(_token)
"""Each token's own ratio."""
sequence = Ratio(_sequence)
"""The geometric mean of the sequence's live tokens: every loss pushes every token through it."""
sequence_token = Ratio(_sequence_token)
"""The value of ``sequence`` with the gradient of the token alone, so that advantages may differ
from token to token (GSPO-token). With one advantage a sequence the gradients are those of GSPO."""
product = Ratio(_product)
"""The ratio of the whole sequence, the product over its live tokens."""


def segment(label: str) -> Ratio:
    """The geometric mean over the live tokens that share a label of ``Batch.ids``.

    Args:
      label: such as "turn" or "step"; without it in the batch a completion is one segment, as in
        ``sequence``.
    """

    def apply(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
        # The label arrives as a statistic, since a surrogate sees one sequence and no batch.
        seg = segments.segments(mask, stats[label])
        return segments.total(log_ratio, seg) / jnp.maximum(segments.count(seg), 1), {}

    return Ratio(apply, labels=frozenset({label}))


def geometric_clipped(clip_low: float, clip_high: float) -> Ratio:
    """The geometric mean of the sequence's ratios, each clipped on its own by the advantage's sign.

    Bounds are nats: at least -clip_low where A < 0, at most clip_high where A > 0.
    """

    def apply(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
        below = (advantages < 0) & (log_ratio < -clip_low)
        above = (advantages > 0) & (log_ratio > clip_high)
        clipped = jnp.where(below, -clip_low, jnp.where(above, clip_high, log_ratio))
        # Clipped before the mean, so that one extreme token cannot decide the sequence's ratio.
        mean = jnp.broadcast_to(live_mean(clipped, mask), mask.shape)
        return mean, {"clip_fraction_low": below, "clip_fraction_high": above}

    return Ratio(apply)


# ---------------------------------------------------------------- rules


def clip_between(
    bounds: Callable[[Stats], tuple[Any, Any]],
    dual_clip: float | None = None,
    needs: frozenset[str] = frozenset(),
) -> Rule:
    """The pessimistic surrogate of PPO, ``-min(r A, clip(r, least, greatest) A)``.

    Args:
      bounds: (stats) -> (least, greatest) ratio, [] or [T].
      dual_clip: a bound above 1 on the ratio where the advantage is negative, "Mastering Complex
        Control in MOBA Games with Deep Reinforcement Learning" (arXiv:1912.09729); None for none.
      needs: names of the statistics that ``bounds`` reads.
    """

    # The branches are written out so that ties and NaN are plain: a NaN ratio or advantage fails
    # every comparison, is taken as not clipped, and stays NaN.
    def apply(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
        ratio = bounded_exp(log_ratio)
        least, greatest = bounds(stats)
        below = (advantages < 0) & (ratio < least)
        above = (advantages > 0) & (ratio > greatest)
        clipped = jnp.where(below, least, jnp.where(above, greatest, ratio))
        metrics = {"ratio": ratio, "clip_fraction_low": below, "clip_fraction_high": above}
        if dual_clip is not None:
            # For A < 0 the loss -r A grows without bound in r, which min() does not catch.
            beyond = (advantages < 0) & (ratio > dual_clip)
            clipped = jnp.where(beyond, dual_clip, clipped)
            metrics["clip_fraction_dual"] = beyond
        return -clipped * advantages, metrics

    return Rule(apply, needs)


def clip(low: float = 0.2, high: float = 0.2, dual_clip: float | None = None) -> Rule:
    """``clip_between`` 1 - low and 1 + high: ``ppo``'s, with separate bounds as in ``dapo``."""
    return clip_between(lambda stats: (1 - low, 1 + high), dual_clip)


def weight(function: Reweighting, needs: frozenset[str] = frozenset()) -> Rule:
    """``-sg(w) A log pi``: a weight without gradient, so that no token's gradient is cut off.

    Args:
      function: (log_ratio, advantages, mask, stats) -> (w [T], metrics), as a ``Rule`` is applied.
      needs: names of the statistics that it reads.
    """

    def apply(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
        # Stopped on the way in too: a weight's metrics must not carry gradient either.
        weights, metrics = function(jax.lax.stop_gradient(log_ratio), advantages, mask, stats)
        return -jax.lax.stop_gradient(weights) * advantages * stats["logprobs"], metrics

    return Rule(apply, needs)


score = weight(lambda log_ratio, *_: (jnp.ones_like(log_ratio), {}))
"""REINFORCE, ``-A log pi``: reads no ratio; a correction or ``off_policy_limit`` may."""


def bounded(low: float = 0.0, high: float = math.inf) -> Rule:
    """``weight`` of the ratio held within [low, high]: CISPO, AIPO."""

    def function(log_ratio: Array, *_: Any) -> tuple[Array, Stats]:
        ratio = bounded_exp(log_ratio)
        metrics = {
            "ratio": ratio,
            "clip_fraction_low": ratio < low,
            "clip_fraction_high": ratio > high,
        }
        return jnp.clip(ratio, low, high), metrics

    return weight(function)


def tapered(low: float = 0.0, high: float = 1.0) -> Rule:
    """``weight`` 1 where the advantage is at least 0, else the ratio held within [low, high].

    The weight of ``topr``, with ``product`` as the ratio.
    """

    def function(log_ratio: Array, advantages: Array, *_: Any) -> tuple[Array, Stats]:
        ratio = bounded_exp(log_ratio)
        weights = jnp.where(advantages < 0, jnp.clip(ratio, low, high), 1)
        # A NaN ratio stays visible also where its weight is not read.
        weights = jnp.where(jnp.isnan(ratio), ratio, weights)
        return weights, {"ratio": ratio, "weight": weights, "negative": advantages < 0}

    return weight(function)


def gate(temperature_positive: float, temperature_negative: float) -> Rule:
    """A sigmoid of the ratio in place of the clip: far tokens lose their gradient gradually.

    ``-A (4 / tau) sigmoid(tau (r - 1))``, whose slope at ratio 1 is that of the plain ratio: the
    rule of ``sapo_soft``, with tau by the sign of A.
    """

    def apply(log_ratio: Array, advantages: Array, *_: Any) -> tuple[Array, Stats]:
        # Negative advantages push probability mass to all other tokens, so they usually get a
        # steeper gate.
        tau = jnp.where(advantages > 0, temperature_positive, temperature_negative)
        ratio = bounded_exp(log_ratio)
        # sigmoid'(0) = 1/4, hence the factor 4 / tau for slope 1 at ratio 1.
        return -advantages * jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau, {"ratio": ratio}

    return Rule(apply)


def _free(log_ratio: Array, advantages: Array, *_: Any) -> tuple[Array, Stats]:
    ratio = bounded_exp(log_ratio)
    return -ratio * advantages, {"ratio": ratio}


free = Rule(_free)
"""The plain ratio loss ``-r A``, unbounded."""


# ---------------------------------------------------------------- surrogates


class RatioParts(NamedTuple):
    """The parts of a ``ratio_loss``, stored in the surrogate so that a variant can change one.

    Attributes:
      ratio: the unit.
      rule: the loss of the ratio.
      correction: None for ratios against the sampler; else they are against the policy at the start
        of the training step, and losses are multiplied by the correction's weight.
      off_policy_limit: nats a token; drops sequences of negative advantage from which the policy
        has moved further away; None drops none.
    """

    ratio: Ratio = token
    rule: Rule = clip()
    correction: Correction | None = None
    off_policy_limit: float | None = None

    def __repr__(self) -> str:
        """The parts by name."""
        return readable(self)


def ratio_loss(
    ratio: Ratio = token,
    rule: Rule | None = None,
    correction: Correction | None = None,
    off_policy_limit: float | None = None,
) -> Surrogate:
    """A surrogate from its ``RatioParts``; without a rule it is PPO's clip at 0.2.

    >>> stats = {"logprobs": jnp.array([0.5, 0.5]), "sampler_logprobs": jnp.zeros(2)}
    >>> loss, _ = ratio_loss().apply(stats, jnp.array([1.0, -1.0]), jnp.ones(2, bool))
    >>> [round(x, 4) for x in loss.tolist()]
    [-1.2, 1.6487]
    """
    rule = clip() if rule is None else rule
    against = "sampler_logprobs" if correction is None else "proximal_logprobs"

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        # The difference of log-probabilities is taken here once, whatever the ratio and rule.
        log_ratio, of_ratio = ratio.apply(
            stats["logprobs"] - stats[against], advantages, mask, stats
        )
        losses, metrics = rule.apply(log_ratio, advantages, mask, stats)
        # A clip inside the ratio replaces the rule's clip fractions of the same name.
        metrics = {**metrics, **of_ratio}
        if correction is not None:
            weights = correction.weight(stats, mask)
            # After the clip, so that the correction scales a token's loss but never moves the clip
            # range.
            losses, metrics = losses * weights, {**metrics, "correction_weight": weights}
        if off_policy_limit is not None:
            # The off-policy sequence mask of "DeepSeek-V3.2: Pushing the Frontier of Open Large
            # Language Models" (arXiv:2512.02556).
            divergence = jax.lax.stop_gradient(stats["sampler_logprobs"] - stats["logprobs"])
            off_policy = (advantages < 0) & (live_mean(divergence, mask) > off_policy_limit)
            losses = jnp.where(off_policy, 0, losses)
            metrics = {**metrics, "off_policy": off_policy}
        return losses, {name: value.astype(jnp.float32) for name, value in metrics.items()}

    needs = frozenset({"sampler_logprobs", against}) | ratio.needs | rule.needs
    parts = RatioParts(ratio, rule, correction, off_policy_limit)
    return Surrogate(checked(apply), needs, labels=ratio.labels, parts=parts)


def with_parts(surrogate: Surrogate, **changes: Any) -> Surrogate:
    """A surrogate of ``ratio_loss`` with other parts; of one without ratios, a correction alone.

    Raises:
      UserError: a part that the surrogate does not have.
    """
    # A closure cannot be edited, so the surrogate is built again from its parts.
    if isinstance(surrogate.parts, RatioParts):
        return ratio_loss(**surrogate.parts._replace(**changes)._asdict())
    # A surrogate without ratios has no clip to move, so a correction can only weigh its losses.
    correction = changes.pop("correction", None)
    if changes or surrogate.over != "sequence":
        raise UserError(f"the surrogate has no {', '.join(changes) or 'correction'} to change")
    return surrogate if correction is None else weighted(surrogate, correction)


def clipped_ratio(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    *,
    dual_clip: float | None = None,
    correction: Correction | None = None,
) -> Surrogate:
    """PPO's: ``ratio_loss`` of token ratios and ``clip``."""
    return ratio_loss(token, clip(clip_low, clip_high, dual_clip), correction)


def reinforce() -> Surrogate:
    """Minus the advantage times the log-probability: ``loss_t = -A_t log pi_t``.

    "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning"
    (Williams, 1992). There is no ratio: it is meant for tokens sampled from the current policy.

    >>> stats = {"logprobs": jnp.array([-1.0, -2.0])}
    >>> reinforce().apply(stats, jnp.array([1.0, 0.5]), jnp.ones(2, bool))[0].tolist()
    [1.0, 1.0]
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        return -advantages * stats["logprobs"], {}

    return Surrogate(checked(apply), frozenset())


def nll() -> Surrogate:
    """Minus the log-probability of the token; the advantages are not read."""

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        return -stats["logprobs"], {}

    return Surrogate(checked(apply), frozenset())


def weighted(surrogate: Surrogate, correction: Correction) -> Surrogate:
    """A surrogate without ratios, its losses multiplied by a correction's weight.

    For tokens from another distribution than the policy's, such as a sampler with fewer bits.

    Args:
      surrogate: of one sequence.
      correction: from the policy at the start of the training step to the sampler.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        losses, metrics = surrogate.apply(stats, advantages, mask)
        weights = correction.weight(stats, mask)
        return losses * weights, {**metrics, "correction_weight": weights}

    needs = frozenset({"sampler_logprobs", "proximal_logprobs"})
    return surrogate._replace(apply=checked(apply), needs=surrogate.needs | needs)


# ---------------------------------------------------------------- helpers


def checked(apply: Callable[[Stats, Array, Array], tuple[Array, Stats]]) -> Callable:
    """The ``apply`` of one sequence with its shapes and types asserted."""

    def check_then_apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask, stats["logprobs"]], 1)
        # A statistic of another shape would broadcast silently under vmap.
        chex.assert_equal_shape([advantages, mask, *stats.values()])
        chex.assert_type([advantages, mask, stats["logprobs"]], [float, bool, float])
        return apply(stats, advantages, mask)

    return check_then_apply
