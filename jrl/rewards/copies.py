"""Workers as copies of a process that has loaded the reward functions.

A second of processor time goes into starting Python and importing what rewards import; a copy (a
fork) takes milliseconds. The process that is copied, the template, runs no call. Where loading the
functions leaves threads or open files, whose copies would not work, or be shared, it says so and
nothing is copied.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
from multiprocessing import connection, reduction
from typing import Any

import numpy as np

from jrl.rewards.worker import (
    CONTEXT,
    STUCK_SECONDS,
    Lost,
    answer_calls,
    enter,
    limit_waiting,
    load,
    start_process,
)

CAN_COPY = hasattr(os, "pidfd_open")
"""Whether this system has what copies need."""


class Template:
    """The trainer's handle of the process that is copied.

    Messages are numbers: 0 asks for a copy, the id of a copy that has ended for its exit code.

    Args:
      functions: the reward functions, pickled.

    Attributes:
      pid: its process.
      connection: readable once it is loaded.
      usable: whether it can be copied; None while it loads.
    """

    def __init__(self, functions: bytes) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, functions), daemon=True)
        try:
            start_process(self._process, functions)
        finally:
            theirs.close()
        self.pid: int = self._process.pid or 0
        self.usable: bool | None = None
        limit_waiting(self.connection, STUCK_SECONDS)

    def look(self) -> bool | None:
        """``usable``, as of now."""
        try:
            if self.usable is None and self.connection.poll():
                self.usable = self.connection.recv_bytes() == b"usable"
        except (OSError, EOFError):
            self.usable = False
        return self.usable

    def start(self, pipe: connection.Connection, printed: connection.Connection) -> Copy:
        """A copy that answers calls; raises Lost where the template has ended."""
        pid = self._answer(0, pipe, printed)
        try:
            return Copy(pid, self)
        except OSError as error:  # of a kernel that has no descriptors of processes
            self.usable = False
            raise Lost from error

    def exit_code(self, pid: int) -> int:
        """That of a copy that has ended; after it its id is free."""
        try:
            return self._answer(pid)
        except Lost:
            return -signal.SIGKILL  # the template and those that it started were killed

    def _answer(self, number: int, *pipes: connection.Connection) -> int:
        try:
            self.connection.send_bytes(b"%d" % number)
            for pipe in pipes:
                reduction.send_handle(self.connection, pipe.fileno(), self.pid)
            return int(self.connection.recv_bytes())
        except (OSError, EOFError, ValueError) as error:
            self.usable = False
            raise Lost from error

    def kill(self) -> None:
        """Kills it; its copies stay."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()


class Copy:
    """The process of a copy, as ``multiprocessing`` has processes of its own."""

    def __init__(self, pid: int, template: Template) -> None:
        self.pid, self._template = pid, template
        self._file = os.pidfd_open(pid)
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        if self._code is None and connection.wait([self._file], 0):
            self._code = self._template.exit_code(self.pid)
        return self._code

    def kill(self) -> None:
        """Kills it."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)

    def close(self) -> None:
        """Forgets it."""
        os.close(self._file)


# ---------------------------------------------------------------- in the template's process


def _serve(control: connection.Connection, pickled: bytes) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)  # what loading prints, workers have printed
    enter(nowhere, adopts=False)  # it would have to wait for them
    drawn, holds = _generators(), _holds()
    functions = load(pickled)
    # Copies of threads do not run, and two processes that share a connection confuse each other.
    usable = isinstance(functions, dict) and all(map(set.issuperset, holds, _holds()))
    seeded = random.getstate() if _generators() != drawn else None
    gc.freeze()  # or each copy would soon have written to all pages
    control.send_bytes(b"usable" if usable else b"")
    while usable:
        try:
            if number := int(control.recv_bytes()):
                answer = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
            else:
                pipe, printed = (reduction.recv_handle(control) for _ in range(2))
                if not (answer := os.fork()):
                    _be_worker(control, pipe, printed, functions, seeded)
                os.close(pipe)
                os.close(printed)
            control.send_bytes(b"%d" % answer)
        except (EOFError, OSError):  # also where no process can be forked: nothing is copied then
            return


def _be_worker(
    control: connection.Connection, pipe: int, printed: int, functions: Any, seeded: Any
) -> None:
    """Answers calls until nobody has any, and ends."""
    try:
        control.close()
        enter(printed)
        # Python has seeded its own generator anew, as it does in each copy. One that loading seeded
        # is to continue from there, as in processes that load for themselves.
        if seeded is None:
            np.random.seed()  # noqa: NPY002 - the generator that rewards may use
        else:
            random.setstate(seeded)
        answer_calls(connection.Connection(pipe), functions)
    finally:
        os._exit(0)


def _generators() -> bytes:
    """The states of the generators of this process."""
    return repr((random.getstate(), np.random.get_state())).encode()  # noqa: NPY002


def _holds() -> tuple[set[str], set[str]]:
    """The threads and the open files of this process."""
    return set(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
