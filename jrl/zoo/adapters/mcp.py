"""The tools of a server of the Model Context Protocol, for ``tool_env``.

    server = McpServer(["python", "my_server.py"])         # or McpServer("http://localhost:8000/mcp")
    env = server.close_with(tool_env(server.tools(), get_parser("hermes"), reward, limits))

A configuration names ``mcp``, as ``data.env = "jrl.zoo.adapters.mcp:mcp"``. The protocol is spoken
by the maintained client, package ``mcp``; the extra is of the same name.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import re
import subprocess
import threading
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jrl.episodes.gate import retrieve_error
from jrl.episodes.host import EnvError, HostEnv, Limits
from jrl.episodes.model_endpoint import environment_variable
from jrl.episodes.parsers import get_parser
from jrl.episodes.tools import Tool, ToolError, check_tool, tool_env
from jrl.errors import UserError
from jrl.system.extras import install_line, need
from jrl.zoo.envs.answer_rewards import EXACT, last_turn_reward

_START_SECONDS = 30.0
_MOST_PAGES = 100
_ANSWERS = (-32602,)
"""Codes of JSON-RPC with which a server refuses arguments; a client gives the others to errors of
its connection, too, such as a session that has ended."""


def mcp(
    server: str | Sequence[str],
    *,
    reward: str = EXACT,
    names: Sequence[str] = (),
    pass_variables: Sequence[str] = (),
    parser: str = "hermes",
    seconds: float = 10.0,
    system: str | None = None,
    limits: Limits = Limits(),  # noqa: B008 - a value that nobody can change
) -> HostEnv:
    """Questions that the policy answers with the tools of an MCP server.

    Args:
      server: its address, or the command that starts it, a list.
      reward: of the last turn: "exact", "f1", or ``FILE.py:function`` from (prompt, text), as in
        ``answer_rewards.judge_of``.
      names: of the tools, as the server has them; [] for all.
      pass_variables: names of environment variables that the command gets.
      parser: of the policy's family, by name.
      seconds: for one call of a tool.
      system: a system message, or None.
      limits: of an episode, by their names in a configuration.

    Raises:
      UserError: the server does not answer, or has no tool that can be used.
    """
    judge, family = last_turn_reward(reward), get_parser(parser)
    variables = {n: environment_variable(n, "data.pass_variables") for n in pass_variables}
    connected = McpServer(server, variables)
    try:
        tools = connected.tools(names, seconds=seconds)
        return connected.close_with(tool_env(tools, family, judge, limits, system=system))
    except BaseException:
        connected.close()
        raise


class McpServer:
    """A server and the connection to it, which a thread of its own keeps.

    A connection that breaks fails the calls under way; the next call opens another one.

    Args:
      server: the address of one that runs, or the command that starts one, spoken to through its
        standard input and output.
      variables: environment variables of the command, beside the few that the client passes on.

    Raises:
      UserError: the package is missing, or the server does not answer.
    """

    def __init__(
        self, server: str | Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        mcp = need("mcp", "mcp", "an MCP server")
        if not hasattr(mcp, "Client"):
            raise UserError(f"an MCP server needs mcp 2 or newer; {install_line('mcp')} --upgrade")
        self._name, self._client, self._refusal = server, mcp.Client, mcp.MCPError
        self._connect = lambda: server
        if not isinstance(server, str):
            stdio = need("mcp.client.stdio", "mcp", "an MCP server")
            parameters = mcp.StdioServerParameters(
                command=server[0], args=list(server[1:]), env=dict(variables or {}) or None
            )
            # What it writes to its standard error is not the run's.
            self._connect = lambda: stdio.stdio_client(parameters, errlog=subprocess.DEVNULL)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jrl-mcp", daemon=True)
        self._thread.start()
        self._connection: _Connection | None = None
        try:
            self._listed = self._list()
        except Exception as error:
            self.close()
            raise UserError(f"MCP server {server!r} does not answer: {_words(error)}") from None

    def _list(self) -> list[Any]:
        """The tools of all pages."""
        listed, cursor = list[Any](), None
        for _ in range(_MOST_PAGES):
            page = self._ask("list_tools", cursor=cursor).result(_START_SECONDS)
            listed += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return listed

    def tools(self, names: Sequence[str] = (), *, seconds: float = 10.0) -> list[Tool]:
        """The server's tools, all or those named, in that order.

        The policy calls them by ``plain_name``: "fs.read" is "fs_read" to it. A tool that cannot be
        used, because of its schema, is left out with a warning, unless it is named.

        Args:
          names: of tools, as the server has them; () for all.
          seconds: for one call.

        Raises:
          UserError: the server has no tool of a name, one that is named cannot be used, or none
            can.
        """
        offered = {tool.name: tool for tool in self._listed}
        for name in names:
            if name not in offered:
                choice = ", ".join(sorted(offered))
                raise UserError(f"MCP server {self._name!r} has no tool {name!r}; it has {choice}")
        tools: dict[str, Tool] = {}
        for name in names or offered:
            tool = self._tool(offered[name], plain_name(name, tools), seconds)
            try:
                check_tool(tool, f"MCP server {self._name!r}, tool {name!r}")
            except UserError as error:
                if names:
                    raise
                logging.getLogger("jrl").warning("%s; it is left out", error)
                continue
            tools[tool.name] = tool
        if not tools:
            raise UserError(f"MCP server {self._name!r} has no tool that can be used")
        return list(tools.values())

    def _tool(self, offered: Any, name: str, seconds: float) -> Tool:
        async def call(**arguments: Any) -> str:
            try:
                answer = self._ask("call_tool", offered.name, arguments)
                result = await asyncio.wrap_future(answer)
            except Exception as error:
                if self._refuses(error):  # as it does arguments beyond the schema
                    raise ToolError(_words(error)) from None
                raise EnvError(f"MCP server: {_words(error)}") from None
            text = "\n".join(_text(part) for part in result.content)
            if result.is_error:
                raise ToolError(text)
            return text

        return Tool(
            name=name,
            description=offered.description or "",
            parameters=offered.input_schema,
            call=call,
            seconds=seconds,
        )

    def close_with(self, env: HostEnv) -> HostEnv:
        """The environment, which ends the connection when the run ends."""

        async def shutdown() -> None:
            await env.lifecycle.shutdown()
            await asyncio.to_thread(self.close)

        return env._replace(lifecycle=env.lifecycle._replace(shutdown=shutdown))

    def close(self) -> None:
        """Ends the connection, the command and the thread."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            if self._connection is not None:
                self._connection.end()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                # A server that has not opened its session yet is not waited for any longer.
                _, pending = await asyncio.wait(others, timeout=5.0)
                for task in pending:
                    task.cancel()
                if pending:
                    await asyncio.wait(pending, timeout=3.0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    # ------------------------------------------------------------ in the thread

    def _ask(self, method: str, *arguments: Any, **options: Any) -> concurrent.futures.Future[Any]:
        call = self._call(method, arguments, options)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _refuses(self, error: Exception) -> bool:
        """Whether an error is the server's answer, and not one of the connection."""
        return isinstance(error, self._refusal) and error.code in _ANSWERS

    async def _call(
        self, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """A request over the connection, which is opened if none is there, and ends by an error."""
        if self._connection is None or self._connection.task.done():
            self._connection = _Connection(self._client(self._connect()))
        connection = self._connection
        try:
            return await connection.call(method, arguments, options)
        except Exception as error:
            if self._refuses(error):
                raise
            connection.end()
            if self._connection is connection:
                self._connection = None
            raise


class _Connection:
    """A client's session, held open by a task of its own: what a task enters it must leave.

    Args:
      client: an async context manager, to be entered.
    """

    def __init__(self, client: Any) -> None:
        self._session: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._session.add_done_callback(retrieve_error)  # whoever asked may have stopped waiting
        self._ended = asyncio.Event()
        self.task = asyncio.create_task(self._hold(client))

    async def _hold(self, client: Any) -> None:
        try:
            async with client as session:
                self._session.set_result(session)
                await self._ended.wait()
        except BaseException as error:  # afterwards calls see that this task has ended
            if not self._session.done():
                self._session.set_exception(ConnectionError(_words(error)))

    async def call(
        self, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """The result of a method of the session.

        Raises:
          ConnectionError: the session does not open, or ends meanwhile.
        """
        session = await asyncio.shield(self._session)
        work = asyncio.ensure_future(getattr(session, method)(*arguments, **options))
        work.add_done_callback(retrieve_error)
        try:
            await asyncio.wait({work, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.cancelled():
                raise ConnectionError("the connection has ended")
            return work.result()
        finally:
            work.cancel()

    def end(self) -> None:
        """Closes the session."""
        self._ended.set()


def plain_name(name: str, names_in_use: Container[str] = ()) -> str:
    """The name under which the policy calls a server's tool: up to 64 letters, digits, _ and -.

    Other characters become "_", and a number is put behind a name that is taken. The server is
    asked by its own name.

    >>> plain_name("fs.read"), plain_name("_x"), plain_name("fs/read", {"fs_read"})
    ('fs_read', 'tool_x', 'fs_read_2')
    """
    plain = re.sub(r"[^\w-]", "_", name, flags=re.ASCII)[:64]
    if not re.match("[A-Za-z]", plain):
        plain = f"tool_{plain.lstrip('_-')}"[:64]
    unique, number = plain, 1
    while unique in names_in_use:
        number += 1
        unique = f"{plain[: 63 - len(str(number))]}_{number}"
    return unique


def _text(part: Any) -> str:
    return part.text if getattr(part, "type", "") == "text" else f"[{part.type}]"


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:200]
