"""Times GRPO on FrozenLake with episodes and updates in one compiled program; prints one JSON.

python -m benchmarks.episodes --layers 2 --dim 64 --heads 4 --kv-heads 4 --head-dim 16 --ffn 128 \
    --vocab 32 --batch 8 --group 8 --turns 12 --beta 0 --steps 8

A run of several steps is one call of one program, so that a step's time is the run's, divided.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import optax

from benchmarks import flags
from benchmarks.clock import peak_memory_mb, rounded, timed
from benchmarks.work import model_config, parser, place, start_weights
from jrl.episodes import get_env
from jrl.methods import get_method
from jrl.models.transformer import transformer
from jrl.sampling.params import make_sampling_params
from jrl.system.compile_cache import CompileCounter
from jrl.train.compiled import iterate, make_iteration
from jrl.train.state import init_state
from jrl.train.step import make_step


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs of ``args.steps`` training steps each, the first one with its compilation."""
    env = get_env("gridworld", start="anywhere", turns=args.turns)
    args.prompt_len, args.gen_len = env.prompt_tokens, env.completion_tokens
    network = transformer(model_config(args))
    method = get_method("grpo", kl_coef=args.beta)
    optimizer = optax.adamw(flags.LEARNING_RATE, b1=flags.B1, b2=flags.B2, weight_decay=0.0)
    common = {"network": network, "objective": method.objective, "optimizer": optimizer}
    iteration = make_iteration(
        make_step(**common),
        method=method,
        task=env,
        network=network,
        weights={"reward": 1.0},
        prompts=args.batch,
        group=args.group,
        slots=args.slots,
        chunk=args.chunk,
    )
    key = jax.random.key(args.seed)
    params = jax.jit(lambda k: start_weights(k, network))(key)
    state = jax.jit(lambda policy: init_state(key, policy, **common))(params)
    sampling_params = make_sampling_params(args.temperature, args.top_k, args.top_p)
    run = jax.jit(
        lambda state: iterate(iteration, state, iteration.begin(state), sampling_params, args.steps)
    )
    with CompileCounter() as compiles:
        begin = time.perf_counter()
        program = run.lower(state).compile()
        compiled = time.perf_counter() - begin
        walls, turns = [], 0.0
        for _ in range(flags.WARMUP + 1):
            seconds, (_, _, metrics) = timed(program, state)
            walls.append(seconds / args.steps)
            turns = float(metrics["turns"].mean())
    step_s = statistics.median(walls)
    result = {
        "step_s": step_s,
        "first_step_s": compiled + step_s,
        "turns": turns,
        "env_steps_s": turns * args.batch * args.group / step_s,
        "compiles": compiles.count,
        "max_rss_mb": peak_memory_mb(),
        "reward_first": float(metrics["reward"][0]),
        "reward_last": float(metrics["reward"][-1]),
    }
    about = {"library": "jrl", "jax": jax.__version__, "args": vars(args)}
    return rounded(about | result)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser(__doc__ or "").parse_args(argv)
    place(args)
    flags.write(measure(args), args.json)


if __name__ == "__main__":
    main()
