"""Which tokens the model's own attention marks as planning and as anchoring, and credit for them.

A ``Statistic`` over "attention" is a function of ONE sequence: (weights [H, T, L], lags [T, L],
mask [T]) -> [T]. Row t of ``weights`` is what completion token t attends to, over the columns of
the whole sequence, the last T of which are the completion; ``lags`` says how many tokens back a
column is, below 0 for what the token does not see. H counts the heads of the chosen layers.
"""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp

from jrl.errors import choose
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import Array, Batch, Statistic, Transform

RULES = ("local", "global", "coupled")
"""Amplify planning tokens, anchors, or anchors that share with the planning token before them."""


def head_spans(weights: Array, lags: Array, mask: Array) -> Array:
    """How far back each attention head looks on average: the short are local, the long global.

    Args:
      weights: [H, T, L] float32.
      lags: [T, L] int32, tokens.
      mask: [T] bool.

    Returns:
      [H] float32, tokens.
    """
    chex.assert_rank([weights, lags, mask], [3, 2, 1])
    reach = (weights * jnp.expand_dims(jnp.maximum(lags, 0), 0)).sum(axis=2)
    live = jnp.expand_dims(mask, 0)
    return jnp.where(live, reach, 0).sum(axis=1) / jnp.maximum(mask.sum(), 1)


def attention_distance(
    weights: Array, lags: Array, mask: Array, *, window: int, heads: float = 1.0
) -> Array:
    """Windowed average attention distance: how far back a token looks, capped at the window.

        WAAD_t = mean over local heads of sum_s a[t, s] min(t - s, window)

    Args:
      weights: [H, T, L] float32.
      lags: [T, L] int32, tokens.
      mask: [T] bool.
      window: tokens.
      heads: the fraction of heads, those of the shortest spans, that are local.

    Returns:
      [T] float32, tokens; 0 where not live.

    >>> weights = jnp.array([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    >>> lags = jnp.array([[0, -1, -2], [1, 0, -1], [2, 1, 0]])
    >>> attention_distance(weights, lags, jnp.ones(3, bool), window=1).tolist()
    [0.0, 0.5, 1.0]
    """
    local = _chosen_heads(head_spans(weights, lags, mask), heads)
    capped = jnp.expand_dims(jnp.clip(lags, 0, window), 0)
    return jnp.where(mask, local @ (weights * capped).sum(axis=2), 0)


def attention_influence(
    weights: Array, lags: Array, mask: Array, *, nearest: int, farthest: int, heads: float = 1.0
) -> Array:
    """Future attention influence: the mean attention that a token gets from later ones.

        FAI_s = mean over global heads, and over live t, nearest <= t - s <= farthest, of a[t, s]

    Args:
      weights: [H, T, L] float32.
      lags: [T, L] int32, tokens.
      mask: [T] bool.
      nearest: tokens, at least 1.
      farthest: tokens.
      heads: the fraction of heads, those of the longest spans, that are global.

    Returns:
      [T] float32; 0 where not live, and where no later token is in range.

    >>> weights = jnp.array([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    >>> lags = jnp.array([[0, -1, -2], [1, 0, -1], [2, 1, 0]])
    >>> every = jnp.ones(3, bool)
    >>> attention_influence(weights, lags, every, nearest=1, farthest=9).tolist()
    [0.75, 0.0, 0.0]
    """
    broad = _chosen_heads(-head_spans(weights, lags, mask), heads)
    own = weights.shape[2] - mask.shape[0]
    lags = lags[:, own:]
    later = (lags >= nearest) & (lags <= farthest) & jnp.expand_dims(mask, 1)
    paid = jnp.tensordot(broad, weights[:, :, own:], axes=1)
    total = jnp.where(later, paid, 0).sum(axis=0)
    return jnp.where(mask, total / jnp.maximum(later.sum(axis=0), 1), 0)


def rhythm_statistics(
    window: int, nearest: int, farthest: int, heads: float
) -> tuple[Statistic, Statistic]:
    """The two statistics, named "attention_distance" and "attention_influence".

    Args:
      window: tokens, as in ``attention_distance``.
      nearest: tokens, as in ``attention_influence``.
      farthest: tokens, as in ``attention_influence``.
      heads: the fraction of heads that are local, and the fraction that are global.
    """
    distance = partial(attention_distance, window=window, heads=heads)
    influence = partial(attention_influence, nearest=nearest, farthest=farthest, heads=heads)
    return (
        Statistic("attention_distance", distance, over="attention", start=True),
        Statistic("attention_influence", influence, over="attention", start=True),
    )


def amplify_rhythm(
    statistics: tuple[Statistic, Statistic],
    rule: str = "coupled",
    *,
    factor: float = 1.5,
    fraction: float = 0.4,
    reach: int = 8,
    shared: float = 0.5,
    positive_only: bool = False,
) -> Transform:
    """Multiplies the advantages of planning or anchoring tokens by up to ``factor``.

    A planning token is a local peak of the distance among the sequence's top ``fraction`` of it; an
    anchor is among the top ``fraction`` of the influence.

    Args:
      statistics: those of ``rhythm_statistics``.
      rule: of ``RULES``. "coupled": an anchor that does not plan, with a planning token at most
        ``reach`` live tokens before it that looks farther back than it does, gives ``shared`` of
        its bonus to the nearest of these.
      factor: at least 1.
      fraction: of a sequence's live tokens, rounded up, ties included.
      reach: tokens.
      shared: in [0, 1].
      positive_only: True to leave advantages below 0 as they are.

    Returns:
      A transform to [N, G, T] that brings and reads the two statistics.

    Raises:
      UserError: for another ``rule``.
    """
    if rule not in RULES:
        raise choose("rule", rule, RULES)

    def bonus(distance: Array, influence: Array, live: Array) -> Array:
        planning = _peaks(distance, live) & _top(distance, live, fraction)
        anchor = _top(influence, live, fraction)
        if rule == "local":
            return planning.astype(jnp.float32)
        if rule == "global":
            return anchor.astype(jnp.float32)
        giver, receiver = _couples(planning, anchor, distance, live, reach)
        given = anchor * jnp.where(giver, 1 - shared, 1.0)
        return given + shared * receiver

    def one(distance: Array, influence: Array, live: Array) -> Array:
        extra = 1 + (factor - 1) * bonus(distance, influence, live)
        broken = jnp.isnan(distance) | jnp.isnan(influence)
        return jnp.where(live & broken, jnp.nan, extra)

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        values, live = per_token(values, batch), trained(batch)
        read = (batch.stats["attention_distance"], batch.stats["attention_influence"])
        factors = jax.vmap(jax.vmap(one))(*read, live)
        if positive_only:
            factors = jnp.where(values < 0, 1, factors)
        return values * factors, batch

    return stateless(apply)._replace(statistics=statistics)


def _chosen_heads(spans: Array, fraction: float) -> Array:
    """[H] float32: equal weights that sum to 1 over the heads of the least spans, ties included."""
    count = max(1, round(fraction * spans.shape[0]))
    chosen = (spans <= jnp.sort(spans)[count - 1]).astype(jnp.float32)
    return chosen / jnp.maximum(chosen.sum(), 1)


def _top(values: Array, live: Array, fraction: float) -> Array:
    """[T] bool: the greatest ``fraction`` of the live values, at least one, ties included."""
    count = jnp.ceil(fraction * live.sum() - 1e-4).astype(jnp.int32)
    ordered = -jnp.sort(jnp.where(live, -values, jnp.inf))
    least = ordered[jnp.clip(count - 1, 0, values.shape[0] - 1)]
    return live & (values >= least)


def _peaks(values: Array, live: Array) -> Array:
    """[T] bool: live values not below those of the live tokens before and after."""
    at = jnp.arange(values.shape[0])
    before = jax.lax.cummax(jnp.where(live, at, -1))
    before = jnp.concatenate([jnp.full(1, -1), before[:-1]])
    end = values.shape[0]
    after = jax.lax.cummin(jnp.where(live, at, end), reverse=True)
    after = jnp.concatenate([after[1:], jnp.full(1, end)])
    held = jnp.concatenate([jnp.where(live, values, -jnp.inf), jnp.full(1, -jnp.inf)])
    return live & (values >= held[before]) & (values >= held[after])


def _couples(
    planning: Array, anchor: Array, distance: Array, live: Array, reach: int
) -> tuple[Array, Array]:
    """Which anchors share, and which planning tokens are shared with, both [T] bool."""
    order = jnp.cumsum(live)
    gap = order[:, None] - order[None, :]
    near = (gap >= 1) & (gap <= reach) & planning[None, :]
    near = near & (distance[None, :] > distance[:, None])
    near = near & (anchor & ~planning)[:, None]
    giver = near.any(axis=1)
    at = jnp.arange(live.shape[0])
    nearest = jnp.max(jnp.where(near, at[None, :], -1), axis=1)
    receiver = (giver[:, None] & (nearest[:, None] == at[None, :])).any(axis=0)
    return giver, receiver
