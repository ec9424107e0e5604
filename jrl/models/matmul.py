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
from jax.sharding import PartitionSpec

from jrl.mesh import AXES, RULES, Axes, constrain, divides, free_axes, parts_of, platform
from jrl.mesh import spec as partition
from jrl.models import cpu
from jrl.models.collectives import gathered, sum_scattered
from jrl.models.weights import Factored
from jrl.types import Array

PRODUCT = "product"
"""The name, for rematerialisation, of results of products with weights."""

WIDE = "wide"
"""The same of those that are as wide as a layer's feed-forward part, which are half of all."""

ATTENDED = "attended"
"""The same for what attention's backward pass starts from: weights, outputs, log sums."""


def project(
    spec: str, x: Array, w: Array | Factored, dtype: Any = None, axes: Axes | None = None
) -> Array:
    """``matmul`` of activations with a weight, named ``PRODUCT`` or ``WIDE`` for recomputation."""
    # Every product with a weight passes here, so that "dots" and "elementwise" can keep its result.
    # A policy that looks for products does not find those inside a custom derivative.
    if isinstance(w, Factored):
        out = w.times(spec, x, dtype, axes)
    else:
        out = matmul(spec, x, w, dtype, axes)
    return checkpoint_name(out, WIDE if axes is not None and axes[-1] == "mlp" else PRODUCT)


def summed_short(spec: str, shape: tuple[int, ...], axes: Axes | None) -> str | None:
    """The sum with a weight that devices share: over "inputs", "outputs" (backward), or None.

    Such sums are sent in the dtype of the activations. A device sums its own part in float32 and
    rounds it once, which halves what tensor parallelism sends; the parts are few, so that this is
    no more than the rounding of what comes out. None on CPUs, which cannot sum shorter numbers in
    float32 in one product.

    Args:
      spec: of the product, as for ``matmul``.
      shape: the weight's.
      axes: its logical axes.
    """
    # Without logical axes the operand is no weight, and no sum over it crosses devices.
    if axes is None or platform() == "cpu":
        return None
    operands, out = spec.split("->")
    for letter, name, size in zip(operands.split(",")[1], axes, shape, strict=True):
        if name in ("heads", "kv_heads", "mlp") and parts_of(name, size) > 1:
            return "outputs" if letter in out else "inputs"
    return None


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
    return platform() == "cpu"


def written_as(dtype: Any) -> Any:
    """The dtype to ask a product for whose result is rounded to ``dtype``, summed on one device.

    Libraries for GPUs sum in float32 whatever they write, and take no conversion: asked for float32
    they write twice the bytes, and another kernel reads and rounds them.
    """
    return dtype if platform() == "gpu" else jnp.float32


def matmul(spec: str, x: Array, w: Array, dtype: Any = None, axes: Axes | None = None) -> Array:
    """``einsum(spec, x, w)`` in the dtype of ``x``, accumulated in float32.

    Args:
      spec: an einsum of two operands, without ellipsis.
      x: activations.
      w: the other operand, converted to the dtype of ``x`` for the product.
      dtype: of the result; None for that of ``x``.
      axes: the logical axes of a weight, None for another operand. They say which sums over devices
        are sent short (``summed_short``), and how the gradient is (``weight_gradient``).
    """
    return _matmul(spec, x, w, dtype, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _matmul(spec: str, x: Array, w: Array, dtype: Any, axes: Axes | None) -> Array:
    narrow = summed_short(spec, w.shape, axes) == "inputs"
    # The product's own dtype is what XLA sends between devices, so a sum that is sent short must be
    # asked for here; converting the result afterwards would send float32.
    result = x.dtype if narrow else written_as(dtype or x.dtype)
    return einsum(spec, x, w.astype(x.dtype), result).astype(dtype or x.dtype)


def _forward(
    spec: str, x: Array, w: Array, dtype: Any, axes: Axes | None
) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(spec, x, w, dtype, axes), (x, w)


def _backward(
    spec: str, dtype: Any, axes: Axes | None, operands: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    del dtype
    return gradients(spec, *operands, g, axes)


_matmul.defvjp(_forward, _backward)


def gradients(
    spec: str, x: Array, w: Array, g: Array, axes: Axes | None = None
) -> tuple[Array, Array]:
    """Gradients of ``x`` and ``w``, in their dtypes, if that of ``matmul(spec, x, w)`` is ``g``."""
    operands, out = spec.split("->")
    left, right = operands.split(",")
    # float32 cotangents times bfloat16 weights would leave the fast matrix units.
    g = g.astype(x.dtype)
    # Weights first: XLA's CPU backend cannot sum bfloat16 in float32 for every other order.
    narrow = summed_short(spec, w.shape, axes) == "outputs"
    accumulator = x.dtype if narrow else written_as(x.dtype)
    dx = gradient_einsum(f"{right},{out}->{left}", w.astype(x.dtype), g, accumulator)
    # The gradient of a float32 weight must not pass through bfloat16: it is a sum over all rows,
    # whose small terms rounding would lose.
    dw = weight_gradient(f"{left},{out}->{right}", x, g, axes, w.dtype)
    return dx.astype(x.dtype), dw.astype(w.dtype)


def weight_gradient(
    spec: str, x: Array, g: Array, axes: Axes | None, dtype: Any = jnp.float32
) -> Array:
    """``gradient_einsum`` of activations [batch, length, ...] with a weight's axes as its result.

    Where devices divide the weight along its width and the batch, each multiplies its own rows, and
    gets the sum over all of the part that it keeps (a reduce-scatter). XLA sums the gradient of the
    whole weight on every device and cuts the part out, which sends twice as much, as compiled for
    TPUs.

    Args:
      spec: "<activations>,<gradients>-><weight>", each beginning with batch and length.
      x: what the weight was multiplied with.
      g: the gradient of the product.
      axes: logical axes of the weight; None if it has none.
      dtype: that the caller rounds it to.

    Returns:
      float32, or ``dtype`` where nothing is lost by that, divided as the weight is.
    """
    split = None if axes is None else _scattered(spec, x, g, axes)
    if split is None:
        # Sums over rows of several devices are sent, and added up, in float32.
        alone = parts_of("batch", x.shape[0]) == parts_of("length", x.shape[1]) == 1
        return gradient_einsum(spec, x, g, written_as(dtype) if alone else jnp.float32)
    ins, out, along, others = split

    def local(x: Array, g: Array) -> Array:
        # Scatter over fsdp first: the psum over the other axes then moves 1/fsdp of the gradient.
        part = sum_scattered(gradient_einsum(spec, x, g), "fsdp", along)
        return jax.lax.psum(part, others) if others else part

    return jax.shard_map(local, in_specs=ins, out_specs=out, check_vma=False)(x, g)


def whole_width(w: Array, axes: Axes) -> Array:
    """A weight, or a part of one, with its full width on every device (an all-gather).

    Asked for by a constraint alone, XLA may sum parts that are zero elsewhere over all devices,
    which sends twice as much, as compiled for TPUs.

    Args:
      w: divided as ``axes`` say.
      axes: its logical axes, "embed" among them.
    """
    unsharded = tuple("act_embed" if name == "embed" else name for name in axes)
    mesh = jax.sharding.get_abstract_mesh()
    # Inside another shard_map the axes are manual already, and a second one would fail to trace.
    if free_axes().get("fsdp", 1) == 1 or mesh.manual_axes:
        return constrain(w, *unsharded)
    sizes = zip(axes, w.shape, strict=True)
    # shard_map needs equal parts; a constraint also works for a size that the mesh does not divide.
    if not all(name is None or divides(mesh, name, size) for name, size in sizes):
        return constrain(w, *unsharded)
    gather = functools.partial(gathered, axis="fsdp", dim=axes.index("embed"))
    ins, out = partition(axes), partition(unsharded)
    # check_vma=False: the check cannot see that an all-gather makes the result equal on all
    # devices.
    return jax.shard_map(gather, in_specs=ins, out_specs=out, check_vma=False)(w)


def _scattered(
    spec: str, x: Array, g: Array, axes: Axes
) -> tuple[tuple[PartitionSpec, PartitionSpec], PartitionSpec, int, tuple[str, ...]] | None:
    """Partitions of ``weight_gradient``'s operands and result; None if it is not sharded.

    Returns:
      Partitions of the operands and of the result, the result's axis that ``fsdp`` divides, and the
      other axes of the mesh that rows are divided over.
    """
    sizes = free_axes()
    mesh = jax.sharding.get_abstract_mesh()
    if "embed" not in axes or sizes.get("fsdp", 1) == 1 or mesh.manual_axes:
        return None
    operands, weight = spec.split("->")
    axis_of = dict(zip(weight, axes, strict=True))
    # A length that the context axis does not divide is replicated over it; summing over that axis
    # would then count each row several times.
    rows = "batch", "length" if divides(mesh, "length", x.shape[1]) else None
    if not divides(mesh, "batch", x.shape[0]):
        return None
    ins = []
    for letters, operand in zip(operands.split(","), (x, g), strict=True):
        logical = [*rows, *(axis_of.get(c) for c in letters[2:])]
        for name, size in zip(logical, operand.shape, strict=True):
            if name is not None and not divides(mesh, name, size):
                return None
        ins.append(partition(tuple("act_embed" if n == "embed" else n for n in logical)))
    # fsdp is summed by the reduce-scatter, so it must not be among the axes of the psum.
    over = {a for name in rows if name is not None for a in RULES[name]} - {"fsdp"}
    others = tuple(a for a in AXES if a in over and sizes.get(a, 1) > 1)
    return (ins[0], ins[1]), partition(axes), axes.index("embed"), others


def einsum(spec: str, a: Array, b: Array, dtype: Any = jnp.float32) -> Array:
    """``jnp.einsum`` of two operands, summed in float32, for forward passes."""
    if cpu.tuned(a.dtype):
        return cpu.einsum(spec, a, b)
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def gradient_einsum(spec: str, a: Array, b: Array, dtype: Any = jnp.float32) -> Array:
    """A matmul for backward passes, whose products sum over rows or a weight's outputs."""
    if cpu.tuned(a.dtype):
        return cpu.gradient_einsum(spec, a, b)
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)
