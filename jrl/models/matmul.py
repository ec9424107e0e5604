"""Large float32 products on the CPU, given to the faster of the two libraries that XLA has there.

XLA hands matrix products to YNNPACK, and a convolution of width one, which is the same numbers, to
Eigen. Eigen is the faster one at the sizes of a decoder: by a tenth to a third with thousands of
rows, and with tens of rows by half, if the weights are the first operand (measured with JAX 0.10
and 0.12 on two cores with AVX-512). Small products, and batches of matrices as in attention, are
faster where XLA puts them.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jrl.mesh import divided, platform
from jrl.types import Array

FEW = 64
"""Rows up to which weights are better the first operand."""
_LARGE = 2**24
"""Multiplications from which a product is worth the choice."""


def chosen(dtype: Any) -> bool:
    """Whether the library is chosen here: in float32, on a CPU, where no mesh divides programs."""
    return dtype == jnp.float32 and platform() == "cpu" and not divided()


def large(spec: str, x: Array, w: Array) -> Array | None:
    """``einsum(spec, x, w)`` if it is one large product of two matrices; else None.

    Args:
      spec: "<rows><summed>,<summed><columns>-><rows><columns>", or the second operand turned.
      x: many rows.
      w: of the same dtype.
    """
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    summed = "".join(c for c in left if c in right and c not in out)
    rows, columns = left.removesuffix(summed), "".join(c for c in right if c not in summed)
    straight = right == summed + columns
    if not straight and right != columns + summed:
        return None
    if not summed or not columns or out != rows + columns or not chosen(x.dtype):
        return None
    size = dict(zip(left + right, x.shape + w.shape, strict=True))
    m, k, n = (math.prod(size[c] for c in letters) for letters in (rows, summed, columns))
    if m <= FEW or m * k * n < _LARGE:
        return None
    w_kn = w.reshape(k, n) if straight else w.reshape(n, k).T
    return multiply(x.reshape(m, k), w_kn).reshape([size[c] for c in out])


@jax.custom_batching.custom_vmap
def multiply(a_mk: Array, b_kn: Array) -> Array:
    """[M, N], the product of two matrices by way of a convolution."""
    layout = ("NWC", "WIO", "NWC")
    made = jax.lax.conv_general_dilated(
        a_mk[None], b_kn[None], (1,), "VALID", dimension_numbers=layout
    )
    return made[0]


@multiply.def_vmap
def _multiply_each(size: int, batched: list[bool], a_mk: Array, b_kn: Array) -> tuple[Array, bool]:
    # Convolutions of a batch of both are one with groups, which is slow.
    del size, batched
    return jnp.matmul(a_mk, b_kn), True
