"""Rewards for short completions, from their lengths or those of the rest of the group.

Transforms [N, G] -> [N, G]; put them before the baseline. Lengths are tokens under the mask,
without what an environment replied. A NaN score stays NaN.
"""

from __future__ import annotations

from typing import Any

import chex
import jax.numpy as jnp

from jrl.objectives.transforms import completion_tokens, stateless
from jrl.types import Array, Batch, Transform


def ranked_in_group(scale: float = 1.0, correct: float = 0.5, start_steps: int = 0) -> Transform:
    """Rewards short and penalises long completions of a group; only correct ones gain.

    The length reward of ``kimi_k1_5``:

        lambda = 0.5 - (len - shortest) / (longest - shortest)
        reward = lambda for a right answer, min(0, lambda) for a wrong one

    and 0 for all when the group's lengths are equal.

    Args:
      scale: what the reward is multiplied by, points.
      correct: points, the least score of a right answer.
      start_steps: training steps without it, at the start of the run.
    """

    def apply(values: Array, batch: Batch, steps: Any) -> tuple[Array, Batch, Any]:
        chex.assert_rank(values, 2)
        lengths = completion_tokens(batch).astype(jnp.float32)
        least = jnp.min(lengths, axis=1, keepdims=True, where=batch.members, initial=jnp.inf)
        most = jnp.max(lengths, axis=1, keepdims=True, where=batch.members, initial=-jnp.inf)
        differ = most > least
        reward = 0.5 - (lengths - least) / jnp.where(differ, most - least, 1)
        reward = jnp.where(values >= correct, reward, jnp.minimum(reward, 0))
        applies = differ & batch.members & (steps >= start_steps)
        return values + jnp.where(applies, scale * reward, 0), batch, steps + 1

    return Transform(init=lambda: jnp.zeros((), jnp.int32), apply=apply)


def when_all_are_right(max_tokens: int, scale: float = 1.0, correct: float = 0.5) -> Transform:
    """Rewards the unused part of the limit, in groups with correct answers only.

    Right is a score of at least ``correct`` points; the reward is multiplied by ``scale``.

        reward = 1 - len / max_tokens
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        right = jnp.where(batch.members, values >= correct, True).all(axis=1, keepdims=True)
        unused = 1 - completion_tokens(batch).astype(jnp.float32) / max_tokens
        return values + jnp.where(right, scale * unused, 0), batch

    return stateless(apply)


def length_cost(points: float) -> Transform:
    """Subtracts ``points`` from the score for each trained token."""

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(scores, 2)
        return scores - points * batch.mask.sum(axis=2), batch

    return stateless(apply)
