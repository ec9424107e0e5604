"""Process trees: how much memory they hold, and ending them with all that they started.

Run as a script it is the warden of a reward pool: it reads the ids of worker processes on its
standard input and ends their trees when the trainer is gone, however that ended. It is a process of
its own because a worker cannot watch for it: a call that holds the interpreter's lock runs no other
line of Python. Imports the standard library alone, to start in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

_PAGE = os.sysconf("SC_PAGE_SIZE")


def adopt_orphans() -> None:
    """Makes this process the parent of orphans below it, so that no daemon leaves its tree."""
    if sys.platform != "linux":
        return
    import ctypes

    set_child_subreaper = 36  # of linux/prctl.h
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def tree(pid: int) -> list[int]:
    """The process and its descendants, parents first; where there is no /proc, the process."""
    pids = [pid]
    for parent in pids:
        pids += children(parent)
    return pids


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that it adopted."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                pids += [int(child) for child in file.read().split()]
    return pids


class TreeMemory:
    """Memory of a process tree that is looked at several times a second.

    Pages that several processes share, as forks do, are counted once. The kernel takes milliseconds
    a process to say so: it is asked where a tree may have grown beyond a limit since it last was,
    and else at most a hundredth of the time.
    """

    def __init__(self) -> None:
        self._total = self._shared = 0  # when the kernel was last asked; and what counted twice
        self._next = 0.0

    def bytes(self, pids: Iterable[int], above: int = 0, in_files: int = 0) -> int:
        """Memory at present; 0 where there is no /proc.

        Args:
          pids: of the processes.
          above: shared pages matter where the sum of resident sets is larger than this.
          in_files: bytes of files in memory that they write. Those that are mapped are in the
            resident sets too, and counted once.
        """
        pids = list(pids)
        total = sum(map(_resident, pids)) + in_files
        if not 0 < above < total or (len(pids) == 1 and not in_files):
            return total
        growth = max(total - self._total, 0)
        if time.monotonic() < self._next and self._total - self._shared + growth <= above:
            return self._total - self._shared + growth
        begin = time.thread_time()
        parts = [_proportional(pid) for pid in pids]
        mapped = sum(shared for _, shared in parts)
        exact = sum(size for size, _ in parts) - mapped + max(mapped, in_files)
        self._total, self._shared = total, total - exact
        self._next = time.monotonic() + 100 * (time.thread_time() - begin)
        return exact


def _proportional(pid: int) -> tuple[int, int]:
    """Bytes of a process, pages shared by n counted as 1/n; and those of them in shared memory."""
    sizes = {"Pss:": 0, "Pss_Shmem:": 0}
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                name, *rest = line.split()
                if name in sizes:
                    sizes[name] = 1024 * int(rest[0])
    except OSError:  # it has ended, or has made itself unreadable: then its whole resident set
        return _resident(pid), 0
    return sizes["Pss:"], sizes["Pss_Shmem:"]


def _resident(pid: int) -> int:
    """Bytes of a process's resident set; 0 where it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def kill_tree(pid: int) -> None:
    """Kills a process that leads a session, its session, and all its descendants.

    All are stopped before the first is killed, until no new one shows up: a process that forks
    faster than it is found would otherwise get away.
    """
    stopped: set[int] = set()
    for _ in range(100):
        new = [each for each in tree(pid) if each not in stopped]
        for each in new:
            _signal(each, signal.SIGSTOP)
        stopped.update(new)
        if not new:
            break
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    for each in stopped:
        _signal(each, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _main() -> None:
    workers: set[int] = set()
    for line in sys.stdin:  # until the trainer closes it or dies
        number = int(line)
        if number > 0:
            workers.add(number)
        else:
            workers.discard(-number)
    for pid in workers:
        kill_tree(pid)
        time.sleep(0)


if __name__ == "__main__":
    _main()
