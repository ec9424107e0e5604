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

from jrl.envs.host import EnvError, Feedback, HostEnv, Limits, Reply
from jrl.errors import UserError
from jrl.types import NOTHING, Prompt

_WORKER = Path(__file__).with_name("worker.py")


class _Process:
    """One process and whether it can be asked."""

    def __init__(self, process: asyncio.subprocess.Process, most: int) -> None:
        self._process, self._most = process, most
        self.sound = True

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request; kills the process if there is none.

        Raises:
          EnvError: the environment failed, or its process died or wrote too much.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        body = json.dumps(request, default=str).encode()
        answered = False
        try:
            stdin.write(len(body).to_bytes(8, "big") + body)
            await stdin.drain()
            size = int.from_bytes(await stdout.readexactly(8), "big")
            if size > self._most:
                raise EnvError(f"an answer of {size} bytes; the limit is {self._most}")
            out = json.loads(await stdout.readexactly(size))
            answered = True
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EnvError("its process died") from error
        finally:
            if not answered:  # also where the call was cancelled
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
        stdout = self._process.stdout
        assert stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while await stdout.read(1 << 16):
                    pass  # asyncio learns of the end once the pipe is read to its own
                await self._process.wait()


def process_env(
    env: str,
    options: Mapping[str, Any] = NOTHING,
    *,
    python: str | None = None,
    roles: tuple[str, ...] = ("user",),
    parts: tuple[str, ...] = ("reward",),
    limits: Limits = Limits(),  # noqa: B008 - a value that nobody can change
    memory_bytes: int = 0,
) -> HostEnv:
    """The environment that a function returns, played in processes.

    Args:
      env: ``FILE.py:function`` or ``module:function``. The function is called in each process and
        returns an object with ``init``, ``step`` and perhaps ``close``, as ``HostEnv`` has them;
        prompt and reply have the same attributes, and feedback may be a dict.
      options: arguments of the function, JSON values.
      python: the interpreter; None for this one.
      roles: of the messages that it answers with.
      parts: names of its reward parts.
      limits: of an episode.
      memory_bytes: of addresses, for each process; 0 for any.

    Raises:
      UserError: there is no such file or interpreter.
    """
    python = python or sys.executable
    place, _, name = env.rpartition(":")
    if not place or not name:
        raise UserError(f"env = {env!r}; write FILE.py:function or module:function")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UserError(f"env = {env!r}: there is no file {place}")
        env = f"{Path(place).resolve()}:{name}"
    if not Path(python).is_file():
        raise UserError(f"python = {python!r}: there is no such interpreter")
    given = {"env": env, "options": dict(options), "memory_bytes": memory_bytes}
    command = [python, str(_WORKER), json.dumps(given)]
    most = 1024 + 8 * limits.answer_chars  # bytes of the largest answer that can be taken
    idle: list[_Process] = []
    alive: set[_Process] = set()

    async def start() -> _Process:
        while idle:
            if (process := idle.pop()).sound:
                return process
        started = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        alive.add(process := _Process(started, most))
        return process

    async def init(prompt: Prompt, seed: int) -> tuple[_Process, Any]:
        process = await start()
        told = {n: getattr(prompt, n) for n in ("id", "text", "answer")} | {"meta": {**prompt.meta}}
        try:
            return process, await process.ask({"do": "init", "prompt": told, "seed": seed})
        except BaseException:
            alive.discard(process)
            await process.end()
            raise

    async def step(process: _Process, reply: Reply) -> tuple[_Process, Feedback]:
        told = reply._replace(tokens=reply.tokens.tolist())._asdict()
        value = await process.ask({"do": "step", "reply": told})
        return process, value

    async def close(process: _Process) -> None:
        try:
            if process.sound:
                await process.ask({"do": "close"})
        finally:
            if process.sound:
                idle.append(process)
            else:
                alive.discard(process)
                await process.end()

    async def shutdown() -> None:
        idle.clear()
        await asyncio.gather(*(process.end() for process in alive))
        alive.clear()

    return HostEnv(init, step, close, roles=roles, parts=parts, limits=limits, shutdown=shutdown)
