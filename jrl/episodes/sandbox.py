"""Python of the policy's in processes of their own, with limits on everything it may use.

Where the system has ``unshare`` and lets it be used, the code has no network, no other processes in
sight, and nothing to write but empty temporary directories that vanish with it. Elsewhere a filter
of system calls (seccomp) keeps it from sockets and from the memory of other processes, and Landlock
from their files; where no filter can be had either, ``Sandbox(network=True)`` must say that the
network is no harm. It always runs without the caller's environment variables, with limits on
processor time, memory, output, files and processes, and it is killed with all its children at its
end. ``docs/safety.md`` says what is promised, and what is not: it may read files that everybody on
the machine may read, and a container or virtual machine around the trainer keeps it from those.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jrl.episodes.gate import Gate
from jrl.episodes.sandbox_watch import remove_tree, running, watch
from jrl.errors import UserError
from jrl.rewards.kill import children

if TYPE_CHECKING:
    from jrl.episodes.tools import Tool

_CHILD = Path(__file__).with_name("sandbox_child.py")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
_APART = ("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
_FIRST_UID, _UIDS = 1_300_000, 10_000
"""Unused user ids, one per concurrent process: process limits apply per user."""
_SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")
_LONGEST_CODE = 1 << 20
_AROUND_SECONDS = 10.0


class SandboxLimits(NamedTuple):
    """Limits of one run.

    Attributes:
      seconds: from start to end; also of processor time, rounded up.
      memory_bytes: of addresses in each process, and of memory in all of them together; the sum is
        looked at 20 times a second, and more ends the run.
      output_bytes: of output and errors; more ends the run.
      file_bytes: of one file, and of all temporary files together; where the code has no file
        system of its own, they are looked at 4 times a second, and more ends the run.
      processes: and threads.
      address_bytes: of addresses in each process, where they may be more than the memory, which
        compilers and virtual machines reserve; 0 for ``memory_bytes``.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 16 << 10
    file_bytes: int = 16 << 20
    processes: int = 16
    address_bytes: int = 0


class SandboxResult(NamedTuple):
    """Result of a run.

    Attributes:
      output: what was printed, errors included; cut at the limit.
      status: "ok", "error" (an exception, or an exit status other than 0), "timeout", "output",
        "memory" or "files" (too much of it), or "killed".
      seconds: how long it took.
    """

    output: str
    status: str
    seconds: float


class _Way(NamedTuple):
    """The containment that this machine allows.

    Attributes:
      python: its executable.
      prefix: the command before it that sets it apart, or ().
      filtered: whether a filter refuses system calls.
      fenced: whether Landlock refuses files, where nothing sets it apart.
    """

    python: str
    prefix: tuple[str, ...]
    filtered: bool
    fenced: bool


class Sandbox:
    """Runs Python.

    Args:
      limits: of each run; None for the usual ones.
      at_once: runs at a time, others wait; None for as many as there are cores.
      network: whether code may run where it cannot be cut off from the network.

    Attributes:
      apart: whether the code has no network and its own processes and temporary directories.
      offline: whether it has no network.

    Raises:
      UserError: no Python here can be run with fewer rights than the caller's; or code would have
        the network, as in a container that forbids ``unshare``, and ``network`` is False.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        at_once: int | None = None,
        network: bool = False,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._gate = Gate(at_once or os.cpu_count() or 1, "the sandbox")
        self._way = _way_in()
        self.apart = bool(self._way.prefix)
        self.offline = self.apart or self._way.filtered
        self._uids = itertools.cycle(range(_FIRST_UID, _FIRST_UID + _UIDS))
        if not (self.offline or network):
            raise UserError(
                "the sandbox cannot cut code off from the network: unshare (package util-linux) "
                "and seccomp are missing or forbidden here; start the container with "
                "--cap-add=SYS_ADMIN or --security-opt seccomp=unconfined, or set network = true "
                "to let code use the network"
            )
        if not self.apart:
            reach = "no network" if self.offline else "the network"
            files = "may leave files and see other processes"
            if self._way.fenced:
                files = "writes to a directory of its own alone"
            logging.getLogger("jrl").warning(
                f"sandbox: unshare cannot be used here; code has {reach} and {files}; "
                "limits hold; see docs/safety.md"
            )
        elif not self._way.filtered:
            logging.getLogger("jrl").warning(
                "sandbox: seccomp cannot be used here, so code may make namespaces inside its own, "
                "and file systems in memory beyond file_bytes"
            )

    async def run(self, code: str, *, longest: int = _LONGEST_CODE) -> SandboxResult:
        """Runs code and waits for its end, or ends it; never longer than a second past the limit.

        The time that a run waits for others, and that removing its files takes afterwards, is not
        counted; the first is not counted against ``Limits`` either.

        Args:
          code: Python source.
          longest: characters of it; longer code is an error.

        Raises:
          EnvError: no other run ends for ten minutes.
        """
        if len(code) > longest:
            return SandboxResult(f"code of {len(code)} characters is too long", "error", 0.0)
        async with self._gate:
            return await self._run(code)

    async def _run(self, code: str) -> SandboxResult:
        spec = _spec(self.limits, self._way, next(self._uids))
        if self.apart:
            return await self._run_in(None, spec, code)
        directory = tempfile.mkdtemp(prefix="jrl-sandbox-")
        try:
            if spec["uid"] is not None:
                os.chown(directory, spec["uid"], spec["uid"])
            return await self._run_in(directory, spec, code)
        finally:
            # In a thread: a slow disk takes seconds for thousands of files, and others wait here.
            await asyncio.to_thread(_remove, directory, spec["uid"])

    async def _run_in(
        self, directory: str | None, spec: dict[str, Any], code: str
    ) -> SandboxResult:
        """A run with this directory for its files, or with a file system of its own."""
        begin = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *_command(self._way, spec),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(directory),
            cwd=directory or "/",
            start_new_session=True,
        )
        status = "killed"
        output = bytearray()
        collecting = self._collect(process, code.encode("utf-8", "replace"), output)
        watching = watch(process.pid, self.limits, directory)
        try:
            status = await _first(collecting, watching, self.limits.seconds)
        finally:
            if status:
                _kill(process.pid)
            await finish(process)
            if not self.apart:
                _kill_left(process.pid, spec["uid"])
            await finish(process)  # what was killed only now had held the pipe
        if not status:
            status = "ok" if process.returncode == 0 else "error"
            if process.returncode and process.returncode < 0:
                status = "killed"
        text = bytes(output[: self.limits.output_bytes]).decode("utf-8", "replace")
        return SandboxResult(text, status, time.monotonic() - begin)

    async def _collect(
        self, process: asyncio.subprocess.Process, code: bytes, output: bytearray
    ) -> str:
        """Reads all output, up to the limit; "output" where there was more, else ""."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(code)
            await process.stdin.drain()
        process.stdin.close()
        while chunk := await process.stdout.read(1 << 16):
            output += chunk
            if len(output) > self.limits.output_bytes:
                return "output"
        return ""


async def _first(
    collecting: Coroutine[Any, Any, str], watching: Coroutine[Any, Any, str], seconds: float
) -> str:
    """The result of the first of two; "timeout" if neither returned in time."""
    tasks = [asyncio.create_task(each) for each in (collecting, watching)]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return next((task.result() for task in tasks if task in done), "timeout")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of a process that has ended its output, or was killed.

    asyncio learns of it only once the pipe has been read to its end.
    """
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while await process.stdout.read(1 << 16):
                pass
            await process.wait()
            return
    _kill(process.pid)  # it closed its output and lives on, or left a child that holds the pipe


def _environment(directory: str | None) -> dict[str, str]:
    return _ENVIRONMENT | ({"HOME": directory, "TMPDIR": directory} if directory else {})


def _spec(limits: SandboxLimits, way: _Way, uid: int) -> dict[str, Any]:
    """Settings for the child process; a root caller gives it a user id of its own."""
    child_uid = uid if os.geteuid() == 0 else None
    how = {"apart": bool(way.prefix), "filtered": way.filtered, "fenced": way.fenced}
    return {**limits._asdict(), **how, "uid": child_uid}


def _command(way: _Way, spec: dict[str, Any]) -> list[str]:
    return [*way.prefix, way.python, "-I", "-S", "-u", str(_CHILD), json.dumps(spec)]


def _kill(pid: int) -> None:
    """Kills a run: its group, and what ``unshare`` started, with which all its children end."""
    with contextlib.suppress(OSError):
        for child in children(pid):
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _kill_left(pid: int, uid: int | None) -> None:
    """Kills what a run without namespaces has left running.

    All that is in its group, which a filter keeps processes from leaving; where the run had a user
    id of its own, all that has it, until nothing is found.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for _ in range(100 if uid is not None else 0):
        left = running(uid=uid)
        left = [each for each in left if each != os.getpid()]
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if not left:
            return


def _remove(directory: str, uid: int | None) -> None:
    """Removes a run's directory, and what its own user id has left in the usual other places."""
    remove_tree(directory)
    for place in _SHARED if uid is not None else ():
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(place)):
                if entry.stat(follow_symlinks=False).st_uid != uid:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(entry.path)
                else:
                    os.unlink(entry.path)


@functools.cache
def _way_in() -> _Way:
    """The safest way to run Python here, found by trying."""
    unshare = shutil.which("unshare")
    rights = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    prefixes: list[tuple[str, ...]] = [(unshare, *rights, *_APART)] if unshare else []
    pythons = dict.fromkeys(
        p for p in (sys.executable, shutil.which("python3", path="/usr/bin")) if p
    )
    ways = [(prefix, filtered, False) for prefix in prefixes for filtered in (True, False)]
    ways += [((), True, True), ((), True, False), ((), False, True), ((), False, False)]
    for prefix, filtered, fenced in ways:
        for python in pythons:
            way = _Way(python, prefix, filtered, fenced)
            if _runs(way):
                return way
    raise UserError(
        f"the sandbox cannot run Python as another user: {', '.join(pythons)} cannot be read by "
        "everybody; install python3 of the system, or do not run as root"
    )


def _runs(way: _Way) -> bool:
    """Whether a sum comes out right."""
    spec = _spec(SandboxLimits(), way, _FIRST_UID + _UIDS)
    with (
        contextlib.suppress(OSError, subprocess.TimeoutExpired),
        tempfile.TemporaryDirectory(prefix="jrl-sandbox-") as directory,
    ):
        if spec["uid"] is not None:
            os.chown(directory, spec["uid"], spec["uid"])
        tried = subprocess.run(
            _command(way, spec),
            input=b"import json, math\nprint(json.loads('6') * 7)",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(directory),
            cwd="/" if way.prefix else directory,
            timeout=20,
            check=False,
        )
        return tried.stdout == b"42\n"
    return False


def python_tool(sandbox: Sandbox) -> Tool:
    """Python as a tool with one argument, "code"; each call starts a fresh interpreter."""
    from jrl.episodes.tools import (  # brings JAX along, which reward workers do without
        Tool,
        one_text,
    )

    async def call(code: str) -> str:
        result = await sandbox.run(code)
        limits = sandbox.limits
        ends = {
            "timeout": f"[ended after {limits.seconds:g} seconds]",
            "output": f"[ended after {limits.output_bytes} bytes of output]",
            "memory": f"[ended after using more than {limits.memory_bytes} bytes of memory]",
            "files": f"[ended after writing more than {limits.file_bytes} bytes of files]",
            "killed": "[killed]",
        }
        parts = [result.output.rstrip("\n"), ends.get(result.status, "")]
        return "\n".join(text for text in parts if text) or "[no output]"

    return Tool(
        name="python",
        description="Runs Python and returns what it prints, and the value of the last line.",
        parameters=one_text("code"),
        call=call,
        # The sandbox keeps the limit of a run; the rest is for starting and ending its process.
        seconds=_AROUND_SECONDS + sandbox.limits.seconds,
        longest=sandbox.limits.output_bytes,
    )
