"""Losses averaged prompt by prompt."""

from __future__ import annotations

import jax

from jrl.types import Array, Stats, Surrogate


def by_prompt(surrogate: Surrogate) -> Surrogate:
    """The same per-token losses, with a prompt's whole group as one row of the aggregate.

    With ``sequence_mean`` every prompt then weighs the same and every token of it shares that
    weight: the prompt-level average of "The Art of Scaling Reinforcement Learning Compute for LLMs"
    (arXiv:2510.13786). Regularizers without an aggregate of their own keep sequences as rows.

    Args:
      surrogate: one over sequences.
    """
    assert surrogate.over == "sequence", "the rows of this surrogate are groups already"

    def apply(stats: Stats, advantages: Array, mask: Array) -> tuple[Array, Stats]:
        return jax.vmap(surrogate.apply)(stats, advantages, mask)

    return surrogate._replace(apply=apply, over="group")
