"""Rows of a network's cache: sharing, gathering and replacing prefixes.

Everything here treats the arrays of a cache as rows of opaque numbers, so that it holds for every
network. Nothing copies a prefix for each of the rows that share it, except ``take``, for rows in
any order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.types import Array, Cache, Network

_PIECE, _MOST_PIECES = 64, 8
"""Least tokens in a piece of the cache and most pieces; every piece is a few operations more."""


def pieces_of(max_new_tokens: int) -> int:
    """Pieces that the cache of completions is kept in: those not reached yet are not read."""
    # Each piece is a branch of the step: more of them save fewer reads than the branches cost.
    return min(max(max_new_tokens // _PIECE, 1), _MOST_PIECES)


def share(
    cache: Cache,
    lengths: Array,
    members: int,
    *,
    network: Network,
    weights: Any,
    length: int,
) -> Cache:
    """Rows that continue the rows of another cache, ``members`` of them each, without copying it.

    Args:
      cache: M rows without prefixes of their own.
      lengths: [M] int32, how many tokens of each row count.
      members: rows that share a prefix.
      network: the policy.
      weights: as ``network.prepare`` returns them.
      length: tokens that each new row has room for.

    Returns:
      M * members rows.
    """
    assert cache.prefix is None, "a shared past is stored once, not on top of another"
    # Only the new rows' own columns are allocated; the prefix is the other cache itself.
    rows = lengths.shape[0] * members
    empty = network.init_cache(rows, length, weights, pieces_of(length))
    return Cache(rows=empty.rows, prefix=cache.rows, prefix_lengths=lengths.astype(jnp.int32))


def rows_of(cache: Cache, rows: Array) -> Cache:
    """The rows of a cache without prefixes, in this order."""
    assert cache.prefix is None
    return Cache(rows=pick(cache.rows, rows))


def pick(tree: Any, rows: Array) -> Any:
    """Gathers rows of all arrays of a tree; indices are clamped."""
    # Clipped: the default fills with NaN, a comparison and a select on the whole cache.
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), tree)


def take(cache: Cache, source: Array) -> Cache:
    """Row i continues row ``source[i]``; prefixes are copied, since any rows may be neighbours."""
    pieces = pick(cache.rows, source)
    if cache.prefix is None:
        return cache.replace(rows=pieces)
    assert cache.prefix_lengths is not None
    rows = jax.tree.leaves(cache.rows)[0].shape[0]
    # Each row takes its block's prefix along, since the rows of a new block may come from several.
    blocks = source // (rows // cache.prefix_lengths.shape[0])
    return cache.replace(
        rows=pieces,
        prefix=pick(cache.prefix, blocks),
        prefix_lengths=jnp.take(cache.prefix_lengths, blocks),
    )


def put_prefixes(cache: Cache, blocks: Array, other: Cache, lengths: Array) -> Cache:
    """The cache with new prefixes in some blocks of rows, whose own entries are dropped.

    Args:
      cache: M blocks; donate it to a jitted call.
      blocks: [m] int32, which blocks; M or more for a row of ``other`` that goes nowhere.
      other: m rows without prefixes, no longer than the prefixes of ``cache``.
      lengths: [m] int32, tokens of each that count.
    """
    assert cache.prefix_lengths is not None

    def put(old: Array, new: Array) -> Array:
        # A narrower prompt fills the front; what stays after it is past its length.
        index = (blocks, *(slice(0, n) for n in new.shape[1:]))
        # Dropped, not clamped: an unused row must not overwrite the last block's prompt.
        return old.at[index].set(new.astype(old.dtype), mode="drop")

    return cache.replace(
        prefix=jax.tree.map(put, cache.prefix, other.rows),
        prefix_lengths=cache.prefix_lengths.at[blocks].set(lengths, mode="drop"),
    )
