"""Relatives of GRPO that compare with more, or less, than the group: batch, history, one member.

Each function says its paper's formula with r the reward of a completion, A the advantage and
rho_t the ratio of token t under the policy being trained to the one it was drawn from. All else is
as in ``grpo``.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method, entropy_term
from jrl.methods.definition import variant
from jrl.methods.domains import (
    AtLeastOne,
    Choice,
    Count,
    Ddof,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Share,
    check_band,
)
from jrl.methods.edit import refill
from jrl.methods.group_relative import grpo
from jrl.methods.ratios import CLIPS
from jrl.objectives import ratios, transforms
from jrl.objectives import segments as seg
from jrl.objectives.aggregates import sequence_mean, token_mean
from jrl.objectives.comparisons import tie_breakers
from jrl.objectives.transforms import completion_tokens, stateless, trained
from jrl.types import Array, Batch, Stats, Surrogate, Transform, opinions
from jrl.zoo.methods.prompt_table import PromptTable, empty, read, write

# ---------------------------------------------------------------- SPO


def tracked_baseline(slots: int, keep: float, prior: float = 0.5) -> Transform:
    """Each score minus what its prompt's earlier scores lead one to expect; see ``spo``.

    v is read before the batch's own rewards enter, so that the baseline is independent of them.
    Without prompt ids every prompt is one never seen.
    """
    blank = {"value": jnp.float32(prior), "weight": jnp.float32(1)}

    def apply(values: Array, batch: Batch, table: PromptTable) -> tuple[Array, Batch, PromptTable]:
        chex.assert_rank(values, 2)
        ids = batch.ids.get("prompt")
        if ids is None:
            return jnp.where(batch.members, values - prior, 0), batch, table
        before = read(table, ids, blank)
        total, count = _sums(values, batch, ids)
        decayed = keep * before["weight"]
        weight = decayed + count
        value = (decayed * before["value"] + total) / jnp.where(weight > 0, weight, 1)
        after = {"value": value, "weight": weight}
        table = write(table, ids, after, batch.members.any(axis=1))
        centred = values - jnp.expand_dims(before["value"], 1)
        return jnp.where(batch.members, centred, 0), batch, table

    return Transform(lambda: empty(slots, blank), apply)


def _sums(values: Array, batch: Batch, ids: Array) -> tuple[Any, Any]:
    """[N] each: the sum of the prompt's live values and how many there are, over all its rows."""
    rows = seg.segments(batch.members.any(axis=1), ids)
    total = jnp.where(batch.members, values, 0).sum(axis=1)
    count = batch.members.sum(axis=1).astype(jnp.float32)
    return seg.total(total, rows), seg.total(count, rows)


@variant(grpo, without=("eps", "ddof"), clip_high=0.28, dual_clip=10.0)
def spo(
    base: Method, keep: Fraction = 0.875, prior: Fraction = 0.5, slots: Count = 2**16
) -> Method:
    """One completion a prompt is enough: the baseline is what the prompt's earlier rewards suggest.

    SPO of "Single-stream Policy Optimization" (arXiv:2509.13232), with a tracker for each prompt:

        v = a / (a + b),  A = (r - v), normalised over the batch's completions
        then a <- rho a + r,  b <- rho b + 1 - r
        loss = mean over tokens of -min(rho_t A, clip(rho_t, 1 - low, 1 + high) A)

    The clip bounds and the dual clip are those of the released run.

    Departures: rho (``keep``) is constant, at the value of the released code's constant form; the
    run sets it to 2^(-D / 0.06), held between 0.875 and 0.96, where D is how far the policy has
    moved on the prompt's last completion since then. A prompt starts at ``prior`` with the weight
    of one observation, as in the code without offline samples; with them it has the weight of 8.
    Rewards that are not 0 or 1 give a moving average.
    """
    steps = (tracked_baseline(slots, keep, prior), transforms.whiten("sequences", ddof=1))
    return base.with_(
        advantage=transforms.chain(*steps),
        aggregate=token_mean,
        group=1,
        lacks="a sampler of prompts by the tracker's uncertainty, sqrt(v (1 - v)) + 0.05, "
        "and the policy's movement on a prompt since its last visit",
    )


# ---------------------------------------------------------------- ScaleRL


def leave_out_solved(slots: int, rate: float = 0.9, passing: float = 1.0) -> Transform:
    """Takes prompts out of the loss for good once a part ``rate`` of their completions passed.

    No-Positive-Resampling; the batch's own rewards count from the next step on. Without prompt ids
    it does nothing.
    """
    blank = {"passed": jnp.float32(0), "tried": jnp.float32(0)}

    def apply(values: Array, batch: Batch, table: PromptTable) -> tuple[Array, Batch, PromptTable]:
        ids = batch.ids.get("prompt")
        if ids is None:
            return values, batch, table
        before = read(table, ids, blank)
        solved = (before["tried"] > 0) & (before["passed"] >= rate * before["tried"])
        passed, tried = _sums((batch.score() >= passing).astype(jnp.float32), batch, ids)
        after = {"passed": before["passed"] + passed, "tried": before["tried"] + tried}
        # A solved prompt is not written again, so that it stays solved.
        table = write(table, ids, after, batch.members.any(axis=1) & ~solved)
        return values, batch.replace(mask=batch.mask & ~solved[:, None, None]), table

    return Transform(lambda: empty(slots, blank), apply)


def leave_out_flat() -> Transform:
    """Takes groups of equal live rewards out of the loss; a group with a NaN is kept."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        score, members = batch.score(), batch.members
        low = jnp.min(score, axis=1, where=members, initial=jnp.inf)
        high = jnp.max(score, axis=1, where=members, initial=-jnp.inf)
        flat = (low == high) | ~members.any(axis=1)
        return values, batch.replace(mask=batch.mask & ~flat[:, None, None])

    return stateless(apply)


def centre_in_group_scale_by_batch(eps: float = 1e-6, ddof: int = 1) -> Transform:
    """Rewards minus their group's mean, over the deviation of these over the groups trained on."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        row = jnp.arange(values.shape[0])[:, None]
        centred = seg.centred(values, seg.segments(batch.members, row))
        used = batch.members & trained(batch).any(axis=(1, 2))[:, None]
        deviation = jnp.max(seg.std(centred, seg.segments(used), ddof=ddof))
        return centred / (deviation + eps), batch

    return stateless(apply)


def by_prompt(surrogate: Surrogate) -> Surrogate:
    """The surrogate with all members of a prompt as one row of the aggregate.

    With ``sequence_mean`` every prompt then weighs the same and every token of it shares that
    weight. Regularizers without an aggregate of their own keep sequences as rows.

    Args:
      surrogate: one over sequences.
    """
    assert surrogate.over == "sequence", "the rows of this surrogate are groups already"

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        return jax.vmap(surrogate.apply)(stats, advantages, mask)

    return surrogate._replace(apply=apply, over="group", parts=None)


@variant(grpo, without=CLIPS)
def scale_rl(
    base: Method,
    eps: Positive,
    ddof: Ddof,
    cap: AtLeastOne = 5.0,
    solved: Fraction = 0.9,
    passing: NonNegative = 1.0,
    slots: Count = 2**16,
) -> Method:
    """The recipe that scaled best: truncated weights, prompt averages, no flat or solved prompts.

    ScaleRL of "The Art of Scaling Reinforcement Learning Compute for LLMs" (arXiv:2510.13786):

        A = (r - mean of the group) / std of these differences over the batch
        loss = -mean over prompts of their tokens' mean of sg(min(rho_t, cap)) A log pi_t

    Groups of equal rewards are left out, and so is, from then on, a prompt of which a share of 0.9
    (``solved``) of all completions have passed. The paper finds caps of 4, 5 and 8 alike.

    Departures: prompts are left out of the loss, after they were drawn; the deviation is over the
    advantages trained on, plus ``eps``; a completion passes with ``passing`` points. The logits are
    float32 here for every method. The paper samples up to eight steps ahead
    (``placement.staleness = 8``), and its subject, the sigmoid that is fitted to the curves of
    accuracy over compute, is no part of a run.
    """
    base = base.with_(rule=ratios.bounded(0.0, cap))
    return base.with_(
        advantage=transforms.chain(
            leave_out_solved(slots, solved, passing),
            leave_out_flat(),
            centre_in_group_scale_by_batch(eps, ddof),
        ),
        surrogate=by_prompt(base.objective.surrogate),
        aggregate=sequence_mean,
        lacks="interruption of completions that think too long; the fit of curves over compute",
    )


# ---------------------------------------------------------------- BRPO and ConciseR


def one_of_each(eligible: Array, tie_breaker: Array) -> Array:
    """[N, G] bool: one eligible member of each group, the one with the least tie-breaker.

    All False for a group without an eligible member.

    >>> one_of_each(jnp.array([[True, True, False]]), jnp.array([[5, 2, 1]])).tolist()
    [[False, True, False]]
    """
    last = jnp.iinfo(jnp.int32).max
    least = jnp.argmin(jnp.where(eligible, tie_breaker, last), axis=1, keepdims=True)
    return eligible & (jnp.arange(eligible.shape[1])[None] == least)


def against_a_member(most_skew: float = 0.6, *, judged: bool = False) -> Transform:
    """1 for beating a member of the group that is chosen at random, -1 for not beating it.

    The member chosen is the reference of its group in this step and is not trained on.

    Args:
      most_skew: a group is left out when its sum, without sign, is more than this part of its
        members, the reference included.
      judged: whether a judge has chosen and compared: members that a reward part has no opinion of,
        the reference among them, are not trained on, and scores above 0 are wins.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        if judged:
            rest = batch.members & opinions(batch.rewards, batch.ids).all(axis=-1)
            gap = values
        else:
            chosen = one_of_each(batch.members, tie_breakers(batch))
            rest = batch.members & ~chosen
            gap = values - jnp.where(chosen, values, 0).sum(axis=1, keepdims=True)
        won = jnp.where(gap > 0, 1.0, -1.0) + 0 * gap  # a NaN stays
        won = jnp.where(rest, won, 0)
        size = batch.members.sum(axis=1, keepdims=True)
        # A NaN is not above the bound, so that its group stays.
        rest = rest & ~(jnp.abs(won.sum(axis=1, keepdims=True)) > most_skew * size)
        return jnp.where(rest, won, 0), batch.replace(members=rest)

    return stateless(apply)


@variant(grpo, without=("eps", "ddof"))
def brpo(
    base: Method,
    most_skew: Fraction = 0.6,
    max_rounds: Count = 10,
    reference: Annotated[str, Choice(("judge", "drawn"))] = "drawn",
) -> Method:
    """Each completion against a random one of the group: 1 for a win, -1 for a loss.

    Bootstrapped Relative Policy Optimization of "Writing-Zero: Bridge the Gap Between
    Non-verifiable Problems and Verifiable Rewards" (arXiv:2506.00103):

        A_i = 1 if y_i beats the reference y_j of its group, else -1

    as they are, without a normalisation, and the loss of GRPO. The reference is drawn anew in every
    step and not trained on. A group of G with |sum_i A_i| / G above 0.6 is left out, and groups of
    equal scores are drawn again.

    The paper's is ``reference = "judge"``: a part with ``form = "brpo"`` draws the reference and
    compares with it. With "drawn", a departure, the reference is drawn here and the comparison is
    that of two scores. Not known: the clip bounds.
    """
    return base.with_(
        advantage=against_a_member(most_skew, judged=reference == "judge"),
        **refill(max_rounds=max_rounds),
        group=3,
        lacks="" if reference == "judge" else "a pairwise judge; scores are compared",
    )


def when_all_are_right(max_tokens: int, scale: float = 1.0, correct: float = 0.5) -> Transform:
    """Rewards the unused part of the limit, in groups with correct answers only; ``concise_r``."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        right = jnp.where(batch.members, values >= correct, True).all(axis=1, keepdims=True)
        unused = 1 - completion_tokens(batch).astype(jnp.float32) / max_tokens
        return values + jnp.where(right, scale * unused, 0), batch

    return stateless(apply)


@variant(grpo, clip_high=0.28)
def concise_r(
    base: Method,
    max_tokens: Count,
    stage: Annotated[str, Choice(("reasoning", "concise"))] = "reasoning",
    length_scale: NonNegative = 1.0,
    correct: Positive = 0.5,
    entropy_coef: NonNegative = 0.001,
    max_rounds: Count = 10,
) -> Method:
    """First to reason well, then to be short where every answer of the group is right.

    ConciseR of "Walk Before You Run! Concise LLM Reasoning via Reinforcement Learning"
    (arXiv:2505.21178). Stage "reasoning" (GRPO++) is GRPO with a higher upper clip, dynamic
    sampling and an entropy bonus. Stage "concise" (L-GRPO) resumes from its checkpoint, keeps all
    groups, and adds to the rewards of a group in which every answer is right (``correct`` points or
    more) ``length_scale`` times

        1 - len / max_tokens

    Not known: the length function, the bonus and the clip bounds, which are DAPO's here; the
    released repository has no training code. Inside a group of equal scores any function that is
    linear in the length gives these advantages, since GRPO divides by the deviation.
    """
    base = base.plus(*entropy_term(entropy_coef))
    if stage == "reasoning":
        return base.with_(**refill(max_rounds=max_rounds))
    return base.before(when_all_are_right(max_tokens, length_scale, correct))


# ---------------------------------------------------------------- RiskPO


class Bundles(NamedTuple):
    """The paper of each completion, and the bundle of each paper: [N, G] each.

    Attributes:
      bundle: int32, the bundle that each completion's question is in.
      paper: int32, which paper of its bundle the completion belongs to.
      live: bool, True for completions of whole papers: one for every question.
      first: bool, True for one completion of each paper, to count every paper once.
    """

    bundle: Array
    paper: Array
    live: Array
    first: Array


class Quantiles(NamedTuple):
    """Running estimates [] of two quantiles of the paper scores, and the steps they have seen."""

    low: Array
    high: Array
    steps: Array


def bundles(batch: Batch, size: int) -> Bundles:
    """The batch's prompts in bundles of ``size``, their k-th completions in papers, both at random.

    Prompts without a live member are left out; the last bundle may be smaller; completions beyond
    the smallest number that a question of the bundle has belong to no whole paper.
    """
    n, g = batch.members.shape
    tie_breaker = batch.ids.get("tie_breaker", jnp.arange(n * g, dtype=jnp.int32).reshape(n, g))
    last = jnp.iinfo(jnp.int32).max
    tie_breaker = jnp.where(batch.members, tie_breaker, last)
    rank = jnp.argsort(jnp.argsort(jnp.min(tie_breaker, axis=1), stable=True), stable=True)
    paper = jnp.argsort(jnp.argsort(tie_breaker, axis=1, stable=True), axis=1, stable=True)
    bundle = jnp.broadcast_to(jnp.expand_dims(rank // size, 1), (n, g))
    has_group = batch.members.any(axis=1)
    lowest = jnp.broadcast_to(jnp.expand_dims(rank % size == 0, 1), (n, g))
    questions = seg.count(seg.segments(jnp.expand_dims(has_group, 1), bundle[:, :1]))
    answered = seg.count(seg.segments(batch.members, bundle, paper))
    complete = batch.members & (answered == questions)
    return Bundles(bundle.astype(jnp.int32), paper.astype(jnp.int32), complete, complete & lowest)


def track_quantiles(
    state: Quantiles, scores: Array, live: Array, levels: tuple[float, float], rate: float
) -> Quantiles:
    """The estimates after a batch of scores and the count of live ones; at first its own."""
    count = live.sum()
    everyone = seg.segments(live)

    def next_one(q: Array, level: float) -> Array:
        target = jnp.max(jnp.where(live, seg.quantile(scores, everyone, level), -jnp.inf))
        below = jnp.where(live, scores < q, False).sum() / jnp.maximum(count, 1)
        updated = jnp.where(state.steps > 0, q + rate * (level - below), target)
        nan_guard = jnp.where(live, scores, 0).sum() * 0  # a NaN score is not compared away
        return jnp.where(count > 0, updated, q) + nan_guard

    steps = state.steps + (count > 0).astype(jnp.int32)
    return Quantiles(next_one(state.low, levels[0]), next_one(state.high, levels[1]), steps)


QUANTILES = ("mix", "track", "batch")
CREDITS = ("uniform", "spread", "share")


def bundled_risk(
    size: int = 5,
    levels: tuple[float, float] = (0.2, 0.8),
    weight: float = 1.5,
    rate: float = 0.1,
    quantiles: str = "mix",
    credit: str = "uniform",
    shifted: bool = True,
    eps: float = 1e-6,
) -> Transform:
    """RiskPO's advantages: mixed value at risk of paper scores, handed back to the completions.

    ``quantiles`` are the running estimates ("track"), the bundle's own ("batch") or the mean of the
    two ("mix"); in the first step all are the bundle's own. ``credit`` gives the paper's advantage
    to each of its completions ("uniform"), divides it by the deviation of the question's scores
    ("spread"), or multiplies it with the completion's part of the paper's deviation from its
    questions' means ("share"). ``eps`` is added to the deviation of a bundle's scores, which
    divides unless it is 0. Completions of no whole paper get 0.
    """

    def init() -> Quantiles:
        zero = jnp.zeros((), jnp.float32)
        return Quantiles(zero, zero, jnp.int32(0))

    def apply(values: Array, batch: Batch, state: Quantiles) -> tuple[Array, Batch, Quantiles]:
        chex.assert_rank(values, 2)
        parts = bundles(batch, size)
        papers = seg.segments(parts.live, parts.bundle, parts.paper)
        scores = seg.total(values, papers)
        rows = seg.segments(parts.first, parts.bundle)
        one_each = lambda x: seg.total(jnp.where(parts.first, x, 0), papers)  # noqa: E731
        low, high = (one_each(seg.quantile(scores, rows, level)) for level in levels)
        if quantiles != "batch":
            half = 1.0 if quantiles == "track" else 0.5
            part = jnp.where(state.steps > 0, half, 0.0)
            low, high = low + part * (state.low - low), high + part * (state.high - high)
        inside = jnp.maximum(scores - low, 0) - jnp.maximum(scores - high, 0)
        inside = (inside + shifted * (low - high)) / (levels[1] - levels[0])
        tail = -jnp.maximum(low - scores, 0) / levels[0]
        value = (weight * tail + inside) / (1 + weight)
        deviation = one_each(seg.std(scores, rows, ddof=1))
        value = value / jnp.where(deviation == 0, 1, deviation + eps)
        value = jnp.where(parts.live, _credited(value, values, batch, papers, credit, eps), 0)
        return value, batch, track_quantiles(state, scores, parts.first, levels, rate)

    return Transform(init, apply)


def _credited(
    value: Array, scores: Array, batch: Batch, papers: seg.Segments, credit: str, eps: float
) -> Array:
    """[N, G]: the paper's value, as each completion gets it."""
    if credit == "uniform":
        return value
    question = seg.segments(batch.members, jnp.arange(scores.shape[0])[:, None])
    if credit == "spread":
        deviation = seg.std(scores, question, ddof=1)
        return value / (jnp.where(deviation > 1e-3, deviation, 1) + eps)
    gap = jnp.where(papers.live, scores - seg.mean(scores, question), 0)
    total = seg.total(gap, papers)
    even = 1 / jnp.maximum(seg.count(papers), 1)
    # Written so that a NaN share is kept.
    share = jnp.where(jnp.abs(total) <= 1e-6, even, gap / jnp.where(total == 0, 1, total))
    return value * share


@variant(grpo, without=("ddof",), dual_clip=3.0)
def riskpo(
    base: Method,
    eps: Positive,
    bundle: Count = 5,
    level_low: Share = 0.2,
    level_high: Share = 0.8,
    tail_weight: NonNegative = 1.5,
    quantile_rate: NonNegative = 0.1,
    quantiles: Annotated[str, Choice(QUANTILES)] = "track",
    credit: Annotated[str, Choice(CREDITS)] = "share",
    shifted: Flag = False,
) -> Method:
    """PPO's clip on advantages that weigh the lower tail of bundled scores.

    "RiskPO: Risk-based Policy Optimization via Verifiable Reward for LLM Post-Training"
    (arXiv:2510.00911). Five questions form a bundle; the k-th completion of each of them is one
    paper with the sum of their rewards as its score s; q_a and q_b are quantiles of the scores:

        A_range = [(s - q_a)+ - (s - q_b)+ [+ q_a - q_b]] / (b - a),  A_tail = -(q_a - s)+ / a
        A = (w A_tail + A_range) / (1 + w), over the deviation of the bundle's scores
        q <- q + rate (level - the share of s below q), one pair for all bundles
        loss = mean over tokens of -min(rho_t A, clip(rho_t, 1 - eps, 1 + eps) A)

    with no divergence and no entropy term. The defaults are those of the released code's main
    script (dapomath): tracked quantiles, each completion's share of its paper's A, no inner bracket
    (``shifted``, which makes every A at most 0), a dual clip of 3. Its script for math and gsm8k
    has ``credit="spread"``, ``shifted`` and b = 0.9. As that code reads, the tracked quantiles
    come too late for the advantages, so that its runs behave as ``quantiles="batch"``.

    Departures: bundles and papers are drawn at random, where the code takes prompts in order; the
    tracker starts at the first batch's quantiles, for two levels of the code's 19; a bundle whose
    papers have one score is not divided by its deviation of 0.

    Raises:
      UserError: when ``level_low`` is not below ``level_high``.
    """
    check_band(level_low=level_low, level_high=level_high)
    levels = (level_low, level_high)
    advantage = bundled_risk(
        bundle, levels, tail_weight, quantile_rate, quantiles, credit, shifted, eps
    )
    return base.with_(advantage=advantage, aggregate=token_mean, group=1)
