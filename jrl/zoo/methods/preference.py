"""Losses of pairs that single papers published; notation as in ``methods.preference``."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice, NonNegative, Positive, Range
from jrl.methods.preference import Noise, PairLossName, dpo, implicit, pair_method
from jrl.objectives import pairs
from jrl.objectives.comparisons import START, extremes, start_log_ratio, sums, write
from jrl.objectives.pairs import Side, dpo_loss, sigmoid, softplus
from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Surrogate, Transform

SomeNoise = Annotated[float, Range(0.0, 0.5, open_low=True)]
LessNoise = Annotated[float, Range(0.0, 0.499)]
Points = Annotated[float, Range(-1e9, 1e9)]


def trusted(beta: float) -> Surrogate:
    """DPO's loss of a pair that is right with the probability that "pair_weight" holds."""

    def loss(chosen: Side, rejected: Side) -> Array:
        return pairs.logistic(beta * chosen.log_ratio, beta * rejected.log_ratio, 1 - chosen.weight)

    return pairs.pair(loss, implicit(beta), ("ref_logprobs", "pair_weight"))


@variant(dpo, without=("loss", "label_smoothing"))
def robust_dpo(base: Method, beta: Positive, noise: LessNoise = 0.1) -> Method:
    """DPO with the bias that wrong labels bring taken out.

    "Provably Robust DPO: Aligning Language Models with Noisy Feedback" (arXiv:2403.00409), with e
    (``noise``) the rate of labels that are the wrong way round:

        loss = [(1 - e) l(w, l) - e l(l, w)] / (1 - 2 e),   l(w, l) = -log sigmoid(a - b) as in DPO
    """

    def loss(chosen: Side, rejected: Side) -> Array:
        margin = beta * (chosen.log_ratio - rejected.log_ratio)
        return ((1 - noise) * softplus(-margin) - noise * softplus(margin)) / (1 - 2 * noise)

    return base.with_(surrogate=pairs.pair(loss, implicit(beta)))


@variant(dpo, without=("loss",))
def exo(base: Method, beta: Positive, label_smoothing: SomeNoise = 1e-3) -> Method:
    """The reverse divergence of the pair's label distribution from the policy's own preference.

    EXO of "Towards Efficient Exact Optimization of Language Model Alignment" (arXiv:2402.00856) for
    pairs, with p = sigmoid(a - b) and e = ``label_smoothing``:

        loss = p log(p / (1 - e)) + (1 - p) log((1 - p) / e)

    Departures: e is 1e-3 unless given, as in TRL; the released code has e^-10, and 1 for 1 - e. The
    paper's form for K completions with rewards is not here.
    """

    def loss(chosen: Side, rejected: Side) -> Array:
        margin = beta * (chosen.log_ratio - rejected.log_ratio)
        right = sigmoid(margin) * (-softplus(-margin) - jnp.log1p(-label_smoothing))
        return right + sigmoid(-margin) * (-softplus(margin) - jnp.log(label_smoothing))

    return base.with_(surrogate=pairs.pair(loss, implicit(beta)))


@variant(dpo, without=("refresh_ref",))
def cpo(
    base: Method,
    beta: Positive,
    loss: PairLossName,
    label_smoothing: Noise,
    nll_coef: NonNegative = 1.0,
) -> Method:
    """DPO with a uniform reference, plus the likelihood of the chosen completion.

    "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine
    Translation" (arXiv:2401.08417):

        loss = -log sigmoid( beta log pi(y_w) - beta log pi(y_l) )  -  log pi(y_w)

    Departures: ``nll_coef`` weighs the second term, the sum over tokens as in the formula; TRL
    takes the mean over the batch's tokens there, and with ``loss = "ipo"`` means over tokens.
    """
    prefer = dpo_loss(loss, beta, label_smoothing, lambda side: side.logprob)

    def with_likelihood(chosen: Side, rejected: Side) -> Array:
        return prefer(chosen, rejected) - nll_coef * chosen.logprob

    return base.with_(surrogate=pairs.pair(with_likelihood, lambda side: beta * side.logprob, ()))


@published
def slic(
    delta: NonNegative = 1.0, nll_coef: NonNegative = 0.1, min_gap: NonNegative = 0.0
) -> Method:
    """A hinge on the difference of log-probabilities, plus the likelihood of a target.

    "SLiC-HF: Sequence Likelihood Calibration with Human Feedback" (arXiv:2305.10425):

        loss = max(0, delta - log pi(y_w) + log pi(y_l))  -  lambda log pi(y_target)

    Departures: the target is the chosen completion; the paper takes the supervised data's own
    target or the best-ranked candidate. lambda (``nll_coef``) and delta are tuned there without a
    value in the formula.
    """

    def loss(chosen: Side, rejected: Side) -> Array:
        gap = delta - chosen.logprob + rejected.logprob
        return jnp.maximum(0, gap) - nll_coef * chosen.logprob

    return pair_method(loss, lambda side: side.logprob, (), min_gap)


# ---------------------------------------------------------------- optimal transport


def quantile_shift(paired: bool) -> Transform:
    """Writes the log-ratio that optimal transport matches a completion with, as in AOT.

    Of the batch's pairs, put together by ``comparisons.best_and_worst``, sorted over the batch:

        paired    of log pi(chosen) - log pi(rejected): the reference's value of the same rank
        unpaired  of a chosen completion's log-ratio: the rejected ones' value of the same rank,
                  and of a rejected one's: the chosen ones'
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        best, worst = extremes(scores, batch)
        has_both = best.any(axis=1) & worst.any(axis=1)

        def gather(values: Array, at: Array) -> Array:
            return jnp.where(at, values, 0).sum(axis=1)

        def same_rank(values: Array, others: Array) -> Array:
            """[N, 1]: the others' value of each value's rank; groups without a pair sort last."""
            order = jnp.argsort(jnp.argsort(jnp.where(has_both, values, jnp.inf)))
            matched = jnp.sort(jnp.where(has_both, others, jnp.inf))[order]
            return jnp.expand_dims(jnp.where(has_both, matched, 0), 1)

        if paired:
            policy, ref = sums("proximal_logprobs", batch), sums("ref_logprobs", batch)
            u, v = (gather(x, best) - gather(x, worst) for x in (policy, ref))
            return scores, write(batch, "shift", same_rank(u, v))
        ratio = start_log_ratio(batch)
        high, low = gather(ratio, best), gather(ratio, worst)
        matched = jnp.where(best, same_rank(high, low), same_rank(low, high))
        return scores, write(batch, "shift", matched)

    return stateless(apply, START)


@variant(dpo, without=("loss", "label_smoothing"))
def aot(
    base: Method,
    beta: Positive,
    pairing: Annotated[str, Choice(("paired", "unpaired"))] = "paired",
) -> Method:
    """DPO on quantiles: log-ratios of the batch are sorted before they are compared.

    AOT of "Distributional Preference Alignment of LLMs via Optimal Transport" (arXiv:2406.05882)
    with the logistic loss, sums over the n pairs of the batch, x_(i) the i-th smallest:

        paired    u_i = log pi(y_w) - log pi(y_l), v_i the same under pi_ref
                  loss = -1/n sum_i log sigmoid( beta (u_(i) - v_(i)) )
        unpaired  u_i = h(y_w), v_i = h(y_l)

    Departures: who is matched with whom is decided once a step, before its first update, from
    start-of-step log-probabilities. In the unpaired form the match is held at its start-of-step
    value while each side moves, which leaves the first update's gradient as it is.
    """

    def paired(chosen: Side, rejected: Side) -> Array:
        return softplus(beta * (chosen.shift - chosen.logprob + rejected.logprob))

    def unpaired(chosen: Side, rejected: Side) -> Array:
        high = softplus(beta * (chosen.shift - chosen.log_ratio))
        low = softplus(beta * (rejected.log_ratio - rejected.shift))
        # Each match stands in both sums: the value is halved, the gradient is not.
        return high + low - jax.lax.stop_gradient(high + low) / 2

    loss = paired if pairing == "paired" else unpaired
    surrogate = pairs.pair(loss, implicit(beta), ("shift", "ref_logprobs"))
    return base.with_(surrogate=surrogate).after(quantile_shift(pairing == "paired"))


# ---------------------------------------------------------------- goals in the prompt


def nearest_to_goal() -> Transform:
    """Scores become -(goal - score)^2 where the environment recorded ``ids["goal"]`` [N], points.

    Without goals the scores stay: the best one is the goal.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        if "goal" not in batch.ids:
            return scores, batch
        goal = batch.ids["goal"].astype(jnp.float32)
        return -jnp.square(jnp.expand_dims(goal, 1) - scores), batch

    return stateless(apply)


@variant(dpo, beta=0.01)
def reward_augmented_dpo(base: Method) -> Method:
    """DPO on pairs whose prompt names the score to reach, so that the lower one can win.

    "Reward-Augmented Data Enhances Direct Preference Alignment of LLMs" (arXiv:2410.08067): of each
    pair with scores r_w > r_l, two prompts are made, one for each score as the goal g, and the
    answer nearest to the goal is preferred, R(x, g, y) = -(g - r(y))^2; y_w and y_l are in order of
    R. beta is that of the released recipes. Rows of ``data.pairs`` bring both scores
    (``chosen_score`` and ``rejected_score``), and are doubled as they are read, with the wording of
    the released code; see ``goals``. Alternatively the environment records ``ids["goal"]`` [N]
    and the scores are turned into R here. At inference the prompt names the greatest score.
    """
    return base.before(nearest_to_goal()).with_(needs=base.needs.reading("goals"))


# ---------------------------------------------------------------- siblings in a search tree


def trust_by_visits() -> Transform:
    """Writes "pair_weight", the visits of the better member among those of the pair, at least 1/2.

    Without the statistic "visits" a pair is trusted whole.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        if "visits" not in batch.stats:
            return scores, write(batch, "pair_weight", jnp.ones(()))
        visits = jnp.max(batch.stats["visits"], axis=2, where=batch.mask, initial=0)
        best, worst = (
            jnp.where(one, visits, 0).sum(axis=1, keepdims=True) for one in extremes(scores, batch)
        )
        share = jnp.maximum(best, 1) / (jnp.maximum(best, 1) + worst)
        return scores, write(batch, "pair_weight", jnp.maximum(share, 0.5))

    return stateless(apply)


@variant(dpo, without=("loss", "label_smoothing"), refresh_ref=0)
def mcts_dpo(base: Method, beta: Positive) -> Method:
    """DPO on siblings of a search tree, trusted by how often the search went through each.

    "Monte Carlo Tree Search Boosts Reasoning via Iterative Preference Learning" (arXiv:2405.00451).
    A group holds the children of one node: the prompt is the path that they share, a completion is
    a step, its reward Q; y_w is the child of the greatest Q and y_l that of the least, N visits:

        alpha = 1 / (N(y_w) / N(y_l) + 1), at most 1/2
        loss = -(1 - alpha) log sigmoid(a - b) - alpha log sigmoid(b - a)

    Visits are the statistic "visits"; without it alpha is 0. N(y_w) counts at least once, and alpha
    is held at 1/2, as in the released code. ``jrl eval --search puct --out`` writes such groups,
    for ``data.pairs``; each round of the paper is a search and a run. Departure: Q is the fraction
    of right answers behind a step, where the paper adds the policy's own estimate of it.
    """
    return base.with_(surrogate=trusted(beta)).before(trust_by_visits())


@variant(dpo)
def step_q(base: Method) -> Method:
    """DPO on actions: what it learns is the Q of an action, beta times its log-ratio.

    "Enhancing Decision-Making for LLM Agents via Step-Level Q-Value Models" (arXiv:2409.09345). A
    group holds actions that were tried at one history, their rewards the Q that a tree search in
    the environment found; the best is preferred to the worst:

        loss = -log sigmoid(a - b),   Q(s, y) = beta h(y)

    with the sum over an action's tokens and beta 0.1, as in the authors' script for WebShop (0.05
    for HotpotQA). ``jrl eval AGENT --search puct --out DIR`` makes such groups. At inference a
    policy that is not trained draws n actions and the one of the greatest Q is taken, log-ratios
    being divided by the actions' lengths as in their code: ``jrl eval RUN --search greedy --by
    ratio --width n``. Departure: the policy that draws is the one that training began with.
    """
    return base
