"""Environments of verifiers: their own loop, tools and rubric, with the policy as the model."""

import asyncio

import numpy as np
import pytest

from jrl.episodes.host import EnvError, Reply, check_feedback
from jrl.episodes.parsers import Call, get_parser
from jrl.errors import UserError
from jrl.types import Prompt

verifiers = pytest.importorskip("verifiers")
if not hasattr(verifiers, "MultiTurnEnv"):
    pytest.skip("needs verifiers 0.1", allow_module_level=True)

from jrl.zoo.adapters.verifiers import from_verifiers  # noqa: E402

OWN = '''
import verifiers as vf
from datasets import Dataset

ENDED = []


def rows(words):
    return Dataset.from_list([{"question": w, "answer": w[::-1]} for w in words])


async def right(completion, answer):
    said = [m["content"] for m in completion if m["role"] == "assistant"]
    return 1.0 if answer in said[-1] else 0.25


class Talk(vf.MultiTurnEnv):
    """Asks until the word is said backwards."""

    rewrites = False

    async def env_response(self, messages, state, **kwargs):
        if self.rewrites:
            messages[0]["content"] = "another question"
        if state["answer"] in messages[-1]["content"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        if messages[-1]["content"] == "break":
            raise vf.Error("it broke")
        return [{"role": "user", "content": f"No, {len(state['trajectory'])}."}]

    @vf.cleanup
    async def ended(self, state):
        ENDED.append(len(state["trajectory"]))


def talk(rewrites=False):
    rubric = vf.Rubric(funcs=[right])
    env = Talk(max_turns=4, dataset=rows(["abc"]), eval_dataset=rows(["xyz"]), rubric=rubric)
    env.rewrites = rewrites
    return env


async def shout(text: str) -> str:
    """Says it loudly."""
    return text.upper()


def tools():
    return vf.ToolEnv(tools=[shout], dataset=rows(["abc"]), rubric=vf.Rubric(funcs=[right]))


def nothing():
    return 3
'''
PROMPT = Prompt(0, "", np.zeros(0, np.int32), None)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own_verifiers.py").write_text(OWN)
    return f"{tmp_path}/own_verifiers.py"


def play(env, said, prompt=PROMPT, cut=False):
    async def run():
        state, messages = await env.init(prompt, 5)
        feedbacks = []
        try:
            for turn, text in enumerate(said):
                reply = Reply(text, text, np.zeros(1, np.int32), turn, cut)
                state, feedback = await env.step(state, reply)
                feedbacks.append(check_feedback(feedback, env.limits, 1))
        finally:
            await env.close(state)
            await env.lifecycle.shutdown()
        return messages, feedbacks

    return asyncio.run(run())


def test_an_episode_is_its_own_rollout_and_rubric(own):
    env = from_verifiers(f"{own}:talk")
    assert (env.limits.turns, env.chat.roles, env.chat.tools) == (4, ("user",), ())
    messages, (first, last) = play(env, ["hm", "it is cba"])
    assert messages[-1] == {"role": "user", "content": "abc"}
    assert [m["content"] for m in first.messages] == ["No, 1."]
    assert (last.done, last.success, last.reward) == (True, True, (1.0,))
    assert last.metrics["num_turns"] == 2
    messages, _ = play(env, [], Prompt(0, "Backwards:", np.zeros(0, np.int32), None))
    assert messages[-1]["content"] == "Backwards:\nabc"
    env.lifecycle.begin(3, "eval")
    assert play(env, [])[0][-1]["content"] == "xyz"


def test_its_limit_of_turns_ends_and_scores_an_episode(own):
    env = from_verifiers(f"{own}:talk", turns=2)
    assert env.limits.turns == 2
    _, feedbacks = play(env, ["a", "b"], cut=True)
    assert [f.done for f in feedbacks] == [False, True]
    assert (feedbacks[-1].reward, feedbacks[-1].cut) == ((0.25,), True)


def test_its_tools_are_called_through_the_parser(own):
    env = from_verifiers(f"{own}:tools", parser="hermes")
    assert env.chat.tools[0]["function"]["name"] == "shout"
    assert (env.chat.family, env.chat.roles) == ("hermes", ("tool",))
    parser = get_parser("hermes")
    right, wrong = parser.render(Call("shout", {"text": "cba"})), "<tool_call>oh</tool_call>"
    _, (told, broken, last) = play(env, [right, wrong, "cba"])
    (message,) = told.messages
    assert (message["role"], message["content"], message["name"]) == ("tool", "CBA", "shout")
    assert broken.messages[0]["role"] == "tool"
    assert (last.reward, last.metrics["shout_calls"]) == ((1.0,), 1.0)
    gemma = from_verifiers(f"{own}:tools", parser="gemma")
    assert gemma.roles == ("user",)
    _, (told,) = play(gemma, [get_parser("gemma").render(Call("shout", {"text": "a"}))])
    assert told.messages == [{"role": "user", "content": "```tool_output\nA\n```"}]


def test_what_goes_wrong_fails_the_member_and_is_cleaned_up(own):
    with pytest.raises(EnvError, match="it broke"):
        play(from_verifiers(f"{own}:talk"), ["break"])
    with pytest.raises(EnvError, match="rewrites what was said"):
        play(from_verifiers(f"{own}:talk", arguments={"rewrites": True}), ["a", "b"])
    play(from_verifiers(f"{own}:talk"), ["a"])  # closed in the middle
    from jrl.user_code import load

    assert load(f"{own}:talk", "data.id").__globals__["ENDED"][-1] == 1
    with pytest.raises(UserError, match="is a int, not a MultiTurnEnv"):
        from_verifiers(f"{own}:nothing")
    with pytest.raises(UserError, match="data.id = 'no-such-env': verifiers cannot load it"):
        from_verifiers("no-such-env")
