"""A process that runs reward functions: its main loop, and the trainer's handle of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from jrl.errors import class_name, error_text
from jrl.rewards.base import Returned, RewardFn, Sample
from jrl.rewards.call import Failure, call
from jrl.rewards.kill import TreeMemory, adopt_orphans, children, kill_tree, tree
from jrl.rewards.priority import LOWEST, set_priority, waited_seconds
from jrl.rewards.shared_memory import WrittenFiles

# Forking a process that runs JAX can deadlock; spawning cannot.
CONTEXT = multiprocessing.get_context("spawn")

STUCK_SECONDS = 5
"""Limit for accepting a call, and for a pause within an answer; then the process is lost."""

_LARGEST_REPLY, _PIPE = 1 << 24, 1 << 20
"""Bytes of an answer, and of a pipe for output."""


_NUMBER = struct.Struct("<q")
"""Number of a call, before its pickle and in its answer."""


class Lost(Exception):
    """The process is dead, or broke the protocol."""


class Process(Protocol):
    """A worker process, as far as the pool uses it."""

    @property
    def pid(self) -> int | None:
        """Its id."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""

    def kill(self) -> None:
        """Kills it."""

    def close(self) -> None:
        """Forgets it, once it has ended."""


Start = Callable[[connection.Connection, connection.Connection], Process]
"""Starts a process that answers calls through a pipe, and prints into another."""


def new_process(
    functions: bytes, pipe: connection.Connection, printed: connection.Connection
) -> Process:
    """A process that loads pickled reward functions, and answers calls."""
    process = CONTEXT.Process(target=_serve, args=(pipe, printed, functions), daemon=True)
    start_process(process, functions)
    return process


def start_process(process: BaseProcess, functions: bytes) -> None:
    """Starts a process that loads pickled functions.

    A spawned process imports the running script. One that cannot be imported, or that would run
    again, is hidden from it unless a function is the script's own.
    """
    if script_is_importable() or b"__main__" in functions:
        process.start()
        return
    with _SCRIPT:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # of no file
        try:
            process.start()
        finally:
            sys.modules["__main__"] = script


_SCRIPT = threading.Lock()
"""Held while the script is hidden."""


def script_is_importable() -> bool:
    """Whether another process may import the running script: it has a guard, or no file at all."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return script is None or "__main__" in Path(script).read_text(encoding="utf-8")
    except (OSError, ValueError):  # "<stdin>", or no text
        return False


class RewardWorker:
    """The trainer's handle of one process that runs reward functions.

    Answers come as JSON and not as pickles: a pickle from a reward's process could run code in the
    trainer.

    Args:
      start: starts the process.

    Attributes:
      pid: its process, which leads a session of its own.
      connection: readable when an answer has arrived.
      output: readable when the process has printed.
      ready: whether the functions are loaded.
      call: its running call; None when idle.
      since: start of the process, or of its call; of ``time.monotonic``.
      failures: calls that have failed since one last succeeded.
      behind: whether it has the lowest priority.
    """

    def __init__(self, start: Start) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self.output, printed = CONTEXT.Pipe(duplex=False)
        try:
            self._process = start(theirs, printed)
        finally:
            # The parent's copies must close, or reading would never see the end of a dead worker's
            # pipe.
            theirs.close()
            printed.close()
        self.pid: int = self._process.pid or 0
        self.ready, self.since = False, time.monotonic()
        self.call: Any = None
        self.failures = 0
        self.behind = False
        self._waited_behind = self._waited_before = 0.0  # until, and when ``behind`` last changed
        self._largest = _LARGEST_REPLY
        self._number = 0  # of the latest call; the answer to loading has number 0
        self._files, self._memory = WrittenFiles(), TreeMemory()
        # Printing is read between other work; a blocking read would hold up every call.
        os.set_blocking(self.output.fileno(), False)
        if sys.platform == "linux":  # so that one who prints much seldom waits for a reader
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.output.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)
        limit_waiting(self.connection, STUCK_SECONDS)

    @property
    def idle(self) -> bool:
        """Whether it can take a call."""
        return self.ready and self.call is None

    def seconds(self) -> float:
        """Time since it started, or got its call."""
        return time.monotonic() - self.since

    def charged_seconds(self, limit: float) -> float:
        """Seconds of its call that count towards a limit.

        Without those, up to the limit again, that it waited for a processor while it was behind
        others: they must not end a call that would have been in time.
        """
        seconds = self.seconds()
        return seconds if seconds <= limit else seconds - min(self._waited(), limit)

    def put_behind(self, behind: bool) -> None:
        """Gives its call the lowest priority, or the usual one again where that is allowed.

        Not where it has started processes: they may have time limits that know nothing of it.
        """
        if behind == self.behind or (behind and children(self.pid)):
            return
        waited = self._waited()
        if set_priority(self.pid, LOWEST if behind else 0):
            self.behind, self._waited_behind = behind, waited
            self._waited_before = waited_seconds(self.pid)

    def _waited(self) -> float:
        """Seconds that its call waited while it was behind."""
        now = waited_seconds(self.pid) if self.behind else self._waited_before
        return self._waited_behind + max(now - self._waited_before, 0.0)

    def exit_code(self, wait_seconds: float = 0.0) -> int | None:
        """None while it runs."""
        # Not ``join``, which takes a process that closed its files for one that ended, and waits.
        give_up = time.monotonic() + wait_seconds
        while self._process.exitcode is None and time.monotonic() < give_up:
            time.sleep(0.01)
        return self._process.exitcode

    def send(self, call: Any, message: bytes) -> None:
        """Hands it a call; raises Lost, also where it has written something without a call."""
        if self._readable():
            raise Lost
        self._number += 1
        # Numbers by token, each as text, for token ids of four bytes.
        self._largest = max(_LARGEST_REPLY, 8 * len(message))
        try:
            self.connection.send_bytes(_NUMBER.pack(self._number) + message)
        except OSError as error:
            raise Lost from error
        self.call, self.since = call, time.monotonic()
        self._waited_behind = 0.0

    def _readable(self) -> bool:
        """Whether something can be read, as where an earlier call left a thread that writes."""
        try:
            return self.connection.poll()
        except OSError:
            return True

    def receive(self) -> list[Returned] | Failure | None:
        """The answer, if any: rewards, a Failure, or [] when loaded; raises Lost."""
        try:
            if not self.connection.poll():
                return None
            # Bounded: a length header may claim gigabytes.
            reply = json.loads(self.connection.recv_bytes(self._largest))
            # One answer a call: a second one, or one to another call, would give every later
            # completion the rewards of the one before it.
            if reply["call"] != self._number or (self.ready and self.call is None):
                raise Lost
            self.failures = self.failures + 1 if "reason" in reply else 0
            if "reason" in reply:
                return Failure(str(reply["reason"]), str(reply["trace"]))
            return [_points(value) for value in reply["rewards"]]
        except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise Lost from error

    def read_output(self) -> bytes:
        """Its output, as much as the pipe holds."""
        try:
            return os.read(self.output.fileno(), _PIPE)
        except OSError:
            return b""

    def memory_bytes(self, above: int) -> int:
        """Memory of the process and its descendants, including /dev/shm and memfds."""
        pids = tree(self.pid)
        return self._memory.bytes(pids, above, self._files.bytes(pids))

    def kill(self, *, its_files: bool = False) -> None:
        """Kills the process and its descendants; ``its_files`` removes its /dev/shm files too.

        Returns before they have ended, since memory takes its time to be freed; see ``ended``.
        """
        # The tree before the process: children of a dead parent are re-parented and harder to find.
        kill_tree(self.pid)
        if its_files:
            self._files.remove()
        self._process.kill()  # in case it does not lead a session yet
        self.connection.close()
        self.output.close()

    def ended(self, wait_seconds: float = 0.0) -> bool:
        """Whether a process that was killed has ended; then its id is free, and it is forgotten."""
        if self.exit_code(wait_seconds) is None:
            return False
        self._process.close()
        return True


def _points(value: Any) -> Returned:
    if isinstance(value, list):
        return [float(x) for x in value]
    return None if value is None else float(value)


def limit_waiting(pipe: connection.Connection, seconds: int) -> None:
    """A read or write that waits longer raises BlockingIOError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as both_ends:
        # On the file itself, since multiprocessing's own methods take no timeout for half a
        # message.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            both_ends.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


# ---------------------------------------------------------------- in the worker's process


def _serve(pipe: connection.Connection, printed: connection.Connection, pickled: bytes) -> None:
    enter(printed.fileno())
    answer_calls(pipe, load(pickled))


def enter(printed: int, *, adopts: bool = True) -> None:
    """Makes this process one that runs functions, and prints into an open file."""
    os.setsid()  # the terminal's Ctrl-C is for the trainer; and what it starts can be found
    if adopts:
        adopt_orphans()
    # A reward that is killed for its memory must not write that memory to disk as a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for standard in (1, 2):
        # File descriptors, so that C code and children print through the pipe as well.
        os.dup2(printed, standard)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a reward that uses JAX must not take the accelerator


def answer_calls(pipe: connection.Connection, functions: Mapping[str, RewardFn] | Failure) -> None:
    """Says whether the functions are loaded, and answers calls until the pipe closes."""
    _reply(pipe, 0, functions if isinstance(functions, Failure) else [])
    while not isinstance(functions, Failure):
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        (number,) = _NUMBER.unpack(message[: _NUMBER.size])
        _reply(pipe, number, _answer(functions, message[_NUMBER.size :]))


def _reply(pipe: connection.Connection, number: int, answer: list[Returned] | Failure) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the reward may have replaced it
            stream.flush()
    message: dict[str, Any] = {"call": number}
    if isinstance(answer, Failure):
        message |= {"reason": answer.reason, "trace": answer.trace}
    else:
        message["rewards"] = answer
    pipe.send_bytes(json.dumps(message).encode())


def _answer(functions: Mapping[str, RewardFn], message: bytes) -> list[Returned] | Failure:
    try:
        name, samples = pickle.loads(message)
    except Exception as error:
        return Failure(f"its samples could not be read in a worker process: {error_text(error)}")
    try:
        return call(functions[name], samples)
    except KeyboardInterrupt:
        return Failure("raised KeyboardInterrupt")


def load(pickled: bytes) -> dict[str, RewardFn] | Failure:
    """The functions, loaded and prepared outside of the first call's time limit."""
    try:
        loaded: dict[str, RewardFn] = pickle.loads(pickled)
        for function in loaded.values():
            attribute(function, "prepare", lambda: None)()
        return loaded
    except (Exception, SystemExit) as error:
        kind = class_name(error)
        return Failure(f"could not be loaded in a worker process: {kind}: {error_text(error)}")


def attribute(function: RewardFn, name: str, default: Any) -> Any:
    """An attribute of a function, or of the function that a partial binds."""
    return getattr(function, name, getattr(getattr(function, "func", None), name, default))


def pickled_call(name: str, samples: list[Sample]) -> bytes | Failure:
    """A call as bytes, for ``RewardWorker.send``."""
    try:
        return pickle.dumps((name, samples))
    except Exception as error:
        return Failure(f"its samples could not be sent to a worker process: {error_text(error)}")
