"""A device that runs out of memory: which program it was, what it holds, and what to change.

with memory_of("training step", run):
    state, metrics = step(state, batch, sampling_params)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jrl.config import Config
from jrl.errors import UserError
from jrl.mesh import batch_shards
from jrl.setup.run import Run, remat_of
from jrl.system.memory import in_units, is_exhausted
from jrl.train.remat import ORDER

FUNCTIONS = {
    "sampler": ("generate", "generate_tree", "rollout", "task_rollout"),
    "training step": ("step", "step_of_several"),
    "evaluation": ("held_out", "held_out_rollout", "generate"),
    "program of all steps": ("iterate",),
    "initial state": ("seeded",),
}
"""Program -> the functions that it may be compiled from."""


class OutOfMemory(UserError):
    """A device has no memory left for a program; says which, what it holds and what would do."""


@contextlib.contextmanager
def memory_of(program: str, run: Run) -> Iterator[None]:
    """Turns a device's lack of memory in the block into an ``OutOfMemory``.

    Args:
      program: of ``FUNCTIONS``, what runs in the block.
      run: that it belongs to.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        raise OutOfMemory(text_of(error, program, run)) from error


def text_of(error: Exception, program: str, run: Run) -> str:
    """One line: program, what it holds, what the device has, XLA's reason, keys with values."""
    reason = " ".join(str(error).split("\n")[0].split())[:200]
    keys = ", ".join(remedies(program, run))
    message = f"out of memory in the {program}{_holds(program)}{_device(run)}"
    return f"{message} ({reason}); set one of {keys}"


def _holds(program: str) -> str:
    """Memory of the largest compiled program of this name, as text; "" if there is none yet."""
    names = {f"jit_{name}" for name in FUNCTIONS[program]}
    largest: Any = None
    for executable in jax.local_devices()[0].client.live_executables():
        with contextlib.suppress(Exception):  # a device that cannot tell must not hide the error
            if not names & {module.name for module in executable.hlo_modules()}:
                continue
            stats = executable.get_compiled_memory_stats()
            if largest is None or stats.temp_size_in_bytes > largest.temp_size_in_bytes:
                largest = stats
    if largest is None:
        return ""
    results = largest.output_size_in_bytes - largest.alias_size_in_bytes
    sizes = {
        "arguments": largest.argument_size_in_bytes,
        "temporaries": largest.temp_size_in_bytes,
        "results": results,
    }
    return ", which holds " + ", ".join(f"{in_units(n)} of {name}" for name, n in sizes.items())


def _device(run: Run) -> str:
    """The memory of a device and what was in use of it; "" where it does not tell."""
    stats = run.mesh.local_devices[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return ""
    used = f", {in_units(stats['bytes_in_use'])} in use now" if "bytes_in_use" in stats else ""
    return f"; a device has {in_units(stats['bytes_limit'])}{used}"


def remedies(program: str, run: Run) -> list[str]:
    """Three keys with the values that need less memory, the least costly first."""
    config = run.config
    sampled = config.sampling.group * config.train.prompts
    shorter = f"sampling.max_new_tokens = {max(config.sampling.max_new_tokens // 2, 1)}"
    fewer = _fewer_prompts(config, batch_shards(run.mesh))
    in_8_bits = f"sampling.int8 = {sorted({*config.sampling.int8, 'cache'})}"
    if program == "initial state":
        return _of_weights(run)[:3]
    keys: list[str] = []
    if program in ("sampler", "program of all steps"):
        if (slots := (config.sampling.slots or sampled) // 2) > 0:
            keys.append(f"sampling.slots = {slots}")
        if "cache" not in config.sampling.int8:
            keys.append(in_8_bits)
        keys += fewer
    if program == "evaluation":
        table = config.eval
        keys += [f"eval.problems = {table.problems // 2}"] if table.problems > 1 else []
        keys += [f"eval.samples = {table.samples // 2}"] if table.samples > 1 else []
        keys += [] if "cache" in config.sampling.int8 else [in_8_bits]
    if program in ("training step", "program of all steps"):
        used = remat_of(config)
        leaner = ORDER[ORDER.index(used) + 1 :] if used in ORDER else ORDER
        keys += [f'model.remat = "{leaner[-1]}"'] if leaner else []
        parts = 2 * config.train.microbatches
        if config.train.prompts % (parts * config.train.minibatches * batch_shards(run.mesh)) == 0:
            keys.append(f"train.microbatches = {parts}")
        keys += fewer
    if config.lora is None:
        keys.append("lora.rank = 16")
    return [*keys[:2], shorter, "mesh.fsdp = -1", *_of_weights(run)][:3]


def _of_weights(run: Run) -> list[str]:
    """Keys that make weights and optimizer state smaller."""
    config, dense = run.config, run.model is not None and not run.model.experts
    keys = [] if config.lora is not None else ["lora.rank = 16"]
    if config.lora is not None and config.lora.base == "float" and dense:
        keys.append('lora.base = "int8"')
    if config.optimizer.name != "adafactor":
        keys.append('optimizer.name = "adafactor"')
    if config.model.param_dtype == "float32":
        keys.append('model.param_dtype = "bfloat16"')
    return [*keys, "mesh.fsdp = -1", "model.path = a smaller model"]


def _fewer_prompts(config: Config, shards: int) -> list[str]:
    """``train.prompts`` halved, if it can be."""
    half, parts = config.train.prompts // 2, config.train.microbatches * config.train.minibatches
    return [f"train.prompts = {half}"] if half and half % (parts * shards) == 0 else []
