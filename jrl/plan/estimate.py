"""Rough times of a training step and of a rollout, before anything is compiled.

They order the candidates of a search; the plans of the best say how far they were off. As in a
plan, compute units, memory and network work in parallel, and the slowest of them counts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jrl.config import Config
from jrl.mesh import RULES
from jrl.models.config import ModelConfig
from jrl.models.flops import Lengths, forward_flops
from jrl.plan.topology import Topology
from jrl.setup.gather import (
    ROOM,
    cached_tokens,
    has_room,
    moments,
    sampler_bytes,
    slots_on_chip,
    token_bytes,
    weight_numbers,
)
from jrl.train.remat import saved_numbers

_forward_flops = functools.cache(forward_flops)
"""The same for all candidates of a search."""


class Training(NamedTuple):
    """Settings of a training step.

    Attributes:
      mesh: devices along each axis.
      remat: see ``model.remat``.
      microbatches: see ``train.microbatches``.
    """

    mesh: Mapping[str, int]
    remat: str
    microbatches: int


def ring_bandwidth(topology: Topology, n: int) -> float:
    """Rough bytes a second that a chip sends in a collective over n chips.

    They are taken to span a dimension of the torus that has their number, else the longest, and
    GPUs to be in one host where they fit.
    """
    if (chip := topology.chip).dimensions == 0:
        whole = n <= topology.shape[0]
        members = topology.shape[0] if n % topology.shape[0] == 0 else 1
        return (
            chip.link_bandwidth if whole else min(chip.dcn_bandwidth * members, chip.link_bandwidth)
        )
    sizes = sorted(enumerate(topology.shape), key=lambda x: (x[1] != n, -x[1]))
    links, left = 0, n
    for dimension, size in sizes:
        if left > 1:
            links += 2 if topology.wraps(dimension) and left >= size else 1
            left = -(-left // size)
    return topology.chip.link_bandwidth * max(links, 1)


def too_large(size: float, topology: Topology) -> float:
    """The factor on the time of a program of this many bytes."""
    over = size / topology.chip.hbm_bytes
    return 1.0 if over < ROOM else 1e3 * over


def _sent(size: float, n: int) -> float:
    """Bytes that each of n chips sends until all have the ``size`` that they had parts of."""
    return size * (n - 1) / n


# ---------------------------------------------------------------- training


def training_seconds(
    config: Config, model: ModelConfig, topology: Topology, options: Training
) -> tuple[float, float]:
    """Rough seconds of a training step, and bytes of the state while nothing trains."""
    axes = {"context": 1, **options.mesh}
    size = jnp.dtype(config.model.param_dtype).itemsize
    state = weight_numbers(model, axes) * size * (1 + moments(config))
    times = training_times(config, model, topology, options)
    total = state + training_temporaries(config, model, options)
    return max(times.values()) * too_large(total, topology), state


def training_times(
    config: Config, model: ModelConfig, topology: Topology, options: Training
) -> dict[str, float]:
    """Rough seconds of a training step that "compute" and "network" take by themselves."""
    axes, lengths = {"context": 1, **options.mesh}, _lengths(config)
    again = {"full": 4, "mlp": 3.5, "dots": 3.1}.get(options.remat, 3)
    compute = again * _forward_flops(model, lengths) / topology.chips / topology.chip.flops
    tokens = _trained_tokens(config, axes)
    network = _weights_sent(model, topology, options) + _tokens_sent(model, topology, axes, tokens)
    return {"compute": compute, "network": network}


def training_temporaries(config: Config, model: ModelConfig, options: Training) -> float:
    """Rough bytes on a chip besides the state: activations, gradient, and 256 MiB of the rest."""
    axes = {"context": 1, **options.mesh}
    # In 16 bits.
    saved = model.layers * 2.0 * saved_numbers(model, axes["tensor"], options.remat)
    activations = _trained_tokens(config, axes) / options.microbatches * saved
    # The gradient is float32, and of the head's scores some are there at once.
    return 4 * weight_numbers(model, axes) + activations + 2**28


def _lengths(config: Config) -> Lengths:
    group, new = config.sampling.group, config.sampling.max_new_tokens
    return Lengths(config.train.prompts, group, config.data.longest_prompt, new)


def _trained_tokens(config: Config, axes: Mapping[str, int]) -> float:
    """Tokens of a training step on one chip; ``context`` divides sequences."""
    lengths = _lengths(config)
    new = config.sampling.group * config.sampling.max_new_tokens
    return lengths.prompts * (lengths.prompt + new) / _shards(axes) / axes["context"]


def _shards(axes: Mapping[str, int]) -> int:
    parts = 1
    for axis in RULES["batch"]:
        parts *= axes.get(axis, 1)
    return parts


def _weights_sent(model: ModelConfig, topology: Topology, options: Training) -> float:
    """Seconds of weights that are gathered in 16 bits, and of their gradients in 32."""
    axes, parts = {"context": 1, **options.mesh}, 1
    for axis in ("data", "fsdp"):
        parts *= axes[axis]
    gathered = weight_numbers(model, axes, gathered=True)
    fsdp, rate = axes["fsdp"], ring_bandwidth(topology, parts)
    gathers = (
        2 * (2 if options.remat != "full" else 3) * _sent(gathered, fsdp) * options.microbatches
    )
    # Reduced over fsdp with every microbatch, and what is left of it over data once.
    gradients = 4 * _sent(gathered, fsdp) * options.microbatches
    gradients += 2 * 4 * _sent(gathered / fsdp, axes["data"])
    return (gathers + gradients) / rate


def _tokens_sent(
    model: ModelConfig, topology: Topology, axes: Mapping[str, int], tokens: float
) -> float:
    """Seconds of activations: sums over ``tensor``, and tokens on their way to experts."""
    layer, seconds = 2.0 * model.embed_dim * tokens, 0.0
    if (n := axes["tensor"]) > 1:  # two sums forward, made again, and two backward
        seconds += 6 * 2 * _sent(layer, n) * model.layers / ring_bandwidth(topology, n)
    if (n := axes["expert"]) > 1:  # there in 16 bits and back in 32, three times
        sparse = sum(model.sparse)
        seconds += 3 * 3 * _sent(n * layer, n) * sparse / ring_bandwidth(topology, n)
    return seconds


# ---------------------------------------------------------------- sampling


def resharding_seconds(
    config: Config, model: ModelConfig, topology: Topology, mesh: Mapping[str, int]
) -> float:
    """Rough seconds until every device has its part of the sampler's weights."""
    short = "weights" in config.sampling.in_8_bits
    size = sampler_bytes(model, {"context": 1, **mesh}, gathered=True, in_8_bits=short)
    return size / ring_bandwidth(topology, topology.chips)


def sampling_seconds(
    config: Config,
    model: ModelConfig,
    topology: Topology,
    mesh: Mapping[str, int],
    state_bytes: float = 0.0,
) -> float:
    """Rough seconds of a rollout: weights and live cache are read for every token.

    Args:
      config: the run's; its meshes are not looked at.
      model: the policy's shape.
      topology: the slices.
      mesh: the sampler's.
      state_bytes: bytes of a chip's training state that stay in memory.
    """
    axes, sampling = {"context": 1, **mesh}, config.sampling
    gathered = has_room(config, model, axes, topology.chip.hbm_bytes, state_bytes)
    short = "weights" in sampling.in_8_bits
    weights = sampler_bytes(model, axes, gathered=gathered, in_8_bits=short)
    cache = _cache_bytes(config, model, axes, gathered)[0]
    times = sampling_times(config, model, topology, mesh, state_bytes)
    return max(times.values()) * too_large(state_bytes + cache + weights, topology)


def sampling_times(
    config: Config,
    model: ModelConfig,
    topology: Topology,
    mesh: Mapping[str, int],
    state_bytes: float = 0.0,
) -> dict[str, float]:
    """Rough seconds of a rollout that "memory", "compute" and "network" take by themselves.

    The arguments are those of ``sampling_seconds``.
    """
    axes, chip, sampling = {"context": 1, **mesh}, topology.chip, config.sampling
    gathered = has_room(config, model, axes, chip.hbm_bytes, state_bytes)
    short = "weights" in sampling.in_8_bits
    weights = sampler_bytes(model, axes, gathered=gathered, in_8_bits=short)
    prompts, new = -(-config.prompts_at_once // _shards(axes)), sampling.max_new_tokens
    cache, shared = _cache_bytes(config, model, axes, gathered)
    slots = slots_on_chip(sampling.slots, axes, gathered)
    rows = min(prompts * sampling.group, slots or prompts * sampling.group)
    rounds = -(-prompts * sampling.group // rows) * sampling.draws
    memory = (weights + shared + (cache - shared) / 2) / chip.hbm_bandwidth
    flops = _forward_flops(model, _lengths(config))
    compute = flops / topology.chips / chip.flops / (new * rounds)
    network = 0.0
    if not gathered:
        gathered_bytes = sampler_bytes(model, axes, gathered=True, in_8_bits=short)
        network += _sent(gathered_bytes, axes["fsdp"]) / ring_bandwidth(topology, axes["fsdp"])
    layer = 2.0 * model.embed_dim * rows
    if (n := axes["tensor"]) > 1:  # two sums in every layer
        network += 2 * 2 * _sent(layer, n) * model.layers / ring_bandwidth(topology, n)
    if (n := axes["expert"]) > 1:
        network += 3 * _sent(n * layer, n) * sum(model.sparse) / ring_bandwidth(topology, n)
    each = {"memory": memory, "compute": compute, "network": network}
    return {name: seconds * new * rounds for name, seconds in each.items()}


def _cache_bytes(
    config: Config, model: ModelConfig, axes: Mapping[str, int], gathered: bool
) -> tuple[float, float]:
    """Bytes of the cache of a chip, and of the prompts in it."""
    sampling = config.sampling
    prompts, new = -(-config.prompts_at_once // _shards(axes)), sampling.max_new_tokens
    slots = slots_on_chip(sampling.slots, axes, gathered)
    each = token_bytes(model, axes["tensor"], sampling.in_8_bits)
    width = config.data.longest_prompt
    return each * cached_tokens(prompts, sampling.group, width, new, slots), prompts * width * each
