"""The run directory: configuration, metrics, samples and a summary.

    config.toml    the complete configuration
    metrics.jsonl  first the header (versions, device, mesh, config, seed), then an object a step
    samples.jsonl  some rollouts with their rewards
    summary.json   written at the end

Numbers in JSON are finite: NaN and infinity are written as null. Lines that cannot be written are
kept and tried again with the next ones; where that does not help for LOG_SECONDS, the run ends. An
error of TensorBoard or Weights & Biases never ends a run.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.config import Config, as_tree, config_hash, dump
from jrl.config.stored import check_unchanged, differences, stored_config
from jrl.errors import StorageError, UserError
from jrl.storage.lock import is_replaced
from jrl.storage.sinks import Sink, open_sinks
from jrl.system.extras import DISTRIBUTION, version
from jrl.system.json_text import json_or_none
from jrl.system.processes import first_says
from jrl.system.wait_reports import waiting

_PACKAGES = (
    *("jrl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy"),
    "math-verify",  # the math reward depends on whether it is installed
)
_DISTRIBUTIONS = {"jrl": DISTRIBUTION}

LOG_SECONDS = 20.0
"""Retry time of writes to the run's files before the run ends."""

SINK_SECONDS = 60.0
"""Delay before a failed tracker is retried, since each attempt may block until its timeout."""

CLOCKS = frozenset(
    {
        *("seconds", "tokens_per_second", "rollout_seconds", "reward_seconds", "waited_seconds"),
        "judge_seconds",
        *("mfu", "compiles", "new_compiles", "host_memory_bytes"),
    }
)
"""Metrics of the machine and not of the training. No two runs have the same, so they are no part of
what is compared where runs shall be equal, such as a resumed one and an unbroken one."""


def plain(tree: Any) -> Any:
    """A tree of arrays and numbers as strict JSON values; device arrays are fetched together.

    Args:
      tree: dicts, lists and tuples of arrays, numbers, strings, booleans and None.

    Returns:
      The same tree of dicts, lists and Python scalars; NaN and infinity become None, an array of
      one element a number, a larger one a list.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return _plain(tree)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(np.float64)  # JSON has no bfloat16
        return _plain(array.item() if array.size == 1 else array.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | bool | int) else str(value)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file that a run wrote.

    Args:
      path: the file; a missing one is empty.

    Returns:
      One dict a line. Lines that are not complete JSON objects are skipped: a killed run leaves
      a partial line at the end, a full disk can leave one in the middle.
    """
    if not Path(path).exists():
        return []
    return _parsed(Path(path).read_text(encoding="utf-8", errors="replace"))


def read_summary(directory: str | Path) -> dict[str, Any]:
    """The object in a run's ``summary.json``; {} without one, as before the run's end."""
    try:
        text = (Path(directory) / "summary.json").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    summary = json_or_none(text)
    return summary if isinstance(summary, dict) else {}


def _parsed(text: str) -> list[dict[str, Any]]:
    records = []
    # not splitlines(): a record's text may hold other line separators, such as U+2028
    for line in text.split("\n"):
        if isinstance(record := json_or_none(line), dict):  # else bytes of something else
            records.append(record)
    return records


def write_atomic(path: str | Path, text: str) -> None:
    """Writes a file atomically: under a temporary name in the same directory, then renamed.

    Args:
      path: the file.
      text: its new content.

    Raises:
      OSError: it cannot be written; the old file is unchanged.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def header(config: Config, mesh: Mapping[str, int]) -> dict[str, Any]:
    """The first record of ``metrics.jsonl``: identity of the run, versions and devices.

    Args:
      config: the run's configuration.
      mesh: devices along each axis of the mesh in use.

    Returns:
      A dict with ``versions``, ``device``, ``mesh``, ``seed``, ``config``, ``config_hash`` and
      ``started``.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        versions[package] = version(_DISTRIBUTIONS.get(package, package), "not installed")
    devices = jax.devices()
    return {
        "versions": versions,
        "device": {
            "kind": devices[0].device_kind,
            "platform": devices[0].platform,
            "count": len(devices),
            "processes": jax.process_count(),
        },
        "mesh": dict(mesh),
        "seed": config.seed,
        "config": as_tree(config),
        "config_hash": config_hash(config),
        "started": _now(),
    }


class RunWriter:
    """Writes a run directory; on every process but the first it does nothing.

    Attributes:
      dir: the run directory.
      resuming: whether the directory already held this run.
    """

    def __init__(
        self,
        config: Config,
        *,
        mesh: Mapping[str, int] | None = None,
        contents: Mapping[str, str] | None = None,
    ) -> None:
        """Opens ``config.run.dir``, for a new run or to resume one.

        Args:
          config: the run's configuration, with ``run.dir`` set.
          mesh: devices along each axis of the mesh in use; ``config.mesh_axes`` when None.
          contents: hashes of what the run reads from files, for its header; None to leave them out.

        Raises:
          UserError: the directory cannot be made, holds a run with another configuration, or
            conflicts with ``run.resume``.
        """
        if config.run.dir is None:
            raise UserError("run.dir is missing; set it to a directory for this run")
        self.dir = Path(config.run.dir)
        # Process 0 decides before it writes; the others may look later and would see its files.
        self.resuming = first_says(check_run_dir(config))
        self._active = jax.process_index() == 0
        self._warned = False
        self._pending: dict[str, str] = {}  # by file, what could not be written yet
        self._fault: tuple[float, str] | None = None  # since when, and why
        self._sinks: list[Sink] = []
        self._failed: dict[int, float] = {}  # by index of the sink, when
        self._resumed_at: int | None = None  # a step whose evaluation may be made again
        if not self._active:
            return
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            write_atomic(self.dir / "config.toml", dump(config))
        except OSError as error:
            raise UserError(f"run.dir = {str(self.dir)!r} cannot be written: {error}") from None
        self._header = header(config, config.mesh_axes if mesh is None else mesh)
        if contents is not None:
            self._header["contents"] = dict(contents)
        self._sinks = open_sinks(config, self.dir)
        if not self.resuming:
            self._append("metrics.jsonl", [self._header])

    def truncate_after(self, step: int, unwritten: Mapping[str, str] | None = None) -> None:
        """Removes records after a step, before those steps run again, and tells trackers of it.

        Call it once when resuming from a checkpoint, with the checkpoint's step; -1 removes all
        records. The header stays and gets an entry in ``resumed``.

        Args:
          step: the last training step whose records stay.
          unwritten: what the property of this name was when the checkpoint was made.

        Raises:
          StorageError: the files cannot be written.
        """
        if not self._active:
            return
        self._resumed_at = step
        first, *rest = read_jsonl(self.dir / "metrics.jsonl") or [self._header]
        if "versions" not in first:
            first, rest = self._header, [first, *rest]
        noted = ("versions", "device", "mesh", "started", "contents")
        again = {key: self._header[key] for key in noted if key in self._header}
        first["resumed"] = [*first.get("resumed", []), {"step": step, **again}]
        samples, records = read_jsonl(self.dir / "samples.jsonl"), _until(rest, step)
        records += _missing((unwritten or {}).get("metrics.jsonl", ""), records)
        kept_samples = _until(samples, step)
        kept_samples += _missing((unwritten or {}).get("samples.jsonl", ""), kept_samples)
        absent = step - len({r["step"] for r in records if r.get("step", 0) > 0})
        if step > 0 and absent > 0:
            warnings.warn(
                f"{self.dir / 'metrics.jsonl'} lacks {absent} of the {step} steps up to the"
                " checkpoint; they could not be logged, or the file was damaged",
                stacklevel=2,
            )
        try:
            self._rewrite("metrics.jsonl", [first, *records])
            self._rewrite("samples.jsonl", kept_samples)
            (self.dir / "summary.json").unlink(missing_ok=True)
        except OSError as error:  # steps would be logged twice
            raise StorageError(
                f"{self.dir}: the logs cannot be written ({error.strerror}); free disk space"
            ) from error
        for i, sink in enumerate(self._sinks):
            self._guard(i, sink.truncate_after, step)

    def last_evaluation(self, step: int) -> dict[str, Any]:
        """The final evaluation of a run at a step, as a record; only the step if there is none.

        Call it before ``truncate_after``, which removes ``summary.json``.

        Args:
          step: of the checkpoint that is resumed from.
        """
        metrics: dict[str, Any] = {}
        if self._active:
            summary = read_summary(self.dir)
            after = summary.get("eval_after")
            if summary.get("steps") == step and isinstance(after, dict):
                metrics = {f"eval/{name}": x for name, x in after.items()}
        return {"step": step, **first_says(metrics)}

    def lacks_evaluation(self, step: int) -> bool:
        """Whether the record of a step, which there is, holds no metric of an evaluation."""
        records = read_jsonl(self.dir / "metrics.jsonl") if self._active else []
        of_step = [record for record in records if record.get("step") == step]
        evaluated = any(name.startswith("eval/") for record in of_step for name in record)
        return bool(first_says(bool(of_step) and not evaluated))

    def add_to_record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to the record of a step; trackers get them at that step.

        Raises:
          StorageError: the file cannot be written.
        """
        if not self._active or not metrics:
            return
        records = read_jsonl(self.dir / "metrics.jsonl")
        more = plain(dict(metrics))
        try:
            self._rewrite(
                "metrics.jsonl", [r | more if r.get("step") == step else r for r in records]
            )
        except OSError as error:
            raise StorageError(
                f"{self.dir}: the logs cannot be written ({error.strerror}); free disk space"
            ) from error
        for i, sink in enumerate(self._sinks):
            self._guard(i, sink.write, {"step": int(step), **more})

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Logs one step's metrics.

        Args:
          step: training steps done.
          metrics: numbers or scalar arrays by name.

        Returns:
          The record as written: ``step`` and the metrics as Python numbers, None for NaN.
        """
        record = {"step": int(step), **plain(dict(metrics))}
        if self._active:
            self._append("metrics.jsonl", [record])
            for i, sink in enumerate(self._sinks):
                if time.monotonic() - self._failed.get(i, -math.inf) >= SINK_SECONDS:
                    self._guard(i, sink.write, record)
        return record

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Logs some rollouts.

        Args:
          step: training steps done when they were sampled.
          samples: dicts with ``prompt``, ``completion`` and ``answer`` (text), ``rewards`` (points
            by reward part, unweighted), ``reward`` (points, the weighted sum), ``stop`` (name of
            the stop reason) and ``length`` (tokens); further fields are logged as they are.
        """
        if self._active:
            records = [{"step": int(step), **plain(dict(sample))} for sample in samples]
            if step == self._resumed_at:
                self._resumed_at = None
                self._drop_evaluated(step)
            self._append("samples.jsonl", records)

    def _drop_evaluated(self, step: int) -> None:
        """Removes the samples of a step's evaluation, which is made again."""
        before = read_jsonl(self.dir / "samples.jsonl")
        rest = [r for r in before if (r.get("step"), r.get("split")) != (step, "eval")]
        if len(rest) < len(before):
            with contextlib.suppress(OSError):  # a full disk; then they stand there twice
                self._rewrite("samples.jsonl", rest)

    def write_summary(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Writes ``summary.json`` atomically, and returns its content.

        Raises:
          StorageError: it cannot be written.
        """
        record = plain(dict(summary))
        if self._active:
            text = json.dumps(record, indent=2, allow_nan=False, ensure_ascii=False)
            try:
                write_atomic(self.dir / "summary.json", text + "\n")
            except OSError as error:
                raise StorageError(
                    f"{self.dir / 'summary.json'} cannot be written ({error.strerror}); free disk"
                    " space"
                ) from error
        return record

    def close(self) -> None:
        """Closes the trackers' runs; the files need no closing."""
        for i, sink in enumerate(self._sinks):
            self._guard(i, sink.close)
        self._sinks = []

    def _append(self, name: str, records: list[dict[str, Any]]) -> None:
        lines = [json.dumps(r, allow_nan=False, ensure_ascii=False) + "\n" for r in records]
        self._append_text(name, "".join(lines))

    def _append_text(self, name: str, text: str) -> None:
        """Appends to a file; text that cannot be written is kept for the next time."""
        text = self._pending.pop(name, "") + text
        path, before = self.dir / name, None
        try:
            if is_replaced(self.dir):
                raise FileNotFoundError(errno.ENOENT, "the directory is not there any more")
            before = path.stat().st_size if path.exists() else 0
            torn = self._fault is not None and _is_torn(path)
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" + text if torn else text)
        except OSError as error:
            self._pending[name] = text
            if before is not None:
                with contextlib.suppress(OSError):  # a partial line of it
                    os.truncate(path, before)
            now = time.monotonic() if self._fault is None else self._fault[0]
            self._fault = now, f"{path} cannot be written ({error.strerror})"
        else:
            if not self._pending:
                self._fault = None

    def sync(self) -> None:
        """Has the system write the logs to the disk, which it may put off for half a minute."""
        if not self._active:
            return
        with waiting("logs to reach the disk"):
            for name in ("metrics.jsonl", "samples.jsonl"):
                with contextlib.suppress(OSError), (self.dir / name).open("rb") as file:
                    os.fsync(file.fileno())

    @property
    def unwritten(self) -> dict[str, str]:
        """Unwritten lines by file, for a checkpoint; {} as a rule."""
        return dict(self._pending)

    def retry(self) -> None:
        """Writes the text that could not be written before.

        Raises:
          StorageError: they still do not.
        """
        for name in list(self._pending):
            self._append_text(name, "")
        if fault := self.fault(0.0):
            raise StorageError(f"{fault}; free disk space")

    def fault(self, patience: float | None = None) -> str:
        """The reason that files cannot be written, after LOG_SECONDS of trying; "" before.

        Args:
          patience: seconds instead of LOG_SECONDS.
        """
        patience = LOG_SECONDS if patience is None else patience
        if self._fault is None or time.monotonic() - self._fault[0] < patience:
            return ""
        return self._fault[1]

    def _rewrite(self, name: str, records: list[dict[str, Any]]) -> None:
        lines = (json.dumps(r, allow_nan=False, ensure_ascii=False) + "\n" for r in records)
        write_atomic(self.dir / name, "".join(lines))

    def _guard(self, index: int, call: Callable[..., object], *args: object) -> None:
        """Calls a sink; warns about the first error of any, and the run continues."""
        try:
            call(*args)
        except Exception as error:
            self._failed[index] = time.monotonic()
            reason = " ".join(str(error).split())
            with contextlib.suppress(OSError):  # standard error may be on the same full disk
                if not self._warned:
                    name = self._sinks[index].name
                    print(f"jrl: warning: logging to {name} failed: {reason}", file=sys.stderr)
                    print(
                        f"jrl: warning: training continues; {name} is tried again every"
                        f" {SINK_SECONDS:.0f} s",
                        file=sys.stderr,
                    )
            self._warned = True


def check_run_dir(config: Config) -> bool:
    """Whether ``run.dir`` already holds this run.

    Args:
      config: the run's configuration, with ``run.dir`` set.

    Returns:
      True if there is a run to resume, False if the directory holds none.

    Raises:
      UserError: it holds a run with another configuration (``run.*`` and ``train.steps`` may
        differ), or ``run.resume`` forbids what is there.
    """
    directory = Path(config.run.dir or "")
    try:
        is_file = directory.exists() and not directory.is_dir()
    except OSError as error:  # a name that is too long, a directory that may not be entered
        raise UserError(
            f"run.dir = {str(directory)!r:.120}: {error.strerror}; name another directory"
        ) from None
    if is_file:
        raise UserError(f"run.dir = {str(directory)!r} is a file; name a directory")
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json"):
        if (directory / name).is_dir():
            raise UserError(f"{directory / name} is a directory and not a file; move it away")
    try:
        stored = _config_of(directory)
    except UserError as error:
        raise UserError(
            f"run.dir = {str(directory)!r} holds a run whose configuration cannot be read; name"
            f" another directory\n{error}"
        ) from None
    holds_run = stored is not None
    if config.run.resume == "must" and not holds_run:
        raise UserError(f"run.dir = {str(directory)!r} holds no run, but run.resume = 'must'")
    if stored is None:
        return False
    if config.run.resume == "never":
        raise UserError(
            f"run.dir = {str(directory)!r} holds a run, but run.resume = 'never'; name another"
            " directory, or set run.resume to 'auto' to resume it"
        )
    check_unchanged(directory, stored)
    if differing := differences(stored, config, "there", "now"):
        raise UserError(
            f"run.dir = {str(directory)!r} holds a run with another configuration; name another"
            " directory, or restore these keys:\n  " + "\n  ".join(differing)
        )
    return True


def _config_of(directory: Path) -> Config | None:
    """The configuration of the run that a directory holds; None where it holds none."""
    if (stored := stored_config(directory)) is not None:
        return stored[0]
    metrics = directory / "metrics.jsonl"
    records = read_jsonl(metrics) if metrics.is_file() else []
    folder = directory / "checkpoints"
    if records or (folder.is_dir() and any(p.name.isdigit() for p in folder.iterdir())):
        raise UserError(f"{directory} has steps of a run and no config.toml; put that back")
    return None


def _until(records: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    steps = [(record, record.get("step", step)) for record in records]
    return [record for record, at in steps if isinstance(at, int | float) and at <= step]


def _is_torn(path: Path) -> bool:
    """Whether a file ends within a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _missing(text: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records in some text that a file does not hold."""
    return [r for r in _parsed(text) if "versions" not in r and r not in records]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
