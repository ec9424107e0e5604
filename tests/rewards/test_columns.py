"""Reward functions in JRL's form and in TRL's: told apart, called, and refused in one line."""

import asyncio
import dataclasses
import functools
import inspect
import json
import pickle
import sys
import types

import numpy as np
import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.rewards.call import call
from jrl.rewards.columns import adapted, check_columns, form_of
from jrl.rewards.pool import RewardPool
from jrl.rewards.rules import Rules
from jrl.setup.reward_parts import parts_of, reward_pool
from jrl.user_code import python_values


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


def of_column(level, **kwargs):
    return [float(x) for x in level]


def of_answer(answer, **kwargs):
    return [float(text == x) for text, x in zip(kwargs["completions"], answer, strict=True)]


def test_columns_need_not_be_completions():
    assert adapted(of_ids)(SAMPLES) == [float(len(s.tokens)) for s in SAMPLES]
    assert adapted(by_prompt)(SAMPLES) == [float(len(s.prompt.text)) for s in SAMPLES]
    assert adapted(of_anything)(SAMPLES) == [float(len(s.completion)) for s in SAMPLES]
    assert adapted(of_column)(SAMPLES) == [float(s.prompt.meta["level"]) for s in SAMPLES]
    assert adapted(of_answer)(SAMPLES) == [1.0, 0.0]
    assert form_of(lambda samples, **options: [0.0], "rewards.mine") == "samples"


WRONG = {
    "nothing": (lambda: [0.0], r"the function takes \(\)"),
    "one text": (lambda text, answer: 0.0, r"takes \(text, answer\)"),
    "one sample": (lambda sample: 0.0, r"takes \(sample\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_forms_are_refused_in_one_line_with_both_that_do(name):
    function, message = WRONG[name]
    with pytest.raises(UserError, match=message) as caught:
        form_of(function, "rewards.mine")
    assert "reward(samples) -> list of numbers" in str(caught.value)
    assert "reward(completions, **columns)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_the_data_lacks_is_named_with_those_there_are():
    check_columns(with_level, ["level"], "rewards.mine")
    check_columns(of_samples, [], "rewards.mine")
    with pytest.raises(UserError) as caught:
        check_columns(with_level, ["levle"], "rewards.mine")
    with pytest.raises(UserError, match="a function of samples names its first argument samples"):
        check_columns(lambda batch, **options: [0.0], [], "rewards.mine")
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
        points, _ = pool.scores([sample("4"), sample("44")], group=1)
    assert points.tolist() == [[1.0], [0.0]]


def test_a_misspelt_key_is_no_option_that_any_arguments_take():
    with python_values({"mine": of_trl, "named": lambda completions, weights: weights}):
        with pytest.raises(UserError, match=r"weigth = 2; did you mean rewards.python:mine.weight"):
            make_reward("python:mine", weigth=2)
        make_reward("python:mine", level=2)
        make_reward("python:named", weights=[1.0])


def test_a_function_passed_in_python():
    with python_values({"mine": of_trl}):
        reward = make_reward("python:mine")
    assert reward(SAMPLES) == [1.0, 0.0]  # also outside, where the name is not known
    with pytest.raises(UserError, match="was passed to the run in Python and is not known here"):
        make_reward("python:mine")
    with (
        python_values({"mine": of_samples}),
        pytest.raises(UserError, match="there is no such option"),
    ):
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
    assert (data_source, extra_info["split"]) == ("gsm8k", "train")
    return {"score": float(solution_str == ground_truth), "length": 3}


async def async_reward(completions, **columns):
    return [None if c == "4" else 0.5 for c in completions]


def with_state(completions, trainer_state):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def of_chat(prompts, completions, **columns):
    assert prompts[0][0] == {"role": "user", "content": "2+2?"}
    return [float(c[0]["content"] == "4") for c in completions]


def test_a_function_of_verl_is_asked_for_each_solution():
    assert form_of(verl, "r") == "solution"
    samples = [
        sample(text, data_source="gsm8k", extra_info={"split": "train"}) for text in ("4", "5")
    ]
    assert adapted(verl)(samples) == [1.0, 0.0]
    check_columns(verl, (), "r")


def by_turns(solution_str, ground_truth, extra_info):
    assert extra_info["rollout_reward_scores"] == {}
    return extra_info["num_turns"]


def test_verls_function_knows_the_turns():
    """As verl counts: the prompt, each turn of the policy, and what came between two of them."""
    roles = ["assistant", "tool", "tool", "assistant"]
    episode = tuple({"role": role, "content": "4"} for role in roles)
    assert adapted(by_turns)([SAMPLES[0]]) == [2]
    assert adapted(by_turns)([dataclasses.replace(SAMPLES[0], messages=episode)]) == [4]


def in_all(solution_str, ground_truth):
    return solution_str.count("<search>")


def test_verls_function_reads_all_turns_of_an_episode():
    """As verl decodes them; its completion alone would be the last turn."""
    texts = ["<search>a</search>", "found", "<search>b</search>", "found", "4"]
    roles = ["assistant", "tool"] * 3
    turns = tuple({"role": r, "content": t} for r, t in zip(roles, texts, strict=False))
    episode = dataclasses.replace(SAMPLES[0], messages=turns)
    assert adapted(in_all)([episode, SAMPLES[0]]) == [2, 0]
    shown = Rules(with_prompt=True).shown(episode)
    assert adapted(lambda solution_str, ground_truth: solution_str[:5])([shown]) == ["2+2?<"]
    assert shown.messages[1:] == turns[1:]


def test_an_async_function_and_one_that_reads_the_step():
    assert adapted(async_reward)(SAMPLES) == [None, 0.5]
    timed = [dataclasses.replace(s, step=3, steps=6) for s in SAMPLES]
    assert adapted(with_state)(timed) == [0.5, 0.5]


def test_an_async_function_where_a_loop_runs():
    async def cell():  # as a notebook runs one
        return adapted(async_reward)(SAMPLES)

    assert asyncio.run(cell()) == [None, 0.5]


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


# ---------------------------------------------------------------- as scripts write them


def reads_state(completions, **kwargs):
    state = kwargs["trainer_state"]
    kwargs["log_metric"]("seen", len(completions))
    return [state.global_step / state.max_steps for _ in completions]


def reads_state_inside(completions, **kwargs):
    return [kwargs["trainer_state"].global_step / len(c) for c in completions]


@functools.wraps(reads_state)
def decorated(*args, **kwargs):
    return reads_state(*args, **kwargs)


def hands_columns_on(completions, **columns):
    return [float(len(values)) for values in columns.values()][:1] * len(completions)


class Async:
    """An object that is called, and waits."""

    async def __call__(self, completions, **kwargs):
        return [float(len(text)) for text in completions]


ASYNC = Async()


def test_what_the_trainer_passes_is_there_where_it_is_read():
    samples = [dataclasses.replace(s, step=3, steps=4) for s in SAMPLES]
    assert adapted(reads_state)(samples) == [0.75, 0.75]
    assert adapted(reads_state_inside)(samples) == [3.0, 3.0]
    assert adapted(decorated)(samples) == [0.75, 0.75]
    assert adapted(hands_columns_on)(samples) == [2.0, 2.0]  # lists alone
    assert adapted(ASYNC)(samples) == [1.0, 1.0]


def test_objects_of_anothers_rollouts_are_named():
    with pytest.raises(UserError, match=r"rewards.x: the function takes environments, TRL's"):
        form_of(lambda environments, **kwargs: [0.0], "rewards.x")


def asks(completions, question, **kwargs):
    return [float(text in answer) for text, answer in zip(completions, question, strict=True)]


def test_a_question_in_text_is_a_column():
    prompt = types.SimpleNamespace(**{**vars(SAMPLES[0].prompt), "question": "4 or 6?"})
    samples = [dataclasses.replace(s, prompt=prompt) for s in SAMPLES]
    assert adapted(asks)(samples) == [1.0, 0.0]
    assert adapted(asks)(pickle.loads(pickle.dumps(samples))) == [1.0, 0.0]
    check_columns(asks, ["question"], "rewards.x")
    with pytest.raises(UserError, match="takes question"):
        check_columns(asks, ["level"], "rewards.x")


def of_a_batch(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    best = max(map(len, solution_strs))
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [{"score": scale * (len(s) == best) * (s == truth)} for s, truth in pairs]


def test_verls_function_of_a_batch_is_called_once():
    samples = [sample("44", "44"), sample("4"), sample("55", "44")]
    assert form_of(of_a_batch, "r") == "solutions"
    assert adapted(of_a_batch).over == "batch"
    assert adapted(of_a_batch)(samples, scale=2.0) == [2.0, 0.0, 0.0]
    assert adapted(of_a_batch)([]) == []
    with pytest.raises(UserError, match="takes labels"):
        check_columns(lambda solution_strs, labels: [], [], "rewards.x")


def with_parts(solution_str, ground_truth, step=0):
    return 1.5, 1.0, 0.5


def test_of_several_scores_verl_takes_the_first():
    assert adapted(with_parts)(SAMPLES) == [1.5, 1.5]


class Tensor:
    """As arrays of other libraries are."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


def test_tensors_are_numbers():
    assert call(lambda samples: Tensor([0.5, 1.0]), SAMPLES) == [0.5, 1.0]
    assert call(lambda samples: [Tensor(0.5), None], SAMPLES) == [0.5, None]
    assert call(lambda samples: [np.where(True, 0.5, 0.0), None], SAMPLES) == [0.5, None]
    assert "returned str" in call(lambda samples: [Tensor("a"), 1.0], SAMPLES).reason


def test_files_import_what_lies_beside_them_and_above(tmp_path, monkeypatch):
    """A script's directory is searched, last; a file of a package imports others of it."""
    monkeypatch.setattr("sys.path", [*sys.path])
    package = tmp_path / "their_package"
    (package / "inner").mkdir(parents=True)
    for folder in (package, package / "inner"):
        (folder / "__init__.py").write_text("")
    (tmp_path / "their_words.py").write_text("WORDS = 3.0\n")
    (tmp_path / "script.py").write_text(
        "from their_words import WORDS\n\n\ndef reward(completions, **kwargs):\n"
        "    return [WORDS] * len(completions)\n"
    )
    (package / "numbers.py").write_text("TWO = 2.0\n")
    (package / "inner" / "rewards.py").write_text(
        "from ..numbers import TWO\n\n\ndef reward(completions, **kwargs):\n"
        "    return [TWO] * len(completions)\n"
    )
    assert make_reward(f"{tmp_path}/script.py:reward")(SAMPLES) == [3.0, 3.0]
    assert make_reward(f"{package}/inner/rewards.py:reward")(SAMPLES) == [2.0, 2.0]
    (tmp_path / "alone.py").write_text("from .their_words import WORDS\n")
    with pytest.raises(UserError, match=r"alone\.py.*relative"):
        make_reward(f"{tmp_path}/alone.py:reward")


def longest(completions, **kwargs):
    most = max(map(len, completions))
    return [float(len(text) == most) for text in completions]


def test_a_function_may_be_called_with_all_samples_of_a_step(tmp_path):
    """TRL calls its functions so; here one at a time unless over says otherwise."""
    (tmp_path / "script.py").write_text(inspect.getsource(longest))
    name = f"function={json.dumps(f'{tmp_path}/script.py:longest')}"
    samples = [sample("a"), sample("bbb"), sample("cc")]
    for over, points in (("", [1, 1, 1]), ("over='batch', ", [0, 1, 0])):
        keys = ["data.train=rows.jsonl", f"rewards={{long={{{over}{name}}}}}"]
        with reward_pool(load_config(None, [*keys, "reward_pool.workers=0"])) as pool:
            assert pool.scores(samples, group=1).points[:, 0].tolist() == points
    with pytest.raises(UserError, match=r"rewards\.math\.over"):
        parts_of(load_config(None, ["data.train=rows.jsonl", "rewards={math={over='batch'}}"]))


def after_the_header(solution_str, ground_truth):
    """As in TinyZero and Search-R1: 0 without the prompt's words before the completion."""
    _, header, answer = solution_str.partition("2+2?")
    return float(bool(header) and answer == ground_truth)


def test_a_function_may_read_the_prompt_before_the_completion(tmp_path):
    (tmp_path / "script.py").write_text(inspect.getsource(after_the_header))
    name = f"function={json.dumps(f'{tmp_path}/script.py:after_the_header')}"
    for more, points in (("", [0, 0]), ("with_prompt=true, ", [1, 0])):
        keys = ["data.train=rows.jsonl", f"rewards={{of={{{more}{name}}}}}"]
        with reward_pool(load_config(None, [*keys, "reward_pool.workers=0"])) as pool:
            assert pool.scores(SAMPLES).points[:, 0].tolist() == points
    by_token = dataclasses.replace(SAMPLES[0], ends=np.array([1, 1]))
    shown = Rules(with_prompt=True).shown(by_token)
    assert shown.completion[: shown.ends[0]] == "2+2?4"
    with pytest.raises(UserError, match=r"rewards\.math\.with_prompt = true: only functions of"):
        parts_of(load_config(None, ["data.train=rows.jsonl", "rewards={math={with_prompt=true}}"]))


def test_a_function_of_verifiers_is_asked_for_each_completion():
    """Those of its rubrics take what they name of a rollout, and may be async."""

    def correct_answer(completion, answer, level, bonus=0.0, **kwargs):
        assert set(kwargs) == {"prompt", "task", "info", "state"}
        assert kwargs["state"]["completion"] is completion
        return float(completion == answer) + 10 * level + bonus

    async def by_state(completion, state, info, task):
        return len(state["prompt"]) + len(info) + (task == "default")

    assert form_of(correct_answer, "r") == "rollout"
    assert adapted(correct_answer)(SAMPLES) == [11.0, 20.0]
    assert adapted(correct_answer)(SAMPLES, bonus=0.5) == [11.5, 20.5]
    assert adapted(by_state)([sample("4", info={"a": 1})]) == [6]
    check_columns(correct_answer, ["level"], "r")
    with pytest.raises(UserError, match="r: the function takes parser, and the data has no such"):
        check_columns(lambda completion, answer, parser: 0.0, ["level"], "r")


def test_older_names_of_verls_solution_and_nemos_response():
    def predicted(predict_str, ground_truth):
        return float(predict_str == ground_truth)

    def of_nemo(ground_truth, response, tag="answer"):
        return float(response == ground_truth), tag == "answer"

    assert adapted(predicted)(SAMPLES) == [1.0, 0.0]
    assert adapted(of_nemo)(SAMPLES, tag="x") == [1.0, 0.0]
    with pytest.raises(UserError, match="r: the function takes .response.; write reward"):
        form_of(lambda response: 0.0, "r")
