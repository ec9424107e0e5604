"""Whether the sampler reads gathered weights: sent to all devices once a rollout, not every token.

Gathering saves sending what ``mesh.fsdp`` divides for every token, and takes memory: in bfloat16
94 GiB on each of 8 chips for 405B parameters, as much as a chip has, and in 8 bits half of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.config import Config
from jrl.mesh import RULES
from jrl.models.config import ModelConfig
from jrl.models.weights import WeightSpec
from jrl.models.weights import weights as weight_table
from jrl.system.devices import GPU_MEMORY_SHARE

GIB = 1 << 30
MEMORY: Mapping[str, int] = {
    "TPU v4": 32 * GIB,
    "TPU v5 lite": 16 * GIB,
    "TPU v5": 95 * GIB,
    "TPU v5p": 95 * GIB,
    "TPU v6 lite": 32 * GIB,
    **{
        f"NVIDIA {name}": int(GPU_MEMORY_SHARE * size)
        for name, size in {
            "A100-SXM4-80GB": 85_100_068_864,
            "H100 80GB HBM3": 84_942_979_072,
            "H200": 150_119_153_664,
            "B200": 191_514_411_008,
            "L4": 23_622_320_128,
        }.items()
    },
}
"""Bytes of a chip by its device kind; also for chips that are compiled for and not there."""


ROOM = 0.9
"""The share of a device's memory for weights, cache and state; the rest is for temporaries."""

_MOMENTS: Mapping[str, float] = {
    **dict.fromkeys(("adafactor", "sgd", "sign_sgd"), 0.0),
    **dict.fromkeys(("adagrad", "lion", "rmsprop", "signum"), 1.0),
    **dict.fromkeys(("adadelta", "adam", "adamw", "nadam", "nadamw", "radam"), 2.0),
    **dict.fromkeys(("adan", "amsgrad"), 3.0),
}
"""Numbers that an optimizer keeps for each weight; 2 of those that are not here."""


def gathers(config: Config, model: ModelConfig, mesh: Mesh) -> bool:
    """Whether a device has room for gathered weights; True where its memory is unknown.

    Beside them it has its part of the training state, unless it only samples, and the cache of the
    keys and values of a rollout.

    Args:
      config: the run's.
      model: the policy's shape.
      mesh: that completions are drawn on.
    """
    limit = device_memory(mesh)
    # Nothing to gather along one device; and where memory is unknown the faster way is tried.
    if limit is None or mesh.shape["fsdp"] == 1:
        return True
    return has_room(config, model, mesh.shape, limit, _state_bytes(config, model, mesh))


def prepared_bytes(config: Config, model: ModelConfig, mesh: Mesh) -> float:
    """Bytes of the weights on one device as the sampler reads them on this mesh."""
    whole, short = gathers(config, model, mesh), "weights" in config.sampling.in_8_bits
    return sampler_bytes(model, mesh.shape, gathered=whole, in_8_bits=short)


def has_room(
    config: Config, model: ModelConfig, axes: Mapping[str, int], limit: float, state: float
) -> bool:
    """``gathers`` on a mesh with these axes, beside ``state`` bytes of the training state."""
    short = "weights" in config.sampling.in_8_bits
    size = sampler_bytes(model, axes, gathered=True, in_8_bits=short)
    return size + state + _cache_bytes(config, model, axes) <= ROOM * limit


def sampler_bytes(
    model: ModelConfig, axes: Mapping[str, int], *, gathered: bool, in_8_bits: bool = False
) -> float:
    """Bytes of the weights as the sampler reads them, on one device.

    Args:
      model: the policy's shape.
      axes: devices along each axis of the mesh.
      gathered: whether every device holds what fsdp divides.
      in_8_bits: whether matrices are 8-bit numbers with a float32 scale for each output channel.
    """
    table = dict(weight_table(model))
    if model.tied_embeddings:
        v, d = table["embed"].shape
        # Tied embeddings are prepared as a second, transposed matrix for the head, which takes room
        # of its own.
        table["head"] = WeightSpec((d, v), table["embed"].axes[::-1], inputs=1)
    whole = ("fsdp",) if gathered else ()
    total = 0.0
    for spec in _specs(table):
        size = jnp.dtype(model.dtype).itemsize
        if in_8_bits and spec.inputs:
            # Scales are per layer and output channel: the summed axes of the matrix are left out.
            lead = 1 if spec.axes[0] == "layers" else 0
            scales = slice(lead, lead + spec.inputs)
            shape = (*spec.shape[: scales.start], *spec.shape[scales.stop :])
            names = (*spec.axes[: scales.start], *spec.axes[scales.stop :])
            total += 4 * _numbers(shape, names, axes, whole)
            size = 1
        total += size * _numbers(spec.shape, spec.axes, axes, whole)
    return total


def _numbers(
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    axes: Mapping[str, int],
    whole: tuple[str, ...] = (),
) -> float:
    """Numbers of an array on one device."""
    over = {a for name in names if name is not None for a in RULES[name]} - {*whole}
    return math.prod(shape) / math.prod(axes[a] for a in over)


def _specs(table: Any) -> list[WeightSpec]:
    return jax.tree.leaves(table, is_leaf=lambda x: isinstance(x, WeightSpec))


def _state_bytes(config: Config, model: ModelConfig, mesh: Mesh) -> float:
    """Bytes of weights and moments on a device of training; 0 where those of rollout are others."""
    if config.placement is not None:
        return 0.0
    axes = dict(config.mesh_axes)
    # An axis of -1 takes the devices that are left, as in the mesh itself.
    rest = -(-mesh.size // max(math.prod(n for n in axes.values() if n > 0), 1))
    axes = {axis: n if n > 0 else rest for axis, n in axes.items()}
    size = weight_numbers(model, axes) * jnp.dtype(model.param_dtype).itemsize
    return (1 + moments(config)) * size


def moments(config: Config) -> float:
    """Numbers that the optimizer keeps for each weight; adapters are few."""
    return 0.0 if config.lora is not None else _MOMENTS.get(config.optimizer.name, 2.0)


def weight_numbers(model: ModelConfig, axes: Mapping[str, int], *, gathered: bool = False) -> float:
    """Numbers of the policy's weights on a device; ``gathered`` as in ``sampler_bytes``."""
    whole = ("fsdp",) if gathered else ()
    specs = _specs(dict(weight_table(model)))
    return sum(_numbers(spec.shape, spec.axes, axes, whole) for spec in specs)


def _cache_bytes(config: Config, model: ModelConfig, axes: Mapping[str, int]) -> float:
    """Bytes of the keys and values of a rollout on a device, with gathered weights."""
    sampling = config.sampling
    shards = math.prod(axes.get(axis, 1) for axis in RULES["batch"])
    prompts, slots = -(-config.prompts_at_once // shards), slots_on_chip(sampling.slots, axes, True)
    width, new = config.data.longest_prompt, sampling.max_new_tokens or 0
    tokens = cached_tokens(prompts, sampling.group, width, new, slots)
    return tokens * token_bytes(model, axes["tensor"], sampling.in_8_bits)


def token_bytes(model: ModelConfig, tensor: int, in_8_bits: Sequence[str]) -> float:
    """Bytes of the keys and values of one token on one chip, all layers together.

    Args:
      model: the policy's shape.
      tensor: devices that heads are divided over.
      in_8_bits: ``sampling.in_8_bits``; a vector of 8-bit numbers has a float32 scale.
    """
    # Rounded up: fewer heads than devices are repeated, not divided.
    heads = -(-model.kv_heads // tensor)
    size = jnp.dtype(model.dtype).itemsize
    vector = model.head_dim + 4 if "cache" in in_8_bits else model.head_dim * size
    return float(2 * model.layers * heads * vector)


def slots_on_chip(slots: int, axes: Mapping[str, int], gathered: bool) -> int:
    """Of ``sampling.slots``, those that are on one chip; 0 for one of each sequence.

    A device that samples by itself has them all, else all devices share them
    (``sampling.generate``).

    Args:
      slots: ``sampling.slots``.
      axes: devices along each axis of the sampler's mesh.
      gathered: whether every device has what fsdp divides.
    """
    lone = ("data", "fsdp") if gathered else ("data",)
    if all(n == 1 or axis in lone for axis, n in axes.items()):
        return slots
    return -(-slots // math.prod(axes.get(axis, 1) for axis in RULES["batch"]))


def cached_tokens(prompts: float, group: int, width: int, new: int, slots: int) -> float:
    """Tokens whose keys and values one chip holds: each prompt's once, and those of its slots."""
    rows = prompts * group
    return prompts * width + min(rows, slots or rows) * new


def device_memory(mesh: Mesh) -> int | None:
    """Bytes of a device of a mesh; None where that is unknown."""
    device, local = mesh.devices.flat[0], jax.local_devices()[0]
    # A GPU reports its own limit; planning has no device to ask, and neither do TPUs need one.
    if device.platform == "gpu" and local.platform == "gpu":
        return (local.memory_stats() or {}).get("bytes_limit")
    return MEMORY.get(device.device_kind)
