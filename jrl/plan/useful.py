"""Lower bounds of a run's programs: model FLOPs, and bytes that decoding must read.

Model FLOPs are those of ``models.flops``; a backward pass counts twice its forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.mesh import batch_shards
from jrl.models import gpu
from jrl.models.flops import Lengths, forward_flops
from jrl.plan.topology import Topology
from jrl.sampling.params import MOST_HALVINGS
from jrl.setup.gather import gathers, sampler_bytes, slots_on_chip, token_bytes
from jrl.setup.run import Run
from jrl.train.utilisation import training_passes

_TILE = 128
"""Columns of a cache on TPUs are a multiple of this."""


def lengths_of(run: Run) -> Lengths:
    """The sizes of a run's rollout."""
    new = run.kind.new_tokens
    return Lengths(run.config.train.prompts, run.kind.rows_of_a_prompt(run.method), run.width, new)


def model_flops(run: Run, name: str) -> float:
    """Model FLOPs of a program, all chips together; 0 of a resharding.

    Args:
      run: the run.
      name: "resharding", "sampler" or "train_step".
    """
    forward = forward_flops(run.shape, lengths_of(run))
    if name == "train_step":
        prompts = run.config.train.prompts
        return forward * training_passes(run) * run.method.batch_groups(prompts) / prompts
    return forward * _sampled_groups(run) if name == "sampler" else 0.0


def _sampled_groups(run: Run) -> float:
    """Groups that a step samples, those of further rounds at most, over its own."""
    prompts = run.config.train.prompts
    return 1 + run.method.further_groups(prompts) / prompts


def sampler_runs(run: Run) -> float:
    """Times that the sampler's program runs in a step; those of further groups count as its own."""
    return run.config.sampling.draws * _sampled_groups(run)


# ---------------------------------------------------------------- decoding


class Decoding(NamedTuple):
    """Reads of one chip while it samples the completions of a step.

    Attributes:
      steps: of the loop over tokens.
      weights: bytes of a step.
      cache: bytes of a step of keys and values that are live, on average.
      live: of the kernels that read caches, by the start of their names: the share of its own
        columns that a row has read, on average.
    """

    steps: float
    weights: float
    cache: float
    live: Mapping[str, float]


def decoding(run: Run, mesh: Mesh) -> Decoding:
    """Reads of one chip of the sampler's mesh."""
    config, model, sizes = run.config, run.shape, lengths_of(run)
    from jrl.models.attention import cache_read, splash_cache  # Pallas takes long to import
    from jrl.models.gpu_kernels import COLUMNS

    prompts = -(-config.prompts_at_once // batch_shards(mesh))
    rows, gathered = prompts * sizes.group, gathers(config, model, mesh)
    live = min(rows, slots_on_chip(config.sampling.slots, mesh.shape, gathered) or rows)
    rounds = -(-rows // live)
    shared = -(-live // sizes.group) if rounds > 1 else prompts
    each = token_bytes(model, mesh.shape["tensor"], config.sampling.in_8_bits)
    cache = each * (shared * sizes.prompt + live * (sizes.new + 1) / 2)
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    columns = sizes.new if on_gpu else -(-sizes.new // _TILE) * _TILE

    def read(block: int) -> float:
        share = np.ceil(np.arange(1, sizes.new + 1) / block).mean() * block / columns
        return float(min(share, 1.0))  # of a block beyond the last column a GPU reads nothing

    short = "weights" in config.sampling.in_8_bits
    size = sampler_bytes(model, mesh.shape, gathered=gathered, in_8_bits=short)
    # Of the embedding only the rows of some tokens are read.
    over = mesh.shape["tensor"] * (1 if gathered else mesh.shape["fsdp"])
    size -= model.vocab_size * model.embed_dim * jnp.dtype(model.dtype).itemsize / over
    kernels = {"attend_cache": COLUMNS}
    if not on_gpu:
        kernels = {"read_cache": cache_read.block_columns(columns)}
        kernels["splash"] = splash_cache.block_columns(columns)
    read_by = {name: read(block) for name, block in kernels.items()}
    return Decoding(sizes.new * rounds * sampler_runs(run), size, cache, read_by)


def loop_trips(run: Run, mesh: Mesh, name: str) -> dict[str, int]:
    """The most iterations of a program's loops that end early, by their ``jax.named_scope``.

    XLA cannot tell them: the loops of the sampler end when no sequence runs.

    Args:
      run: the run.
      mesh: of the program.
      name: "resharding", "sampler" or "train_step".
    """
    trips = {"threshold": MOST_HALVINGS}
    if name != "sampler":
        return trips
    sizes, shards = lengths_of(run), batch_shards(mesh)
    rows = -(-run.config.prompts_at_once // shards) * sizes.group
    whole = gathers(run.config, run.shape, mesh)
    slots = min(rows, slots_on_chip(run.config.sampling.slots, mesh.shape, whole) or rows)
    trips |= {"queue": -(-rows // slots), "refill": slots}
    trips |= run.kind.decode_trips
    if mesh.devices.flat[0].platform == "gpu":
        trips["threshold"] = -(-MOST_HALVINGS // gpu.HALVINGS)
    if (tokens := trips.get("decode")) and mesh.devices.flat[0].platform == "gpu":
        # On GPUs a turn of the loop that ends early is several token steps.
        trips["decode"] = -(-tokens // min(gpu.STEPS, tokens))
    return trips


def floor_seconds(run: Run, mesh: Mesh, topology: Topology, name: str) -> float:
    """The least time of a program on these chips, by the work that it cannot avoid.

    Of a training step its model FLOPs at peak; of a sampler also weights and live cache read once
    for every token. A resharding is all overhead: 0.
    """
    compute = model_flops(run, name) / topology.chips / topology.chip.flops
    if name != "sampler":
        return compute
    decode = decoding(run, mesh)
    return max(
        compute, decode.steps * (decode.weights + decode.cache) / topology.chip.hbm_bandwidth
    )
