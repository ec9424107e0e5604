"""How much a group's answers disagree, and advantages scaled by it."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.errors import choose
from jrl.objectives.transforms import stateless
from jrl.types import Array, Batch, Transform

SHAPES = ("linear", "exponential", "focal")


def answer_entropy(same: Array, members: Array) -> Array:
    """The semantic entropy of ONE group: the mean over its answers of -log of their shares.

        SE = -1/K sum_k log p_k,  p_k the share of the members that gave answer k

    as "SEED-GRPO: Semantic Entropy Enhanced GRPO for Uncertainty-Aware Policy Optimization"
    (arXiv:2505.12346) estimates it, with shares counted.

    Args:
      same: [G, G] bool, True where two members gave one answer; an equivalence.
      members: [G] bool, True where the member counts.

    Returns:
      [] float32, nats: 0 when all agree, log of the number of members when no two do.

    >>> two = jnp.array([[True, True, False], [True, True, False], [False, False, True]])
    >>> round(float(answer_entropy(two, jnp.ones(3, bool))), 4)
    0.752
    """
    chex.assert_rank([same, members], [2, 1])
    size = (same & members[None]).sum(axis=1)
    each = jnp.where(members, 1 / jnp.maximum(size, 1), 0)  # a member's part of its answer
    share = jnp.maximum(size, 1) / jnp.maximum(members.sum(), 1)
    surprise = jnp.where(members, each * -jnp.log(share), 0)
    return surprise.sum() / jnp.maximum(each.sum(), 1)


def scale_by_answer_entropy(
    strength: float, shape: str = "linear", power: float = 2.0
) -> Transform:
    """Advantages times f(strength SE / log G), f falling from 1: less where answers disagree.

    Two completions have one answer when their labels ``batch.ids["answer"]`` ([N, G]) are equal;
    where nobody recorded any, when all their reward parts are. Nothing is read from tokens.

    Args:
      strength: alpha; 0 changes nothing.
      shape: f(x) is "linear", max(1 - x, 0); "exponential", exp(-x); or "focal",
        max(1 - x, 0)^power.
      power: of "focal".

    Returns:
      A transform [N, G] -> [N, G]. G counts live members; one alone is left as it is.

    Raises:
      UserError: for another shape.
    """
    if shape not in SHAPES:
        raise choose("shape", shape, SHAPES)

    def factor(x: Array) -> Array:
        if shape == "exponential":
            return jnp.exp(-x)
        rest = jnp.maximum(1 - x, 0)
        return rest if shape == "linear" else rest**power

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        labels = batch.rewards
        if "answer" in batch.ids:
            labels = jnp.expand_dims(batch.ids["answer"], 2)
        same = (jnp.expand_dims(labels, 1) == jnp.expand_dims(labels, 2)).all(axis=3)
        entropy = jax.vmap(answer_entropy)(same, batch.members)
        most = jnp.log(jnp.maximum(batch.members.sum(axis=1), 2))
        scale = factor(strength * entropy / most)
        return values * jnp.expand_dims(scale, 1), batch

    return stateless(apply)
