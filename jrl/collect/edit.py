"""The edits of a step's groups, and what the step tells a curriculum.

    trained, collected, share = edited(groups, collected, now, setting)
    collected = learned(curriculum, collected, outcome_of(groups, trained, ...))

They run on the host between two programs, and inside a compiled run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.collect.groups import PlacedGroups, take, widened
from jrl.collect.plan import CollectState, Setting, StepKey
from jrl.errors import UserError
from jrl.methods.curriculum import Curriculum, Outcome, Table
from jrl.methods.edit import EditView, Stateless
from jrl.types import stream


def edited(
    groups: PlacedGroups, collected: CollectState, now: StepKey, setting: Setting
) -> tuple[PlacedGroups, CollectState, Any]:
    """The groups that are trained on: N and those that edits added, live ones first.

    Returns:
      (groups, what is carried, [] float32: the share of the sampled groups that the edits leave any
      members of).
    """
    method, (m, size) = setting.method, groups.use.shape
    extra = [edit.extra(setting.prompts) for edit in method.edits]
    groups = widened(groups, m + sum(extra), size)
    states, begin = [], m
    for i, (edit, count) in enumerate(zip(method.edits, extra, strict=True)):
        keys = stream(now.key, "replay", now.step)
        view = EditView(
            step=now.step,
            key=jax.random.fold_in(stream(now.key, "edit", now.step), i),
            group_keys=jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.asarray(groups.ticket)),
            extra=(jnp.arange(m + sum(extra)) >= begin)
            & (jnp.arange(m + sum(extra)) < begin + count),
        )
        result = edit.apply(collected.edits[i], groups, view)
        if not isinstance(result, tuple) or not isinstance(result[0], PlacedGroups):
            raise UserError(
                f"edit {i} returned {result!r:.60}; return (groups, state), or with"
                " jrl.methods.edit_of the groups"
            )
        groups, state = result
        states.append(state)
        begin += count
    collected = collected.replace(edits=tuple(states))
    sampled = groups.live()[:m]
    left = groups.members().any(axis=1)[:m] & sampled
    share = left.sum() / jnp.maximum(sampled.sum(), 1)
    return _trimmed(groups, setting.prompts, m, sum(extra)), collected, share


def edit_counts(
    groups: PlacedGroups, trained: PlacedGroups, share: Any, setting: Setting
) -> dict[str, Any]:
    """Metrics of a step's rounds and edits, [] float32 by name.

    Args:
      groups: all of them, before the edits.
      trained: those that are trained on.
      share: of the sampled groups, those that the edits left any members of.
      setting: of the run.

    Returns:
      reward (points, over all members sampled to be trained on, kept or not); with further rounds,
      or edits that leave members out, groups_kept (``share``) and groups_missing (groups that a
      batch lacks); with a store replayed (members that come from it).
    """
    sampled, members = groups.drawn(), trained.members()
    mean = jnp.where(sampled, groups.score(), 0.0).sum() / jnp.maximum(sampled.sum(), 1)
    counts: dict[str, Any] = {"reward": mean}
    drops = any(isinstance(edit.init, Stateless) for edit in setting.method.edits)
    if setting.method.plan.next is not None or drops:
        missing = setting.prompts - members.any(axis=1).sum()
        counts |= {"groups_kept": share, "groups_missing": jnp.maximum(missing, 0)}
    if "replayed" in trained.ids:
        counts["replayed"] = (trained.ids["replayed"] * members).sum()
    return {name: jnp.asarray(x, jnp.float32) for name, x in counts.items()}


def _trimmed(groups: PlacedGroups, prompts: int, places: int, extra: int) -> PlacedGroups:
    """As many groups as a batch has; those with members first, in their order."""
    size = min(places, prompts) + extra if places > prompts else places + extra
    live = (groups.members()).any(axis=1)
    # Dropped groups only pad a batch that is too small, because its shape is part of the program.
    order = jnp.argsort(~live, stable=True)[:size]
    return take(groups, order)


def outcome_of(
    groups: PlacedGroups, trained: PlacedGroups, advantages: Any, step: Any, table: Table
) -> Outcome:
    """Outcome of a step's problems, for the curriculum.

    Args:
      groups: all of them, before the edits.
      trained: those that were trained on.
      advantages: [n, M] float32, mean |advantage| of the members of ``trained``; None for zeros.
      step: [] int32, training steps done before it.
      table: the problems.
    """
    sampled, live = groups.drawn(), groups.live()
    judged = (sampled & groups.judged()).sum(axis=1)
    stratum = jnp.asarray(table.stratum)[jnp.clip(groups.row, 0, table.rows - 1)]
    # Groups that an edit added have tickets of other steps, or none.
    at = jnp.argmax(trained.ticket[None] == groups.ticket[:, None], axis=1)
    same = (trained.ticket[at] == groups.ticket) & live & trained.members().any(axis=1)[at]
    size = jnp.zeros(sampled.shape, jnp.float32) if advantages is None else advantages[at]
    return Outcome(
        step=step,
        row=groups.row,
        stratum=stratum,
        live=live & (judged > 0),
        trained=same,
        rate=groups.rate().astype(jnp.float32),
        size=judged.astype(jnp.float32),
        score=jnp.where(sampled, groups.score(), 0.0),
        advantage=jnp.where(same[:, None] & sampled, size, 0.0),
        prior=groups.prior,
    )


def learned(curriculum: Curriculum, collected: CollectState, outcome: Outcome) -> CollectState:
    """The collector's state after a step, with the curriculum updated."""
    return collected.replace(curriculum=curriculum.update(collected.curriculum, outcome))


def mean_sizes(advantages: Any, mask: Any) -> Any:
    """[N, M] float32: the mean |advantage| of each member's trained tokens; 0 without any."""
    total = jnp.where(mask, jnp.abs(advantages), 0.0).sum(axis=2)
    return total / jnp.maximum(mask.sum(axis=2), 1)
