"""TPUs and GPUs: figures of a chip, the topologies there are, and devices to compile for.

The figures are the vendor's own, each with the page it comes from. With libtpu installed, XLA
compiles for a TPU slice without a TPU (``jax.experimental.topologies``), with the plugin for CUDA
for GPUs without one. The GPUs of a host are one slice here: a switch joins them, and hosts are
joined by the data-centre network.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.errors import UserError, unknown_choice
from jrl.system.devices import GPU_MEMORY_SHARE
from jrl.system.extras import install_line

HOP_SECONDS = 1e-6
"""Latency of one hop between neighbouring chips; an order of magnitude."""


class Chip(NamedTuple):
    """Figures of one chip.

    Attributes:
      flops: bfloat16 operations a second at peak.
      hbm_bytes: memory for programs; of a GPU its ``GPU_MEMORY_SHARE``.
      hbm_bandwidth: of the memory, bytes a second.
      link_bandwidth: bytes a second over one inter-chip link in one direction; the page's figure
        for the chip, both directions, over its number of links and two. A GPU's NVLinks count as
        one link to its host's switch; without NVLink it is PCIe.
      dimensions: of the torus; a chip has two links in each. 0 where a switch joins the chips.
      dcn_bandwidth: bytes a second of the data-centre network, the pod's or host's over its chips.
      source: the vendor's page.
      platform: "tpu" or "gpu".
      link: what joins the chips of a slice.
    """

    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    dimensions: int
    dcn_bandwidth: float
    source: str
    platform: str = "tpu"
    link: str = "inter-chip links"


def _gpu(flops: float, memory: int, hbm: float, link: float, network: float, page: str) -> Chip:
    usable = int(GPU_MEMORY_SHARE * memory)
    joined = "NVLink" if link > 100e9 else "PCIe"
    return Chip(flops, usable, hbm, link, 0, network, f"{_NVIDIA}/{page}", "gpu", joined)


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_DOCS = "https://docs.cloud.google.com/tpu/docs"
CHIPS: Mapping[str, Chip] = {
    "v4": Chip(275e12, 32 << 30, 1.200e12, 50e9, 3, 6.25e9, f"{_DOCS}/v4"),
    "v5e": Chip(197e12, 16 << 30, 0.819e12, 50e9, 2, 3.125e9, f"{_DOCS}/v5e"),
    "v5p": Chip(459e12, 95 << 30, 2.765e12, 100e9, 3, 6.25e9, f"{_DOCS}/v5p"),
    "v6e": Chip(918e12, 32 << 30, 1.600e12, 100e9, 2, 12.5e9, f"{_DOCS}/v6e"),
    "a100": _gpu(312e12, 85_100_068_864, 2.039e12, 300e9, 25e9, "a100"),
    "h100": _gpu(989e12, 84_942_979_072, 3.35e12, 450e9, 50e9, "h100"),
    "h200": _gpu(989e12, 150_119_153_664, 4.8e12, 450e9, 50e9, "h200"),
    "b200": _gpu(2250e12, 191_514_411_008, 8.0e12, 900e9, 50e9, "dgx-b200"),
    "l4": _gpu(121e12, 23_622_320_128, 0.3e12, 32e9, 1.5625e9, "l4"),
}
"""Figures by chip. The page of v4 gives no network rates: its links are assumed half as fast as
those of v5p, its data-centre network as fast. GPUs are A100 80GB, H100 and H200 with SXM, B200 and
L4: products in bfloat16 without sparsity, the memory as the device reports it. Their networks are
those of DGX systems, 200 Gb/s a GPU with A100 and 400 with the later ones, and for L4 the 100 Gb/s
that 8 of them share in a g2-standard-96 of Google Cloud."""

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_HOSTS = ("1", "2", "4", "8")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
    *("8x16x16", "16x16x16"),
)
SHAPES: Mapping[str, tuple[str, ...]] = {
    "v4": _CUBES[:-1],
    "v5e": _FLAT,
    "v5p": (*_CUBES, "16x16x24"),
    "v6e": _FLAT,
    **dict.fromkeys((name for name, chip in CHIPS.items() if chip.platform == "gpu"), _HOSTS),
}
"""The slices of each chip; v4 and v5p also have cuboids in steps of 4 chips, see ``_cuboid``. Of a
GPU those in a host."""


class Topology(NamedTuple):
    """One slice, or several joined by the data-centre network. A host of GPUs is a slice.

    Attributes:
      name: such as ``2*v5e:16x16`` or ``2*h100x8``.
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
        """Whether the last chip along a dimension of a torus has a link to the first."""
        if self.chip.dimensions == 2:
            return self.shape[dimension] == 16
        return all(size % 4 == 0 for size in self.shape)


def parse_topology(name: str) -> Topology:
    """The topology that a name such as ``v5p:8x8x16``, ``2*v5e:16x16`` or ``2*h100x8`` means.

    Raises:
      UserError: no such slice or host; the known ones are listed.

    >>> parse_topology("v5e:4x4").chips, parse_topology("2*h100x8").chips
    (16, 16)
    """
    match = re.fullmatch(r"(?:(\d{1,9})\*)?([a-z]\w*?)[:x](\d{1,9}(?:x\d{1,9})*)", name)
    if match is None or match[1] == "0":
        if (meant := _accelerator(name)) is not None:
            raise UserError(f"topology = {name!r}; did you mean {meant}?")
        raise UserError(
            f"topology = {name!r}; write CHIP:SHAPE such as v5e:4x4 for a TPU slice and GPUxCOUNT"
            " such as h100x8 for a host of GPUs, with several NUMBER*..., such as 2*v5e:16x16"
            f"\n{_choices()}"
        )
    slices, family, shape = int(match[1] or 1), match[2], match[3]
    if family not in CHIPS:
        raise UserError(f"{unknown_choice('topology', family, CHIPS)}\n{_choices()}")
    sizes = tuple(map(int, shape.split("x")))
    if shape not in SHAPES[family] and not _cuboid(family, sizes):
        choices = ", ".join(spelled(family, s) for s in SHAPES[family])
        others = ", or another cuboid in steps of 4 such as 4x4x12" * (CHIPS[family].dimensions > 2)
        if CHIPS[family].platform == "gpu":
            others = f", or several such hosts, such as {spelled(family, SHAPES[family][-1], 2)}"
        raise UserError(
            f"topology = {name!r}; there is no such slice; choose from {choices}{others}"
        )
    return Topology(spelled(family, shape, slices), family, sizes, slices)


def spelled(family: str, shape: str, slices: int = 1) -> str:
    """The name of a topology.

    >>> spelled("v5e", "4x4"), spelled("h100", "8", 2)
    ('v5e:4x4', '2*h100x8')
    """
    several = f"{slices}*" if slices > 1 else ""
    return f"{several}{family}{'x' if CHIPS[family].platform == 'gpu' else ':'}{shape}"


def _accelerator(name: str) -> str | None:
    """The topology of an accelerator type of Google Cloud, or of other letters; None if unknown."""
    several, _, last = name.strip().lower().rpartition("*")
    if match := re.fullmatch(r"(v4|v5e|v5litepod|v5p|v6e)-(\d{1,9})", last):
        family = "v5e" if match[1] == "v5litepod" else match[1]
        cores = 2 if CHIPS[family].dimensions == 3 else 1  # of a chip, as these names count
        shapes = {int(np.prod([*map(int, s.split("x"))])): s for s in SHAPES[family]}
        if (shape := shapes.get(int(match[2]) // cores)) is None or int(match[2]) % cores:
            return None
        last = spelled(family, shape)
    meant = f"{several}*{last}" if several else last
    if meant == name:
        return None
    try:
        return parse_topology(meant).name
    except UserError:
        return None


def _cuboid(family: str, sizes: tuple[int, ...]) -> bool:
    """Whether a shape is a three-dimensional torus of 4x4x4 cubes, shortest side first."""
    most = np.prod(list(map(int, SHAPES[family][-1].split("x"))))
    cubes = len(sizes) == 3 == CHIPS[family].dimensions and all(n > 0 == n % 4 for n in sizes)
    return bool(cubes and sorted(sizes) == list(sizes) and np.prod(sizes) <= most)


def _choices() -> str:
    slices = [f"known: {f}:{', '.join(x)}" for f, x in SHAPES.items() if x is not _HOSTS]
    hosts = [spelled(f, _HOSTS[-1]) for f, x in SHAPES.items() if x is _HOSTS]
    return "\n".join([*slices, f"known: {', '.join(hosts)} (or x1, x2, x4)"])


def larger(topology: Topology, chips: float) -> str | None:
    """The name of the smallest slice of the same chip with at least ``chips`` chips, or None."""
    for shape in SHAPES[topology.family]:
        if np.prod(list(map(int, shape.split("x")))) >= chips:
            return spelled(topology.family, shape)
    return None


def several(topology: Topology, chips: int) -> str | None:
    """The name of as many of the largest slices of the same chip as have ``chips``, or None."""
    shape = SHAPES[topology.family][-1]
    slices, rest = divmod(chips, int(np.prod(list(map(int, shape.split("x"))))))
    return spelled(topology.family, shape, slices) if slices and not rest else None


def compile_devices(topology: Topology) -> list[jax.Device]:
    """Devices to compile programs for; they cannot run any.

    Raises:
      UserError: libtpu or the plugin for CUDA is not installed, or refuses the topology.
    """
    make = gpu_options if topology.chip.platform == "gpu" else _tpu_options
    options = make(topology)
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(**options)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise UserError(
            f"topology = {topology.name!r}; the compiler of JAX {jax.__version__} refuses it:"
            f" {error}"
        ) from None
    return list(description.devices)


def _tpu_options(topology: Topology) -> dict[str, Any]:
    """Options that JAX passes to libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "libtpu is not installed, and a plan for a TPU needs it, with --quick too, on any Linux"
            f" machine and without a TPU: {install_line('plan')}"
        )
    # Without these, libtpu looks for a TPU of this machine and for its metadata server.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # must be valid, has no effect
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several plans at once
    name = spelled(topology.family, "x".join(map(str, topology.shape)))
    options: dict[str, Any] = {"platform": "tpu", "topology_name": name}
    if topology.family == "v4":
        options["chip_config_name"] = "megacore"  # two cores, one device
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.chips == topology.slices:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return options


def gpu_options(topology: Topology) -> dict[str, Any]:
    """Options that JAX passes to the CUDA plugin: hosts of a GPU described in a file.

    The files ``gpus/*.txtpb`` are XLA's ``GpuTargetConfigProto``; nothing is asked of a driver.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (13, 12)):
        raise UserError(
            "JAX's plugin for CUDA is not installed, and a plan for a GPU needs it, with --quick"
            f" too, on any Linux machine and without a GPU: {install_line('plan-gpu')}"
        )
    # The plugin's check of CUDA's libraries wants a driver.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    file = importlib.resources.files("jrl.plan").joinpath("gpus", f"{topology.family}.txtpb")
    return {
        "platform": "cuda",
        "topology_name": "",
        "target_config": file.read_text(encoding="utf-8"),
        # Partitions, hosts of each, GPUs of a host.
        "topology": f"1x{topology.slices}x{topology.shape[0]}",
    }


def axis_bandwidth(topology: Topology, devices: np.ndarray, axes: Sequence[int]) -> float:
    """Bytes a second that a chip sends in a collective over some axes of a mesh.

    A ring runs along every dimension of the torus that the axes span, in both directions where the
    torus closes, and the rings share the data; in a host of GPUs a ring goes through the switch.
    Between slices the data-centre network is the limit, and the members in one GPU host share all
    of its adapters, up to the rate of their links (as NCCL's rings do).

    Args:
      topology: the slices.
      devices: the mesh's grid of devices.
      axes: which axes of the grid; their product is above 1.
    """
    grid = np.moveaxis(devices, axes, range(len(axes)))
    group = grid.reshape(int(np.prod(grid.shape[: len(axes)])), -1)[:, 0]
    chip = topology.chip
    # GPUs that are compiled for are all in slice 0, but know their host.
    index = "process_index" if chip.platform == "gpu" else "slice_index"
    slices = len({getattr(d, index, 0) or 0 for d in group})
    if slices > 1:
        members = len(group) // slices if chip.dimensions == 0 else 1
        return min(chip.dcn_bandwidth * members, chip.link_bandwidth)
    if chip.dimensions == 0:
        return chip.link_bandwidth
    coords = np.array([d.coords for d in group])
    spanned = [i for i in range(len(topology.shape)) if len(set(coords[:, i])) > 1]
    links = sum(
        2 if topology.wraps(i) and len(set(coords[:, i])) == topology.shape[i] else 1
        for i in spanned
    )
    return chip.link_bandwidth * max(links, 1)
