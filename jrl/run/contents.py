"""Hashes of a run's input files, so that a resumed run notices changed ones.

A path says nothing about what it leads to. So the log's header holds a hash of the rows that were
read (after the template and the tokenizer, whatever kind of file they came from), of the tokenizer,
of the adapters of ``lora.path``, and of the user's own files. Other modules that those import, the
weights of ``model.path`` (a checkpoint has its own) and data that a task makes are no part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.config import Config, flatten
from jrl.config.stored import stored_contents
from jrl.errors import UserError
from jrl.hub import hub_name
from jrl.models.file_tokenizer import FileTokenizer
from jrl.setup.run import Run

Contents = dict[str, str]
"""Key or file -> a hash; of rows their number stands before it, "16:9f86d081884c7d65"."""

_USER_FILE = re.compile(r"(?:source:)?(.+\.py):\w+")
_WHOLE = 1 << 26
"""Bytes up to which a file of a directory is read whole; of larger ones the first and last MiB."""


def contents_of(run: Run) -> Contents:
    """The contents of everything that a run reads from files but weights of models.

    Args:
      run: with its data.
    """
    hashes: Contents = {}
    recorded = {"train": run.data.recorded} if run.data.recorded else {}
    for rows in (run.data.prompts, run.data.judged, recorded):
        for name, items in rows.items():
            key = f"data.{name}"
            hashes[key] = f"{len(items)}:{_hash(items)}" if len(items) else ""
    if isinstance(run.tokenizer, FileTokenizer):
        hashes["model.path"] = _hash(run.tokenizer.contents())
    hashes |= {key: _hash_directory(path) for key, path in _directories(run.config)}
    hashes |= {str(file): _hash(file.read_bytes()) for file in _own_files(run.config)}
    return {key: value for key, value in hashes.items() if value}


def check_contents(directory: str | Path, now: Contents) -> None:
    """Compares what a run reads with what it read when it was last begun or resumed.

    Changed code of the user's own is warned of, since a fault in it may have been mended.

    Args:
      directory: of the run, which may hold none.
      now: of the run that is to be resumed.

    Raises:
      UserError: rows, the tokenizer or adapters are others than those that it began with.
    """
    before = stored_contents(Path(directory))
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    for key in changed:
        if key.endswith(".py"):
            warnings.warn(
                f"{key} has changed since the run in {directory} began; what follows is by the new"
                " one",
                stacklevel=2,
            )
    if fixed := [key for key in changed if not key.endswith(".py")]:
        raise UserError(
            f"run.dir = {str(directory)!r}: "
            + "; ".join(_changed(key, before[key], now[key]) for key in fixed)
            + "; the steps that are done belong to the old contents: put them back, or start again"
            " in another run.dir"
        )


def _changed(key: str, before: str, now: str) -> str:
    """A clause on one key whose contents are others."""
    (then, colon, _), (rows, _, _) = before.partition(":"), now.partition(":")
    if colon and then != rows:
        return f"{key} has {rows} rows, and had {then} when the run began"
    names = {"model.path": "another tokenizer or chat template", "lora.path": "other adapters"}
    change = "other rows" if colon else names.get(key, "other files")
    return f"{key} holds {change} than when the run began"


def _directories(config: Config) -> Iterator[tuple[str, str]]:
    """Keys and local directories of weights that are read again when a run resumes."""
    if config.lora is not None and config.lora.path is not None:
        yield "lora.path", config.lora.path
    for name in config.rewards:
        path = flatten(config).get(f"rewards.{name}.path")
        if isinstance(path, str):
            yield f"rewards.{name}.path", path


def _own_files(config: Config) -> list[Path]:
    """The user's Python files that a configuration names, wherever it does."""
    values = [*config.rewards, *(v for v in flatten(config).values() if isinstance(v, str))]
    names = {match[1] for value in values if (match := _USER_FILE.fullmatch(value))}
    return sorted(path for path in map(Path, names) if path.is_file())


def _hash_directory(directory: str) -> str:
    """A hash of the files of a directory; "" for one of the Hub, which a commit names."""
    root = Path(directory)
    if hub_name(directory) is not None or not root.is_dir():
        return ""
    parts: list[Any] = []
    for file in sorted(each for each in root.iterdir() if each.is_file()):
        size = file.stat().st_size
        with file.open("rb") as data:
            begin = data.read(size if size <= _WHOLE else 1 << 20)
            data.seek(max(size - (1 << 20), 0))
            parts.append((file.name, size, begin, data.read()))
    return _hash(parts)


def _hash(value: Any) -> str:
    """16 hex digits of what a value holds, the same in every process."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Feeds a value to a hash; what is no data, such as a function, counts by its type alone."""
    digest.update(f"{type(value).__name__}(".encode())
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(digest, str(key))
            _feed(digest, value[key])
    elif isinstance(value, str):
        digest.update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, bool | int | float | np.generic) or value is None:
        digest.update(repr(value).encode())
    elif isinstance(value, Sequence | np.ndarray):
        for item in value:
            _feed(digest, item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _feed(digest, getattr(value, field.name))
    digest.update(b")")
