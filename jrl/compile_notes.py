"""Lines that say what is being compiled, where that takes long enough to wonder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

import jax.monitoring

_LOWERED = "jaxpr_to_mlir_module_duration"
_COMPILED = "backend_compile_duration"

PATIENCE = 1.0
"""Seconds of silence before a line says what is being compiled; programs of a cache need less."""

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "generate": "the sampler",
        "task_rollout": "the sampler",
        "step": "the training step",
        "held_out": "the evaluation",
        "warm_start": "the warm start",
        "iterate": "the run",
        "seeded": "the initial state",
    }
)
"""Function -> what its program is, for a reader."""


class CompileNotes:
    """Says what this process compiles while it is on; a context manager.

    A line comes when a program has been compiling for a second, and one with its time when it is
    done, so that nothing is said of programs that come from the compile cache.

    Args:
      echo: where the lines go; called from another thread.
    """

    def __init__(self, echo: Callable[[str], object]) -> None:
        self._echo = echo
        self._timer: threading.Timer | None = None
        self._said: str | None = None
        self._began = 0.0
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
            self._stop()

    def _on_duration(self, event: str, duration_secs: float, **about: Any) -> None:
        if event.endswith(_LOWERED):
            name = _plain_name(str(about.get("fun_name", "")))
            if name in NAMES:
                self._start(NAMES[name])
        elif event.endswith(_COMPILED):
            with self._lock:
                if self._said is not None:
                    self._echo(f"compiled {self._said} in {time.monotonic() - self._began:.0f} s")
                self._stop()

    def _start(self, what: str) -> None:
        with self._lock:
            self._stop()
            self._began = time.monotonic()
            self._timer = threading.Timer(PATIENCE, self._say, [what])
            self._timer.daemon = True
            self._timer.start()

    def _say(self, what: str) -> None:
        with self._lock:
            if self._timer is not None:
                self._said = what
                self._echo(f"compiling {what} ...")

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._said = None


def _plain_name(name: str) -> str:
    """The function that a program is named after: "jit(step)" and "jit_step" are "step"."""
    return name.removeprefix("jit(").removeprefix("jit_").removesuffix(")")
