"""Lines that say what is being compiled, where that takes long enough to wonder."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

import jax
import jax.monitoring

from jrl.compiles import enable_compile_cache, return_compiler_memory

_TRACED = "jaxpr_trace_duration"
_LOWERED = "jaxpr_to_mlir_module_duration"
_COMPILED = "backend_compile_duration"

PATIENCE = 1.0
"""Seconds of silence before a line says what is being compiled; programs of a cache need less."""

RATIO = 11.0
"""Compiling on a CPU takes about this many times as long as tracing and lowering did.

Measured 5 to 22 for the sampler, the training step, the evaluation and whole runs of
configs/tiny.toml and configs/gridworld.toml, on two cores with JAX 0.10.
"""

_MOST = 120
"""Seconds; more is no estimate: on a busy machine tracing takes many times as long."""

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "generate": "the sampler",
        "task_rollout": "the sampler",
        "step": "the training step",
        "held_out": "the evaluation",
        "held_out_rollout": "the evaluation",
        "warm_start": "the warm start",
        "iterate": "one program for all steps",
        "whole_run": "one program for the whole run",
        "seeded": "the initial state",
    }
)
"""Function -> what its program is, for a reader."""


class CompileNotes:
    """Says what this process compiles while it is on; a context manager.

    A line comes when a program has been compiling for a second, on a CPU with about how long it
    will take, and one with its time when it is done, so that nothing is said of programs that come
    from the compile cache.

    Args:
      echo: where the lines go; called from another thread.
    """

    def __init__(self, echo: Callable[[str], object]) -> None:
        self._echo = echo
        self._open: dict[str, _Note] = {}
        self._traced: dict[str, float] = {}
        self._compiling: set[int] = set()  # threads between lowering a program and having it
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Begins to listen."""
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        with self._lock:
            for note in self._open.values():
                note.timer.cancel()
            self._open.clear()

    @property
    def compiling(self) -> bool:
        """Whether the main thread is in the compiler."""
        return threading.main_thread().ident in self._compiling

    def _on_duration(self, event: str, duration_secs: float, **about: Any) -> None:
        name = _plain_name(str(about.get("fun_name", "")))
        if event.endswith(_TRACED):
            self._traced[name] = duration_secs
        elif event.endswith(_LOWERED):
            self._compiling.add(threading.get_ident())
            if name in NAMES:
                traced = self._traced.pop(name, None)
                self._start(name, NAMES[name] + _about(traced, duration_secs))
        elif event.endswith(_COMPILED):
            self._compiling.discard(threading.get_ident())
            # Small programs are compiled in between, and some beside this one.
            with self._lock:
                note = self._open.pop(name, None)
                if note is not None:
                    note.timer.cancel()
                    if note.said:
                        took = time.monotonic() - note.began
                        self._echo(f"compiled {NAMES[name]} in {took:.0f} s")

    def _start(self, name: str, text: str) -> None:
        timer = threading.Timer(PATIENCE, self._say, [name, text])
        timer.daemon = True
        with self._lock:
            if name in self._open:
                self._open[name].timer.cancel()
            self._open[name] = _Note(timer, time.monotonic())
            timer.start()

    def _say(self, name: str, text: str) -> None:
        with self._lock:
            note = self._open.get(name)
            if note is not None and not note.said:
                note.said = True
                self._echo(f"compiling {text}")


@dataclasses.dataclass
class _Note:
    """A program that is being compiled, since when, and whether a line said so."""

    timer: threading.Timer
    began: float
    said: bool = False


def _plain_name(name: str) -> str:
    """The function that a program is named after: "jit(step)" and "jit_step" are "step"."""
    return name.removeprefix("jit(").removeprefix("jit_").removesuffix(")")


def _about(traced: float | None, lowered: float) -> str:
    """Seconds, such as " (about 20 s)", or " ..." where there is nothing to estimate them from."""
    if traced is None or jax.default_backend() != "cpu":
        return " ..."
    seconds = max(5, 5 * round(RATIO * (traced + lowered) / 5))
    return f" (about {seconds} s)" if seconds <= _MOST else " (2 minutes or more)"


def compile_run(
    run: Callable[..., Any], *args: Any, echo: Callable[[str], object] = print
) -> jax.stages.Compiled:
    """``jax.jit(run)`` compiled for these arguments, saying beforehand about how long it takes.

    Compiled as ``jrl train`` compiles: programs are kept on disk for the next time, and what the
    compiler leaves in memory is given back.

    Args:
      run: from ``make_run``, or a ``vmap`` of it.
      *args: a key and hyperparameters, or arrays of the same shapes.
      echo: where the lines go.

    Returns:
      The compiled program, a function of such arguments.
    """
    return_compiler_memory()
    enable_compile_cache()

    def whole_run(*args: Any) -> Any:
        return run(*args)

    with CompileNotes(echo):
        return jax.jit(whole_run).lower(*args).compile()
