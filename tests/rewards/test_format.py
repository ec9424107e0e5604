"""The format reward: boxes, tags and patterns."""

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, confidence, format_reward
from jrl.types import Prompt

PROMPT = Prompt(0, "?", np.zeros(1, np.int32), "1")


def judge(completion, **options):
    return format_reward([Sample(PROMPT, completion, PROMPT.tokens, "stop_token")], **options)[0]


def test_a_boxed_answer_is_the_default():
    assert judge(r"so \boxed{3}") == 1.0
    assert judge(r"so \boxed{3") == 0.0
    assert judge(r"so \boxed{ }") == 0.0
    assert judge("so 3") == 0.0


@pytest.mark.parametrize(
    ("completion", "points"),
    [
        ("<think>a < b\nso</think>\n<answer>3</answer>\n", 1.0),
        ("<think>a</think><answer>3</answer>", 1.0),
        ("<answer>3</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think><answer>3", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think></think><answer>3</answer>", 0.0),
        ("<think>a</think>x<answer>3</answer>", 0.0),
        ("x<think>a</think><answer>3</answer>", 0.0),
        ("<think>a<think>b</think><answer>3</answer>", 0.0),
        ("<think>a</think><answer>3</answer><answer>4</answer>", 0.0),
        ("<think>a</think><answer><b>3</b></answer>", 1.0),
    ],
)
def test_tags(completion, points):
    assert judge(completion, tags=["think", "answer"]) == points


def test_patterns_match_the_whole_completion():
    assert judge(" answer: 12\n", pattern=r"answer: \d+") == 1.0
    assert judge("my answer: 12", pattern=r"answer: \d+") == 0.0
    assert judge("a\nb", pattern="a.b") == 1.0
    with pytest.raises(UserError, match="rewards.format.pattern"):
        judge("a", pattern="(")
    with pytest.raises(UserError, match="both set"):
        judge("a", pattern="a", tags=["b"])


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("Confidence: 80%", 0.8),
        ("so 7. confidence = 0.25", 0.25),
        ("confidence: .5 ... Confidence: 90", 0.9),
        ("<confidence>100%</confidence>", 1.0),
        ("Confidence: 4000", 1.0),
        ("42", 1.0),
    ],
)
def test_the_confidence_stated_last_is_read(text, share):
    sample = Sample(PROMPT, text, PROMPT.tokens, "stop_token")
    assert confidence([sample]) == [share]
