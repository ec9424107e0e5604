"""Credit for lists: a completion is a list of items, and each rank is compared across the group."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.errors import choose
from jrl.objectives import segments
from jrl.objectives.advantages import group_mean_std
from jrl.objectives.surrogates import clipped_ratio
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import Array, Batch, Stats, Surrogate, Transform

GAINS = ("tail", "own")
"""What a rank is credited with: the discounted gain from it on, or its own relevance."""

AVERAGES = ("ranks", "tokens")
"""What weighs the same in a completion's mean loss."""


def rank_advantages(
    gain: str = "tail", *, average: str = "ranks", shaping: float = 0.1, eps: float = 1e-4
) -> Transform:
    """Normalised advantages of each rank, for the tokens of the item that stands there.

    With the label "item" (a token's item from 0 on; below 0 for tokens of none, which are not
    trained), reward part k is the relevance of the item of rank k, and the number of parts is the
    wanted length of the list. Without that label a completion is one item, and its score the
    relevance.

    Args:
      gain: "tail" credits rank k with sum over j >= k of relevance_j / log2(j + 1), ranks counted
        from 1; "own" with relevance_k.
      average: "ranks" weighs tokens so that under ``sequence_mean`` every item counts the same.
      shaping: points, added to the advantages of whole lists: minus it for tokens of items past
        the wanted length, plus it for the stop token of a list of the wanted length, minus it for
        that of a shorter one; a stop token then has no other advantage. 0, or no labels, for none.
      eps: points, added to the deviation over the group, which is the sample's.

    Returns:
      A transform [N, G] -> [N, G, T] that writes the statistic "item"; all items past the wanted
      length are one. With labels it reads ``batch.rewards``, not what it is given.

    Raises:
      UserError: for another ``gain`` or ``average``.
    """
    if gain not in GAINS:
        raise choose("gain", gain, GAINS)
    if average not in AVERAGES:
        raise choose("average", average, AVERAGES)

    def one_group(credit: Array, members: Array) -> Array:
        return group_mean_std(credit, members, eps=eps)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        labels = batch.ids.get("item")
        relevance = jnp.expand_dims(values, 2)
        item = jnp.zeros(batch.mask.shape, jnp.int32)
        if labels is not None:
            relevance = batch.rewards * batch.reward_weights[None, None]
            item = jnp.minimum(per_token(labels, batch), relevance.shape[2])
        wanted = relevance.shape[2]
        ranks = jnp.arange(1, wanted + 1)
        if gain == "tail":
            gains = relevance / jnp.log2(ranks + 1.0)[None, None]
            relevance = jnp.cumsum(gains[:, :, ::-1], axis=2)[:, :, ::-1]
        each_rank = jax.vmap(jax.vmap(one_group, in_axes=(1, None), out_axes=1))
        by_rank = each_rank(relevance, batch.members)
        listed = (item >= 0) & (item < wanted)
        spread = jnp.take_along_axis(by_rank, jnp.clip(item, 0, wanted - 1), axis=2)
        credit = jnp.where(listed, spread, 0)
        if labels is not None:
            stop = _stop_tokens(batch)
            batch = batch.replace(mask=batch.mask & ((item >= 0) | stop))
            if shaping:
                credit = jnp.where(stop, 0, credit) + shaping * _shaping(item, stop, wanted, batch)
        if average == "ranks":
            credit = credit * _rank_weights(item, batch)
        stats = {**batch.stats, "item": item.astype(jnp.float32)}
        return credit, batch.replace(stats=stats)

    return stateless(apply)


def clipped_item_ratio(clip_low: float = 0.2, clip_high: float = 0.2) -> Surrogate:
    """The clipped surrogate with one ratio for each item, the geometric mean of its tokens'.

        s_k = exp(mean over tokens of item k of log rho_t)
        loss_t = -min(s_k A_t, clip(s_k, 1 - clip_low, 1 + clip_high) A_t)

    Args:
      clip_low: how far below 1 the ratio counts, at least 0.
      clip_high: how far above 1 the ratio counts, at least 0.

    Returns:
      A surrogate that reads the statistic "item", the number of each token's item.
    """
    clipped = clipped_ratio(clip_low, clip_high)

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        chex.assert_rank([advantages, mask], 1)
        item = stats["item"]
        same = (jnp.expand_dims(item, 0) == jnp.expand_dims(item, 1)) & jnp.expand_dims(mask, 0)
        log_ratio = jnp.where(mask, stats["logprobs"] - stats["sampler_logprobs"], 0)
        total = jnp.where(same, jnp.expand_dims(log_ratio, 0), 0).sum(axis=1)
        mean = total / jnp.maximum(same.sum(axis=1), 1)
        shown = {"logprobs": mean, "sampler_logprobs": jnp.zeros_like(mean)}
        return clipped.apply(shown, advantages, mask)

    return Surrogate(apply, frozenset({"sampler_logprobs", "item"}))


def _stop_tokens(batch: Batch) -> Array:
    """[N, G, T] bool: the last trained token of completions that were not cut."""
    live = trained(batch)
    after = jnp.cumsum(live[:, :, ::-1], axis=2)[:, :, ::-1]
    return live & (after == 1) & jnp.expand_dims(~batch.truncated, 2)


def _shaping(item: Array, stop: Array, wanted: int, batch: Batch) -> Array:
    """[N, G, T], of -1, 0 and 1."""
    live = trained(batch)
    emitted = jnp.max(jnp.where(live, item, -1), axis=2, keepdims=True) + 1
    past = live & (item >= wanted)
    exact, short = emitted == wanted, emitted < wanted
    return (stop & exact).astype(jnp.float32) - (stop & short) - past


def _rank_weights(item: Array, batch: Batch) -> Array:
    """[N, G, T]: a completion's tokens, over its items times the tokens of the token's item."""
    live = trained(batch)
    row = jnp.arange(live.shape[0] * live.shape[1]).reshape(*live.shape[:2], 1)
    own = segments.count(segments.segments(live, row, item))
    share = jnp.where(live, 1 / jnp.maximum(own, 1), 0)
    items = share.sum(axis=2, keepdims=True)
    return share * live.sum(axis=2, keepdims=True) / jnp.maximum(items, 1)
