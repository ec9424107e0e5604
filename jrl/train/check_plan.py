"""What a run cannot do of its method's curriculum, plan and edits."""

from __future__ import annotations

from typing import Any

import jax

from jrl.errors import UserError
from jrl.methods.curriculum import Curriculum
from jrl.methods.edit import Stateless
from jrl.methods.stores import is_by_prompt
from jrl.train.build import Run
from jrl.train.kinds import EpisodeKind


def check_plan(run: Run) -> None:
    """Raises UserError for a curriculum, a plan or edits that a run cannot have."""
    stores = [edit for edit in run.method.edits if not isinstance(edit.init, Stateless)]
    if stores:
        _check_stores(run)
    if isinstance(run.method.curriculum, Curriculum):
        _check_curriculum(run)
    plan, group = run.method.plan, run.config.sampling.group
    whole = isinstance(run.kind, EpisodeKind) or run.method.draw.search is not None
    if plan.next is not None and plan.members(group) and whole:
        raise UserError(
            f"method = {run.config.method!r} samples further members of a group, and episodes on"
            " the host and searches are played for whole groups; use data.train without an"
            " environment, or a task"
        )
    if run.method.plan.next is not None and run.config.replays_routing:
        raise UserError(
            f"method = {run.config.method!r} samples further members, whose experts are not on"
            " record; set objective.router_replay to false"
        )


def _check_stores(run: Run) -> None:
    """Raises UserError where a run cannot train on stored completions."""
    config, said = run.config, f"method = {run.config.method!r} stores completions, "
    by_prompt = any(is_by_prompt(edit) for edit in run.method.edits)
    if (
        by_prompt
        and run.kind.task is not None
        and not isinstance(run.method.curriculum, Curriculum)
    ):
        raise UserError(
            f"{said}and no problem of a procedural task or an environment on the device comes "
            "again; give data.train, with data.env = FILE.py:function for episodes"
        )
    if config.data.given:
        raise UserError(
            f"{said}and the completions of {config.data.given} are there already; choose another"
            " method"
        )
    for key, asked in {
        "[placement]": run.rollout_mesh is not None,
        "objective.router_replay": config.replays_routing,
        "objective.tree": run.method.draw.tree is not None,
    }.items():
        if asked:
            raise UserError(f"{said}which does not go together with {key}; remove it")
    if jax.process_count() > 1:
        raise UserError(f"{said}which takes one process; use one host")


def _check_curriculum(run: Run) -> None:
    """Raises UserError where a run cannot choose its problems."""
    config, said = run.config, f"method = {run.config.method!r} chooses its problems, "
    for key, asked in {
        "[placement]": run.rollout_mesh is not None,
        config.data.given or "": bool(config.data.given),
    }.items():
        if asked:
            raise UserError(f"{said}which does not go together with {key}; remove it")
    curriculum: Any = run.method.curriculum
    prompts, pool = run.data.prompts, curriculum.pool
    rows = len(prompts["train"]) if run.kind.task is None else pool
    if rows < config.train.prompts:
        raise UserError(
            f"{said}and train.prompts = {config.train.prompts} are more than the {rows} problems"
            " that there are; lower it"
        )
