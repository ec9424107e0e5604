"""Times whole GRPO steps and prints one JSON; ``benchmarks/README.md`` says what the figures mean.

python -m benchmarks.step --eos never --steps 10
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import phases
from benchmarks.clock import peak_memory_mb, processor_seconds, rounded, steady, timed
from benchmarks.flags import progress
from benchmarks.rollout import describe, sampling_figures
from benchmarks.work import Source, Work, build, new_state, report
from jrl.collect.collector import Collector
from jrl.collect.packing import Packer
from jrl.collect.plan import Setting
from jrl.mesh import batch_shards, replicated
from jrl.system.compile_cache import CompileCounter
from jrl.train.loop import policy_weights
from jrl.train.step import compile_step, make_step
from jrl.types import Batch, TrainState


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Trains ``args.steps`` steps."""
    with CompileCounter() as compiles:
        work = build(args)
        with jax.set_mesh(work.mesh):
            state, shardings = new_state(work)
            source, counts = Source(work), []
            walls, updates, rewards, padding = [], [], [], []
            step = compile_step(_step(work), shardings, work.mesh)
            pack, first_step_cpu = _packer(work), 0.0
            sampling_params = jax.device_put(work.sampling_params, replicated(work.mesh))
            for i in range(args.steps):
                begin = time.perf_counter()
                batch = _collect(work, source, pack, state, i)
                seconds, (state, metrics) = timed(step, state, batch, sampling_params)
                walls.append(time.perf_counter() - begin)
                updates.append(seconds)
                first_step_cpu = first_step_cpu or processor_seconds()
                row = {"step_s": walls[-1], "rollout_s": source.rollout_seconds[-1]}
                progress(f"step {i + 1}", row | {"train_s": seconds, "compiles": compiles.count})
                counts.append(compiles.count)
                rewards.append(float(metrics["reward"]))
                padding.append(float(metrics["padding"]))
            used = peak_memory_mb()
            policy = state.params["policy"]
            result = sampling_figures(work, policy, source, walls, counts)
            reference = phases.reference_seconds(work, state, batch)
            result |= {
                "reference_s": reference,
                "train_s": steady(updates) - (reference or 0.0),
                "other_s": steady(_rest(walls, updates, source.rollout_seconds)),
                "padding": steady(padding),
                "first_step_cpu_s": first_step_cpu,
                "max_rss_mb": used,
                "reward_first": rewards[0],
                "reward_last": rewards[-1],
            }
            if args.gemm:
                names = ("prefill", "decode", "reference", "train")
                seconds = {name: result[f"{name}_s"] for name in names}
                result["floor"] = phases.against_floor(work, policy, source.drawn[-1], seconds)
            return rounded(describe(work, state) | result)


def _step(work: Work) -> Any:
    return make_step(
        network=work.network,
        objective=work.method.objective,
        optimizer=work.optimizer,
        microbatches=phases.microbatches(work),
    )


def _packer(work: Work) -> Packer | None:
    if work.args.no_packing:
        return None
    return Packer(phases.microbatches(work), batch_shards(work.mesh))


def _rest(walls: list[float], *parts: list[float]) -> list[float]:
    """Remainder of each step's time without its parts."""
    return [wall - sum(each) for wall, *each in zip(walls, *parts, strict=True)]


def _collect(
    work: Work, source: Source, pack: Packer | None, state: TrainState, step: int
) -> Batch:
    setting = Setting(work.method, work.args.batch, 1, np.ones(1))
    collector = Collector(source, setting, work.mesh, pack)
    weights, cursor = policy_weights(state), step * work.args.batch
    batch, _, _ = collector.collect(state.key, weights, step=step, cursor=cursor)
    return batch


def main(argv: Sequence[str] | None = None) -> None:
    report(__doc__ or "", argv, measure)


if __name__ == "__main__":
    main()
