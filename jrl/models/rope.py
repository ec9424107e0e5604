"""Rotary embedding of positions: frequencies, angles, and the rotation of a layer."""

from __future__ import annotations

import math

import chex
import jax.numpy as jnp
import numpy as np

from jrl.models.config import ModelConfig, Rope
from jrl.types import Array

Rotation = tuple[Array, Array]
"""Cosines and sines of the angles at each position, each [B, L, h / 2] float32."""


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """The rotation's angle per position for each pair of head dimensions.

    "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv:2104.09864), with linear
    scaling ("Extending Context Window of Large Language Models via Positional Interpolation",
    arXiv:2306.15595) or the three-band scaling of "The Llama 3 Herd of Models" (arXiv:2407.21783).

    Args:
      rope: base and scaling.
      head_dim: h.

    Returns:
      [h / 2] float32, radians per position; zeros, hence no rotation, for theta 0.

    >>> frequencies(Rope(100.0), 4).round(4).tolist()
    [1.0, 0.10000000149011612]
    """
    # Layers without rotary embedding (NoPE) go through the same code with angle 0, so the scan
    # stays uniform.
    if rope.theta == 0:
        return np.zeros(head_dim // 2, np.float32)
    # NumPy float32, as in the checkpoints' original code: float64 gives other last bits at large
    # positions.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.scaling == "none":
        return base
    if rope.scaling == "linear":
        return (base / np.float32(rope.factor)).astype(np.float32)
    wavelengths = 2 * math.pi / base
    low, high = rope.low_freq_factor, rope.high_freq_factor
    # Short wavelengths are kept, long ones divided by the factor, with a linear blend between.
    keep = np.clip((rope.original_length / wavelengths - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * base / rope.factor + keep * base).astype(np.float32)


def angles(positions: Array, frequencies_r: Array) -> Rotation:
    """Cosines and sines of the angles at each position.

    Args:
      positions: [B, L] int32, tokens.
      frequencies_r: [h / 2] float32, radians per token.

    Returns:
      Two [B, L, h / 2] float32 arrays.
    """
    chex.assert_rank([positions, frequencies_r], [2, 1])
    turned_by = positions.astype(jnp.float32)[:, :, None] * frequencies_r[None, None, :]
    return jnp.cos(turned_by), jnp.sin(turned_by)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns each pair (i, i + h/2) of the last axis by its angle; in float32, then as ``x``.

    Args:
      x: [..., h].
      cos: [..., h / 2] float32, broadcast against ``x`` by the caller's axes of size 1.
      sin: the same shape.
    """
    # Halves, not interleaved pairs: the layout of Hugging Face checkpoints.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    both = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return both.astype(x.dtype)


def rotations(config: ModelConfig, positions: Array) -> tuple[list[Rotation], list[int]]:
    """The distinct rotations of the model at these positions, and which one each layer uses."""
    # Most models have one or two: computing cosines once each keeps them out of the layer loop.
    distinct = list(dict.fromkeys(config.ropes))
    tables = [angles(positions, jnp.asarray(frequencies(r, config.head_dim))) for r in distinct]
    return tables, [distinct.index(rope) for rope in config.ropes]


def stacked_rotations(config: ModelConfig, positions: Array) -> tuple[Rotation, np.ndarray]:
    """All distinct rotations, cosines and sines stacked; which one each layer uses."""
    tables, rotation_ids = rotations(config, positions)
    cos, sin = (jnp.stack(part) for part in zip(*tables, strict=True))
    return (cos, sin), np.array(rotation_ids, np.int32)


def rotation_at(stacked: Rotation, i: Array) -> Rotation:
    """One of stacked rotations."""
    return stacked[0][i], stacked[1][i]
