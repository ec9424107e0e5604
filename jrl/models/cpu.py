"""Matrix products on CPUs: all tuning for that platform; ``models/matmul.py`` calls it.

XLA hands matrix products on a CPU to YNNPACK, and convolutions to Eigen. A convolution of width one
is the same product, so that the library can be chosen here. Measured with JAX 0.10 and 0.12 on two
cores with AVX-512:

- With thousands of rows Eigen takes a tenth to a third less time, unless it must transpose the
  second operand first.
- With tens of rows, as in decoding, it takes half the time, if the weights are the first operand.
  With eight rows or fewer YNNPACK takes two thirds of the time, the weights first there too.
- Sums over rows, which are the gradients of weights, are fastest where no operand is copied. That
  is 8 to 12 % of a training step.

Small products, and batches of matrices as in attention, are faster where XLA puts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.mesh import Axes, divided, platform
from jrl.models.weights import Factored
from jrl.types import Array

FEW = 64
"""Rows up to which weights are better the first operand."""
VERY_FEW = 8
"""Rows up to which such a product is left to YNNPACK, if the weights are ``MANY`` numbers."""
MANY = 2**16
LARGE = 2**24
"""Multiplications from which choosing the operand order of a product pays."""
REORDERED = 2**18
"""Numbers in an operand of a gradient from which choosing the order pays."""
WIDE = 2**12
"""Columns from which a matrix is better the first operand of a sum over rows."""


def tuned(dtype: Any) -> bool:
    """Whether products of this dtype are chosen here: on a CPU, where no mesh divides programs.

    Floats shorter than float32 are widened, as they are for any product on a CPU.
    """
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 4
    return narrow and platform() == "cpu" and not divided()


def einsum(spec: str, a: Array, b: Array) -> Array:
    """The einsum in float32; by Eigen if it is one large product of two matrices."""
    out = _large(spec, a, b)
    return _plain(spec, a, b) if out is None else out


def gradient_einsum(spec: str, a: Array, b: Array) -> Array:
    """The einsum in float32, with operands ordered to need the fewest transposes."""
    left, right, out = _letters(spec)
    swapped = f"{right},{left}->{out}"
    for product in (_large(spec, a, b), _large(swapped, b, a)):
        if product is not None:
            return product
    if max(a.size, b.size) < REORDERED:
        return _plain(spec, a, b)
    if (product := _sum_over_rows(spec, a, b)) is not None:
        return product
    if a.dtype != jnp.float32:
        return _plain(spec, a, b)
    size = dict(zip(left + right, a.shape + b.shape, strict=True))
    straight, other = _transposed(spec, size), _transposed(swapped, size)
    if min(straight[0], other[0]) == 0:
        return _plain(spec, a, b)
    if other[0] < straight[0]:
        left, right, a, b, straight = right, left, b, a, other
    # Without the barrier XLA would fold the last transpose into the product, and copy an operand.
    straight_product = jax.lax.optimization_barrier(_plain(f"{left},{right}->{straight[1]}", a, b))
    return jnp.einsum(f"{straight[1]}->{out}", straight_product)


class WeightFirst(struct.PyTreeNode, Factored):
    """A weight with its summed axes last, which a product with few rows takes as first operand.

    The second operand of a product is packed anew each time. With few rows that takes as long as
    the product where it is the weight, and next to nothing where it is the activations.

    Attributes:
      values: [output axes, input axes].
    """

    values: Array

    @classmethod
    def of(cls, w: Array, inputs: int) -> WeightFirst:
        """Prepares a weight [input axes, output axes]."""
        return cls(jnp.moveaxis(w, range(inputs), range(-inputs, 0)))

    def times(self, spec: str, x: Array, dtype: Any = None, axes: Axes | None = None) -> Array:
        """``matmul(spec, x, weight, dtype)``, [rows, inputs] to [rows, outputs]."""
        letters = matrices(spec)
        assert letters is not None, spec
        w, inputs = self.values, len(letters[1])
        rows, outputs = x.shape[:-inputs], w.shape[:-inputs]
        w_nk, x_mk = w.reshape(math.prod(outputs), -1), x.reshape(math.prod(rows), -1)
        if 1 < x_mk.shape[0] <= FEW and tuned(x.dtype):
            # Without the barriers XLA would fold the transposes into the product.
            barrier = jax.lax.optimization_barrier
            out = barrier(_weight_first(w_nk, barrier(x_mk.T))).T
        else:
            out = _plain("mk,nk->mn", x_mk, w_nk)
        return out.reshape(*rows, *outputs).astype(dtype or x.dtype)

    def in_8_bits(self, inputs: int, quantise: Callable[..., Factored]) -> Factored:
        """The weight in 8 bits."""
        return quantise(jnp.moveaxis(self.values, range(-inputs, 0), range(inputs)), inputs)


def _weight_first(w_nk: Array, x_km: Array) -> Array:
    """[N, M] float32, the product of a weight with the M <= ``FEW`` columns that it is read for."""
    columns = x_km.shape[1]
    if columns > VERY_FEW or w_nk.size < MANY:
        return by_eigen(w_nk, x_km)
    # YNNPACK has kernels for four and eight columns; five to seven take longer than eight do.
    more = -columns % 4 if columns > 4 else 0
    wide = jnp.pad(x_km.astype(jnp.float32), ((0, 0), (0, more)))
    return jnp.matmul(w_nk.astype(jnp.float32), wide)[:, :columns]


@jax.custom_batching.custom_vmap
def by_eigen(a_mk: Array, b_kn: Array) -> Array:
    """[M, N] float32, the product of two matrices as a convolution of width one."""
    layout = ("NWC", "WIO", "NWC")
    a_1mk, b_1kn = a_mk[None].astype(jnp.float32), b_kn[None].astype(jnp.float32)
    out = jax.lax.conv_general_dilated(a_1mk, b_1kn, (1,), "VALID", dimension_numbers=layout)
    return out[0]


@by_eigen.def_vmap
def _by_eigen_each(size: int, batched: list[bool], a_mk: Array, b_kn: Array) -> tuple[Array, bool]:
    # Convolutions of a batch of both are one with groups, which is slow.
    del size, batched
    return jnp.matmul(a_mk, b_kn, preferred_element_type=jnp.float32), True


def _plain(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _letters(spec: str) -> tuple[str, str, str]:
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    return left, right, out


def matrices(spec: str) -> tuple[str, str, str] | None:
    """The rows, summed axes and columns of an einsum that is one product of two matrices.

    Returns:
      Of "<rows><summed>,<summed><columns>-><rows><columns>", or with the second operand transposed.
      None for any other.

    >>> matrices("bqd,dhk->bqhk"), matrices("bqd,hkd->bqhk")
    (('bq', 'd', 'hk'), ('bq', 'd', 'hk'))
    >>> matrices("bqd,dhk->bhqk")
    """
    left, right, out = _letters(spec)
    summed = "".join(c for c in left if c in right and c not in out)
    rows = left.removesuffix(summed)
    columns = out.removeprefix(rows)
    plain = bool(summed and columns) and (rows + summed, rows + columns) == (left, out)
    if not plain or right not in (summed + columns, columns + summed):
        return None
    return rows, summed, columns


def _large(spec: str, x: Array, w: Array) -> Array | None:
    """``einsum(spec, x, w)`` if it is one large product of two matrices; else None."""
    if (roles := matrices(spec)) is None:
        return None
    rows, summed, columns = roles
    m = math.prod(x.shape[: len(rows)])
    k = x.size // max(m, 1)
    n = w.size // max(k, 1)
    if m <= FEW or m * k * n < LARGE:
        return None
    straight = f",{summed}{columns}->" in spec
    outputs = w.shape[len(summed) :] if straight else w.shape[: len(columns)]
    x_mk = x.reshape(m, k)
    if straight:
        out = by_eigen(x_mk, w.reshape(k, n))
    else:  # Eigen would have the weight transposed first; YNNPACK reads it where it is
        out = jnp.matmul(x_mk.astype(jnp.float32), w.reshape(n, k).astype(jnp.float32).T)
    return out.reshape(*x.shape[: len(rows)], *outputs)


def _sum_over_rows(spec: str, a: Array, b: Array) -> Array | None:
    """The einsum if it sums over the leading axes of two matrices, or of a batch of them.

    As products with one summed axis, the first of a matrix, neither operand is copied: Eigen reads
    the first one transposed. None for other sums.
    """
    left, right, out = _letters(spec)
    batch = "".join(x for x in left if x in right and x in out)
    summed = "".join(x for x in left if x in right and x not in out)
    lead = batch + summed
    if not (summed and left.startswith(lead) and right.startswith(lead)):
        return None
    rows, columns = left.removeprefix(lead), right.removeprefix(lead)
    size = dict(zip(left + right, a.shape + b.shape, strict=True))
    batches, count = (math.prod(size[x] for x in axes) for axes in (batch, summed))
    a_srm, b_srn = (x.reshape(batches, count, -1).astype(jnp.float32) for x in (a, b))
    m, n = a_srm.shape[2], b_srn.shape[2]
    # The narrower one first takes up to a third less time; where one is very wide, a tenth more.
    if (m <= n) == (max(m, n) < WIDE):
        natural, product = batch + rows + columns, jnp.einsum("srm,srn->smn", a_srm, b_srn)
    else:
        natural, product = batch + columns + rows, jnp.einsum("srn,srm->snm", b_srn, a_srm)
    # Without the barrier XLA would fold the transpose into the product, and copy an operand.
    product = product if natural == out else jax.lax.optimization_barrier(product)
    return jnp.einsum(f"{natural}->{out}", product.reshape([size[x] for x in natural]))


def _transposed(spec: str, size: Mapping[str, int]) -> tuple[int, str]:
    """The number of elements transposed in this order of operands, and the axes of its result.

    XLA's products want the summed axes last in the first operand and first in the second, and give
    the free axes of the first one before those of the second.
    """
    left, right, out = _letters(spec)
    batch = "".join(x for x in left if x in right and x in out)
    summed = "".join(x for x in left if x in right and x not in out)
    rows = "".join(x for x in left if x not in right)
    columns = "".join(x for x in right if x not in left)
    natural = batch + rows + columns
    layouts = (left, batch + rows + summed), (right, batch + summed + columns), (out, natural)
    return sum(math.prod(size[x] for x in has) for has, wants in layouts if has != wants), natural
