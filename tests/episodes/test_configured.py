"""Options that every environment of a configuration has."""

import asyncio
import os

import numpy as np
import pytest

from jrl.episodes.calls import run_either
from jrl.episodes.chat import PlainFormat
from jrl.episodes.configured import _RENAMED, HOST_ENVS, configured_env
from jrl.episodes.env_calls import call_init, call_step
from jrl.episodes.host import EnvError, Feedback, HostEnv, Limits, Reply, check_feedback
from jrl.errors import UserError
from jrl.models.tokenizer import char_tokenizer
from jrl.types import Prompt
from jrl.user_code import load

OWN = """
import os
from jrl.episodes.host import ChatOptions, Feedback, HostEnv, Limits


def make(word="hey", turns=2):
    async def init(prompt, seed):
        assert (prompt.question, len(prompt.messages), len(prompt.tokens)) == ("why?", 0, 0)
        return {"said": 0}, [{"role": "user", "content": f"{word} {os.getpid()}"}]

    def step(state, reply):
        state["said"] += 1
        points = (float(state["said"]), 0.5)
        platforms = os.environ.get("JAX_PLATFORMS")
        return state, Feedback([{"role": "tool", "content": str(platforms)}], points)

    tools = ({"type": "function", "function": {"name": "look"}},)
    return HostEnv(
        init,
        step,
        parts=("a", "b"),
        limits=Limits(turns=turns),
        chat=ChatOptions(roles=("tool",), tools=tools, family="hermes"),
    )


def slow(call_seconds):
    return make()._replace(limits=Limits(call_seconds=2 * call_seconds))
"""
PROMPT = Prompt(1, "you", np.zeros(0, np.int32), None, {}, question="why?")


@pytest.fixture
def module(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_limits_and_variables_of_any_environment(module):
    options = {"word": "you", "turn_tokens": 9, "episode_seconds": 5, "call_seconds": 2.5}
    env = configured_env(f"{module}:make", {**options, "template_variables": {"thinking": False}})
    limits = env.limits
    assert (limits.turns, limits.turn_tokens, limits.episode_seconds) == (2, 9, 5)
    assert (limits.call_seconds, env.chat.variables) == (2.5, {"thinking": False})
    assert configured_env(f"{module}:slow", {"call_seconds": 3}).limits.call_seconds == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"call_seconds": "long"}, "data.call_seconds = 'long'; must be a number"),
        ({"turn_tokens": 1.5}, "data.turn_tokens = 1.5; must be an integer"),
        ({"episode_seconds": -1}, "data.episode_seconds = -1; must be at least 0"),
        ({"template_variables": "no"}, "data.template_variables = 'no'; write a table"),
        ({"contexts": 0}, "data.contexts = 0; must be at least 1"),
        ({"contexts": 2, "summary": " "}, "data.summary = ' '; give the text that asks"),
        ({"summary_tokens": 9}, "data.summary_tokens is read where episodes have several contexts"),
        ({"isolate": 1}, "data.isolate = 1; must be true or false"),
        ({"tool_calls": 1}, "data.tool_calls = 1: there is no such option"),
        ({"call_secnds": 1}, "did you mean 'call_seconds'"),
    ],
)
def test_options_that_do_not_fit_are_named(module, options, message):
    with pytest.raises(UserError, match=message):
        configured_env(f"{module}:make", options)


def test_episodes_in_processes_of_their_own(module):
    here = configured_env(f"{module}:make", {"word": "you"})
    env = configured_env(f"{module}:make", {"word": "you", "isolate": True})
    same = ("parts", "limits", "chat", "extras")
    assert all(getattr(env, name) == getattr(here, name) for name in same)

    async def play():
        state, messages = await env.init(PROMPT, 0)
        _, feedback = await env.step(state, Reply("a", "a", np.zeros(1, np.int32), 0, False))
        await env.close(state)
        await env.lifecycle.shutdown()
        return messages[0]["content"], feedback

    opening, feedback = asyncio.run(play())
    word, number = opening.split()
    assert (word, int(number) == os.getpid()) == ("you", False)
    assert feedback["reward"] == [1.0, 0.5]
    assert feedback["messages"][0]["content"] == "cpu"
    checked = check_feedback(feedback, env.limits, len(env.parts))
    assert (checked.reward, checked.metrics, checked.labels) == ((1.0, 0.5), {}, {})


@pytest.mark.parametrize(("opening", "message"), [("word", "4 tokens"), (7, "not text")])
def test_a_state_whose_opening_cannot_be_used_is_closed(opening, message):
    closed = []
    init = lambda prompt, seed: ("state", [{"role": "user", "content": opening}])  # noqa: E731
    env = HostEnv(init, None, closed.append)
    with pytest.raises(EnvError, match=message):
        asyncio.run(call_init(env, PlainFormat(char_tokenizer()), PROMPT, 0, 3))
    assert closed == ["state"]


def opened(opening, state_key=None):
    """(ids, state id) of an environment that opens so, and its ids of a state with this key."""
    env = HostEnv(lambda prompt, seed: (0, opening), None)
    say = {"messages": [{"role": "user", "content": "?"}], "state_key": state_key}
    env = env._replace(step=lambda state, reply: (state, say))
    chat, tokenizer = PlainFormat(char_tokenizer()), char_tokenizer()

    async def play():
        state, ids, first = await call_init(env, chat, PROMPT, 0, 9)
        tokens = np.ones(1, np.int32)
        later = (await call_step(env, chat, tokenizer, state, 0, tokens, False))[3]
        return ids.tolist(), first, later

    return asyncio.run(play())


def test_an_opening_may_name_its_state():
    messages = [{"role": "user", "content": "a b"}]
    ids, first, later = opened(Feedback(messages, state_key=(1, "x")), (1, "x"))
    assert (ids, first) == (opened(messages)[0], later)
    assert opened(messages, (1, "x"))[1] != later
    assert opened({"messages": messages, "state_key": 2}, 2)[1] == opened(messages, 2)[2]
    with pytest.raises(EnvError, match="an opening has reward, which is for turns"):
        opened(Feedback(messages, 1.0))
    with pytest.raises(EnvError, match="feedback has no key"):
        opened({"messages": messages, "key": 2})


def test_an_environment_cannot_change_the_tokens_that_are_trained():
    def step(state, reply):
        reply.tokens.sort()
        return state, Feedback(done=True)

    env, tokenizer = HostEnv(None, step), char_tokenizer()
    tokens = np.array([3, 1, 2], np.int32)
    asyncio.run(call_step(env, PlainFormat(tokenizer), tokenizer, 0, 0, tokens, False))
    assert tokens.tolist() == [3, 1, 2]


def test_states_of_long_arrays_differ_and_objects_without_a_text_are_refused():
    board = np.zeros((40, 40))
    other = board.copy()
    other[20, 20] = 1e-12
    messages = [{"role": "user", "content": "?"}]
    assert opened(messages, ("b", board))[2] != opened(messages, ("b", other))[2]
    assert opened(messages, board)[2] == opened(messages, board.copy())[2]
    with pytest.raises(EnvError, match="state_key is <object object at 0x.*; give a text, numbers"):
        opened(messages, object())


LIMITED = """
from jrl.episodes.host import Feedback, HostEnv, Limits


def make(limits: Limits = Limits(turns=3, tool_calls=5)):
    def init(prompt, seed):
        return None, [{"role": "user", "content": str(limits.call_seconds)}]

    def step(state, reply):
        return state, Feedback(done=True)

    return HostEnv(init, step, limits=limits)
"""


@pytest.mark.parametrize("isolate", [False, True])
def test_a_function_that_reads_limits_gets_all_of_them(tmp_path, isolate):
    (tmp_path / "limited.py").write_text(LIMITED)
    options = {"call_seconds": 9.5, "tool_calls": 2, "isolate": isolate}
    env = configured_env(f"{tmp_path}/limited.py:make", options)
    assert env.limits == Limits(turns=3, tool_calls=2, call_seconds=9.5)

    async def opened():
        calls = configured_env(f"{tmp_path}/limited.py:make", options)
        state, messages = await run_either(calls.init, PROMPT, 0)
        await run_either(calls.close, state)
        await calls.lifecycle.shutdown()
        return messages[0]["content"]

    assert asyncio.run(opened()) == "9.5"


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("openenv", {"seconds": 1}, "is now data.call_seconds"),
        ("pyton_math", {}, "did you mean 'python_math'"),
        (
            "guided",
            {},
            "data.other is missing: name a FILE.py:function, or give",
        ),
        ("guided", {"modle": "m"}, "did you mean 'model'"),
        ("consultation", {}, "data.examiner is missing"),
    ],
)
def test_former_names_and_missing_speakers_are_named(env, options, message):
    with pytest.raises(UserError, match=message):
        configured_env(env, options)


def test_a_former_name_is_todays_with_a_warning():
    old = "jrl." + "envs.named:guided"
    with pytest.warns(FutureWarning, match="data.env = .*named:guided' is 'guided' now; write"):
        env = configured_env(old, {"url": "http://localhost:1", "model": "m"})
    assert env.limits == configured_env("guided", {"url": "http://x", "model": "m"}).limits
    with (
        pytest.warns(FutureWarning),
        pytest.raises(UserError, match="^data.url = 'ftp://x'"),
    ):
        configured_env(old, {"url": "ftp://x", "model": "m"})


def test_every_name_has_a_function():
    for name, spec in HOST_ENVS.items():
        assert callable(load(spec, "data.env")), name
    assert set(_RENAMED.values()) <= set(HOST_ENVS)
