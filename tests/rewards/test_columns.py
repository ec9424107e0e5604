"""Reward functions in JRL's form and in TRL's: told apart, called, and refused in one line."""

import dataclasses
import pickle
import types

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.rewards.columns import adapted, check_columns, form_of
from jrl.rewards.pool import RewardPool
from jrl.user_code import given


def sample(completion, answer="4", **meta):
    prompt = types.SimpleNamespace(
        id=0, text="2+2?", tokens=np.zeros(1, np.int32), answer=answer, meta=meta, messages=()
    )
    return Sample(prompt, completion, np.array([5, 6], np.int32), "stop_token")


SAMPLES = [sample("4", level=1), sample("5", level=2)]


def of_samples(samples):
    return [float(s.completion == s.prompt.answer) for s in samples]


def of_trl(completions, answer, **kwargs):
    """1 for the answer."""
    assert set(kwargs) == {"prompts", "completion_ids", "level"}
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def with_level(prompts, completions, level, bonus=0.0):
    return [
        x + bonus + len(p) * (c == "4") for p, c, x in zip(prompts, completions, level, strict=True)
    ]


def by_keyword(*, completions, completion_ids):
    return [float(sum(ids)) for ids in completion_ids]


def any_number(*samples):
    return [0.0 for _ in samples[0]]


def test_forms_are_told_apart():
    assert [form_of(f, "r") for f in (of_samples, any_number)] == ["samples"] * 2
    assert [form_of(f, "r") for f in (of_trl, with_level, by_keyword)] == ["columns"] * 3


def test_columns_are_what_the_samples_hold():
    assert adapted(of_samples) is of_samples
    assert adapted(of_trl)(SAMPLES) == of_samples(SAMPLES) == [1.0, 0.0]
    assert adapted(with_level)(SAMPLES, bonus=0.5) == [1 + 0.5 + 4, 2 + 0.5]
    assert adapted(by_keyword)(SAMPLES) == [11.0, 11.0]
    assert pickle.loads(pickle.dumps(adapted(of_trl)))(SAMPLES) == [1.0, 0.0]


def of_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_prompt(prompts, level=None, **kwargs):
    return [float(len(prompt)) for prompt in prompts]


def of_anything(**kwargs):
    return [float(len(text)) for text in kwargs["completions"]]


def test_columns_need_not_be_completions():
    assert adapted(of_ids)(SAMPLES) == [float(len(s.tokens)) for s in SAMPLES]
    assert adapted(by_prompt)(SAMPLES) == [float(len(s.prompt.text)) for s in SAMPLES]
    assert adapted(of_anything)(SAMPLES) == [float(len(s.completion)) for s in SAMPLES]


WRONG = {
    "nothing": (lambda: [0.0], r"the function takes \(\)"),
    "one completion": (lambda completion, answer: 0.0, r"takes \(completion, answer\)"),
    "one sample": (lambda sample: 0.0, r"takes \(sample\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_forms_are_refused_in_one_line_with_both_that_do(name):
    function, said = WRONG[name]
    with pytest.raises(UserError, match=said) as caught:
        form_of(function, "rewards.mine")
    assert "reward(samples) -> list of numbers" in str(caught.value)
    assert "reward(completions, **columns)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_the_data_lacks_is_named_with_those_there_are():
    check_columns(with_level, ["level"], "rewards.mine")
    check_columns(of_samples, [], "rewards.mine")
    with pytest.raises(UserError) as caught:
        check_columns(with_level, ["levle"], "rewards.mine")
    assert "takes level, and the data has no such column" in str(caught.value)
    assert "prompts, completions, completion_ids, answer, levle" in str(caught.value)


def test_a_function_of_columns_in_a_file_and_in_workers(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def short(completions, limit=3, **columns):\n"
        "    return [float(len(c) < limit) for c in completions]\n"
    )
    reward = make_reward(f"{path}:short", limit=2)
    assert reward([sample("4"), sample("44")]) == [1.0, 0.0]
    with RewardPool({"short": reward}, workers=1, timeout_seconds=60) as pool:
        points, _, _, _ = pool.scores([sample("4"), sample("44")], group=1)
    assert points.tolist() == [[1.0], [0.0]]


def test_a_function_passed_in_python():
    with given({"mine": of_trl}):
        reward = make_reward("python:mine")
    assert reward(SAMPLES) == [1.0, 0.0]  # also outside, where the name is not known
    with pytest.raises(UserError, match="was passed to the run in Python and is not known here"):
        make_reward("python:mine")
    with given({"mine": of_samples}), pytest.raises(UserError, match="there is no such option"):
        make_reward("python:mine", bonus=1)


SCALED = """
def scaled(completions, answer, scale):
    return [scale * (c == a) for c, a in zip(completions, answer, strict=True)]
"""


def test_options_of_a_function_of_columns_are_its_arguments(tmp_path):
    (tmp_path / "mine.py").write_text(SCALED)
    name = f"{tmp_path / 'mine.py'}:scaled"
    assert make_reward(name, scale=2.0)(SAMPLES) == [2.0, 0.0]
    with pytest.raises(UserError, match=r"scaled.scael = 2: .*did you mean 'scale'"):
        make_reward(name, scael=2)


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("gsm8k", {"split": "train"})
    return {"score": float(solution_str == ground_truth), "length": 3}


async def on_its_own(completions, **columns):
    return [None if c == "4" else 0.5 for c in completions]


def with_state(completions, trainer_state):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def of_chat(prompts, completions, **columns):
    assert prompts[0][0] == {"role": "user", "content": "2+2?"}
    return [float(c[0]["content"] == "4") for c in completions]


def test_a_function_of_verl_is_asked_for_each_solution():
    assert form_of(verl, "r") == "solution"
    told = [sample(text, data_source="gsm8k", extra_info={"split": "train"}) for text in ("4", "5")]
    assert adapted(verl)(told) == [1.0, 0.0]
    check_columns(verl, (), "r")


def test_an_async_function_and_one_that_reads_the_step():
    assert adapted(on_its_own)(SAMPLES) == [None, 0.5]
    timed = [dataclasses.replace(s, step=3, steps=6) for s in SAMPLES]
    assert adapted(with_state)(timed) == [0.5, 0.5]


def test_prompts_as_messages_make_completions_messages():
    chat = [
        dataclasses.replace(
            s,
            prompt=types.SimpleNamespace(
                **{**vars(s.prompt), "messages": ({"role": "user", "content": "2+2?"},)}
            ),
        )
        for s in SAMPLES
    ]
    assert adapted(of_chat)(chat) == [1.0, 0.0]
