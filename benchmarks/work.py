"""The work that the flags describe, through the library's public functions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks import flags
from jrl.collect.sources import Groups, entries
from jrl.collect.sources_text import compiled_stream
from jrl.errors import UserError
from jrl.mesh import make_mesh, replicated
from jrl.methods import get_method
from jrl.methods.base import Method
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.generate import generate
from jrl.sampling.params import SamplingParams, make_sampling_params
from jrl.sampling.slot_sizes import SlotPlan
from jrl.setup.compiler import compiler_options
from jrl.system.compile_cache import return_compiler_memory
from jrl.train.state import init_state, state_shardings
from jrl.types import Array, Network, Params, Rollout, StopReason, TrainState
from jrl.types.asks import DrawRequest

DEVIATION = 0.01
"""Of the matrices at the start; see ``start_weights``."""


class Work(NamedTuple):
    """Common inputs of both programs.

    Attributes:
      args: the flags.
      config: the model.
      network: its functions.
      mesh: where everything lies.
      sampling_params: what tokens are drawn from.
      method: GRPO with the KL weight of the flags.
      optimizer: AdamW without decay.
      prompts: for each step, tokens [N, P] int32 and lengths [N] int32.
    """

    args: argparse.Namespace
    config: ModelConfig
    network: Network
    mesh: Mesh
    sampling_params: SamplingParams
    method: Method
    optimizer: optax.GradientTransformation
    prompts: list[tuple[np.ndarray, np.ndarray]]


def parser(about: str) -> argparse.ArgumentParser:
    """The shared flags and those of this library's own programs."""
    p = flags.parser(about)
    p.add_argument("--slots", type=int, default=0, help="sequences decoded at a time (0: all)")
    p.add_argument(
        "--chunk", type=int, default=4, help="decode steps between refills of free slots"
    )
    p.add_argument("--no-packing", action="store_true", help="train on completions as drawn")
    p.add_argument(
        "--gemm",
        type=int,
        default=2048,
        help="rows and columns of the large product that the floor is measured with (0: no floor)",
    )
    return p


def place(args: argparse.Namespace) -> None:
    """Readies the process as a run does, with virtual CPU devices; before anything is computed."""
    return_compiler_memory()
    if (platform := flags.jax_platform(args)) is not None:
        jax.config.update("jax_platforms", platform)
    if args.devices > 1:
        jax.config.update("jax_num_cpu_devices", args.devices)


def report(
    text: str, argv: Sequence[str] | None, measure: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Measures what the flags say and prints it; a setting that cannot be is an error of theirs."""
    options = parser(text)
    args = options.parse_args(argv)
    place(args)
    try:
        result = measure(args)
    except UserError as error:
        options.error(str(error))
    flags.write(result, args.json)


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


def check(args: argparse.Namespace) -> None:
    """Flags that no setting can have are named before anything is built.

    Raises:
      UserError: a count below its least, or microbatches that do not divide a batch.
    """
    least = dict.fromkeys(("layers", "batch", "group", "gen_len", "steps", "devices"), 1)
    for name, low in (least | {"vocab": flags.EOS + 2, "prompt_len": 2}).items():
        if (value := getattr(args, name)) < low:
            raise UserError(f"--{name.replace('_', '-')} {value}: at least {low}")
    if args.micro < 0 or (args.micro and args.batch % args.micro):
        fits = [n for n in range(1, args.batch + 1) if args.batch % n == 0]
        raise UserError(
            f"--micro {args.micro} does not divide --batch {args.batch}; choose 0 or one of {fits}"
        )


def build(args: argparse.Namespace) -> Work:
    """Everything but arrays on devices."""
    check(args)
    config = model_config(args)
    width = flags.prompt_width(args)
    steps = flags.prompts(args, args.steps)
    return Work(
        args=args,
        config=config,
        network=transformer(config),
        mesh=make_mesh({"fsdp": args.fsdp, "tensor": args.tp}),
        sampling_params=make_sampling_params(args.temperature, args.top_k, args.top_p),
        method=get_method("grpo", kl_coef=args.beta),
        optimizer=optax.adamw(flags.LEARNING_RATE, b1=flags.B1, b2=flags.B2, weight_decay=0.0),
        prompts=[_padded(rows, width) for rows in steps],
    )


def _padded(rows: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((len(rows), width), np.int32)
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in rows], np.int32)


def start_weights(key: Array, network: Network) -> Params:
    """Random weights as small as Tunix draws them, with feed-forward parts that begin at zero.

    A policy's first steps decide how long its completions get, and with them how much work there
    is when a token may end them; so both libraries begin alike. The policy is almost uniform.
    """
    params = network.init(key)

    def small(x: Array) -> Array:
        return (x / jnp.std(x.astype(jnp.float32)) * DEVIATION).astype(x.dtype)

    layers = params["layers"]
    attention = {n: small(x) if n in "qkvo" else x for n, x in layers["attention"].items()}
    zeros = jax.tree.map(jnp.zeros_like, layers["mlp"])
    tables = {name: small(params[name]) for name in ("embed", "head") if name in params}
    return params | tables | {"layers": layers | {"attention": attention, "mlp": zeros}}


def new_state(work: Work) -> tuple[TrainState, TrainState]:
    """A state with weights at random, and where it lies."""
    objective, network = work.method.objective, work.network

    def make(seed: Any) -> TrainState:
        key = jax.random.key(seed)
        params = start_weights(key, network)
        return init_state(
            key, params, network=network, objective=objective, optimizer=work.optimizer
        )

    seed = np.uint32(work.args.seed)
    shardings = state_shardings(jax.eval_shape(make, seed), work.mesh, network=work.network)
    options = compiler_options(work.mesh)
    state = jax.jit(make, out_shardings=shardings, compiler_options=options)(seed)
    return state, shardings


def sampler(work: Work) -> Any:
    """Program 1, compiled, as a run on text compiles it; it counts its slot-steps besides."""
    program = partial(
        generate,
        network=work.network,
        group=work.args.group,
        max_new_tokens=work.args.gen_len,
        stop_tokens=(flags.EOS,) if work.args.eos == "natural" else (),
        slots=SlotPlan(work.args.slots, chunk=work.args.chunk),
    )
    options = compiler_options(work.mesh)
    return jax.jit(program, out_shardings=replicated(work.mesh), compiler_options=options)


def even_share(rollout: Rollout) -> np.ndarray:
    """[N, G, 1] float32, points: the fraction of even ids in each completion; 0 for an empty one.

    Only tokens in the mask count.
    """
    even = (rollout.mask & (rollout.tokens % 2 == 0)).sum(-1)
    return (even / np.maximum(rollout.mask.sum(-1), 1)).astype(np.float32)[:, :, None]


def without_stop(rollout: Rollout) -> Rollout:
    """The rollout, on the host, with the tokens that ended a completion left out of the mask.

    Tunix takes them off before it judges and trains. Completions stay as long as they are drawn at
    first when nothing teaches a policy to end them, and so the work stays the same.
    """
    stopped = (rollout.stop == StopReason.STOP_TOKEN)[:, :, None]
    last = np.arange(rollout.mask.shape[-1])[None, None] == rollout.lengths[:, :, None] - 1
    mask = rollout.mask & ~(stopped & last)
    return rollout.replace(
        mask=mask,
        sampler_logprobs=np.where(mask, rollout.sampler_logprobs, np.float32(0)),
        versions=np.where(mask, rollout.versions, np.int32(-1)),
    )


class Source:
    """Draws groups for a ``Collector`` and keeps the time of each hop.

    Attributes:
      rollout_seconds: of each draw, from prompts on the host to completions on the host.
      drawn: the rollouts, on the host, as they are trained on.
      slot_use: of each draw, slot-steps that drew a token, one that ends a completion included.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.program = work, sampler(work)
        self.rollout_seconds: list[float] = []
        self.drawn: list[Rollout] = []
        self.slot_use: list[float] = []

    def order(self, tickets: Any) -> Any:
        """As ``jrl.collect.sources.Source``: a prompt for each ticket."""
        return tickets

    def finish(self, complete: bool) -> None:
        """Nothing is held between draws."""

    def draw(self, request: DrawRequest) -> Groups:
        """As ``jrl.collect.sources.Source``; the prompts are those of the step."""
        begin = time.perf_counter()
        (tickets, _), step = entries(request), request.step
        tokens, lengths = self.work.prompts[int(step)]
        sample_key = compiled_stream(request.key, "sample", step)
        params, sampling_params = request.weights["policy"], self.work.sampling_params
        drawn = self.program(sample_key, params, tokens, lengths, sampling_params, step, tickets)
        rollout, slot_steps = jax.device_get(drawn)
        self.rollout_seconds.append(time.perf_counter() - begin)
        live = int(rollout.mask.sum())
        rollout = without_stop(rollout) if self.work.args.eos == "natural" else rollout
        self.drawn.append(rollout)
        self.slot_use.append(live / int(slot_steps))
        return Groups(rollout, even_share(rollout), [], {}, {"prompt": tickets})
