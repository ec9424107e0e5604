"""Relatives of GRPO whose advantages know how hard the prompt is, or how sure the policy.

Each function says its paper's formula with r the reward of a completion, A the advantage and
rho_t the ratio of token t under the policy being trained to the one it was drawn from. All else is
as in ``grpo``: the mean over completions of their mean of -min(rho_t A, clip(rho_t) A).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.methods.definition import variant
from jrl.methods.domains import Choice, Count, Ddof, Flag, NonNegative, Positive, Tokens
from jrl.methods.group_relative import dr_grpo, grpo
from jrl.methods.plan import Plan, demonstrated
from jrl.objectives import segments as seg
from jrl.objectives import transforms
from jrl.objectives.advantages import group_mean_std
from jrl.objectives.aggregates import token_mean
from jrl.objectives.comparisons import demonstrations
from jrl.objectives.kl import bounded_exp
from jrl.objectives.regularizers import term
from jrl.objectives.transforms import (
    completion_tokens,
    correct,
    pass_rate,
    per_token,
    stateless,
    trained,
)
from jrl.types import Array, Batch, Regularizer, Statistic, Stats, Transform, opinions

# ---------------------------------------------------------------- SEED-GRPO

SHAPES = ("linear", "exponential", "focal")


def answer_entropy(same: Array, members: Array) -> Array:
    """The semantic entropy of ONE group: the mean over its answers of -log of their shares.

    Returns:
      [] float32, nats: 0 when all agree, log of the number of members when no two do.

    >>> two = jnp.array([[True, True, False], [True, True, False], [False, False, True]])
    >>> round(float(answer_entropy(two, jnp.ones(3, bool))), 4)
    0.752
    """
    chex.assert_rank([same, members], [2, 1])
    size = (same & members[None]).sum(axis=1)
    each = jnp.where(members, 1 / jnp.maximum(size, 1), 0)  # a member's part of its answer
    share = jnp.maximum(size, 1) / jnp.maximum(members.sum(), 1)
    surprise = jnp.where(members, each * -jnp.log(share), 0)
    return surprise.sum() / jnp.maximum(each.sum(), 1)


def scale_by_answer_entropy(
    strength: float, shape: str = "linear", power: float = 2.0
) -> Transform:
    """Advantages times f(strength SE / log G), f falling from 1; see ``seed_grpo``.

    G counts live members; one alone is left as it is.
    """

    def factor(x: Array) -> Array:
        if shape == "exponential":
            return jnp.exp(-x)
        rest = jnp.maximum(1 - x, 0)
        return rest if shape == "linear" else rest**power

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        labels = batch.rewards
        if "answer" in batch.ids:
            labels = jnp.expand_dims(batch.ids["answer"], 2)
        same = (jnp.expand_dims(labels, 1) == jnp.expand_dims(labels, 2)).all(axis=3)
        entropy = jax.vmap(answer_entropy)(same, batch.members)
        most = jnp.log(jnp.maximum(batch.members.sum(axis=1), 2))
        scale = factor(strength * entropy / most)
        return values * jnp.expand_dims(scale, 1), batch

    return stateless(apply)


@variant(dr_grpo)
def seed_grpo(
    base: Method,
    strength: NonNegative = 0.02,
    shape: Annotated[str, Choice(SHAPES)] = "linear",
    power: Positive = 2.0,
) -> Method:
    """Smaller steps on prompts whose sampled answers disagree.

    "SEED-GRPO: Semantic Entropy Enhanced GRPO for Uncertainty-Aware Policy Optimization"
    (arXiv:2505.12346), with p_k the share of the group's completions that give answer k of K:

        SE = -1/K sum_k log p_k
        A = (r - mean(r)) f(alpha SE / log G),  f(x) = 1 - x, exp(-x) or (1 - x)^power

    in the loss of ``dr_grpo``; the linear f with alpha (``strength``) 0.02 is the paper's default.
    Departures: shares are counted; the paper also allows sums of likelihoods. Answers are equal
    when their labels "answer" are: final answers as text, in tasks whole completions; where nobody
    recorded labels, when all reward parts are. f is held at 0 from below.
    """
    return base.after(scale_by_answer_entropy(strength, shape, power))


# ---------------------------------------------------------------- UniVG-R1

CURVES = ("exp", "power", "log")


def scale_by_difficulty(
    curve: str = "exp", power: float = 1.0, part: int = 0, over: str = "group"
) -> Transform:
    """Advantages times a weight that falls as the mean accuracy rises; see ``univg_r1``.

    Raises:
      UserError: when applied, when there is no such reward part.
    """

    def weight_of(accuracy: Array) -> Array:
        if curve == "exp":
            return bounded_exp(1 - accuracy)
        if curve == "power":
            return jnp.maximum(1.05 - accuracy, 0) ** power
        return jnp.maximum(-jnp.log(jnp.maximum(0.02 + accuracy, 1e-6)), 0)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, {2, 3})
        n, _, parts = batch.rewards.shape
        if part >= parts:
            raise UserError(f"reward part {part} of {parts}; count them from 0")
        rows = (jnp.arange(n)[:, None],) if over == "group" else ()
        judged = batch.members & opinions(batch.rewards, batch.ids)[:, :, part]
        means = seg.mean(batch.rewards[:, :, part], seg.segments(judged, *rows))
        # Members that were not judged have the weight of their group, and a group of which none
        # was has 1: nothing says that its prompt is hard.
        axis = 1 if over == "group" else None
        accuracy = jnp.where(judged, means, -jnp.inf).max(axis=axis, keepdims=True)
        weight = jnp.where(judged.any(axis=axis, keepdims=True), weight_of(accuracy), 1.0)
        return values * (weight if values.ndim == 2 else jnp.expand_dims(weight, 2)), batch

    return stateless(apply)


@variant(grpo, kl_coef=0.04, eps=1e-4)
def univg_r1(
    base: Method,
    curve: Annotated[str, Choice(CURVES)] = "exp",
    power: Positive = 1.0,
    accuracy_part: Tokens = 0,
    over: Annotated[str, Choice(("group", "batch"))] = "group",
) -> Method:
    """GRPO with the loss of hard prompts weighted up.

    The difficulty-aware GRPO of "UniVG-R1: Reasoning Guided Universal Visual Grounding with
    Reinforcement Learning" (arXiv:2505.14231), with m the mean accuracy reward of the group:

        A = w(m) (r - mean(r)) / std(r),  w(m) = exp(1 - m)

    or (1.05 - m)^power or -log(0.02 + m) (``curve``); the divergence from the reference policy is
    not weighted. The accuracy is reward part number ``accuracy_part`` alone, unweighted. The
    coefficients are the released code's. Departures: that code takes m over what a device holds,
    which in its script is one group; ``over="batch"`` takes the whole batch's. The weights are held
    at 0 from below.
    """
    return base.after(scale_by_difficulty(curve, power, accuracy_part, over))


# ---------------------------------------------------------------- UCAS


def self_certainty(distributions: dict[str, Array], token: Array) -> Array:
    """[] float32, nats: logsumexp - mean of the raw logits, KL(uniform || policy) + log V.

    >>> round(float(self_certainty({"logits": jnp.array([0.0, 2.0])}, 0)), 4)
    1.1269
    """
    logits = distributions["logits"]
    return (jax.nn.logsumexp(logits) - logits.mean()).astype(jnp.float32)


def chosen_logit(distributions: dict[str, Array], token: Array) -> Array:
    """[] float32: the raw logit of the token."""
    return distributions["logits"][token].astype(jnp.float32)


CERTAINTY = Statistic("rollout_certainty", self_certainty, start=True)
"""``self_certainty`` at the start of the training step."""
LOGIT = Statistic("rollout_logit", chosen_logit, start=True)
"""``chosen_logit`` at the start of the training step."""


def shape_by_certainty(
    right: float = 0.25,
    wrong: float = 0.35,
    penalty: float = 0.05,
    eps: float = 1e-6,
    ddof: int = 1,
) -> Transform:
    """``ucas``'s advantages: a bonus for low confidence, a penalty on confident tokens.

    Correct completions gain for low confidence; confident tokens of all completions are penalised.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        live = trained(batch)
        certainty = jnp.where(live, batch.stats[CERTAINTY.name], 0).sum(axis=2)
        group = seg.segments(batch.members, jnp.arange(values.shape[0])[:, None])
        score = seg.standard_scores(certainty, group, eps, ddof)
        power = jnp.where(values > 0, -right, wrong) * score
        shaped = values * bounded_exp(power)
        shaped = per_token(shaped, batch)
        charged = shaped - penalty * _unit_range(batch.stats[LOGIT.name], live)
        charged = jnp.where(shaped > 0, jnp.maximum(charged, 0), charged)
        return jnp.where(shaped == 0, shaped, charged), batch

    return stateless(apply, statistics=(CERTAINTY, LOGIT))


def _unit_range(values: Array, live: Array) -> Array:
    """The values moved and scaled so that the live ones run from 0 to 1; 0 when all are equal."""
    low = jnp.min(values, where=live, initial=jnp.inf)
    high = jnp.max(values, where=live, initial=-jnp.inf)
    width = high - low
    flat = ~(width > 0) & ~jnp.isnan(width)
    return jnp.where(live & ~flat, (values - low) / jnp.where(flat, 1, width), 0)


@variant(grpo, dual_clip=3.0)
def ucas(
    base: Method,
    eps: Positive,
    ddof: Ddof,
    right: NonNegative = 0.25,
    wrong: NonNegative = 0.35,
    penalty: NonNegative = 0.05,
) -> Method:
    """More credit for right completions that were in doubt, more blame for sure wrong ones.

    UCAS of "Unlocking Exploration in RLVR: Uncertainty-aware Advantage Shaping for Deeper
    Reasoning" (arXiv:2510.10649), with l the raw logits, and z the group's z-score of the sum over
    a completion's tokens of logsumexp(l) - mean(l), the self-certainty and log V:

        A = (r - mean(r)) / std(r)
        A' = A exp(-right z) if A > 0, else A exp(wrong z)
        A'_t = A' - penalty minmax(logit of token t), not below 0 where A' > 0

    minmax over the batch, both at the start of the training step, and the clipped loss averaged
    over the batch's tokens. The sum (by which longer completions count as surer), the average and
    the dual clip are the released code's; the paper's own formula was not found. Departures: where
    A' is 0 it stays 0; in a batch of equal logits minmax is 0, there 0.5; that code divides the
    certainty's logits by the sampling temperature.
    """
    shape = shape_by_certainty(right, wrong, penalty, eps, ddof)
    return base.after(shape).with_(aggregate=token_mean)


# ---------------------------------------------------------------- Observe-R1


def shortest_correct_bonus(bonus: float, min_tokens: int, above: float) -> Transform:
    """A bonus for the shortest correct answer of each group longer than ``min_tokens``."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        right = batch.members & (batch.score() > above)
        longest = jnp.iinfo(jnp.int32).max
        lengths = completion_tokens(batch)
        shortest = jnp.where(right, lengths, longest).min(axis=1, keepdims=True)
        is_shortest = right & (lengths == shortest) & (lengths > min_tokens)
        return values + bonus * is_shortest, batch

    return stateless(apply)


def mixed_weight(scale: float, above: float) -> Transform:
    """Multiplies advantages by ``4 scale p (1 - p)``, p the group's fraction of right answers."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        p = pass_rate(correct(batch.score(), above), batch.members)
        return values * (4 * scale * p * (1 - p)), batch

    return stateless(apply)


@variant(grpo, eps=1e-9)
def observe_r1(
    base: Method,
    scale: Positive = 1.8,
    bonus: NonNegative = 0.2,
    min_tokens: Tokens = 100,
    above: NonNegative = 0.5,
) -> Method:
    """GRPO that weighs prompts by how mixed their answers are and likes short right answers.

    "Observe-R1: Unlocking Reasoning Abilities of MLLMs with Dynamic Progressive Reinforcement
    Learning" (arXiv:2505.12432), with p the fraction of the group's answers that are right:

        r_i += bonus for the shortest right answer, if it is longer than min_tokens
        A_i = 4 c p (1 - p) (r_i - mean(r)) / (std(r) + 1e-9)

    and GRPO's clipped loss; c (``scale``) is 1.8, the bonus 0.2 beyond 100 tokens. The reward for
    its format, 0.5 for observe, think and answer tags, is a reward function's. Departures: the
    order of problems, easy before hard, is that of the data: sort the source. Several right answers
    of the least length share the bonus. The released run averages over tokens and charges 0.01 of
    the divergence k1 from the reference to the reward.
    """
    return base.before(shortest_correct_bonus(bonus, min_tokens, above)).after(
        mixed_weight(scale, above)
    )


# ---------------------------------------------------------------- MASA

LABELS = ("ask", "predicted_tokens", "predicted_passes")
"""Labels that the environment sets: "ask" [N], 1 for a prompt that asks for predictions about the
problem of the same "prompt" id, 0 for one that asks for its solution; [N, G], of meta completions,
the predicted length in tokens and the predicted number of right answers, -1 without a valid one."""


def prediction_rewards(passes: int, above: float) -> Transform:
    """Scores of meta completions: how well they foretell the solutions of the same problem.

    ``passes`` right answers are a pass rate of 1. Scores of solutions are left as they are; without
    the labels ``LABELS`` every completion is one. A problem without solutions gives difficulty 0.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        if "ask" not in batch.ids:
            return values, batch
        meta = jnp.expand_dims(batch.ids["ask"] == 1, 1) & batch.members
        about = _solutions(values, batch, above)
        guess = batch.ids["predicted_tokens"]
        length = (guess > about.shortest) & (guess < about.longest)
        prediction = batch.ids["predicted_passes"]
        error = jnp.abs(prediction / passes - about.rate)
        difficulty = jnp.where((prediction >= 0) & (about.solutions > 0), 0.01**error, 0)
        scored = (values + length + difficulty) / 3
        # A NaN among the solutions is what they were scored against.
        return jnp.where(meta, scored + 0 * about.rate, values), batch

    return stateless(apply)


class _About(NamedTuple):
    """Solution statistics of each member's problem, each [N, G] float32."""

    rate: Array
    solutions: Array
    shortest: Array
    longest: Array


def _solutions(values: Array, batch: Batch, above: float) -> _About:
    solution = jnp.expand_dims(batch.ids["ask"] != 1, 1) & batch.members
    solution = solution & ~demonstrations(batch) if "external" in batch.stats else solution
    problem = seg.segments(batch.members, jnp.expand_dims(batch.ids["prompt"], 1))
    labels = jnp.where(solution, correct(values, above), 0)
    right = solution & (labels == 1)
    count = seg.total(solution.astype(jnp.float32), problem)
    rate = seg.total(labels, problem) / jnp.maximum(count, 1)
    lengths = completion_tokens(batch).astype(jnp.float32)
    # Far ends that no prediction lies between, for problems without a right solution.
    shortest = seg.minimum(jnp.where(right, lengths, 1e9), problem)
    longest = seg.maximum(jnp.where(right, lengths, -1e9), problem)
    return _About(rate, count, shortest, longest)


def _predictions(batch: Batch, name: str) -> tuple[Array, Array]:
    """Count and sum of the valid predictions of each member's problem, [N, G] float32."""
    prediction = batch.ids[name]
    predicting = jnp.expand_dims(batch.ids["ask"] == 1, 1) & batch.members
    valid = (predicting & (prediction >= 0)).astype(jnp.float32)
    problem = seg.segments(batch.members, jnp.expand_dims(batch.ids["prompt"], 1))
    return seg.total(valid, problem), seg.total(valid * prediction, problem)


def predicted_gate(passes: int) -> Transform:
    """Leaves out solutions of problems whose valid predictions average 0 or ``passes``."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        if "ask" not in batch.ids:
            return values, batch
        meta = jnp.expand_dims(batch.ids["ask"] == 1, 1)
        count, total = _predictions(batch, "predicted_passes")
        settled = (count > 0) & ((total <= 0) | (total >= passes * count))
        return values, batch.replace(members=batch.members & ~(settled & ~meta))

    return stateless(apply)


def predicted_cutoff(factor: float) -> Transform:
    """Leaves a solution's tokens past ``factor`` times the predicted length out of the loss."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        if "ask" not in batch.ids:
            return values, batch
        meta = jnp.expand_dims(batch.ids["ask"] == 1, 1)
        count, total = _predictions(batch, "predicted_tokens")
        limit = factor * total / jnp.maximum(count, 1)
        limit = jnp.where((count > 0) & ~meta, limit, jnp.inf)
        column = jnp.arange(batch.mask.shape[2])[None, None]
        return values, batch.replace(mask=batch.mask & (column < jnp.expand_dims(limit, 2)))

    return stateless(apply)


def imitation(coef: float) -> Regularizer:
    """``coef`` times the cross-entropy of demonstrated tokens, 0 at others; named "imitation"."""

    def value(stats: Stats, mask: Array) -> Array:
        return jnp.where(stats["external"] > 0.5, -stats["logprobs"], 0 * stats["logprobs"])

    return term("imitation", value, coef, "external")


def _sampled(batch: Batch) -> tuple[Array, ...]:
    return (batch.members & ~demonstrations(batch),)


@variant(grpo, clip_high=0.28, dual_clip=10.0)
def masa(
    base: Method,
    eps: Positive,
    ddof: Ddof,
    efficient: Flag = False,
    passes: Count = 8,
    above: NonNegative = 0.5,
    imitation_coef: NonNegative = 0.1,
    cutoff: Positive = 2.0,
) -> Method:
    """GRPO on solutions, and on predictions of the solve rate in separate groups.

    MASA of "Meta-Awareness Enhances Reasoning Models: Self-Alignment Reinforcement Learning"
    (arXiv:2510.03259). A problem stands in a batch twice, once to be solved and once to be
    foretold; each group is normalised on its own as in GRPO. A prediction's reward is the mean of

        length      1 if shortest < predicted length < longest right solution, else 0
        difficulty  0.01^|predicted pass rate - pass rate|
        notions     the reward functions' score: which of the named notions right solutions use more

    as in the released code, in which the pass rate is foretold as one of ``passes``. Its run has 16
    solutions and 16 predictions a problem, the clip 0.2 and 0.28 with a dual clip of 10, and the
    mean over tokens.

    The environment (``zoo.envs.foretell.foretell``) asks each problem twice, and records the labels
    "ask" (1 for predictions), "predicted_tokens" and "predicted_passes"; without them every
    completion is a solution. Notions are not judged there.

    ``efficient`` adds what MASA-efficient does: problems foretold trivial or unsolvable are left
    out, tokens past ``cutoff`` times the foretold length (the first version's 2) are not trained
    on, and demonstrations (expert predictions) are imitated with ``imitation_coef``. Departures:
    the sampler is not told to skip or to stop, which is where the paper saves its time; imitation
    is a term of every step, where the authors' code takes steps of their own on the policy's best
    predictions, and the later version has none.
    """
    lacking = "a judge of the notions that a prediction names"
    if efficient:
        lacking += "; sampling that skips and stops by the predictions"
    base = base.before(prediction_rewards(passes, above)).with_(
        aggregate=token_mean,
        plan=Plan(demonstrated(int(efficient))),
        lacks=lacking,
    )
    if not efficient:
        return base
    # Demonstrations are compared with nobody and get advantage 0: they are only imitated.
    normalised = transforms.per_group(partial(group_mean_std, eps=eps, ddof=ddof), _sampled)
    normalised = normalised._replace(needs=frozenset({"external"}))
    steps = (prediction_rewards(passes, above), predicted_gate(passes), normalised)
    return base.with_(advantage=transforms.chain(*steps, predicted_cutoff(cutoff))).plus(
        imitation(imitation_coef)
    )
