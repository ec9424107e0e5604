"""Writing a cache on TPUs: one column of each row's own, in place.

XLA scatters such columns, for which it copies the cache to a layout of its own and back, a layer at
a time and with every token. This kernel fetches the tiles around a row's column, changes the column
and puts them back; the rest of the cache stays untouched.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jrl.models.attention.cache_read import in_main_memory
from jrl.models.attention.splash import LANES
from jrl.types import Array


def takes(piece: dict[str, Array]) -> bool:
    """Whether the kernel can write a piece of a layer's cache: its columns fill tiles."""
    return piece["v"].shape[2] % LANES == 0


def write_columns(
    piece: dict[str, Array],
    entries: dict[str, Array],
    columns: Array,
    *,
    axes: dict[str, int],
    interpret: bool = False,
) -> dict[str, Array]:
    """A piece of a layer's cache with one column of each row replaced; see ``decode.write``.

    Args:
      piece: a piece that the kernel ``takes``, not to be read again.
      entries: what goes into them, from ``decode.entries_of``, one a row.
      columns: [S] int32; a row whose column is outside of the piece stays as it is.
      axes: which axis of each array its columns are, ``decode.AXES``.
      interpret: runs the kernel's steps as plain JAX, slowly, for tests on other platforms.

    Returns:
      The arrays of keys and values, and of their scales where they have any.
    """
    names = list(entries)
    arrays = [piece[name] if interpret else in_main_memory(piece[name]) for name in names]
    s, size = columns.shape[0], piece["v"].shape[2]
    # A row outside of the piece still has a tile fetched and put back, unchanged: the grid is
    # fixed.
    at = jnp.where((columns >= 0) & (columns < size), columns, -1)
    tiles = [_tiles_around(x, axes[name]) for name, x in zip(names, arrays, strict=True)]
    blocks, copied = [block for block, _ in tiles], sum(size for _, size in tiles)
    entry_blocks = [
        pl.BlockSpec((1, *entries[n].shape[1:]), lambda i, at: (i, 0, 0, 0)) for n in names
    ]
    outputs = pl.pallas_call(
        functools.partial(_kernel, axes=[axes[name] for name in names]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(s,), in_specs=[*entry_blocks, *blocks], out_specs=blocks
        ),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype) if interpret else pltpu.HBM(x.shape, x.dtype)
            for x in arrays
        ],
        # In place: without the alias XLA would copy the whole cache, which is what this kernel
        # avoids. Inputs are counted after the prefetched scalar and the entries.
        input_output_aliases={1 + len(names) + i: i for i in range(len(names))},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * s * copied),
        interpret=interpret,
        name="write_columns",
    )(at, *(entries[n].astype(x.dtype) for n, x in zip(names, arrays, strict=True)), *arrays)
    return dict(zip(names, outputs, strict=True))


def _tiles_around(x: Array, axis: int) -> tuple[pl.BlockSpec, int]:
    """A row of ``x``, of its columns along ``axis`` the tile with the row's own; and its bytes."""
    # A tile has 8 rows of float32, and more of what is narrower.
    size = LANES if axis == 3 else 32 // x.dtype.itemsize
    shape = [1, *x.shape[1:]]
    shape[axis] = size

    def place(i: Any, at: Any) -> tuple:
        # Clamped, as -1 has no tile.
        tile = jax.lax.div(jnp.maximum(at[i], 0), size)
        return tuple({0: i, axis: tile}.get(a, 0) for a in range(4))

    return pl.BlockSpec(tuple(shape), place), math.prod(shape) * x.dtype.itemsize


def _kernel(at: Any, *refs: Any, axes: list[int]) -> None:
    column, count = at[pl.program_id(0)], len(axes)
    for i, axis in enumerate(axes):
        new, old, out = refs[i], refs[count + i], refs[2 * count + i]
        x = new[...].astype(jnp.float32)  # exact, and the type that all chips compute in
        index = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis)
        at_column = (column >= 0) & (index == jax.lax.rem(column, old.shape[axis]))
        x = jnp.where(at_column, x, old[...].astype(jnp.float32))
        out[...] = x.astype(out.dtype)
