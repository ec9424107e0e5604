"""Keeping the memory that compiled programs use on a CPU.

XLA asks the C library for the temporaries of a program each time it runs it. By default that memory
goes back to the system in between, which hands it out again page by page, each cleared first: at a
few hundred megabytes a step, a sixth of the step's time. What compilation leaves behind, on the
other hand, is of no further use, and can go before the first run adds to it; and what programs
left can go before another one is compiled, which takes about as much.

Where the system gives memory in huge pages to who asks, the heap asks for them: a decode step reads
all weights, more pages than the processor remembers the places of.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import jax
import jax.monitoring

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt(3)
_HUGEPAGE = 14  # of Linux's madvise(2)
_HUGE, _AHEAD = 2**21, 2**30  # bytes of a huge page, and of heap to ask them for


@functools.cache
def keep_memory() -> bool:
    """Makes this process keep the memory of its programs from one run to the next.

    Call it before JAX is asked for a device: programs on the CPU then run in the thread that calls
    them, whose memory is the only one that can be kept. What is left over goes back to the system
    before and after each compilation. Where programs run on an accelerator the host's memory stays
    as it is. Nothing is done more than once.

    Returns:
      Whether the C library can do so; True with glibc on Linux.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    around = ("jaxpr_to_mlir_module_duration", "backend_compile_duration")
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    def around_compilation(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith(around) and jax.default_backend() == "cpu":
            library.mallopt(_MMAP_MAX, 0)
            library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
            library.malloc_trim(0)
            _ask_for_huge_pages(library)

    jax.monitoring.register_event_duration_secs_listener(around_compilation)
    return True


def _ask_for_huge_pages(library: ctypes.CDLL) -> None:
    """Asks for them where the heap will grow; it takes up no memory before that."""
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if start := library.malloc(_AHEAD):
        first, end = -(-start // _HUGE) * _HUGE, (start + _AHEAD) // _HUGE * _HUGE
        library.madvise(first, end - first, _HUGEPAGE)  # refused where there are none
        library.free(start)
