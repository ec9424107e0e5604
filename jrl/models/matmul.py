"""Matrix products in the dtype of the activations, accumulated in float32 in both directions.

The derivative that JAX makes of a reduced-precision product multiplies float32 cotangents by
reduced-precision operands, which leaves the fast matrix units, and rounds the gradient of a float32
weight on the way. Here it is written out: the backward pass multiplies reduced-precision numbers
too, and the gradient of each operand leaves in that operand's dtype.

All tuning for CPUs is behind this module, in ``models/cpu.py``; nothing else imports that.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.mesh import parts_of, platform
from jrl.models import cpu
from jrl.models.weights import Factored
from jrl.types import Array

PRODUCT = "product"
"""The name, for rematerialisation, of results of products with weights."""

SEEN = "seen"
"""The same for what attention's backward pass starts from: weights, outputs, log sums."""


def project(
    spec: str, x: Array, w: Array | Factored, dtype: Any = None, divided: str | None = None
) -> Array:
    """``matmul`` of activations with a weight, named ``PRODUCT`` for rematerialisation."""
    # A policy that looks for products does not find those inside a custom derivative.
    if isinstance(w, Factored):
        out = w.times(spec, x, dtype, divided)
    else:
        out = matmul(spec, x, w, dtype, divided)
    return checkpoint_name(out, PRODUCT)


def divided(side: str, logical: str, size: int) -> str | None:
    """``side`` where devices divide an axis of this logical name and size on that side of a weight.

    None on CPUs, which cannot sum shorter numbers in float32 in one product.
    """
    return side if platform() != "cpu" and parts_of(logical, size) > 1 else None


def part_dtype(dtype: Any, wide: bool) -> Any:
    """In which dtype a device's part of a sum over devices is sent: float32, or the activations'.

    A device sums its own part in float32 either way, and rounds it once before it is sent, which
    halves what tensor parallelism sends. The parts are few, so that this is no more than the
    rounding of what comes out.
    """
    return jnp.float32 if wide else dtype


def prepare_weight(w: Array, inputs: int) -> Array | Factored:
    """A weight as ``project`` multiplies few rows by it fastest, over and over.

    Args:
      w: [input axes, output axes].
      inputs: how many axes are summed over.
    """
    return cpu.WeightFirst.of(w, inputs) if cpu.tuned(w.dtype) else w


def time_follows_rows() -> bool:
    """Whether products of few rows take less time the fewer the rows are.

    False on accelerators: there they take as long as reading the weights does.
    """
    return cpu.time_follows_rows()


def matmul(spec: str, x: Array, w: Array, dtype: Any = None, divided: str | None = None) -> Array:
    """``einsum(spec, x, w)`` in the dtype of ``x``, accumulated in float32.

    Args:
      spec: an einsum of two operands, without ellipsis.
      x: activations.
      w: the other operand, converted to the dtype of ``x`` for the product.
      dtype: of the result; None for that of ``x``.
      divided: whether devices divide the "inputs" or the "outputs" of the weight; then parts of the
        sum over the inputs, or of that over the outputs in the backward pass, are added up over
        devices in the dtype of ``x``. See ``part_dtype``.
    """
    return _matmul(spec, x, w, dtype, divided)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _matmul(spec: str, x: Array, w: Array, dtype: Any, divided: str | None) -> Array:
    out = einsum(spec, x, w.astype(x.dtype), part_dtype(x.dtype, divided != "inputs"))
    return out.astype(dtype or x.dtype)


def _forward(
    spec: str, x: Array, w: Array, dtype: Any, divided: str | None
) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(spec, x, w, dtype, divided), (x, w)


def _backward(
    spec: str, dtype: Any, divided: str | None, kept: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    del dtype
    return gradients(spec, *kept, g, divided)


_matmul.defvjp(_forward, _backward)


def gradients(
    spec: str, x: Array, w: Array, g: Array, divided: str | None = None
) -> tuple[Array, Array]:
    """Of ``x`` and ``w``, in their dtypes, where that of ``matmul(spec, x, w)`` is ``g``."""
    operands, out = spec.split("->")
    left, right = operands.split(",")
    g = g.astype(x.dtype)
    # Weights first: XLA's CPU backend cannot sum bfloat16 in float32 for every other order.
    sent = part_dtype(x.dtype, divided != "outputs")
    dx = gradient_einsum(f"{right},{out}->{left}", w.astype(x.dtype), g, sent)
    dw = gradient_einsum(f"{left},{out}->{right}", x, g)
    return dx.astype(x.dtype), dw.astype(w.dtype)


def einsum(spec: str, a: Array, b: Array, dtype: Any = jnp.float32) -> Array:
    """``jnp.einsum`` of two operands, summed in float32, for forward passes."""
    if cpu.tuned(a.dtype):
        return cpu.einsum(spec, a, b)
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def gradient_einsum(spec: str, a: Array, b: Array, dtype: Any = jnp.float32) -> Array:
    """The same for backward passes, whose products sum over rows or over a weight's outputs."""
    if cpu.tuned(a.dtype):
        return cpu.gradient_einsum(spec, a, b)
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)
