"""Relatives of GRPO that hold the policy back in other ways; notation as in ``methods.ratios``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jrl.methods.base import CENTRED, Method, kl_penalty
from jrl.methods.curriculum import unchanged
from jrl.methods.definition import variant
from jrl.methods.domains import (
    AboveOne,
    AtLeastOne,
    Count,
    Ddof,
    Flag,
    Fraction,
    KlInReward,
    NonNegative,
    Positive,
    check_band,
)
from jrl.methods.edit import of_parts
from jrl.methods.group_relative import grpo
from jrl.methods.ratios import CLIPS, gspo
from jrl.objectives import ratios, segments, transforms
from jrl.objectives.advantages import group_mean_std
from jrl.objectives.aggregates import sequence_sum, token_mean
from jrl.objectives.corrections import Correction
from jrl.objectives.kl import LOG_RATIO_LIMIT, bounded_exp
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import Array, Batch, Rollout, Stats, Surrogate, Transform
from jrl.zoo.methods import prompt_table
from jrl.zoo.methods.group_relative import as_first, reward_parts


@variant(gspo)
def gspo_token(base: Method) -> Method:
    """GSPO whose ratio carries each token's own gradient, so that advantages may differ by token.

    GSPO-token, of the paper of ``gspo``:

        s_it = sg(s_i) pi_t / sg(pi_t)
        loss = -1/G sum_i 1/|y_i| sum_t min(s_it A_it, clip(s_it, 1 - low, 1 + high) A_it)
    """
    return base.with_(ratio=ratios.sequence_token)


@variant(gspo, clip_low=2e-3, clip_high=2.5e-3)
def luspo(base: Method) -> Method:
    """GSPO without its length bias: each completion's loss is multiplied by its length.

    "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length
    Variation in RLVR" (arXiv:2602.05261), with s_i as in GSPO:

        loss = -1/G sum_i |o_i| min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

    The factor |o_i| cancels the 1/|o_i| in the gradient of s_i; the clip bounds are section 5.1's.
    Departure: |o_i| counts trained tokens. Not known: whether the authors' code divides by a
    constant length; TRL's does not.
    """
    # Every token of a completion holds the completion's loss: their sum is its length times it.
    return base.with_(aggregate=sequence_sum)


@variant(grpo, without=(*CLIPS, "eps", "ddof"))
def aipo(base: Method, max_weight: AboveOne = 4.0) -> Method:
    """REINFORCE with importance weights truncated from above: no token loses its gradient.

    AIPO of "LlamaRL: A Distributed Asynchronous Reinforcement Learning Framework for Efficient
    Large-scale LLM Training" (arXiv:2505.24034):

        loss = -mean over tokens of sg(min(pi_t / mu_t, max_weight)) A_i log pi_t

    with A_i = r_i - mean(r) over the group. The weight corrects from mu to pi at once, without a
    proximal policy, and has no lower bound. Departure: the paper's formula sums over a completion's
    tokens. Not known: the bound of the paper's runs, which is between 2 and 10.
    """
    return base.with_(advantage=CENTRED, rule=ratios.bounded(0.0, max_weight), aggregate=token_mean)


@variant(grpo, without=("correction", "correction_cap", "correction_low"))
def decoupled_ppo(base: Method, weight_cap: AboveOne | None = None) -> Method:
    """PPO's clip around the policy at the start of the step, weighted back to who drew the token.

    The decoupled objective of "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for
    Language Reasoning" (arXiv:2505.24298), pi_prox being the policy at the start of the step:

        u_t = pi_t / pi_prox_t
        loss = -mean over tokens of pi_prox_t / mu_t min(u_t A_i, clip(u_t, 1 - low, 1 + high) A_i)

    A stale token so has the room to move that a fresh one has. ``weight_cap`` leaves out tokens
    whose weight pi_prox / mu exceeds it, as an option of the released code does. Departure: the
    paper takes the advantages of PPO without a value network.
    """
    weight = Correction("truncate", "token", 0.0, math.inf)
    if weight_cap is not None:
        weight = Correction("mask", "token", 0.0, weight_cap)
    return base.with_(correction=weight, aggregate=token_mean)


@variant(grpo, without=CLIPS)
def sapo_soft(
    base: Method, temperature_positive: Positive = 1.0, temperature_negative: Positive = 1.05
) -> Method:
    """GRPO with a sigmoid of the ratio in place of the clip. SAPO; another paper has that name too.

    "Soft Adaptive Policy Optimization" (arXiv:2511.20347):

        loss = -1/G sum_i 1/|o_i| sum_t (4 / tau_i) sigmoid(tau_i (rho_t - 1)) A_i

    with tau_i by the sign of A_i, at the paper's values.
    """
    return base.with_(rule=ratios.gate(temperature_positive, temperature_negative))


def gamma(
    power_positive: float, rate_positive: float, power_negative: float, rate_negative: float
) -> ratios.Rule:
    """``vespo``'s weight of the ratio of a whole sequence, 1 for a ratio of 1.

    An advantage of 0 counts as positive; log r is held between log 1e-8 and 20 nats, as in TRL.
    """

    def function(log_ratio: Array, advantages: Array, *_: Any) -> tuple[Array, Stats]:
        # TRL's bounds, so that both libraries give the same weights at the extremes.
        log_weight = jnp.clip(log_ratio, jnp.log(1e-8), LOG_RATIO_LIMIT)
        power = jnp.where(advantages < 0, power_negative, power_positive)
        rate = jnp.where(advantages < 0, rate_negative, rate_positive)
        # In logarithms: r^k itself would overflow for long sequences.
        phi = jnp.exp(power * log_weight + rate * (1 - jnp.exp(log_weight)))
        return phi, {"sequence_weight": phi}

    return ratios.weight(function)


@variant(grpo, without=CLIPS)
def vespo(
    base: Method,
    power_positive: NonNegative = 2.0,
    rate_positive: Positive = 3.0,
    power_negative: NonNegative = 3.0,
    rate_negative: Positive = 2.0,
) -> Method:
    """REINFORCE weighted by a smooth kernel of the completion's importance weight.

    "VESPO: Variational Sequence-level Soft Policy Optimization for Off-Policy LLM Training"
    (arXiv:2602.10693):

        W_i = prod_t rho_t,  phi(W) = W^k exp(lambda (1 - W))
        loss = -1/(sum_i |o_i|) sum_i sum_t sg(phi(W_i)) A_i log pi_t

    with k (``power``) and lambda (``rate``) by the sign of A_i. The exponents, the token mean and
    the clamp of log W, from log 1e-8 to 20, are the released code's. Departure: W is against the
    distribution that drew the tokens, so that no further correction is needed.
    """
    rule = gamma(power_positive, rate_positive, power_negative, rate_negative)
    return base.with_(ratio=ratios.product, rule=rule, aggregate=token_mean)


def near(kind: str, limit_low: float, limit_high: float, cap: float) -> ratios.Rule:
    """``weight`` min(r, cap), and 0 for tokens whose probability has moved too far.

    The rule of ``dppo_tv``: with p the token's current probability and q the sampler's, a token is
    dropped if p went UP with a positive advantage, or down with a non-positive one, by a divergence
    above the limit.

    Args:
      kind: "tv" |p - q|, or "kl" that of (q, 1 - q) from (p, 1 - p), nats.
      limit_low: of the divergence, where the advantage is not positive.
      limit_high: of the divergence, where it is positive.
      cap: greatest weight.
    """

    def function(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
        logprobs = jax.lax.stop_gradient(stats["logprobs"])
        # Rounding may put a log-probability above 0, where there is no binary distribution.
        now = jnp.exp(jnp.minimum(logprobs, 0))
        then = jnp.exp(jnp.minimum(logprobs - log_ratio, 0))
        if kind == "tv":
            divergence = jnp.abs(now - then)
        else:
            rest = jnp.log((1 - then + 1e-8) / (1 - now + 1e-8))
            divergence = -then * log_ratio + (1 - then) * rest
        # Only a move in the direction of the advantage is dropped: the way back stays open.
        up = (advantages > 0) & (now > then) & (divergence > limit_high)
        down = (advantages <= 0) & (now < then) & (divergence > limit_low)
        weights = jnp.where(up | down, 0, jnp.minimum(bounded_exp(log_ratio), cap))
        return weights, {"dropped_high": up, "dropped_low": down}

    return ratios.weight(function)


@variant(grpo, without=CLIPS)
def dppo_tv(
    base: Method,
    limit_low: NonNegative = 0.15,
    limit_high: NonNegative = 0.15,
    weight_cap: AtLeastOne = 20.0,
) -> Method:
    """GRPO that drops a token when its probability has moved too far, not its ratio.

    DPPO-Binary-TV of "Rethinking the Trust Region in LLM Reinforcement Learning"
    (arXiv:2602.04879), with p_t the token's probability and q_t that at which it was drawn:

        loss = -1/(sum_i |o_i|) sum_i sum_t keep_t sg(min(rho_t, cap)) A_i log pi_t

    where keep_t is 0 if |p_t - q_t| exceeds the limit in the direction in which A_i pushes. The
    limits here and in ``dppo_kl`` are those of the authors' example for verl, and so is the loss;
    the cap is the default of its function, where the example has 10,000. Departures: GRPO's
    advantages and the token mean; that example does not divide by the deviation, and divides sums
    by a constant length as ``dr_grpo`` does.
    """
    rule = near("tv", limit_low, limit_high, weight_cap)
    return base.with_(rule=rule, aggregate=token_mean)


@variant(dppo_tv, limit_low=0.05, limit_high=0.05)
def dppo_kl(
    base: Method, limit_low: NonNegative, limit_high: NonNegative, weight_cap: AtLeastOne
) -> Method:
    """``dppo_tv`` with the divergence KL((q, 1 - q) || (p, 1 - p)) of the sampled token, in nats.

    DPPO-Binary-KL, of the paper of ``dppo_tv``, with its departures.
    """
    return base.with_(rule=near("kl", limit_low, limit_high, weight_cap))


# ---------------------------------------------------------------- DCPO


def dynamic_bounds(logprobs: Array, low: float, high: float) -> tuple[Array, Array]:
    """The least and greatest ratio [T] of tokens, from their old log-probabilities; see ``dcpo``.

    >>> low, high = dynamic_bounds(jnp.log(jnp.array([0.01, 0.9])), 0.16, 0.2)
    >>> [round(x, 3) for x in (*low.tolist(), *high.tolist())]
    [0.5, 0.769, 5.0, 1.187]
    """
    rarity = bounded_exp(-jnp.minimum(logprobs, 0))
    below = 0.5 + 0.5 * jnp.sqrt(jnp.maximum(1 - 4 * low * rarity, 0))
    return below, 0.5 + 0.5 * jnp.sqrt(1 + 4 * high * rarity)


def dynamic_clip(low: float, high: float, most: float) -> ratios.Rule:
    """PPO's clip within ``dynamic_bounds``, no ratio counting above ``most`` on either side."""

    def apply(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> tuple:
        old = jax.lax.stop_gradient(stats["logprobs"] - log_ratio)
        least, greatest = dynamic_bounds(old, low, high)
        clip = ratios.clip_between(lambda _: (least, jnp.minimum(greatest, most)), most)
        return clip.apply(log_ratio, advantages, mask, stats)

    return ratios.Rule(apply)


BLANK = {"visits": 0.0, "count": 0.0, "mean": 0.0, "squares": 0.0}
"""Table entry of a new prompt: visits; scores so far, their mean (points) and the
sum of their squared deviations from it (squared points)."""


def smoothed_standard(slots: int, eps: float = 1e-6, ddof: int = 1) -> Transform:
    """The group's standard score blended with that among all visits of the prompt; see ``dcpo``.

    Args:
      slots: prompts that are remembered; see ``prompt_table``.
      eps: points, added to each deviation.
      ddof: 1 for the sample's deviations.

    Returns:
      A transform [N, G] -> [N, G]. Without ``ids["prompt"]`` every visit is the first.
    """

    def standard(scores: Array, members: Array) -> Array:
        return group_mean_std(scores, members, eps=eps, ddof=ddof)

    def apply(values: Array, batch: Batch, table: prompt_table.PromptTable) -> tuple:
        now = jax.vmap(standard)(values, batch.members)
        ids = batch.ids.get("prompt")
        if ids is None:
            return now, batch, table
        before = prompt_table.read(table, ids, BLANK)
        statistics = _with_these(values, batch.members, ids, before)
        spread = jnp.sqrt(statistics["squares"] / jnp.maximum(statistics["count"] - ddof, 1))
        ever = (values - statistics["mean"][:, None]) / (spread[:, None] + eps)
        ever = jnp.where(batch.members, ever, 0)
        visit = jnp.maximum(statistics["visits"], 1)[:, None]
        mostly_now = ((visit - 1) * now + ever) / visit
        mostly_ever = (now + (visit - 1) * ever) / visit
        nearer = jnp.abs(mostly_now) < jnp.abs(mostly_ever)
        table = prompt_table.write(table, ids, statistics, batch.members.any(axis=1))
        return jnp.where(nearer, mostly_now, mostly_ever), batch, table

    return Transform(init=lambda: prompt_table.empty(slots, BLANK), apply=apply)


def _with_these(values: Array, members: Array, ids: Array, before: dict) -> dict:
    """The running statistics of each prompt, updated with the batch's scores; [N] each.

    Rows of one prompt are counted together and get the same numbers.
    """
    seg = segments.segments(members, jnp.broadcast_to(ids[:, None], members.shape))
    mean = segments.mean(values, seg)
    squares = segments.total(jnp.square(segments.centred(values, seg)), seg)
    # All live members of a row hold the same numbers; a row without one is not written.
    count, mean, squares = (
        jnp.max(x, axis=1, where=members, initial=-jnp.inf)
        for x in (segments.count(seg), mean, squares)
    )
    visited = members.any(axis=1)
    count, mean, squares = (jnp.where(visited, x, 0) for x in (count, mean, squares))
    total = before["count"] + count
    # The parallel form of Welford's update: exact when the two means are equal.
    step = mean - before["mean"]
    share = count / jnp.maximum(total, 1)
    return {
        "visits": before["visits"] + visited,
        "count": total,
        "mean": before["mean"] + step * share,
        "squares": before["squares"] + squares + jnp.square(step) * before["count"] * share,
    }


def sum_of_means(surrogate: Surrogate) -> Surrogate:
    """A surrogate over groups: the sum over members of the mean of each one's token losses.

    Use it with ``sequence_sum``, whose rows are then groups: nothing is divided by their size.
    """

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        losses, metrics = jax.vmap(surrogate.apply)(stats, advantages, mask)
        # Divided here, where a row is one member; the aggregate only sees groups.
        return losses / jnp.maximum(mask.sum(axis=1, keepdims=True), 1), metrics

    return surrogate._replace(apply=apply, over="group", parts=None)


@variant(grpo, without=("dual_clip",), clip_low=0.16, clip_high=0.2)
def dcpo(
    base: Method,
    clip_low: NonNegative,
    clip_high: NonNegative,
    eps: Positive,
    ddof: Ddof,
    most: AtLeastOne = 10.0,
    slots: Count = 65536,
) -> Method:
    """Bounds that open for unlikely tokens, and advantages that remember the prompt's history.

    "DCPO: Dynamic Clipping Policy Optimization" (arXiv:2509.02333). The ratio of a token of old
    probability q is held between

        0.5 + 0.5 sqrt(max(1 - 4 low / q, 0))   and   0.5 + 0.5 sqrt(1 + 4 high / q)

    where |(rho - 1) rho q| is within low below 1 and within high above it, and to at most 10
    (``most``), also where A < 0. At the i-th visit of a prompt, with S the
    group's standard score and H the standard score among all scores that the prompt ever had, these
    ones included, A is whichever of ((i-1) S + H) / i and (S + (i-1) H) / i is nearer to 0. The
    loss of a prompt is the SUM over its completions of each one's mean over tokens.

    Departures: the mean over prompts is taken. ``slots`` prompts are remembered, by their id modulo
    that number; a prompt that takes another's place starts anew. The deviation over all scores is
    that of the pooled scores, where the released code blends the visits' variances; its script runs
    the bounds 0.2 and 0.28.
    """
    base = base.with_(rule=dynamic_clip(clip_low, clip_high, most))
    return base.with_(
        advantage=smoothed_standard(slots, eps, ddof),
        surrogate=sum_of_means(base.objective.surrogate),
        aggregate=sequence_sum,
    )


# ---------------------------------------------------------------- tokens held back by covariance


def drop_covariant(fraction: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Transform:
    """Zeroes the advantage of a few random tokens of covariance between the bounds.

    They still count in the loss's mean. The draw follows the ids "tie_breaker"; ``fraction`` is of
    the trained tokens.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        values, covariance = _covariance(values, batch)
        open_to = trained(batch) & (covariance > low) & (covariance < high)
        chosen = _first(jnp.zeros_like(covariance), open_to, fraction, batch)
        return jnp.where(chosen, 0, values), batch

    return stateless(apply, frozenset({"proximal_logprobs"}))


def mark_covariant(fraction: float = 2e-4) -> Transform:
    """Writes the statistic "marked", 1 at the tokens of the largest covariance, 0 elsewhere."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        values, covariance = _covariance(values, batch)
        chosen = _first(-covariance, trained(batch), fraction, batch)
        marks = chosen.astype(jnp.float32)
        return values, batch.with_stats(marked=marks)

    return stateless(apply, frozenset({"proximal_logprobs"}))


def _covariance(values: Array, batch: Batch) -> tuple[Array, Array]:
    """The advantages [N, G, T] and the covariance term of each token, 0 where not trained."""
    live = trained(batch)
    count = jnp.maximum(live.sum(), 1)
    values = jnp.where(live, per_token(values, batch), 0)
    logprobs = jnp.where(live, batch.stats["proximal_logprobs"], 0)
    product = (values - values.sum() / count) * (logprobs - logprobs.sum() / count)
    return values, jnp.where(live, product, 0)


def _first(order: Array, open_to: Array, fraction: float, batch: Batch) -> Array:
    """[N, G, T] bool: the open tokens of smallest ``order``, a fraction of all trained tokens."""
    count = jnp.maximum(jnp.floor(fraction * trained(batch).sum()), 1)
    keys = (_token_tie_breakers(batch).reshape(-1), order.reshape(-1), ~open_to.reshape(-1))
    ranks = jnp.argsort(jnp.lexsort(keys)).reshape(order.shape)
    return open_to & (ranks < count)


def _token_tie_breakers(batch: Batch) -> Array:
    """[N, G, T] uint32: a random number of each token, from its member and its place."""
    members = batch.members
    default = jnp.arange(members.size).reshape(members.shape)
    tie_breakers = jnp.expand_dims(batch.ids.get("tie_breaker", default), 2).astype(jnp.uint32)
    columns = jnp.arange(batch.mask.shape[2], dtype=jnp.uint32)[None, None]
    # The tie-breaker is random; mixing the place into its bits (MurmurHash3's last rounds) is
    # enough.
    bits = tie_breakers ^ (columns * jnp.uint32(0x9E3779B9))
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


@variant(grpo, clip_low=1.0, clip_high=1.0)
def clip_cov(
    base: Method,
    fraction: Fraction = 2e-4,
    covariance_low: NonNegative = 1.0,
    covariance_high: Positive = 5.0,
) -> Method:
    """GRPO that takes the gradient away from a few random tokens of high covariance.

    Clip-Cov of "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
    (arXiv:2505.22617): the entropy falls where advantage and log-probability vary together.

        C_t = (A_t - mean A) (log pi_t - mean log pi)        means over the batch's tokens
        loss = -mean over tokens of min(rho_t A_t, clip(rho_t, 0, 2) A_t), 0 at the chosen tokens

    with the bounds of the released scripts, which also draw groups without a difference anew. The
    chosen ones are ``fraction`` of all tokens, at least one, drawn from those whose C_t lies
    between the bounds. Departure: pi is the policy at the start of the training step and the choice
    is made once a step, where the authors' code makes it anew for each minibatch and leaves out
    tokens that the ratio clip already holds.
    """
    check_band(covariance_low=covariance_low, covariance_high=covariance_high)
    choose = drop_covariant(fraction, covariance_low, covariance_high)
    return base.after(choose).with_(aggregate=token_mean)


def free_but(mark: str, coef: float) -> ratios.Rule:
    """``free`` with ``coef`` |log r| added at the tokens where the statistic ``mark`` is 1.

    The loss of ``kl_cov``.
    """

    def apply(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
        losses, metrics = ratios.free.apply(log_ratio, advantages, mask, stats)
        # On-policy the penalty's slope is 0 by choice: JAX would take that of one side.
        distance = jnp.where(log_ratio == 0, 0, jnp.abs(log_ratio))
        return losses + coef * stats[mark] * distance, {**metrics, "marked": stats[mark]}

    return ratios.Rule(apply, frozenset({mark}))


@variant(grpo, without=CLIPS)
def kl_cov(base: Method, fraction: Fraction = 2e-4, penalty: NonNegative = 1.0) -> Method:
    """The unclipped ratio loss with a penalty on the movement of the tokens of highest covariance.

    KL-Cov, of the paper of ``clip_cov``:

        loss = -mean over tokens of [rho_t A_t - penalty |log rho_t| at the chosen tokens]

    which are the ``fraction`` of all tokens, at least one, with the largest C_t (see ``clip_cov``,
    also for the departure). 2e-4 is the released value for 32B; for 7B it is 2e-3.
    """
    rule = free_but("marked", penalty)
    return base.after(mark_covariant(fraction)).with_(rule=rule, aggregate=token_mean)


# ---------------------------------------------------------------- StableReinforce


def clamped(limit: float) -> ratios.Ratio:
    """Each token's ratio within [1 / limit, limit]; beyond it the token has no gradient.

    The Pre-CLIP of ``stable_reinforce``: PPO's clip leaves the loss of a negative advantage
    unbounded. ``limit`` is above 1.
    """

    def apply(log_ratio: Array, advantages: Array, mask: Array, stats: Stats) -> Any:
        # In logarithms, where an overflow of exp cannot happen.
        log_limit = jnp.minimum(jnp.log(limit), LOG_RATIO_LIMIT)
        beyond = jnp.abs(log_ratio) > log_limit
        return jnp.clip(log_ratio, -log_limit, log_limit), {"preclip_fraction": beyond}

    return ratios.Ratio(apply)


def drop_outliers(limit: float = 3.0) -> Transform:
    """Sets advantages beyond ``limit`` deviations on either side to 0; a NaN stays.

    >>> drop_outliers().apply(jnp.array([[-4.0, -3.0, 2.0]]), None, ())[0].tolist()
    [[0.0, -3.0, 2.0]]
    """
    return stateless(lambda values, batch: (jnp.where(abs(values) > limit, 0, values), batch))


COMPOSED = "result", "consistency", "format"
"""Reward parts of ``consistent_rewards``, in order."""


def consistent_rewards(parts: Array, rollout: Rollout) -> Array:
    """Right answers count half as much again when the reasoning agrees, and form adds one half.

    >>> consistent_rewards(jnp.ones((1, 1, 3)), None).tolist()
    [[[2.0, 0.0, 0.0]]]
    """
    result, consistency, form = reward_parts("stable_reinforce.composed", parts, COMPOSED)
    return as_first(result * (1 + 0.5 * consistency) + 0.5 * form, parts)


@variant(grpo, without=("eps", "ddof", "kl_coef", "kl_kind"))
def stable_reinforce(
    base: Method,
    sigmas: Positive = 3.0,
    ratio_limit: AboveOne = 1e3,
    composed: Flag = False,
    kl_coef: NonNegative = 0.0,
    kl_kind: KlInReward = "k1",
) -> Method:
    """REINFORCE++ with bounded log-ratios and without outlying advantages.

    StableReinforce of "R1-Reward: Training Multimodal Reward Model Through Stable Reinforcement
    Learning" (arXiv:2505.02835):

        A = (r - mean) / std over the batch, 0 where |A| > 3
        rho_t = exp(clip(log pi_t - log mu_t, -log 1000, log 1000))
        loss = -mean over completions of their mean of min(rho_t A, clip(rho_t, 1 - e, 1 + e) A)

    with the reward, where ``composed``, made of three parts in this order: result (1 + 0.5
    consistency) + 0.5 format, a judge giving the consistency (-1, 1, or 0 where it fails); the
    first part's weight then weighs the whole. Bounds and composition are the released code's.

    Departures: that code charges 0.001 of the divergence k1 from a reference at each token and
    normalises the returns to go over the batch's tokens; here ``kl_coef`` is off unless given, then
    charged to the completion's reward, and the normalisation is over completions. By a slip its
    window of 3 lies around the mean from before the normalisation.
    """
    steps = (transforms.whiten("sequences"), drop_outliers(sigmas))
    return base.with_(
        advantage=transforms.chain(*kl_penalty(kl_kind, kl_coef, "sequence"), *steps),
        ratio=clamped(ratio_limit),
        rewards=of_parts(consistent_rewards) if composed else unchanged,
        parts=COMPOSED if composed else (),
        group=1,
    )
