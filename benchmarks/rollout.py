"""Times the sampler and prints one JSON; ``benchmarks/README.md`` says what the figures mean.

python -m benchmarks.rollout --eos never --steps 10
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import phases
from benchmarks.clock import peak_memory_mb, rounded, steady
from benchmarks.flags import WARMUP, progress
from benchmarks.work import Source, Work, build, new_state, report
from jrl.collect.sources import simple_request
from jrl.system.compile_cache import CompileCounter
from jrl.types import Params, TrainState


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Draws ``args.steps`` batches with a policy that stays as it is."""
    with CompileCounter() as compiles:
        work = build(args)
        with jax.set_mesh(work.mesh):
            state, _ = new_state(work)
            source, walls, counts = Source(work), [], []
            policy = state.params["policy"]
            for step in range(args.steps):
                begin = time.perf_counter()
                request = simple_request(
                    state.key, {"policy": policy}, np.int32(step), positions(work, step)
                )
                source.draw(request)
                walls.append(time.perf_counter() - begin)
                progress(f"step {step + 1}", {"step_s": walls[-1], "compiles": compiles.count})
                counts.append(compiles.count)
            used = peak_memory_mb()
            result = sampling_figures(work, policy, source, walls, counts)
            result["max_rss_mb"] = used
            result |= {"reference_s": None, "train_s": None}
            if args.gemm:
                seconds = {"prefill": result["prefill_s"], "decode": result["decode_s"]}
                result["floor"] = phases.against_floor(work, policy, source.drawn[-1], seconds)
            return rounded(describe(work, state) | result)


def positions(work: Work, step: int) -> np.ndarray:
    """[N] int32: the places of a step's prompts in the run."""
    n = work.args.batch
    return np.arange(step * n, (step + 1) * n, dtype=np.int32)


def sampling_figures(
    work: Work, policy: Params, source: Source, walls: Sequence[float], counts: Sequence[int]
) -> dict[str, Any]:
    """Medians over the steady steps, of what every program here reports."""
    tokens = [int(rollout.mask.sum()) for rollout in source.drawn]
    rates = [n / s for n, s in zip(tokens, source.rollout_seconds, strict=True)]
    rollout, before = steady(source.rollout_seconds), phases.prefill_seconds(work, policy)
    return {
        "step_s": steady(walls),
        "rollout_s": rollout,
        "prefill_s": before,
        "decode_s": max(rollout - before, 0.0),
        "rollout_tok_s": steady(rates),
        "tokens": steady(tokens),
        "slot_use": steady(source.slot_use),
        "first_step_s": walls[0],
        "compiles": counts[-1],
        "late_compiles": counts[-1] - counts[min(WARMUP, len(counts)) - 1],
    }


def describe(work: Work, state: TrainState) -> dict[str, Any]:
    """Configuration and device of the run."""
    device = jax.devices()[0]
    return {
        "library": "jrl",
        "jax": jax.__version__,
        "device": f"{work.mesh.size} x {device.device_kind}",
        "args": vars(work.args),
        "parameters": sum(x.size for x in jax.tree.leaves(state.params["policy"])),
    }


def main(argv: Sequence[str] | None = None) -> None:
    report(__doc__ or "", argv, measure)


if __name__ == "__main__":
    main()
