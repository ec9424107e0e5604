"""The devices that JAX finds, or in one line why it finds none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax

from jrl.errors import UserError
from jrl.system.extras import install_line, missing, packages

_EXTRAS = {"cuda": "cuda13", "gpu": "cuda13", "tpu": "tpu"}
"""Platform -> the extra that brings JAX's part for it."""


def find_devices(echo: Callable[[str], object] = lambda line: None) -> list[jax.Device]:
    """All devices; sets JAX up.

    Args:
      echo: gets a line where this machine has an NVIDIA GPU that JAX was not installed for.

    Raises:
      UserError: JAX_PLATFORMS asks for devices that JAX does not find.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where nothing at all is found
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
    if devices[0].platform == "cpu" and not platforms and Path("/dev/nvidia0").exists():
        echo(f"this machine has an NVIDIA GPU, and JAX runs on its CPU; {install_line('cuda13')}")
    return devices
