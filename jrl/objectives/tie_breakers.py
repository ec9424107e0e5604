"""Random choices inside a step, from the random number of each member (``ids["tie_breaker"]``).

Nothing here makes a key: the numbers are fresh in every step and travel with the rows, so a choice
does not depend on the order of rows or on how they are divided over devices.
"""

from __future__ import annotations

import jax.numpy as jnp

from jrl.types import Array, Batch


def tie_breakers(batch: Batch) -> Array:
    """[N, G] int32, the random number of each member; 0 if there are none.

    Ties are settled by position, so without tie-breakers the first member is chosen.
    """
    return batch.ids.get("tie_breaker", jnp.zeros(batch.members.shape, jnp.int32))


def one_of_each(eligible: Array, tie_breaker: Array) -> Array:
    """[N, G] bool: one eligible member of each group, the one with the least tie-breaker.

    All False for a group in which nobody is eligible.

    >>> one_of_each(jnp.array([[True, True, False]]), jnp.array([[5, 2, 1]])).tolist()
    [[False, True, False]]
    """
    last = jnp.iinfo(jnp.int32).max
    least = jnp.argmin(jnp.where(eligible, tie_breaker, last), axis=1, keepdims=True)
    return eligible & (jnp.arange(eligible.shape[1])[None] == least)


def places(eligible: Array, tie_breaker: Array) -> Array:
    """[N, G] int32: each eligible member's place in a random order of them all, from 0.

    Members that are not eligible come after all that are.

    >>> places(jnp.array([[True, True], [False, True]]), jnp.array([[5, 2], [1, 9]])).tolist()
    [[1, 0], [3, 2]]
    """
    order = jnp.lexsort((tie_breaker.reshape(-1), ~eligible.reshape(-1)))
    return jnp.argsort(order).astype(jnp.int32).reshape(eligible.shape)
