"""Environments of verifiers: their own tasks, tools, stops and rewards, the policy as the model."""

import asyncio
import sys

import numpy as np
import pytest
from needs_extra import require

from jrl.episodes.host import EnvError, Reply, check_feedback
from jrl.episodes.parsers import Call, get_parser
from jrl.errors import UserError
from jrl.types import Prompt

require("verifiers")

from jrl.zoo.adapters.verifiers import from_verifiers  # noqa: E402

# tenacity's, in verifiers' client of tool servers
INITIAL = pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")
pytestmark = [INITIAL, pytest.mark.extra("verifiers")]
PROMPT = Prompt(0, "", np.zeros(0, np.int32), None)
WORDS = """
import asyncio

import verifiers.v1 as vf

__all__ = ["Words"]
ENDED = []


class Data(vf.TaskData):
    answer: str


class Config(vf.TasksetConfig):
    words: list[str] = ["abc"]
    fails: bool = False


class Word(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        messages = [m.content for m in trace.branches[-1].messages if m.role == "assistant"]
        return 1.0 if self.data.answer in messages[-1] else 0.25

    @vf.metric
    async def letters(self) -> float:
        return float(len(self.data.answer))

    async def finalize(self, trace, runtime) -> None:
        ENDED.append(trace.num_turns)
        if self.data.answer == "broken":
            raise vf.TaskError("it broke")


class Words(vf.Taskset[Word, Config]):
    def load(self):
        for word in self.config.words:
            yield Word(Data(prompt=word, answer=word[::-1], system_prompt="Backwards."))
"""
TOOLS = """
import verifiers.v1 as vf
from shouting_tools import Shouting, ShoutingConfig

__all__ = ["Shout"]


class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        messages = [m.content for m in trace.branches[-1].messages if m.role == "assistant"]
        return float(self.data.answer in (messages[-1] or ""))

    @classmethod
    def toolsets(cls, config):
        return [Shouting(ShoutingConfig())]


class Shout(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(Data(prompt="Shout abc.", answer="ABC"))
"""
SERVER = '''
import verifiers.v1 as vf


class ShoutingConfig(vf.ToolsetConfig):
    pass


class Shouting(vf.Toolset[ShoutingConfig, vf.State]):
    TOOL_PREFIX = "loud"

    @vf.tool
    async def shout(self, text: str) -> str:
        """Says it loudly."""
        return text.upper()


if __name__ == "__main__":
    Shouting.run()
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # tool servers are processes
    for name, text in (
        ("words_of_mine", WORDS),
        ("shout_of_mine", TOOLS),
        ("shouting_tools", SERVER),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("words_of_mine", "shout_of_mine", "shouting_tools"):
        sys.modules.pop(name, None)


def play(env, completions, prompt=PROMPT, cut=False, seed=5):
    async def run():
        state, opening = await env.init(prompt, seed)
        feedbacks = []
        try:
            for turn, text in enumerate(completions):
                reply = Reply(text, text, np.zeros(1, np.int32), turn, cut)
                state, feedback = await env.step(state, reply)
                feedbacks.append(check_feedback(feedback, env.limits, 1))
        finally:
            await env.close(state)
            await env.lifecycle.shutdown()
        return opening.messages, feedbacks

    return asyncio.run(run())


def test_an_episode_is_its_own_task_and_rewards(folder):
    env = from_verifiers("words-of-mine", evaluation={"words": ["xyz"]})
    assert (env.limits.turns, env.chat.roles, env.chat.tools) == (16, ("user",), ())
    messages, (last,) = play(env, ["it is cba"])
    assert messages == [
        {"role": "system", "content": "Backwards."},
        {"role": "user", "content": "abc"},
    ]
    assert (last.done, last.success, last.reward) == (True, True, (1.0,))
    assert last.metrics == {"right": 1.0, "letters": 3.0}
    messages, (last,) = play(env, ["?"], Prompt(0, "Now:", np.zeros(0, np.int32), None), cut=True)
    assert messages[-1]["content"] == "Now:\nabc"
    assert (last.reward, last.success, last.cut) == ((0.25,), False, True)
    env.lifecycle.begin(3, "eval")
    assert play(env, [])[0][-1]["content"] == "xyz"


def test_the_seed_is_the_task_and_a_file_holds_a_taskset(folder):
    env = from_verifiers(
        f"{folder}/words_of_mine.py:Words", arguments={"taskset": {"words": ["ab", "cd", "ef"]}}
    )
    assert [play(env, [], seed=seed)[0][-1]["content"] for seed in (0, 1, 5)] == ["ab", "cd", "ef"]
    few = from_verifiers(
        "words-of-mine", arguments={"taskset": {"words": ["ab", "cd", "ef"]}}, tasks=2
    )
    assert play(few, [], seed=2)[0][-1]["content"] == "ab"


def test_its_tools_are_called_through_the_parser_and_its_limit_scores(folder):
    env = from_verifiers("shout-of-mine", parser="hermes", turns=3)
    assert [tool["function"]["name"] for tool in env.chat.tools] == ["loud_shout"]
    assert (env.chat.family, env.chat.roles, env.limits.turns) == ("hermes", ("tool",), 3)
    parser = get_parser("hermes")
    call = parser.render(Call("loud_shout", {"text": "cba"}))
    _, (tool_reply, error_reply, last) = play(env, [call, "<tool_call>oh</tool_call>", "ABC"])
    (message,) = tool_reply.messages
    assert (message["role"], message["content"], message["name"]) == ("tool", "CBA", "loud_shout")
    assert error_reply.messages[0]["role"] == "tool"
    assert "error" in error_reply.messages[0]["content"]
    assert (last.reward, last.done) == ((1.0,), True)
    _, (*_, final) = play(env, [call, call, call])  # its last call is not answered any more
    assert (final.reward, final.done) == ((0.0,), True)
    gemma = from_verifiers("shout-of-mine", parser="gemma")
    assert gemma.chat.roles == ("user",)
    _, (tool_reply,) = play(gemma, [get_parser("gemma").render(Call("loud_shout", {"text": "a"}))])
    assert tool_reply.messages == [{"role": "user", "content": "```tool_output\nA\n```"}]


def test_what_goes_wrong_fails_the_member_and_is_cleaned_up(folder):
    env = from_verifiers("words-of-mine", arguments={"taskset": {"words": ["nekorb"]}})
    with pytest.raises(EnvError, match="it broke"):
        play(env, ["?"])
    play(from_verifiers("words-of-mine"), [])  # closed in the middle: nothing is left
    with pytest.raises(UserError, match="data.id = 'no-such-set': verifiers cannot load it"):
        from_verifiers("no-such-set")
    with pytest.raises(UserError, match="words.*valid list"):
        from_verifiers("words-of-mine", arguments={"taskset": {"words": 3}})
    with pytest.raises(UserError, match="has no tasks"):
        from_verifiers("words-of-mine", arguments={"taskset": {"words": []}})
    with pytest.raises(UserError, match="'bash' executes what the policy writes; say where"):
        from_verifiers("words-of-mine", arguments={"agent": {"harness": {"id": "bash"}}})
