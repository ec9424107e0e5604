"""Memory that processes hold in files: memfds and what they write in /dev/shm.

Written and not mapped it is in no process's resident set, and a closed file is in none at all. So
files that a process tree has open for writing are looked up in /proc, and remembered. Imports the
standard library alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

_SHM = "/dev/shm"
_MEMFD = "/memfd:"
_ACCESS = 3
"""The bits of a file's flags that say whether it is written; 0 for read only."""


def in_shm() -> frozenset[int]:
    """Inodes of the files right in /dev/shm; empty where there is none."""
    with contextlib.suppress(OSError), os.scandir(_SHM) as entries:
        return frozenset(entry.inode() for entry in entries)
    return frozenset()


class WrittenFiles:
    """Files in memory that a process tree has written since this was made.

    One that was in /dev/shm before does not count, nor does what is only read. A file counts until
    it is removed, also when it is closed.
    """

    def __init__(self) -> None:
        self._before = in_shm()
        self._paths: dict[int, str] = {}  # of files in /dev/shm, by inode

    def bytes(self, pids: Iterable[int]) -> int:
        """Current size of the files, bytes.

        Args:
          pids: of the tree's processes.
        """
        sizes: dict[tuple[int, int], int] = {}
        for pid in pids:
            with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:
                for file in files:
                    self._look(pid, file, sizes)
        for inode, path in list(self._paths.items()):
            try:
                status = os.stat(path)
            except OSError:
                del self._paths[inode]
                continue
            if status.st_ino == inode:
                sizes[status.st_dev, inode] = 512 * status.st_blocks
        return sum(sizes.values())

    def remove(self) -> None:
        """Removes those in /dev/shm, which would hold their memory after all processes ended."""
        for inode, path in self._paths.items():
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        self._paths.clear()

    def _look(self, pid: int, file: os.DirEntry[str], sizes: dict[tuple[int, int], int]) -> None:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            path = os.readlink(file.path)
            if not path.startswith((_MEMFD, f"{_SHM}/")):
                return
            with open(f"/proc/{pid}/fdinfo/{file.name}", encoding="ascii") as info:
                flags = next(line.split()[1] for line in info if line.startswith("flags:"))
            status = os.stat(file.path)  # follows to the file itself, removed or not
            if int(flags, 8) & _ACCESS == 0 or status.st_ino in self._before:
                return
            sizes[status.st_dev, status.st_ino] = 512 * status.st_blocks
            if path.startswith(f"{_SHM}/") and status.st_nlink:
                self._paths[status.st_ino] = path
