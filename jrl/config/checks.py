"""Conflicts between keys of several tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jrl.errors import UserError

if TYPE_CHECKING:
    from jrl.config.tables import Config


def conflicts(config: Config) -> list[str]:
    """A line for each thing in a configuration that does not go with another."""
    lines = [*_table_conflicts(config), *_batch_conflicts(config, batch_parts(config.mesh_axes))]
    if config.placement is not None:
        lines += _own_mesh_conflicts(config, "[placement]")
    elif config.sampling.mesh:
        lines += [*_own_mesh_conflicts(config, "[sampling.mesh]"), *_shared_mesh_conflicts(config)]
    return lines


def batch_parts(axes: Mapping[str, int]) -> int | None:
    """Parts that a mesh splits a batch into, or None when the devices present decide."""
    sizes = (axes["data"], axes["fsdp"], axes["expert"])
    return None if -1 in sizes else math.prod(sizes)


def _table_conflicts(config: Config) -> Iterator[str]:
    model, sampling, train, data = config.model, config.sampling, config.train, config.data
    if model.path is not None and model.config is not None and model.network is None:
        yield (
            f"model.path = {model.path!r} and model.config are both given; remove one"
            " (`model.path=` on the command line removes a key)"
        )
    if model.network is not None:
        features = {"[lora]": config.lora is not None, "sampling.int8": bool(sampling.int8)}
        features["sampling.float8"] = bool(sampling.float8)
        features["objective.router_replay"] = config.replays_routing
        features["eval.dtype"] = config.eval.dtype is not None
        for key in (key for key, is_given in features.items() if is_given):
            yield f"model.network = {model.network!r} and {key} are both given; remove one"
    if config.lora is not None and config.lora.path is not None and model.path is None:
        yield (
            f"lora.path = {config.lora.path!r} needs the checkpoint that its adapters belong to;"
            " set model.path"
        )
    if twice := [part for part in sampling.float8 if part in sampling.int8]:
        yield f"sampling.int8 and sampling.float8 both name {twice[0]!r}; remove it from one"
    yield from data.conflicts(config)
    if train.mode == "in_flight" and not (config.placement and config.placement.staleness):
        yield (
            "train.mode = 'in_flight' needs a rollout during training steps; set"
            " placement.staleness to 1 or more"
        )
    best = (config.checkpoint.best or "").removeprefix("-")
    readers = [f"checkpoint.best = {config.checkpoint.best!r}"] if best.startswith("eval/") else []
    acting = (name for name, limit in config.watch.items() if limit.action != "none")
    readers += [f"watch.{json.dumps(name)}" for name in acting if name.startswith("eval/")]
    if readers and not config.eval.every:
        yield f"{readers[0]} needs evaluations between the steps; set eval.every"
    judges = [f"rewards.{name}.judge" for name, part in config.rewards.items() if part.judge]
    if len(judges) > 1:
        yield f"{' and '.join(judges)} are true; accuracy is measured by one part"
    mine = [f"mesh.{axis}" for axis, size in config.mesh.items() if size == -1]
    theirs = [f"sampling.mesh.{axis}" for axis, size in sampling.mesh.items() if size == -1]
    # Devices of their own are left over by the others.
    for left in [mine + theirs] if config.placement is not None else [mine, theirs]:
        if len(left) > 1:
            yield f"{' and '.join(left)} are -1; only one axis can take the devices that are left"


def _batch_conflicts(config: Config, shards: int | None) -> Iterator[str]:
    train = config.train
    if train.prompts % train.minibatches:
        yield (
            f"train.prompts = {train.prompts} is not a multiple of train.minibatches ="
            f" {train.minibatches}; change one of them"
        )
    elif (minibatch := train.prompts // train.minibatches) % train.microbatches:
        yield (
            f"train.prompts / train.minibatches = {minibatch} is not a multiple of"
            f" train.microbatches = {train.microbatches}; change one of them"
        )
    elif shards is not None and train.microbatch_prompts % shards:
        parts = shards * train.minibatches * train.microbatches
        yield (
            f"a microbatch of {train.microbatch_prompts} prompts cannot be split over mesh.data *"
            f" mesh.fsdp * mesh.expert = {shards} devices; make train.prompts = {train.prompts} a"
            f" multiple of {parts}, or lower train.microbatches = {train.microbatches}"
        )
    draws = config.sampling.draws
    if draws > 1 and train.prompts % (draws * (shards or 1)):
        devices = f" over {shards} devices" if shards and shards > 1 else ""
        yield (
            f"train.prompts = {train.prompts} cannot be sampled in sampling.draws = {draws} equal"
            f" parts{devices}; make it a multiple of {draws * (shards or 1)}"
        )


def _own_mesh_conflicts(config: Config, key: str) -> Iterator[str]:
    """Conflicts with a mesh of the sampler's own, which ``key`` asks for."""
    if config.train.mode == "compiled":
        yield (
            f"{key} and train.mode = 'compiled' are both given: a compiled run is one program"
            f" on one mesh; remove {key} or set train.mode to 'host'"
        )
    shards = batch_parts(config.sampling.mesh_axes)
    if shards is not None:
        yield from rollout_conflicts(config, shards)


def rollout_conflicts(config: Config, shards: int) -> Iterator[str]:
    """The reasons that a step's prompts do not divide over the rollout devices, if any."""
    if config.train.prompts % shards:
        yield (
            f"train.prompts = {config.train.prompts} cannot be split over the {shards} devices of"
            f" sampling.mesh that divide a batch; make it a multiple of {shards}"
        )


def _shared_mesh_conflicts(config: Config) -> Iterator[str]:
    """Conflicts with a sampling mesh over the devices of training."""
    mine, theirs = config.mesh_axes, config.sampling.mesh_axes
    if theirs["context"] != 1:
        yield (
            f"sampling.mesh.context = {theirs['context']}: sampling does not split sequences;"
            " remove it, and let sampling.mesh.data or tensor have its devices"
        )
    n, m = math.prod(mine.values()), math.prod(theirs.values())
    if -1 not in (*mine.values(), *theirs.values()) and n != m:
        yield (
            f"sampling.mesh has {m} devices and mesh {n}; the sampler uses the devices of training:"
            f" make the product of its axes {n}, or set one of them to -1"
        )


def check_batch(config: Config, shards: int) -> None:
    """Checks that a microbatch splits evenly over the mesh, once -1 in ``mesh`` is known.

    Args:
      config: the run's configuration.
      shards: devices over which the batch is split, data times fsdp times expert.

    Raises:
      UserError: it does not split evenly.
    """
    if problems := list(_batch_conflicts(config, shards)):
        raise UserError("\n".join(problems))
