"""Attention of few queries to a cache on TPUs: the decode path.

A prompt is read once for all rows that continue it, and of a row's own keys the blocks that some
query sees, in place and in the layout that the cache has. A step of a kernel's pipeline has a cost
of its own, whatever it reads, so that one here takes all key-value heads of a row, and several rows
where all are equally long, up to 1 MiB: a step of ``splash`` takes one head of one row, 64 KiB
where a block is 128 columns. JAX's kernels for paged caches would read a shared prompt once for
every row and give no sums of weights to merge parts by. Bytes are counted in programs compiled for
TPUs; the time of a step was not measured on one.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jrl.models.attention.dense import MASKED, Part, PartialAttention
from jrl.models.attention.splash import LANES
from jrl.types import Array

_STEP_BYTES = 2**20
"""Most bytes of keys and values that a step reads; the pipeline holds two such blocks."""

_HELD_BYTES = 2**21
"""Most bytes of such a block in the kernel's own memory, where a head fills whole tiles: one of 16
numbers takes the room of 128. Of the 16 MiB there the pipeline and the sums need the rest."""

_LARGEST = 512
"""Most columns of a block; see ``block_columns``."""

_QUERIES = 256
"""Most queries of a row and key-value head; beyond them a row's sums would fill the memory."""

_TABLES = 2**16
"""Most blocks, read or not, of all rows: each has 8 bytes of the 1 MiB of scalar memory."""


def block_columns(columns: int) -> int:
    """Columns of a block: an eighth of the cache, whole tiles, and at most 512.

    Of the last block all is read, half of it for nothing on average.

    >>> [block_columns(n) for n in (128, 1024, 2048, 32768)]
    [128, 128, 256, 512]
    """
    sizes = [n for n in range(LANES, min(columns // 8, _LARGEST) + 1, LANES) if columns % n == 0]
    return max(sizes, default=LANES)


def has_tables(rows: int, columns: int) -> bool:
    """Whether the kernel can have a table of the blocks of a cache of this size."""
    return columns % LANES == 0 and rows * (columns // block_columns(columns)) <= _TABLES


def takes(q_sqhd: Array, part: Part) -> bool:
    """Whether the kernel can read this part of a device's cache for these queries.

    Args:
      q_sqhd: [S, Q, H, h].
      part: of the cache.
    """
    s, q, h, _ = q_sqhd.shape
    m, k, c, _ = part.v_mkcd.shape
    return s // m * (h // k) * q <= _QUERIES and has_tables(m, c)


def look(
    q_sqhd: Array,
    part: Part,
    scale: float,
    softcap: float | None,
    *,
    together: bool = False,
    interpret: bool = False,
) -> PartialAttention:
    """The partial attention of queries to one part of a cache, for ``dense.attend_parts``.

    Args:
      q_sqhd: [S, Q, H, h].
      part: one that the kernel ``takes``.
      scale: what scores are multiplied by; queries are, in their own dtype.
      softcap: scores become cap * tanh(score / cap).
      together: whether all rows of the part have the same length, which are then read several at
        once; they may differ, and are then read as far as the longest of those.
      interpret: runs the kernel's steps as plain JAX, slowly, for tests on other platforms.
    """
    # All rows that continue one prompt are queries of one step, which is why it is read once.
    s, q, h, d = q_sqhd.shape
    m, k, c, _ = part.v_mkcd.shape
    g, n, bk = h // k, s // m * q, block_columns(c)
    # Queries of a row and head are [g, n], n the tokens that have a mask of their own. Tiles have 8
    # rows, so that n is filled up to them where it is not 1.
    wide = n if n == 1 else -(-n // 8) * 8
    # Scaled before the kernel: [queries, h] numbers instead of [queries, columns] in every step.
    q_mkgnd = (q_sqhd.astype(jnp.float32) * scale).astype(q_sqhd.dtype)
    q_mkgnd = q_mkgnd.reshape(m, n, k, g, d).transpose(0, 2, 3, 1, 4)
    q_mkgnd = jnp.pad(q_mkgnd, ((0, 0), (0, 0), (0, 0), (0, wide - n), (0, 0)))
    mask_mnc = jnp.pad(part.mask_sqc.reshape(m, n, c), ((0, 0), (0, wide - n), (0, 0)))
    r = _rows_at_once(part, g * wide, bk) if together else 1
    visited, last, count = _visited(mask_mnc, r, bk)

    def of_row(i: Any, j: Any, *_: Any) -> tuple:
        return i, 0, 0, 0

    def along(axis: int, ndim: int) -> Any:
        # The block index comes from the prefetched table: an index that repeats starts no new copy.
        return lambda i, j, _, last: tuple({0: i, axis: last[i, j]}.get(a, 0) for a in range(ndim))

    queries = q_mkgnd.reshape(m, k, g * wide, d)
    blocks: dict[str, tuple[Any, pl.BlockSpec]] = {
        "q": (queries, pl.BlockSpec((r, k, g * wide, d), of_row)),
        "k": (part.k_mkcd, pl.BlockSpec((r, k, bk, d), along(2, 4))),
        "v": (part.v_mkcd, pl.BlockSpec((r, k, bk, d), along(2, 4))),
        "mask": (mask_mnc.astype(jnp.int32), pl.BlockSpec((r, wide, bk), along(2, 3))),
    }
    if part.k_scale is not None:
        scales = pl.BlockSpec((r, k, 1, bk), along(3, 4))
        blocks |= {"k_scale": (part.k_scale, scales), "v_scale": (part.v_scale, scales)}
    names = list(blocks)
    cache = () if interpret else ("k", "v", "k_scale", "v_scale")
    arrays = [in_main_memory(x) if name in cache else x for name, (x, _) in blocks.items()]
    out, log_sum = pl.pallas_call(
        functools.partial(_kernel, names=names, softcap=softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(m // r, count),
            in_specs=[spec for _, spec in blocks.values()],
            out_specs=[
                pl.BlockSpec((r, k, g * wide, d), of_row),
                pl.BlockSpec((r, k, g * wide, LANES), of_row),
            ],
            scratch_shapes=[
                pltpu.VMEM((r, k, g * wide, size), jnp.float32) for size in (LANES, LANES, d)
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((m, k, g * wide, size), jnp.float32) for size in (d, LANES)
        ],
        interpret=interpret,
        name="read_cache",
    )(visited, last, *arrays)

    def per_row(x: Array) -> Array:
        x = x.reshape(m, k, g, wide, -1)[:, :, :, :n].reshape(m, k, g, s // m, q, -1)
        return x.transpose(0, 3, 1, 2, 4, 5).reshape(s, k, g, q, -1)

    # The log of the sum stands for peak and total: merging parts needs no more than their sum.
    peak = per_row(log_sum[..., :1])
    return PartialAttention(peak, jnp.ones_like(peak), per_row(out))


def in_main_memory(x: Array) -> Array:
    """A kernel input that stays in main memory and is read in blocks.

    Where the faster memory has room, as on v6e, XLA would first copy all of it there with every
    token, and back where the kernel wrote to it.
    """
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


def _rows_at_once(part: Part, queries: int, bk: int) -> int:
    """Rows per grid step: as many as have ``_STEP_BYTES`` of keys, values and sums."""
    m, k, _, d = part.v_mkcd.shape
    each = k * max(2 * bk * part.v_mkcd.dtype.itemsize, 4 * queries)
    room = each * -(-d // LANES) * LANES
    # Rows are unrolled in the kernel, whose code grows with them.
    most = max(min(_STEP_BYTES // (each * d), _HELD_BYTES // room, 64 // k), 1)
    # Steps of equal size, or the last one would read past the cache.
    return next(r for r in range(most, 0, -1) if m % r == 0)


def _visited(mask_mnc: Array, r: int, bk: int) -> tuple[Array, Array, Array]:
    """The blocks to read, and the block in memory while one is skipped.

    Args:
      mask_mnc: [M, n, C] bool.
      r: rows of a block.
      bk: columns of a block.

    Returns:
      [M / r, C / bk] int32, whether a block is read; the same, the block read last; and [] int32,
      blocks of a row up to the last that any row reads, 1 at least: those beyond take no step.
    """
    m, n, c = mask_mnc.shape
    visible = mask_mnc.reshape(m // r, r, n, c // bk, bk).any((1, 2, 4))
    # The first block is always read, so that every query has something to see.
    visible = visible.at[:, 0].set(True)
    j = jnp.arange(c // bk, dtype=jnp.int32)[None]
    # What is not read repeats what was read last, and so is not sent again.
    last = jax.lax.cummax(jnp.where(visible, j, 0), axis=1)
    return visible.astype(jnp.int32), last, last.max() + 1


def _kernel(visited: Any, last: Any, *refs: Any, names: list[str], softcap: float | None) -> None:
    """One block of columns of some rows: a turn of a running softmax for each row and head."""
    del last
    blocks = dict(zip(names, refs, strict=False))
    out, log_sum, peaks, totals, values = refs[len(names) :]
    i, j = pl.program_id(0), pl.program_id(1)

    # Scratch memory holds what the last row left there.
    @pl.when(j == 0)
    def _() -> None:
        peaks[...] = jnp.full(peaks.shape, MASKED, jnp.float32)
        totals[...] = jnp.zeros(totals.shape, jnp.float32)
        values[...] = jnp.zeros(values.shape, jnp.float32)

    rows, heads = blocks["q"].shape[:2]

    @pl.when(visited[i, j] != 0)
    def _() -> None:
        for r, head in itertools.product(range(rows), range(heads)):
            q, at = blocks["q"][r, head], (r, head)
            scores = _product(q, blocks["k"][at].astype(q.dtype), along=1)
            if "k_scale" in blocks:
                scores = scores * blocks["k_scale"][at]
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            scores = _masked(scores, blocks["mask"][r] != 0)
            peak = jnp.maximum(peaks[at][:, :1], scores.max(-1, keepdims=True))
            # Earlier sums are rescaled to the new peak, so that no exponential overflows in
            # float32.
            weights, old = jnp.exp(scores - peak), jnp.exp(peaks[at][:, :1] - peak)
            total = totals[at][:, :1] * old + weights.sum(-1, keepdims=True)
            # The scale of a value is a factor of its weight, of which there are fewer.
            if "v_scale" in blocks:
                weights = weights * blocks["v_scale"][at]
            read = _product(weights.astype(q.dtype), blocks["v"][at].astype(q.dtype))
            values[at] = values[at] * old + read
            peaks[at] = jnp.broadcast_to(peak, peaks.shape[2:])
            totals[at] = jnp.broadcast_to(total, totals.shape[2:])

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        # Divided once at the end: a division in each step would be a pass over the values.
        total = totals[...]
        out[...] = values[...] / total[..., :1]
        log_sum[...] = peaks[...] + jnp.log(total)


def _product(a: Array, b: Array, along: int = 0) -> Array:
    """The rows of ``a`` times ``b``, which is summed over along this axis."""
    dimensions = (((1,), (along,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _masked(scores: Array, mask: Array) -> Array:
    """[g * n, c] scores where [n, c] says so, of every g."""
    n, c = mask.shape
    wide = scores.reshape(-1, n, c) if n > 1 else scores
    return jnp.where(mask[None] if n > 1 else mask, wide, MASKED).reshape(scores.shape)
