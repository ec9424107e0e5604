"""Reports compilations that take longer than a second."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.monitoring

from jrl.system.compile_alarm import hide_slow_compile_alarm
from jrl.system.compile_cache import enable_compile_cache, return_compiler_memory

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

LONG = 60
"""Seconds of an estimate from which settings that compile sooner are named."""

LARGE = 1.0
"""The same in seconds of tracing and lowering where there is no estimate, as on a GPU: a sampler of
28 layers takes 2, and then 30 to compile."""

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


_ACTIVE: list[CompileNotes] = []
"""Reports that are on; none of a plain ``jax.jit(run)`` is needed beside them."""


class CompileNotes:
    """Context manager that reports the compilations of this process.

    A line comes when a program has been compiling for a second, on a CPU with an estimate of the
    time, and one with its time when it is done. Programs from the compile cache need less, so
    nothing is printed of them.

    Args:
      echo: where the lines go; called from another thread.
      names: function -> what its program is; programs of other functions are not reported.
      sooner: function -> which settings compile sooner, told where a program is expected to take
        ``LONG`` seconds or more, or is ``LARGE``.
    """

    def __init__(
        self,
        echo: Callable[[str], object],
        names: Mapping[str, str] | None = None,
        sooner: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._echo = echo
        self._sooner = sooner
        self._names = NAMES if names is None else names
        self._expected: set[int] = set()  # threads that traced a run and have not compiled it yet
        self._open: dict[str, _Note] = {}
        self._traced: dict[str, float] = {}
        self._compiling: set[int] = set()  # threads between lowering a program and having it
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Begins to listen."""
        hide_slow_compile_alarm()
        _ACTIVE.append(self)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        return self

    def __exit__(self, *error: object) -> None:
        """Stops listening."""
        _ACTIVE.remove(self)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        with self._lock:
            for note in self._open.values():
                note.timer.cancel()
            self._open.clear()

    @property
    def compiling(self) -> bool:
        """Whether the main thread is compiling."""
        return threading.main_thread().ident in self._compiling

    def _on_duration(self, event: str, duration_secs: float, **details: Any) -> None:
        name = _plain_name(str(details.get("fun_name", "")))
        if event.endswith(_TRACED):
            self._traced[name] = duration_secs
        elif event.endswith(_LOWERED):
            self._compiling.add(threading.get_ident())
            label = self._names.get(name)
            if threading.get_ident() in self._expected:
                self._expected.discard(threading.get_ident())
                label = NAMES.get(name, NAMES["whole_run"])
            if label is not None:
                traced = self._traced.pop(name, None)
                seconds = _estimate(traced, duration_secs)
                about = _about(seconds)
                large = (traced or 0.0) + duration_secs >= LARGE
                if name in self._sooner and (large if seconds is None else seconds >= LONG):
                    about += f"; {self._sooner[name]}"
                self._start(name, label, about)
        elif event.endswith(_COMPILED):
            self._compiling.discard(threading.get_ident())
            # Other threads compile at the same time, and small programs in between.
            with self._lock:
                note = self._open.pop(name, None)
                if note is not None:
                    note.timer.cancel()
                    if note.reported:
                        took = time.monotonic() - note.began
                        self._echo(f"compiled {note.label} in {took:.0f} s")

    def expect(self) -> None:
        """Has the next program that this thread compiles reported, whatever its function."""
        self._expected.add(threading.get_ident())

    def _start(self, name: str, label: str, suffix: str) -> None:
        timer = threading.Timer(PATIENCE, self._say, [name, label + suffix])
        timer.daemon = True
        with self._lock:
            if name in self._open:
                self._open[name].timer.cancel()
            self._open[name] = _Note(label, timer, time.monotonic())
            timer.start()

    def _say(self, name: str, text: str) -> None:
        with self._lock:
            note = self._open.get(name)
            if note is not None and not note.reported:
                note.reported = True
                self._echo(f"compiling {text}")


@dataclasses.dataclass
class _Note:
    """A running compilation: its report timer, start time, and whether it was reported."""

    label: str
    timer: threading.Timer
    began: float
    reported: bool = False


def _plain_name(name: str) -> str:
    """The function that a program is named after: "jit(step)" and "jit_step" are "step"."""
    return name.removeprefix("jit(").removeprefix("jit_").removesuffix(")")


def _estimate(traced: float | None, lowered: float) -> int | None:
    """Seconds that compiling will take; None where there is nothing to tell it from."""
    if traced is None or jax.default_backend() != "cpu":
        return None
    return max(5, 5 * round(RATIO * (traced + lowered) / 5))


def _about(seconds: int | None) -> str:
    """The estimate, such as " (about 20 s)", or " ..." without one."""
    if seconds is None:
        return " ..."
    return f" (about {seconds} s)" if seconds <= _MOST else " (2 minutes or more)"


def compile_run(
    run: Callable[..., Any], *args: Any, echo: Callable[[str], object] = print
) -> jax.stages.Compiled:
    """Compiles ``jax.jit(run)`` for these arguments and reports about how long that takes.

    Compiled as in ``jrl train``: programs are cached on disk, and the compiler's leftover memory is
    returned to the system.

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


def report_traced_run(*arguments: Any) -> None:
    """Reports the compilation of the program that a run is being traced into.

    A run calls it at the end of its own trace, so that ``jax.jit(run)`` reports as ``compile_run``
    does, under any name and through ``vmap``. Nothing happens when a ``CompileNotes`` is on already
    or nothing is traced.

    Args:
      *arguments: of the run, pytrees of arrays.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
    if traced and not _ACTIVE:
        _of_plain_jit().expect()


@functools.cache
def _of_plain_jit() -> CompileNotes:
    """Reports of expected programs alone, for the life of the process."""
    # Not entered: a listener cannot be removed while JAX walks the list of them, which is when the
    # end of a compilation is known.
    hide_slow_compile_alarm()
    notes = CompileNotes(print, names={})
    jax.monitoring.register_event_duration_secs_listener(notes._on_duration)
    return notes
