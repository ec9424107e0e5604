"""Limits of the machine: rates of bare products and copies, and counts of work.

A floor is the useful work over such a rate. Useful means: a prompt once for all of its group, the
output matrix at completion tokens only, and nothing for padding or stopped sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import best, timed
from jrl.models.config import ModelConfig


class Completions(NamedTuple):
    """Sampled lengths: prompt lengths [N] and completion lengths [N, G], tokens."""

    prompts: np.ndarray
    lengths: np.ndarray


# ---------------------------------------------------------------- work


def trunk_weights(config: ModelConfig) -> int:
    """Weights that every token is multiplied by, the output matrix left out."""
    c = config
    attention = c.embed_dim * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    return c.layers * (attention + 3 * c.embed_dim * c.mlp_dim)


def forward_flops(config: ModelConfig, tokens: float, pairs: float, scored: float) -> float:
    """Operations of a forward pass.

    Args:
      config: the model.
      tokens: that pass through the layers.
      pairs: of a query and a key that it sees.
      scored: tokens whose logits are computed.
    """
    attention = 4 * config.layers * config.heads * config.head_dim * pairs
    head = 2 * config.embed_dim * config.vocab_size * scored
    return float(2 * trunk_weights(config) * tokens + attention + head)


def prefill_flops(config: ModelConfig, completions: Completions) -> float:
    """Each prompt once; its last token belongs to decoding."""
    p = completions.prompts - 1
    return forward_flops(config, p.sum(), (p * (p + 1) // 2).sum(), 0)


def decode_flops(config: ModelConfig, completions: Completions) -> float:
    """One pass a completion token, which sees everything before it."""
    t = completions.lengths
    pairs = (t * completions.prompts[:, None] + t * (t - 1) // 2).sum()
    return forward_flops(config, t.sum(), pairs, t.sum())


def score_flops(config: ModelConfig, completions: Completions) -> float:
    """One pass over prompts and completions, as a reference needs; training is three of them."""
    p, t = completions.prompts, np.maximum(completions.lengths - 1, 0)
    pairs = (p * (p + 1) // 2).sum() + (t * p[:, None] + t * (t + 1) // 2).sum()
    return forward_flops(config, p.sum() + t.sum(), pairs, completions.lengths.sum())


def update_flops(config: ModelConfig, completions: Completions, adapters: int = 0) -> float:
    """A training step without recomputation: three passes.

    Args:
      config: the model.
      completions: what is trained on.
      adapters: trained weights of adapters on a frozen base, which has no gradients of its own and
        so costs two passes; 0 where all weights are trained.
    """
    whole = score_flops(config, completions)
    if not adapters:
        return 3 * whole
    p, t = completions.prompts, np.maximum(completions.lengths - 1, 0)
    tokens, scored = p.sum() + t.sum(), completions.lengths.sum()
    # Of attention, which has no weights, both gradients are needed in any case.
    attention = whole - forward_flops(config, tokens, 0, scored)
    return 2 * whole + attention + 6.0 * adapters * tokens


def prime_rl_flops(config: ModelConfig, length: int, adapters: int = 0) -> float:
    """Operations of a training step for each token, as prime-rl counts them for its MFU.

    ``PerfCounter._get_num_flop_per_token`` of its ``src/prime_rl/trainer/perf.py``: 6 for each
    weight of a product, the output matrix at every token, or with adapters 4, and 6 for each of
    theirs; attention as if each token saw the whole row, with heads of embed_dim / heads numbers
    whatever their size is.

    Args:
      config: a model without experts.
      length: tokens in a packed row.
      adapters: trained weights of adapters; 0 where all weights are trained.
    """
    active = trunk_weights(config) + config.embed_dim * config.vocab_size
    attention = 12.0 * config.layers * config.embed_dim * length
    return (4 * active + 6 * adapters if adapters else 6 * active) + attention


def decode_bytes(
    config: ModelConfig, completions: Completions, weights_bytes: int, vector_bytes: int = 0
) -> float:
    """Bytes that decoding must read: all weights every step, live keys and values, a prefix once.

    Args:
      config: the model.
      completions: what is sampled.
      weights_bytes: read in each step.
      vector_bytes: of a key or value of one head; 0 for numbers of the model's dtype.
    """
    vector_bytes = vector_bytes or config.head_dim * jnp.dtype(config.dtype).itemsize
    entry = 2 * config.layers * config.kv_heads * vector_bytes
    steps = completions.lengths.max(1)
    earlier = (completions.lengths * (completions.lengths - 1) // 2).sum()
    read = int(completions.lengths.max()) * weights_bytes
    return float(read + entry * (earlier + (steps * completions.prompts).sum()))


# ---------------------------------------------------------------- rates


def gemm_rate(size: int, dtype: str, rounds: int = 7) -> float:
    """FLOP/s of one large square product."""
    a, b = (jnp.full((size, size), x, dtype) for x in (0.5, 0.25))
    return 2 * size**3 / best(jax.jit(jnp.matmul), a, b, rounds=rounds)


def copy_rate(megabytes: int = 256, rounds: int = 7) -> float:
    """Bytes/s, read and written, of adding to an array in place."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    _, x = timed(add, jnp.zeros(megabytes * 2**20 // 4, jnp.float32))
    seconds = []
    for _ in range(rounds):
        took, x = timed(add, x)
        seconds.append(took)
    return 2 * megabytes * 2**20 / min(seconds)


def fractions(seconds: dict[str, float | None], floors: dict[str, float]) -> dict[str, float]:
    """Floor over measured time, by phase, where a phase was measured."""
    return {name: floor / took for name, floor in floors.items() if (took := seconds.get(name))}
