"""Edits that replay: completions of earlier steps take the places of members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jrl.methods.edit import Edit, EditView, fill
from jrl.methods.stores import member_store
from jrl.types import Array

Rule = Callable[[Array, Array], Array]
"""(success [m, M] points, members [m, M] bool) -> [m, M] bool, which members."""


def replay(keep: Rule, replace: Rule, each: int, prompts: int) -> Edit:
    """Keeps completions by prompt; in later steps they take the places of members.

    A completion takes a member's place with all that was recorded of it: tokens, log-probabilities
    of the policy that drew it, versions and rewards. It does so where the group opens with the same
    tokens. What is stored of a step is what was sampled, and takes nobody's place in that step.

    Args:
      keep: completions to store.
      replace: members whose places stored completions take, as far as there are any.
      each: completions held of one prompt, the newest.
      prompts: prompts of which any are held; the one that was added to longest ago goes first.
    """

    def apply(store: Any, groups: Any, view: EditView) -> tuple[Any, Any]:
        # NaN where it is not known, which is neither a success nor a failure.
        success = jnp.where(groups.judged(), groups.success(), jnp.nan)
        members = groups.members()
        count = min(each, members.shape[1])
        rows, exists = store.of_prompt(groups, count, view.group_keys)
        filled = fill(groups, replace(success, members), rows, exists)
        return filled, store.put(groups, keep(success, members))

    return Edit(member_store(each * prompts, each, prompts), apply)


def is_by_prompt(edit: Edit) -> bool:
    """Whether an edit stores completions for groups of the same prompt, as ``replay`` does."""
    return isinstance(edit.init, member_store) and edit.init.each > 0


def replay_successes(above: float, each: int, prompts: int) -> Edit:
    """Keeps successes; one of them takes the first member's place in a group without any.

    Args:
      above: points; a completion with more is a success. A NaN is none, and leaves its group alone.
      each: as for ``replay``.
      prompts: as for ``replay``.
    """

    def replace(success: Array, members: Array) -> Array:
        failed = (~members | (success <= above)).all(axis=1, keepdims=True)
        return failed & (jnp.arange(success.shape[1]) == 0)[None]

    return replay(lambda success, members: members & (success > above), replace, each, prompts)


def replay_share(above: float, share: float, each: int, prompts: int) -> Edit:
    """Keeps successes; in every group they take the places of the first members, as far as kept.

    Args:
      above: points; a completion with more is a success.
      share: of a group's members, rounded down.
      each: as for ``replay``.
      prompts: as for ``replay``.
    """
    keep = lambda success, members: members & (success > above)  # noqa: E731
    return replay(keep, _first_share(share), each, prompts)


def replay_rare(above: float, most: float, each: int, prompts: int) -> Edit:
    """Keeps successes of groups that mostly failed; they take the places of the first members.

    Args:
      above: points; a completion with more is a success.
      most: share of a group's members that are successes, above which none of them is kept.
      each: as for ``replay``.
      prompts: as for ``replay``.
    """

    def keep(success: Array, members: Array) -> Array:
        right = members & (success > above)
        few = right.sum(axis=1) <= most * members.sum(axis=1)
        return right & few[:, None]

    return replay(keep, _first_share(1.0), each, prompts)


def _first_share(share: float) -> Rule:
    """The first members of each group, this share of them rounded down."""

    def replace(success: Array, members: Array) -> Array:
        first = jnp.arange(success.shape[1]) < int(share * success.shape[1])
        return jnp.broadcast_to(first[None], success.shape)

    return replace
