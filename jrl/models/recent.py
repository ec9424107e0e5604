"""The newest entries of a cache, kept beside it and moved there a block at a time.

Where a kernel reads the cache, XLA may store it in one layout for writing and copy it to another
for reading: with every token on TPUs, a layer at a time, as compiled. A block of few columns is
cheap to copy, and the cache itself is then written once for as many tokens as the block has
columns. It is for rows that all have as many own tokens, see ``types.Cache.column``.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jrl.mesh import constrain
from jrl.models.decode import AXES, block_of, put_columns, width_of
from jrl.types import Array, Cache

COLUMNS = 64
"""Most columns of a block."""

_FEWEST = 16


def begin(cache: Cache) -> Cache:
    """An empty cache with a block beside it; as it is where its pieces have no common divisor."""
    width = math.gcd(COLUMNS, *(piece["v"].shape[2] for piece in cache.own[0]))
    if width < _FEWEST or (len(cache.own[0]) == 1 and width_of(cache.own) <= width):
        return cache

    def first(piece: dict[str, Array]) -> dict[str, Array]:
        return {n: jax.lax.slice_in_dim(x, 0, width, axis=AXES[n]) for n, x in piece.items()}

    return cache.replace(recent=tuple((first(pieces[0]),) for pieces in cache.own))


def settle(cache: Cache) -> Cache:
    """The cache with its block moved to its place, if the block is full."""
    if cache.recent is None:
        return cache
    next_one, held = block_of(cache)
    own = _moved(cache, next_one - width_of(cache.recent), (next_one > 0) & (held == 0))
    return cache.replace(own=own)


def close(cache: Cache) -> Cache:
    """The cache without a block, for rows that go on unlike each other from here."""
    if cache.recent is None:
        return cache.replace(column=None)
    start, held = block_of(cache)
    # What lies beyond the newest token is not looked at.
    return cache.replace(own=_moved(cache, start, held > 0), recent=None, column=None)


def _moved(cache: Cache, start: Array, wanted: Array) -> tuple:
    """The own arrays with the block in its place, from column ``start`` on."""
    width = width_of(cache.recent)

    def put(piece: dict[str, Array], block: dict[str, Array], first: Array) -> dict[str, Array]:
        size = piece["v"].shape[2]
        inside = wanted & (first >= 0) & (first < size)
        at = jnp.clip(first, 0, size - width)
        new = {n: put_columns(x, block[n], at, AXES[n], inside) for n, x in piece.items()}
        heads = {n: (None,) if n == "experts" else ("kv_heads", None) for n in new}
        return {n: constrain(x, "batch", *heads[n], None) for n, x in new.items()}

    layers = []
    for pieces, (block,) in zip(cache.own, cache.recent, strict=True):
        first, moved = start, []
        for piece in pieces:
            moved.append(put(piece, block, first))
            first = first - piece["v"].shape[2]
        layers.append(tuple(moved))
    return tuple(layers)
