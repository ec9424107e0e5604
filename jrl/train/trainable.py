"""Preconditions of training a run, checked before anything compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jrl.collect.host_source import check_host
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.setup.features import check_division, check_features
from jrl.setup.frozen import check_named
from jrl.setup.kinds import (
    DialogueKind,
    EnvKind,
    EpisodeKind,
    PairKind,
    RecordedKind,
    SourceKind,
    TaskKind,
    TaskPairKind,
    TextKind,
)
from jrl.setup.run import Run, run_features, sampler_of
from jrl.train.programs import check_resharding, make_train_iteration, policy_layout, state_layout
from jrl.train.state import check_frozen, frozen_names


def check_trainable(run: Run) -> None:
    """Raises UserError when a run can be sampled from and evaluated, but not trained."""
    config = run.config
    check_features(run_features(run))
    CHECKS[type(run.kind)](run)
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


def _check_group(run: Run) -> None:
    """Raises UserError when a method that compares members is given groups too small for it."""
    name, method, group = run.config.method, run.method, run.config.sampling.group
    draw = method.draw
    members = (group if draw.samples else 0) + draw.demonstrations
    if members < (needed := _least_members(method)):
        raise UserError(
            f"sampling.group = {group}: method {name!r} compares the samples of one prompt "
            f"and needs at least {needed} of them; raise sampling.group or choose a method without "
            "a group baseline, such as reinforce_plus_plus or ppo"
        )


def _check_sampled(run: Run) -> None:
    """Raises UserError where a run on a task or on text has too few members, or players."""
    _check_group(run)
    check_division(1, run.network)


def _check_env(run: Run) -> None:
    """Raises UserError where episodes on the device do not go with the method."""
    _check_group(run)
    env: Any = run.kind.task
    check_division(env.players, run.network)


def _check_episodes(run: Run) -> None:
    """Raises UserError where episodes on the host do not go with the method."""
    _check_group(run)
    check_host(run)


def _check_own(run: Run) -> None:
    """Raises UserError where a method needs what a source of one's own does not give."""
    _check_sampled(run)
    draw = run.method.draw
    for clause, missing in {
        f"method = {run.config.method!r} learns from demonstrations": draw.demonstrations,
        "objective.tree searches prompts in text": draw.search is not None,
        "[placement] keeps prompts of files": run.rollout_mesh is not None,
    }.items():
        if missing:
            raise UserError(
                f"{run.config.data.kind}: {clause}, which a source of your own has not; remove one"
            )


def _check_pairs(run: Run) -> None:
    """Raises UserError where a method cannot learn from judged completions."""
    needed = _least_members(run.method)
    largest = max(len(j.completions) for j in run.data.judged["pairs"])
    if largest < needed:
        raise UserError(
            f"method = {run.config.method!r} compares {needed} completions of one prompt, and "
            "data.pairs has one in each record; choose a method of labelled completions such as kto"
        )
    check_division(1, run.network)


CHECKS: Mapping[type[TextKind], Callable[[Run], None]] = {
    TextKind: _check_sampled,
    TaskKind: _check_sampled,
    EnvKind: _check_env,
    EpisodeKind: _check_episodes,
    RecordedKind: _check_sampled,
    DialogueKind: _check_sampled,
    SourceKind: _check_own,
    PairKind: _check_pairs,
    TaskPairKind: _check_pairs,
}
"""Kind of data -> what must hold to train on it."""


def _check_disjoint(run: Run, mesh: Mesh) -> None:
    """Raises UserError when a run cannot draw on devices of its own."""
    try:
        policy_layout(run, mesh)
    except UserError as error:
        raise UserError(f"sampling.mesh: {error}") from None
