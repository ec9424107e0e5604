"""The priority of a process, and how long it waited for a processor; where Linux has both."""

from __future__ import annotations

import contextlib
import os

LOWEST = 19


def set_priority(pid: int, level: int) -> bool:
    """Sets the priority of the processes of a session; False where that is refused.

    Args:
      pid: leads the session.
      level: 0, or ``LOWEST``; the way back takes the rights of an administrator.
    """
    try:
        if not _nanoseconds(pid)[0]:
            return False  # nothing is known of it: its time limit could not take account of it
        os.setpriority(os.PRIO_PGRP, pid, level)
        # Where each session is a group of the scheduler's (autogroup of ``man sched``), priorities
        # of processes matter in their group alone, and the group has one of its own.
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"/proc/{pid}/autogroup", "r+", encoding="ascii") as file,
        ):
            file.write(str(level))
    except OSError:
        return False
    return True


def waited_seconds(pid: int) -> float:
    """Seconds that the threads of a process were ready to run, and waited for a processor.

    0 where it has ended, or the system does not say.
    """
    return _nanoseconds(pid)[1] / 1e9


def _nanoseconds(pid: int) -> tuple[int, int]:
    """Times that the threads of a process ran, and waited for a processor.

    A process that never waited has run; where neither is known, the system does not say.
    """
    ran = waited = 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                times = file.read().split()
                ran, waited = ran + int(times[0]), waited + int(times[1])
    return ran, waited
