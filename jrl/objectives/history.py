"""Advantages that also compare a completion with all that its prompt ever scored."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.objectives import advantages as group
from jrl.objectives import segments
from jrl.objectives.prompt_table import PromptTable, empty, prompt_ids, read, write
from jrl.types import Array, Batch, Transform

BLANK = {"visits": 0.0, "count": 0.0, "mean": 0.0, "squares": 0.0}
"""What a table holds for a prompt never seen: visits; scores so far, their mean (points) and the
sum of their squared deviations from it (squared points)."""


def smoothed_standard(slots: int, eps: float = 1e-6) -> Transform:
    """The group's standard score blended with the standard score among all visits of the prompt.

    The smooth advantage standardisation of "DCPO: Dynamic Clipping Policy Optimization"
    (arXiv:2509.02333). At the i-th visit of a prompt, with S the score standardised over the group
    and H the score standardised over all scores that the prompt has had, these ones included:

        A = whichever of ((i-1) S + H) / i  and  (S + (i-1) H) / i  is nearer to 0

    A group of equal scores gets 0 on its first visit and, later, what its prompt's history says.

    Args:
      slots: prompts that are remembered; see ``objectives.prompt_table``.
      eps: points, added to each deviation. Deviations divide by one less than the number.

    Returns:
      A transform [N, G] -> [N, G]. Without ``ids["prompt"]`` every visit is the first.
    """

    def standard(scores: Array, members: Array) -> Array:
        return group.group_mean_std(scores, members, eps=eps)

    def apply(values: Array, batch: Batch, table: PromptTable) -> tuple:
        now = jax.vmap(standard)(values, batch.members)
        ids = prompt_ids(batch)
        if ids is None:
            return now, batch, table
        known = _with_these(values, batch.members, ids, read(table, ids, BLANK)[0])
        spread = jnp.sqrt(known["squares"] / jnp.maximum(known["count"] - 1, 1))
        ever = (values - known["mean"][:, None]) / (spread[:, None] + eps)
        ever = jnp.where(batch.members, ever, 0)
        visit = jnp.maximum(known["visits"], 1)[:, None]
        mostly_now = ((visit - 1) * now + ever) / visit
        mostly_ever = (now + (visit - 1) * ever) / visit
        nearer = jnp.abs(mostly_now) <= jnp.abs(mostly_ever)
        seen = batch.members.any(axis=1)
        return jnp.where(nearer, mostly_now, mostly_ever), batch, write(table, ids, known, seen)

    return Transform(init=lambda: empty(slots, BLANK), apply=apply)


def _with_these(values: Array, members: Array, ids: Array, before: dict) -> dict:
    """What is known of each prompt once the batch's scores are counted; [N] each.

    Rows of one prompt are counted together and get the same numbers.
    """
    seg = segments.segments(members, jnp.broadcast_to(ids[:, None], members.shape))
    mean = segments.mean(values, seg)
    squares = segments.total(jnp.square(jnp.where(members, values - mean, 0)), seg)
    # All live members of a row hold the same numbers; a row without one is not written.
    count, mean, squares = (
        jnp.max(x, axis=1, where=members, initial=-jnp.inf)
        for x in (segments.count(seg), mean, squares)
    )
    seen = members.any(axis=1)
    count, mean, squares = (jnp.where(seen, x, 0) for x in (count, mean, squares))
    total = before["count"] + count
    # The parallel form of Welford's update: exact when the two means are equal.
    step = mean - before["mean"]
    share = count / jnp.maximum(total, 1)
    return {
        "visits": before["visits"] + seen,
        "count": total,
        "mean": before["mean"] + step * share,
        "squares": before["squares"] + squares + jnp.square(step) * before["count"] * share,
    }
