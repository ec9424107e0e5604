"""Training rows of ``benchmarks.gpu``: one update with what fits the device, timed and profiled."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import floor, kernels
from benchmarks.clock import timed
from benchmarks.gpu_programs import (
    Measured,
    attempt,
    fitting,
    keep_text,
    memory_limit,
    repeated,
    show_kernels,
    tokens_like,
    weight_bytes,
)
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.models.attention.choice import Shape, kernel_for
from jrl.models.config import ModelConfig
from jrl.models.lora import Lora, count_trained, with_adapters
from jrl.models.transformer import transformer
from jrl.sampling.params import make_sampling_params
from jrl.train.remat import ORDER
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step
from jrl.types import Batch, Network, TrainState


class Update(NamedTuple):
    """A training row: a prompt and completions of it, all of one length.

    Attributes:
      prompt: tokens, counted once.
      completions: how many.
      new: tokens of each.
    """

    prompt: int
    completions: int
    new: int

    @classmethod
    def of(cls, packed: int, completions: int, prompt: int) -> Update:
        """``packed`` tokens in so many completions; 0 for those as long as the prompt."""
        completions = completions or packed // prompt - 1
        new = (packed - prompt) // max(completions, 1)
        if completions < 1 or new < 1:
            raise ValueError(
                f"--packed {packed} does not hold a prompt of --prompt-len {prompt} and "
                f"{max(completions, 1)} completions; raise it"
            )
        return cls(prompt, completions, new)

    @property
    def tokens(self) -> int:
        """In all."""
        return self.prompt + self.completions * self.new

    def drawn(self) -> floor.Completions:
        """Lengths of what is trained on."""
        return floor.Completions(np.array([self.prompt]), np.full((1, self.completions), self.new))


class Variant(NamedTuple):
    """Setting of a training row: the number of layers, and a name of ``REMAT``."""

    layers: int
    remat: str


def variants(config: ModelConfig, remat: str) -> Iterator[Variant]:
    """Settings to try, in decreasing order of memory."""
    layers, leanest = config.layers, ORDER[-1]
    leaner = ORDER[ORDER.index(remat) :] if remat in ORDER else (remat, *ORDER)
    for name in leaner:
        yield Variant(layers, name)
    while layers := layers // 2:
        yield Variant(layers, leanest)


def training_row(config: ModelConfig, work: Update, args: argparse.Namespace) -> Measured:
    """The first of the ``variants`` that fits, with what was said of those before it."""
    refused, begin, spent = [], time.perf_counter(), 0.0
    for variant in variants(config, args.remat):
        measured = attempt(partial(variant_row, config, variant, work, args))
        if "does_not_fit" not in measured.row:
            break
        reason = measured.row["does_not_fit"]
        refused.append(f"{variant.layers} layers, {variant.remat}: {reason}")
        spent = time.perf_counter() - begin
    more = {"refused": refused, "refused_s": spent} if refused else {}
    return measured._replace(row=measured.row | more)


def trained_network(
    config: ModelConfig, variant: Variant, args: argparse.Namespace
) -> tuple[Network, int]:
    """The policy as it is trained, and the number of its adapters' weights, 0 without any."""
    network = transformer(config, attention=args.attention, remat=variant.remat)
    if not args.lora:
        return network, 0
    lora = Lora(args.lora)
    return with_adapters(network, config, lora), count_trained(config, lora)


def variant_row(
    config: ModelConfig, variant: Variant, work: Update, args: argparse.Namespace
) -> Measured:
    """One GRPO update on one group."""
    config = dataclasses.replace(config, layers=variant.layers)
    network, adapters = trained_network(config, variant, args)
    objective, mesh = get_method("grpo").objective, make_mesh({"data": 1})
    optimizer = optax.adamw(1e-6)
    make = partial(init_state, network=network, objective=objective, optimizer=optimizer)
    key = jax.random.key(0)
    shapes = jax.eval_shape(make, key)
    shardings = state_shardings(shapes, mesh, network=network)
    step = make_step(network=network, objective=objective, optimizer=optimizer)
    batch, sampling_params = group_of(config, work), make_sampling_params()
    with jax.set_mesh(mesh):
        # Compiled before there is a state: what does not fit is never put on the device.
        jitted_step = compile_step(step, shardings, mesh)
        program = fitting(jitted_step, memory_limit(args), shapes, batch, sampling_params)
        name = f"training_{config.embed_dim}_{work.tokens}_{variant.remat}"
        keep_text(program, name, args.hlo)
        setup_s, state = timed(jax.jit(make, out_shardings=shardings), key)
        held_state = [state]
        del state  # or it could not be donated
        state_bytes = must_be_kept(held_state[0])

        def once(state: Any) -> Any:
            return program.call(state, batch, sampling_params)

        def update() -> Any:
            state, metrics = once(held_state.pop())
            held_state.append(state)
            return state, metrics

        took = repeated(update, args.rounds)
        rows, width = work.completions, work.prompt + work.new
        shape, lengths = Shape(rows, work.new, width), config.window is None
        kernel = kernel_for(args.attention, config, shape, steady=True, lengths=lengths)
    row = {
        **{"packed_tokens": work.tokens, "completions": rows, "lora": args.lora},
        **{"layers": variant.layers, "remat": variant.remat, "attention": kernel},
        "setup_s": setup_s,
        "step_s": took,
        "tok_s": work.tokens / took,
        "flop_s": floor.update_flops(config, work.drawn(), adapters) / took,
        "prime_rl_flop_s": floor.prime_rl_flops(config, work.tokens, adapters)
        * (work.tokens / took),
        "lower_s": program.lower_s,
        "compile_s": program.compile_s,
        "held_bytes": program.held_bytes,
        "kept_bytes": state_bytes,
    }

    def profile() -> dict[str, Any]:
        with jax.set_mesh(mesh):
            done = kernels.profiled(once, held_state.pop())[0]
        figures = kernels.step_figures(done, [], 1, took)
        title = f"training on {work.tokens} tokens, largest kernels of one step"
        return figures | show_kernels(done, 1, title, args.profile)

    return Measured(row, profile)


def group_of(config: ModelConfig, work: Update) -> Batch:
    """One prompt with its completions, and rewards that differ."""
    rng, members = np.random.default_rng(0), work.completions
    shape, exist = (1, members, work.new), jnp.ones((1, members), bool)
    return Batch(
        prompt_tokens=tokens_like(rng, config, 1, work.prompt),
        prompt_lengths=jnp.full(1, work.prompt, jnp.int32),
        tokens=tokens_like(rng, config, *shape),
        lengths=jnp.full((1, members), work.new, jnp.int32),
        mask=jnp.ones(shape, bool),
        rewards=jnp.arange(members, dtype=jnp.float32).reshape(1, members, 1),
        reward_weights=jnp.ones(1, jnp.float32),
        members=exist,
        baseline=~exist,
        truncated=~exist,
        stats={"sampler_logprobs": jnp.full(shape, -np.log(config.vocab_size), jnp.float32)},
    )


def must_be_kept(state: TrainState) -> int:
    """Bytes of weights, frozen ones too, of optimiser state and one gradient."""
    trained = weight_bytes(state.params) * 2
    return trained + weight_bytes(state.opt_state) + weight_bytes(state.frozen)
