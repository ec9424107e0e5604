"""An environment of OpenEnv on a server of its own, where openenv is installed."""

import asyncio
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

from jrl.episodes.check_env import check_env
from jrl.episodes.host import EnvError, Limits, Reply
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.adapters.openenv import from_openenv

PROMPT = Prompt(0, "Count.", np.zeros(0, np.int32), "-")
needs_openenv = pytest.mark.extra("openenv")
SERVER = """
import sys

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.left = 0

    def reset(self, seed=None, episode_id=None, **more):
        self.left = 2 + (seed or 0) % 3
        return Seen(text=f"{self.left} left", done=False, reward=0.0)

    def step(self, action, **more):
        self.left -= action.message == "down"
        done = self.left == 0
        return Seen(text=f"{self.left} left", done=done, reward=float(done))

    @property
    def state(self):
        return State()


app = create_fastapi_app(Game, Say, Seen, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("openenv") / "server.py"
    path.write_text(SERVER)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, str(path), str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def play(env, moves, seed=1):
    state, opening = await env.init(PROMPT, seed)
    texts = [opening.messages[0]["content"]]
    try:
        for number, move in enumerate(moves):
            state, feedback = await env.step(
                state, Reply(move, move, np.zeros(1, np.int32), number, False)
            )
            texts.append(feedback.messages[0]["content"])
    finally:
        await env.close(state)
    return texts, feedback


@needs_openenv
def test_an_episode_on_a_server(url):
    env = check_env(from_openenv(url, observation="text", limits=Limits(turns=5)))
    texts, end = asyncio.run(play(env, ["down", "up", "down", "down"]))
    assert texts == ["Count.\n3 left", "2 left", "2 left", "1 left", "0 left"]
    assert (end.reward, end.done, end.success) == (1.0, True, True)

    async def several():
        return await asyncio.gather(*(play(env, ["down"], seed) for seed in (0, 1, 2)))

    assert [texts[0] for texts, _ in asyncio.run(several())] == [
        f"Count.\n{n} left" for n in (2, 3, 4)
    ]


@needs_openenv
def test_all_fields_are_shown_or_the_one_that_is_missing_named(url):
    texts, _ = asyncio.run(play(from_openenv(url), ["down"]))
    assert '"text": "2 left"' in texts[1]
    with pytest.raises(EnvError, match="an observation without 'board'; it has text"):
        asyncio.run(play(from_openenv(url, observation="board"), []))


def test_what_is_missing_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "openenv"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(UserError, match="'http://localhost:1' needs openenv"):
        from_openenv("http://localhost:1")
