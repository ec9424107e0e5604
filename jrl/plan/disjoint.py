"""Plans of runs whose rollout and training use disjoint devices (``[placement]``).

Each has half of the slice. They run in parallel, so a step takes as long as the slower of the two,
then the new weights are sent to the rollout devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jrl.config import Config
from jrl.errors import UserError
from jrl.plan.records import Plan
from jrl.plan.topology import SHAPES, Topology, parse_topology, spelled


def half(topology: Topology) -> Topology | None:
    """The slice with half the chips, or None."""
    if topology.slices > 1:
        return None
    for shape in SHAPES[topology.family]:
        other = parse_topology(spelled(topology.family, shape))
        if 2 * other.chips == topology.chips:
            return other
    return None


def plan_disjoint(
    config: Config, topology: Topology, planner: Callable[..., Plan], **options: Any
) -> Plan:
    """The plan of a run with ``[placement]``.

    Args:
      config: the run's.
      topology: with all chips of both.
      planner: ``make_plan`` or ``quick_plan``.
      options: of the planner.

    Raises:
      UserError: a mesh does not use half of the chips, or something does not divide.
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
    single = config.model_copy(update={"placement": None, "sampling": sampling_table})
    undivided = config.train.model_copy(update={"minibatches": 1, "microbatches": 1})
    sampling = single.model_copy(update={"mesh": sampling_mesh, "train": undivided})
    sampler = planner(sampling, part, placement="sampler", **options)
    training = planner(single, part, placement="train_step", **options)
    return merge(sampler, training, topology)


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
