"""Tools as an environment: what is told to the policy, what ends it, what is nobody's fault."""

import asyncio
import threading

import numpy as np
import pytest

from jrl.episodes.check_env import check_env
from jrl.episodes.host import EnvError, Limits, Reply
from jrl.episodes.parsers import PARSERS, Call, get_parser
from jrl.episodes.tools import Tool, ToolError, tool_env
from jrl.errors import UserError
from jrl.types import NOTHING, Prompt
from jrl.zoo.envs.calculator import calculator_tool

HERMES = get_parser("hermes")
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PROMPT = Prompt(3, "What is 6 * 7?", np.zeros(0, np.int32), "42")


def reward(prompt, reply):
    return float(prompt.answer in reply.text)


async def echo(text):
    if text.startswith("wrong"):
        raise ToolError("no such text" + text[5:])
    if text == "broken":
        raise KeyError("disk")
    if text == "hang":
        await asyncio.Event().wait()
    return text * 2


TOOLS = [
    calculator_tool(),
    Tool("echo", "Says it twice.", TEXT, echo, seconds=0.2, longest=30),
    Tool("slow", "Takes its time.", TEXT, echo, seconds=5),
]


def turn(env, state, text, number=0):
    reply = Reply(text, text, np.zeros(1, np.int32), number, False)
    return asyncio.run(env.step(state, reply))


@pytest.fixture
def env():
    return check_env(tool_env(TOOLS, HERMES, reward, Limits(), system="Use tools."))


def opened(env):
    return asyncio.run(env.init(PROMPT, 0))


def call(name, **arguments):
    return HERMES.render(Call(name, arguments))


def test_calls_are_answered_in_order_until_there_is_none(env):
    state, messages = opened(env)
    assert [m["role"] for m in messages] == ["system", "user"]
    calls = call("calculator", expression="6*7") + call("echo", text="ab")
    state, feedback = turn(env, state, calls)
    assert [m["content"] for m in feedback.messages] == ["42", "abab"]
    assert [m["name"] for m in feedback.messages] == ["calculator", "echo"]
    assert len({m["tool_call_id"] for m in feedback.messages}) == 2
    assert {len(m["tool_call_id"]) for m in feedback.messages} == {9}
    assert (feedback.done, feedback.metrics["tool_calls"]) == (False, 2)
    _, feedback = turn(env, state, "It is 42.", 1)
    assert (feedback.done, feedback.reward, feedback.success) == (True, 1.0, True)
    _, feedback = turn(env, state, "It is 41.", 1)
    assert (feedback.done, feedback.reward, feedback.success) == (True, 0.0, False)


@pytest.mark.parametrize("points", [1, True, np.float32(1), np.bool_(True), np.int64(1)])
def test_an_answer_worth_1_is_a_success_whatever_its_number_is(points):
    env = tool_env(TOOLS, HERMES, lambda prompt, reply: points, Limits())
    _, feedback = turn(env, opened(env)[0], "42")
    assert (feedback.reward, feedback.success) == (1, True)


@pytest.mark.parametrize(
    ("text", "message", "count"),
    [
        (
            call("ad", x=1),
            "Error: there is no tool 'ad'; use calculator, echo, slow",
            "tool_errors",
        ),
        (call("echo", text=1), "Error: arguments['text']: 1 is not of type", "tool_errors"),
        (call("echo", text="wrong"), "Error: no such text", "tool_errors"),
        (call("calculator", expression="1/0"), "Error: division by zero", "tool_errors"),
        (call("echo", text="hang"), "Error: echo took more than 0.2 seconds", "tool_timeouts"),
    ],
)
def test_the_policys_mistakes_are_told(env, text, message, count):
    _, feedback = turn(env, opened(env)[0], text)
    assert feedback.messages[0]["content"].startswith(message)
    assert (feedback.done, feedback.metrics[count]) == (False, 1)


def test_long_results_say_what_they_lost(env):
    _, feedback = turn(env, opened(env)[0], call("echo", text="abc" * 20))
    text = feedback.messages[0]["content"]
    assert text.startswith("abcabcabcabcabc\n... 90 characters left out ...\n")
    _, feedback = turn(env, opened(env)[0], call("echo", text="wrong" + "!" * 30))
    text = feedback.messages[0]["content"]  # an error may be as long as a result
    assert text.startswith("Error: no such \n... 19 characters left out ...\n!!!")


def test_a_broken_tool_is_nobodys_answer(env):
    with pytest.raises(KeyError):
        turn(env, opened(env)[0], call("echo", text="broken"))
    bad = tool_env([Tool("n", "", TEXT, lambda text: 7)], HERMES, reward, Limits())
    with pytest.raises(EnvError, match="tool n returned 7, not text"):
        turn(bad, opened(bad)[0], call("n", text=""))


def test_tools_of_one_turn_run_side_by_side():
    all_are_called = threading.Barrier(4, timeout=60)

    def meet(text):
        all_are_called.wait()
        return text

    env = tool_env([Tool("meet", "", TEXT, meet, seconds=90)], HERMES, reward, Limits())
    _, feedback = turn(env, opened(env)[0], "".join(call("meet", text=str(i)) for i in range(4)))
    assert [m["content"] for m in feedback.messages] == ["0", "1", "2", "3"]


def test_a_structure_that_cannot_be_read_ends_or_is_told(env):
    malformed = "It is 42. <tool_call>{"
    _, feedback = turn(env, opened(env)[0], malformed)
    assert (feedback.done, feedback.reward) == (True, 1.0)  # judged as any last turn
    assert feedback.metrics["tool_structure_errors"] == 1
    telling = tool_env(TOOLS, HERMES, reward, Limits(), malformed="tell")
    _, feedback = turn(telling, opened(telling)[0], malformed)
    assert not feedback.done
    assert feedback.messages[0]["content"] == "Error: </tool_call> is missing"


def test_the_limit_of_calls(env):
    few = tool_env(TOOLS, HERMES, reward, Limits(tool_calls=1))
    state, _ = opened(few)
    both = call("echo", text="a") * 2
    state, feedback = turn(few, state, both)
    assert feedback.messages[0]["content"] == "aa"
    assert "no tool calls left" in feedback.messages[1]["content"]
    assert feedback.metrics["tool_calls"] == 1
    _, feedback = turn(few, state, both)
    assert feedback.metrics["tool_calls"] == 0


def test_families_whose_results_are_users_words():
    gemma = PARSERS["gemma"]
    env = tool_env(TOOLS, gemma, reward, Limits())
    calls = "```tool_code\ncalculator(expression='6*7')\necho(text='a')\n```"
    _, feedback = turn(env, opened(env)[0], calls)
    (message,) = feedback.messages
    assert message["role"] == "user"
    assert message["content"] == "```tool_output\n42\n```\n```tool_output\naa\n```"
    assert env.chat.roles == ("user",)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "at least one"),
        ([TOOLS[0]] * 2, "another tool has this name"),
        ([TOOLS[1]._replace(name="a b")], "a name is"),
        ([TOOLS[1]._replace(parameters={"type": "objekt"})], "its schema is invalid: 'objekt'"),
        ([TOOLS[1]._replace(parameters={"type": "string"})], '"type": "object"'),
        ([TOOLS[1]._replace(seconds=0)], "seconds = 0; must be above 0"),
    ],
)
def test_tools_that_cannot_be_used_are_named(tools, message):
    with pytest.raises(UserError, match=message):
        tool_env(tools, HERMES, reward, Limits())


def test_limits_that_nothing_can_keep_are_named():
    with pytest.raises(UserError, match=r"limits.turns = 0; must be at least 1"):
        tool_env(TOOLS, HERMES, reward, Limits(turns=0))
    with pytest.raises(UserError, match="malformed = 'stop'; choose from end, tell"):
        tool_env(TOOLS, HERMES, reward, Limits(), malformed="stop")
    with pytest.raises(UserError, match=r"env is a dict; give a jrl.episodes.HostEnv"):
        check_env({})


def test_an_answer_that_was_cut_is_truncated_unless_it_is_right(env):
    state, _ = opened(env)

    def end_of(text, cut):
        reply = Reply(text, text, np.zeros(1, np.int32), 0, cut)
        feedback = asyncio.run(env.step(state, reply))[1]
        return feedback.done, feedback.cut

    assert end_of("It is 4", True) == (True, True)
    assert end_of("It is 42", True) == (True, False)
    assert end_of("It is 4", False) == (True, False)


def test_ids_that_the_policy_gave_come_back():
    mistral = get_parser("mistral")
    env = tool_env(TOOLS, mistral, reward, Limits())
    calls = [
        Call("calculator", {"expression": "1"}, call_id) for call_id in ("abc123456", "a b", "")
    ]
    _, feedback = turn(env, opened(env)[0], "\n".join(map(mistral.render, calls)))
    ids = [m["tool_call_id"] for m in feedback.messages]
    assert ids == ["abc123456", "call00001", "call00002"]


def test_the_state_of_an_episode_is_copied_with_its_problem_as_it_is(env):
    prompt = Prompt(0, "2 + 2", np.zeros(1, np.int32), "4", NOTHING)  # which nothing can copy
    state, _ = asyncio.run(env.init(prompt, 0))
    again = env.fork({"session": state, "said": [1]})
    assert again["session"].prompt is prompt
    assert again["session"] == state
