"""Grouped-query attention in plain JAX: of whole sequences, and of new tokens to a cache.

Queries are ``[B, Q, H, h]``; keys and values ``[B, K, L, h]``, and of a cache as ``Part`` says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jrl.models.matmul import ATTENDED, gradients, matmul
from jrl.types import Array

NO_WINDOW = np.int32(2**30)
"""A window that no sequence reaches."""

MASKED = -1e30
"""A hidden score; finite, so that a row with nothing to see is uniform instead of NaN."""


def visible(
    positions: Array,
    segments: Array,
    key_positions: Array,
    key_segments: Array,
    key_ends: Array | None = None,
) -> tuple[Array, Array]:
    """The visibility mask of keys, windows aside, and their distance.

    Args:
      positions: [B, Q] int32, tokens; the queries'.
      segments: [B, Q] int32; 0 is padding.
      key_positions: [B, C] int32, tokens.
      key_segments: [B, C] int32.
      key_ends: [B, C] int32: segments from a key's own up to below this see it; None for its own.

    Returns:
      mask [B, Q, C] bool (same segment, not padding, not later) and distance [B, Q, C] int32,
      tokens. A layer with a window also requires ``distance < window``.
    """
    chex.assert_equal_shape([positions, segments])
    chex.assert_equal_shape([key_positions, key_segments])
    # Distances by position, not by column: packed rows and caches have gaps between neighbours.
    distance_bqc = positions[:, :, None] - key_positions[:, None, :]
    same_bqc = segments[:, :, None] == key_segments[:, None, :]
    if key_ends is not None:
        after_bqc = segments[:, :, None] >= key_segments[:, None, :]
        same_bqc = after_bqc & (segments[:, :, None] < key_ends[:, None, :])
        same_bqc &= (key_segments != 0)[:, None, :]
    return same_bqc & (segments != 0)[:, :, None] & (distance_bqc >= 0), distance_bqc


def attend(
    q_bqhd: Array,
    k_bkcd: Array,
    v_bkcd: Array,
    mask_bqc: Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> Array:
    """The values each query sees, weighted by the softmax of its scores.

    Query head i reads key-value head ``i // (H / K)``; keys and values are never repeated.
    Products accumulate in float32 and the softmax is float32.

    Args:
      q_bqhd: [B, Q, H, h].
      k_bkcd: [B, K, C, h].
      v_bkcd: [B, K, C, h].
      mask_bqc: [B, Q, C] bool, True where visible. A query that sees nothing gets the mean value.
      scale: what scores are multiplied by.
      softcap: scores become cap * tanh(score / cap).

    Returns:
      [B, Q, H, h] in the dtype of ``v_bkcd``; the output projection is not applied.
    """
    chex.assert_rank([q_bqhd, k_bkcd, v_bkcd, mask_bqc], [4, 4, 4, 3])
    chex.assert_equal_shape([k_bkcd, v_bkcd])
    scores = _scores(q_bqhd, k_bkcd, mask_bqc, scale, softcap)
    return _read(_Reading(("bkcd,bkgqc->bqkgd",), "bqkgd"), (scores,), (v_bkcd,))


def attention_weights(
    q_bqhd: Array,
    k_bkcd: Array,
    mask_bqc: Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> Array:
    """[B, K, H / K, Q, C] float32: how ``attend`` weighs the values; each query's sum to one."""
    return _softmax((_scores(q_bqhd, k_bkcd, mask_bqc, scale, softcap),))[0]


def _scores(
    q_bqhd: Array, k_bkcd: Array, mask_bqc: Array, scale: float, softcap: float | None
) -> Array:
    """[B, K, H / K, Q, C] float32."""
    b, q, h, d = q_bqhd.shape
    k = k_bkcd.shape[1]
    # The group is an axis of the queries; repeating keys for each head would read them H / K times.
    q_bqkgd = q_bqhd.reshape(b, q, k, h // k, d)
    scores = matmul("bqkgd,bkcd->bkgqc", q_bqkgd, k_bkcd, jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # After the cap, which would bring hidden scores back to -cap.
    return jnp.where(mask_bqc[:, None, None], scores, MASKED)


class Part(NamedTuple):
    """Keys and values that queries look at, held once for ``members`` consecutive rows.

    Attributes:
      k_mkcd: [M, K, C, h]; row s of the queries reads row s // members, members = S / M.
      v_mkcd: [M, K, C, h].
      mask_sqc: [S, Q, C] bool, True where visible.
      reached: [] bool, False when no query sees any of it, which is then not read; None for always.
      k_scale: [M, K, 1, C] float32, what keys are multiplied by; None where they are floats.
      v_scale: [M, K, 1, C] float32, the same for values.
    """

    k_mkcd: Array
    v_mkcd: Array
    mask_sqc: Array
    reached: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None


def attend_shared(
    q_rqhd: Array,
    prefix: Part,
    k_rkcd: Array,
    v_rkcd: Array,
    mask_rqc: Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> Array:
    """``attend`` to a prompt that several rows share and to the row's own keys, for training.

    The rows of a prompt are queries of one matrix product with it, so that its keys are read once
    and their gradient is summed by that product. One float32 softmax runs over both parts.

    Args:
      q_rqhd: [R, Q, H, h].
      prefix: the prompts', floats that are always read.
      k_rkcd: [R, K, C, h], the rows' own.
      v_rkcd: [R, K, C, h].
      mask_rqc: [R, Q, C] bool, True where visible.
      scale: what scores are multiplied by.
      softcap: scores become cap * tanh(score / cap).

    Returns:
      [R, Q, H, h] in the dtype of ``v_rkcd``. A query that sees nothing gets a mean of the values.
    """
    r, q, h, d = q_rqhd.shape
    n, k, p = prefix.k_mkcd.shape[:3]
    m, g, c = r // n, h // k, k_rkcd.shape[2]
    chex.assert_shape(prefix.mask_sqc, (r, q, p))
    chex.assert_shape(mask_rqc, (r, q, c))
    # Rows of one prompt next to each other, so that they are the rows of one matrix product.
    q_nkmgqd = q_rqhd.reshape(n, m, q, k, g, d).transpose(0, 3, 1, 4, 2, 5)
    k_nmkcd, v_nmkcd = (x.reshape(n, m, k, c, d) for x in (k_rkcd, v_rkcd))

    def scores(spec: str, keys: Array, mask_rqx: Array) -> Array:
        products = matmul(spec, q_nkmgqd, keys, jnp.float32) * scale
        if softcap is not None:
            products = softcap * jnp.tanh(products / softcap)
        return jnp.where(mask_rqx.reshape(n, 1, m, 1, q, -1), products, MASKED)

    # Two products and one softmax: joined keys would be a copy of the prompt's for each row.
    before = scores("nkmgqd,nkpd->nkmgqp", prefix.k_mkcd, prefix.mask_sqc)
    own_scores = scores("nkmgqd,nmkcd->nkmgqc", k_nmkcd, mask_rqc)
    specs = "nkpd,nkmgqp->nkmgqd", "nmkcd,nkmgqc->nkmgqd"
    return _read(_Reading(specs, "nmqkgd"), (before, own_scores), (prefix.v_mkcd, v_nmkcd))


def _softmax(parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """The softmax over the last axes of all parts together, without joining them."""
    peak = functools.reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in parts])
    # A softmax does not depend on the peak, so neither does its gradient.
    weights = [jnp.exp(x - jax.lax.stop_gradient(peak)) for x in parts]
    # One division a query in place of one a key.
    share = 1 / functools.reduce(jnp.add, [w.sum(-1, keepdims=True) for w in weights])
    return tuple(w * share for w in weights)


class _Reading(NamedTuple):
    """Einsum specs for reading values; static.

    Attributes:
      specs: "<values>,<weights>-><out>" for each part. Values first: XLA's CPU backend cannot sum
        bfloat16 in float32 for the other order.
      rows: the axes of <out> as [rows..., Q, K, H / K, h].
    """

    specs: tuple[str, ...]
    rows: str

    @property
    def out(self) -> str:
        return self.specs[0].split("->")[1]

    @property
    def queries(self) -> str:
        """The axes of a part's weights without the last."""
        return self.specs[0].split("->")[0].split(",")[1][:-1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(way: _Reading, scores: tuple[Array, ...], values: tuple[Array, ...]) -> Array:
    """[R, Q, H, h] in the dtype of the values, weighted by one softmax of all parts' scores.

    Its derivative needs the mean of a softmax's slopes, which is what was read times the slope of
    that: a sum over h numbers instead of all keys, as in "FlashAttention: Fast and Memory-Efficient
    Exact Attention with IO-Awareness" (arXiv:2205.14135, B.2).
    """
    return _read_forward(way, scores, values)[0]


def _read_forward(
    way: _Reading, scores: tuple[Array, ...], values: tuple[Array, ...]
) -> tuple[Array, tuple]:
    # Named, so that rematerialisation can keep them and make no scores again.
    weights = tuple(checkpoint_name(w, ATTENDED) for w in _softmax(scores))
    parts = zip(way.specs, values, weights, strict=True)
    reads = [matmul(spec, v, w.astype(v.dtype), jnp.float32) for spec, v, w in parts]
    out = jnp.einsum(f"{way.out}->{way.rows}", functools.reduce(jnp.add, reads))
    *rows, q, k, g, d = out.shape
    out = out.reshape(math.prod(rows), q, k * g, d).astype(values[0].dtype)
    out = checkpoint_name(out, ATTENDED)
    return out, (weights, values, out)


def _read_backward(
    way: _Reading, residuals: tuple, g_rqhd: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    weights, values, out_rqhd = residuals
    size = dict(zip(way.queries, weights[0].shape, strict=False))
    shape = [size.get(axis, out_rqhd.shape[-1]) for axis in way.rows]
    # In float32: for a query that sees one key the two terms below cancel.
    mean = (g_rqhd.astype(jnp.float32) * out_rqhd.astype(jnp.float32)).sum(-1)
    mean = jnp.einsum(f"{way.rows[:-1]}->{way.queries}", mean.reshape(shape[:-1]))[..., None]
    g = jnp.einsum(f"{way.rows}->{way.out}", g_rqhd.reshape(shape))
    of_scores, of_values = [], []
    for spec, v, w in zip(way.specs, values, weights, strict=True):
        of_v, of_w = gradients(spec, v, w.astype(v.dtype), g)
        # The derivative of a softmax, w (dw - sum w dw), with the sum already known as ``mean``.
        of_scores.append(w * (of_w.astype(jnp.float32) - mean))
        of_values.append(of_v)
    return tuple(of_scores), tuple(of_values)


_read.defvjp(_read_forward, _read_backward)


# ---------------------------------------------------------------- to a cache

# A cache is several parts: the rows' own keys and values, in pieces along the length, and prompts
# that rows share. What the queries see of each part is merged under one softmax by the largest
# scores and the sums of weights, as in "FlashAttention: Fast and Memory-Efficient Exact Attention
# with IO-Awareness" (arXiv:2205.14135).


class PartialAttention(NamedTuple):
    """Partial attention of a part: mergeable with other parts under one softmax.

    Attributes:
      peak: [S, K, H / K, Q, 1] float32, the largest score.
      total: [S, K, H / K, Q, 1] float32, the sum of exp(score - peak).
      values: [S, K, H / K, Q, h] float32, the values weighted by exp(score - peak).
    """

    peak: Array
    total: Array
    values: Array


def attend_parts(
    q_sqhd: Array,
    parts: Sequence[Part],
    *,
    scale: float,
    softcap: float | None = None,
    attend_one: Callable[[Array, Part, float, float | None], PartialAttention] | None = None,
) -> Array:
    """``dense.attend`` over keys and values in several parts, shared by rows or not.

    The rows that share a part are queries of one matrix product with it.

    Args:
      q_sqhd: [S, Q, H, h].
      parts: at least one, and one that is always read.
      scale: what scores are multiplied by.
      softcap: scores become cap * tanh(score / cap).
      attend_one: (queries, part, scale, softcap) -> what they see of it; None for plain JAX.

    Returns:
      [S, Q, H, h] in the dtype of the queries. A query that sees nothing gets a mean of the values.
    """
    s, q, h, d = q_sqhd.shape
    if attend_one is None:
        # Parts that are always read have one softmax: merging costs more than a longer row.
        always = [part for part in parts if part.reached is None]
        sometimes = [part for part in parts if part.reached is not None]
        reads = [_attend_together(q_sqhd, always, scale, softcap)]
        reads += [attend_part(q_sqhd, part, scale, softcap) for part in sometimes]
    else:
        reads = [attend_one(q_sqhd, part, scale, softcap) for part in parts]
    merged = _merged(reads)
    out_skgqd = merged.values / merged.total
    return out_skgqd.transpose(0, 3, 1, 2, 4).reshape(s, q, h, d).astype(q_sqhd.dtype)


def attend_part(q_sqhd: Array, part: Part, scale: float, softcap: float | None) -> PartialAttention:
    """The partial attention to one part, empty if no query reaches it."""
    s, q, h, d = q_sqhd.shape
    k = part.v_mkcd.shape[1]

    def attend(q_sqhd: Array, part: Part) -> PartialAttention:
        return _attend_together(q_sqhd, [part], scale, softcap)

    def nothing(q_sqhd: Array, part: Part) -> PartialAttention:
        lead = (s, k, h // k, q)
        # Peak MASKED with total 0 merges as weight exp(MASKED - peak) = 0, without a special case.
        zero = jnp.zeros((*lead, 1), jnp.float32)
        return PartialAttention(zero + MASKED, zero, jnp.zeros((*lead, d), jnp.float32))

    if part.reached is None:
        return attend(q_sqhd, part)
    # At first most of a cache is empty: reading it would take longer than all else in a step.
    return jax.lax.cond(part.reached, attend, nothing, q_sqhd, part)


def _merged(reads: Sequence[PartialAttention]) -> PartialAttention:
    if len(reads) == 1:
        return reads[0]
    # Sums are relative to the peak of their part, so they are rescaled to one peak before adding.
    peak = functools.reduce(jnp.maximum, [x.peak for x in reads])
    shares = [jnp.exp(x.peak - peak) for x in reads]
    total = functools.reduce(jnp.add, [x.total * w for x, w in zip(reads, shares, strict=True)])
    values = functools.reduce(jnp.add, [x.values * w for x, w in zip(reads, shares, strict=True)])
    return PartialAttention(peak, total, values)


def _attend_together(
    q_sqhd: Array, parts: Sequence[Part], scale: float, softcap: float | None
) -> PartialAttention:
    """The partial attention to several parts that are all read, under one softmax."""
    s, q, h, d = q_sqhd.shape

    def scores_of(part: Part) -> Array:
        m, k = part.v_mkcd.shape[:2]
        # The rows of a block and the heads of a group are the rows of one matrix product.
        q_mkrd = q_sqhd.reshape(m, s // m, q, k, h // k, d).transpose(0, 3, 1, 4, 2, 5)
        q_mkrd = q_mkrd.reshape(m, k, -1, d)
        # Keys first: with few queries the other order takes up to 5 times as long on a CPU.
        keys = part.k_mkcd.astype(q_mkrd.dtype)
        scores = matmul("mkcd,mkrd->mkcr", keys, q_mkrd, jnp.float32).swapaxes(2, 3) * scale
        if part.k_scale is not None:
            scores = scores * part.k_scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = scores.reshape(m, k, s // m, h // k, q, -1)
        mask = part.mask_sqc.reshape(m, 1, s // m, 1, q, -1)
        return jnp.where(mask, scores, MASKED)

    def by_row(x: Array) -> Array:
        m, k, members, g = x.shape[:4]
        return x.transpose(0, 2, 1, 3, 4, 5).reshape(m * members, k, g, q, -1)

    def by_part(x: Array, part: Part) -> Array:
        m, (k, g) = part.v_mkcd.shape[0], x.shape[1:3]
        return x.reshape(m, s // m, k, g, q, -1).transpose(0, 2, 1, 3, 4, 5)

    def values_of(part: Part, weights: Array) -> Array:
        rows = weights.reshape(*part.v_mkcd.shape[:2], -1, weights.shape[-1])
        # The scale of a value is a factor of its weight, of which there are fewer.
        if part.v_scale is not None:
            rows = rows * part.v_scale
        values = matmul("mkrc,mkcd->mkrd", rows.astype(q_sqhd.dtype), part.v_mkcd, jnp.float32)
        return values.reshape(*weights.shape[:-1], d)

    # All scores before any exponential: with the joint peak no part has to be rescaled.
    each = [(part, scores_of(part)) for part in parts]
    peak = functools.reduce(jnp.maximum, [by_row(x.max(-1, keepdims=True)) for _, x in each])
    total, values = [], []
    for part, scores in each:
        weights = jnp.exp(scores - by_part(peak, part))
        total.append(by_row(weights.sum(-1, keepdims=True)))
        values.append(by_row(values_of(part, weights)))
    return PartialAttention(
        peak, functools.reduce(jnp.add, total), functools.reduce(jnp.add, values)
    )
