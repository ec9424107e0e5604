"""Rankings: a group as the documents of one query, or a completion as a list of items."""

from __future__ import annotations

from typing import Annotated

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method, against_others
from jrl.methods.definition import published, variant
from jrl.methods.domains import Choice, Count, Ddof, Flag, NonNegative, Positive, Range
from jrl.methods.group_relative import grpo
from jrl.objectives import aggregates, ratios, segments
from jrl.objectives.advantages import group_mean_std
from jrl.objectives.members import Members, last_token, over_group
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import Array, Batch, Stats, Surrogate, Transform

# ---------------------------------------------------------------- orders of a group

UTILITIES = ("ndcg", "dcg", "mrr")
"""Normalised and plain discounted cumulative gain, and the reciprocal rank of the first hit."""

SCORES = ("logprobs", "values")
"""A member's score: the mean log-probability of its tokens, or its value at the last of them."""

_FAR = -1e9
"""Stands for the score of who is not there: its exponential is 0, its differences are finite."""


def plackett_luce(scores: Array, live: Array) -> Array:
    """The log-probability of each choice of a ranking: the first out of all, and so on.

        log pi_k = s_k - log sum_{j >= k} exp(s_j)

    Args:
      scores: [G] float, in the order of the ranking.
      live: [G] bool; those that are not there stand last.

    Returns:
      [G] float32, nats; 0 where not live. Their sum is the log-probability of the ranking.

    >>> [round(x, 4) for x in plackett_luce(jnp.zeros(3), jnp.ones(3, bool)).tolist()]
    [-1.0986, -0.6931, 0.0]
    """
    chex.assert_rank([scores, live], 1)
    masked = jnp.where(live, scores, _FAR)
    return jnp.where(live, masked - jax.lax.cumlogsumexp(masked, reverse=True), 0)


def ranked(perturbed: Array, live: Array) -> Array:
    """[G] int32: the members from the greatest value down, those that are not there last.

    With Gumbel noise added to the scores this draws from the Plackett-Luce distribution.
    """
    return jnp.argsort(jnp.where(live, -perturbed, jnp.inf))


def utility_gains(kind: str, relevance: Array, live: Array, cutoff: int) -> Array:
    """The gain of each rank in the utility of a ranking.

    "dcg": relevance / log2(rank + 1); "ndcg": that over its greatest possible sum; "mrr": 1 / rank
    at the first member of positive relevance. ``relevance`` and ``live`` are [G], in the order of
    the ranking; what is below 0 counts as 0, and so do ranks past ``cutoff``.

    >>> ones = jnp.ones(3, bool)
    >>> gains = utility_gains("ndcg", jnp.array([0.0, 1.0, 0.0]), ones, 10)
    >>> [round(x, 4) for x in gains.tolist()]
    [0.0, 0.6309, 0.0]
    """
    relevance = jnp.where(live, jnp.maximum(relevance, 0), 0)
    rank = jnp.arange(1, relevance.shape[0] + 1)
    in_top = rank <= cutoff
    if kind == "mrr":
        hit = relevance > 0
        first = hit & (jnp.cumsum(hit) == 1)
        gains = jnp.where(first & in_top, 1 / rank, 0.0)
        return jnp.where(jnp.isnan(relevance), relevance, gains)
    discount = jnp.where(in_top, 1 / jnp.log2(rank + 1.0), 0)
    gains = relevance * discount
    if kind == "dcg":
        return gains
    best = (-jnp.sort(-relevance) * discount).sum()
    return jnp.where(best == 0, 0, gains / jnp.where(best == 0, 1, best))


def with_tie_breakers() -> Transform:
    """Writes each member's tie-breaker to a statistic, for surrogates that draw at random.

    24 bits of it, which float32 holds exactly.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        tie_breaker = per_token((batch.ids["tie_breaker"] & 0xFFFFFF).astype(jnp.float32), batch)
        return values, batch.with_stats(tie_breaker=tie_breaker)

    return stateless(apply)


def ranking_gradient(
    rankings: int, utility: str, cutoff: int, score: str, temperature: float, per_rank: bool
) -> Surrogate:
    """``pg_rank``'s loss over groups, for ``sequence_sum``; relevance is a member's advantage."""

    def of_group(group: Members) -> tuple[Array, Stats]:
        live, relevance = group.live, group.score
        raw = group.mean("logprobs") if score == "logprobs" else group.last("values")
        scores = (1 / temperature) * raw

        def draw(tie_breaker: Array) -> Array:
            return jax.random.gumbel(jax.random.key(tie_breaker), (rankings,))

        def one(noise: Array) -> tuple[Array, Array]:
            order = ranked(jax.lax.stop_gradient(scores) + noise, live)
            chosen = plackett_luce(scores[order], live[order])
            return chosen, utility_gains(utility, relevance[order], live[order], cutoff)

        noise = jax.vmap(draw)(group.first("tie_breaker").astype(jnp.uint32))
        chosen, gains = jax.vmap(one, in_axes=1)(noise)
        credit = gains.sum(axis=1, keepdims=True)
        if per_rank:
            credit = jnp.cumsum(gains[:, ::-1], axis=1)[:, ::-1]
        others = (credit.sum(axis=0, keepdims=True) - credit) / (rankings - 1)
        loss = -((credit - others) * chosen).sum() / rankings
        return loss, {"utility": gains.sum(axis=1).mean()}

    return over_group(of_group, {"tie_breaker", score} - {"logprobs"})


@published
def pg_rank(
    rankings: Annotated[int, Range(2, whole=True)] = 8,
    utility: Annotated[str, Choice(UTILITIES)] = "ndcg",
    cutoff: Count = 10,
    score: Annotated[str, Choice(SCORES)] = "logprobs",
    temperature: Positive = 1.0,
    per_rank: Flag = False,
    epochs: Count = 1,
) -> Method:
    """REINFORCE over rankings of a group, sampled from the scores' Plackett-Luce distribution.

    Neural PG-RANK of "Policy-Gradient Training of Language Models for Ranking" (arXiv:2310.04407):

        pi(y) = prod_k exp(s_{y_k}) / sum_{j >= k} exp(s_{y_j})
        loss = -1/M sum_i (U(y_i) - mean of U(y_j) over j != i) log pi(y_i)

    over M (``rankings``) orders y_i drawn by adding Gumbel noise to the scores and sorting. The
    members of a group are the documents of a query, their rewards the relevance. ``per_rank``
    credits each choice with the utility from its rank on. Departures: the score s is not a product
    of two encodings but, over ``temperature``, the mean log-probability of a member's tokens
    ("logprobs") or the value network's number at its last token ("values"); relevance below 0
    counts as 0; gains are linear in relevance. Not known, as no code has been released: the paper's
    M and temperature.
    """
    surrogate = ranking_gradient(rankings, utility, cutoff, score, temperature, per_rank)
    return against_others(with_tie_breakers(), surrogate, aggregates.sequence_sum, epochs=epochs)


# ---------------------------------------------------------------- items of a completion

GAINS = ("own", "tail")
"""Credit of a rank: its own relevance, or the discounted gain from it on."""

AVERAGES = ("ranks", "tokens", "batch")
"""Unit of equal weight: a completion's ranks, its tokens, or all tokens of the batch."""


def rank_advantages(
    gain: str = "own",
    *,
    average: str = "ranks",
    shaping: float = 0.1,
    eps: float = 1e-4,
    ddof: int = 1,
) -> Transform:
    """Normalised advantages of each rank, for the tokens of the item at that rank.

    With the label "item" (a token's item from 0 on; below 0 for tokens of none, which are not
    trained), reward part k is the relevance of the item of rank k, and the number of parts is the
    wanted length of the list. Without that label a completion is one item, and its score the
    relevance.

    Coefficients are those of ``rank_grpo``. ``average`` "ranks" weighs tokens so that under
    ``sequence_mean`` every item counts the same; with ``shaping`` a stop token has no other
    advantage. The label "item" becomes one for all items past the wanted length. With labels
    ``batch.rewards`` is read, not what the transform is given.
    """

    def one_group(credit: Array, members: Array) -> Array:
        return group_mean_std(credit, members, eps=eps, ddof=ddof)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        labels = batch.ids.get("item")
        relevance = jnp.expand_dims(values, 2)
        item = jnp.zeros(batch.mask.shape, jnp.int32)
        if labels is not None:
            relevance = batch.rewards * batch.reward_weights[None, None]
            item = jnp.minimum(per_token(labels, batch), relevance.shape[2])
        size = relevance.shape[2]
        ranks = jnp.arange(1, size + 1)
        if gain == "tail":
            gains = relevance / jnp.log2(ranks + 1.0)[None, None]
            relevance = jnp.cumsum(gains[:, :, ::-1], axis=2)[:, :, ::-1]
        each_rank = jax.vmap(jax.vmap(one_group, in_axes=(1, None), out_axes=1))
        by_rank = each_rank(relevance, batch.members)
        valid = (item >= 0) & (item < size)
        spread = jnp.take_along_axis(by_rank, jnp.clip(item, 0, size - 1), axis=2)
        credit = jnp.where(valid, spread, 0)
        if labels is not None:
            stop = _stop_tokens(batch)
            batch = batch.replace(mask=batch.mask & ((item >= 0) | stop))
            if shaping:
                credit = jnp.where(stop, 0, credit) + shaping * _shaping(item, stop, size, batch)
        if average == "ranks":
            credit = credit * _rank_weights(item, batch)
        return credit, batch.replace(ids={**batch.ids, "item": item})

    return stateless(apply)


@variant(grpo, clip_low=0.06, clip_high=0.08, kl_coef=0.001, eps=1e-4)
def rank_grpo(
    base: Method,
    eps: Positive,
    ddof: Ddof,
    gain: Annotated[str, Choice(GAINS)] = "own",
    average: Annotated[str, Choice(AVERAGES)] = "ranks",
    length_shaping: NonNegative = 0.1,
) -> Method:
    """GRPO with the ranks of a recommended list as its units, in reward, advantage and ratio.

    "Rank-GRPO: Training LLM-based Conversational Recommender Systems with Reinforcement Learning"
    (arXiv:2510.20150), for rank k of completion i:

        r_ik = sum_{j >= k} rel_ij / log2(j + 1)    ("tail"), or rel_ik ("own")
        A_ik = (r_ik - mean_i r_ik) / (std_i r_ik + 1e-4)
        s_ik = exp(mean over the item's tokens of log rho_t)
        loss = -mean over completions and ranks of min(s_ik A_ik, clip(s_ik, 1 +- eps) A_ik) + KL

    and ``length_shaping`` points taken from tokens of items past the wanted length N and from the
    stop token of a shorter list, and given to the stop token of a list of N items. The environment
    (``zoo.envs.ranked_list.ranked_list``) records each token's item (the label "item"), and reward
    part k is the relevance at rank k; without the label a completion is one item and its score the
    relevance. Clip bounds, KL and "own" are those of the released run and checkpoints. Departures:
    the released code averages over all tokens of the batch (``average="batch"``), not over ranks as
    the formula has it. The first stage, supervised fine-tuning on demonstrations, is ``sft``.
    """
    credit = rank_advantages(gain, average=average, shaping=length_shaping, eps=eps, ddof=ddof)
    method = base.with_(
        advantage=credit,
        ratio=ratios.segment("item"),
    )
    return method.with_(aggregate=aggregates.token_mean) if average == "batch" else method


def _stop_tokens(batch: Batch) -> Array:
    """[N, G, T] bool: the last trained token of completions that were not cut."""
    return last_token(trained(batch)) & jnp.expand_dims(~batch.truncated, 2)


def _shaping(item: Array, stop: Array, size: int, batch: Batch) -> Array:
    """[N, G, T], of -1, 0 and 1."""
    live = trained(batch)
    emitted = jnp.max(jnp.where(live, item, -1), axis=2, keepdims=True) + 1
    extra = live & (item >= size)
    exact, short = emitted == size, emitted < size
    return (stop & exact).astype(jnp.float32) - (stop & short) - extra


def _rank_weights(item: Array, batch: Batch) -> Array:
    """[N, G, T]: a completion's tokens, over its items times the tokens of the token's item."""
    live = trained(batch)
    row = jnp.arange(live.shape[0] * live.shape[1]).reshape(*live.shape[:2], 1)
    repeats = segments.count(segments.segments(live, row, item))
    share = jnp.where(live, 1 / jnp.maximum(repeats, 1), 0)
    items = share.sum(axis=2, keepdims=True)
    return share * live.sum(axis=2, keepdims=True) / jnp.maximum(items, 1)
