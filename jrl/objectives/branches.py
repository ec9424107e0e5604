"""Credit in groups that are trees: members that share tokens, which one of them drew.

Members of ONE group go through a token together where ``batch.ids["node"]`` is the same, from 1 on,
at the same place; see ``sampling.tree``. Of such a token one member alone is trained on, the one
that drew it.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Transform


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
    here = through(node, members)
    total = jnp.where(here, values[None, :, None], 0).sum(axis=1)
    return total / jnp.maximum(here.sum(axis=1), 1)


def by_branch(values: Array, batch: Batch) -> Array:
    """[N, G, T]: numbers [N, G] by token, the mean of those of all members that go through it."""
    chex.assert_rank(values, 2)
    return jax.vmap(branch_means)(values, batch.ids["node"], batch.members)


def over_branches() -> Transform:
    """Gives a token the mean advantage of the members that go through it.

    The hard attribution of "Agentic Reinforced Policy Optimization" (arXiv:2507.19849). Drawn
    apart, each of these members would be trained on a token of its own with its own advantage.

    Returns:
      A transform [N, G] -> [N, G, T]. Advantages that are by token already stay as they are, and so
      do all where the batch has no label "node".
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        if values.ndim == 3 or "node" not in batch.ids:
            return values, batch
        return by_branch(values, batch), batch

    return stateless(apply)
