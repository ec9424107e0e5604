"""Environments that configurations name: options as TOML has them become functions and servers."""

import asyncio
import json
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from scripted import play_turns

from jrl.episodes.configured import configured_env
from jrl.episodes.host import Reply
from jrl.episodes.parsers import Call, get_parser
from jrl.errors import UserError
from jrl.types import Prompt

PROMPT = Prompt(0, "What is 6 * 7?", np.zeros(0, np.int32), "42")
OWN = """
def judge(prompt, messages):
    return float(prompt.answer in messages[-1]["content"]), len(messages) > 2


def user(messages):
    return f"And {len(messages)}?"


def examiner(prompt, diagnosis):
    return 7.0 if diagnosis == "flu" else 0.0


def points(prompt, text):
    return len(text) / 10
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A file of functions, and the address of an endpoint that always says "It is 42."."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((body, self.headers.get("Authorization")))
            answer = json.dumps({"choices": [{"message": {"content": "It is 42."}}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    root = tmp_path_factory.mktemp("named")
    (root / "own.py").write_text(OWN)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield root, f"http://127.0.0.1:{server.server_port}/v1", requests
    server.shutdown()
    thread.join()
    server.server_close()


def make(text, place=None):
    """The environment of a [data] table."""
    root, url = (str(x) for x in place[:2]) if place else ("", "")
    table = tomllib.loads(text.replace("ROOT", root).replace("URL", url))
    return configured_env(table.pop("env").rpartition(":")[2], table)


def play(env, *turns):
    async def run():
        episode = await play_turns(env, turns, PROMPT)
        await env.lifecycle.shutdown()
        return episode

    return asyncio.run(run())


def test_a_model_behind_an_endpoint_is_guided(place, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    env = make('env = "players:guided"\nurl = "URL"\nmodel = "m"\nkey_variable = "MY_KEY"', place)
    _, (feedback,) = play(env, "Multiply.")
    assert (feedback.reward, feedback.success) == ((1.0,), True)
    body, header = place[2][-1]
    assert (body["model"], header) == ("m", "Bearer secret")
    assert "Multiply." in body["messages"][0]["content"]
    with pytest.raises(UserError, match="data.key_variable names 'NO_KEY'"):
        make('env = "players:guided"\nurl = "URL"\nmodel = "m"\nkey_variable = "NO_KEY"', place)


def test_functions_by_name(place):
    talk = 'env = "players:dialogue"\njudge = "ROOT/own.py:judge"\n'
    _, (first, second) = play(make(f'{talk}user = "ROOT/own.py:user"', place), "41?", "42!")
    assert (first.messages[0]["content"], first.reward) == ("And 1?", (0.0,))
    assert (second.reward, second.done) == ((1.0,), True)
    spoken = play(make(f'{talk}url = "URL"\nmodel = "m"', place), "41?")[1][0]
    assert spoken.messages[0]["content"] == "It is 42."
    with pytest.raises(UserError, match=r"data.user is missing"):
        make(talk, place)
    _, (pioneer, observer) = play(make('env = "players:pair"'), "42", "41")
    assert (pioneer.reward, observer.reward, observer.earlier) == ((1.0,), (1.0,), ((0.0,),))
    pair = 'env = "players:pair"\nreward = "ROOT/own.py:points"'
    _, (long, _) = play(make(pair, place), "12345", "")
    assert long.reward == (0.5,)
    doctor = 'env = "players:consultation"\nurl = "URL"\nmodel = "m"\n'
    doctor += 'examiner = "ROOT/own.py:examiner"\n'
    _, feedbacks = play(make(doctor, place), "Question: fever?", "Diagnosis: flu")
    assert [f.reward for f in feedbacks] == [(1.0,), (7.0,)]
    with pytest.raises(UserError, match="give the least and the most"):
        make(f"{doctor}turns = [3]", place)


def test_a_simulated_search(place):
    text = 'env = "zero_search:zero_search"\nurl = "URL"\nmodel = "m"\n'
    text += "steps = 10\nend = 1.0\ncall_seconds = 9"
    env = make(text, place)
    assert env.limits.call_seconds == 9
    env.lifecycle.begin(10, "train")
    call = get_parser("hermes").render(Call("search", {"query": "six"}))
    _, (documents, end) = play(env, call, "It is 42.")
    assert documents.messages[0]["content"] == "It is 42."
    assert "useless" in place[2][-1][0]["messages"][0]["content"]
    assert end.reward == (1.0,)
    _, (_, end) = play(make(text + '\nreward = "f1"', place), call, "Answer: the number 42.")
    assert end.reward[0] == pytest.approx(2 / 3)


@pytest.mark.extra("mcp")
def test_the_tools_of_an_mcp_server(tmp_path):
    (tmp_path / "server.py").write_text(
        "import os\nfrom mcp.server import MCPServer\nserver = MCPServer('sums')\n"
        "@server.tool()\ndef add(a: int, b: int) -> str:\n"
        "    return f\"{a + b} {os.environ.get('MY_WORD')}\"\nserver.run()\n"
    )
    command = json.dumps([sys.executable, str(tmp_path / "server.py")])
    threads = threading.active_count()
    text = f'env = "mcp_tools:mcp"\nserver = {command}\nturns = 3\npass_variables = ["MY_WORD"]'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_WORD", "hello")
        env = make(text)
    call = get_parser("hermes").render(Call("add", {"a": 40, "b": 2}))
    _, (result, end) = play(env, call, "It is 42.")
    assert "42 hello" in result.messages[0]["content"]
    assert (end.reward, env.limits.turns) == ((1.0,), 3)
    with pytest.raises(UserError, match="has no tool 'sub'"):
        make(text.replace('["MY_WORD"]', '[]\nnames = ["sub"]'))
    assert threading.active_count() == threads


@pytest.mark.extra("gymnasium")
def test_an_environment_of_gymnasium():
    text = 'env = "gymnasium:gymnasium"\nid = "FrozenLake-v1"\narguments = {is_slippery = false}'
    env = make(text)
    state, opening = env.init(PROMPT, 0)
    assert opening.messages[0]["content"] == "What is 6 * 7?\n0"
    _, feedback = env.step(state, Reply("I go 1.", "", np.zeros(1, np.int32), 0, False))
    assert feedback.messages[0]["content"] == "4"
    _, feedback = env.step(state, Reply("left", "", np.zeros(1, np.int32), 1, False))
    assert feedback.metrics == {"unreadable": 1.0}
    env.close(state)
