"""Parts of an objective applied to arrays [..., T] and [..., G] with any leading axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jrl.types import Array, Batch, Stats


def check_types(kind: type, **arrays: Array) -> None:
    """Refuses what is no array of a kind, float, int or bool, by its name."""
    for name, array in arrays.items():
        if not hasattr(array, "dtype"):
            raise TypeError(
                f"{name} is a {type(array).__name__}; pass an array, jnp.asarray({name})"
            )
        chex.assert_type(array, kind, custom_message=name)


def check(mask: Array, **arrays: Array) -> None:
    """Refuses arrays that are not float and of the mask's shape."""
    check_types(bool, mask=mask)
    check_types(float, **arrays)
    for name, array in arrays.items():
        chex.assert_shape(array, mask.shape, custom_message=f"{name} beside the mask")


def by_row(function: Callable[..., Any], *arrays: Array) -> Any:
    """A function of one row [T], over all leading axes of [..., T]."""
    for _ in range(arrays[0].ndim - 1):
        function = jax.vmap(function)
    return function(*arrays)


def rows(array: Array) -> Array:
    """[..., T] as [B, 1, T]."""
    return array.reshape(-1, 1, array.shape[-1])


def spread(advantages: Array, mask: Array) -> Array:
    """Advantages [B, 1, T] float32, those of complete sequences at each of their tokens."""
    check_types(bool, mask=mask)
    check_types(float, advantages=advantages)
    if advantages.ndim == mask.ndim - 1:
        of_completion = "advantages [...] beside the mask [..., T]"
        chex.assert_shape(advantages, mask.shape[:-1], custom_message=of_completion)
        advantages = jnp.broadcast_to(jnp.expand_dims(advantages, -1), mask.shape)
    chex.assert_shape(advantages, mask.shape, custom_message="advantages beside the mask")
    return rows(advantages).astype(jnp.float32)


def batch_of(mask: Array, stats: Stats) -> Batch:
    """A record of the rows of [..., T], each a group of its own, without tokens or rewards."""
    live = rows(mask)
    count, _, width = live.shape
    present = jnp.ones((count, 1), bool)
    return Batch(
        prompt_tokens=jnp.zeros((count, 1), jnp.int32),
        prompt_lengths=jnp.ones(count, jnp.int32),
        tokens=jnp.zeros(live.shape, jnp.int32),
        lengths=jnp.full((count, 1), width, jnp.int32),
        mask=live,
        rewards=jnp.zeros((count, 1, 1), jnp.float32),
        reward_weights=jnp.ones(1, jnp.float32),
        members=present,
        baseline=~present,
        truncated=~present,
        stats=stats,
    )
