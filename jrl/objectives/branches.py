"""Credit in groups that are trees, whose members share tokens.

Members of ONE group go through a token together where ``batch.ids["node"]`` is the same, from 1 on,
at the same place; see ``sampling.tree``. Of such a token one member alone is trained on, the one
that drew it.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.types import Array, Batch


def through(node: Array, members: Array) -> Array:
    """[G, G, T] bool: whether member j, live, goes through token t of member i, at [i, j, t].

    Args:
      node: [G, T] int32, ``ids["node"]`` of ONE group.
      members: [G] bool.
    """
    chex.assert_rank([node, members], [2, 1])
    same = jnp.expand_dims(node, 1) == jnp.expand_dims(node, 0)
    return same & jnp.expand_dims(node > 0, 1) & members[None, :, None]


def branch_means(values: Array, node: Array, members: Array) -> Array:
    """The mean of a number over the members that go through each token of ONE group.

    Args:
      values: [G] float, a number of each member, such as its reward, points.
      node: [G, T] int32.
      members: [G] bool.

    Returns:
      [G, T] float32; the member's own number at tokens that it shares with nobody, 0 where no live
      member goes through, as past the end.

    >>> node = jnp.array([[1, 2], [1, 3]])
    >>> branch_means(jnp.array([1.0, 0.0]), node, jnp.ones(2, bool)).tolist()
    [[0.5, 1.0], [0.5, 0.0]]
    """
    chex.assert_rank([values, node], [1, 2])
    on_path = through(node, members)
    total = jnp.where(on_path, values[None, :, None], 0).sum(axis=1)
    return total / jnp.maximum(on_path.sum(axis=1), 1)


def by_branch(values: Array, batch: Batch) -> Array:
    """[N, G, T]: numbers [N, G] by token, the mean of those of all members that go through it."""
    chex.assert_rank(values, 2)
    return jax.vmap(branch_means)(values, batch.ids["node"], batch.members)


def of_members(chosen: Array, batch: Batch) -> Array:
    """[N, G, T] bool: the tokens of chosen members, also those that another one drew for them.

    Args:
      chosen: [N, G] bool.
      batch: where its groups are no trees these are all tokens of the members.
    """
    chex.assert_rank(chosen, 2)
    own_tokens = jnp.broadcast_to(jnp.expand_dims(chosen, 2), batch.mask.shape)
    if "node" not in batch.ids:
        return own_tokens
    shared = jax.vmap(through)(batch.ids["node"], batch.members & chosen).any(axis=2)
    return own_tokens | shared
