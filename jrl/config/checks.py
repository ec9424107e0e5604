"""Values of several tables that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jrl.config.features import BY_KEY, broken_rows, key_features
from jrl.errors import UserError

if TYPE_CHECKING:
    from jrl.config.tables import Config


def conflicts(config: Config) -> list[str]:
    """A line for each thing in a configuration that does not go with another."""
    lines = [*broken_rows(key_features(config), BY_KEY), *_table_conflicts(config)]
    lines += _batch_conflicts(config, batch_parts(config.mesh_axes))
    shards = batch_parts(config.sampling.mesh_axes)
    if shards is not None and (config.placement is not None or config.sampling.mesh):
        lines += rollout_conflicts(config, shards)
    if config.placement is None and config.sampling.mesh:
        lines += _shared_mesh_conflicts(config)
    return lines


def batch_parts(axes: Mapping[str, int]) -> int | None:
    """Parts that a mesh splits a batch into, or None when the devices present decide."""
    sizes = (axes["data"], axes["fsdp"], axes["expert"])
    return None if -1 in sizes else math.prod(sizes)


def _table_conflicts(config: Config) -> Iterator[str]:
    sampling = config.sampling
    if twice := [part for part in sampling.float8 if part in sampling.int8]:
        yield f"sampling.int8 and sampling.float8 both name {twice[0]!r}; remove it from one"
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
