"""Edits of a step's groups before training: members left out, replaced or added.

    groups, state = edit.apply(state, groups, view)

An edit is an ``(init, apply)`` pair. It reads rewards, before completions are packed; with a store
(``methods.stores``) it is a replay. What reads advantages is a ``Transform`` of the objective,
which may edit masks, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.errors import UserError
from jrl.methods.plan import Plan, StepView, new
from jrl.objectives.advantages import mean_centred
from jrl.types import Array
from jrl.types.asks import Asks
from jrl.user_code import check_function


class EditView(NamedTuple):
    """Context of an edit, besides the groups.

    Attributes:
      step: [] int32, training steps done.
      key: of the step and the edit; consumed.
      group_keys: [m] keys, each of the step and the group's ticket; consumed.
      extra: [m] bool, empty groups that were appended for this edit to fill.
    """

    step: Any
    key: Array
    group_keys: Array
    extra: Array


STORED = -2
"""The ticket of a group that came from a store."""


@dataclasses.dataclass(frozen=True)
class Stateless:
    """The ``init`` of an edit that keeps nothing between steps."""

    def __call__(self, shapes: Any, prompts: int) -> tuple[()]:
        """()."""
        return ()


class Edit(NamedTuple):
    """An edit of the groups of a step.

    Attributes:
      init: (shapes of a step's groups, or None on the host, where stores have no bounds; N) ->
        state.
      apply: (state, groups, view) -> (groups, state).
      extra: (prompts of a step) -> groups appended for it to fill, a static number.
    """

    init: Callable[..., Any]
    apply: Callable[[Any, Any, EditView], tuple[Any, Any]]
    extra: Callable[[int], int] = lambda prompts: 0


def edit_of(apply: Callable[[Any, EditView], Any]) -> Edit:
    """An edit that keeps nothing: (groups, view) -> groups."""
    check_function(apply, ("groups", "view"), "edit_of")
    return Edit(Stateless(), lambda state, groups, view: (apply(groups, view), state))


def of_parts(apply: Callable[[Array, Any], Array]) -> Callable[[Any, StepView], Any]:
    """A ``Method.rewards`` that rewrites the reward parts of each member.

    Args:
      apply: (parts [m, M, R] float32 points, rollout) -> parts.
    """
    check_function(apply, ("parts", "rollout"), "of_parts")

    def rewards(groups: Any, view: StepView) -> Any:
        parts = apply(jnp.asarray(groups.rewards), groups.rollout)
        if parts.shape != groups.rewards.shape:
            raise UserError(
                f"of_parts: the function returned {parts.shape} for reward parts of shape"
                f" {groups.rewards.shape}; return an array of that shape"
            )
        return groups.replace(rewards=parts.astype(jnp.float32))

    return rewards


def only(groups: Any, keep: Array) -> Any:
    """The groups without the members that are not in ``keep`` ([m, M] or [m, 1] bool)."""
    m, size = groups.selected.shape
    if keep.dtype != bool:  # & would read the last bit of a number
        raise UserError(f"only: keep is {keep.dtype}; give bool, such as keep > 0")
    if keep.shape not in ((m, size), (m, 1)):  # [m] alone would be read as members, not groups
        raise UserError(
            f"only: keep has shape {keep.shape}; of {m} groups of {size} members it is"
            f" {(m, size)}, or {(m, 1)} for whole groups, as keep[:, None]"
        )
    return groups.replace(selected=groups.selected & keep)


def rank(values: Array, live: Array) -> Array:
    """[m, M] int32: the place of each live member among those of its group, 0 the greatest.

    Of equal values the first comes first; members that are not live come last.

    >>> rank(jnp.array([[1.0, 3.0, 3.0]]), jnp.ones((1, 3), bool)).tolist()
    [[2, 0, 1]]
    """
    order = jnp.argsort(jnp.where(live, -values, jnp.inf), axis=1, stable=True)
    return jnp.argsort(order, axis=1).astype(jnp.int32)


def fill(groups: Any, where: Array, rows: Any, available: Array) -> Any:
    """The groups with stored members in the places ``where``, as far as any were found.

    Args:
      groups: m of them.
      where: [m, M] bool. The k-th place of a group gets the k-th row found for it.
      rows: members [m, K, ...] by name, as a store gives them.
      available: [m, K] bool, True for the first ones.

    Returns:
      The groups; the label "replayed" [m, M] is 1 for the members that came from a store.
    """
    if not rows:  # of a store on the host that has never held any
        return with_members(groups, {}, jnp.zeros(groups.use.shape, bool))
    number, filled = jax.vmap(_places)(jnp.asarray(where), jnp.asarray(available))
    rows, put = _renumbered(groups, rows), jax.vmap(_put)
    merged = {n: put(x, rows[n], number, filled) for n, x in members_of(groups).items()}
    return with_members(groups, merged, filled)


def _places(where: Array, available: Array) -> tuple[Array, Array]:
    """(the stored row [n] of each place, whether it gets one [n]); places in their order."""
    most, place = available.shape[0], jnp.cumsum(where) - 1
    number = jnp.clip(place, 0, most - 1)
    return number, where & (place < most) & available[number]


def _put(old: Array, new: Array, number: Array, filled: Array) -> Array:
    """Rows [n, ...], those that are filled from row ``number`` of ``new`` [K, ...]."""
    flags = filled.reshape(-1, *(1,) * (old.ndim - 1))
    return jnp.where(flags, new[number].astype(old.dtype), old)


def _renumbered(groups: Any, rows: Any) -> Any:
    """Rows [m, K, ...] whose tree nodes have numbers that no other member of their group has."""
    if "node" not in groups.ids:
        return rows
    node = jnp.asarray(rows["ids.node"])
    most = node.max(axis=2)
    top = jnp.asarray(groups.ids["node"]).max(axis=(1, 2))[:, None]
    offset = top + jnp.cumsum(most, axis=1) - most
    return {**rows, "ids.node": jnp.where(node > 0, node + offset[:, :, None], 0)}


def standalone(groups: Any) -> Any:
    """The groups with each member as if it had been sampled by itself.

    In a tree a token is recorded in the one member that drew it; what others share with it is taken
    from there.
    """
    if "node" not in groups.ids:
        return groups
    rollout, node = groups.rollout, jnp.asarray(groups.ids["node"])
    mask, position = jnp.asarray(rollout.mask), jnp.arange(node.shape[2])[None, None]
    # [m, G, H, T]: whether member h drew the token that member g goes through.
    same = (node[:, :, None] == node[:, None]) & (node[:, :, None] > 0) & mask[:, None]
    lent = same.any(axis=2) & ~mask & (position < jnp.asarray(rollout.lengths)[:, :, None])
    lender = jnp.argmax(same, axis=2)

    def borrowed(x: Any) -> Array:
        theirs = jnp.take_along_axis(jnp.asarray(x), lender, axis=1)
        return jnp.where(lent, theirs, x)

    return groups.replace(
        rollout=rollout.replace(
            mask=mask | lent,
            sampler_logprobs=borrowed(rollout.sampler_logprobs),
            versions=borrowed(rollout.versions),
        )
    )


def fill_groups(groups: Any, where: Array, rows: Any, available: Array) -> Any:
    """The groups with whole stored groups in the places ``where`` ([m] bool).

    Args:
      groups: m of them.
      where: [m] bool. The k-th place gets the k-th group found.
      rows: groups [K, ...] by name, as a store of groups gives them.
      available: [K] bool, True for the first ones.
    """
    if not rows:
        return with_members(groups, {}, jnp.zeros(groups.use.shape, bool))
    number, filled = _places(where, jnp.asarray(available))
    merged = {n: _put(x, rows[n], number, filled) for n, x in groups_of(groups).items()}
    members = filled[:, None] & merged["selected"]
    groups = with_members(groups, merged, members)
    return groups.replace(ticket=jnp.where(filled, STORED, groups.ticket))


# ---------------------------------------------------------------- groups that differ


def differing(groups: Any, min_std: float) -> Array:
    """[m] bool: groups whose members' scores have a standard deviation above ``min_std`` points.

    A group with fewer than two members has none. One with a NaN counts, so that it comes to light.
    """
    members = groups.members()
    # Not the plain mean, whose rounding would pass for a difference: 16 rewards of 13.7 points.
    centred = jax.vmap(mean_centred)(jnp.asarray(groups.score(), jnp.float32), members)
    variance = jnp.square(centred).sum(axis=1) / jnp.maximum(members.sum(axis=1), 1)
    return ~(jnp.sqrt(variance) <= min_std) & groups.live()


def refill(min_std: float = 1e-6, max_rounds: int = 10) -> dict[str, Any]:
    """The plan and the edits of dynamic sampling: ``base.with_(**refill())``.

    Drops groups whose rewards do not differ, and draws N others until the batch is full, as
    ``dapo`` does, which keeps groups with some but not all answers right.

    Args:
      min_std: points; see ``differing``.
      max_rounds: how many times to draw at most, the first included; what is still missing then is
        masked out.
    """

    def further(groups: Any, view: StepView) -> Asks:
        short = differing(groups, min_std).sum() < view.prompts
        return (new(jnp.where(short, view.prompts, 0), view.prompts, view.group),)

    def drop(groups: Any, view: EditView) -> Any:
        return only(groups, differing(groups, min_std)[:, None])

    rounds = max_rounds - 1
    plan = Plan(next=further, rounds=rounds, prompts=lambda prompts: rounds * prompts)
    return {"plan": plan if rounds else Plan(), "edits": (edit_of(drop),)}


# ---------------------------------------------------------------- what is recorded, by name

_TOKENS = ("tokens", "mask", "sampler_logprobs", "versions")
_NUMBERS = ("lengths", "stop", "baseline")
_OF_PLACE = ("episode", "replayed")
"""Labels that tell the members of a group apart: a member that takes a place takes them over."""


def members_of(groups: Any) -> dict[str, Array]:
    """All that was recorded of members, [m, M, ...] by name."""
    rollout = {f"rollout.{n}": getattr(groups.rollout, n) for n in _TOKENS + _NUMBERS}
    ids = {f"ids.{n}": x for n, x in groups.ids.items() if x.ndim > 1 and n not in _OF_PLACE}
    stats = {f"stats.{n}": x for n, x in groups.stats.items()}
    scores = {"rewards": groups.rewards, "use": groups.use, "selected": groups.selected}
    return {**rollout, **ids, **stats, **scores}


def groups_of(groups: Any) -> dict[str, Array]:
    """All that was recorded of whole groups, [m, ...] by name."""
    prompts = {f"rollout.prompt_{n}": getattr(groups.rollout, f"prompt_{n}") for n in _PROMPTS}
    ids = {f"ids.{n}": x for n, x in groups.ids.items() if x.ndim == 1}
    prior = {f"prior.{n}": x for n, x in groups.prior.items()}
    return {**members_of(groups), **prompts, **ids, **prior, "row": groups.row}


_PROMPTS = ("tokens", "lengths")


def with_members(groups: Any, recorded: dict[str, Array], replayed: Array) -> Any:
    """The groups with these records of members; ``replayed`` [m, M] marks those from a store."""
    parts: dict[str, dict[str, Array]] = {"rollout": {}, "ids": {}, "stats": {}, "prior": {}}
    whole: dict[str, Array] = {}
    for name, x in recorded.items():
        kind, dot, field = name.partition(".")
        (parts[kind] if dot else whole)[field if dot else kind] = x
    label = groups.ids.get("replayed", jnp.zeros(replayed.shape, jnp.int32))
    ids = groups.ids | parts["ids"] | {"replayed": jnp.where(replayed, 1, label)}
    return groups.replace(
        rollout=groups.rollout.replace(**parts["rollout"]),
        ids=ids,
        stats=groups.stats | parts["stats"],
        prior={**groups.prior, **parts["prior"]},
        **whole,
    )
