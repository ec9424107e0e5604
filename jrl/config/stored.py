"""The configuration that a run directory holds: ``config.toml``, and its copy in the log's header.

One is held against the other, so that an edit or a damaged file is not taken for what the run began
with, and a run whose ``config.toml`` is lost is still that run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.config.read import build_config, load_config
from jrl.config.tables import Config
from jrl.config.write import config_hash, flatten, keys_of_servers, may_differ
from jrl.errors import UserError

_LONGEST = 1 << 24
"""Characters of a header at most, beyond which it is something else."""


def stored_config(directory: Path, overrides: Sequence[str] = ()) -> tuple[Config, str] | None:
    """The configuration of a run, with changes.

    Args:
      directory: of the run.
      overrides: as ``load_config`` takes them.

    Returns:
      (configuration, a line where it is that of the header), or None where there is neither.

    Raises:
      UserError: it cannot be read.
    """
    path, header = directory / "config.toml", _header(directory)
    if not path.exists():
        if header is None:
            return None
        note = f"{path} is missing; the configuration is that of the header of metrics.jsonl"
        return load_config(header["config"], overrides), note
    try:
        load_config(path)
    except UserError as error:
        if header is None:
            raise
        raise UserError(
            f"{error}\ndelete {path} to use the configuration of the header of metrics.jsonl"
        ) from None
    return load_config(path, overrides), ""


def override(key: str, text: str) -> str:
    """The override KEY=TEXT, quoted as TOML takes it, which knows no surrogate pairs.

    >>> override("run.dir", "a b")
    'run.dir="a b"'
    """
    return f"{key}={json.dumps(text, ensure_ascii=False)}"


def is_run(directory: Path | str) -> bool:
    """Whether a directory is a run's: it holds config.toml, or a log that begins with one."""
    path = Path(directory).expanduser()
    return (path / "config.toml").exists() or _header(path) is not None


def config_of_run(directory: Path | str) -> Config:
    """The configuration of a run, wherever its directory is now.

    Args:
      directory: of the run; see ``is_run``.

    Raises:
      UserError: it is none, or its configuration cannot be read.
    """
    directory = Path(directory).expanduser()
    stored = stored_config(directory, [override("run.dir", str(directory))])
    if stored is None:
        raise UserError(f"{directory} is not a run directory: it has no config.toml")
    return stored[0]


def check_unchanged(directory: Path, config: Config) -> None:
    """Raises UserError where ``config.toml`` is not what the run began with.

    Keys that may differ when a run resumes may differ here too.

    Args:
      directory: of the run.
      config: of its ``config.toml``.
    """
    header = _header(directory)
    if header is None or header.get("config_hash") == config_hash(config):
        return  # also where it is the header that is damaged
    try:
        began = build_config(header["config"])
    except UserError:
        return  # of another version of JRL
    if lines := differences(began, config, "in the header of metrics.jsonl", "there"):
        raise UserError(
            f"run.dir = {str(directory)!r}: config.toml is not what the run began with:"
            f" {'; '.join(lines)}; restore it, or delete config.toml to have it written again;"
            " other values want another run.dir"
        )


def differences(old: Config, new: Config, old_label: str, label: str) -> list[str]:
    """A line for each fixed key that differs between two configurations of one run.

    Args:
      old: the first configuration.
      new: the second one.
      old_label: text after values of the first.
      label: text after values of the second.
    """
    before, after = flatten(old), flatten(new)
    free = keys_of_servers(old) & keys_of_servers(new)
    lines = [
        f"{key} = {before.get(key)!r} {old_label}, {after.get(key)!r} {label}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and not may_differ(key)
        and key not in free
        and not (key == "model.remat" and after[key] == "auto")  # the run keeps its choice
    ]
    scheduled = after["optimizer.schedule"] != "constant"
    if scheduled and before["train.steps"] != after["train.steps"]:
        lines.append(
            f"train.steps = {before['train.steps']} {old_label}, {after['train.steps']} {label}: "
            f"the learning rate schedule ({after['optimizer.schedule']}) ends at the last step"
        )
    return lines


def stored_contents(directory: Path) -> dict[str, str]:
    """Hashes of a run's input files at its last start; see ``run.contents``.

    Args:
      directory: of the run; one without a log, or with one of an older version, has none.
    """
    header = _header(directory) or {}
    resumed = header.get("resumed")
    entries = [header, *(resumed if isinstance(resumed, list) else [])]
    tables = [e["contents"] for e in entries if isinstance(e, dict) and "contents" in e]
    return tables[-1] if tables and isinstance(tables[-1], dict) else {}


def _header(directory: Path) -> Mapping[str, Any] | None:
    """The first record of the log, where that holds a configuration."""
    path = directory / "metrics.jsonl"
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            record = json.loads(file.readline(_LONGEST))
    except (OSError, ValueError, RecursionError):
        return None
    has_config = isinstance(record, dict) and isinstance(record.get("config"), dict)
    return record if has_config else None
