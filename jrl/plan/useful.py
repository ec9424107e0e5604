"""What a run's programs must do at least: model FLOPs, and bytes that decoding has to read.

Model FLOPs are those of the matrix products that the algorithm asks for, with causal attention and
without recomputation, as in "PaLM: Scaling Language Modeling with Pathways" (arXiv:2204.02311); a
backward pass counts twice its forward pass. Embedding look-ups count nothing, and the output matrix
counts for completions alone, since no logits of prompts are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.mesh import batch_shards
from jrl.models.config import ModelConfig
from jrl.models.weights import WeightSpec, weights
from jrl.plan.topology import Topology
from jrl.train import build
from jrl.train.gather import gathers, sampler_bytes, slots_on_chip, token_bytes
from jrl.train.objective import max_new_tokens

_TILE = 128
"""Columns of a cache on TPUs are a multiple of this."""


class Lengths(NamedTuple):
    """The sizes of a rollout when every completion has its full length.

    Attributes:
      prompts: N.
      group: G, greedy members among them.
      prompt: P, tokens.
      new: T, tokens.
    """

    prompts: int
    group: int
    prompt: int
    new: int


def lengths_of(run: build.Run) -> Lengths:
    """The sizes of a run's rollout."""
    draw = run.method.draw
    own = run.config.sampling.group + draw.baseline_members if draw.own else 0
    group = own + draw.demonstrations
    return Lengths(run.config.train.prompts, group, run.width, max_new_tokens(run.config, run.task))


def layer_matrices(model: ModelConfig) -> float:
    """Numbers of the layers' matrices that one token is multiplied with; of experts, its own."""
    total = 0.0
    is_spec = lambda x: isinstance(x, WeightSpec)  # noqa: E731
    for spec in jax.tree.leaves(weights(model)["layers"], is_leaf=is_spec):
        share = model.experts_per_token / model.experts if spec.axes[1] == "expert" else 1.0
        total += share * math.prod(spec.shape) if spec.inputs else 0.0
    return total


def attention_pairs(model: ModelConfig, sizes: Lengths) -> float:
    """Pairs of a query and a key that it sees, of one group, summed over layers."""
    seen = np.arange(1, sizes.prompt + sizes.new + 1, dtype=np.float64)
    total = 0.0
    for window in model.windows:
        keys = seen if window is None else np.minimum(seen, window)
        total += keys[: sizes.prompt].sum() + sizes.group * keys[sizes.prompt :].sum()
    return total


def forward_flops(model: ModelConfig, sizes: Lengths) -> float:
    """FLOPs of one forward pass over the groups of a step, each prompt scored once."""
    completions = sizes.group * sizes.new
    matrices = layer_matrices(model) * (sizes.prompt + completions)
    head = model.embed_dim * model.vocab_size * completions
    pairs = 2 * model.heads * model.head_dim * attention_pairs(model, sizes)
    return 2.0 * sizes.prompts * (matrices + head + pairs)


def model_flops(run: build.Run, name: str) -> float:
    """Model FLOPs of a program, all chips together; 0 of a resharding.

    Args:
      run: the run.
      name: "resharding", "sampler" or "train_step".
    """
    forward = forward_flops(run.shape, lengths_of(run))
    if name != "train_step":
        return forward if name == "sampler" else 0.0
    # Adapters leave out the half of a backward pass that frozen weights' gradients would be.
    trained = 2.0 if run.config.lora is not None else 3.0
    objective = run.method.objective
    start = {"proximal_logprobs", "rollout_values", "rollout_entropy"} & objective.needs
    scored = len(objective.frozen) + bool(start)
    return forward * (trained * run.method.schedule.epochs + scored)


# ---------------------------------------------------------------- decoding


class Decoding(NamedTuple):
    """What one chip reads while it draws the completions of a step.

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


def decoding(run: build.Run, mesh: Mesh) -> Decoding:
    """What one chip of the sampler's mesh reads."""
    config, model, sizes = run.config, run.shape, lengths_of(run)
    from jrl.models.attention import cache_read, splash_cache  # Pallas takes long to import

    prompts = -(-sizes.prompts // batch_shards(mesh))
    rows, whole = prompts * sizes.group, gathers(config, model, mesh)
    live = min(rows, slots_on_chip(config.sampling.slots, mesh.shape, whole) or rows)
    rounds = -(-rows // live)
    shared = -(-live // sizes.group) if rounds > 1 else prompts
    each = token_bytes(model, mesh.shape["tensor"], config.sampling.int8)
    cache = each * (shared * sizes.prompt + live * (sizes.new + 1) / 2)
    columns = -(-sizes.new // _TILE) * _TILE

    def read(block: int) -> float:
        return float(np.ceil(np.arange(1, sizes.new + 1) / block).mean() * block / columns)

    short = "weights" in config.sampling.int8
    size = sampler_bytes(model, mesh.shape, gathered=whole, int8=short)
    # Of the embedding only the rows of some tokens are read.
    over = mesh.shape["tensor"] * (1 if whole else mesh.shape["fsdp"])
    size -= model.vocab_size * model.embed_dim * jnp.dtype(model.dtype).itemsize / over
    kernels = {"read_cache": cache_read.block_columns(columns)}
    kernels["splash"] = splash_cache.block_columns(columns)
    read_by = {name: read(block) for name, block in kernels.items()}
    return Decoding(float(sizes.new * rounds), size, cache, read_by)


def floor_seconds(run: build.Run, mesh: Mesh, topology: Topology, name: str) -> float:
    """The least time of a program on these chips, by the work that it cannot avoid.

    Of a training step its model FLOPs at peak; of a sampler also weights and live cache read once
    for every token. A resharding is all overhead: 0.
    """
    compute = model_flops(run, name) / topology.chips / topology.chip.flops
    if name != "sampler":
        return compute
    found = decoding(run, mesh)
    return max(compute, found.steps * (found.weights + found.cache) / topology.chip.hbm_bandwidth)
