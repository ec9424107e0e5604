"""Sampling rows of ``benchmarks.gpu``: prefill and decoding of one batch, timed and profiled."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import floor, kernels
from benchmarks.gpu_programs import (
    Measured,
    Program,
    fitting,
    keep_text,
    memory_limit,
    repeated,
    show_kernels,
    tokens_like,
    weight_bytes,
)
from jrl.config.tables import SamplingTable
from jrl.mesh import make_mesh
from jrl.models.attention.choice import Shape, kernel_for
from jrl.models.config import ModelConfig
from jrl.models.quant import sampler
from jrl.models.transformer import transformer
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.sampling.slots import prefill
from jrl.setup.compiler import compiler_options
from jrl.types import Network


class Work(NamedTuple):
    """A sampling row: completions, tokens of a prompt and of a completion, rows of a prompt."""

    rows: int
    prompt: int
    new: int
    group: int

    @classmethod
    def parse(cls, text: str) -> Work:
        """``ROWS:PROMPT:NEW:GROUP``."""
        try:
            work = cls(*map(int, text.split(":")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r} is not ROWS:PROMPT:NEW:GROUP") from None
        if min(work) < 1 or work.prompt < 2 or work.rows % work.group:
            raise argparse.ArgumentTypeError(
                f"{text!r}: at least 1 each, a prompt at least 2, and GROUP divides ROWS"
            )
        return work

    def __str__(self) -> str:
        return ":".join(map(str, self))

    def drawn(self) -> floor.Completions:
        """Lengths of what is sampled."""
        n = self.rows // self.group
        return floor.Completions(np.full(n, self.prompt), np.full((n, self.group), self.new))


class Policy(NamedTuple):
    """A shape with random weights on the device, and the program that prepares them."""

    config: ModelConfig
    network: Network
    params: Any
    prepare: Program
    prepare_s: float
    read_bytes: int


def policy(config: ModelConfig, args: argparse.Namespace) -> Policy:
    """Weights for the sampling rows of a shape; ``config.max_length`` holds the longest."""
    network = sampling_network(config, args)
    mesh = make_mesh({"data": 1})
    with jax.set_mesh(mesh):
        params = jax.jit(transformer(config).init)(jax.random.key(0))
        prepare = fitting(jitted(network.prepare, mesh), np.inf, params)
        seconds = repeated(partial(prepare.call, params), args.rounds)
        prepared = jax.eval_shape(network.prepare, params)
    # The table of embeddings is not read whole: a step takes a row of it for each token.
    read = weight_bytes({name: x for name, x in prepared.items() if name != "embed"})
    return Policy(config, network, params, prepare, seconds, read)


def sampling_network(config: ModelConfig, args: argparse.Namespace) -> Network:
    """The decoder as it samples, its weights or its cache in 8 bits where the flags say so."""
    table = SamplingTable(int8=tuple(args.int8), float8=tuple(args.float8))
    return sampler(transformer(config, attention=args.attention), config, **table.formats)


def jitted(function: Any, mesh: Any) -> Any:
    """The function as a run compiles its sampler for a mesh."""
    return jax.jit(function, compiler_options=compiler_options(mesh))


def sampling_row(model: Policy, work: Work, args: argparse.Namespace) -> Measured:
    """Decoding and prefill of one batch: times, and what they move and compute."""
    config, network, rng = model.config, model.network, np.random.default_rng(0)
    n, mesh = work.rows // work.group, make_mesh({"data": 1})
    prompts, lengths = tokens_like(rng, config, n, work.prompt), jnp.full(n, work.prompt, jnp.int32)
    ids, key = jnp.arange(n, dtype=jnp.int32), jax.random.key(0)
    draw = partial(
        generate, network=network, group=work.group, max_new_tokens=work.new, stop_tokens=()
    )
    inputs = (key, model.params, prompts, lengths, make_sampling_params(), jnp.int32(0), ids)
    with jax.set_mesh(mesh):
        program = fitting(jitted(draw, mesh), memory_limit(args), *inputs)
        keep_text(program, f"sampling_{config.embed_dim}_{work}", args.hlo)
        whole = repeated(partial(program.call, *inputs), args.rounds)
        filled = jitted(partial(prefill, network=network), mesh)
        weights = model.prepare.call(model.params)
        before = fitting(filled, np.inf, weights, prompts, lengths)
        prefill_s = repeated(partial(before.call, weights, prompts, lengths), args.rounds)
        kernel = kernel_for(args.attention, config, Shape(n, work.prompt, work.prompt), steady=True)
    del weights
    completions = work.drawn()
    row: dict[str, Any] = {
        **{"batch": work.rows, "prompt": work.prompt, "new": work.new, "group": work.group},
        "int8": sorted(args.int8),
        "float8": sorted(args.float8),
        "prefill_attention": kernel,
        "prepare_s": model.prepare_s,
        "prefill_s": prefill_s,
        **decode_rates(model, work, whole - prefill_s - model.prepare_s, args),
        "prefill_flop_s": floor.prefill_flops(config, completions) / prefill_s,
        "lower_s": program.lower_s,
        "compile_s": program.compile_s,
        "prefill_compile_s": before.compile_s,
        "held_bytes": program.held_bytes,
    }

    def profile() -> dict[str, Any]:
        # Everything in the program beside the loop is in the other two.
        with jax.set_mesh(mesh):
            prepared, weights = kernels.profiled(model.prepare.call, model.params)
            begun = kernels.profiled(before.call, weights, prompts, lengths)[0]
            del weights
            done = kernels.profiled(program.call, *inputs)[0]
        figures = kernels.step_figures(done, [prepared, begun], work.new, row.get("decode_s"))
        title = f"{work}, largest kernels of one call"
        return figures | show_kernels(done, work.new, title, args.profile)

    return Measured(row, profile)


def decode_rates(
    model: Policy, work: Work, seconds: float, args: argparse.Namespace
) -> dict[str, float]:
    """Figures of ``seconds`` of decoding; none where prefill alone took as long as all."""
    if seconds <= 0:
        return {}
    vector = model.config.head_dim + 4 if "cache" in args.int8 else 0
    bytes_read = floor.decode_bytes(model.config, work.drawn(), model.read_bytes, vector)
    return {
        "decode_s": seconds,
        "token_step_ms": seconds / work.new * 1e3,
        "tok_s": work.rows * work.new / seconds,
        "decode_bytes_s": bytes_read / seconds,
    }
