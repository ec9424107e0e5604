"""Grouped products on NVIDIA GPUs, in Pallas' Triton dialect; see ``models.grouped``.

XLA's own ragged product for these GPUs multiplies every row by every matrix, and makes all rows
once for each group: with 128 groups of [2048, 768] and 16,384 rows 8.6 GB, and 128 times the work
(as compiled for an H100). Here a program has one block of one group's rows, or one block of one
group's matrix, and reads what it multiplies alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jrl.models.gpu_kernels.common import place
from jrl.types import Array

WIDE, DEEP = 128, 32
"""Columns of a program, and numbers of a sum that it multiplies at a time."""
_LOWEST, _HIGHEST = 16, 128
"""Rows of a block: no fewer than the matrix units take, no more than the registers hold sums of."""


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: a power of two near the mean run."""
    mean = max(rows // groups, 1)
    return min(max(1 << (mean.bit_length() - 1), _LOWEST), _HIGHEST)


def rows_times(
    x_md: Array, w_edf: Array, start_n: Array, rows_n: Array, group_n: Array, *, interpret: bool
) -> Array:
    """[M, F] float32: each block of rows times its group's matrix; no other row is written.

    Args:
      x_md: [M, D], 16-bit floats, rows sorted by group.
      w_edf: [E, D, F], the same.
      start_n: [n] int32, first row of each block.
      rows_n: [n] int32, its rows, at most ``block_rows(M, E)``; 0 for none.
      group_n: [n] int32, in [0, E).
      interpret: whether to run without a GPU.
    """
    (m, d), (e, _, f) = x_md.shape, w_edf.shape
    high = block_rows(m, e)

    def kernel(start: Any, rows: Any, group: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        part, block = pl.program_id(0), pl.program_id(1)
        count, g = plgpu.load(place(rows, block)), plgpu.load(place(group, block))
        # Behind the last row of a group lie those of the next one, which are another block's.
        at = plgpu.load(place(start, block)) + jnp.arange(high)
        inside, columns = jnp.arange(high) < count, part * WIDE + jnp.arange(WIDE)

        def read(k: Array) -> tuple[Array, Array]:
            deep = k * DEEP + jnp.arange(DEEP)
            mask = inside[:, None] & (deep < d)[None]
            x = plgpu.load(place(x_ref, at[:, None], deep[None]), mask=mask, other=0)
            mask = (deep < d)[:, None] & (columns < f)[None]
            return x, plgpu.load(place(w_ref, g, deep[:, None], columns[None]), mask=mask, other=0)

        # The grid has as many blocks as there can be; those beyond what there are do nothing.
        @pl.when(count > 0)
        def _() -> None:
            sums = _summed(pl.cdiv(d, DEEP), read, (high, WIDE))
            mask = inside[:, None] & (columns < f)[None]
            plgpu.store(place(y_ref, at[:, None], columns[None]), sums, mask=mask)

    return pl.pallas_call(
        kernel,
        # Parts of the same rows one after the other, so that these are read from the L2 cache.
        grid=(pl.cdiv(f, WIDE), start_n.shape[0]),
        out_shape=jax.ShapeDtypeStruct((m, f), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="grouped_rows",
    )(start_n, rows_n, group_n, x_md, w_edf)


def by_group(x_md: Array, g_mf: Array, rows_e: Array, *, interpret: bool) -> Array:
    """[E, D, F] float32: the sum over each group's rows of their outer products.

    Args:
      x_md: [M, D], 16-bit floats, rows sorted by group.
      g_mf: [M, F], the same.
      rows_e: [E] int32, rows of each group.
      interpret: whether to run without a GPU.
    """
    d, f, e = x_md.shape[1], g_mf.shape[1], rows_e.shape[0]
    start_e = (jnp.cumsum(rows_e) - rows_e).astype(jnp.int32)

    def kernel(start: Any, rows: Any, x_ref: Any, g_ref: Any, dw_ref: Any) -> None:
        columns = pl.program_id(0) * WIDE + jnp.arange(WIDE)
        deep, group = pl.program_id(1) * WIDE + jnp.arange(WIDE), pl.program_id(2)
        first, count = plgpu.load(place(start, group)), plgpu.load(place(rows, group))

        def read(k: Array) -> tuple[Array, Array]:
            index = k * DEEP + jnp.arange(DEEP)
            at, inside = first + index, (index < count)[:, None]
            mask = inside & (deep < d)[None]
            x = plgpu.load(place(x_ref, at[:, None], deep[None]), mask=mask, other=0)
            mask = inside & (columns < f)[None]
            # Rows are summed over, so they become the inner axis of the first factor.
            return x.T, plgpu.load(place(g_ref, at[:, None], columns[None]), mask=mask, other=0)

        sums = _summed(pl.cdiv(count, DEEP), read, (WIDE, WIDE))
        mask = (deep < d)[:, None] & (columns < f)[None]
        plgpu.store(place(dw_ref, group, deep[:, None], columns[None]), sums, mask=mask)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(f, WIDE), pl.cdiv(d, WIDE), e),
        out_shape=jax.ShapeDtypeStruct((e, d, f), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=4),
        interpret=interpret,
        name="grouped_matrices",
    )(start_e, rows_e, x_md, g_mf)


def _summed(
    count: Any, read: Callable[[Array], tuple[Array, Array]], shape: tuple[int, int]
) -> Array:
    """The sum of the products of what is read at 0 .. count - 1, in float32."""
    return jax.lax.fori_loop(
        0, count, lambda k, sums: sums + plgpu.dot(*read(k)), jnp.zeros(shape, jnp.float32)
    )
