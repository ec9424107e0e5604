"""One writer for a run directory: a lock that ends with its process, however that ends.

``flock`` holds between the processes of a machine, and between machines on file systems that pass
it on: NFS since Linux 2.6.12, Lustre mounted with ``flock``, not mounted buckets. Where the file
system has no locks, nothing is locked and one line says so.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jrl.errors import StorageError, UserError
from jrl.system.processes import first_says

NAME = "run.lock"

_locks: dict[str, tuple[int, int, int]] = {}
"""Directories that this process has locked -> device and number of the file that it locked, and its
descriptor."""


@contextlib.contextmanager
def run_lock(directory: str | Path) -> Iterator[None]:
    """Holds a run directory; made if missing. All processes of a run enter it, the first locks.

    Args:
      directory: ``run.dir``.

    Raises:
      UserError: another process holds it, named with its host.
      StorageError: the directory cannot be written.
    """
    directory, file, fault = Path(directory), None, None
    if jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / NAME).open("a+", encoding="utf-8")
            if (holder := _take(file)) is not None:
                fault = ["held", f"run.dir = {str(directory)!r} is being written by {holder}; wait"
                         " until it ends, stop it, or name another directory"]  # fmt: skip
        except OSError as error:
            fault = ["storage", f"run.dir = {str(directory)!r} cannot be written: {error}"]
    try:
        fault = first_says(fault)
        if fault is not None:
            raise (UserError if fault[0] == "held" else StorageError)(fault[1])
        if file is not None:
            status = os.fstat(file.fileno())
            _locks[os.path.abspath(directory)] = status.st_dev, status.st_ino, file.fileno()
        yield
    finally:
        _locks.pop(os.path.abspath(directory), None)
        if file is not None:
            file.close()  # which unlocks it; the file stays, since removing it would be a race


def is_replaced(directory: str | Path) -> bool:
    """Whether a directory that this process has locked was renamed, removed or replaced since.

    What is written by its name would go to another directory, which nothing locks.
    """
    locked = _locks.get(os.path.abspath(directory))
    if locked is None:
        return False
    try:
        status = os.stat(Path(directory) / NAME)
    except FileNotFoundError:
        return True
    except OSError:  # a server of files that does not answer now
        return False
    return (status.st_dev, status.st_ino) != locked[:2]


def moved_to(directory: str | Path) -> Path | None:
    """Current path of a directory locked by this process; None if unknown.

    Linux tells the path of an open file, also after its directory was renamed.
    """
    locked = _locks.get(os.path.abspath(directory))
    if locked is None:
        return None
    with contextlib.suppress(OSError):
        file = Path(os.readlink(f"/proc/self/fd/{locked[2]}"))
        status = os.stat(file)
        if (status.st_dev, status.st_ino) == locked[:2]:
            return file.parent
    return None


def _take(file: Any) -> str | None:
    """Locks the file and writes who does; or says who has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        try:
            holder = json.loads(file.read())
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (ValueError, KeyError, TypeError):
            return "another process"
    except OSError as error:
        warnings.warn(
            f"{file.name} cannot be locked ({error}), so nothing keeps another process from"
            " writing this run",
            stacklevel=4,
        )
        return None
    file.truncate(0)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
    file.flush()
    return None
