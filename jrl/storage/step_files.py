"""The files of a checkpoint step: their sizes, copies of the small ones, and reading past damage.

A step is a few large files of arrays and several small ones that say how to read them, of which
each alone would make the step unreadable. Their copies stand in ``sizes.json`` of the step. Where
that file is damaged itself, the others are whole, and are read as they are.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RECORD = "sizes.json"
REWRITTEN = (
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
)  # rewritten by orbax after the step is complete; no reader needs them
COPIED_BYTES = 1 << 20


def write_record(root: Any) -> None:
    """Writes ``sizes.json`` of a step whose other files are complete.

    Args:
      root: the step's directory, an ``epath.Path``.
    """
    record = {}
    for file in _files(root):
        entry: dict[str, Any] = {"size": file.stat().length}
        # Arrays, in directories called d, have checksums of their own.
        if file.parent.name != "d" and entry["size"] <= COPIED_BYTES:
            data = file.read_bytes()
            entry["crc32"] = zlib.crc32(data)
            entry["copy"] = base64.b64encode(zlib.compress(data)).decode()
        record[str(file.relative_to(root))] = entry
    (root / RECORD).write_text(json.dumps({"crc32": crc_of(record), "files": record}))


def crc_of(value: Any) -> int:
    """The CRC-32 of a JSON value, however it is spaced.

    >>> crc_of({"a": 1, "b": [2]}) == crc_of(json.loads('{ "b": [2], "a": 1 }'))
    True
    """
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


@contextlib.contextmanager
def readable(path: str) -> Iterator[tuple[str, list[str]]]:
    """A directory with the files of a step as they were written.

    Args:
      path: the step's directory, local or ``gs://``.

    Yields:
      (directory, names of the damaged files of which it holds the copies); the step's own directory
      where nothing is damaged.

    Raises:
      OSError: a file is truncated, missing or damaged, and there is no copy.
    """
    from etils import epath

    root = epath.Path(path)
    record = _read_record(root)
    damaged = {name: fault for name, e in record.items() if (fault := _fault(root / name, e))}
    for name, fault in damaged.items():
        if "copy" not in record[name] or "://" in path:
            raise OSError(f"{name} {fault}")
    if not damaged:
        yield path, []
        return
    with tempfile.TemporaryDirectory(prefix="jrl-step-") as mended:
        for name, entry in record.items():
            target = Path(mended) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in damaged:
                target.write_bytes(zlib.decompress(base64.b64decode(entry["copy"])))
            else:
                target.symlink_to(Path(path, name).absolute())
        yield mended, list(damaged)


def _read_record(root: Any) -> Mapping[str, Any]:
    """The entries of ``sizes.json`` by file; none where it is damaged, or of an older kind."""
    try:
        record = json.loads((root / RECORD).read_bytes())
        return record["files"] if crc_of(record["files"]) == record["crc32"] else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _fault(file: Any, entry: Mapping[str, Any]) -> str | None:
    """The defect of a file, or None.

    The array readers would notice a truncated one too, but with tracebacks of their threads on the
    terminal.
    """
    size = file.stat().length if file.exists() else 0
    if size != entry["size"]:
        return f"has {size} bytes of {entry['size']}"
    if "crc32" in entry and zlib.crc32(file.read_bytes()) != entry["crc32"]:
        return "has another checksum than when it was written"
    return None


def _files(root: Any) -> list[Any]:
    """Every file under an ``epath.Path`` that does not change once the step is complete."""
    files = []
    for path in root.iterdir():
        if path.is_dir():
            files += _files(path)
        elif path.name not in (*REWRITTEN, RECORD):
            files.append(path)
    return files


def what_is_saved(run: str | Path) -> str:
    """The newest complete checkpoint of a run directory, and the command that resumes from it."""
    folder = Path(run) / "checkpoints"
    try:
        steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit() and any(p.glob("*"))]
    except OSError:
        steps = []
    if steps:
        return f"step {max(steps)} is saved; `jrl train {shlex.quote(str(run))}` resumes from it"
    return f"no checkpoint is in {run}" if Path(run).is_dir() else f"{run} does not exist"
