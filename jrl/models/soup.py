"""Weight averages of checkpoints of one network: model soups."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.types import Array, Params


def average(checkpoints: Sequence[Params], shares: Sequence[float] | None = None) -> Params:
    """The weighted mean of the weights, leaf by leaf; sums are in float32, dtypes the first one's.

    Works on trees of sharded arrays that lie alike: each device averages what it holds.

    Args:
      checkpoints: trees of one structure, with leaves of equal shapes.
      shares: a number for each checkpoint, adding up to 1; None for equal shares.

    Returns:
      A tree like the first. One checkpoint alone comes back as it is.

    Raises:
      UserError: no checkpoint, shares that do not match or do not add up to 1, or checkpoints that
        differ in structure or in the shape of a weight, which is named.

    >>> average([{"w": jnp.array([1.0, 3.0])}, {"w": jnp.array([3.0, 5.0])}], [0.75, 0.25])
    {'w': Array([1.5, 3.5], dtype=float32)}
    """
    if not checkpoints:
        raise UserError("soup.average of no checkpoint; give one or more")
    count = len(checkpoints)
    parts = [1 / count] * count if shares is None else [float(x) for x in shares]
    if len(parts) != count or not np.isclose(sum(parts), 1, atol=1e-6):
        raise UserError(
            f"shares = {parts} for {count} checkpoints; give one for each, adding up to 1"
        )
    for number, tree in enumerate(checkpoints[1:], start=1):
        _check_alike(checkpoints[0], tree, number)

    def mean(first: Array, *others: Array) -> Array:
        if not others:
            return first
        total = sum(
            part * leaf.astype(jnp.float32)
            for part, leaf in zip(parts, (first, *others), strict=True)
        )
        return jnp.asarray(total).astype(first.dtype)

    return jax.tree.map(mean, *checkpoints)


def _check_alike(first: Params, other: Params, number: int) -> None:
    """Raises a UserError that names the first weight in which two checkpoints differ."""
    one = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(first)}
    two = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(other)}
    for name in sorted(one.keys() ^ two.keys()):
        holder = 0 if name in one else number
        raise UserError(f"weight {name} is in checkpoint {holder} only; average one network's")
    for name, leaf in one.items():
        if leaf.shape != two[name].shape:
            raise UserError(
                f"weight {name} is {leaf.shape} in checkpoint 0 and {two[name].shape} in "
                f"checkpoint {number}; average one network's"
            )
