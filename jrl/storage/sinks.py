"""Metrics outside the run directory's own files: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jrl.config import Config, as_tree
from jrl.errors import UserError
from jrl.system.extras import install_line


class Sink(Protocol):
    """Receives the record of each step."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Logs a record: ``step`` and numbers by name; None is skipped."""

    def close(self) -> None:
        """Flushes and closes."""


class TensorBoard(NamedTuple):
    """Event files in ``RUN/tensorboard``, written by tensorboardX."""

    writer: Any

    def write(self, record: Mapping[str, Any]) -> None:
        """Logs every number as a scalar under its name."""
        for name, value in _numbers(record).items():
            self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self.writer.close()


class Wandb(NamedTuple):
    """A run on Weights & Biases."""

    run: Any

    def write(self, record: Mapping[str, Any]) -> None:
        """Logs the numbers at the record's step."""
        self.run.log(_numbers(record), step=record["step"])

    def close(self) -> None:
        """Marks the run as finished."""
        self.run.finish()


def open_sinks(config: Config, directory: Path) -> list[Sink]:
    """The sinks that ``[log]`` turns on.

    Args:
      config: the run's configuration.
      directory: the run directory; both sinks write inside it.

    Returns:
      Zero to two sinks.

    Raises:
      UserError: the package is not installed, or the service refuses the login or is unreachable.
    """
    return [_open(target, config, directory) for target in config.log.to]


def _open(target: str, config: Config, directory: Path) -> Sink:
    name, _, project = target.partition(":")
    if name == "tensorboard":
        writer = _need("tensorboardX", target).SummaryWriter
        return TensorBoard(writer(str(directory / "tensorboard")))
    wandb = _need("wandb", target)
    try:
        run = wandb.init(
            project=project,
            name=directory.name,
            id=_run_id(directory),
            resume="allow",
            dir=str(directory),
            config=as_tree(config),
        )
    except Exception as error:
        raise UserError(
            f"log.to = {target!r}; Weights & Biases cannot be started: {error}; log in with"
            " `wandb login`, set WANDB_MODE=offline, or take it out of log.to"
        ) from error
    return Wandb(run)


def _run_id(directory: Path) -> str:
    """An id kept in the run directory, so that a resumed run stays one run."""
    path = directory / "wandb_id"
    if not path.exists():
        import secrets

        path.write_text(secrets.token_hex(6), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _need(package: str, target: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"log.to = {target!r} needs the package {package} ({error}); install it with"
            f" `{install_line(target.partition(':')[0])}`, or take it out of log.to"
        ) from None


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
