"""Weights between two sets of devices, with a version and a checksum.

weights = handover.send(params, version)       # returns at once; devices move every shard
params = handover.receive(weights, version)    # or an error that names version and leaf
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jrl.errors import UserError
from jrl.mesh import AXES, replicated
from jrl.storage.integrity import checksum
from jrl.types import Array, Params, Split


class HandoverError(UserError):
    """Weights or completions are not those that the schedule asks for; nothing is drawn from them.

    Not a configuration error: data changed in transit between devices.
    """


class Weights(NamedTuple):
    """A policy in transit; ``Handover.receive`` returns its parameters once they are checked.

    Attributes:
      version: training steps that made it.
      params: on the receiving devices, divided as they were sent.
      sent: [leaves] uint32, the checksum of what was sent, computed by the sending devices.
    """

    version: int
    params: Params
    sent: Array


class Handover:
    """Moves a policy from the devices that train it to those that draw with it.

    Every shard goes from one device to another of the same process, never through the host: where
    the two meshes divide a weight differently, the larger one divides it as the smaller one does,
    before the move or after it.

    Args:
      where: the policy's tree, a ``NamedSharding`` on the rollout mesh for each leaf.
      mesh: where it is trained: other devices. One mesh's size divides the other's.
      rollout_mesh: where it goes.
    """

    def __init__(self, where: Any, mesh: Mesh, rollout_mesh: Mesh) -> None:
        def shardings_on(on: Mesh) -> Any:
            return jax.tree.map(lambda sharding: NamedSharding(on, sharding.spec), where)

        self.rollout_mesh = rollout_mesh
        # What leaves the one mesh is divided into the very shards that the other one takes in.
        narrowed = mesh.size % rollout_mesh.size == 0
        leaves = shardings_on(_like(rollout_mesh, mesh) if narrowed else mesh)
        self._lands = shardings_on(rollout_mesh if narrowed else _like(mesh, rollout_mesh))
        self._spread = self._settle = _untouched
        if narrowed and mesh.devices.shape != rollout_mesh.devices.shape:
            self._spread = jax.jit(_untouched, out_shardings=leaves)
        if not narrowed:
            self._settle = jax.jit(_untouched, out_shardings=where)
        self._sum_here = jax.jit(checksum, out_shardings=replicated(mesh))
        self._sum_there = jax.jit(checksum, out_shardings=replicated(rollout_mesh))

    def send(self, params: Params, version: int) -> Weights:
        """Starts the move, and returns while the devices are at it.

        Args:
          params: on the training mesh; may be donated as soon as this returns.
          version: training steps that made it.
        """
        # Before the move and on the sending devices: a sum over what has landed would agree with
        # itself.
        sent = self._sum_here(params)
        landed = jax.tree.map(_move, self._spread(params), self._lands)
        return Weights(version, landed, sent)

    def receive(self, weights: Weights, version: int) -> Params:
        """The parameters on the rollout mesh, of that version and bit for bit what was sent.

        Call it under ``jax.set_mesh(rollout_mesh)``; it waits for the weights.

        Raises:
          HandoverError: another version, or a leaf whose checksum differs, named.
        """
        if weights.version != version:
            raise HandoverError(
                f"the rollout devices hold version {weights.version} of the policy where the "
                f"schedule asks for version {version}"
            )
        # After the transfer: dividing it further is a program of the receiving devices alone.
        params = self._settle(weights.params)
        paths = jax.tree_util.tree_flatten_with_path(params)[0]
        arrived = self._sum_there(params)
        sums = zip(paths, np.asarray(weights.sent), np.asarray(arrived), strict=True)
        wrong = [
            f"{jax.tree_util.keystr(path, simple=True, separator='.')} (sent {sent:08x}, arrived "
            f"{landed:08x})"
            for (path, _), sent, landed in sums
            if sent != landed
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise HandoverError(
                f"version {version} of the policy changed on its way to the rollout devices: "
                f"{', '.join(wrong[:3])}{more}; nothing was drawn with it. Run the command again "
                "to resume from the newest checkpoint; check the devices if it happens again"
            )
        return params


class AdapterHandover:
    """A ``Handover`` of adapters on a frozen base: the base moves once and stays there.

    Args:
      split: of the policy.
      where: as for ``Handover``, the whole policy's.
      mesh: as for ``Handover``.
      rollout_mesh: as for ``Handover``.
    """

    def __init__(self, split: Split, where: Any, mesh: Mesh, rollout_mesh: Mesh) -> None:
        self.rollout_mesh = rollout_mesh
        self._split = split
        self._adapters, self._base = (Handover(w, mesh, rollout_mesh) for w in split.split(where))
        self._first: Weights | None = None
        self._base_weights: Params = None

    def send(self, params: Params, version: int) -> Weights:
        """As ``Handover.send``; what moves is the adapters, and the first time the base."""
        adapters, base = self._split.split(params)
        if self._first is None:
            self._first = self._base.send(base, version)
        return self._adapters.send(adapters, version)

    def receive(self, weights: Weights, version: int) -> Params:
        """As ``Handover.receive``: the whole policy."""
        if self._base_weights is None:
            assert self._first is not None
            self._base_weights = self._base.receive(self._first, self._first.version)
            # Or the devices would hold the base twice for the length of the run.
            self._first = self._first._replace(params=None)  # as sent, they are done with
        return self._split.join(self._adapters.receive(weights, version), self._base_weights)


def _untouched(params: Params) -> Params:
    return params


def _like(small: Mesh, large: Mesh) -> Mesh:
    """A mesh over the devices of the large one that divides arrays as the small one does.

    Copies of a shard are neighbours, so that with as many devices of both meshes in each process
    there is one in the process that needs it.
    """
    copies = large.size // small.size
    grid = large.devices.reshape(*small.devices.shape, copies)
    return Mesh(grid, (*AXES, "copies"), axis_types=(AxisType.Auto,) * (1 + len(AXES)))


def _move(x: Array, to: NamedSharding) -> Array:
    """An array on other devices, which take over its shards as they are."""
    copies_of: dict[Any, list[Array]] = {}
    for shard in x.addressable_shards:
        copies_of.setdefault(_box(shard.index, x.shape), []).append(shard.data)
    pieces = []
    for device, index in to.addressable_devices_indices_map(x.shape).items():
        copies = copies_of[_box(index, x.shape)]
        # In turn, so that no device sends to all of its receivers.
        copies.append(copies.pop(0))  # each copy is sent in turn
        pieces.append(jax.device_put(copies[-1], device))
    return jax.make_array_from_single_device_arrays(x.shape, to, pieces)


def _box(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Position of a shard in its array, as a dict key."""
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
