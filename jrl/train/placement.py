"""Which devices train and which draw: one mesh for both, or two over disjoint devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jrl.config import Config
from jrl.errors import UserError
from jrl.mesh import batch_shards, make_mesh
from jrl.tables import AxesTable, rollout_conflicts


def make_meshes(config: Config, *, apart: bool = True) -> tuple[Mesh, Mesh | None]:
    """The mesh of training, and that of rollout where it has devices of its own, if ``apart``.

    Training takes the first devices and rollout the ones after them. The number of devices of one
    divides that of the other, so that weights go from device to device in whole shards.

    Raises:
      UserError: devices are too few, what is left does not divide, or neither number divides the
        other; naming the keys.
    """
    table, placement = config.mesh, config.placement
    if placement.kind == "shared" or not apart:
        return make_mesh(table.axes, slices=table.slices), None
    if jax.process_count() > 1:
        raise UserError(
            "placement.kind = 'disjoint' runs in one process, and this run has "
            f"{jax.process_count()}; set placement.kind to 'shared'"
        )
    devices = jax.devices()
    needs = [_fixed(t) for t in (table, placement.rollout)]
    sizes = _filled(table, len(devices) - needs[1])
    theirs = _filled(placement.rollout, len(devices) - needs[0])
    n, m = math.prod(sizes.values()), math.prod(theirs.values())
    if n + m > len(devices):
        raise UserError(
            f"mesh asks for {n} devices and placement.rollout for {m} others; there are "
            f"{len(devices)}: make one of them smaller, or set placement.kind to 'shared'"
        )
    if n % m and m % n:
        raise UserError(
            f"mesh has {n} devices and placement.rollout {m}; one number must divide the other, so "
            "that weights move between devices in whole shards"
        )
    rollout = make_mesh(theirs, devices[n : n + m])
    if problems := list(rollout_conflicts(config, batch_shards(rollout))):
        raise UserError("\n".join(problems))
    return make_mesh(sizes, devices[:n], slices=table.slices), rollout


def _fixed(table: AxesTable) -> int:
    """Devices that a table asks for by number."""
    return math.prod(size for size in table.axes.values() if size != -1)


def _filled(table: AxesTable, devices: int) -> Mapping[str, int]:
    """The sizes of a table with -1 made what these devices leave."""
    sizes, fixed = table.axes, _fixed(table)
    for axis, size in sizes.items():
        if size == -1:
            if devices < fixed or devices % fixed:
                raise UserError(
                    f"{table.table}.{axis} = -1: the {max(devices, 0)} devices that are left do not"
                    f" divide by the {fixed} of the other axes"
                )
            sizes[axis] = devices // fixed
    return sizes
