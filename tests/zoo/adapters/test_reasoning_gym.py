"""Problems of reasoning-gym, where it is installed."""

import sys

import numpy as np
import pytest
from scripted import reply

from jrl.episodes.check_env import check_env
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.adapters.reasoning_gym import from_reasoning_gym

PROMPT = Prompt(0, "", np.zeros(0, np.int32), "-")


@pytest.mark.extra("reasoning-gym")
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_a_problem_is_answered_in_two_attempts():
    env = check_env(from_reasoning_gym("leg_counting", attempts=2, seed=0))
    state, messages = env.init(PROMPT, 2**40 + 7)
    assert state.entry["question"] in messages[0]["content"]
    state, first = env.step(state, reply("<answer>none</answer>"))
    assert (first.reward, first.done) == (0.0, False)
    answer = state.entry["answer"]
    state, end = env.step(state, reply(f"so <answer>{answer}</answer>", 1))
    assert (end.reward, end.done, end.success) == (1.0, True, True)
    assert end.metrics == {"attempts": 2.0}
    assert env.init(PROMPT, 2**40 + 7)[1] == messages  # the seed is the problem
    once = from_reasoning_gym("leg_counting", seed=0)
    assert once.step(once.init(PROMPT, 1)[0], reply("?"))[1].done


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"'leg_counting' needs reasoning_gym; .*\[reasoning-gym\]"):
        from_reasoning_gym("leg_counting", seed=0)
