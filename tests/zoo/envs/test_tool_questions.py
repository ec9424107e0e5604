"""The environments of the shipped configurations, and the world that is searched."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scripted import play

from jrl.config import load_config
from jrl.episodes.check_env import check_env
from jrl.episodes.configured import configured_env
from jrl.episodes.parsers import Call, get_parser
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.rewards import Sample, make_reward
from jrl.setup.reward_parts import parts_of
from jrl.types import Prompt
from jrl.zoo.envs.answer_rewards import answer_f1, last_answer
from jrl.zoo.envs.search import Bm25
from jrl.zoo.envs.tool_questions import multi_hop, python_math
from jrl.zoo.tools import hops

SEARCH = Path(__file__).parents[3] / "configs" / "search"


def say(env, prompt, *turns):
    return play(env, turns, prompt)[-1]


def problem(answer):
    return Prompt(0, "?", np.zeros(0, np.int32), answer)


def call(name, **arguments):
    return get_parser("hermes").render(Call(name, arguments))


def test_python_computes_and_the_number_is_judged():
    env = check_env(python_math(tools=["python", "calculator"], network=True))
    assert env.limits.turns == 4
    reply = say(env, problem("42"), call("python", code="print(6 * 7)"))
    assert "42" in reply.messages[0]["content"]
    end = say(env, problem("42"), call("calculator", expression="6*7"), "It is 42.")
    assert (end.reward, end.done, end.success) == ((1.0,), True, True)
    assert say(env, problem("42"), "It is 41.").reward == (0.0,)
    with pytest.raises(UserError, match="tools = 'pyhton'"):
        python_math(tools=["pyhton"])


def test_a_search_and_an_answer_by_its_words():
    env = multi_hop(str(SEARCH / "corpus.jsonl"))
    reply = say(env, problem("Ulinmouth"), call("search", query="Coromn Works"))
    assert "Coromn Works is a firm" in reply.messages[0]["content"]
    end = say(env, problem("Ulinmouth"), "So it is there.\nAnswer: Ulinmouth.")
    assert (end.reward, end.success) == ((1.0,), True)
    half = say(env, problem("Ulinmouth"), "Answer: city Ulinmouth")
    assert half.reward[0] == pytest.approx(2 / 3)
    assert not half.success
    assert last_answer("no mark") == ""
    assert answer_f1("", "x") == 0.0


def test_a_corpus_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        multi_hop(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises(UserError, match=r"bad.jsonl, line 2: write"):
        multi_hop(str(tmp_path / "bad.jsonl"))


def test_the_world_that_is_shipped_is_the_one_that_is_generated(tmp_path):
    hops.main(str(tmp_path))
    for name in ("corpus", "train", "eval"):
        generated, shipped = (p / f"{name}.jsonl" for p in (tmp_path, SEARCH))
        assert generated.read_text() == shipped.read_text()
    train, evaluation = (
        {json.loads(line)["question"] for line in (SEARCH / f"{n}.jsonl").read_text().splitlines()}
        for n in ("train", "eval")
    )
    assert len(train) == 200
    assert len(evaluation) == 40
    assert not train & evaluation


def test_every_answer_takes_more_than_one_document_and_can_be_found():
    world = hops.make_world(0)
    index = Bm25(world.documents)
    for question, answer in world.questions[:60]:
        subject = question.split(" of ")[-1] if " of " in question else question[21:]
        subject = subject.removesuffix(" born?").removeprefix(" ").strip('"')
        first = world.documents[index.search(subject, 1)[0]]
        assert subject.split()[-1] in first
        assert answer not in first or "city" in question or "year" in question, question
    again = hops.make_world(0)
    assert again == world
    assert hops.make_world(1) != world


def test_limits_of_tools_and_seconds_are_options():
    options = {"tools": ["calculator"], "tool_calls": 1, "call_seconds": 7.5, "episode_seconds": 0}
    env = configured_env("python_math", options)
    limits = env.limits
    assert (limits.tool_calls, limits.call_seconds, limits.episode_seconds) == (1, 7.5, 0)
    one = call("calculator", expression="6*7")
    assert "no tool calls left" in say(env, problem("42"), one, one).messages[0]["content"]
    options = {"corpus": str(SEARCH / "corpus.jsonl"), "tool_calls": 2, "call_seconds": 9}
    limits = configured_env("multi_hop", options).limits
    assert (limits.turns, limits.call_seconds) == (6, 9)
    with pytest.raises(UserError, match=r"seconds = 60 of a run of Python, .* raise call_seconds"):
        python_math(seconds=60, network=True)


def test_tool_star_s_environment_searches_and_computes_and_its_parts_are_in_order():
    """The three parts of Tool-Star: two functions around the environment's own."""
    env = multi_hop(str(SEARCH / "corpus.jsonl"), tools=("search", "python"), network=True)
    calls = [call("search", query="who"), call("python", code="print(6 * 7)")]
    assert "42" in str(say(env, problem("42"), *calls).messages)
    end = say(env, problem("42"), *calls, "Answer: 42")
    assert end.reward == (1.0,)
    with pytest.raises(UserError, match="tools = 'calculator'; choose from python, search"):
        multi_hop(str(SEARCH / "corpus.jsonl"), tools=("calculator",))
    form = "form={function='format', pattern='Answer:'}"
    used = "used={function='tools_used', names=['search', 'python']}"
    tables = f"{{{form}, reward={{}}, {used}}}"
    lines = ["data.train=x.jsonl", "data.env=multi_hop", f"rewards={tables}", "method=tool_star"]
    parts = parts_of(load_config(None, lines))
    assert parts.weights == {"form": 1.0, "reward": 1.0, "used": 1.0}
    assert parts.given_by("function") == ("form", "used")
    turns = [{"role": "assistant", "content": text} for text in calls]
    one = Sample(problem("42"), "Answer: 42", np.zeros(1, np.int32), "done", tuple(turns[:1]))
    both = dataclasses.replace(one, messages=tuple(turns))
    used = make_reward("tools_used", names=["search", "python"])
    assert used([one, both]) == [0.0, 1.0]
    with pytest.raises(UserError, match="tools_used.names = .*give a list"):
        make_reward("tools_used", names="search")
    assert not get_method("tool_star").lacks
