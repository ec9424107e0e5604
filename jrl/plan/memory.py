"""Bytes of a chip's memory in a run's programs, and what would make the programs fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from jrl.mesh import batch_shards
from jrl.plan.topology import CHIPS, Topology, larger
from jrl.setup.adapters import policy_of
from jrl.setup.gather import (
    cached_tokens,
    gathers,
    slots_on_chip,
    token_bytes,
)
from jrl.setup.run import Run
from jrl.train.memory_check import HeldModel, held_models
from jrl.train.programs import abstract_state, drawing_mesh, held_bytes

GIB = 1 << 30


MODELS = ("judges", "reward_models")
"""Parts of a chip's memory that are models of rewards."""
STAYS = ("weights", "value", "optimizer", "frozen", *MODELS)
"""Parts of a chip's memory that stay through a step."""


def state_bytes(run: Run) -> dict[str, float]:
    """Bytes of the training state on one chip, by part."""
    state, _ = abstract_state(run)
    policy, trained = held_bytes(policy_of(state, run.network)), held_bytes(state.params["policy"])
    parts = {
        "weights": policy,
        "value": held_bytes(state.params) - trained,
        "optimizer": held_bytes(state.opt_state),
        # A frozen base counts as weights.
        "frozen": held_bytes(state.frozen) - (policy - trained),
    }
    return {name: value for name, value in parts.items() if value}


def held_models_of(run: Run) -> list[HeldModel]:
    """The judges and reward models that a run holds beside its policy."""
    return held_models(run.config, run.rewards, run.shape)


def judge_model_bytes(run: Run) -> dict[str, float]:
    """Bytes on one chip of the weights of judges and reward models, which stay all the while."""
    axes, parts = dict(run.mesh.shape.items()), dict.fromkeys(MODELS, 0.0)
    for model in held_models_of(run):
        parts["reward_models" if model.judge is None else "judges"] += model.weight_bytes(axes)
    return {name: value for name, value in parts.items() if value}


def judge_cache_bytes(run: Run) -> float:
    """Bytes on one chip of a judge's keys and values while it is asked; 0 without judges."""
    axes = dict(run.mesh.shape.items())
    return max((model.cache_bytes(axes) for model in held_models_of(run)), default=0.0)


def cache_bytes(run: Run) -> float:
    """Bytes of keys and values on one chip: each prompt's once, each completion's own."""
    config, mesh, draw = run.config, drawing_mesh(run), run.method.draw
    group = config.sampling.group + draw.baseline_members
    batch = -(-config.train.prompts // batch_shards(mesh))
    new = run.kind.new_tokens
    slots = slots_on_chip(config.sampling.slots, mesh.shape, gathers(config, run.shape, mesh))
    tokens = cached_tokens(batch, group, run.width, new, slots)
    return tokens * token_bytes(run.shape, mesh.shape["tensor"], config.sampling.in_8_bits)


# ---------------------------------------------------------------- what would make it fit


def remedies(run: Run, topology: Topology, name: str, sizes: Mapping[str, float]) -> list[str]:
    """Suggested changes, most effective first; empty for a program that fits.

    Args:
      run: the run, on its mesh.
      topology: the slices.
      name: "resharding", "sampler", "judge" or "train_step".
      sizes: the program's ``bytes_per_chip``.
    """
    config, limit = run.config, topology.chip.hbm_bytes
    over = sizes["total"] - limit
    if over <= 0:
        return []
    lines = [f"{name}: {over / GIB:.1f} GiB too much on each chip"]
    if name == "judge":
        return [
            *lines,
            "lower at_once or max_prompt_tokens of the judge, or name a server with url",
        ]
    stays = sum(sizes.get(k, 0.0) for k in STAYS)
    if stays > 0.9 * limit:
        sharded = run.mesh.shape["fsdp"] * run.mesh.shape["tensor"] * run.mesh.shape["expert"]
        if sharded < topology.chips:
            lines.append(
                f"the state alone takes {stays / GIB:.1f} GiB; shard it over more chips: "
                "raise mesh.fsdp and lower mesh.data"
            )
        factor = stays / (0.6 * limit)
        bigger = larger(topology, topology.chips / topology.slices * factor)
        if models := [part for part in MODELS if sizes.get(part)]:
            size = sum(sizes[part] for part in models) / GIB
            lines.append(f"{' and '.join(models).replace('_', ' ')} take {size:.1f} GiB of it")
        if bigger is not None and topology.slices == 1:
            lines.append(f"the state fits on {bigger} with mesh.fsdp over all its chips")
        else:
            lines += other_chips(topology, factor)
        lines.append('optimizer.name = "adafactor" stores almost no moments')
        return lines
    if name == "resharding" or sizes.get("prepared", 0.0) > limit - stays:
        lines += resharding_remedies(run, sizes["total"] / (0.9 * limit), topology)
        return lines
    spare = limit - stays
    movable = sizes["total"] - stays
    factor = 2 ** int(np.ceil(np.log2(max(movable / spare, 1.0001))))
    if name == "train_step":
        if config.model.remat != "full":
            lines.append('model.remat = "full" stores only each layer\'s input')
        per = config.train.microbatch_prompts // batch_shards(run.mesh)
        if per >= factor:
            lines.append(f"train.microbatches = {config.train.microbatches * factor}")
        else:
            lines.append(
                f"a microbatch has only {per} prompts a chip; lower sampling.max_new_tokens or "
                "sampling.group, or raise mesh.tensor"
            )
        return lines + roomier(topology, sizes["total"] / (0.9 * limit))
    mesh = drawing_mesh(run)
    batch, shards = config.train.prompts // batch_shards(mesh), batch_shards(mesh)
    batch *= config.sampling.group
    if batch >= 2 * factor:
        each = max(batch // factor, 1)
        one_chip = slots_on_chip(shards, mesh.shape, gathers(config, run.shape, mesh)) == shards
        where = "on a chip" if one_chip else f"on all chips together, {each} on one"
        slots = each if one_chip else each * shards
        lines.append(f"sampling.slots = {slots} completions at once {where}")
    key = "sampling.mesh" if config.sampling.mesh else "mesh"
    lines.append(f"raise {key}.tensor, which shards weights and the cache")
    return lines + roomier(topology, sizes["total"] / (0.9 * limit))


def resharding_remedies(run: Run, factor: float, topology: Topology) -> list[str]:
    """Ways to fit the sampler's copy of the weights beside the training state.

    Args:
      run: the run, on its mesh.
      factor: how many times as much memory it would take.
      topology: the slices.
    """
    lines, mesh = [], drawing_mesh(run)
    key = "sampling.mesh" if run.config.sampling.mesh else "mesh"
    tensor = mesh.shape["tensor"]
    while tensor < mesh.shape["tensor"] * factor and run.shape.kv_heads % (2 * tensor) == 0:
        tensor *= 2
    if tensor > mesh.shape["tensor"]:
        lines.append(f"{key}.tensor = {tensor} divides the sampler's copy of the weights")
    if "weights" not in run.config.sampling.in_8_bits and not run.shape.experts:
        lines.append("sampling.int8 = ['weights'] halves the sampler's copy, and rounds it")
    lines.append(f"{key}.fsdp leaves the copy divided where a chip has no room for all of it")
    return lines + roomier(topology, factor)


def roomier(topology: Topology, factor: float) -> list[str]:
    """Lines that name slices on which a chip would have to hold ``factor`` times less.

    A larger slice of the same chip, or where there is none several of them, between which the batch
    alone is divided, or another chip.
    """
    slices = topology.slices
    slice_name = topology.name.rpartition("*")[2]
    bigger = larger(topology, topology.chips / slices * factor)
    if bigger is not None and bigger != slice_name:
        several = f"{slices}*" if slices > 1 else ""
        return [f"or take {several}{bigger}, with mesh.fsdp over the chips that it has more"]
    more = 2 ** math.ceil(math.log2(max(slices * factor, 2)))
    lines = [
        f"or take {more}*{slice_name}, with mesh.data = {more}, which divides the batch further"
    ]
    return lines + other_chips(topology, factor)


def other_chips(topology: Topology, factor: float) -> list[str]:
    """A line with the chips that have ``factor`` times as much memory, or else the most.

    They are TPUs or GPUs, as the topology's.
    """
    chips = {n: c for n, c in CHIPS.items() if c.platform == topology.chip.platform}
    hbm_needed = min(topology.chip.hbm_bytes * factor, max(c.hbm_bytes for c in chips.values()))
    names = [
        f"{name} ({chip.hbm_bytes / GIB:.0f} GiB)"
        for name, chip in chips.items()
        if chip.hbm_bytes >= hbm_needed and name != topology.family
    ]
    return [f"or take a chip with more memory: {', '.join(names)}"] if names else []
