"""Wall-clock times of programs, and what a process used."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from benchmarks.flags import WARMUP


def timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds until the result is there, and the result."""
    begin = time.perf_counter()
    out = jax.block_until_ready(function(*args))
    return time.perf_counter() - begin, out


def typical(function: Callable[..., Any], *args: Any, rounds: int) -> float:
    """Median seconds of a compiled function; the first call, which compiles, is left out."""
    timed(function, *args)
    return statistics.median(timed(function, *args)[0] for _ in range(rounds))


def best(function: Callable[..., Any], *args: Any, rounds: int) -> float:
    """Least seconds of a compiled function, for ceilings: nothing can only be fast by accident."""
    timed(function, *args)
    return min(timed(function, *args)[0] for _ in range(rounds))


def steady(values: Iterable[float]) -> float:
    """The median without the first steps, unless there are no others."""
    values = list(values)
    return statistics.median(values[WARMUP:] or values)


def peak_memory_mb() -> float:
    """The most memory that this process has held so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def processor_seconds() -> float:
    """The processor time that this process has taken so far, its imports and all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rounded(tree: Any) -> Any:
    """Numbers to four significant digits, for people."""
    if isinstance(tree, dict):
        return {name: rounded(x) for name, x in tree.items()}
    if isinstance(tree, list):
        return [rounded(x) for x in tree]
    return float(f"{tree:.4g}") if isinstance(tree, float) else tree
