"""The work that the flags describe, through the library's public functions."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks import flags
from jrl.mesh import make_mesh, replicated
from jrl.methods import get_method
from jrl.methods.base import Method
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.continuous import generate_counted
from jrl.sampling.draw import Law, make_law
from jrl.train.rollout import Groups
from jrl.train.state import init_state, state_shardings
from jrl.types import Array, Network, Params, Rollout, TrainState, stream


class Work(NamedTuple):
    """What both programs start from.

    Attributes:
      args: the flags.
      config: the model.
      network: its functions.
      mesh: where everything lies.
      law: what tokens are drawn from.
      method: GRPO with the KL weight of the flags.
      optimizer: AdamW without decay.
      prompts: for each step, tokens [N, P] int32 and lengths [N] int32.
    """

    args: argparse.Namespace
    config: ModelConfig
    network: Network
    mesh: Mesh
    law: Law
    method: Method
    optimizer: optax.GradientTransformation
    prompts: list[tuple[np.ndarray, np.ndarray]]


def parser(about: str) -> argparse.ArgumentParser:
    """The shared flags and those of this library's own programs."""
    p = flags.parser(about)
    p.add_argument("--slots", type=int, default=0, help="sequences decoded at a time (0: all)")
    p.add_argument(
        "--chunk", type=int, default=4, help="decode steps between two looks at free slots"
    )
    p.add_argument(
        "--gemm",
        type=int,
        default=2048,
        help="rows and columns of the large product that the floor is measured with (0: no floor)",
    )
    return p


def place(args: argparse.Namespace) -> None:
    """Asks JAX for virtual CPU devices; must run before anything is computed."""
    if args.devices > 1:
        jax.config.update("jax_num_cpu_devices", args.devices)


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The shape that the flags describe, as the peers' Qwen3 has it."""
    return ModelConfig(
        vocab_size=args.vocab,
        layers=args.layers,
        embed_dim=args.dim,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        mlp_dim=args.ffn,
        max_length=flags.prompt_width(args) + args.gen_len,
        dtype=args.dtype,
        param_dtype=args.dtype,
        tied_embeddings=not args.untied,
        qk_norm=True,
    )


def build(args: argparse.Namespace) -> Work:
    """Everything but arrays on devices."""
    config = model_config(args)
    width = flags.prompt_width(args)
    steps = flags.prompts(args, args.steps)
    return Work(
        args=args,
        config=config,
        network=transformer(config),
        mesh=make_mesh({"fsdp": args.fsdp, "tensor": args.tp}),
        law=make_law(args.temperature, args.top_k, args.top_p),
        method=get_method("grpo", kl_coef=args.beta),
        optimizer=optax.adamw(flags.LEARNING_RATE, b1=flags.B1, b2=flags.B2, weight_decay=0.0),
        prompts=[_padded(rows, width) for rows in steps],
    )


def _padded(rows: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((len(rows), width), np.int32)
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in rows], np.int32)


def new_state(work: Work) -> tuple[TrainState, TrainState]:
    """A state with weights at random, and where it lies."""
    make = partial(
        init_state, network=work.network, objective=work.method.objective, optimizer=work.optimizer
    )
    key = jax.random.key(work.args.seed)
    shardings = state_shardings(jax.eval_shape(make, key), work.mesh, network=work.network)
    return jax.jit(make, out_shardings=shardings)(key), shardings


def sampler(work: Work) -> Any:
    """Program 1, compiled, as a run on text compiles it; it counts its slot-steps besides."""
    program = partial(
        generate_counted,
        network=work.network,
        group=work.args.group,
        max_new_tokens=work.args.gen_len,
        stop_tokens=(flags.EOS,) if work.args.eos == "natural" else (),
        slots=work.args.slots,
        chunk=work.args.chunk,
    )
    return jax.jit(program, out_shardings=replicated(work.mesh))


def even_share(rollout: Rollout) -> np.ndarray:
    """[N, G, 1] float32, points: the fraction of even ids in each completion; 0 for an empty one.

    The stop token is not counted, since it is not part of the text that the peers judge.
    """
    stopped = (rollout.tokens == flags.EOS) | ~rollout.mask
    kept = ~np.logical_or.accumulate(stopped, axis=-1)
    even = (kept & (rollout.tokens % 2 == 0)).sum(-1)
    return (even / np.maximum(kept.sum(-1), 1)).astype(np.float32)[:, :, None]


class Source:
    """Draws groups for ``groups.collect`` and keeps the time of each hop.

    Attributes:
      rollout_seconds: of each draw, from prompts on the host to completions on the host.
      drawn: the rollouts, on the host.
      slot_steps: decode steps of each draw, summed over the slots in use.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.program = work, sampler(work)
        self.rollout_seconds: list[float] = []
        self.drawn: list[Rollout] = []
        self.slot_steps: list[int] = []

    def draw(self, key: Array, params: Params, step: Any, positions: Any) -> Groups:
        """See ``jrl.train.rollout.Draw``; the prompts are those of step ``step``."""
        begin = time.perf_counter()
        tokens, lengths = self.work.prompts[int(step)]
        sample_key = stream(key, "sample", step)
        drawn = self.program(sample_key, params, tokens, lengths, self.work.law, step, positions)
        rollout, slot_steps = jax.device_get(drawn)
        self.rollout_seconds.append(time.perf_counter() - begin)
        self.drawn.append(rollout)
        self.slot_steps.append(int(slot_steps))
        return Groups(rollout, even_share(rollout), [], {}, {"prompt": positions})
