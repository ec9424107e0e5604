"""The product with a frozen matrix and its adapter, in one on a GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jrl.mesh import Axes, parts_of, platform
from jrl.types import Array


def joins(spec: str, x: Array, base: Array, axes: Axes | None) -> bool:
    """Whether one product of longer rows, [x, x A] times [W; B], is faster than two and a sum.

    On a GPU two float32 products are written and read again to be summed and rounded, which for a
    wide matrix takes as long as a third of the product itself; the longer rows and matrix are
    copies. Compilers for TPUs and CPUs sum while they multiply. Copying the matrix for the few rows
    of a decode step would double what that reads, and one that devices divide cannot be prolonged.
    """
    if platform() != "gpu" or x.dtype == jnp.float32 or axes is None:
        return False
    if any(parts_of(name, size) > 1 for name, size in zip(axes, base.shape, strict=True) if name):
        return False
    if parts_of("length", x.shape[1]) > 1:
        return False
    inputs, outputs, rows = _sizes(spec, x, base)
    rows //= parts_of("batch", x.shape[0])
    # Bytes: float32 numbers written and read again and rounded ones written, against two copies.
    return 14 * rows * outputs > 1.5 * 4 * inputs * (rows + outputs)


def _sizes(spec: str, x: Array, base: Array) -> tuple[int, int, int]:
    """Numbers of a row of ``x``, of one of the product, and rows."""
    n = _inputs(spec)
    return math.prod(base.shape[:n]), math.prod(base.shape[n:]), math.prod(x.shape[:-n])


def _inputs(spec: str) -> int:
    """Axes of the weight that are summed over; they lead in it and trail in the activations."""
    operands, out = spec.split("->")
    return sum(c not in out for c in operands.split(",")[1])


def _longer(x: Array, w: Array, low: Array, thin: Array, dtype: Any) -> Array:
    """[rows, k] times [k, n] and [rows, r] times [r, n], one product, summed in float32.

    Like the others here it is written in the dtype that it is rounded to; see ``written_as``.
    """
    left = jnp.concatenate([x, low.astype(x.dtype)], axis=1)
    right = jnp.concatenate([w.astype(x.dtype), thin.astype(x.dtype)], axis=0)
    return jnp.einsum("mk,kn->mn", left, right, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def joined(
    spec: str,
    scale: float,
    dtype: Any,
    x: Array,
    base: Array,
    a: Array,
    b: Array,
) -> Array:
    """The activations times W plus ``scale`` A B, as [x, x A] times [W; B].

    Args:
      spec: of the product with W: its inputs trail in x and lead in W, as in "bqd,dhk->bqhk".
      scale: of the adapter.
      dtype: of the result, rounded once from the float32 sum.
      x: activations.
      base: W, [inputs, outputs].
      a: A, [inputs, rank].
      b: B, [rank, outputs].
    """
    return _forward(spec, scale, dtype, x, base, a, b)[0]


def _forward(
    spec: str,
    scale: float,
    dtype: Any,
    x: Array,
    base: Array,
    a: Array,
    b: Array,
) -> tuple[Array, tuple[Array, ...]]:
    inputs, outputs, rows = _sizes(spec, x, base)
    lead = x.shape[: -_inputs(spec)]
    x_mk, low_mr = x.reshape(rows, inputs), _low(x, a, inputs, scale)
    out = _longer(x_mk, base.reshape(inputs, outputs), low_mr, b.reshape(-1, outputs), dtype)
    return out.reshape(*lead, *base.shape[_inputs(spec) :]), (x, base, a, b, low_mr)


def _low(x: Array, a: Array, inputs: int, scale: float) -> Array:
    """[rows, rank]: the activations times A, scaled."""
    x_mk, a_kr = x.reshape(-1, inputs), a.reshape(inputs, -1).astype(x.dtype)
    low = jnp.einsum("mk,kr->mr", x_mk, a_kr, preferred_element_type=x.dtype)
    return low * jnp.asarray(scale, low.dtype)


def _backward(
    spec: str, scale: float, dtype: Any, residuals: tuple[Array, ...], g: Array
) -> tuple[Array, Array, Array, Array]:
    del dtype
    x, base, a, b, low_mr = residuals
    inputs, outputs, rows = _sizes(spec, x, base)
    x_mk, g_mn = x.reshape(rows, inputs), g.reshape(rows, outputs).astype(x.dtype)
    w_kn, a_kr = base.reshape(inputs, outputs).astype(x.dtype), a.reshape(inputs, -1)
    b_rn = b.reshape(-1, outputs)
    product = partial(jnp.einsum, preferred_element_type=x.dtype)
    back_mr = product("rn,mn->mr", b_rn.astype(x.dtype), g_mn)
    back_mr = back_mr * jnp.asarray(scale, x.dtype)
    if 4 * rows * inputs > 1.5 * 4 * outputs * (rows + inputs):  # written and read once more
        dx = _longer(g_mn, w_kn.T, back_mr, a_kr.T, x.dtype)
    else:
        dx = product("kn,mn->mk", w_kn, g_mn)
        dx += product("kr,mr->mk", a_kr.astype(x.dtype), back_mr)
    # Sums over all rows, perhaps of several devices: in float32.
    over_rows = partial(jnp.einsum, preferred_element_type=jnp.float32)
    # Of the frozen matrix nobody asks for it, and XLA drops the product.
    of_base = over_rows("mk,mn->kn", x_mk, g_mn).reshape(base.shape).astype(base.dtype)
    of_a = over_rows("mk,mr->kr", x_mk, back_mr).reshape(a.shape).astype(a.dtype)
    of_b = over_rows("mr,mn->rn", low_mr, g_mn).reshape(b.shape).astype(b.dtype)
    return dx.reshape(x.shape), of_base, of_a, of_b


joined.defvjp(_forward, _backward)
