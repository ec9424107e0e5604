"""The plan of a run: its programs compiled or counted, and whether they fit.

Rollout and training of a run with ``[placement]`` use disjoint devices, half of the slice each.
They run in parallel, so a step takes as long as the slower of the two; then the new weights are
sent to the rollout devices.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jrl.config import Config
from jrl.errors import UserError, unknown_choice
from jrl.plan.compile import (
    PROGRAMS,
    abstract_run_on,
    compiled_programs,
    few_layer_programs,
    judged,
)
from jrl.plan.count import counted_programs
from jrl.plan.records import Plan
from jrl.plan.topology import SHAPES, Topology, parse_topology, spelled

MEANS = {
    "compiling": compiled_programs,
    "few layers": few_layer_programs,
    "counting": counted_programs,
}
"""Means by which the numbers of a run's programs are determined; the last takes seconds."""


def make_plan(
    config: Config,
    topology: Topology,
    by: str = "compiling",
    *,
    placement: str = "colocated",
    effort: float = 0.0,
    echo: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Memory and time of a run's programs on a topology, and whether they fit.

    Args:
      config: the run's; ``mesh`` must use every chip, or with ``[placement]`` half of them.
      topology: the slices.
      by: of ``MEANS``.
      placement: "colocated", where the training state stays in memory while sampling, or "sampler"
        or "train_step" for only that program, on chips of its own.
      effort: of XLA; see ``compile.compiled_programs``.
      echo: receives lines of progress.

    Raises:
      UserError: there is no such means, something does not divide over the mesh, the slice has
        no half, or libtpu cannot compile for it.
    """
    if by not in MEANS:
        raise unknown_choice("make_plan.by", by, MEANS)
    if config.placement is None:
        return plan_together(config, topology, by, placement=placement, effort=effort, echo=echo)
    part, sampling, training = divided(config, topology)
    return merge(
        plan_together(sampling, part, by, placement="sampler", effort=effort, echo=echo),
        plan_together(training, part, by, placement="train_step", effort=effort, echo=echo),
        topology,
    )


def plan_together(
    config: Config,
    topology: Topology,
    by: str,
    *,
    placement: str,
    effort: float,
    echo: Callable[[str], None],
) -> Plan:
    """``make_plan`` of programs on the same devices."""
    run = abstract_run_on(config, topology)
    # A sampler by itself is given weights that lie as it wants them.
    alone = {"train_step": ("train_step",), "sampler": ("resharding", "sampler")}
    names = alone.get(placement, PROGRAMS)
    return judged(run, topology, MEANS[by](run, topology, names, placement, effort, echo))


# ---------------------------------------------------------------- disjoint devices


def half(topology: Topology) -> Topology | None:
    """The slice with half the chips, or None."""
    if topology.slices > 1:
        return None
    for shape in SHAPES[topology.family]:
        other = parse_topology(spelled(topology.family, shape))
        if 2 * other.chips == topology.chips:
            return other
    return None


def divided(config: Config, topology: Topology) -> tuple[Topology, Config, Config]:
    """Half of a slice, and the configurations of rollout and of training on it.

    Raises:
      UserError: a mesh does not use half of the chips, or no slice has so many.
    """
    part = half(topology)
    if part is None:
        raise UserError(
            f"topology = {topology.name!r}: no slice has half its chips, and a plan gives rollout "
            "and training half each; choose another, or remove [placement]"
        )
    for key, axes in (("mesh", config.mesh_axes), ("sampling.mesh", config.sampling.mesh_axes)):
        size = int(np.prod(list(axes.values())))
        if -1 not in axes.values() and size != part.chips:
            raise UserError(
                f"{key} uses {size} chips; a plan gives rollout and training half of "
                f"{topology.name} each: make the product of its axes {part.chips}, or set one axis "
                "to -1"
            )
    sampling_mesh = config.sampling.mesh
    sampling_table = config.sampling.model_copy(update={"mesh": {}})
    # Weights change in flight between the halves alone; the programs of each are those of "host".
    mode = "host" if config.train.mode == "in_flight" else config.train.mode
    train = config.train.model_copy(update={"mode": mode})
    single = config.model_copy(
        update={"placement": None, "sampling": sampling_table, "train": train}
    )
    undivided = train.model_copy(update={"minibatches": 1, "microbatches": 1})
    sampling = single.model_copy(update={"mesh": sampling_mesh, "train": undivided})
    return part, sampling, single


def merge(sampler: Plan, training: Plan, topology: Topology) -> Plan:
    """The plan of a sampler and a training step that run in parallel."""
    weights = sampler.programs["sampler"].bytes_per_chip["weights"]
    return training._replace(
        topology=topology,
        rollout_mesh=sampler.mesh,
        programs={**sampler.programs, **training.programs},
        fits=sampler.fits and training.fits,
        remedies=[*sampler.remedies, *training.remedies],
        move_seconds=weights / topology.chip.link_bandwidth,
    )
