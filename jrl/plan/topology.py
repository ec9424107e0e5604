"""TPU chips and topologies: figures of a chip, the slices there are, and devices to compile for.

The figures are the vendor's own, each with the page it comes from. With libtpu installed, XLA
compiles for a slice without a TPU (``jax.experimental.topologies``).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.errors import UserError, unknown_choice
from jrl.system.extras import install_line

HOP_SECONDS = 1e-6
"""Latency of one hop between neighbouring chips; an order of magnitude."""


class Chip(NamedTuple):
    """Figures of one chip.

    Attributes:
      flops: bfloat16 operations a second at peak.
      hbm_bytes: memory.
      hbm_bandwidth: of the memory, bytes a second.
      link_bandwidth: bytes a second over one inter-chip link in one direction; the page's figure
        for the chip, both directions, over its number of links and two.
      dimensions: of the torus; a chip has two links in each.
      dcn_bandwidth: bytes a second of the data-centre network, the pod's or host's over its chips.
      source: the vendor's page.
    """

    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    dimensions: int
    dcn_bandwidth: float
    source: str


_DOCS = "https://docs.cloud.google.com/tpu/docs"
CHIPS: Mapping[str, Chip] = {
    "v4": Chip(275e12, 32 << 30, 1.200e12, 50e9, 3, 6.25e9, f"{_DOCS}/v4"),
    "v5e": Chip(197e12, 16 << 30, 0.819e12, 50e9, 2, 3.125e9, f"{_DOCS}/v5e"),
    "v5p": Chip(459e12, 95 << 30, 2.765e12, 100e9, 3, 6.25e9, f"{_DOCS}/v5p"),
    "v6e": Chip(918e12, 32 << 30, 1.600e12, 100e9, 2, 12.5e9, f"{_DOCS}/v6e"),
}
"""Figures by chip. The page of v4 gives no network rates: its links are assumed half as fast as
those of v5p, its data-centre network as fast."""

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
    *("8x16x16", "16x16x16"),
)
SHAPES: Mapping[str, tuple[str, ...]] = {
    "v4": _CUBES[:-1],
    "v5e": _FLAT,
    "v5p": (*_CUBES, "16x16x24"),
    "v6e": _FLAT,
}
"""The slices of each chip; v4 and v5p also have cuboids in steps of 4 chips, see ``_cuboid``."""


class Topology(NamedTuple):
    """One slice, or several joined by the data-centre network.

    Attributes:
      name: such as ``2*v5e:16x16``.
      family: a key of ``CHIPS``.
      shape: chips along each dimension of a slice.
      slices: number of slices.
    """

    name: str
    family: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        """Figures of one chip."""
        return CHIPS[self.family]

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return int(np.prod(self.shape)) * self.slices

    def wraps(self, dimension: int) -> bool:
        """Whether the last chip along a dimension has a link to the first."""
        if self.chip.dimensions == 2:
            return self.shape[dimension] == 16
        return all(size % 4 == 0 for size in self.shape)


def parse_topology(name: str) -> Topology:
    """The slice that a name such as ``v5p:8x8x16`` or ``2*v5e:16x16`` means.

    Raises:
      UserError: no such slice; the known ones are listed.

    >>> parse_topology("v5e:4x4").chips
    16
    """
    match = re.fullmatch(r"(?:(\d+)\*)?(\w+):(\d+(?:x\d+)*)", name)
    if match is None or match[1] == "0":
        raise UserError(
            f"topology = {name!r}; write CHIP:SHAPE such as v5e:4x4, or SLICES*CHIP:SHAPE such as "
            f"2*v5e:16x16\n{_known()}"
        )
    slices, family, shape = int(match[1] or 1), match[2], match[3]
    if family not in CHIPS:
        raise UserError(f"{unknown_choice('topology', family, CHIPS)}\n{_known()}")
    sizes = tuple(map(int, shape.split("x")))
    if shape not in SHAPES[family] and not _cuboid(family, sizes):
        choices = ", ".join(f"{family}:{s}" for s in SHAPES[family])
        others = ", or another cuboid in steps of 4 such as 4x4x12" * (CHIPS[family].dimensions > 2)
        raise UserError(
            f"topology = {name!r}; there is no such slice; choose from {choices}{others}"
        )
    return Topology(name, family, sizes, slices)


def _cuboid(family: str, sizes: tuple[int, ...]) -> bool:
    """Whether a shape is a three-dimensional torus of 4x4x4 cubes, shortest side first."""
    most = np.prod(list(map(int, SHAPES[family][-1].split("x"))))
    cubes = len(sizes) == 3 == CHIPS[family].dimensions and all(n > 0 == n % 4 for n in sizes)
    return bool(cubes and sorted(sizes) == list(sizes) and np.prod(sizes) <= most)


def _known() -> str:
    return "\n".join(f"known: {f}:{', '.join(shapes)}" for f, shapes in SHAPES.items())


def larger(topology: Topology, chips: float) -> str | None:
    """The name of the smallest slice of the same chip with at least ``chips`` chips, or None."""
    for shape in SHAPES[topology.family]:
        if np.prod(list(map(int, shape.split("x")))) >= chips:
            return f"{topology.family}:{shape}"
    return None


def compile_devices(topology: Topology) -> list[jax.Device]:
    """Devices to compile programs for; they cannot run any.

    Raises:
      UserError: libtpu is not installed, or refuses the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "libtpu is not installed, and compiling for a TPU needs it, on any Linux machine and"
            f" without a TPU; install the version for this JAX: {install_line('plan')}"
        )
    # Without these, libtpu looks for a TPU of this machine and for its metadata server.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # must be valid, has no effect
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several plans at once
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if topology.family == "v4":
        options["chip_config_name"] = "megacore"  # two cores, one device
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.chips == topology.slices:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{topology.family}:{'x'.join(map(str, topology.shape))}"
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"topology = {name!r}; libtpu refuses it: {error}") from None
    return list(description.devices)


def axis_bandwidth(topology: Topology, devices: np.ndarray, axes: Sequence[int]) -> float:
    """Bytes a second that a chip sends in a collective over some axes of a mesh.

    A ring runs along every dimension of the torus that the axes span, in both directions where the
    torus closes, and the rings share the data. Between slices the data-centre network is the limit.

    Args:
      topology: the slices.
      devices: the mesh's grid of devices.
      axes: which axes of the grid; their product is above 1.
    """
    grid = np.moveaxis(devices, axes, range(len(axes)))
    group = grid.reshape(int(np.prod(grid.shape[: len(axes)])), -1)[:, 0]
    if len({getattr(d, "slice_index", 0) or 0 for d in group}) > 1:
        return topology.chip.dcn_bandwidth
    coords = np.array([d.coords for d in group])
    spanned = [i for i in range(len(topology.shape)) if len(set(coords[:, i])) > 1]
    links = sum(
        2 if topology.wraps(i) and len(set(coords[:, i])) == topology.shape[i] else 1
        for i in spanned
    )
    return topology.chip.link_bandwidth * max(links, 1)
