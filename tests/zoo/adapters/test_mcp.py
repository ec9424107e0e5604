"""Tools of an MCP server, spoken to by the maintained client, where it is installed."""

import asyncio
import sys
import threading
import types
from concurrent.futures import Future

import numpy as np
import pytest

from jrl.episodes.host import EnvError, Limits, Reply
from jrl.episodes.parsers import Call, get_parser
from jrl.episodes.tools import tool_env
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.adapters.mcp import McpServer, plain_name

needs_mcp = pytest.mark.extra("mcp")
SERVER = '''
import os
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    if a == 13:
        raise ToolError("not 13")
    if a == 14:
        raise MCPError(-32602, "a may not be 14")
    if a == 99:
        os._exit(3)
    return a + b


@server.tool()
def shout(text: str) -> str:
    """Says it loudly."""
    return text.upper()


@server.tool(name="fs.read")
def read(path: str) -> str:
    """Reads a file."""
    return f"read {path}"


server.run()
'''


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    threads = threading.active_count()
    mcp = McpServer([sys.executable, str(tmp_path / "server.py")])
    yield mcp
    mcp.close()
    mcp.close()
    assert threading.active_count() == threads


@needs_mcp
def test_a_servers_tools_become_tools(server):
    add, shout, read = server.tools()
    assert (add.name, add.description) == ("add", "Adds two numbers.")
    assert set(add.parameters["properties"]) == {"a", "b"}
    assert asyncio.run(add.call(a=2, b=3)) == "5"
    assert asyncio.run(shout.call(text="hey")) == "HEY"
    assert (read.name, asyncio.run(read.call(path="a"))) == ("fs_read", "read a")
    assert [t.name for t in server.tools(["shout"])] == ["shout"]
    with pytest.raises(UserError, match=r"has no tool 'sub'; it has add, fs.read, shout"):
        server.tools(["sub"])


@needs_mcp
def test_errors_are_told_to_the_policy_and_a_dead_server_is_started_again(server):
    parser = get_parser("hermes")
    env = tool_env(server.tools(), parser, lambda prompt, reply: 1.0, Limits())
    prompt = Prompt(0, "?", np.zeros(0, np.int32), "")

    def reply_to(**arguments):
        async def turn():
            text = parser.render(Call("add", arguments))
            state, _ = await env.init(prompt, 0)
            return await env.step(state, Reply(text, text, np.zeros(1, np.int32), 0, False))

        return asyncio.run(turn())[1].messages[0]["content"]

    assert "5" in reply_to(a=2, b=3)
    assert "not 13" in reply_to(a=13, b=0)
    connection = server._connection
    assert "a may not be 14" in reply_to(a=14, b=0)
    assert server._connection is connection  # other episodes have calls under way
    assert "'b' is a required property" in reply_to(a=1)
    with pytest.raises(EnvError, match="MCP server"):
        reply_to(a=99, b=0)  # it dies: the member fails
    assert "7" in reply_to(a=3, b=4)


@needs_mcp
def test_a_run_ends_the_server(server):
    closed = server.close_with(
        tool_env(server.tools(), get_parser("hermes"), lambda p, r: 1.0, Limits())
    )
    assert "jrl-mcp" in {thread.name for thread in threading.enumerate()}
    asyncio.run(closed.lifecycle.shutdown())
    assert "jrl-mcp" not in {thread.name for thread in threading.enumerate()}


@needs_mcp
def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(UserError, match="does not answer"):
        McpServer([sys.executable, "-c", "raise SystemExit(1)"])


class Listed(McpServer):
    """A server of which nothing but its list of tools is known."""

    def __init__(self, *tools):
        self._name, self._listed = "here", tools


class Paged(McpServer):
    """A server that lists its tools one by one."""

    def __init__(self):
        self._pages = {None: ("a", "1"), "1": ("b", "2"), "2": ("c", None)}

    def _ask(self, method, **options):
        name, cursor = self._pages[options["cursor"]]
        page, answer = types.SimpleNamespace(tools=[name], next_cursor=cursor), Future()
        answer.set_result(page)
        return answer


def test_all_pages_of_tools_are_listed():
    assert Paged()._list() == ["a", "b", "c"]


def offered(name, schema):
    return types.SimpleNamespace(name=name, description="", input_schema=schema)


EMPTY = {"type": "object", "properties": {}}
PAIR = {"type": "object", "properties": {"at": {"items": [{"type": "integer"}]}}}
DRAFT_7 = {**PAIR, "$schema": "http://json-schema.org/draft-07/schema#"}


def test_names_that_no_parser_reads_are_mapped():
    names = ("fs.read", "fs/read", "_x", "repo/search", "add")
    server = Listed(*(offered(name, EMPTY) for name in names))
    plain = [tool.name for tool in server.tools()]
    assert plain == ["fs_read", "fs_read_2", "tool_x", "repo_search", "add"]
    assert [tool.name for tool in server.tools(["repo/search"])] == ["repo_search"]
    assert len(plain_name("a" * 99, {"a" * 64})) == 64
    tool_env(server.tools(), get_parser("hermes"), lambda p, r: 1.0, Limits())


def test_a_bad_tool_is_left_out_and_said(caplog):
    server = Listed(offered("bad", PAIR), offered("old", DRAFT_7), offered("add", EMPTY))
    assert [tool.name for tool in server.tools()] == ["old", "add"]
    assert "tool 'bad': its schema is invalid" in caplog.text
    assert "left out" in caplog.text
    with pytest.raises(UserError, match="tool 'bad': its schema is invalid"):
        server.tools(["bad"])
    with pytest.raises(UserError, match="no tool that can be used"):
        Listed(offered("bad", PAIR)).tools()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match="an MCP server needs mcp"):
        McpServer("http://localhost:1/mcp")
