"""Norms of heads and their rotation in one pass, and the gradient of both in another, on GPUs.

XLA makes three kernels of the first and eight of the second, with float32 numbers between them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jrl.models.gpu_kernels.common import place
from jrl.types import Array

_ROWS = 32
"""Heads of tokens that a program reads at a time."""

Halves = tuple[Array, Array]
"""Of the numbers of a head, which the rotation takes in pairs: [n, h / 2] twice."""


class Norm(NamedTuple):
    """Compile-time settings of the kernels.

    Attributes:
      eps: of the norm.
      plus_one: whether it multiplies by 1 + weight.
      interpret: whether to run step by step on any platform.
    """

    eps: float
    plus_one: bool = False
    interpret: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def norm_rotated(
    how: Norm, x_nhd: Array, weight: Array | None, cos_mr: Array, sin_mr: Array
) -> Array:
    """``rope.rotate`` of ``layers.rms_norm``, rounded between them as there.

    Args:
      how: see ``Norm``.
      x_nhd: [N, H, h] of tokens, 16-bit floats; h is a power of two.
      weight: [h] of the norm; None for the rotation alone.
      cos_mr: [M, h / 2] float32, of token n the row n modulo M; no gradient reaches it.
      sin_mr: the same.
    """
    return _forward(how, x_nhd, weight, cos_mr, sin_mr)[0]


def _forward(
    how: Norm, x_nhd: Array, weight: Array | None, cos_mr: Array, sin_mr: Array
) -> tuple[Array, tuple]:
    def kernel(x_ref: Any, *refs: Any) -> None:
        rows = _rows()
        x = _halves(x_ref, rows, x_nhd)
        cos, sin = _turn(refs[-3], refs[-2], rows, x_nhd, cos_mr)
        if weight is not None:
            scale, w = _scale(how, x, x_nhd), _weight(how, refs[0], x_nhd)
            # In two halves from here on: rotation takes number i with number i + h / 2.
            x = _rounded((x[0] * scale * w[0], x[1] * scale * w[1]), x_nhd)
        out = x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin
        _store(refs[-1], rows, out, x_nhd)

    weights = [] if weight is None else [weight]
    out = _call(kernel, how, x_nhd, "norm_rotated", [])(x_nhd, *weights, cos_mr, sin_mr)[0]
    # The scale is computed again from x, which is read in any case.
    return out, (x_nhd, weight, cos_mr, sin_mr)


def _backward(how: Norm, residuals: tuple, g_nhd: Array) -> tuple[Array, Array | None, None, None]:
    x_nhd, weight, cos_mr, sin_mr = residuals
    size = x_nhd.shape[2]

    def kernel(x_ref: Any, g_ref: Any, *refs: Any) -> None:
        rows = _rows()
        gradient = _halves(g_ref, rows, x_nhd)
        if weight is None:
            cos, sin = _turn(refs[0], refs[1], rows, x_nhd, cos_mr)
            _store(refs[2], rows, _turned_back(gradient, cos, sin), x_nhd)
            return
        cos, sin = _turn(refs[1], refs[2], rows, x_nhd, cos_mr)
        back = _rounded(_turned_back(gradient, cos, sin), x_nhd)
        x, w = _halves(x_ref, rows, x_nhd), _weight(how, refs[0], x_nhd)
        scale = _scale(how, x, x_nhd)
        by_weight = back[0] * w[0], back[1] * w[1]
        # The scale depends on all numbers of a head: its part of the gradient points along x.
        along = (by_weight[0] * x[0] + by_weight[1] * x[1]).sum(1)[:, None] / size
        pull = scale * scale * scale * along
        dx = scale * by_weight[0] - x[0] * pull, scale * by_weight[1] - x[1] * pull
        _store(refs[3], rows, dx, x_nhd)
        for i in (0, 1):
            # A program writes its own sums of the weight's gradient, added up behind the kernel:
            # atomic additions would end in another order each time.
            part = (back[i] * x[i] * scale).sum(0)
            columns = i * (size // 2) + jnp.arange(size // 2)
            plgpu.store(place(refs[4], pl.program_id(0), columns), part)

    if weight is None:
        dx = _call(kernel, how, x_nhd, "rotated_back", [])(x_nhd, g_nhd, cos_mr, sin_mr)[0]
        return dx, None, None, None
    sums = jax.ShapeDtypeStruct((_programs(x_nhd), size), jnp.float32)
    call = _call(kernel, how, x_nhd, "norm_rotated_back", [sums])
    dx, parts = call(x_nhd, g_nhd, weight, cos_mr, sin_mr)
    return dx, parts.sum(0).astype(weight.dtype), None, None


norm_rotated.defvjp(_forward, _backward)


def _programs(x_nhd: Array) -> int:
    return -(-(x_nhd.shape[0] * x_nhd.shape[1]) // _ROWS)


def _call(kernel: Any, how: Norm, x_nhd: Array, name: str, more: list[Any]) -> Any:
    return pl.pallas_call(
        kernel,
        grid=(_programs(x_nhd),),
        out_shape=[jax.ShapeDtypeStruct(x_nhd.shape, x_nhd.dtype), *more],
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=how.interpret,
        name=name,
    )


def _rows() -> Array:
    """[n, 1], the heads of tokens that this program has."""
    return pl.program_id(0) * _ROWS + jnp.arange(_ROWS)[:, None]


def _at(ref: Any, rows: Array, half: int, x_nhd: Array) -> tuple[Any, Array]:
    """Places of a half of some heads, and which of these exist."""
    tokens, heads, size = x_nhd.shape
    columns = half * (size // 2) + jnp.arange(size // 2)[None]
    exists = (rows < tokens * heads) & (columns >= 0)
    return place(ref, rows // heads, rows % heads, columns), exists


def _halves(ref: Any, rows: Array, x_nhd: Array) -> Halves:
    both = [_at(ref, rows, half, x_nhd) for half in (0, 1)]
    first, second = (plgpu.load(at, mask=mask, other=0).astype(jnp.float32) for at, mask in both)
    return first, second


def _store(ref: Any, rows: Array, halves: Halves, x_nhd: Array) -> None:
    for half, values in enumerate(halves):
        at, exists = _at(ref, rows, half, x_nhd)
        plgpu.store(at, values.astype(x_nhd.dtype), mask=exists)


def _turn(cos_ref: Any, sin_ref: Any, rows: Array, x_nhd: Array, cos_mr: Array) -> Halves:
    """Cosines and sines of the tokens of some heads."""
    # Unmasked: rows beyond the last get the angles of other tokens, and are never stored.
    token, columns = rows // x_nhd.shape[1] % cos_mr.shape[0], jnp.arange(cos_mr.shape[1])[None]
    cos, sin = (plgpu.load(place(ref, token, columns)) for ref in (cos_ref, sin_ref))
    return cos, sin


def _turned_back(x: Halves, cos: Array, sin: Array) -> Halves:
    return x[0] * cos + x[1] * sin, x[1] * cos - x[0] * sin


def _scale(how: Norm, x: Halves, x_nhd: Array) -> Array:
    """[n, 1] of the norm."""
    squares = (x[0] * x[0] + x[1] * x[1]).sum(1)[:, None]
    return jax.lax.rsqrt(squares / x_nhd.shape[2] + how.eps)


def _weight(how: Norm, ref: Any, x_nhd: Array) -> Halves:
    half = x_nhd.shape[2] // 2
    both = (plgpu.load(place(ref, i * half + jnp.arange(half))) for i in (0, 1))
    first, second = (w.astype(jnp.float32)[None] + how.plus_one for w in both)
    return first, second


def _rounded(x: Halves, x_nhd: Array) -> Halves:
    """As if stored and read again, which the plain functions do."""
    first, second = (half.astype(x_nhd.dtype).astype(jnp.float32) for half in x)
    return first, second
