"""A cache for networks that have no keys and values to keep: the tokens, run through again.

Every step runs the network over everything so far. It is exact and slow; a network that can do
better brings ``init_cache`` and ``extend`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax.numpy as jnp

from jrl.types import Array, Cache, Params


def init_cache(rows: int, length: int, weights: Params, pieces: int = 1) -> Cache:
    """An empty cache: "tokens" [rows, length] int32 and "live" [rows, length] bool."""
    del weights, pieces
    tokens = jnp.zeros((rows, length), jnp.int32)
    return Cache(rows={"tokens": tokens, "live": jnp.zeros((rows, length), bool)})


def extend(
    weights: Params,
    cache: Cache,
    tokens: Array,
    positions: Array,
    live: Array,
    *,
    hidden: Callable[..., tuple[Array, dict[str, Array]]],
) -> tuple[Array, Cache]:
    """``types.Network.extend`` from a network's ``hidden``."""
    chex.assert_equal_shape([tokens, positions, live])
    rows, length = cache.rows["tokens"].shape
    offsets = cache.offsets()[:, None]
    column = positions - offsets
    at = (jnp.arange(rows)[:, None], jnp.where(live & (column >= 0), column, length))
    tail = {
        "tokens": cache.rows["tokens"].at[at].set(tokens, mode="drop"),
        "live": cache.rows["live"].at[at].set(True, mode="drop"),
    }
    prefix = _past(cache, rows)
    width = prefix["tokens"].shape[1]
    sequence = {name: jnp.concatenate([prefix[name], tail[name]], axis=1) for name in tail}
    place = jnp.arange(width + length, dtype=jnp.int32)[None]
    place = jnp.where(place < width, place, place - width + offsets)
    out, _ = hidden(weights, sequence["tokens"], place, sequence["live"].astype(jnp.int32))
    columns = jnp.clip(width + column, 0, width + length - 1)[:, :, None]
    return jnp.take_along_axis(out, columns, axis=1), cache.replace(rows=tail)


def _past(cache: Cache, rows: int) -> dict[str, Array]:
    """The tokens of each row's prefix [S, P], live where they count; P is 0 without prefixes."""
    if cache.prefix is None:
        return {"tokens": jnp.zeros((rows, 0), jnp.int32), "live": jnp.zeros((rows, 0), bool)}
    tokens = cache.prefix["tokens"]
    prefix = jnp.repeat(tokens, rows // tokens.shape[0], axis=0)
    return {"tokens": prefix, "live": jnp.arange(prefix.shape[1])[None] < cache.offsets()[:, None]}
