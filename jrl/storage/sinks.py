"""Metrics outside the run directory's own files: TensorBoard, W&B, trackio and MLflow."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl.config import Config, as_tree
from jrl.config.write import leaves
from jrl.errors import UserError
from jrl.system.extras import install_line


class Sink(NamedTuple):
    """Receives the record of each step.

    Attributes:
      name: for warnings.
      log: (numbers by name, step) -> logs them.
      close: flushes, and marks the run as finished.
      truncate_after: (step) -> hides records of later steps, which run again. By default nothing
        is hidden.
    """

    name: str
    log: Callable[[dict[str, float], int], object]
    close: Callable[[], object]
    truncate_after: Callable[[int], object] = lambda step: None

    def write(self, record: Mapping[str, Any]) -> None:
        """Logs a record: ``step`` and numbers by name; what is no number is skipped."""
        numbers = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        self.log(numbers, int(record["step"]))


_MLFLOW_BATCH = 500
_MLFLOW_TEXT = 500
"""Characters of a parameter in MLflow's older servers, at most."""
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Requests to a server that does not answer; MLflow's own 7 tries hold each step for minutes."""


def open_sinks(config: Config, directory: Path) -> list[Sink]:
    """The sinks that ``[log]`` turns on.

    Args:
      config: the run's configuration.
      directory: the run directory. An id in it makes a resumed run one run of the service too.

    Returns:
      One sink for each target.

    Raises:
      UserError: the package is not installed, or the service refuses the login or is unreachable.
    """
    return [_open(target, config, directory) for target in config.log.to]


_REMEDY: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("TensorBoard", "make the run directory writable"),
    "wandb": ("Weights & Biases", "log in with `wandb login`, set WANDB_MODE=offline"),
    "trackio": ("trackio", "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL to log on this machine"),
    "mlflow": ("MLflow", "set MLFLOW_TRACKING_URI to a server or directory that answers"),
}


def _open(target: str, config: Config, directory: Path) -> Sink:
    name, _, project = target.partition(":")
    package = _need("tensorboardX" if name == "tensorboard" else name, target)
    try:
        return _OPEN[name](package, project, config, directory)
    except Exception as error:
        service, remedy = _REMEDY[name]
        reason = " ".join(str(error).split())
        raise UserError(
            f"log.to = {target!r}; {service} cannot be started: {reason}; {remedy}, or take it out"
            " of log.to"
        ) from error


def _open_tensorboard(package: Any, project: str, config: Config, directory: Path) -> Sink:
    """Event files in ``RUN/tensorboard``, written by tensorboardX."""
    place = directory / "tensorboard"
    place.mkdir(exist_ok=True)
    # Opened by the first call, because a file says at its beginning which step a run resumes from.
    writers: list[Any] = []

    def truncate_after(step: int) -> None:
        # The suffix, because names have seconds, and a file of the same name would be overwritten.
        suffix = f".after{step}"
        writers.append(
            package.SummaryWriter(str(place), purge_step=step + 1, filename_suffix=suffix)
        )

    def log(numbers: dict[str, float], step: int) -> None:
        if not writers:
            writers.append(package.SummaryWriter(str(place)))
        for name, value in numbers.items():
            writers[-1].add_scalar(name, value, step)
        writers[-1].flush()

    def close() -> None:
        for writer in writers:
            writer.close()

    return Sink("TensorBoard", log, close, truncate_after)


def _open_wandb(package: Any, project: str, config: Config, directory: Path) -> Sink:
    """A run on Weights & Biases."""
    run = package.init(
        project=project,
        name=directory.name,
        id=_run_id(directory, "wandb_id"),
        resume="allow",
        dir=str(directory),
        config=as_tree(config),
    )
    return Sink("Wandb", lambda numbers, step: run.log(numbers, step=step), run.finish)


def _open_trackio(package: Any, project: str, config: Config, directory: Path) -> Sink:
    """A run of trackio, on this machine or, with TRACKIO_SPACE_ID, in a Space of the Hub."""
    # trackio resumes by name, and other directories may have the same one.
    name = f"{directory.name}-{_run_id(directory, 'trackio_id')}"
    run = package.init(
        project=project, name=name, resume="allow", config=as_tree(config), embed=False
    )
    return Sink("Trackio", lambda numbers, step: run.log(numbers, step=step), run.finish)


def _open_mlflow(package: Any, project: str, config: Config, directory: Path) -> Sink:
    """A run of an MLflow experiment."""
    for name, value in _MLFLOW_PATIENCE.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("MLFLOW_TRACKING_URI")
    client = package.MlflowClient(address or f"sqlite:///{directory.resolve()}/mlflow.db")
    path = directory / "mlflow_id"
    if path.exists() and path.read_text(encoding="utf-8").strip():  # empty after a full disk
        run_id = path.read_text(encoding="utf-8").strip()
        client.update_run(run_id, status="RUNNING")
    else:
        experiment = client.get_experiment_by_name(project)
        number = (
            client.create_experiment(project) if experiment is None else experiment.experiment_id
        )
        run_id = client.create_run(number, run_name=directory.name).info.run_id
        params = [
            package.entities.Param(_mlflow_name(key), str(value)[:_MLFLOW_TEXT])
            for key, value in leaves(as_tree(config))
            if value != {}
        ]
        for i in range(0, len(params), 100):  # MLflow's limit of one call
            client.log_batch(run_id, params=params[i : i + 100])
        path.write_text(run_id, encoding="utf-8")

    def log(numbers: dict[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [
            package.entities.Metric(_mlflow_name(name), value, now, step)
            for name, value in numbers.items()
        ]
        for i in range(0, len(metrics), _MLFLOW_BATCH):
            client.log_batch(run_id, metrics=metrics[i : i + _MLFLOW_BATCH])

    return Sink("MLflow", log, lambda: client.set_terminated(run_id))


_OPEN: Mapping[str, Callable[[Any, str, Config, Path], Sink]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "mlflow": _open_mlflow,
}


def _mlflow_name(name: str) -> str:
    """A metric's name in the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /:]", "_", name)


def _run_id(directory: Path, name: str) -> str:
    """An id kept in the run directory, so that a resumed run stays one run."""
    path = directory / name
    if not path.exists() or not path.read_text(encoding="utf-8").strip():  # of a full disk
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
