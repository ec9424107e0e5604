"""Which tokens the model's own attention marks as planning and as anchoring, and credit for them.

``attention_distance`` and ``attention_influence`` make the statistics from attention weights; the
transform reads them and never sees a network.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.errors import choose
from jrl.objectives.transforms import per_token, stateless, trained
from jrl.types import Array, Batch, Transform

RULES = ("local", "global", "coupled")
"""Amplify planning tokens, anchors, or anchors that share with the planning token before them."""


def head_spans(weights: Array, live: Array) -> Array:
    """How far back each attention head looks on average, by which heads are local or global.

    Args:
      weights: [H, L, L] float32, row t the weights of token t over tokens s <= t.
      live: [L] bool.

    Returns:
      [H] float32, tokens.
    """
    chex.assert_rank([weights, live], [3, 1])
    reach = jnp.where(live[None, :], (weights * _lags(live.shape[0])[None]).sum(axis=2), 0)
    return reach.sum(axis=1) / jnp.maximum(live.sum(), 1)


def attention_distance(weights: Array, live: Array, window: int) -> Array:
    """Windowed average attention distance: how far back a token looks, capped at the window.

        WAAD_t = mean over heads of sum_s a[t, s] min(t - s, window)

    Args:
      weights: [H, L, L] float32, those of local heads.
      live: [L] bool.
      window: tokens.

    Returns:
      [L] float32, tokens; 0 where not live.

    >>> weights = jnp.array([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    >>> attention_distance(weights, jnp.ones(3, bool), 1).tolist()
    [0.0, 0.5, 1.0]
    """
    chex.assert_rank([weights, live], [3, 1])
    capped = jnp.minimum(_lags(live.shape[0]), window)
    return jnp.where(live, (weights * capped[None]).sum(axis=2).mean(axis=0), 0)


def attention_influence(weights: Array, live: Array, nearest: int, farthest: int) -> Array:
    """Future attention influence: the mean attention that a token gets from later ones.

        FAI_s = mean over heads, and over live t with nearest <= t - s <= farthest, of a[t, s]

    Args:
      weights: [H, L, L] float32, those of global heads.
      live: [L] bool.
      nearest: tokens, at least 1.
      farthest: tokens.

    Returns:
      [L] float32; 0 where not live, and where no later token is in range.

    >>> weights = jnp.array([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    >>> attention_influence(weights, jnp.ones(3, bool), 1, 9).tolist()
    [0.75, 0.0, 0.0]
    """
    chex.assert_rank([weights, live], [3, 1])
    lags = _lags(live.shape[0])
    later = (lags >= nearest) & (lags <= farthest) & live[:, None]
    total = jnp.where(later, weights.mean(axis=0), 0).sum(axis=0)
    return jnp.where(live, total / jnp.maximum(later.sum(axis=0), 1), 0)


def amplify_rhythm(
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
      rule: of ``RULES``. "coupled": an anchor that does not plan, with a planning token at most
        ``reach`` live tokens before it that looks farther back than it does, gives ``shared`` of
        its bonus to the nearest of these.
      factor: at least 1.
      fraction: of a sequence's live tokens, rounded up, ties included.
      reach: tokens.
      shared: in [0, 1].
      positive_only: True to leave advantages below 0 as they are.

    Returns:
      A transform to [N, G, T] that reads "attention_distance" and "attention_influence".

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

    return stateless(apply, frozenset({"attention_distance", "attention_influence"}))


def _lags(length: int) -> Array:
    """[L, L] int32: t - s."""
    at = jnp.arange(length)
    return at[:, None] - at[None, :]


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
