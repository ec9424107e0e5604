"""Pairs that name the score to reach: their words, and rows that are refused."""

import pytest

from jrl.data.datasets import MemoryRows
from jrl.data.pairs import rows_for
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.zoo.methods.goals import GoalRows, goal_conditioned


def test_goals_are_worded_as_in_the_released_code():
    pair = {"prompt": "p", "chosen": "a", "rejected": "b", "chosen_score": 9.0}
    up, down = goal_conditioned(pair | {"rejected_score": 4.5})
    assert up["prompt"].endswith("where 1 is lowest and 10 is highest):\nOverall score: 9.\n\np")
    assert "Overall score: 4.5." in down["prompt"]
    assert (down["chosen"], down["rejected"]) == ("b", "a")


def test_a_pair_with_scores_is_two_that_aim_at_them():
    row = {
        "prompt": "q",
        "chosen": "1",
        "rejected": "2",
        "chosen_score": 9.0,
        "score_rejected": 4.5,
    }
    rows = rows_for(get_method("reward_augmented_dpo").needs.reads, MemoryRows([row], "line"))
    up, down = (rows[i] for i in range(len(rows)))
    assert "Overall score: 9.\n\nq" in up["prompt"]
    assert "Overall score: 4.5.\n\nq" in down["prompt"]
    assert [(x["chosen"], x["rejected"]) for x in (up, down)] == [("1", "2"), ("2", "1")]
    for more, message in (
        ({"score_rejected": None}, "line 1: rejected_score = None.*rejected_score or score_rej"),
        (
            {"prompt": [{"role": "user", "content": "2+2"}]},
            "line 1: prompt = .*a prompt that is a text",
        ),
        ({"chosen": None}, "line 1: there is no chosen"),
    ):
        with pytest.raises(UserError, match=message):
            GoalRows(MemoryRows([row | more], "line"))[1]
