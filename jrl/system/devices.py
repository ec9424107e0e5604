"""The devices that JAX finds, or in one line why it finds none."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jrl.errors import UserError
from jrl.system.extras import install_line, missing, packages

GPU_MEMORY_SHARE = 0.92
"""Of a GPU's memory, what JAX is given for arrays; its default is three quarters. The rest is for
CUDA's context, its graphs and libraries, and NCCL's buffers."""

_EXTRAS = {"cuda": "cuda13", "gpu": "cuda13", "tpu": "tpu"}
"""Platform -> the extra that brings JAX's part for it."""


def find_devices(echo: Callable[[str], object] = lambda line: None) -> list[jax.Device]:
    """All devices; sets JAX up, on a GPU with ``GPU_MEMORY_SHARE`` of its memory.

    Args:
      echo: gets a line where this machine has an NVIDIA GPU that JAX was not installed for.

    Raises:
      UserError: JAX_PLATFORMS asks for devices that JAX does not find, or the GPU's driver is too
        old for it.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    if libtpu_is_idle():
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where nothing at all is found
        if line := outdated_driver():
            raise UserError(line) from None
        reason = str(error).strip().partition("\n")[0]
        why = f" ({reason})" if reason else ""
        extra = next((_EXTRAS[name] for name in platforms.split(",") if name in _EXTRAS), None)
        hint = f"install JAX for it: {install_line(extra)}; or " if extra else ""
        if extra and (requirements := packages(extra)) and not missing(requirements):
            kind = "TPU" if extra == "tpu" else "GPU"
            hint = f"JAX's part for it is installed, and this machine has no {kind} that it finds; "
        raise UserError(
            f"JAX_PLATFORMS = {platforms!r}: JAX finds no such device here{why}; {hint}set"
            " JAX_PLATFORMS=cpu"
        ) from None
    if devices[0].platform == "cpu" and not platforms and (line := outdated_driver()):
        raise UserError(line)
    if devices[0].platform == "cpu" and not platforms and Path("/dev/nvidia0").exists():
        echo(f"this machine has an NVIDIA GPU, and JAX runs on its CPU; {install_line('cuda13')}")
    return devices


# ---------------------------------------------------------------- libtpu without a TPU

PCI_VENDORS, TPU_VENDOR = "/sys/bus/pci/devices/*/vendor", "0x1ae0"
"""Files with the makers of this machine's cards, and the maker of TPUs."""
OTHERS = ("/dev/nvidia*", "/dev/dxg", "/dev/accel*", "/dev/vfio/[0-9]*")
"""Files of GPUs, and of TPUs that containers are given."""


def libtpu_is_idle() -> bool:
    """Whether libtpu is installed (extra ``plan``) on a machine without TPU and GPU.

    JAX would start it all the same unless it is told which platforms there are, and libtpu prints
    six lines on the terminal that look like errors.
    """
    requested = getattr(jax.config, "jax_platforms", "") or "JAX_FORCE_TPU_INIT" in os.environ
    if requested or importlib.util.find_spec("libtpu") is None:
        return False
    if any(glob.glob(pattern) for pattern in OTHERS):
        return False
    return TPU_VENDOR not in {Path(file).read_text().strip() for file in glob.glob(PCI_VENDORS)}


# ---------------------------------------------------------------- NVIDIA's driver

OLDEST_DRIVER: Mapping[int, tuple[int, ...]] = {12: (525, 60, 13), 13: (580, 65, 6)}
"""Major version of CUDA -> the oldest driver for Linux that all its minor versions run on. From
"CUDA Toolkit and Corresponding Driver Versions" of NVIDIA's release notes."""
DRIVER = Path("/proc/driver/nvidia/version")
"""Version file of the driver's kernel module."""


def outdated_driver() -> str | None:
    """A line where this machine's NVIDIA driver is older than the CUDA of the installed JAX needs.

    To be asked only where JAX has found no GPU: NVIDIA's compatibility packages let a newer CUDA
    run on an older driver.
    """
    try:
        match = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    majors = [n for n in OLDEST_DRIVER if importlib.util.find_spec(f"jax_cuda{n}_plugin")]
    if match is None or not majors:
        return None
    driver, cuda = tuple(map(int, match[1].split("."))), max(majors)
    if driver >= OLDEST_DRIVER[cuda]:
        return None
    older = max((n for n, oldest in OLDEST_DRIVER.items() if driver >= oldest), default=None)
    other = f"install JAX for CUDA {older}: {install_line(f'cuda{older}')}, " if older else ""
    return (
        f"the NVIDIA driver {match[1]} is older than CUDA {cuda}, which JAX is installed for here,"
        f" needs ({OLDEST_DRIVER[cuda][0]} or newer): update it,"
        f" {other}or set JAX_PLATFORMS=cpu"
    )
