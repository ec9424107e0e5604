"""Entries of reasoning-gym scored one by one."""

import json

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.types import Prompt

pytestmark = [
    pytest.mark.extra("reasoning-gym"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning"),
]
ENTRY = {"question": "Legs?", "answer": "292", "metadata": {"source_dataset": "leg_counting"}}


def paid(text, answer="", options=(), **meta):
    prompt = Prompt(5, "Legs?", np.zeros(1, np.int32), answer, meta)
    sample = Sample(prompt, text, np.zeros(1, np.int32), "stop_token")
    return make_reward("reasoning_gym", **dict(options))([sample])[0]


def test_the_data_set_of_the_row_scores():
    for entry in (ENTRY, json.dumps(ENTRY)):
        assert paid("So <answer>292</answer>", entry=entry) == 1.0
        assert paid("So <answer>291</answer>", entry=entry) == 0.0
    assert paid("\\boxed{292}", "292", metadata=json.dumps(ENTRY["metadata"])) == 1.0
    assert paid("292", "292", options={"dataset": "leg_counting"}) == 1.0
    # a row that names its data set is not judged by that of the others
    assert paid("292", entry=ENTRY, options={"dataset": "countdown"}) == 1.0


def test_mistakes_are_named():
    with pytest.raises(UserError, match="row 6 names no data set"):
        paid("292", "292")
    with pytest.raises(UserError, match="nothing_of_the_kind"):
        paid("292", "292", options={"dataset": "nothing_of_the_kind"})
