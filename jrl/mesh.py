"""Device meshes, and the one table from array axes to mesh axes.

Models name the axes of weights and activations ("heads", "batch", ...); ``RULES`` maps those
names to mesh axes. Nothing else in the library mentions a mesh axis, so another placement is
another table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jrl.errors import UserError

AXES = ("data", "fsdp", "tensor", "context", "expert")
"""Mesh axes: replicas, shards of the state, of matrices, of the sequence, of experts.

What the first two and the last divide is the batch: the expert axis divides the experts' weights
where there are some, and the batch as a data axis does (``models/moe.py``). The context axis
divides the columns of what is trained on. Queries, and all that is computed for one token by
itself, stay where their columns are; keys and values are all-gathered in each layer, 2 * K * h
numbers a token, and their gradients reduce-scattered, which with few key-value heads is little
beside the D numbers a token that the tensor axis exchanges twice a layer. Sampling does not divide
columns."""

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "lookup": ("data", "expert"),
    "length": ("context",),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "head_dim": (),
    "layers": (),
    "act_embed": (),
}
"""Logical axis -> the mesh axes it is divided over; an empty tuple is replicated. "lookup" is the
batch while embeddings are looked up in training, their width divided as the table is."""

Axes = tuple[str | None, ...]


def make_mesh(
    sizes: Mapping[str, int] | None = None,
    devices: Sequence[jax.Device] | None = None,
    *,
    slices: int = 0,
) -> Mesh:
    """A mesh over all of ``AXES``, in that order, with automatic (GSPMD) axis types.

    Args:
      sizes: mesh axis -> devices along it; absent axes have 1; one may be -1, "what is left".
      devices: the devices to lay out; all of ``jax.devices()`` when the sizes ask for that many,
        else the first ones.
      slices: how many slices the devices are in, for a job that needs that number; 0 for as many as
        there are. Devices that do not say, as those of a CPU, are slices in the order they come in.

    Returns:
      The mesh; its size is the product of the sizes. On TPUs neighbours in the mesh are neighbours
      in the torus where that can be, and with several slices the data axis, and no other, goes from
      one slice to the next, over the data-centre network.

    Raises:
      UserError: an unknown axis, two -1, a product that the devices cannot fill, another number of
        slices, or a data axis that they do not divide.
    """
    shape = dict.fromkeys(AXES, 1) | dict(sizes or {})
    if unknown := set(shape) - set(AXES):
        raise UserError(f"mesh.{min(unknown)}: no such mesh axis; choose from {', '.join(AXES)}")
    devices = list(devices if devices is not None else jax.devices())
    free = [axis for axis, size in shape.items() if size == -1]
    if len(free) > 1:
        raise UserError(f"mesh.{free[1]} = -1; only one axis can take what is left")
    fixed = int(np.prod([size for size in shape.values() if size != -1]))
    if free:
        if fixed < 1 or len(devices) % fixed:
            raise UserError(
                f"mesh.{free[0]} = -1: {len(devices)} devices do not divide by the {fixed} of the "
                "other axes"
            )
        shape[free[0]] = len(devices) // fixed
        fixed = len(devices)
    if small := {axis: size for axis, size in shape.items() if size < 1}:
        axis, size = next(iter(small.items()))
        raise UserError(f"mesh.{axis} = {size}; must be at least 1, or -1 for what is left")
    if fixed > len(devices):
        axes_text = ", ".join(f"mesh.{a} = {n}" for a, n in shape.items() if n != 1)
        raise UserError(
            f"{axes_text} needs {fixed} devices; there are {len(devices)}: lower it, or run on more"
        )
    grid = arrange(devices[:fixed], shape, slices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(devices: Sequence[Any], shape: Mapping[str, int], slices: int = 0) -> np.ndarray:
    """The devices in a grid of ``AXES``, laid out as their network is.

    Args:
      devices: as many as the shape asks for; a ``slice_index`` says which slice one belongs to.
      shape: devices along each axis.
      slices: see ``make_mesh``.

    Returns:
      The grid. With several slices those with consecutive indices along the data axis are whole
      slices one after the other, and all other axes stay inside a slice.
    """
    sizes = [shape[a] for a in AXES]
    actual = len({getattr(d, "slice_index", None) or 0 for d in devices})
    if slices and slices != actual and (actual > 1 or devices[0].platform == "tpu"):
        raise UserError(
            f"mesh.slices = {slices}: the devices are in {actual}; start that many, or remove it"
        )
    slices = slices or actual
    if slices > 1 and shape["data"] % slices:
        raise UserError(
            f"mesh.data = {shape['data']} does not divide over {slices} slices, between which only "
            f"the data axis can lie; make it a multiple of {slices}"
        )
    if actual > 1:
        inside = [shape["data"] // slices, *sizes[1:]]
        return mesh_utils.create_hybrid_device_mesh(
            inside, [slices, *[1] * len(sizes[1:])], devices, allow_split_physical_axes=True
        )
    if not hasattr(devices[0], "coords") or devices[0].platform != "tpu":
        return np.array(devices).reshape(sizes)
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):  # no whole box of the torus
        return np.array(devices).reshape(sizes)


def spec(axes: Axes, rules: Mapping[str, tuple[str, ...]] = RULES) -> PartitionSpec:
    """The partition of an array whose axes have these logical names (None: replicated)."""
    return PartitionSpec(*(rules[a] or None if a is not None else None for a in axes))


def sharding(mesh: Mesh, axes: Axes, shape: Sequence[int], name: str = "array") -> NamedSharding:
    """The sharding of an array of this shape and these logical axes.

    Raises:
      UserError: an axis that its mesh axes do not divide.
    """
    for dim, logical in zip(shape, axes, strict=True):
        over = RULES[logical] if logical is not None else ()
        parts = int(np.prod([mesh.shape[a] for a in over]))
        if dim % parts:
            axes_text = " x ".join(f"{a}={mesh.shape[a]}" for a in over)
            raise UserError(
                f"{name}: axis {logical!r} of size {dim} does not divide over mesh {axes_text}; "
                f"choose a divisor of {dim}"
            )
    return NamedSharding(mesh, spec(axes))


def tree_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """``sharding`` for every leaf of a tree of shapes; ``axes`` has a tuple where it has a leaf."""
    paths: Any
    treedef: Any
    paths, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    names = treedef.flatten_up_to(axes)
    return treedef.unflatten(
        [
            sharding(mesh, tuple(ax), leaf.shape, jax.tree_util.keystr(path))
            for (path, leaf), ax in zip(paths, names, strict=True)
        ]
    )


def placed_shapes(shapes: Any, shardings: Any) -> Any:
    """The shapes of a tree, each with its sharding."""

    def placed(x: Any, at: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    return jax.tree.map(placed, shapes, shardings)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding that replicates an array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis is divided over the data-parallel axes."""
    return NamedSharding(mesh, spec(("batch",)))


def shards(mesh: Mesh | AbstractMesh, logical: str) -> int:
    """Over how many parts a logical axis is divided."""
    return int(np.prod([mesh.shape[a] for a in RULES[logical]]))


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Over how many parts the leading axis of a batch is divided."""
    return shards(mesh, "batch")


def divides(mesh: Mesh | AbstractMesh, logical: str, size: int) -> bool:
    """Whether an axis of this size falls into equal parts."""
    return size % shards(mesh, logical) == 0


def check_sizes(mesh: Mesh, sizes: Sequence[tuple[str, str, int]], key: str = "mesh") -> None:
    """Raises UserError for the sizes of a run that a mesh does not divide, one line for each.

    Args:
      mesh: where it would run.
      sizes: (logical axis, what a person calls it, size).
      key: the configuration's name of the mesh.
    """
    lines = []
    for logical, name, size in sizes:
        parts = shards(mesh, logical)
        if size % parts:
            axes_text = " x ".join(f"{key}.{a} = {mesh.shape[a]}" for a in RULES[logical])
            fits = [str(n) for n in range(1, parts) if size % n == 0]
            lines.append(
                f"{axes_text} does not divide {name} = {size}; choose {', '.join(fits)}"
                f" or make {name} a multiple of {parts}"
            )
    if lines:
        raise UserError("\n".join(lines))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation to its logical axes' partition; without a mesh, returns it untouched.

    The mesh is the one of ``jax.set_mesh``, so that a model runs unchanged without any. Mesh axes
    whose parts run by themselves (``jax.shard_map``) are not spoken of, and a length that does not
    fall into equal parts, such as the one token of a decode step, stays whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    named = zip(axes, x.shape, strict=True)
    axes = tuple(None if a == "length" and not divides(mesh, a, size) else a for a, size in named)
    if mesh.manual_axes:
        rest = {a: tuple(m for m in over if m not in mesh.manual_axes) for a, over in RULES.items()}
        return jax.lax.with_sharding_constraint(x, spec(axes, rest))
    return jax.lax.with_sharding_constraint(x, spec(axes))


def free_axes() -> dict[str, int]:
    """Axes of the mesh that programs are divided over by the compiler, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    return {a: n for a, n in mesh.shape.items() if a not in mesh.manual_axes}


def parts_of(logical: str, size: int) -> int:
    """Over how many devices the compiler divides an axis of this size; 1 if it does not divide."""
    parts = math.prod(free_axes().get(axis, 1) for axis in RULES[logical])
    return parts if size % parts == 0 else 1


def by_device(
    function: Callable[..., Any], specs: tuple[Any, ...], *args: Any, results: Any = None
) -> Any:
    """``function`` of each device's own part; the compiler does not divide a kernel.

    Args:
      function: of ``args``.
      specs: a tree of partitions for each of ``args``.
      args: arrays and trees of them.
      results: partitions of what it returns; None for those of the first of ``args``.
    """
    axes = free_axes()
    if all(size == 1 for size in axes.values()):
        return function(*args)
    # A Pallas or cuDNN call is opaque to the partitioner, which would replicate its operands.
    return jax.shard_map(
        function,
        in_specs=specs,
        out_specs=specs[0] if results is None else results,
        axis_names=set(axes),
        check_vma=False,
    )(*args)


def lone_axes(gathered: bool) -> tuple[str, ...]:
    """The axes that divide the mesh, where each device can sample from its own prompts by itself.

    That is the data axis, and the fsdp axis too where the weights that it divides were gathered.
    Empty where another axis divides the mesh as well, and without a mesh.
    """
    axes, free = ("data", "fsdp") if gathered else ("data",), free_axes()
    others = [axis for axis, size in free.items() if size > 1 and axis not in axes]
    return () if others else tuple(axis for axis in axes if free.get(axis, 1) > 1)


def divided() -> bool:
    """Whether the compiler divides programs over several devices."""
    return any(size > 1 for size in free_axes().values())


def platform() -> str:
    """Platform of the programs' mesh, or of this machine: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return named_platform(device.platform if device is not None else jax.default_backend())


def named_platform(platform: str) -> str:
    """The name without its vendor: "gpu" for "cuda" and "rocm"."""
    return "gpu" if platform in ("cuda", "rocm") else platform
