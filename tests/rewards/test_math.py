"""The math reward, with math-verify and without it."""

import builtins

import numpy as np
import pytest

from jrl.rewards import Sample, math_reward
from jrl.rewards import math as module
from jrl.types import Prompt


def judge(completion, answer, **options):
    prompt = Prompt(0, "?", np.zeros(1, np.int32), answer)
    return math_reward([Sample(prompt, completion, np.zeros(1, np.int32), "length")], **options)[0]


NUMBERS = [
    (r"so \boxed{1,000}", "1000", 1.0),
    ("The answer is 72.", "... \n#### 72", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{71}", "72", 0.0),
    ("72 and then 73", "72", 0.0),
    ("no number", "72", 0.0),
    ("", "72", 0.0),
    (r"\boxed{0.5}", ["7", "1/2"], 1.0),
    (r"\boxed{8}", ["7", "1/2"], 0.0),
]
EXPRESSIONS = [
    (r"we find \boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
    (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}", 1.0),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
    (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
    (r"\boxed{x + 1}", "x + 2", 0.0),
]


@pytest.mark.parametrize(("completion", "answer", "points"), NUMBERS)
def test_numbers(completion, answer, points):
    assert judge(completion, answer) == points


@pytest.mark.parametrize(("completion", "answer", "points"), EXPRESSIONS)
@pytest.mark.extra("math")
def test_expressions_with_math_verify(completion, answer, points):
    assert judge(completion, answer) == points


def test_without_math_verify_numbers_and_equal_texts_count(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.split(".")[0] == "math_verify":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    module._math_verify.cache_clear()
    try:
        for completion, answer, points in NUMBERS:
            assert judge(completion, answer) == points
        assert judge(r"\boxed{x^2+1}", "x^2 + 1") == 1.0
        assert judge(r"\boxed{1+x^2}", "x^2 + 1") == 0.0
    finally:
        module._math_verify.cache_clear()


def test_tolerance_changes_the_verdict():
    assert judge("3.14", "3.14159") == 0.0
    assert judge("3.14", "3.14159", tolerance=0.01) == 1.0
