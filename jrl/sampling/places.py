"""Branching places of trees: scores of tokens as places to branch at."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.sampling.slots import Measure, Slots
from jrl.types import Array, Branching


def entropy(logprobs: Array) -> Array:
    """[S] float32, nats: the entropy of each row's distribution [S, V]; 0 where it is certain."""
    probs = jnp.exp(logprobs)
    return -jnp.sum(jnp.where(probs > 0, probs * logprobs, 0.0), axis=-1)


def closeness(logprobs: Array) -> Array:
    """[S] float32, 1 minus the difference between the two largest probabilities of each row."""
    top = jnp.exp(jax.lax.top_k(logprobs, 2)[0])
    return 1.0 - (top[:, 0] - top[:, 1])


PLACES: dict[str, Measure | None] = {
    "entropy": entropy,
    "gap": closeness,
    "surprise": None,
    "even": None,
}
"""``Branching.at`` -> the statistic of the sampling distribution, or None."""


def branches(
    tree: Slots, forks: Array, present: Array, branching: Branching, count: int, group: int
) -> tuple[Array, Array, Array]:
    """The (member, token) pairs to branch from in one round.

    Each member that is there names its best places, and the best of all that are named are taken,
    no more of one member than an equal share rounded up.

    Args:
      tree: n * G rows, of which the first ``present`` of each group are there.
      forks: [n, G] int32, how often each member was left.
      present: [] int32.
      branching: says what a place is worth.
      count: k, branches of a group.
      group: G.

    Returns:
      Members [n, k] and places [n, k] int32, a place being the tokens that are shared, and the new
      ``forks``.
    """
    t = tree.tokens.shape[1]
    own_tokens = tree.mask.reshape(-1, group, t)
    most = min(-(-count // branching.roots), t)
    if branching.at == "even":
        values, places = _even_places(own_tokens, forks, most)
    else:
        numbers = -tree.logprobs if branching.at == "surprise" else tree.measured
        assert numbers is not None
        # The places that a member was left at before are the best ones; they count no more.
        priority = jnp.where(own_tokens, numbers.reshape(own_tokens.shape), -jnp.inf)
        # A member may have given its best places in every earlier round, and has to name as many
        # new ones.
        most = min(most * branching.rounds, t)
        values, places = jax.lax.top_k(priority, most)
    rank = jnp.arange(most)[None, None]
    share = -(-count // present)
    if branching.at != "even":
        share = share + jnp.expand_dims(forks, 2)
        values = jnp.where(rank < jnp.expand_dims(forks, 2), -jnp.inf, values)
    values = jnp.where(rank < share, values, -jnp.inf)
    best, index = jax.lax.top_k(values.reshape(-1, group * most), count)
    source = index // most
    place = jnp.take_along_axis(places.reshape(-1, group * most), index, axis=1)
    # A member that finds no place above the bound begins at the prompt: shapes are fixed, and a
    # group is never short.
    left = best > branching.above
    place = jnp.where(left, place, 0).astype(jnp.int32)
    picks = jax.nn.one_hot(source, group, dtype=jnp.int32) * jnp.expand_dims(left, 2)
    return source.astype(jnp.int32), place, forks + picks.sum(axis=1)


def _even_places(own_tokens: Array, forks: Array, most: int) -> tuple[Array, Array]:
    """Values and places [n, G, most]: the middle, then the quarters of what each member drew.

    The longest stretches that are left are worth the most.
    """
    count = jnp.expand_dims(own_tokens.sum(axis=2), 2)
    number = jnp.expand_dims(forks, 2) + jnp.arange(most)[None, None]
    first = jnp.expand_dims(jnp.argmax(own_tokens, axis=2), 2)
    places = first + jnp.floor(count * jnp.asarray(_halves(own_tokens.shape[1] + most))[number])
    return jnp.where(count > 0, count / (number + 1), -jnp.inf), places.astype(jnp.int32)


def _halves(count: int) -> np.ndarray:
    """[count] float32 in (0, 1): the van der Corput sequence in base 2.

    >>> _halves(5).tolist()
    [0.5, 0.25, 0.75, 0.125, 0.625]
    """
    reverse = [int(f"{i:b}"[::-1], 2) / 2 ** i.bit_length() for i in range(1, count + 1)]
    return np.array(reverse, np.float32)
