"""Keeps XLA's alarm about slow compilation off standard error, and nothing else.

XLA's CPU and GPU compilers print, two minutes into a compilation and when it ends,

    E1126 11:05:09.013465 18539 slow_operation_alarm.cc:73]
    ********************************
    [Compiling module jit_generate for CPU] Very slow compile? If you want to file a bug, ...

which reads as a failure, and which no option turns off. While a compilation takes long, what this
process's libraries write to file descriptor 2 goes through a child process that drops these lines;
a child, because it still passes on the last words of a process that dies. ``sys.stderr`` is not
affected.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
import threading
from typing import Any

import jax.monitoring

from jrl.system.alarm_filter import __file__ as FILTER

_LOWERED = "jaxpr_to_mlir_module_duration"
_COMPILED = "backend_compile_duration"

PATIENCE = 60.0
"""Seconds of compiling before the filter starts; the alarm comes after 120."""


class AlarmFilter:
    """Standard error, file descriptor 2, through the filter; a context manager."""

    def __enter__(self) -> AlarmFilter:
        """Begins to filter."""
        self._real = os.dup(2)
        # Python's own writes go on to where they went, unless a notebook or a test has replaced it.
        self._stream = _stderr_on(2, self._real)
        command = [sys.executable, "-I", "-S", FILTER]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._real, start_new_session=True
        )
        assert self._child.stdin is not None
        os.dup2(self._child.stdin.fileno(), 2)
        self._child.stdin.close()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends it, with all that was written passed on."""
        os.dup2(self._real, 2)
        if self._stream is not None:
            sys.stderr = self._stream
        # Children that inherited the pipe keep the filter alive; nobody waits for them.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1.0)
        os.close(self._real)


def _stderr_on(descriptor: int, real: int) -> Any:
    """``sys.stderr`` where it was the descriptor's and now is ``real``'s; None if it was not."""
    stream: Any = sys.stderr
    replaced = sys.stderr is not sys.__stderr__  # by a notebook or a test
    try:
        if stream is None or replaced or stream.fileno() != descriptor:
            return None
    except (AttributeError, OSError, ValueError):
        return None
    stream.flush()
    sys.stderr = io.TextIOWrapper(
        io.FileIO(real, "w", closefd=False),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
        write_through=True,
    )
    return stream


@functools.cache
def hide_slow_compile_alarm() -> None:
    """Filters the alarm from now on, in every long compilation of this process.

    More than one call does nothing more.
    """
    lock = threading.RLock()
    timers: dict[int, threading.Timer] = {}
    filters: list[AlarmFilter] = []

    def start() -> None:
        with lock, contextlib.suppress(OSError):
            if timers and not filters:
                filters.append(AlarmFilter().__enter__())

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        thread = threading.get_ident()
        if event.endswith(_LOWERED):
            timer = threading.Timer(PATIENCE, start)
            timer.daemon = True
            with lock:
                before = timers.pop(thread, None)
                timers[thread] = timer
            if before is not None:
                before.cancel()
            timer.start()
        elif event.endswith(_COMPILED):
            with lock:
                before = timers.pop(thread, None)
                ended = filters.pop() if filters and not timers else None
            if before is not None:
                before.cancel()
            if ended is not None:
                ended.__exit__()

    jax.monitoring.register_event_duration_secs_listener(on_duration)
