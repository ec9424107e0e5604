"""Memory of this machine, and one-line errors for sizes that cannot fit.

Free of JAX, because readers of data import it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from jrl.errors import UserError

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limit of a container, in cgroups v2 and v1."""


def host_bytes() -> int:
    """Memory of this host, or of this container where that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP:
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            limits.append(int(path.read_text()))
    return min(limits)


def check_fits(setting: str, needed: float, remedy: str, *, available: int | None = None) -> None:
    """Raises UserError if something needs more memory than there is.

    Args:
      setting: the keys with their values.
      needed: bytes that they take at the least, so that nothing is refused that would run.
      remedy: what would do.
      available: bytes; by default those of the host.
    """
    capacity = host_bytes() if available is None else available
    if needed > capacity:
        raise UserError(
            f"{setting}: this takes at least {in_units(needed)} of memory, and there are"
            f" {in_units(capacity)}; {remedy}"
        )


def program_bytes(compiled: Any) -> float:
    """Bytes of a device that a compiled program takes while it runs.

    Arguments, results and temporaries; what is donated counts once.
    """
    used = compiled.memory_analysis()
    results = used.output_size_in_bytes - used.alias_size_in_bytes
    return float(used.argument_size_in_bytes + used.temp_size_in_bytes + results)


def is_exhausted(error: Exception) -> bool:
    """Whether an error of JAX's runtime says that a device has no memory left."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def in_units(size: float) -> str:
    """Bytes for a person.

    >>> in_units(3 * 2**29), in_units(700), in_units(2**81)
    ('1.5 GiB', '700 bytes', '2.1e+06 EiB')
    """
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if 999.5 <= size < 1024 else f"{size:.3g} {_UNITS[unit]}"
