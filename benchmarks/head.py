"""What the head of a network needs beside weights and gradients, as the vocabulary grows.

    python -m benchmarks.head --tokens 2048 --dim 256

Compiles log-probabilities with their gradient and prints one JSON line a vocabulary: the peak of
temporary bytes by XLA's own account, walked over (``models.product.fused_logprobs``) and whole.
Nothing is run.
"""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp

from jrl.models.product import fused_logprobs
from jrl.types import Head


def temporary_bytes(vocab: int, tokens: int, dim: int, dtype: str, whole: bool) -> int:
    """Of log-probability and entropy with their gradients, at the peak, outputs not counted."""

    def loss(hidden: jax.Array, weight: jax.Array, ids: jax.Array) -> jax.Array:
        kept = 2**62 if whole else 0
        one = jnp.float32(1)
        stats = fused_logprobs(hidden, Head(weight, 0), ids, one, entropy=True, kept=kept)
        return stats["logprobs"].sum() + stats["entropy"].sum()

    inputs = (
        jax.ShapeDtypeStruct((1, tokens, dim), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((vocab, dim), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    )
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*inputs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[2**15, 2**17, 2**18])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    for vocab in options.vocab:
        sizes = {
            name: temporary_bytes(vocab, options.tokens, options.dim, options.dtype, whole)
            for name, whole in (("walked_over", False), ("whole", True))
        }
        print(json.dumps({"vocab": vocab, "temporary_bytes": sizes}))


if __name__ == "__main__":
    main()
