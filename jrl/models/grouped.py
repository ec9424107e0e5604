"""Grouped matrix products, the core of routed experts: each run of rows has its own matrix.

Rows are sorted by group, and each group multiplies its own run, so the work is that of the rows
there are, whatever the balance between groups, and no row is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.errors import unknown_choice
from jrl.mesh import platform
from jrl.models import gpu
from jrl.models.collectives import gathered, sum_scattered
from jrl.models.matmul import PRODUCT
from jrl.types import Array

KERNELS = ("auto", "blocks", "megablox", "ragged", "triton")
"""Kernels of grouped products: ``ragged`` is XLA's own operation, ``megablox`` the Pallas
kernels for TPUs, ``triton`` those of ``gpu_kernels``, ``blocks`` by a loop over runs of equal
height. ``auto`` takes blocks on the CPU, where XLA multiplies every row by every matrix; on TPUs
ragged, but megablox for the gradients of matrices, for which XLA multiplies so there, too (E times
the work, as compiled); on GPUs triton for 16-bit floats, since XLA does so there in both; else
ragged."""

_TILE = 128
"""Rows that megablox takes at once, and the largest block."""
_LEAST = 8
"""Rows of the smallest block."""


class Gather(NamedTuple):
    """Sharding of the matrices before a product: parts along ``dim`` over a mesh axis."""

    axis: str
    dim: int


class _Options(NamedTuple):
    """Static; the platform is that of the mesh while the product is traced."""

    kernel: str
    platform: str
    gather: Gather | None
    one_of: int


def grouped_matmul(
    x_md: Array,
    w_edf: Array,
    rows_e: Array,
    *,
    kernel: str = "auto",
    gather: Gather | None = None,
    one_of: int = 1,
) -> Array:
    """Each run of rows times its own matrix, accumulated in float32, in the dtype of ``x_md``.

    Args:
      x_md: [M, D], rows sorted by group.
      w_edf: [E, D, F], converted to the dtype of ``x_md`` for the product.
      rows_e: [E] int32, rows of each group; they sum to M at most.
      kernel: of ``KERNELS``.
      gather: under ``jax.shard_map``, how the matrices are divided. They are put together for the
        product, forward and backward, and the sum of their gradients is divided again.
      one_of: devices that have these rows and matrices of different groups, so that a row is in a
        group here in one of so many cases. It changes no number: kernels skip rows without a group,
        and the products bear it in their name, since XLA counts the work of all M rows.

    Returns:
      [M, F]; 0 in rows past those of the last group. The gradient of ``w_edf`` is float32 sums, in
      its own dtype.

    Raises:
      UserError: an unknown kernel.
    """
    chex.assert_rank([x_md, w_edf, rows_e], [2, 3, 1])
    if kernel not in KERNELS:
        raise unknown_choice("model.grouped_matmul", kernel, KERNELS)
    options = _Options(kernel, platform(), gather, one_of)
    return checkpoint_name(_grouped(options, x_md, w_edf, rows_e), PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(options: _Options, x_md: Array, w_edf: Array, rows_e: Array) -> Array:
    return _rows_times(options, x_md, _whole(options, w_edf, x_md), rows_e).astype(x_md.dtype)


def _forward(
    options: _Options, x_md: Array, w_edf: Array, rows_e: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped(options, x_md, w_edf, rows_e), (x_md, w_edf, rows_e)


def _backward(
    options: _Options, residuals: tuple[Array, Array, Array], g_mf: Array
) -> tuple[Array, Array, None]:
    # Written out because the derivative JAX makes multiplies float32 cotangents by bfloat16
    # weights, which loses the fast matrix units, and rounds the weights' gradient to bfloat16.
    x_md, w_edf, rows_e = residuals
    # Gathered again instead of kept: kept, the whole matrices of every layer would stay in memory
    # until the backward pass.
    w_efd = _whole(options, w_edf, x_md).transpose(0, 2, 1)
    dx_md = _rows_times(options, g_mf, w_efd, rows_e)
    dw_edf = _by_group(options, x_md, g_mf, rows_e)
    if options.gather is not None:
        axis, dim = options.gather
        # Each device returns the gradient of the part that it stores, summed over all.
        dw_edf = sum_scattered(dw_edf, axis, dim)
    return dx_md.astype(x_md.dtype), dw_edf.astype(w_edf.dtype), None


_grouped.defvjp(_forward, _backward)


def _whole(options: _Options, w_edf: Array, x: Array) -> Array:
    """The matrices in the dtype of the rows, put together after that so that less is moved."""
    # Convert before the gather: bfloat16 halves what is sent.
    w_edf = w_edf.astype(x.dtype)
    if options.gather is None:
        return w_edf
    return gathered(w_edf, *options.gather)


def _rows_times(options: _Options, x_md: Array, w_edf: Array, rows_e: Array) -> Array:
    """[M, F] float32."""
    y_mf = _choose(options, _KERNELS_OF_ROWS, x_md, w_edf, rows_e)
    # Kernels may leave the rows past the last group uninitialised, and NaN times 0 is NaN.
    return jnp.where((jnp.arange(x_md.shape[0]) < rows_e.sum())[:, None], y_mf, 0)


def _by_group(options: _Options, x_md: Array, g_mf: Array, rows_e: Array) -> Array:
    """[E, D, F] float32: the sum over each group's rows of their outer products."""
    return _choose(options, _KERNELS_BY_GROUP, x_md, g_mf, rows_e)


def _choose(options: _Options, kernels: dict[str, Callable[..., Array]], *args: Array) -> Array:
    kernel, where = options.kernel, options.platform
    if kernel == "auto":
        # XLA's ragged products on TPUs are fast for rows times matrices only; see ``KERNELS``.
        on_tpu = "megablox" if kernels is _KERNELS_BY_GROUP else "ragged"
        on_gpu = "triton" if args[0].dtype.itemsize == 2 and gpu.new_enough() else "ragged"
        kernel = {"cpu": "blocks", "tpu": on_tpu, "gpu": on_gpu}.get(where, "ragged")
    run = kernels[kernel]
    if kernel in _PALLAS:
        run = functools.partial(run, interpret=where != _PALLAS[kernel])
    if options.one_of == 1:
        return run(*args)
    with jax.named_scope(f"one_of_{options.one_of}"):  # read by plan.costs
        return run(*args)


# ---------------------------------------------------------------- XLA's own


def _ragged_rows(x_md: Array, w_edf: Array, rows_e: Array) -> Array:
    return jax.lax.ragged_dot(x_md, w_edf, rows_e, preferred_element_type=jnp.float32)


_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),  # rows are what is summed over
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _ragged_groups(x_md: Array, g_mf: Array, rows_e: Array) -> Array:
    return jax.lax.ragged_dot_general(
        x_md, g_mf, rows_e, _BY_GROUP, preferred_element_type=jnp.float32
    )


# ---------------------------------------------------------------- a loop over blocks


class Block(NamedTuple):
    """Rows start .. start + rows - 1, all of one group."""

    group: Array
    start: Array
    rows: Array


def _height(rows: int, groups: int) -> int:
    """Rows of a block: a power of two near the mean run, so that half a block is lost to each."""
    # A block reads one matrix: lower blocks read matrices more often, higher ones pad more rows.
    mean = max(rows // groups, 1)
    return min(max(1 << (mean.bit_length() - 1), _LEAST), _TILE)


def blocks(rows_e: Array, height: int) -> tuple[Array, Callable[[Array], Block]]:
    """The number of blocks, [] int32, and the block of each index, in row order."""
    # Shapes are static but run lengths are not: the list of blocks exists only as this function of
    # i, and the loop runs to the actual count.
    count_e = (rows_e + height - 1) // height
    last_e, end_e = jnp.cumsum(count_e), jnp.cumsum(rows_e)

    def block(i: Array) -> Block:
        group = jnp.searchsorted(last_e, i, side="right")
        offset = (i - (last_e[group] - count_e[group])) * height
        start = end_e[group] - rows_e[group] + offset
        return Block(group, start, jnp.minimum(rows_e[group] - offset, height))

    return last_e[-1], block


def _padded(x_md: Array, height: int) -> Array:
    """The rows with padding for a block that begins at the last one."""
    return jnp.pad(x_md, ((0, height), (0, 0)))


def _blocks_rows(x_md: Array, w_edf: Array, rows_e: Array) -> Array:
    m, f = x_md.shape[0], w_edf.shape[2]
    height = _height(m, rows_e.shape[0])
    count, block = blocks(rows_e, height)
    x_md = _padded(x_md, height)

    def visit(i: Array, y_mf: Array) -> Array:
        at = block(i)
        x = jax.lax.dynamic_slice_in_dim(x_md, at.start, height)
        w = jax.lax.dynamic_index_in_dim(w_edf, at.group, keepdims=False)
        # What a block writes past its own rows, the next one writes over.
        y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(y_mf, y, at.start, 0)

    # ``height`` rows of slack, so that the last block's slice stays inside: XLA would clamp its
    # start and multiply the wrong rows.
    y_mf = jnp.zeros((m + height, f), jnp.float32)
    return jax.lax.fori_loop(0, count, visit, y_mf)[:m]


def _blocks_groups(x_md: Array, g_mf: Array, rows_e: Array) -> Array:
    (m, d), f, groups = x_md.shape, g_mf.shape[1], rows_e.shape[0]
    height = _height(m, groups)
    count, block = blocks(rows_e, height)
    x_md, g_mf = _padded(x_md, height), _padded(g_mf, height)
    row = jnp.arange(height)

    def visit(i: Array, dw_edf: Array) -> Array:
        at = block(i)
        x, g = (jax.lax.dynamic_slice_in_dim(a, at.start, height) for a in (x_md, g_mf))
        # A block reaches into the next group's rows; here they would be summed into the wrong
        # matrix, while the forward pass just overwrites them.
        g = jnp.where((row < at.rows)[:, None], g, 0)
        dw = jnp.matmul(x.T, g, preferred_element_type=jnp.float32)
        old = jax.lax.dynamic_index_in_dim(dw_edf, at.group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_edf, old + dw, at.group, 0)

    return jax.lax.fori_loop(0, count, visit, jnp.zeros((groups, d, f), jnp.float32))


# ---------------------------------------------------------------- megablox


def _tiles(m: int, k: int, n: int) -> tuple[int, int, int]:
    return _TILE, min(k, 512), min(n, 512)  # a narrower matrix is one tile


def _whole_tiles(x_md: Array) -> Array:
    return jnp.pad(x_md, ((0, -x_md.shape[0] % _TILE), (0, 0)))


def _megablox_rows(x_md: Array, w_edf: Array, rows_e: Array, *, interpret: bool) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiles = _tiles(x_md.shape[0], *w_edf.shape[1:])
    # The kernel's grid is in whole tiles of rows; the padding belongs to no group and is cut off
    # below.
    padded = _whole_tiles(x_md)
    y_mf = gmm(padded, w_edf, rows_e, jnp.float32, tiles, interpret=interpret)
    return y_mf[: x_md.shape[0]]


def _megablox_groups(x_md: Array, g_mf: Array, rows_e: Array, *, interpret: bool) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = _tiles(x_md.shape[0], x_md.shape[1], g_mf.shape[1])
    x_md, g_mf = _whole_tiles(x_md), _whole_tiles(g_mf)
    return tgmm(x_md.T, g_mf, rows_e, jnp.float32, tiles, interpret=interpret)


# ---------------------------------------------------------------- GPUs


def _triton_rows(x_md: Array, w_edf: Array, rows_e: Array, *, interpret: bool) -> Array:
    from jrl.models.gpu_kernels import grouped as gpu_grouped  # Pallas takes long to import

    (m, _), groups = x_md.shape, rows_e.shape[0]
    height = gpu_grouped.block_rows(m, groups)
    count, block = blocks(rows_e, height)
    # As many as there can be: each group's last block may be short.
    numbers = jnp.arange(m // height + groups)
    at = jax.vmap(block)(numbers)
    rows = jnp.where(numbers < count, at.rows, 0)
    group = jnp.minimum(at.group, groups - 1).astype(jnp.int32)
    return gpu_grouped.rows_times(x_md, w_edf, at.start, rows, group, interpret=interpret)


def _triton_groups(x_md: Array, g_mf: Array, rows_e: Array, *, interpret: bool) -> Array:
    from jrl.models.gpu_kernels import grouped as gpu_grouped

    return gpu_grouped.by_group(x_md, g_mf, rows_e, interpret=interpret)


_PALLAS = {"megablox": "tpu", "triton": "gpu"}
"""Kernels of Pallas, and the platform that they are not interpreted on."""
_KERNELS_OF_ROWS: dict[str, Callable[..., Array]] = {
    "blocks": _blocks_rows,
    "megablox": _megablox_rows,
    "ragged": _ragged_rows,
    "triton": _triton_rows,
}
_KERNELS_BY_GROUP: dict[str, Callable[..., Array]] = {
    "blocks": _blocks_groups,
    "megablox": _megablox_groups,
    "ragged": _ragged_groups,
    "triton": _triton_groups,
}
