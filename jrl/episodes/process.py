"""Environments in processes of their own: with other dependencies, or that may hang or die.

Each episode has a process, which serves the next one when it ends well and is killed when a call
fails, dies, or runs out of time. The process may run another Python, of a virtual environment that
has the environment's dependencies; JRL need not be installed there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.episodes.gate import Gate
from jrl.episodes.host import ChatOptions, EnvError, HostEnv, Lifecycle, Limits, Reply
from jrl.episodes.sandbox import finish
from jrl.errors import UserError
from jrl.types import NOTHING, Prompt

_WORKER = Path(__file__).with_name("worker.py")
_ANY = 1 << 30
"""Processes at a time where there is no limit."""


class _Process:
    """A process and whether it still answers."""

    def __init__(self, process: asyncio.subprocess.Process, most: int) -> None:
        self._process, self._most = process, most
        self.sound = True
        self._calls = 0

    def send(self, body: bytes) -> None:
        """Writes a message, after its length in eight bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write(len(body).to_bytes(8, "big") + body)

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request; kills the process if there is none.

        Raises:
          EnvError: the environment failed, or its process died, wrote too much, or answered
            another call.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._calls = number = self._calls + 1
        body = json.dumps({**request, "call": number}, default=str).encode()
        complete = False
        try:
            self.send(body)
            await stdin.drain()
            size = int.from_bytes(await stdout.readexactly(8), "big")
            if size > self._most:
                raise EnvError(f"an answer of {size} bytes; the limit is {self._most}")
            out = json.loads(await stdout.readexactly(size))
            if out.get("call") != number:  # what it started may have written, too
                raise EnvError("its process gave two answers to one call")
            complete = True
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EnvError("its process died") from error
        finally:
            if not complete:  # also where the call was cancelled
                self.kill()
        if "error" in out:
            raise EnvError(out["error"])
        return out["value"]

    def kill(self) -> None:
        """Kills the process and all that it started."""
        self.sound = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kills the process and waits for its end."""
        self.kill()
        await finish(self._process)


def process_env(
    env: str,
    options: Mapping[str, Any] = NOTHING,
    *,
    python: str | None = None,
    roles: tuple[str, ...] = ("user",),
    parts: tuple[str, ...] = ("reward",),
    limits: Limits = Limits(),  # noqa: B008 - a value that nobody can change
    at_once: int = 0,
) -> HostEnv:
    """The environment that a function returns, played in processes.

    Args:
      env: ``FILE.py:function`` or ``module:function``: an episode (``coroutine.coroutine_env``), or
        a function that is called in each process and returns an object with ``init``, ``step`` and
        perhaps ``close``, as ``HostEnv`` has them; prompt and reply have the same attributes, and
        feedback may be a dict.
      options: arguments of the function, JSON values or a ``Limits`` as "limits".
      python: the interpreter; None for this one.
      roles: of the messages that it answers with.
      parts: names of its reward parts.
      limits: of an episode.
      at_once: processes, and so open episodes, at a time; others wait for one, which costs them no
        time of their own. 0 for as many as there are episodes: those in the decode slots, and the
        groups that are opened ahead, about twice the slots.

    JAX in such a process sees the processor alone: accelerators are the run's.

    Raises:
      UserError: there is no such file or interpreter, or ``at_once`` is below 0.
    """
    python = python or sys.executable
    place, _, name = env.rpartition(":")
    if not place or not name:
        raise UserError(f"env = {env!r}; write FILE.py:function or module:function")
    if place.endswith(".py"):
        file = Path(place).expanduser()
        if not file.is_file():
            raise UserError(f"env = {env!r}: there is no file {place}")
        env = f"{file.resolve()}:{name}"
    if not Path(python).is_file():
        raise UserError(f"python = {python!r}: there is no such interpreter")
    if at_once < 0:
        raise UserError(f"at_once = {at_once}; must be at least 0")
    arguments = dict(options)
    if isinstance(arguments.get("limits"), Limits):
        arguments["limits"] = arguments["limits"]._asdict()
    settings = json.dumps({"env": env, "options": arguments}).encode()
    # Bytes of the largest answer that can be taken: any character may be six of them in JSON.
    most = 1024 + 8 * limits.answer_chars
    pool = _Pool([python, str(_WORKER)], settings, most, at_once)
    return HostEnv(
        init=pool.init,
        step=pool.step,
        close=pool.close,
        fork=None,  # the state is the process
        parts=parts,
        limits=limits,
        chat=ChatOptions(roles=roles),
        lifecycle=Lifecycle(shutdown=pool.shutdown, at_once=at_once),
    )


class _Pool:
    """The processes of one environment: those that play, and those that may play next."""

    def __init__(self, command: list[str], settings: bytes, most: int, at_once: int) -> None:
        self._command, self._settings, self._most = command, settings, most
        # Calls wait in the order of their groups, so that a group's members all get in.
        self._gate = Gate(at_once or _ANY, "a process of the environment")
        self._idle: list[_Process] = []
        self._alive: set[_Process] = set()

    async def _take(self) -> _Process:
        while self._idle:
            if (process := self._idle.pop()).sound:
                return process
        started = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        self._alive.add(process := _Process(started, self._most))
        process.send(self._settings)
        return process

    async def _drop(self, process: _Process) -> None:
        self._alive.discard(process)
        await process.end()

    async def init(self, prompt: Prompt, seed: int) -> tuple[_Process, Any]:
        """See ``HostEnv``; the state is the process."""
        await self._gate.enter()
        problem = {n: getattr(prompt, n) for n in ("id", "text", "answer", "question")}
        problem |= {"meta": {**prompt.meta}, "messages": [dict(m) for m in prompt.messages]}
        solution = None if prompt.solution is None else prompt.solution.tolist()
        problem |= {"tokens": prompt.tokens.tolist(), "solution": solution}
        process = None
        try:
            process = await self._take()
            return process, await process.ask({"do": "init", "prompt": problem, "seed": seed})
        except BaseException:
            try:
                if process is not None:
                    await self._drop(process)
            finally:
                self._gate.leave()
            raise

    async def step(self, process: _Process, reply: Reply) -> tuple[_Process, Any]:
        """See ``HostEnv``."""
        turn = reply._replace(tokens=reply.tokens.tolist())._asdict()
        return process, await process.ask({"do": "step", "reply": turn})

    async def close(self, process: _Process) -> None:
        """Ends an episode; its process may serve the next one."""
        try:
            if process.sound:
                await process.ask({"do": "close"})
        finally:
            try:
                if process.sound:
                    self._idle.append(process)
                else:
                    await self._drop(process)
            finally:
                self._gate.leave()

    async def shutdown(self) -> None:
        """Ends every process."""
        self._idle.clear()
        await asyncio.gather(*(self._drop(process) for process in list(self._alive)))
