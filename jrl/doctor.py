"""What this machine has, and what a configuration lacks here; nothing is compiled or trained."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jrl.config import Config
from jrl.config_unions import QuestionTable
from jrl.data.tables import FirstRows, Source
from jrl.errors import UserError
from jrl.extras import DISTRIBUTION, extras, install_line, missing, version
from jrl.hub import cache_directory, offline

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "huggingface_hub")


def examine() -> dict[str, str]:
    """The machine and the installation, one line each.

    Versions, devices with their memory, host memory, free disk space, caches, and extras: those
    that are installed, and for the others the line that installs them here.
    """
    found = {"jrl": f"{version()} ({DISTRIBUTION}) in {Path(__file__).parent}"}
    found["python"] = f"{platform.python_version()}, {sys.executable}"
    found["packages"] = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    found["devices"] = _devices()
    found["host"] = f"{os.cpu_count()} cores, {_host_memory()}"
    found["disk"] = f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free in {Path.cwd()}"
    found["compile_cache"] = _compile_cache()
    state = "offline (HF_HUB_OFFLINE)" if offline() else "online"
    found["hub_cache"] = f"{cache_directory()}, {_held(cache_directory())}; {state}"
    return found | {f"extra_{name}": text for name, text in _extras()}


def lacks(config: Config) -> list[str]:
    """What keeps a configuration from running here, a line for each thing; [] for nothing.

    Each part is looked at alone, so that one that is wrong does not hide the others. Checkpoints
    are read up to their headers, data up to its first rows.
    """
    from jrl.devices import find_devices
    from jrl.models import hf
    from jrl.models.tokenizer import load_tokenizer
    from jrl.train import build
    from jrl.train.frozen import run_shape, run_task
    from jrl.train.objective import method_of
    from jrl.train.placement import make_meshes
    from jrl.train.reward_text import check_reward_columns, missing_math

    found: list[str] = []

    def look(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except UserError as error:
            found.extend(line for line in str(error).splitlines() if line not in found)
        return None

    if look(find_devices) is None:
        return found  # nothing else can be looked at
    task = look(lambda: run_task(config))
    method = look(lambda: method_of(config, task))
    tokenizer = task and task.tokenizer
    look(lambda: make_meshes(config, apart=True))
    path = config.model.path
    if path is not None and config.model.network is None:
        if look(lambda: hf.read_config(path)) is not None and task is None:
            tokenizer = look(lambda: load_tokenizer(path))
    elif config.model.network is None and (task is not None or config.task is None):
        look(lambda: run_shape(config, task))
    for name in ("train", "eval", "pairs"):
        if (spec := getattr(config.data, name, None)) is not None:
            look(functools.partial(_first_row, spec, f"data.{name}"))
    if isinstance(config.data, QuestionTable) and config.data.train is None:
        found.append(
            "data.train and data.task are both missing; name a file of prompts or a procedural task"
        )
    if task is None and config.pairs is None:
        look(lambda: build.reward_pool(config).close())
    elif task is not None:
        look(lambda: build.reward_weights(config, task))
    if method is not None and tokenizer is not None:
        read = look(lambda: build.read_data(config, tokenizer, task, method, opened=_head))
        if read is not None:
            look(lambda: check_reward_columns(config, read.prompts["train"]))
    if said := missing_math(config):
        found.append(said)
    return found + list(_missing_sinks(config))


_ROWS = 100
"""Rows of each source that become prompts, to see whether fields and template fit."""


def _head(spec: str | Mapping[str, float], *, key: str) -> Source:
    from jrl.data.sources import open_source

    return FirstRows(open_source(spec, key=key), _ROWS)


def _first_row(spec: str | Mapping[str, float], key: str) -> dict[str, Any]:
    from jrl.data.sources import open_source

    return open_source(spec, key=key)[0]


def _missing_sinks(config: Config) -> Iterator[str]:
    for target in config.log.to:
        extra = target.partition(":")[0]
        if missing({"tensorboard": ["tensorboardX"]}.get(extra, [extra])):
            yield f"log.to = {target!r} needs the extra {extra}: {install_line(extra)}"


def _devices() -> str:
    from jrl.devices import find_devices

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
    asked = os.environ.get("JAX_PLATFORMS")
    text += f" ({devices[0].platform}{f', as JAX_PLATFORMS={asked} says' if asked else ''})"
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
    from jrl.compiles import enable_compile_cache

    directory = enable_compile_cache()
    return "off" if directory is None else f"{directory}, {_held(directory)}"


def _held(directory: Path) -> str:
    """How much a directory holds; files that several names share count once."""
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


def _version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
