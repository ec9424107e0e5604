"""Parts of a step's time, each compared with the machine's limit.

A phase inside a program cannot be timed from outside. It is compiled once more as a program of its
own, from the same function, and run on the same inputs; what is left of the whole is the rest.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from benchmarks import floor
from benchmarks.clock import typical
from benchmarks.work import Work
from jrl.mesh import replicated
from jrl.sampling.params import SamplingParams
from jrl.sampling.slots import prefill
from jrl.train.batch_rows import in_parts
from jrl.train.score import score
from jrl.types import Batch, Params, Rollout, Stats, TrainState

ROUNDS = 5


def prefill_seconds(work: Work, params: Params) -> float:
    """Preparing the weights and prefilling the prompts of the last step."""

    def run(params: Params, tokens: Any, lengths: Any) -> Any:
        return prefill(work.network.prepare(params), tokens, lengths, network=work.network)

    return typical(jax.jit(run), params, *work.prompts[-1], rounds=ROUNDS)


def microbatches(work: Work) -> int:
    """Into how many parts the flags divide a batch."""
    return work.args.batch // work.args.micro if work.args.micro else 1


def reference_seconds(work: Work, state: TrainState, batch: Batch) -> float | None:
    """Scoring a batch with the reference; None where there is none."""
    if "ref" not in state.frozen:
        return None

    def run(params: Params, batch: Batch, sampling_params: SamplingParams) -> Stats:
        options = {"network": work.network, "value": None, "want": frozenset({"ref_logprobs"})}
        return in_parts(
            lambda part: score(params, part, sampling_params, **options), batch, microbatches(work)
        )

    program = jax.jit(run, out_shardings=replicated(work.mesh))
    return typical(program, state.params | state.frozen, batch, work.sampling_params, rounds=ROUNDS)


def against_floor(
    work: Work, params: Params, rollout: Rollout, seconds: dict[str, float | None]
) -> dict[str, Any]:
    """Rates of the machine, useful work of the last step, and the fraction reached.

    Args:
      work: what was run.
      params: the policy's.
      rollout: the completions of the step.
      seconds: measured, by the names "prefill", "decode", "reference" and "train".
    """
    config = work.config
    done = floor.Completions(np.asarray(rollout.prompt_lengths), np.asarray(rollout.lengths))
    weights_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    large = floor.gemm_rate(work.args.gemm, config.dtype)
    copy = floor.copy_rate(max(work.args.gemm // 8, 1))
    forward = floor.score_flops(config, done)
    flops = {
        "prefill": floor.prefill_flops(config, done),
        "decode": floor.decode_flops(config, done),
        "reference": forward,
        "train": 3 * forward,
    }
    least = {name: flops[name] / large for name in flops if seconds.get(name)}
    read = floor.decode_bytes(config, done, weights_bytes)
    return {
        "gemm_gflop_s": large / 1e9,
        "copy_gb_s": copy / 1e9,
        "useful_gflop": {name: flops[name] / 1e9 for name in least},
        "floor_s": least,
        "fraction": floor.fractions(seconds, least),
        "decode_gb": read / 1e9,
        "decode_bandwidth_fraction": read / copy / (seconds["decode"] or float("inf")),
    }
