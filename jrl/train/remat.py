"""``model.remat = "auto"``: the fastest rematerialisation with which the training step fits.

What a layer keeps for its backward pass is most of a step's memory, and what it computes again is
up to a quarter of a step's time. Candidates are tried from the fastest to the leanest. A rough
count of bytes settles the clear cases, and where it is close to the device's memory the step is
compiled and asked. Recomputing rounds differently on some devices, so a run keeps its choice:
config.toml of its directory names it, and a resumed run takes it from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.config import Config
from jrl.config.stored import stored_config
from jrl.mesh import named_platform
from jrl.models.config import ModelConfig
from jrl.models.vocabulary import ROOM
from jrl.setup.gather import device_memory, prepared_bytes, weight_numbers
from jrl.setup.placement import sampler_mesh
from jrl.setup.run import Run, remat_of
from jrl.system.memory import in_units, is_exhausted, program_bytes
from jrl.system.processes import first_says
from jrl.train import build, programs
from jrl.train.shapes import abstract_batch, abstract_parameters

AUTO = "auto"
ORDER = ("scores", "elementwise", "dots", "mlp", "full")
"""Candidates, the fastest first; "scores" on GPUs alone, where it was looked at. "none" is not
among them: to write and read what it keeps takes longer than to compute it again."""

SURE, HOPELESS = 0.7, 1.2
"""Of a device's memory: below the one a count is believed to fit, above the other not to. Between
them the step is compiled. Beside steps compiled for an H100 counts are up to a tenth off, beside
those of the shipped pods from 20 % too low to 1 % too high."""

MOST = 2
"""Candidates that are compiled to be asked."""

COMPILED, SCALED, COUNTED = 0.95, 0.93, 0.9
"""Of a device's memory what a step may take that is compiled (the allocator needs much of it in one
piece), one that is counted and scaled by what a compiled one took, and one that is only counted."""


class RematChoice(NamedTuple):
    """The rematerialisation of a run.

    Attributes:
      remat: of ``ORDER``.
      size: bytes of a device that the training step takes.
      limit: bytes that there are.
      refused: the candidates before it, each with its bytes.
      compiled: whether ``size`` is from the compiled step.
    """

    remat: str
    size: float
    limit: float
    refused: dict[str, float]
    compiled: bool = False

    def text(self) -> str:
        """A line for a person.

        >>> RematChoice("mlp", 60 * 2**30, 75 * 2**30, {"elementwise": 90.0 * 2**30}).text()
        'model.remat = auto: mlp, about 60 GiB of 75 GiB; elementwise would take 90 GiB'
        """
        about = "" if self.compiled else "about "
        line = f"model.remat = auto: {self.remat}, {about}{in_units(self.size)}"
        line += f" of {in_units(self.limit)}"
        if self.refused:
            each = [f"{name} would take {in_units(size)}" for name, size in self.refused.items()]
            line += f"; {', '.join(each)}"
        return line


# ---------------------------------------------------------------- the choice


def settled(run: Run, echo: Callable[[str], object] = lambda line: None) -> Run:
    """The run with a rematerialisation in place of "auto", as ``config.model.remat`` names it.

    That of a run directory that is resumed; else the best for the memory of the devices, which is
    said. Where that memory is unknown, as on a CPU, nothing is chosen: the networks are those of
    "elementwise" already, and the configuration stays as it was given. All processes agree.
    """
    if run.config.model.remat != AUTO:
        return run
    if (before := first_says(_stored(run.config))) is not None:
        return with_remat(run, before)
    limit = first_says(device_memory(run.mesh))
    if limit is None or run.model is None:
        return run
    choice = choose(run, limit - _resident(run), compiled_bytes)
    echo(choice.text())
    return with_remat(run, choice.remat)


def choose(run: Run, limit: float, measure: Callable[[Run], float] | None = None) -> RematChoice:
    """The first of ``ORDER`` that fits, or else the last.

    Args:
      run: of the library's own decoder.
      limit: bytes of a device for the training step.
      measure: bytes that the step of a run takes; called for at most ``MOST`` candidates that are
        close to the limit. None to go by the count alone.
    """
    refused: dict[str, float] = {}
    measured, ratio = 0, 1.0
    for remat in ORDER if _platform(run) == "gpu" else ORDER[1:]:
        candidate, share = with_remat(run, remat), SCALED if measured else COUNTED
        counted = counted_bytes(candidate)
        size = ratio * counted
        # What experts are sent is not counted, and may be most of it.
        sure = size < SURE * limit and not any(run.shape.sparse)
        close = not sure and size < HOPELESS * limit
        if close and measure is not None and measured < MOST and remat != ORDER[-1]:
            size, share, measured = measure(candidate), COMPILED, measured + 1
            ratio = size / counted if math.isfinite(size) else ratio
        if size <= share * limit or remat == ORDER[-1]:
            break
        refused[remat] = size
    return RematChoice(remat, size, limit, refused, share == COMPILED)


def with_remat(run: Run, remat: str) -> Run:
    """The run with another ``model.remat``."""
    table = run.config.model.model_copy(update={"remat": remat})
    config = run.config.model_copy(update={"model": table})
    if remat == remat_of(run.config):  # its networks have it already
        return run._replace(config=config)
    again = build.bare_run(
        config,
        run.mesh,
        kind=run.kind,
        model=run.model,
        tokenizer=run.tokenizer,
        width=run.width,
        networks=run.networks,
    )
    same = ("rollout_mesh", "params", "data", "rewards")
    return again._replace(**{name: getattr(run, name) for name in same})


def _stored(config: Config) -> str | None:
    """The choice of the run that is resumed; None for a new one."""
    stored = stored_config(Path(config.run.dir)) if config.run.dir else None
    remat = None if stored is None else stored[0].model.remat
    return None if remat == AUTO else remat


def _resident(run: Run) -> float:
    """Bytes that stay on a device beside a step: the sampler's weights on a mesh of its own."""
    mesh = sampler_mesh(run.config, run.mesh)
    if mesh is None or run.model is None:
        return 0.0
    return prepared_bytes(run.config, run.model, mesh)


# ---------------------------------------------------------------- what a step takes


def compiled_bytes(run: Run) -> float:
    """Bytes of a device that the compiled training step takes; infinity where XLA says too many.

    Compiled for complete groups of full length, as a run that packs no rows does with its first
    batch, which then comes from the compile cache.
    """
    shapes, shardings = programs.abstract_state(run)
    program: Any = programs.train_program(run, shardings)
    with jax.set_mesh(run.mesh):
        try:
            compiled = program.lower(
                shapes, abstract_batch(run), abstract_parameters(run)
            ).compile()
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            return math.inf
    return program_bytes(compiled)


def counted_bytes(run: Run) -> float:
    """Rough bytes of a device that the training step takes, without compiling it."""
    state, _ = programs.abstract_state(run)
    state_bytes, trained = programs.held_bytes(state), programs.held_bytes(state.params)
    model, config = run.shape, run.config
    tensor = run.mesh.shape["tensor"]
    batch = abstract_batch(run)
    tokens = programs.held_bytes((batch.prompt_tokens, batch.tokens)) / 4
    tokens /= config.train.microbatches * run.mesh.shape["context"]
    size = jnp.dtype(model.dtype).itemsize
    stored = model.layers * saved_numbers(model, tensor, config.model.remat)
    # What one layer's backward pass holds at a time, and states of the last layer's.
    passing = saved_numbers(model, tensor, "none") + 6.0 * model.embed_dim
    gradient = trained
    if config.train.microbatches > 1:  # summed in float32
        gradient += 4.0 * trained / jnp.dtype(model.param_dtype).itemsize
    activations = tokens * size * (stored + passing)
    return state_bytes + gradient + activations + _gathered_bytes(run) + _head_bytes(run, tokens)


def _platform(run: Run) -> str:
    return named_platform(run.mesh.devices.flat[0].platform)


def _gathered_bytes(run: Run) -> float:
    """Bytes of a layer's whole weights, the next one's, and the float32 gradient of one."""
    model, axes = run.shape, run.mesh.shape
    if axes["fsdp"] == 1:
        return 0.0
    each = weight_numbers(model, axes, gathered=True) / model.layers
    return each * (2 * jnp.dtype(model.dtype).itemsize + 4)


def _head_bytes(run: Run, tokens: float) -> float:
    """Bytes of a part of the scores with its gradient, and of the sums of the head's gradient.

    Of kept scores also four bytes each, and two of their gradients, which exist together.
    """
    model, tensor = run.shape, run.mesh.shape["tensor"]
    scores = tokens * model.vocab_size / tensor
    part = 10.0 * min(float(ROOM[_platform(run)]), scores)
    stored = 6.0 * scores if run.config.model.remat == "scores" else 0.0
    sums = 0.0 if run.config.lora is not None else 4.0 * model.vocab_size * model.embed_dim
    return part + stored + sums / (tensor * run.mesh.shape["fsdp"])


def saved_numbers(model: ModelConfig, tensor: int, remat: str) -> float:
    """Numbers that a layer keeps for the backward pass of one token.

    Args:
      model: the policy's shape.
      tensor: devices that heads and the feed-forward part are divided over.
      remat: see ``model.remat``.
    """
    if remat == "full":
        return float(model.embed_dim)
    wide = model.mlp_dim
    if any(model.sparse):
        wide = model.experts_per_token * model.expert_mlp_dim
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    # The layer's input and what attention adds to it; nothing reads what the layer ends with.
    products = 2.0 * model.embed_dim + (heads + 2 * wide * (remat != "mlp")) / tensor
    scale = {"dots": 0.0, "scores": 1.0, "elementwise": 1.0, "mlp": 1.0}.get(remat, 3.0)
    attention = scale * model.heads * model.head_dim / tensor
    rest = 0.0 if remat != "none" else 4.0 * model.embed_dim + 2 * wide / tensor
    return products + attention + rest
