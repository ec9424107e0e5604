"""Resource use of all processes of a sandbox run, and removal of its files.

Limits of the kernel hold for one process or one file each; their sums are looked at from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jrl.rewards.kill import TreeMemory, tree

if TYPE_CHECKING:
    from jrl.episodes.sandbox import SandboxLimits

_LOOK_SECONDS = 0.05
_LOOKS = 5
"""Of memory for each look at files and at processes that have left their parents."""
_MOST_FILES = 4096


async def watch(pid: int, limits: SandboxLimits, directory: str | None) -> str:
    """Returns once a run is beyond a limit: "memory" or "files".

    Args:
      pid: the first process of the run, which leads its group.
      limits: of the run.
      directory: the run's files; None where they have a file system of their own.
    """
    orphans: list[int] = []
    memory = TreeMemory()
    for look in itertools.count(1):
        await asyncio.sleep(_LOOK_SECONDS)
        if directory is not None and look % _LOOKS == 0:
            # No process of a run can leave its group where it is not set apart.
            orphans = running(group=pid)
            if _is_beyond(directory, limits.file_bytes):
                return "files"
        # Where it is set apart, orphans are children of the first process inside.
        pids = dict.fromkeys([*tree(pid), *orphans])
        if memory.bytes(pids, above=limits.memory_bytes) > limits.memory_bytes:
            return "memory"
    raise AssertionError("count never ends")


def running(*, uid: int | None = None, group: int | None = None) -> list[int]:
    """Processes that have not ended.

    Args:
      uid: of their owner; None for any.
      group: number of their process group; None for any.
    """
    pids = []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError, IndexError):
            if not entry.name.isdigit() or uid not in (None, entry.stat().st_uid):
                continue
            # Bytes, since a process may give itself a name that is no text.
            fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
            # Z and X have ended, but Z is also a process whose first thread has, and others run.
            ended = fields[0] in (b"Z", b"X") and int(fields[17]) < 2
            if not ended and group in (None, int(fields[2])):
                pids.append(int(entry.name))
    return pids


def _is_beyond(directory: str, most: int) -> bool:
    """Whether the files in a directory take more bytes than this, or are very many."""
    size, count = 0, 0
    pending = [directory]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                count += 1
                with contextlib.suppress(OSError):
                    size += 512 * entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                if count > _MOST_FILES or size > most + 4096 * count:  # a file takes whole blocks
                    return True
    return False


_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(directory: str) -> None:
    """Removes a directory of a run that has ended, however deep and whatever its rights.

    ``shutil.rmtree`` recurses, keeps a file open for each level, and leaves directories that their
    owner may not read. Here one directory is open at a time, and no path is longer than a name.
    """
    with contextlib.suppress(OSError):
        place = _opened(directory, None)
        levels = [("", _directories(place))]
        while levels:
            name, inside = levels[-1]
            if inside:
                child = inside.pop()
                with contextlib.suppress(OSError):
                    place = _instead(place, _opened(child, place))
                    levels.append((child, _directories(place)))
                continue
            levels.pop()
            if levels:
                place = _instead(place, os.open("..", _OPEN, dir_fd=place))
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=place)
        os.close(place)
        os.rmdir(directory)


def _opened(name: str, place: int | None) -> int:
    os.chmod(name, 0o700, dir_fd=place)
    return os.open(name, _OPEN, dir_fd=place)


def _instead(place: int, other: int) -> int:
    """The other open directory; the first is closed."""
    os.close(place)
    return other


def _directories(place: int) -> list[str]:
    """The directories in an open one; its files are removed."""
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.name, dir_fd=place)
    return names
