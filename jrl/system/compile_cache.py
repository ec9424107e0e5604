"""Counting compilations, and keeping their results on disk for the next run."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any, Self

import jax
import jax.monitoring

_COMPILED = "backend_compile_duration"
_FROM_CACHE = "compilation_cache/cache_hits"


class CompileCounter:
    """Counts the programs that this process makes ready while the counter is on.

    In a steady state the count stands still; a count that grows from step to step means that
    shapes or static arguments change. Use it as a context manager, or ``start`` and ``stop`` it.

    Attributes:
      count: programs made ready, whether compiled or read from the compile cache.
      cached: those of them that were read from the compile cache.
      seconds: time it took.
    """

    def __init__(self) -> None:
        self.count = 0
        self.cached = 0
        self.seconds = 0.0

    def start(self) -> Self:
        """Begins to count; returns self."""
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def stop(self) -> None:
        """Stops counting; the figures stay."""
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith(_COMPILED):
            self.count += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: Any) -> None:
        self.cached += event.endswith(_FROM_CACHE)


def enable_compile_cache() -> Path | None:
    """Keeps compiled programs on disk, so that the same program starts at once next time.

    The first of these decides where: the environment variable ``JRL_CACHE_DIR`` (empty: no cache);
    a directory JAX was already told to use; ``~/.cache/jrl`` (or below ``XDG_CACHE_HOME``).
    Programs compiled in under 0.2 seconds are not kept. Nothing is ever deleted; the directory can
    be removed at any time.

    Returns:
      The directory in use, or None when there is no cache.
    """
    chosen = os.environ.get("JRL_CACHE_DIR")
    if chosen == "":
        return None
    directory_set = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if chosen is None and directory_set:
        return Path(directory_set)
    if chosen is None:
        chosen = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jrl")
    path = Path(chosen).expanduser() / _machine()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"jrl: warning: no compile cache in {path}: {error}", file=sys.stderr)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path


@functools.cache
def return_compiler_memory() -> None:
    """Returns free heap memory to the system after each compilation.

    The decode loop of a CPU leaves some 800 MB there, of no further use. Only the GNU C library is
    asked; elsewhere nothing happens. More than one call does nothing more.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)

    def trim(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith(_COMPILED):
            library.malloc_trim(0)

    jax.monitoring.register_event_duration_secs_listener(trim)


def _machine() -> str:
    """Names the processor: code compiled for one CPU may not run on another that shares a home."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
