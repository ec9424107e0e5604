"""Programs that JAX compiles during a test."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Compilation(NamedTuple):
    """A program's name, ``jit(…)``, and the thread that compiled it."""

    program: str
    thread: str


@contextlib.contextmanager
def compilations() -> Iterator[list[Compilation]]:
    """A list that grows by every program that is compiled, single operations among them.

    JAX's own caches do not serve to count: they forget programs where a process has thousands.
    """
    records: list[Compilation] = []

    def note(event: str, seconds: float, **about: str) -> None:
        if event.endswith("backend_compile_duration"):
            records.append(Compilation(about["fun_name"], threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield records
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
