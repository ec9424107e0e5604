"""Weights from the devices that train to those that draw, with a version and a checksum.

weights = hand_over(params, version)     # returns at once; the devices move every shard
params = checked(weights, version)       # or an error that names the version and the leaf
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jrl.errors import UserError
from jrl.mesh import AXES, replicated
from jrl.types import Array, Params, Split


class HandoverError(UserError):
    """Weights or completions are not those that the schedule asks for; nothing is drawn from them.

    It is no mistake of the configuration: something between the devices changed bits.
    """


def checksum(tree: Params) -> Array:
    """One number for the bits of each leaf, the same however the leaf is divided over devices.

    The words of a leaf are hashed together with their places and added up modulo 2^32, so that the
    order of the sum does not matter and the order of the words does: two shards that changed places
    are seen, and a single flipped bit always is.

    Args:
      tree: arrays of any type.

    Returns:
      [leaves] uint32, in the order of ``jax.tree.leaves``.

    >>> checksum([jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])]).tolist()
    [2014006262, 1818859448]
    """
    return jnp.stack([_hashed(_words(x)).sum(dtype=jnp.uint32) for x in jax.tree.leaves(tree)])


def _words(x: Array) -> Array:
    """The bits of an array as uint32, one or more words for each number."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    bits = min(jax.dtypes.itemsize_bits(x.dtype), 32)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _hashed(words: Array) -> Array:
    """Each word mixed with its place in the flattened array."""
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place * jnp.uint32(size & 0xFFFFFFFF) + index
    return _mix(words ^ _mix(place + jnp.uint32(0x9E3779B9)))


def _mix(x: Array) -> Array:
    """A bijection of 32 bits in which every bit moves about half of them (MurmurHash3's last)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


class Weights(NamedTuple):
    """A policy on its way; ``Handover.received`` gives its parameters when all is well.

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

    Every shard goes from one device to another of the same process, and none through the host:
    where the two meshes divide a weight differently, the larger one divides it as the smaller one
    does, before the move or after it.

    Args:
      where: the policy's tree, a ``NamedSharding`` on the rollout mesh for each leaf.
      mesh: where it is trained: other devices. One mesh's size divides the other's.
      rollout_mesh: where it goes.
    """

    def __init__(self, where: Any, mesh: Mesh, rollout_mesh: Mesh) -> None:
        def lies(on: Mesh) -> Any:
            return jax.tree.map(lambda there: NamedSharding(on, there.spec), where)

        self.rollout_mesh = rollout_mesh
        # What leaves the one mesh is divided into the very shards that the other one takes in.
        narrowed = mesh.size % rollout_mesh.size == 0
        leaves = lies(_like(rollout_mesh, mesh) if narrowed else mesh)
        self._lands = lies(rollout_mesh if narrowed else _like(mesh, rollout_mesh))
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
        params = self._settle(weights.params)
        paths = jax.tree_util.tree_flatten_with_path(params)[0]
        arrived = self._sum_there(params)
        sums = zip(paths, np.asarray(weights.sent), np.asarray(arrived), strict=True)
        wrong = [
            f"{jax.tree_util.keystr(path, simple=True, separator='.')} (sent {there:08x}, arrived "
            f"{here:08x})"
            for (path, _), there, here in sums
            if there != here
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise HandoverError(
                f"version {version} of the policy changed on its way to the rollout devices: "
                f"{', '.join(wrong[:3])}{more}; nothing was drawn with it. Run the command again "
                "to go on from the newest checkpoint; look after the devices if it happens again"
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
        self._held: Params = None

    def send(self, params: Params, version: int) -> Weights:
        """As ``Handover.send``; what moves is the adapters, and the first time the base."""
        adapters, base = self._split.split(params)
        if self._first is None:
            self._first = self._base.send(base, version)
        return self._adapters.send(adapters, version)

    def receive(self, weights: Weights, version: int) -> Params:
        """As ``Handover.receive``: the whole policy."""
        if self._held is None:
            assert self._first is not None
            self._held = self._base.receive(self._first, self._first.version)
            self._first = self._first._replace(params=None)  # as sent, they are done with
        return self._split.join(self._adapters.receive(weights, version), self._held)


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
    here: dict[Any, list[Array]] = {}
    for shard in x.addressable_shards:
        here.setdefault(_box(shard.index, x.shape), []).append(shard.data)
    moved = []
    for device, index in to.addressable_devices_indices_map(x.shape).items():
        copies = here[_box(index, x.shape)]
        copies.append(copies.pop(0))  # each copy is sent in turn
        moved.append(jax.device_put(copies[-1], device))
    return jax.make_array_from_single_device_arrays(x.shape, to, moved)


def _box(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Where a shard lies in its array, as something to look up."""
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
