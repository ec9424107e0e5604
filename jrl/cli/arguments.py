"""Arguments shared by several commands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from jrl.cli.complete import complete_override
from jrl.config import Config, load_config
from jrl.config.stored import override, stored_config
from jrl.errors import UserError
from jrl.user_code import remember

OVERRIDES = "Changes to configuration keys, such as sampling.group=16."
CHECKPOINT = "Training step of the checkpoint; the newest if left out."


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help=OVERRIDES, autocompletion=complete_override),
]
ConfigOrRun = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="Configuration file or run directory.")
]
Checkpoint = Annotated[int | None, typer.Option(help=CHECKPOINT, min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or configuration file.")]


def read(target: str | None, overrides: Sequence[str] | None) -> Config:
    """The configuration named by a command's first arguments."""
    changes = list(overrides or ())
    if target is not None and not target.strip():
        raise UserError(f"RUN = {target!r}; name a configuration file or a run directory")
    if target is not None and "=" in target and not os.path.exists(target):
        changes = [target, *changes]
        target = None
    if target is None or not os.path.isdir(target):
        return load_config(target, changes)
    stored = stored_config(Path(target), [override("run.dir", target), *changes])
    if stored is None:
        raise UserError(f"{target} is not a run directory: it has no config.toml")
    config, note = stored
    if note:
        typer.echo(f"jrl: {note}", err=True)
    remember(Path(target) / "python")  # the rows of a run from Python
    return config


def prepare_jax() -> None:
    """Enables the compilation cache and initialises the devices."""
    from jrl.system.compile_alarm import hide_slow_compile_alarm
    from jrl.system.compile_cache import enable_compile_cache
    from jrl.system.devices import find_devices

    enable_compile_cache()
    hide_slow_compile_alarm()
    find_devices()
