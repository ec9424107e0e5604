"""Finding reward functions by name, with their options."""

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import REWARDS, Sample, make_reward
from jrl.types import Prompt

PROMPT = Prompt(3, "How many?", np.arange(2, dtype=np.int32), "7", {"level": 2})
SAMPLE = Sample(PROMPT, "it is 7", np.arange(4, dtype=np.int32), "stop_token")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "LEVEL = 1\n"
        "def score(samples, bonus=0.0):\n"
        "    return [bonus + s.prompt.meta['level'] for s in samples]\n"
        "def anything(samples, **options):\n"
        "    return [float(len(options))] * len(samples)\n"
        "anything.over = 'group'\n"
    )
    return path


def test_the_librarys_own_rewards_take_samples():
    assert make_reward("exact")([SAMPLE]) == [1.0]
    assert make_reward("math", tolerance=0.5)([SAMPLE]) == [1.0]
    assert make_reward("format", pattern="it is .")([SAMPLE]) == [1.0]
    required = {"soft_overlong": {"limit": 9, "cache": 2}, "cosine_length": {"limit": 9}}
    required["tools_used"] = {"names": ["search"]}
    required["get_cosine_scaled_reward"] = {"max_len": 9}
    limits = {"max_completion_len": 9, "soft_punish_cache": 2}
    required["get_soft_overlong_punishment"] = limits
    chosen = dataclasses.replace(SAMPLE, prompt=dataclasses.replace(SAMPLE.prompt, answer="C"))
    for name in REWARDS:
        reward = make_reward(name, **required.get(name, {}))
        if name not in ("tool_calls", "instructions"):  # which read columns of their own
            assert pickle.loads(pickle.dumps(reward))([chosen]) == reward([chosen])


def test_functions_of_files_and_modules(file):
    reward = make_reward(f"{file}:score", bonus=0.5)
    assert reward([SAMPLE, SAMPLE]) == [2.5, 2.5]
    assert reward.over == "sample"
    assert pickle.loads(pickle.dumps(reward))([SAMPLE]) == [2.5]
    assert make_reward(f"{file}:anything", a=1, b=2).over == "group"
    assert make_reward("jrl.rewards.exact:exact_reward")([SAMPLE]) == [1.0]


def test_errors_name_what_was_not_found(file, tmp_path):
    with pytest.raises(UserError, match="rewards = 'maths'; did you mean 'math'.*FILE.py:function"):
        make_reward("maths")
    with pytest.raises(UserError, match="has no function 'scores'"):
        make_reward(f"{file}:scores")
    with pytest.raises(UserError, match="LEVEL in .* is .*, not a function"):
        make_reward(f"{file}:LEVEL")
    with pytest.raises(UserError, match=r"there is no file .*nothere\.py"):
        make_reward(f"{tmp_path / 'nothere.py'}:score")
    with pytest.raises(UserError, match="there is no module 'no_such_module'"):
        make_reward("no_such_module:score")
    failing = tmp_path / "broken.py"
    failing.write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"broken\.py, line 1: ZeroDivisionError"):
        make_reward(f"{failing}:score")
    with pytest.raises(UserError, match=r"math\.tolerence = 1: .* did you mean 'tolerance'"):
        make_reward("math", tolerence=1)
    with pytest.raises(UserError, match="bonuss = 1: .* did you mean 'bonus'"):
        make_reward(f"{file}:score", bonuss=1)


def test_a_sample_travels_without_its_prompts_class():
    copy = pickle.loads(pickle.dumps(SAMPLE))
    assert type(copy.prompt).__module__ != "jrl.types"
    assert (copy.prompt.id, copy.prompt.text, copy.prompt.answer) == (3, "How many?", "7")
    assert copy.prompt.meta == {"level": 2}
    np.testing.assert_array_equal(copy.prompt.tokens, PROMPT.tokens)
    np.testing.assert_array_equal(copy.tokens, SAMPLE.tokens)
    assert (copy.completion, copy.stop) == ("it is 7", "stop_token")


def test_importing_rewards_does_not_import_jax():
    code = "import sys, jrl.rewards, jrl.rewards.pool; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
