"""Matrix products in the dtype of the activations, accumulated in float32 in both directions.

The derivative that JAX makes of a reduced-precision product multiplies float32 cotangents by
reduced-precision operands, which leaves the fast matrix units, and rounds the gradient of a float32
weight on the way. Here it is written out: the backward pass multiplies reduced-precision numbers
too, and the gradient of each operand leaves in that operand's dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.types import Array

PRODUCT = "product"
"""The name, for rematerialisation, of results of products with weights."""


def contract(spec: str, x: Array, w: Array, dtype: Any = None) -> Array:
    """``product`` of activations with a weight, named ``PRODUCT`` for rematerialisation."""
    # A policy that looks for products does not find those inside a custom derivative.
    return checkpoint_name(product(spec, x, w, dtype), PRODUCT)


def product(spec: str, x: Array, w: Array, dtype: Any = None) -> Array:
    """``einsum(spec, x, w)`` in the dtype of ``x``, accumulated in float32.

    Args:
      spec: an einsum of two operands, without ellipsis.
      x: activations.
      w: the other operand, converted to the dtype of ``x`` for the product.
      dtype: of the result; None for that of ``x``.
    """
    return _product(spec, x, w, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(spec: str, x: Array, w: Array, dtype: Any) -> Array:
    out = jnp.einsum(spec, x, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return out.astype(dtype or x.dtype)


def _forward(spec: str, x: Array, w: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return _product(spec, x, w, dtype), (x, w)


def _backward(spec: str, dtype: Any, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = kept
    operands, out = spec.split("->")
    left, right = operands.split(",")
    g = g.astype(x.dtype)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # The order of operands matters to XLA on the CPU; see ``attention.attend``.
    dx = einsum(f"{right},{out}->{left}", w.astype(x.dtype), g)
    dw = einsum(f"{left},{out}->{right}", x, g)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_product.defvjp(_forward, _backward)
