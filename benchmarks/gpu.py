"""Decode bandwidth, prefill rate and training rate of large shapes on one accelerator.

python -m benchmarks.gpu --shapes 1.7b 8b --json gpu.json --table benchmarks/gpu.md

Weights are random and bfloat16. Each figure is a fraction of what the same device reached on a bare
copy or a bare product just before. A setting that does not fit the device is reported as such.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import floor
from benchmarks.clock import rounded, timed, typical
from benchmarks.flags import write
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.models.config import ModelConfig
from jrl.models.kernels import ATTENTION, Shape, kernel_for
from jrl.models.transformer import REMAT, transformer
from jrl.sampling.continuous import generate
from jrl.sampling.draw import make_law
from jrl.sampling.engine import prefill
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step
from jrl.types import Batch, TrainState

SHAPES: dict[str, dict[str, int | bool]] = {
    "tiny": {
        "layers": 1,
        "embed_dim": 32,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "mlp_dim": 64,
        "vocab_size": 64,
    },
    "1.7b": {
        "layers": 28,
        "embed_dim": 2048,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "mlp_dim": 6144,
        "vocab_size": 151_936,
    },
    "8b": {
        "layers": 36,
        "embed_dim": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "mlp_dim": 12_288,
        "vocab_size": 151_936,
        "tied_embeddings": False,
    },
}
"""Shapes of Qwen3 models, and one for a quick look."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--shapes", nargs="+", default=["1.7b", "8b"], choices=sorted(SHAPES))
    p.add_argument(
        "--batches", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    )
    p.add_argument("--group", type=int, default=1, help="rows that share a prompt, where they fit")
    p.add_argument("--prompt-len", type=int, default=512)
    p.add_argument("--gen-len", type=int, default=1024)
    p.add_argument("--packed", nargs="*", type=int, default=[4096, 16_384], help="training tokens")
    p.add_argument("--remat", default="dots", choices=REMAT)
    p.add_argument("--attention", default="auto", choices=ATTENTION, help="on a GPU auto is cuDNN")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--gemm", type=int, default=8192, help="side of the bare product")
    p.add_argument("--copy-mb", type=int, default=4096, help="size of the bare copy")
    p.add_argument("--json", default="")
    p.add_argument("--table", default="", help="append the record to this file")
    return p


def model_config(shape: str, max_length: int) -> ModelConfig:
    """A shape in bfloat16, weights and all."""
    sizes: dict[str, Any] = dict(SHAPES[shape])
    dtypes = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    return ModelConfig(max_length=max_length, qk_norm=True, **dtypes, **sizes)


def tokens_like(rng: np.random.Generator, config: ModelConfig, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(3, config.vocab_size, shape), jnp.int32)


def sampling_row(
    config: ModelConfig, params: Any, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Decode and prefill of ``batch`` rows: times, and what they move and compute."""
    network, rng = transformer(config, attention=args.attention), np.random.default_rng(0)
    group = args.group if batch % args.group == 0 else 1
    n, p, t = batch // group, args.prompt_len, args.gen_len
    prompts, lengths = tokens_like(rng, config, n, p), jnp.full(n, p, jnp.int32)
    ids, key = jnp.arange(n, dtype=jnp.int32), jax.random.key(0)
    draw = partial(generate, network=network, group=group, max_new_tokens=t, stop_tokens=())
    program = jax.jit(draw)
    inputs = (key, params, prompts, lengths, make_law(), jnp.int32(0), ids)
    whole = typical(program, *inputs, rounds=args.rounds)

    def only_prefill(params: Any, prompts: jax.Array, lengths: jax.Array) -> Any:
        return prefill(network.prepare(params), prompts, lengths, network=network)

    before = typical(jax.jit(only_prefill), params, prompts, lengths, rounds=args.rounds)
    drawn = floor.Completions(np.full(n, p), np.full((n, group), t))
    decode_s = max(whole - before, 1e-9)
    return {
        "batch": batch,
        "group": group,
        "prefill_attention": kernel_for(args.attention, config, Shape(n, p, p), steady=True),
        "prefill_s": before,
        "decode_s": decode_s,
        "tok_s": batch * t / decode_s,
        "decode_bytes_s": floor.decode_bytes(config, drawn, weight_bytes(params)) / decode_s,
        "prefill_flop_s": floor.prefill_flops(config, drawn) / before,
    }


def training_row(config: ModelConfig, packed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One GRPO update on one group whose prompt and completions are ``packed`` tokens together."""
    network, p = transformer(config, attention=args.attention, remat=args.remat), args.prompt_len
    members = packed // p - 1
    objective, mesh = get_method("grpo").objective, make_mesh({"data": 1})
    optimizer = optax.adamw(1e-6)
    make = partial(init_state, network=network, objective=objective, optimizer=optimizer)
    key = jax.random.key(0)
    shardings = state_shardings(jax.eval_shape(make, key), mesh, network=network)
    step = make_step(network=network, objective=objective, optimizer=optimizer)
    batch, law = group_of(config, members, p), make_law()
    with jax.set_mesh(mesh):
        state = jax.jit(make, out_shardings=shardings)(key)
        kept = must_be_kept(state)
        program: Any = compile_step(step, shardings, mesh)
        compiled = program.lower(state, batch, law).compile()
        seconds = []
        for _ in range(args.rounds + 1):
            took, (state, _) = timed(compiled, state, batch, law)
            seconds.append(took)
    drawn = floor.Completions(np.array([p]), np.full((1, members), p))
    used = compiled.memory_analysis()
    held = used.argument_size_in_bytes + used.temp_size_in_bytes
    took = float(np.median(seconds[1:]))
    return {
        "packed_tokens": p * (1 + members),
        "attention": kernel_for(args.attention, config, Shape(members, p, 2 * p), steady=True),
        "step_s": took,
        "flop_s": 3 * floor.score_flops(config, drawn) / took,
        "held_bytes": held,
        "kept_bytes": kept,
    }


def group_of(config: ModelConfig, members: int, size: int) -> Batch:
    """One prompt with completions as long as itself, and rewards that differ."""
    rng, shape = np.random.default_rng(0), (1, members, size)
    exist = jnp.ones((1, members), bool)
    return Batch(
        prompt_tokens=tokens_like(rng, config, 1, size),
        prompt_lengths=jnp.full(1, size, jnp.int32),
        tokens=tokens_like(rng, config, *shape),
        lengths=jnp.full((1, members), size, jnp.int32),
        mask=jnp.ones(shape, bool),
        rewards=jnp.arange(members, dtype=jnp.float32).reshape(1, members, 1),
        reward_weights=jnp.ones(1, jnp.float32),
        members=exist,
        baseline=~exist,
        truncated=~exist,
        stats={"sampler_logprobs": jnp.full(shape, -np.log(config.vocab_size), jnp.float32)},
    )


def weight_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def must_be_kept(state: TrainState) -> int:
    """Bytes of weights, optimiser state and one gradient."""
    return weight_bytes(state.params) * 2 + weight_bytes(state.opt_state)


def attempt(run: Any) -> dict[str, Any]:
    """A row, or what the device said when it had no room for it."""
    try:
        return run()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"does_not_fit": str(error).splitlines()[0][:160]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every row of every shape, with its fraction of the bare rates."""
    gemm, copy = floor.gemm_rate(args.gemm, "bfloat16"), floor.copy_rate(args.copy_mb)
    shapes = {}
    for shape in args.shapes:
        config = model_config(shape, args.prompt_len + args.gen_len)
        params = jax.jit(transformer(config).init)(jax.random.key(0))
        sampling = []
        for batch in args.batches:
            row = attempt(partial(sampling_row, config, params, batch, args))
            if "decode_s" in row:
                row["decode_fraction"] = row["decode_bytes_s"] / copy
                row["prefill_fraction"] = row["prefill_flop_s"] / gemm
            sampling.append({"batch": batch} | row)
        del params
        training = []
        for packed in args.packed:
            row = attempt(partial(training_row, config, packed, args))
            if "step_s" in row:
                row["fraction"] = row["flop_s"] / gemm
                row["memory_over_kept"] = row["held_bytes"] / row["kept_bytes"]
            training.append({"packed_tokens": packed} | row)
        shapes[shape] = {"sampling": sampling, "training": training}
    device = jax.devices()[0]
    return rounded(
        {
            "device": device.device_kind,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "gemm_tflop_s": gemm / 1e12,
            "copy_gb_s": copy / 1e9,
            "remat": args.remat,
            "shapes": shapes,
        }
    )


def table(result: dict[str, Any], command: str) -> str:
    """The record as Markdown: machine, date, command, figures."""
    lines = [
        f"\n## {result['device']}, {result['date']}",
        f"\n`{command}`\n",
        f"jax {result['jax']}; bare product {result['gemm_tflop_s']} TFLOP/s in bfloat16; bare "
        f"copy {result['copy_gb_s']} GB/s, read and written; rematerialisation {result['remat']}.",
    ]
    sampling = ("batch", "decode_s", "tok_s", "decode_fraction", "prefill_s", "prefill_fraction")
    training = ("packed_tokens", "attention", "step_s", "fraction", "memory_over_kept")
    for shape, rows in result["shapes"].items():
        for kind, names in (("sampling", sampling), ("training", training)):
            if rows[kind]:
                lines += [f"\n{shape}, {kind}:\n", f"| {' | '.join(names)} |"]
                lines += ["|" + " --- |" * len(names)]
            for row in rows[kind]:
                cells = [str(row.get(name, "does not fit")) for name in names]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    result = measure(args)
    given = sys.argv[1:] if argv is None else argv
    record = table(result, shlex.join(["python", "-m", "benchmarks.gpu", *given]))
    write(result, args.json)
    if args.table:
        with Path(args.table).open("a", encoding="utf-8") as file:
            file.write(record)


if __name__ == "__main__":
    main()
