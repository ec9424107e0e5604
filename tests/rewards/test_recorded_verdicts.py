"""The answer checker beside verdicts that published evaluations recorded.

``recorded_verdicts.jsonl`` has [times, recorded, reference, answer] of 17,990 answers to GSM8K,
MATH and multiple choice, from ``outputs/`` of GAIR-NLP/abel at 3a24ef2, ``rho-1/outputs.zip`` of
microsoft/rho at 3296590, and ``eval_rm_maj_example`` of QwenLM/Qwen2.5-Math at a45202b.
``wrong_records.jsonl`` names the records that are wrong by hand, or are of a garbled text, and why.
"""

import json
import pathlib

import numpy as np
import pytest

from jrl.rewards import Sample, exact_reward, math_reward
from jrl.types import Prompt

PLACE = pathlib.Path(__file__).parent


def rows_of(name):
    return [json.loads(line) for line in (PLACE / name).read_text("utf-8").splitlines()]


WRONG = {(row["answer"], row["reference"]): row for row in rows_of("wrong_records.jsonl")}


def agreement(reward):
    """(share of all records, share of those that are right, the differences that none names)."""
    total = named = agreed = agreed_unnamed = 0
    differ = []
    for times, recorded, reference, answer in rows_of("recorded_verdicts.jsonl"):
        prompt = Prompt(0, "?", np.zeros(1, np.int32), reference)
        sample = Sample(prompt, f"\\boxed{{{answer}}}", np.zeros(1, np.int32), "stop_token")
        same = (reward([sample]) == [1.0]) == recorded
        wrong = WRONG.get((answer, reference), {}).get("recorded") is recorded
        assert not (wrong and same and reward is math_reward), (answer, reference)  # out of date
        total, agreed = total + times, agreed + times * same
        if wrong:
            named += times
            continue
        agreed_unnamed += times * same
        differ += [] if same else [(answer, reference)]
    assert total == 17_990
    assert named == sum(each["times"] for each in WRONG.values())
    return agreed / total, agreed_unnamed / (total - named), differ


@pytest.mark.extra("math")
def test_verdicts_are_those_of_published_evaluations():
    of_all, of_right, differ = agreement(math_reward)
    figures = f"{of_all:.2%} of all records, {of_right:.3%} of those that are right; {differ}"
    assert of_all >= 0.9979, figures
    assert of_right >= 0.999, figures
    assert len(differ) <= 2, figures


def test_without_algebra_few_expressions_differ():
    of_all, of_right, differ = agreement(exact_reward)
    assert of_all >= 0.99, differ
    assert of_right >= 0.99, differ
