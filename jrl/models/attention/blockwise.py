"""A kernel of attention in plain JAX: block by block, on any platform, in any order of columns.

Memory grows with the length and not with its square. Queries are ``[B, H, Q, h]`` and keys and
values ``[B, K, C, h]``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.models.attention.dense import MASKED
from jrl.models.attention.flash import Kernel, Marks, Place
from jrl.models.matmul import matmul
from jrl.types import Array

BLOCK = 512
"""Queries, and keys, of a block. Scores of a block stay near the processor."""

_FAR = 2**29


def blockwise(*, scale: float, softcap: float | None, block: int = BLOCK) -> Kernel:
    """A place looked at block by block, in any order of columns, on any platform.

    Blocks of queries and keys that cannot see each other are skipped.

    Args:
      scale: what scores are multiplied by.
      softcap: scores become cap * tanh(score / cap).
      block: most queries, and keys, of a block.
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "block": block}
    return Kernel(
        functools.partial(_blocks_forward, **options),
        functools.partial(_blocks_backward, **options),
    )


class _Blocks(NamedTuple):
    """A place cut into blocks along new leading axes: I of queries, J of keys.

    Attributes:
      q: [I, B, K, H / K, q, h].
      k: [J, B, K, c, h].
      v: [J, B, K, c, h].
      queries: of [I, B, q].
      keys: of [J, B, c].
      pairs: [I * J] int32, the blocks that may see each other, as i * J + j, in that order.
      needed: [] int32, how many of them count.
    """

    q: Array
    k: Array
    v: Array
    queries: Marks
    keys: Marks
    pairs: Array
    needed: Array


def _cut(x: Array, axis: int, size: int) -> Array:
    """Blocks of ``size`` along an axis, on a leading axis; filled up with zeros."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad)
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _joined(x: Array, axis: int, length: int) -> Array:
    """The reverse of ``_cut``."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _cut_place(q: Array, place: Place, window: Array, block: int) -> _Blocks:
    b, h, n, d = q.shape
    k, c = place.k_bkcd.shape[1:3]
    sizes = min(block, n), min(block, c)
    queries = jax.tree.map(lambda x: _cut(x, 1, sizes[0]), place.queries)
    keys = jax.tree.map(lambda x: _cut(x, 1, sizes[1]), place.keys)
    # Shapes are fixed, so the list has room for all pairs; loops end after those that count.
    visible = _may_see(queries, keys, window)
    (pairs,) = jnp.nonzero(visible.reshape(-1), size=visible.size, fill_value=0)
    return _Blocks(
        _cut(q.reshape(b, k, h // k, n, d), 3, sizes[0]),
        _cut(place.k_bkcd, 2, sizes[1]),
        _cut(place.v_bkcd, 2, sizes[1]),
        queries,
        keys,
        pairs.astype(jnp.int32),
        visible.sum(),
    )


def _may_see(queries: Marks, keys: Marks, window: Array) -> Array:
    """[I, J] bool: False where no query of a block sees any key of another, by their extremes."""

    # Padding must not widen a block's range: ids of 0 would make every block look visible.
    def ends(marks: Marks, x: Array) -> tuple[Array, Array]:
        live = marks.ids != 0
        return jnp.where(live, x, _FAR).min(-1), jnp.where(live, x, -_FAR).max(-1)

    (q_first, q_last), (k_first, k_last) = (ends(m, m.ids) for m in (queries, keys))
    if keys.ends is not None:
        k_last = ends(keys, keys.ends - 1)[1]
    same_segment = (q_first[:, None] <= k_last[None]) & (k_first[None] <= q_last[:, None])
    (q_first, q_last), (k_first, k_last) = (ends(m, m.positions) for m in (queries, keys))
    before = q_last[:, None] >= k_first[None]
    in_window = q_first[:, None] - k_last[None] < window
    # Any row of the batch: rows share the list of pairs, since a loop has one trip count.
    return (same_segment & before & in_window).any(-1)


class _Pair(NamedTuple):
    """One block of queries and one of keys, and their scores [B, K, H / K, q, c] float32.

    ``bent`` is tanh(score / cap), None without a cap.
    """

    i: Array
    j: Array
    scores: Array
    mask: Array
    bent: Array | None


def _pair(blocks: _Blocks, at: Array, window: Array, scale: float, softcap: float | None) -> _Pair:
    width = blocks.k.shape[0]
    i, j = blocks.pairs[at] // width, blocks.pairs[at] % width
    scores = matmul("bkgqd,bkcd->bkgqc", blocks.q[i], blocks.k[j], jnp.float32) * scale
    bent = None
    if softcap is not None:
        bent = jnp.tanh(scores / softcap)
        scores = softcap * bent
    ids, key_ids = blocks.queries.ids[i][:, :, None], blocks.keys.ids[j][:, None]
    distance = blocks.queries.positions[i][:, :, None] - blocks.keys.positions[j][:, None]
    same_segment = ids == key_ids
    if blocks.keys.ends is not None:
        same_segment = (ids >= key_ids) & (ids < blocks.keys.ends[j][:, None]) & (key_ids != 0)
    mask = same_segment & (ids != 0) & (distance >= 0) & (distance < window)
    return _Pair(i, j, scores, mask[:, None, None], bent)


def _blocks_forward(
    q: Array, place: Place, window: Array, *, scale: float, softcap: float | None, block: int
) -> tuple[Array, Array]:
    blocks = _cut_place(q, place, window, block)
    lead = blocks.q.shape[:-1]

    def meet(at: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peaks, totals, values = carry
        i, j, scores, mask, _ = _pair(blocks, at, window, scale, softcap)
        # The list of pairs is by extremes of blocks, so a pair may still hold invisible keys.
        scores = jnp.where(mask, scores, MASKED)
        peak = jnp.maximum(peaks[i], scores.max(-1))
        # Set to 0, since MASKED - MASKED would weigh 1 for queries that have seen nothing yet.
        weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
        # Sums so far are relative to the old peak.
        fade = jnp.exp(peaks[i] - peak)
        # Values first: XLA's CPU backend cannot sum bfloat16 in float32 for the other order.
        new = matmul("bkcd,bkgqc->bkgqd", blocks.v[j], weights, jnp.float32)
        return (
            peaks.at[i].set(peak),
            totals.at[i].set(totals[i] * fade + weights.sum(-1)),
            values.at[i].set(values[i] * fade[..., None] + new),
        )

    nothing = jnp.full(lead, MASKED, jnp.float32), jnp.zeros(lead, jnp.float32)
    start = *nothing, jnp.zeros(blocks.q.shape, jnp.float32)
    peaks, totals, values = jax.lax.fori_loop(0, blocks.needed, meet, start)
    # Queries that see nothing: log(0) would be -inf, and -inf - -inf NaN in the merge with other
    # places.
    nonempty = totals > 0
    log_sums = jnp.where(nonempty, peaks + jnp.log(jnp.where(nonempty, totals, 1.0)), MASKED)
    values = values / jnp.where(nonempty, totals, 1.0)[..., None]
    b, h, n, _ = q.shape
    out = _joined(values, 3, n).reshape(q.shape).astype(place.v_bkcd.dtype)
    return out, _joined(log_sums, 3, n).reshape(b, h, n)


def _blocks_backward(
    q: Array,
    place: Place,
    window: Array,
    outputs: Array,
    log_sums: Array,
    g: Array,
    *,
    scale: float,
    softcap: float | None,
    block: int,
) -> tuple[Array, Array, Array]:
    blocks = _cut_place(q, place, window, block)
    b, h, n, d = q.shape
    k, c = place.k_bkcd.shape[1:3]
    size = blocks.q.shape[4]
    by_block = lambda x: _cut(x.reshape(b, k, h // k, n, -1), 3, size)  # noqa: E731
    # The mean slope of a query's softmax equals output times gradient (FlashAttention, B.2), so no
    # second pass over its keys is needed.
    inner = (outputs.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1)
    gs, inners, sums = by_block(g), by_block(inner)[..., 0], by_block(log_sums)[..., 0]

    def meet(at: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = carry
        i, j, scores, mask, bent = _pair(blocks, at, window, scale, softcap)
        # Final log sums, kept by the forward pass, give final weights at once: no running peak
        # here.
        weights = jnp.where(mask, jnp.exp(scores - sums[i][..., None]), 0.0)
        dv_j = matmul("bkgqd,bkgqc->bkcd", gs[i], weights, jnp.float32)
        change = matmul("bkgqd,bkcd->bkgqc", gs[i], blocks.v[j], jnp.float32)
        change = weights * (change - inners[i][..., None])
        if bent is not None:
            # d tanh = 1 - tanh^2, from the value of the forward product.
            change = change * (1 - bent * bent)
        change = change * scale
        dq_i = matmul("bkcd,bkgqc->bkgqd", blocks.k[j], change, jnp.float32)
        dk_j = matmul("bkgqd,bkgqc->bkcd", blocks.q[i], change, jnp.float32)
        # Accumulated in float32: a key block is met by many query blocks.
        return dq.at[i].add(dq_i), dk.at[j].add(dk_j), dv.at[j].add(dv_j)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (blocks.q, blocks.k, blocks.v))
    dq, dk, dv = jax.lax.fori_loop(0, blocks.needed, meet, start)
    dk, dv = (_joined(x, 2, c) for x in (dk, dv))
    dq = _joined(dq, 3, n).reshape(b, h, n, d)
    chex.assert_equal_shape([dk, place.k_bkcd])
    return (
        dq.astype(q.dtype),
        dk.astype(place.k_bkcd.dtype),
        dv.astype(place.v_bkcd.dtype),
    )
