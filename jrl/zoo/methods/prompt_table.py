"""State kept for each prompt from step to step, in a table of fixed size.

    table = empty(slots, blank)                       # in a transform's init
    before = read(table, ids, blank)                  # what is stored, or blank
    table = write(table, ids, after, live)            # once a step

A prompt's place is its id modulo the number of slots, and the place is tagged with the id: a prompt
that finds another's tag starts from ``blank``, and takes the place over when it is written. With as
many slots as the data has prompts (ids from 0) nothing is ever lost. Nothing here depends on the
order of the rows, and everything works under ``jit`` and sharding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.types import Array

NOBODY = jnp.iinfo(jnp.int32).min
"""The tag of a place that no prompt has taken; not an id."""


class PromptTable(NamedTuple):
    """Running values of recently seen prompts.

    Attributes:
      ids: [slots] int32, whose place it is; ``NOBODY`` where nobody's.
      values: a pytree of [slots, ...] arrays.
    """

    ids: Array
    values: Any


def empty(slots: int, blank: Any) -> PromptTable:
    """An empty table.

    Args:
      slots: places, at least 1.
      blank: a pytree of arrays or numbers: the values of one prompt never seen.
    """
    values = jax.tree.map(lambda x: jnp.broadcast_to(x, (slots, *jnp.shape(x))).copy(), blank)
    return PromptTable(jnp.full(slots, NOBODY, jnp.int32), values)


def read(table: PromptTable, ids: Array, blank: Any) -> Any:
    """The values of each prompt.

    Args:
      table: from ``empty`` or ``write``.
      ids: [N] int32.
      blank: as given to ``empty``.

    Returns:
      A pytree of [N, ...], ``blank`` for a prompt that is not in the table.

    >>> table = write(empty(2, 0.0), jnp.array([3]), jnp.array([5.0]), jnp.array([True]))
    >>> read(table, jnp.array([3, 1, 0]), 0.0).tolist()
    [5.0, 0.0, 0.0]
    """
    chex.assert_rank(ids, 1)
    slots = ids % table.ids.shape[0]
    in_table = table.ids[slots] == ids

    def one(column: Array, start: Any) -> Array:
        rows = column[slots]
        flags = in_table.reshape(-1, *(1,) * (rows.ndim - 1))
        return jnp.where(flags, rows, jnp.asarray(start, rows.dtype)[None])

    return jax.tree.map(one, table.values, blank)


def write(table: PromptTable, ids: Array, values: Any, live: Array) -> PromptTable:
    """The table with the values of these prompts in it.

    Args:
      table: from ``empty`` or ``write``.
      ids: [N] int32. Of different prompts with one place, the greatest id gets it.
      values: a pytree of [N, ...] arrays. Rows of the same prompt must hold equal values: put
        them together first (``objectives.segments``).
      live: [N] bool, False for rows that are not written.
    """
    chex.assert_rank([ids, live], 1)
    chex.assert_equal_shape([ids, live])
    slots = table.ids.shape[0]
    slot = ids % slots
    winner = jax.ops.segment_max(jnp.where(live, ids, NOBODY), slot, num_segments=slots)
    # Losers are sent past the end, where writes are dropped.
    target = jnp.where(live & (winner[slot] == ids), slot, slots)

    def one(column: Array, new: Array) -> Array:
        return column.at[target].set(new.astype(column.dtype), mode="drop")

    return PromptTable(one(table.ids, ids), jax.tree.map(one, table.values, values))
