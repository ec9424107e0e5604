"""The tree that the completions of one prompt form, read as a value function."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Transform


def shared_lengths(tokens: Array, lengths: Array) -> Array:
    """[G, G] int32, tokens: how long a beginning each two completions of ONE group share.

    Args:
      tokens: [G, T] int32; what lies at or past ``lengths`` is not read.
      lengths: [G] int32, tokens.

    >>> tokens = jnp.array([[5, 6, 7], [5, 6, 9], [5, 8, 7]])
    >>> shared_lengths(tokens, jnp.array([3, 3, 2])).tolist()
    [[3, 2, 1], [2, 3, 1], [1, 1, 2]]
    """
    chex.assert_rank([tokens, lengths], [2, 1])
    place = jnp.arange(tokens.shape[1])
    differ = jnp.expand_dims(tokens, 0) != jnp.expand_dims(tokens, 1)
    first = jnp.min(jnp.where(differ, place[None, None], tokens.shape[1]), axis=2)
    return jnp.minimum(first, jnp.minimum(lengths[None], lengths[:, None])).astype(jnp.int32)


def prefix_steps(scores: Array, tokens: Array, lengths: Array, members: Array) -> Array:
    """What each token of ONE group changes in the mean score of the completions that go through.

        V(s) = mean score of the members that begin with s;  step_t = V(s, token_t) - V(s)

    Prefix-to-Tree of "Exploiting Tree Structure for Credit Assignment in RL Training of LLMs"
    (arXiv:2509.18314): the tree of the group's prefixes is never built; two completions are at one
    node as long as they agree. A token that all completions at its node share changes nothing.

    Args:
      scores: [G] float, points.
      tokens: [G, T] int32.
      lengths: [G] int32, tokens present, tool output included: it is part of the prefix.
      members: [G] bool, True where the member counts.

    Returns:
      [G, T] float32, points; 0 past the end of a completion and for members that are not live.

    >>> tokens = jnp.array([[5, 6], [5, 7], [5, 7]])
    >>> ones = jnp.ones(3, bool)
    >>> prefix_steps(jnp.array([3.0, 0.0, 0.0]), tokens, jnp.array([2, 2, 2]), ones).tolist()
    [[0.0, 2.0], [0.0, -1.0], [0.0, -1.0]]
    """
    chex.assert_rank([scores, tokens, lengths, members], [1, 2, 1, 1])
    scores = jnp.where(members, scores, 0)
    shared = jnp.where(members[None], shared_lengths(tokens, lengths), -1)
    depth = jnp.arange(tokens.shape[1] + 1)  # tokens of the prefix
    together = jnp.expand_dims(shared, 2) >= depth[None, None]  # [G, G, T + 1]
    count = together.sum(axis=1)
    value = jnp.where(together, scores[None, :, None], 0).sum(axis=1) / jnp.maximum(count, 1)
    # Where nobody leaves the node, the change is 0 and not the rounding of two equal sums.
    step = jnp.where(count[:, 1:] == count[:, :-1], 0, value[:, 1:] - value[:, :-1])
    step = jnp.where(jnp.isnan(value[:, 1:]), value[:, 1:], step)
    inside = members[:, None] & (depth[None, 1:] <= lengths[:, None])
    return jnp.where(inside, step, 0)


def add_prefix_steps(scale: float = 1.0) -> Transform:
    """Adds ``scale`` times ``prefix_steps`` of the advantages it is given to them, per token.

    Returns:
      A transform [N, G] -> [N, G, T].
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        steps = jax.vmap(prefix_steps)(values, batch.tokens, batch.lengths, batch.members)
        return jnp.expand_dims(values, 2) + scale * steps, batch

    return stateless(apply)
