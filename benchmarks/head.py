"""What the head of a network needs beside weights and gradients, as the vocabulary grows.

    python -m benchmarks.head --tokens 2048 --dim 256

Compiles log-probability and entropy, alone and with their gradients, and prints one JSON line a
vocabulary: the peak of temporary bytes by XLA's own account, walked over
(``models.product.fused_logprobs``), as training does it here (``train.score``, where few scores
are kept), and whole. Inputs and outputs, and so the gradient of the head's weight, are not
temporary. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from jrl.models.product import fused_logprobs
from jrl.train.score import score_limits
from jrl.types import Head

WAYS = {
    "walked_over": {"at_once": 0, "kept": 0},
    "in_training": score_limits((1, 1)),
    "whole": {"at_once": 2**62, "kept": 2**62},
}
"""Limits of ``fused_logprobs`` by name."""


def temporary_bytes(
    vocab: int, tokens: int, dim: int, dtype: str, *, limits: dict[str, int], backward: bool
) -> int:
    """Of log-probability and entropy at the peak, with their gradients or without."""

    def loss(hidden: jax.Array, weight: jax.Array, ids: jax.Array) -> jax.Array:
        head, one = Head(weight, 0), jnp.float32(1)
        stats = fused_logprobs(hidden, head, ids, one, entropy=True, **limits)
        return stats["logprobs"].sum() + stats["entropy"].sum()

    inputs = (
        jax.ShapeDtypeStruct((1, tokens, dim), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((vocab, dim), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    )
    program = jax.grad(loss, (0, 1)) if backward else loss
    return jax.jit(program).lower(*inputs).compile().memory_analysis().temp_size_in_bytes


def measure(vocab: int, tokens: int, dim: int, dtype: str) -> dict[str, int]:
    """Temporary bytes by name: of each of ``WAYS``, forward and backward."""
    return {
        f"{name}_{way}": temporary_bytes(
            vocab, tokens, dim, dtype, limits=limits, backward=way == "backward"
        )
        for name, limits in WAYS.items()
        for way in ("forward", "backward")
    }


def table(found: dict[int, dict[str, int]]) -> str:
    """The figures in Markdown, MiB."""
    heads = [x for name in WAYS for x in (f"{name.replace('_', ' ')}, forward", "with gradients")]
    lines = [f"| vocabulary | {' | '.join(heads)} |", "| ---:" * (1 + len(heads)) + " |"]
    for vocab, sizes in found.items():
        cells = " | ".join(f"{size / 2**20:,.1f}" for size in sizes.values())
        lines.append(f"| {vocab:,} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the lines, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[2**15, 2**17, 2**18])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--table", type=Path, help="write the figures to this Markdown file")
    options = parser.parse_args()
    found = {}
    for vocab in options.vocab:
        found[vocab] = measure(vocab, options.tokens, options.dim, options.dtype)
        print(json.dumps({"vocab": vocab, "temporary_bytes": found[vocab]}), flush=True)
    if options.table is not None:
        text = [
            "# Temporary bytes of the head",
            f"Written by `python -m benchmarks.head --tokens {options.tokens} --dim {options.dim}"
            f" --dtype {options.dtype} --table {options.table}` on {jax.default_backend()}: MiB at"
            " the peak, by XLA's memory analysis, of log-probability and entropy of every token.",
            table(found),
        ]
        options.table.write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
