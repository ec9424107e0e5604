"""The flags that every program here takes, so that each of them does the same work.

Nothing but the standard library is imported: the peers' scripts read them in environments of their
own, where this library is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PAD, BOS, EOS = 0, 1, 2
LEARNING_RATE, B1, B2 = 1e-3, 0.9, 0.95
JAX_PLATFORM = {"cpu": "cpu", "gpu": "cuda,cpu"}
"""Names of platforms here, and JAX's, the first of which programs run on."""
WARMUP = 2
"""Steps left out of every median; the first compile programs."""


def parser(about: str) -> argparse.ArgumentParser:
    """A parser with the flags of the model, the work and the output."""
    p = argparse.ArgumentParser(description=about)
    model = p.add_argument_group("model, of the Qwen3 family, weights at random")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--dim", type=int, default=256)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, default=2)
    model.add_argument("--head-dim", type=int, default=64)
    model.add_argument("--ffn", type=int, default=1024)
    model.add_argument("--vocab", type=int, default=8192)
    model.add_argument("--untied", action="store_true", help="an output matrix of its own")
    model.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    work = p.add_argument_group("work")
    work.add_argument("--batch", type=int, default=4, help="prompts a step")
    work.add_argument("--group", type=int, default=8, help="completions a prompt")
    work.add_argument("--micro", type=int, default=0, help="prompts a microbatch (0: all)")
    work.add_argument("--prompt-len", type=int, default=64, help="tokens, the first one included")
    work.add_argument("--gen-len", type=int, default=64, help="most new tokens")
    work.add_argument("--turns", type=int, default=12, help="most turns of an episode")
    work.add_argument(
        "--concurrency", type=int, default=64, help="episodes that a peer plays at a time"
    )
    work.add_argument("--steps", type=int, default=8)
    work.add_argument("--beta", type=float, default=0.04, help="KL weight; 0: no reference")
    work.add_argument("--temperature", type=float, default=1.0)
    work.add_argument("--top-p", type=float, default=1.0)
    work.add_argument("--top-k", type=int, default=0, help="0: all tokens")
    work.add_argument(
        "--eos",
        default="natural",
        choices=["natural", "never"],
        help="never: no token ends a completion, so that each has gen-len tokens",
    )
    work.add_argument("--ragged", action="store_true", help="prompt lengths differ")
    work.add_argument(
        "--ragged-over", action="store_true", help="with --ragged: some are above prompt-len"
    )
    work.add_argument("--seed", type=int, default=0, help="of weights, prompts and draws")
    place = p.add_argument_group("placement")
    place.add_argument(
        "--platform",
        default="auto",
        choices=["auto", *JAX_PLATFORM],
        help="auto: what there is",
    )
    place.add_argument("--devices", type=int, default=1, help="virtual CPU devices")
    place.add_argument("--fsdp", type=int, default=1)
    place.add_argument("--tp", type=int, default=1)
    p.add_argument("--json", default="", help="also write the result to this file")
    return p


def jax_platform(args: argparse.Namespace) -> str | None:
    """JAX's name for ``--platform``; None to leave the choice to it."""
    return JAX_PLATFORM.get(args.platform)


def progress(name: str, row: dict[str, Any]) -> None:
    """A line on stderr at once, so that a program that is cut off leaves what it has measured."""
    figures = {n: round(x, 4) if isinstance(x, float) else x for n, x in row.items()}
    sys.stderr.write(json.dumps({"row": name} | figures) + "\n")
    sys.stderr.flush()


def prompt_width(args: argparse.Namespace) -> int:
    """Tokens of the longest prompt that these flags can make."""
    return args.prompt_len * (2 if args.ragged and args.ragged_over else 1)


def prompts(args: argparse.Namespace, count: int) -> list[list[list[int]]]:
    """``count`` steps of ``args.batch`` prompts each, tokens with the first one of every text."""
    import numpy as np

    rng = np.random.default_rng(args.seed)
    steps = []
    for step in range(count):
        rows = []
        for _ in range(args.batch):
            size = args.prompt_len - 1
            if args.ragged:
                size = int(rng.integers(min(8, size - 1), size))
                size += args.prompt_len if args.ragged_over and step % 2 else 0
            rows.append([BOS, *rng.integers(3, args.vocab, size).tolist()])
        steps.append(rows)
    return steps


def write(result: dict[str, Any], path: str) -> None:
    """Prints the result as JSON and, where a path is given, writes it there, too."""
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if path:
        Path(path).write_text(text + "\n", encoding="utf-8")
