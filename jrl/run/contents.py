"""Hashes of a run's input files, so that a resumed run notices changed ones.

A path says nothing about what it leads to. So the log's header holds a hash of the rows that were
read (after the template and the tokenizer, whatever kind of file they came from), of the tokenizer,
of adapters, reward models and judges on the run's devices, of the user's own files with the modules
beside them that they import, and of files that options name. The weights of ``model.path`` (a
checkpoint has its own) and data that a task makes are no part of it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import decimal
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.config import Config, as_tree
from jrl.config.stored import is_run, stored_contents
from jrl.config.write import leaves
from jrl.errors import UserError
from jrl.hub import hub_name
from jrl.models.file_tokenizer import FileTokenizer
from jrl.setup.run import Run

Contents = dict[str, str]
"""Key or file -> a hash; of rows their number stands before it, "16:9f86d081884c7d65"."""

_NAMES = " = "
"""Between an option and the file that it names, in keys of ``Contents``."""

_USER_FILE = re.compile(r"(?:source:)?(.+\.py):\w+")
_PLAIN = (
    *(bool, int, float, np.generic, decimal.Decimal),
    *(datetime.date, datetime.time, datetime.timedelta),
)
"""Types of values, beside text and bytes, that columns hold."""
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
    for key, path in _directories(run.config):
        hashes[key] = hashes.get(key, "") + _hash_directory(path)
    hashes |= {str(file): _hash(file.read_bytes()) for file in _own_files(run.config)}
    hashes |= {name: _hash(_ends_of(path)) for name, path in _option_files(run.config)}
    return {key: value for key, value in hashes.items() if value}


def check_contents(directory: str | Path, now: Contents) -> None:
    """Compares what a run reads with what it read when it was last begun or resumed.

    Changed code of the user's own is warned of, since a fault in it may have been mended, and so is
    a file that an option names, which a reward may write itself.

    Args:
      directory: of the run, which may hold none.
      now: of the run that is to be resumed.

    Raises:
      UserError: rows, the tokenizer or adapters are others than those that it began with.
    """
    before = stored_contents(Path(directory))
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    ours = [key for key in changed if key.endswith(".py") or _NAMES in key]
    for key in ours:
        warnings.warn(
            f"{key} has changed since the run in {directory} began; what follows is by the new one",
            stacklevel=2,
        )
    if fixed := [key for key in changed if key not in ours]:
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
    for name, options in as_tree(config)["rewards"].items():
        yield from ((f"rewards.{name}.path", path) for path in _texts(options.get("path")))
        for path in _texts(options.get("model")):  # of a judge; others may mean anything by it
            if (Path(path) / "config.json").is_file() or is_run(path):
                yield f"rewards.{name}.model", path


def _own_files(config: Config) -> list[Path]:
    """The user's Python files that a configuration names, and those that these import."""
    values = [*config.rewards, *_texts(as_tree(config))]
    names = {match[1] for value in values if (match := _USER_FILE.fullmatch(value))}
    files, ahead = set[Path](), [path for path in map(Path, names) if path.is_file()]
    while ahead:
        if (path := ahead.pop()) not in files:
            files.add(path)
            ahead += _imports(path)
    return sorted(files)


def _imports(path: Path) -> Iterator[Path]:
    """The files beside a Python file that it imports."""
    tree = ast.Module([], [])
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            names = [node.module or "", *(f"{module}{name}" for name in names)]
        for name in filter(None, names):
            place = path.parent / name.replace(".", "/")
            beside = (place.with_name(f"{place.name}.py"), place / "__init__.py")
            yield from (file for file in beside if file.is_file())


def _option_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Files that options of rewards, environments and methods name: (key and name, path)."""
    tree = as_tree(config)
    data = {name: tree["data"][name] for name in config.data.model_extra or {}}
    for table, options in (("rewards", tree["rewards"]), ("data", data)):
        for key, value in leaves(options, f"{table}."):
            for text in _texts(value):
                with contextlib.suppress(OSError, ValueError):  # too long, or with a null in it
                    if (path := Path(text)).is_file():
                        yield f"{key}{_NAMES}{text!r}", path


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _hash_directory(directory: str) -> str:
    """A hash of the files of a directory; "" for one of the Hub, which a commit names.

    Of a run they are those of its newest step: reports are written there later.
    """
    root = Path(directory)
    if hub_name(directory) is not None or not root.is_dir():
        return ""
    files = root.iterdir()
    if is_run(root) and not (root / "config.json").exists():
        steps = [each for each in root.glob("checkpoints/*") if each.name.isdigit()]
        newest = max(steps, key=lambda each: int(each.name), default=root / "checkpoints")
        files = newest.rglob("*")
    chosen = sorted(each for each in files if each.is_file())
    return _hash([(str(each.relative_to(root)), *_ends_of(each)) for each in chosen])


def _ends_of(file: Path) -> tuple[int, bytes, bytes]:
    """The size of a file, and what stands in it: all, or the first and the last MiB."""
    size = file.stat().st_size
    with file.open("rb") as data:
        begin = data.read(size if size <= _WHOLE else 1 << 20)
        data.seek(max(size - (1 << 20), 0))
        return size, begin, data.read()


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
    elif isinstance(value, _PLAIN) or value is None:
        digest.update(repr(value).encode())
    elif isinstance(value, Sequence | np.ndarray):
        for item in value:
            _feed(digest, item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _feed(digest, getattr(value, field.name))
    digest.update(b")")
