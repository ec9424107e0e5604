"""Attention to a cache by JAX's splash kernel for TPUs, for more queries than ``cache_read`` takes.

Each kind of keys is read in place: a prompt once for all rows that continue it, and of a
row's own keys the blocks that some query sees. Keys are taken transposed, as the cache holds them.
JAX's kernels for paged caches would read a shared prompt once for every row, and give no sums of
weights to merge parts by.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from jrl.models.attention.dense import Part, PartialAttention
from jrl.models.attention.splash import LANES
from jrl.types import Array

_LARGEST = 512
"""Most keys of a block. Of a row's last block all is read, and each block costs time of its own."""

_SUBLANES = 16
"""The queries of a block are padded to a multiple of this."""

_QUERIES = 256
"""Most queries of a block."""


def block_columns(columns: int) -> int:
    """Keys of a block: the most that divide the cache."""
    return next(b for b in range(_LARGEST, 0, -LANES) if columns % b == 0)


def fits(q_sqhd: Array, part: Part, tables: int) -> bool:
    """Whether the kernel can read this part of a device's cache in place.

    Args:
      q_sqhd: [S, Q, H, h].
      part: of the cache.
      tables: most tables of blocks, one for each head of each row and block of queries.
    """
    s, q, h, _ = q_sqhd.shape
    m, k, c, _ = part.v_mkcd.shape
    blocks = -(-(s // m * (h // k) * q) // _QUERIES)
    return c % LANES == 0 and part.k_scale is None and m * k * blocks <= tables


def splash_look(
    q_sqhd: Array, part: Part, scale: float, softcap: float | None, *, interpret: bool = False
) -> PartialAttention:
    """The partial attention of queries to one part of a cache, for ``dense.attend_parts``.

    Args:
      q_sqhd: [S, Q, H, h].
      part: one that ``fits``. Where none of a row's queries sees anything, one block is read.
      scale: what scores are multiplied by; queries are, in their own dtype.
      softcap: scores become cap * tanh(score / cap).
      interpret: runs the kernel's steps as plain JAX, slowly, for tests on other platforms.
    """
    s, q, h, d = q_sqhd.shape
    m, k, c, _ = part.v_mkcd.shape
    g, rows = h // k, s // m * (h // k) * q
    bq = min(-(-rows // _SUBLANES) * _SUBLANES, _QUERIES)
    bk = block_columns(c)
    # Rows that only fill up a block see nothing, and are cut off below.
    more = -rows % bq
    # All queries that read the same keys, of m's rows and a head's group, are rows of one block.
    q_mkrd = (q_sqhd.astype(jnp.float32) * scale).astype(q_sqhd.dtype)
    q_mkrd = q_mkrd.reshape(m, s // m, q, k, g, d).transpose(0, 3, 1, 4, 2, 5)
    q_xrd = jnp.pad(q_mkrd.reshape(m * k, rows, d), ((0, 0), (0, more), (0, 0)))
    mask = jnp.broadcast_to(
        part.mask_sqc.reshape(m, s // m, 1, q, c), (m, s // m, g, q, c)
    ).reshape(m, rows, c)
    # Built from tables of this batch's masks: the usual constructor wants masks that are known when
    # the program is traced, but lengths change with every token.
    kernel = splash.SplashAttentionKernel(
        _visited(jnp.pad(mask, ((0, 0), (0, more), (0, 0))), rows, k, (bq, bk)),
        None,
        None,
        block_sizes=splash.BlockSizes(block_q=bq, block_kv=bk),
        is_mqa=False,
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=None,
        mask_function=None,
        interpret=interpret,
    )
    # Rows and heads become the heads of one sequence, a reshape: the cache is not copied.
    keys, values = (x.reshape(m * k, c, d) for x in (part.k_mkcd, part.v_mkcd))
    out, (log_sum,) = kernel(q_xrd, keys, values)

    def per_row(x: Array) -> Array:
        x = x[:, :rows].astype(jnp.float32).reshape(m, k, s // m, g, q, -1)
        return x.transpose(0, 2, 1, 3, 4, 5).reshape(s, k, g, q, -1)

    values, peak = per_row(out), per_row(log_sum[..., None])
    return PartialAttention(peak, jnp.ones_like(peak), values)


def _visited(mask_mrc: Array, rows: int, heads: int, block: tuple[int, int]) -> MaskInfo:
    """The blocks to read and those to mask, the same for all heads of a part.

    Args:
      mask_mrc: [M, rows and what fills up their blocks, C] bool.
      rows: those that count.
      heads: K.
      block: queries and keys of a block.
    """
    m, r, c = mask_mrc.shape
    bq, bk = block
    tiles = mask_mrc.reshape(m, r // bq, bq, c // bk, bk).transpose(0, 1, 3, 2, 4)
    extra = (jnp.arange(r) >= rows).reshape(1, -1, 1, bq, 1)
    full = (tiles | extra).all((-1, -2))
    # The first block is always read, so that every query has something to see.
    visible = tiles.any((-1, -2)).at[:, :, 0].set(True)
    partial = visible & ~full
    # What is not read repeats what was read last, or will be first, and so is not sent again.
    j = jnp.arange(c // bk, dtype=jnp.int32)[None, None]
    last = jax.lax.cummax(jnp.where(visible, j, 0), axis=2)
    number = jnp.arange(partial.size, dtype=jnp.int32).reshape(partial.shape)
    tile = jax.lax.cummax(jnp.where(partial, number, number[:, :, :1]), axis=2)
    per_head = functools.partial(jnp.repeat, repeats=heads, axis=0)
    return MaskInfo(
        data_next=per_head(last),
        mask_next=per_head(tile),
        block_mask=per_head(jnp.where(full, 2, visible).astype(jnp.int32)),
        partial_mask_blocks=tiles.reshape(-1, bq, bk),
        q_sequence=None,
        is_dynamic_mask=False,
    )
