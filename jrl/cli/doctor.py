"""Facts about this machine; ``jrl.run.diagnostics`` lists what a configuration is missing on it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from jrl.errors import UserError
from jrl.hub import cache_directory, offline
from jrl.system.extras import DISTRIBUTION, extras, install_line, missing, version

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "huggingface_hub")


def examine() -> dict[str, str]:
    """The machine and the installation, one line each.

    Versions, devices with their memory, host memory, free disk space, caches, and extras: those
    that are installed, and for the others the line that installs them here.
    """
    facts = {"jrl": f"{version()} ({DISTRIBUTION}) in {Path(__file__).parents[1]}"}
    facts["python"] = f"{platform.python_version()}, {sys.executable}"
    facts["packages"] = ", ".join(
        f"{name} {version(name, '(not installed)')}" for name in _PACKAGES
    )
    facts["devices"] = _devices()
    facts["host"] = f"{os.cpu_count()} cores, {_host_memory()}"
    facts["disk"] = f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free in {Path.cwd()}"
    facts["compile_cache"] = _compile_cache()
    state = "offline (HF_HUB_OFFLINE)" if offline() else "online"
    facts["hub_cache"] = f"{cache_directory()}, {_size_of(cache_directory())}; {state}"
    return facts | {f"extra_{name}": text for name, text in _extras()}


def _devices() -> str:
    from jrl.system.devices import find_devices

    notes: list[str] = []
    try:
        devices = find_devices(notes.append)
    except UserError as error:
        return f"none; {error}"
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    memory = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    if memory and "bytes_limit" in memory:
        text += f", {memory['bytes_limit'] / 2**30:.1f} GiB each"
    platforms = os.environ.get("JAX_PLATFORMS")
    text += f" ({devices[0].platform}{f', as JAX_PLATFORMS={platforms} says' if platforms else ''})"
    return "; ".join([text, *notes])


def _host_memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        total, free = kib["MemTotal"] / 2**20, kib["MemAvailable"] / 2**20
    except (OSError, KeyError, ValueError, IndexError):
        return "memory unknown"
    return f"{free:.1f} of {total:.1f} GiB memory available"


def _compile_cache() -> str:
    from jrl.system.compile_cache import enable_compile_cache

    directory = enable_compile_cache()
    return "off" if directory is None else f"{directory}, {_size_of(directory)}"


def _size_of(directory: Path) -> str:
    """Size of a directory; hard links count once."""
    if not directory.is_dir():
        return "empty"
    files = [p for p in directory.rglob("*") if p.is_file() and not p.is_symlink()]
    return f"{sum(p.stat().st_size for p in files) / 1e6:,.0f} MB"


def _extras() -> Iterator[tuple[str, str]]:
    for name, requirements in extras().items():
        if name == "dev":
            continue
        absent = missing(requirements)
        yield name, f"missing {', '.join(absent)}: {install_line(name)}" if absent else "installed"
