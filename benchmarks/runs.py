"""Times many seeds as one compiled run, beside one seed alone and beside a process for each.

python -m benchmarks.runs --seeds 1 4 16 --steps 50
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import rounded, timed
from benchmarks.flags import write
from jrl.config import Config, load_config
from jrl.train import build
from jrl.train.compiled import make_run
from jrl.train.optimizer import make_optimizer
from jrl.train.trainable import check_trainable


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as `jrl train` takes them")
    p.add_argument("--config", default="configs/tiny.toml", help="a run on a procedural task")
    p.add_argument("--seeds", nargs="*", type=int, default=[1, 4, 16], help="seeds in a program")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--in-turn", action="store_true", help="seeds by lax.map, not by vmap")
    p.add_argument("--rounds", type=int, default=3, help="timed runs; the median counts")
    p.add_argument("--processes", type=int, default=16, help="`jrl train` processes; 0: none")
    p.add_argument("--at-once", type=int, default=2, help="of them running at a time")
    p.add_argument("--whole", type=int, default=16, help="seeds of the one process; 0: none")
    p.add_argument("--json", default="")
    return p


def changes(args: argparse.Namespace) -> list[str]:
    """Overrides of every run here: one program, no stop on the way."""
    rest = ["eval.every=0", "checkpoint.every=0", "log.samples_every=0"]
    return ["train.mode=compiled", f"train.steps={args.steps}", *rest, *args.overrides]


# ---------------------------------------------------------------- one program


def whole_run(config: Config) -> Any:
    """The computation of ``jrl train`` for a configuration, key -> (state, curves)."""
    run = build.setup(config)
    check_trainable(run)
    warmup = config.warmup.model_dump(include={"steps", "batch", "learning_rate"})
    whole = make_run(
        method=run.method,
        task=run.task,  # type: ignore[arg-type]
        network=run.network,
        optimizer=make_optimizer(config.optimizer, config.train.steps),
        steps=config.train.steps,
        prompts=config.train.prompts,
        group=config.sampling.group,
        weights=run.rewards.weights,
        warmup=warmup if config.warmup.steps else None,
        eval_problems=config.eval.problems,
    )
    chosen = {
        "learning_rate": config.optimizer.learning_rate,
        "temperature": config.sampling.temperature,
    }
    return lambda key: whole(key, chosen)


def together(config: Config, seeds: int, args: argparse.Namespace) -> dict[str, Any]:
    """``seeds`` runs as one program, or a single one as it is."""
    whole, keys = whole_run(config), jax.vmap(jax.random.key)(config.seed + jnp.arange(seeds))
    every = partial(jax.lax.map, whole) if args.in_turn else jax.vmap(whole)
    many, run_keys = (whole, keys[0]) if seeds == 1 else (every, keys)
    begin = time.perf_counter()
    program: Any = jax.jit(many).lower(run_keys).compile()
    compile_s = time.perf_counter() - begin
    seconds = []
    for _ in range(args.rounds):
        took, (_, curves) = timed(program, run_keys)
        seconds.append(took)
    run_s = statistics.median(seconds)
    return {
        "seeds": seeds,
        "compile_s": compile_s,
        "run_s": run_s,
        "with_compile_s": compile_s + run_s,
        "run_s_per_seed": run_s / seeds,
        "with_compile_s_per_seed": (compile_s + run_s) / seeds,
        "accuracy_after": float(np.mean(curves["accuracy_after"])),
    }


def beside_one(rows: list[dict[str, Any]]) -> None:
    """Adds to every row what a seed costs in it over what one costs alone, if that was measured."""
    one = next((row for row in rows if row["seeds"] == 1), None)
    if one is None:
        return
    for row in rows:
        for name in ("run_s_per_seed", "with_compile_s_per_seed"):
            row[f"{name}_over_one"] = row[name] / one[name]


# ---------------------------------------------------------------- processes


def finish(command: Sequence[str], variables: dict[str, str]) -> float:
    """Wall seconds of a command from its start to its end."""
    begin = time.perf_counter()
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return time.perf_counter() - begin


def environment(cache: str) -> dict[str, str]:
    """This process's environment, with a compile cache of its own; none where it is empty."""
    rest = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    return rest | {"JRL_CACHE_DIR": cache}


def whole(args: argparse.Namespace) -> dict[str, Any]:
    """One process with many seeds, from its start to its end; it compiles and runs once."""
    sizes = {"config": args.config, "steps": args.steps, "seeds": args.whole}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    flags += ["--rounds", "1", "--processes", "0", "--whole", "0"]
    flags += ["--in-turn"] if args.in_turn else []
    command = [sys.executable, "-m", "benchmarks.runs", *args.overrides, *flags]
    seconds = finish(command, environment(""))
    return {"seeds": args.whole, "wall_s": seconds, "wall_s_per_seed": seconds / args.whole}


def apart(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """A ``jrl train`` process for every seed.

    They share a compile cache that is empty at first: those that start first compile, the others
    read.
    """
    count = args.processes
    with tempfile.TemporaryDirectory() as folder:
        shared = environment(str(Path(folder) / "cache"))

        def one(i: int) -> float:
            settings = [
                f"seed={config.seed + i}",
                f"run.dir={json.dumps(str(Path(folder) / str(i)))}",
            ]
            command = [sys.executable, "-m", "jrl", "train", args.config, *changes(args), *settings]
            return finish(command, shared)

        begin = time.perf_counter()
        with ThreadPoolExecutor(args.at_once) as pool:
            each = list(pool.map(one, range(count)))
        wall = time.perf_counter() - begin
        texts = [(Path(folder) / str(i) / "summary.json").read_text() for i in range(count)]
    summaries = [json.loads(text) for text in texts]
    return {
        "processes": count,
        "at_once": args.at_once,
        "wall_s": wall,
        "wall_s_per_seed": wall / count,
        "each_s": each,
        "train_s": sum(summary["train_seconds"] for summary in summaries),
        "accuracy_after": float(np.mean([summary["accuracy_after"] for summary in summaries])),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = load_config(args.config, changes(args))
    rows = [together(config, seeds, args) for seeds in args.seeds]
    beside_one(rows)
    result: dict[str, Any] = {
        "config": args.config,
        "overrides": args.overrides,
        "steps": args.steps,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "by": "lax.map" if args.in_turn else "vmap",
        "together": rows,
    }
    if args.whole:
        result["one_process"] = whole(args)
    if args.processes:
        result["apart"] = apart(args, config)
    if args.whole and args.processes:
        each = [result[name]["wall_s_per_seed"] for name in ("apart", "one_process")]
        result["apart_over_one_process"] = each[0] / each[1]
    return rounded(result)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    write(measure(args), args.json)


if __name__ == "__main__":
    main()
