"""Memory spaces and sizes shared by the kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

LEAST = 16
"""Fewest rows of a product on the matrix units."""


def power(n: int) -> int:
    """The next power of two, which sizes inside a kernel must be."""
    return 1 << max(n - 1, 0).bit_length()


def place(ref: Any, *index: Any) -> Any:
    """A place of ``ref``, Python's integers as arrays, which interpreted loads ask for."""
    return ref.at[tuple(jnp.int32(i) if isinstance(i, int) else i for i in index)]
