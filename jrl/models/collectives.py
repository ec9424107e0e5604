"""Sums and gathers over many devices in two steps, each along a line of the torus.

Where a group of devices spans more than a line, XLA has no reduce-scatter for TPUs: it sums
everything on every device and cuts a part out, which sends twice as much; and small gathers become
sums of parts that are zero elsewhere. Along a line both are what they say. Two steps along shorter
groups send as much as one would: (n - 1) / n of the numbers. (Compiled with libtpu 0.0.42 for
v5e:4x4, v6e:8x8 and v5p:4x4x4.)
"""

from __future__ import annotations

import jax

from jrl.types import Array

_LINE = 8
"""Groups up to this size are assumed to form a line."""


def sum_scattered(x: Array, axis: str, dim: int) -> Array:
    """This device's part, along ``dim``, of the sum over a mesh axis; inside ``jax.shard_map``."""
    for groups in _steps(jax.lax.axis_size(axis)):
        x = jax.lax.psum_scatter(
            x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups
        )
    return x


def gathered(x: Array, axis: str, dim: int) -> Array:
    """The parts of all devices of a mesh axis along ``dim``; inside ``jax.shard_map``."""
    for groups in _steps(jax.lax.axis_size(axis))[::-1]:
        x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return x


def _steps(n: int) -> list[list[list[int]] | None]:
    """The groups of each step of a reduce-scatter over n devices; device i keeps part i.

    First those that keep one block of parts apart, then those inside of a block.

    >>> _steps(8)
    [None]
    >>> _steps(16)[0][:2], _steps(16)[1][:2]
    ([[0, 4, 8, 12], [1, 5, 9, 13]], [[0, 1, 2, 3], [4, 5, 6, 7]])
    """
    # A mesh lists the devices of a line one after the other.
    outer = max((k for k in range(1, n) if n % k == 0 and k * k <= n), default=1)
    if n <= _LINE or outer == 1:
        return [None]
    inner = n // outer
    first = [list(range(i, n, inner)) for i in range(inner)]
    return [first, [list(range(o * inner, (o + 1) * inner)) for o in range(outer)]]
