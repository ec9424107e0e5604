"""Policy learning as maximum likelihood: negative-aware fine-tuning and outcome classification."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.errors import choose
from jrl.objectives.outcomes import correct, pass_rate
from jrl.objectives.surrogates import bounded_exp
from jrl.objectives.transforms import per_token, stateless
from jrl.types import Array, Batch, Stats, Surrogate, Transform

PROMPT_WEIGHTS = ("none", "failure_rate", "odds_root")
"""Weights of a prompt with pass rate p: 1, 1 - p, or the root of (1 - p) / p."""

RATE_MARGIN = 0.02
"""Pass rates are held this far from 0 and 1, as in the released code of NFT."""


def nft_labels(prompt_weight: str, negative_weight: float, above: float) -> Transform:
    """Signed weights of right (+) and wrong (-) answers; mixed groups alone are kept.

    Args:
      prompt_weight: of ``PROMPT_WEIGHTS``.
      negative_weight: what the weights of wrong answers are multiplied by.
      above: points, what a right answer's score is above.

    Returns:
      A transform [N, G] -> [N, G] that writes the statistic "pass_rate" for ``nft`` and takes the
      members of groups that are all right or all wrong out of the batch.

    Raises:
      UserError: for another ``prompt_weight``.
    """
    if prompt_weight not in PROMPT_WEIGHTS:
        raise choose("prompt_weight", prompt_weight, PROMPT_WEIGHTS)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        labels = correct(values, above)
        rate = pass_rate(labels, batch.members)
        uniform = (rate == 0) | (rate == 1)  # a NaN rate is neither, and stays
        rate = jnp.clip(rate, RATE_MARGIN, 1 - RATE_MARGIN)
        weights = {"none": jnp.ones_like(rate), "failure_rate": 1 - rate}
        weights["odds_root"] = jnp.sqrt((1 - rate) / rate)
        weight = weights[prompt_weight] * jnp.where(labels == 0, -negative_weight, 1)
        rates = per_token(jnp.broadcast_to(rate, values.shape), batch)
        batch = batch.replace(
            members=batch.members & ~uniform, stats={**batch.stats, "pass_rate": rates}
        )
        # NaN compares as not 0: the label itself has to carry it.
        return jnp.where(jnp.isnan(labels), labels, weight), batch

    return stateless(apply)


def nft(level: str = "token", floor: float = 1.0) -> Surrogate:
    """Likelihood of right answers under the policy, of wrong ones under the implied negative one.

    With R = pi / mu, p the pass rate and w the absolute advantage:

        right:  -w log R
        wrong:  -w log max_v((1 - p R) / (1 - p), floor)

    where max_v gives the larger of the two and the gradient of the first.

    Args:
      level: "token" for a ratio of each token, with the losses of the tokens; "sequence" for the
        product over the sequence, with its one loss at every token (aggregate by a mean).
      floor: above 0.

    Returns:
      A surrogate that reads the sign of the advantage as the label, and "pass_rate".

    Raises:
      UserError: for another ``level``.
    """
    if level not in ("token", "sequence"):
        raise choose("level", level, ("token", "sequence"))

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        log_ratio = stats["logprobs"] - stats["sampler_logprobs"]
        if level == "sequence":
            log_ratio = jnp.broadcast_to(jnp.where(mask, log_ratio, 0).sum(), mask.shape)
        ratio = bounded_exp(log_ratio)
        rate = stats["pass_rate"]
        rest = (1 - rate * ratio) / (1 - rate)
        held = jax.lax.stop_gradient(jnp.maximum(rest, floor))
        # The value of log(held) with the gradient of rest / held: exact, where adding and taking
        # away a large number again would round.
        negative = -(jnp.log(held) + (rest - jax.lax.stop_gradient(rest)) / held)
        losses = jnp.where(advantages < 0, -advantages * negative, -advantages * log_ratio)
        return losses, {"ratio": ratio, "negative_floor": (rest < floor).astype(jnp.float32)}

    return Surrogate(apply, frozenset({"sampler_logprobs", "pass_rate"}))


def outcome_labels(above: float) -> Transform:
    """1 for right answers, 0 for wrong ones, for losses that classify."""
    return stateless(lambda values, batch: (correct(values, above), batch))


CLASS_WEIGHTS = ("none", "balanced")
"""Of right and wrong answers: the same, or each class of a mixed group half of the group's sum."""


def outcome_cross_entropy(
    beta: float,
    *,
    against: str = "sampler_logprobs",
    leave_one_out: bool = True,
    class_weight: str = "none",
) -> Surrogate:
    """Cross-entropy of the outcome under the sigmoid of a group-relative log-ratio.

        s_i = beta sum_t log(pi / mu)
        psi_i = s_i - mean of s_j over j != i
        loss = -mean_i [y_i log sigmoid(psi_i) + (1 - y_i) log(1 - sigmoid(psi_i))]

    The gradient passes through all members of the group.

    Args:
      beta: points per nat.
      against: the statistic that is mu.
      leave_one_out: False to take psi_i = s_i.
      class_weight: of ``CLASS_WEIGHTS``.

    Returns:
      A surrogate over groups whose advantages are labels in [0, 1]; use ``sequence_sum``, which
      then gives the mean over groups of the mean over members. A group of one has loss 0.

    Raises:
      UserError: for another ``class_weight``.
    """
    if class_weight not in CLASS_WEIGHTS:
        raise choose("class_weight", class_weight, CLASS_WEIGHTS)

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 2)
        live = mask.any(axis=1)
        count = live.sum()
        first = (jnp.cumsum(mask, axis=1) == 1) & mask
        label = jnp.where(first, advantages, 0).sum(axis=1)
        score = beta * jnp.where(mask, stats["logprobs"] - stats[against], 0).sum(axis=1)
        psi = score
        if leave_one_out:
            psi = score - (score.sum() - score) / jnp.maximum(count - 1, 1)
        loss = label * jax.nn.softplus(-psi) + (1 - label) * jax.nn.softplus(psi)
        if class_weight == "balanced":
            right = jnp.where(live, label, 0).sum()
            own = jnp.where(label > 0.5, right, count - right)
            mixed = (right > 0) & (right < count)
            loss = loss * jnp.where(mixed, count / jnp.maximum(2 * own, 1), 1)
        # Times 0 rather than replaced by it, so that a NaN is kept.
        loss = loss * (count > 1) / jnp.maximum(count, 1)
        losses = jnp.where(first, jnp.expand_dims(loss, 1), 0)
        told = jnp.broadcast_to(jnp.expand_dims(jax.nn.sigmoid(psi), 1), mask.shape)
        return losses, {"predicted_outcome": told}

    return Surrogate(apply, frozenset({against}), over="group")
