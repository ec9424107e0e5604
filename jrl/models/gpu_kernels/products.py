"""Products of few rows with matrices, and the residual and norm that read them, on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jrl.models.gpu_kernels.common import LEAST, place, power
from jrl.types import Array

FEW = 64
"""Most rows of a device for which these kernels take less time than XLA's products and sums."""

_WIDE, _DEEP = 64, 128
"""Outputs and inputs of a weight that a program reads at a time."""

_LEAST_DEEP = 64
"""Inputs where ``_DEEP`` does not divide them, and of ``gated``."""

PAIRED = 32
"""Columns of a gate that lie beside those of up; see ``gated``."""

_NORM_WARPS = 16
"""Of a program of ``added_norm``, which has one row: what it waits for is memory."""

_ENOUGH = 128
"""Programs of a product: about one for each processor of an H100; more parts are only more to add
up."""


class Weight(NamedTuple):
    """A matrix to multiply by.

    Attributes:
      values: [D, N], 16-bit floats, or int8 or float8_e4m3fn.
      scales: [N] float32 of values in 8 bits; else None.
    """

    values: Array
    scales: Array | None = None


def takes_product(rows: int, inputs: int, outputs: int) -> bool:
    """Whether ``few_rows`` has a kernel for these sizes."""
    return rows <= FEW and inputs % _LEAST_DEEP == 0 and outputs % _WIDE == 0


@functools.partial(jax.jit, static_argnames=("interpret",))
def few_rows(x_sd: Array, weight: Weight, *, interpret: bool = False) -> Array:
    """The product of few rows with a matrix, in parts that whoever reads them adds up.

    Args:
      x_sd: [S, D], 16-bit floats.
      weight: of sizes that ``takes_product``.
      interpret: see ``attend_cache``.

    Returns:
      [n, S, N] float32. A GPU is filled by some hundred programs, so that with few outputs each
      sums a part of the inputs; adding the parts in a kernel of its own would take as long as a
      fifth of the product.
    """
    (s, d), n = x_sd.shape, weight.values.shape[1]
    parts, deep = 1, _DEEP if d % _DEEP == 0 else _LEAST_DEEP
    # Doubled until the GPU is full, as long as each part still reads whole blocks of inputs.
    while n // _WIDE * parts < _ENOUGH and d % (2 * parts * deep) == 0 and parts < 8:
        parts *= 2

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        i, part = pl.program_id(0), pl.program_id(1)
        at = i * _WIDE + jnp.arange(_WIDE)
        sums = _accumulated(x_ref, w_ref, at, part * (d // parts), d // parts, s, deep)
        if weight.scales is not None:
            sums = sums * plgpu.load(place(refs[0], at))[None]
        # There are 16 rows at least, and S may be fewer. The second condition always holds: a mask
        # must have the shape of what is stored.
        rows = jnp.arange(sums.shape[0])[:, None]
        out = place(refs[-1], part, rows, at[None])
        plgpu.store(out, sums, mask=(rows < s) & (at[None] >= 0))

    scales = [] if weight.scales is None else [weight.scales]
    return pl.pallas_call(
        kernel,
        grid=(n // _WIDE, parts),
        out_shape=jax.ShapeDtypeStruct((parts, s, n), jnp.float32),
        # Four blocks of the weight are under way at a time: programs wait for memory alone.
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="few_rows",
    )(x_sd, weight.values, *scales)


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def gated(
    x_sd: Array,
    weight: Weight,
    activation: Callable[[Array], Array],
    *,
    interpret: bool = False,
) -> Array:
    """activation(x @ gate) * (x @ up) of few rows.

    Args:
      x_sd: [S, D], 16-bit floats.
      weight: [D, 2 F], ``PAIRED`` columns of the gate and those of up, in turn, so that a program
        reads whole lines of memory and has both; ``takes_product`` holds for 2 F.
      activation: of the gate.
      interpret: see ``attend_cache``.

    Returns:
      [S, F] in the dtype of ``x_sd``.
    """
    (s, d), f = x_sd.shape, weight.values.shape[1] // 2
    dtype = x_sd.dtype

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        i = pl.program_id(0)
        at = i * 2 * PAIRED + jnp.arange(2 * PAIRED)
        sums = _accumulated(x_ref, w_ref, at, 0, d, s, _LEAST_DEEP)
        if weight.scales is not None:
            sums = sums * plgpu.load(place(refs[0], at))[None]
        # Triton cuts no piece out of a block, so each half is summed out of both under a mask.
        pair = sums.reshape(-1, 2, PAIRED)
        second = jax.lax.broadcasted_iota(jnp.int32, pair.shape, 1)
        gate, up = (jnp.where(second == n, pair, 0.0).sum(1) for n in (0, 1))
        # Rounded where the plain functions round: products first, then what the activation gives.
        gate, up = (x.astype(dtype).astype(jnp.float32) for x in (gate, up))
        gate = activation(gate).astype(dtype).astype(jnp.float32)
        rows = jnp.arange(gate.shape[0])[:, None]
        columns = i * PAIRED + jnp.arange(PAIRED)[None]
        out = place(refs[-1], rows, columns)
        plgpu.store(out, (gate * up).astype(dtype), mask=(rows < s) & (columns >= 0))

    scales = [] if weight.scales is None else [weight.scales]
    return pl.pallas_call(
        kernel,
        grid=(f // PAIRED,),
        out_shape=jax.ShapeDtypeStruct((s, f), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=5),
        interpret=interpret,
        name="gated",
    )(x_sd, weight.values, *scales)


def _accumulated(
    x_ref: Any, w_ref: Any, columns: Array, start: Any, inputs: int, s: int, deep: int
) -> Array:
    """Sums over some inputs of x times some columns of the weight, [S or more, n]."""
    # Fewer than 16 rows are no product for the matrix units; those beyond S are zeros.
    rows = jnp.arange(max(power(s), LEAST))[:, None]

    def block(j: Any, sums: Array) -> Array:
        at = start + j * deep + jnp.arange(deep)
        x = plgpu.load(place(x_ref, rows, at[None]), mask=(rows < s) & (at[None] >= 0), other=0)
        w = plgpu.load(place(w_ref, at[:, None], columns[None]))
        # Memory sends 8 bits, and the matrix units get 16: a block is converted as it comes.
        w = _halves(w) if is_float8 else w
        return sums + plgpu.dot(x, w.astype(x.dtype))

    is_float8 = w_ref.dtype == jnp.float8_e4m3fn
    begin = jnp.zeros((rows.shape[0], columns.shape[0]), jnp.float32)
    sums = jax.lax.fori_loop(0, inputs // deep, block, begin)
    # A power of two, so it may come once, behind the sum.
    return sums * _PER_HALF if is_float8 else sums


_PER_HALF = 256
"""Divisor of ``_halves``: 2^(15 - 7), of the biases of the two exponents."""


def _halves(x: Array) -> Array:
    """Numbers in float8_e4m3fn, divided by ``_PER_HALF``, as float16: exact, subnormals too.

    The sign goes to the top and the other seven bits, four of them the exponent, below the first
    bit of float16's five. Chips before Ada (compute capability 8.9) have no instruction for this,
    and LLVM ends the process where it is asked for one.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
    return jax.lax.bitcast_convert_type((bits << 7) & jnp.int16(-0x4080), jnp.float16)


# ---------------------------------------------------------------- residuals


@functools.partial(jax.jit, static_argnames=("eps", "plus_one", "interpret"))
def added_norm(
    x_sd: Array,
    out_nsd: Array,
    weight: Array,
    *,
    eps: float,
    plus_one: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """``x + out`` and the norm of that, as ``layers.rms_norm`` has it.

    Args:
      x_sd: [S, D].
      out_nsd: [n, S, D], parts that are added up and rounded to the dtype of ``x_sd``.
      weight: [D].
      eps: of the norm.
      plus_one: whether it multiplies by 1 + weight.
      interpret: see ``attend_cache``.
    """
    s, d = x_sd.shape
    # A program has a whole row, so that the sum and its norm take one pass over memory.
    wide, parts = power(d), out_nsd.shape[0]

    def kernel(x_ref: Any, out_ref: Any, w_ref: Any, sum_ref: Any, normed_ref: Any) -> None:
        columns = jnp.arange(wide)
        mask = columns < d

        def read(ref: Any, *lead: int) -> Array:
            return plgpu.load(place(ref, *lead, columns), mask=mask, other=0)

        out = [read(out_ref, i, 0).astype(jnp.float32) for i in range(parts)]
        x = read(x_ref, 0) + functools.reduce(jnp.add, out).astype(x_sd.dtype)
        plgpu.store(place(sum_ref, 0, columns), x, mask=mask)
        # Of the rounded sum, as the plain norm reads it from memory.
        x32, w = x.astype(jnp.float32), read(w_ref).astype(jnp.float32)
        scale = jax.lax.rsqrt((x32 * x32).sum(0) / d + eps)
        normed = (x32 * scale * (1.0 + w if plus_one else w)).astype(x.dtype)
        plgpu.store(place(normed_ref, 0, columns), normed, mask=mask)

    row = pl.BlockSpec((1, d), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((s, d), x_sd.dtype)
    out_spec = pl.BlockSpec((parts, 1, d), lambda i: (0, i, 0))
    return pl.pallas_call(
        kernel,
        grid=(s,),
        in_specs=[row, out_spec, pl.BlockSpec((d,), lambda i: (0,))],
        out_specs=[row, row],
        out_shape=[shape, shape],
        compiler_params=plgpu.CompilerParams(num_warps=_NORM_WARPS),
        interpret=interpret,
        name="added_norm",
    )(x_sd, out_nsd, weight)
