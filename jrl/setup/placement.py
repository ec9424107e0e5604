"""The devices of training and of sampling (one mesh, or two disjoint ones), checked for sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jrl.config import Config
from jrl.config.checks import rollout_conflicts
from jrl.errors import UserError
from jrl.mesh import AXES, batch_shards, check_sizes, make_mesh
from jrl.models.attention.choice import check_attention_on_mesh
from jrl.models.config import ModelConfig


def make_meshes(config: Config, *, apart: bool = True) -> tuple[Mesh, Mesh | None]:
    """The meshes of training and, if ``apart`` and it has its own devices, of rollout.

    Training takes the first devices of every process and rollout the ones after them. The number
    of devices of one divides that of the other, so that weights move in whole shards.

    Raises:
      UserError: devices are too few, what is left does not divide, or neither number divides the
        other; naming the keys.
    """
    mesh = config.mesh_axes
    if config.placement is None or not apart:
        return make_mesh(mesh), None
    devices, rollout_axes = jax.devices(), config.sampling.mesh_axes
    sizes = _filled("mesh", mesh, len(devices) - _fixed(rollout_axes))
    theirs = _filled("sampling.mesh", rollout_axes, len(devices) - _fixed(mesh))
    n, m = math.prod(sizes.values()), math.prod(theirs.values())
    if n + m > len(devices):
        raise UserError(
            f"mesh asks for {n} devices and sampling.mesh for {m} others; there are "
            f"{len(devices)}: make one of them smaller, or remove [placement]"
        )
    if n % m and m % n:
        raise UserError(
            f"mesh has {n} devices and sampling.mesh {m}; one number must divide the other, so "
            "that weights move between devices in whole shards"
        )
    mine, others = _shares(devices, n, m)
    rollout = make_mesh(theirs, others)
    if problems := list(rollout_conflicts(config, batch_shards(rollout))):
        raise UserError("\n".join(problems))
    return make_mesh(sizes, mine), rollout


def sampler_mesh(config: Config, mesh: Mesh) -> Mesh | None:
    """The sampling mesh, if ``[sampling.mesh]`` differs from the training mesh.

    It has the devices of training in their order, so that one compiled program can move weights
    from one to the other.

    Raises:
      UserError: it uses another number of devices, or splits several slices along another axis than
        data; naming the keys.
    """
    if not config.sampling.mesh or config.placement is not None:
        return None
    sizes = _filled("sampling.mesh", config.sampling.mesh_axes, mesh.size)
    if math.prod(sizes.values()) != mesh.size:
        raise UserError(
            f"sampling.mesh has {math.prod(sizes.values())} devices and mesh {mesh.size}; the "
            "sampler uses the devices of training: make the product of its axes "
            f"{mesh.size}, or set one of them to -1"
        )
    slices = len({getattr(d, "slice_index", None) or 0 for d in mesh.devices.flat})
    if sizes["data"] % slices:
        raise UserError(
            f"sampling.mesh.data = {sizes['data']} does not divide over {slices} slices, between "
            f"which only the data axis can lie; make it a multiple of {slices}"
        )
    grid = np.asarray(mesh.devices).reshape([sizes[axis] for axis in AXES])
    sampling = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return None if sampling.shape == mesh.shape else sampling


def check_sampler_mesh(
    config: Config, mesh: Mesh, model: ModelConfig | None, prompt: int, completion: int
) -> None:
    """Raises UserError for what the sampler's own mesh does not divide, one line for each.

    Args:
      config: the run's.
      mesh: of training.
      model: the policy's shape; None for a network of one's own.
      prompt: P, tokens.
      completion: T, tokens.
    """
    sampling = sampler_mesh(config, mesh)
    if sampling is None:
        return
    parts = batch_shards(sampling)
    lines = list(rollout_conflicts(config, parts))
    slots, rows = config.sampling.slots, config.train.prompts * config.sampling.group
    if parts < sampling.size and slots < rows and slots % parts:
        lines.append(
            f"sampling.slots = {slots} cannot be split over the {parts} devices of sampling.mesh "
            f"that divide a batch; make it a multiple of {parts}"
        )
    if lines:
        raise UserError("\n".join(lines))
    if model is not None:
        check_model_on_mesh(sampling, model, prompt, completion, key="sampling.mesh")
        check_attention_on_mesh(sampling, model, config.model.attention)


def _shares(
    devices: Sequence[jax.Device], n: int, m: int
) -> tuple[list[jax.Device], list[jax.Device]]:
    """N devices to train on and m others to sample on, equally many of each in every process."""
    processes = jax.process_count()
    per = len(devices) // processes
    if n % processes or m % processes or n + m > per * processes:
        raise UserError(
            f"mesh has {n} devices and sampling.mesh {m}, which do not divide over the "
            f"{processes} processes; make both numbers multiples of {processes}"
        )
    each = [[d for d in devices if d.process_index == p] for p in range(processes)]
    n, m = n // processes, m // processes
    return [d for shares in each for d in shares[:n]], [
        d for shares in each for d in shares[n : n + m]
    ]


def _fixed(axes: Mapping[str, int]) -> int:
    """Devices that a mesh asks for by number."""
    return math.prod(size for size in axes.values() if size != -1)


def _filled(key: str, axes: Mapping[str, int], devices: int) -> dict[str, int]:
    """The sizes of a mesh with -1 made what these devices leave."""
    fixed = _fixed(axes)
    for axis, size in axes.items():
        if size == -1 and (devices < fixed or devices % fixed):
            raise UserError(
                f"{key}.{axis} = -1: the {max(devices, 0)} devices that are left do not divide by"
                f" the {fixed} of the other axes"
            )
    return {axis: devices // fixed if size == -1 else size for axis, size in axes.items()}


def check_model_on_mesh(
    mesh: Mesh, model: ModelConfig, prompt: int, completion: int, *, key: str = "mesh"
) -> None:
    """Raises UserError for what the mesh does not divide, one line for each size.

    Args:
      mesh: of training or sampling.
      model: the policy's shape.
      prompt: P, tokens.
      completion: T, tokens.
      key: the configuration's name of the mesh.
    """
    sizes = [
        ("heads", "the model's heads", model.heads),
        ("kv_heads", "the model's kv_heads", model.kv_heads),
        ("vocab", "the model's vocab_size", model.vocab_size),
        ("embed", "the model's embed_dim", model.embed_dim),
        ("length", "the prompts' tokens", prompt),
        ("length", "the completions' tokens", completion),
    ]
    if not all(model.sparse):
        sizes.append(("mlp", "the model's mlp_dim", model.mlp_dim))
    if any(model.sparse):
        sizes.append(("mlp", "the model's expert_mlp_dim", model.expert_mlp_dim))
        sizes.append(("expert", "the model's experts", model.experts))
    check_sizes(mesh, sizes, key)
