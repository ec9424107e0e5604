"""Reinforcement from right and wrong answers as likelihood and unlikelihood.

In the formulas y is 1 for a right answer and 0 for a wrong one: a score above ``above`` is right.
"""

from __future__ import annotations

from typing import Annotated

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method, Schedule, refill
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice, Count, NonNegative, Positive
from jrl.methods.reinforce import reinforce
from jrl.objectives import aggregates, outcomes
from jrl.objectives.kl import bounded_exp
from jrl.objectives.members import Members, over_group
from jrl.objectives.outcomes import correct, pass_rate
from jrl.objectives.transforms import per_token, stateless
from jrl.types import Array, Batch, Objective, Stats, Surrogate, Transform

# ---------------------------------------------------------------- NFT

PROMPT_WEIGHTS = ("none", "failure_rate", "odds_root")
"""Weights of a prompt with pass rate p: 1, 1 - p, or the root of (1 - p) / p."""

RATE_MARGIN = 0.02
"""Pass rates are held this far from 0 and 1, as in the released code of NFT."""


def nft_labels(prompt_weight: str, negative_weight: float, above: float) -> Transform:
    """Signed weights of right (+) and wrong (-) answers; mixed groups alone are kept.

    It writes the statistic "pass_rate" for ``nft_loss``.
    """

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


def nft_loss(level: str, floor: float) -> Surrogate:
    """``nft``'s loss, the sign of the advantage being the label and its size the weight.

    At level "sequence" the one loss stands at every token: aggregate by a mean.
    """

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


@published
def nft(
    level: Annotated[str, Choice(("token", "sequence"))] = "token",
    prompt_weight: Annotated[str, Choice(PROMPT_WEIGHTS)] = "failure_rate",
    negative_weight: NonNegative = 1.0,
    floor: Positive = 1.0,
    above: NonNegative = 0.5,
    max_tokens: Count = 1000,
    epochs: Count = 1,
) -> Method:
    """Maximum likelihood of right answers, and of wrong ones under an implied negative policy.

    Negative-aware fine-tuning of "Bridging Supervised Learning and Reinforcement Learning in Math
    Reasoning" (arXiv:2505.18116), with p the fraction of the group's answers that are right:

        right:  -w log rho_t
        wrong:  -w log max_v((1 - p rho_t) / (1 - p), floor)
        loss = 1/G sum_i sum_t (that) / max_tokens

    max_v takes the larger value and keeps the first one's gradient. w is ``prompt_weight``: 1
    ("none"), 1 - p ("failure_rate", on-policy Dr. GRPO's gradient) or sqrt((1 - p) / p)
    ("odds_root", GRPO's); wrong answers' losses are also multiplied by ``negative_weight``. p is
    held within 0.02 of 0 and 1. Groups that are all right or all wrong are replaced, as in DAPO.
    ``level="sequence"`` takes the ratio of the whole completion, and the mean over completions. All
    numbers are those of the released runs, where 0.5 is suggested as the weight of wrong answers
    for 32B. Departures: the code's sum over completions is a mean here.
    """
    mean = aggregates.constant_norm(max_tokens) if level == "token" else aggregates.sequence_mean
    return Method(
        Objective(nft_labels(prompt_weight, negative_weight, above), nft_loss(level, floor), mean),
        groups=refill(),
        schedule=Schedule(epochs),
        min_group=2,
    )


# ---------------------------------------------------------------- weighted REINFORCE


@variant(reinforce, without=("baseline",))
def w_reinforce(
    base: Method,
    positive_weight: NonNegative = 0.1,
    negative_weight: NonNegative = 1.0,
    above: NonNegative = 0.5,
) -> Method:
    """REINFORCE on outcomes, with right answers counting less than wrong ones.

    Weighted REINFORCE of "The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning"
    (arXiv:2506.01347):

        loss = -1/B sum_i (lambda y_i - (1 - y_i)) sum_t log pi_t

    with lambda (``positive_weight``) 0.1 as the paper recommends; no baseline, no normalisation,
    on-policy. ``nsr`` and ``psr`` are its two halves. Departures: sums over the tokens of a
    completion, as in the paper's formula; the released code takes the mean over all tokens and
    clips PPO's ratio at 0.2, with four updates a batch.
    """
    return base.before(outcomes.outcome_weights(positive_weight, negative_weight, above))


_WEIGHTS = ("positive_weight", "negative_weight")


@variant(w_reinforce, without=_WEIGHTS, positive_weight=0.0)
def nsr(base: Method) -> Method:
    """Negative sample reinforcement: wrong answers are made less likely, right ones let be.

    A half of the paper of ``w_reinforce``:

        loss = 1/B sum_i (1 - y_i) sum_t log pi_t

    Departures: right answers are counted in B, as in the paper's expectation over all samples.
    """
    return base


@variant(w_reinforce, without=_WEIGHTS, positive_weight=1.0, negative_weight=0.0)
def psr(base: Method) -> Method:
    """Positive sample reinforcement: right answers are made more likely, wrong ones let be.

    A half of the paper of ``w_reinforce``:

        loss = -1/B sum_i y_i sum_t log pi_t

    Departures: wrong answers are counted in B, as in the paper's expectation over all samples.
    """
    return base


# ---------------------------------------------------------------- PACS


def outcome_cross_entropy(
    beta: float, against: str, *, leave_one_out: bool, balanced: bool
) -> Surrogate:
    """``pacs``' loss over groups whose scores are labels in [0, 1]; use it with ``sequence_sum``.

    The gradient passes through all members of the group.
    """

    def of_group(group: Members) -> tuple[Array, Stats]:
        live, label = group.live, group.score
        count = live.sum()
        psi = score = beta * (group.total("logprobs") - group.total(against))
        if leave_one_out:
            psi = score - (score.sum() - score) / jnp.maximum(count - 1, 1)
        loss = label * jax.nn.softplus(-psi) + (1 - label) * jax.nn.softplus(psi)
        if balanced:
            right = label.sum()
            own = jnp.where(label > 0.5, right, count - right)
            mixed = (right > 0) & (right < count)
            loss = loss * jnp.where(mixed, count / jnp.maximum(2 * own, 1), 1)
        # Times 0 rather than replaced by it, so that a NaN is kept.
        total = jnp.where(live, loss, 0).sum() * (count > 1) / jnp.maximum(count, 1)
        return total, {"predicted_outcome": jax.nn.sigmoid(psi)}

    return over_group(of_group, {against})


@published
def pacs(
    beta: Positive = 1.0,
    against: Annotated[str, Choice(("sampler", "proximal", "ref"))] = "sampler",
    estimator: Annotated[str, Choice(("rloo", "naive"))] = "rloo",
    class_weight: Annotated[str, Choice(("none", "balanced"))] = "balanced",
    above: NonNegative = 0.5,
    epochs: Count = 1,
) -> Method:
    """The outcome is predicted from a group-relative log-ratio, and cross-entropy trains it.

    "Implicit Actor Critic Coupling via a Supervised Learning Framework for RLVR"
    (arXiv:2509.02522):

        s_i = beta sum_t log rho_t,   psi_i = s_i - mean of s_j over j != i
        loss = -mean_i [y_i log sigmoid(psi_i) + (1 - y_i) log(1 - sigmoid(psi_i))]

    The ratio is to the policy that drew the completion, as in the released code
    (``against="ref"``: to the reference). ``estimator="naive"`` takes psi = s. ``class_weight=
    "balanced"`` gives right and wrong answers of a mixed group half of its weight each, as the
    released runs do, with beta 1 and 2. Departures: the mean is over groups of the mean over
    members, which differ when groups do in size; a group of one has loss 0. The code's third
    estimator, psi over the deviation of the group, is left out: its gradient does not exist at
    rho = 1.
    """
    surrogate = outcome_cross_entropy(
        beta,
        f"{against}_logprobs",
        leave_one_out=estimator == "rloo",
        balanced=class_weight == "balanced",
    )
    labels = stateless(lambda values, batch: (correct(values, above), batch))
    return Method(
        Objective(labels, surrogate, aggregates.sequence_sum),
        schedule=Schedule(epochs),
        min_group=2,
    )
