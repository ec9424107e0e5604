"""Programs of ``benchmarks.gpu``: compiled, checked against the device's memory, and timed."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernels
from benchmarks.clock import timed
from jrl.models.config import ModelConfig
from jrl.system.memory import is_exhausted, program_bytes

ENOUGH_SECONDS = 3.0
"""Rounds of a measurement end when they took this long together; one is always measured."""


class Measured(NamedTuple):
    """A row, and the measurement that follows it: a profile, which may fail on its own."""

    row: dict[str, Any]
    profile: Callable[[], dict[str, Any]] | None = None


class DoesNotFit(Exception):
    """A compiled program needs more memory than there is; the message has both figures."""


class Program(NamedTuple):
    """A compiled program, seconds of tracing it and of compiling, and the bytes that it holds."""

    call: Any
    lower_s: float
    compile_s: float
    held_bytes: int


def memory_limit(args: argparse.Namespace) -> float:
    """Bytes that programs may use in all; infinity where the device does not tell."""
    if args.memory_gb:
        return args.memory_gb * 1e9
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_limit", np.inf))


def fitting(jitted: Any, limit: float, *args: Any) -> Program:
    """The jitted program, compiled for these arguments or shapes.

    Raises:
      DoesNotFit: it needs more than ``limit`` bytes.
    """
    begin = time.perf_counter()
    lowered = jitted.lower(*args)
    between = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    if (needed := program_bytes(compiled)) > limit:
        raise DoesNotFit(f"needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB")
    return Program(compiled, between - begin, end - between, int(needed))


def attempt(run: Callable[[], Measured]) -> Measured:
    """A row, or why the device has no room for it."""
    try:
        return run()
    except DoesNotFit as error:
        return Measured({"does_not_fit": str(error)})
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        return Measured({"does_not_fit": str(error).splitlines()[0][:160]})


def repeated(call: Callable[[], Any], rounds: int) -> float:
    """Median seconds of up to ``rounds`` calls after one that is left out."""
    timed(call)
    seconds: list[float] = []
    while len(seconds) < rounds and sum(seconds) < ENOUGH_SECONDS:
        seconds.append(timed(call)[0])
    return statistics.median(seconds)


def keep_text(program: Program, name: str, directory: str) -> None:
    """Writes the optimised program, whose fusions the names of kernels in a profile refer to."""
    if directory:
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name.replace(':', '_')}.txt").write_text(
            program.call.as_text(), encoding="utf-8"
        )


def show_kernels(profile: kernels.Profile, steps: int, title: str, only: str) -> dict[str, Any]:
    """The largest kernels, for the row; written to stderr, too, where ``wanted`` says so."""
    if not profile.events:
        return {}
    rows = kernels.largest(profile, steps)
    if only == "kernels":
        sys.stderr.write(f"\n{title}\n{kernels.as_text(rows)}\n")
        sys.stderr.flush()
    return {"kernels": rows}


def tokens_like(rng: np.random.Generator, config: ModelConfig, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(3, config.vocab_size, shape), jnp.int32)


def weight_bytes(tree: Any) -> int:
    """Bytes of arrays, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
