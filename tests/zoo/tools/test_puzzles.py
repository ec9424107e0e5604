"""Rows of puzzles: mixtures, difficulty, the verifier's verdicts, and the two forms of ToTRL."""

import json
from collections import Counter

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.types import Prompt
from jrl.zoo import puzzle_rows
from jrl.zoo.tools.puzzles import TREE, main

pytestmark = [
    pytest.mark.extra("reasoning-gym"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning"),
]
TASKS = {"leg_counting": {"weight": 3.0}, "chain_sum": {"min_terms": 3, "max_terms": 3}}


def points(row, completion):
    meta = {key: value for key, value in row.items() if key not in ("question", "answer")}
    prompt = Prompt(0, row["question"], np.zeros(1, np.int32), row["answer"], meta)
    reward = make_reward("reasoning_gym")
    return reward([Sample(prompt, completion, np.zeros(1, np.int32), "stop_token")])


def test_a_mixture_is_judged_by_each_tasks_verifier():
    rows = list(puzzle_rows(TASKS, 200, seed=1))
    assert rows == list(puzzle_rows(TASKS, 200, seed=1))
    counts = Counter(row["data_source"] for row in rows)
    assert 2 < counts["leg_counting"] / counts["chain_sum"] < 4.5
    for row in rows[:20]:
        assert points(row, f"So <answer>{row['answer']}</answer>") == [1.0]
        assert points(row, "So <answer>-12345</answer>")[0] < 1
        if row["data_source"] == "chain_sum":
            assert sum(row["question"].split("\n")[0].count(sign) for sign in "+-") >= 2


def test_trees_of_thought_are_asked_for_with_thinking_off_and_on(tmp_path, capsys):
    (tmp_path / "puzzles.toml").write_text('guidance = "tree"\n[tasks.leg_counting]\n')
    main([str(tmp_path / "puzzles.toml"), "--rows", "3"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["stage"] for row in rows] == [0, 1] * 3
    assert [row["chat_template_kwargs"]["enable_thinking"] for row in rows] == [False, True] * 3
    assert all(TREE in row["question"] for row in rows)
    assert rows[0]["question"] == rows[1]["question"] != rows[2]["question"]


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({}, "tasks is empty"),
        ({"no_such_puzzle": {}}, "tasks.no_such_puzzle"),
        ({"leg_counting": {"weight": 0}}, "tasks.leg_counting.weight"),
        ({"leg_counting": {"weight": "much"}}, "tasks.leg_counting.weight = 'much'"),
        ({"leg_counting": 3}, "tasks.leg_counting = 3; write a table"),
        (["leg_counting"], "tasks = .'leg_counting'.; write a table for each task"),
        ({"leg_counting": {"legs": 3}}, "tasks.leg_counting"),
    ],
)
def test_mistakes_name_the_task(tasks, words):
    with pytest.raises(UserError, match=words):
        list(puzzle_rows(tasks, 1, 0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "puzzles.toml: No such file"),
        ("tasks =", "puzzles.toml: not valid TOML"),
        ('guidance = "wood"', "guidance = 'wood'"),
    ],
)
def test_mistakes_of_the_command_are_one_line(tmp_path, capsys, text, words):
    file = tmp_path / "puzzles.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        main([str(file)])
    error = capsys.readouterr().err
    assert (exit_.value.code, len(error.splitlines())) == (1, 1)
    assert words in error
