"""Preconditions of training a run, checked before anything compiles."""

from __future__ import annotations

from jax.sharding import Mesh

from jrl.config.features import check_features
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.setup.frozen import check_named
from jrl.setup.run import Run, run_features, sampler_of
from jrl.train.batches import sources_of
from jrl.train.programs import (
    check_resharding,
    check_state,
    make_train_iteration,
    policy_layout,
    state_layout,
)
from jrl.train.state import check_frozen, frozen_names


def check_trainable(run: Run) -> None:
    """Raises UserError when a run can be sampled from and evaluated, but not trained."""
    config = run.config
    check_features(run_features(run))
    run.kind.check_members(run.method, run.data, _least_members(run.method))
    sources_of(run).check(run)
    _check_parts(run)
    available = {*run.networks, *run.method.schedule.frozen}
    check_frozen(run.method.objective, available, config.method)
    check_named(config, frozen_names(run.method.objective, run.method.schedule))
    if config.sampling.temperature == 0:
        raise UserError(
            "sampling.temperature = 0 draws the same completion for every member of a group; "
            "training needs a temperature above 0"
        )
    _check_pool(run)
    state_layout(run)
    check_state(run)
    check_resharding(run)
    sampler_of(run)
    if run.rollout_mesh is not None:
        _check_disjoint(run, run.rollout_mesh)
    if config.train.mode == "compiled":
        make_train_iteration(run)


def _check_pool(run: Run) -> None:
    """Raises UserError where a curriculum has fewer problems than a step uses."""
    curriculum, prompts = run.method.curriculum, run.config.train.prompts
    if curriculum is None:
        return
    rows = run.kind.problems(run.data, curriculum.pool)
    if rows < prompts:
        raise UserError(
            f"method = {run.config.method!r} chooses its problems, and train.prompts = {prompts}"
            f" are more than the {rows} problems that there are; lower it"
        )


def _check_parts(run: Run) -> None:
    """Raises UserError where a method makes its reward of other parts than there are."""
    names, parts = run.method.parts, list(run.rewards.weights)
    if names and len(names) != len(parts):
        raise UserError(
            f"method = {run.config.method!r} reads {len(names)} reward parts in this order:"
            f" {', '.join(names)}; [rewards] has {len(parts)}: {', '.join(parts)}"
        )


def _least_members(method: Method) -> int:
    """The fewest completions of one prompt from which a method learns."""
    return max(method.least_group, 2 if method.objective.surrogate.over == "group" else 1)


def _check_disjoint(run: Run, mesh: Mesh) -> None:
    """Raises UserError when a run cannot draw on devices of its own."""
    try:
        policy_layout(run, mesh)
    except UserError as error:
        raise UserError(f"sampling.mesh: {error}") from None
