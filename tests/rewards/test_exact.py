"""Final answers: literal cases, and properties that hold for any number."""

from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jrl.rewards import Sample, exact_reward
from jrl.rewards.exact import boxed, final_answer, same_answer, to_number
from jrl.types import Prompt


def sample(completion, answer):
    prompt = Prompt(0, "?", np.zeros(1, np.int32), answer)
    return Sample(prompt, completion, np.zeros(1, np.int32), "stop_token")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"thus \boxed{42}", "42"),
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} and 7", r"\frac{1}{2}"),
        (r"\boxed{7} and then \boxed{unclosed", "7"),
        (r"\boxed{} is empty but 5", "5"),
        ("so 4+4=8\n#### 1,234", "1,234"),
        ("#### 5\nmore 6", "5"),
        (r"#### 5 but \boxed{6}", "6"),
        ("He has 12 apples and 3.5 pears.", "3.5"),
        ("The total is $1,250.", "$1,250"),
        ("It is -7.", "-7"),
        ("about 3/4 of it", "3/4"),
        ("x1 and abc", None),
        ("none at all", None),
        ("", None),
        ("####", None),
        ("100%", "100"),
        ("#### **18**", "18"),
        ("#### Step 1\n3 boxes of 6\nare 18", "18"),
        ("#### 18\n\n#### Notes\nin 3 boxes", "18"),
        ("### Solution\n#### Final answer\n$18", "$18"),
        ("It takes 2 1/2 hours.", "2 1/2"),
        ("There are 10 million.", "10 million"),
        (r"So it is $\frac{1}{2}$.", r"\frac{1}{2}"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_boxed_needs_balanced_braces():
    assert boxed(r"\boxed{a{b}c}") == "a{b}c"
    assert boxed(r"\boxed {3}") == "3"
    assert boxed(r"\boxed{3") is None
    assert boxed("boxed{3}") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-12", -12),
        ("- 12", -12),
        ("+3", 3),
        ("1,234,567.5", Fraction("1234567.5")),
        ("$ 18.00", 18),
        (r"\$18", 18),
        ("50%", 50),
        (r"50\%", 50),
        ("3/4", Fraction(3, 4)),
        ("3 / 4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\dfrac34", Fraction(3, 4)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        (r"2\frac{3}{2}", None),  # no mixed number: a product, if anything
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("18 apples", 18),
        (r"18\text{ cm}", 18),
        ("18.", 18),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("1/0", None),
        ("1e999999999", None),
        ("1,23", None),
        ("12 13", None),
        ("x", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("9" * 500, None),
    ],
)
def test_to_number(text, value):
    assert to_number(text) == value


@hypothesis.given(st.integers(-(10**9), 10**9), st.integers(0, 999))
def test_numbers_are_read_in_every_usual_form(integer, thousandths):
    value = Fraction(integer) + Fraction(thousandths, 1000) * (1 if integer >= 0 else -1)
    sign, size = ("-" if integer < 0 else ""), abs(integer)
    for text in (
        f"{sign}{size}.{thousandths:03d}",
        f"{sign}{size:,}.{thousandths:03d}",
        f"{sign}${size:,}.{thousandths:03d}",
    ):
        assert to_number(text) == value
        assert same_answer(text, f"{sign}{size}.{thousandths:03d}", tolerance=0)
        assert final_answer(f"so we get \\boxed{{{text}}}.") == text


def test_tolerance_is_relative():
    assert same_answer("0.3333333", "1/3")
    assert not same_answer("0.333", "1/3")
    assert same_answer("0.333", "1/3", tolerance=0.01)
    assert not same_answer("0.3333333", "1/3", tolerance=0)


def test_whole_numbers_must_be_equal():
    assert same_answer("192,000,000.0", "192000000")
    assert not same_answer("192000001", "192000000")
    assert not same_answer("192000001", "192000000", tolerance=0.1)


def test_words_are_compared_as_words():
    assert same_answer(" The  Red one. ", "the red one")
    assert not same_answer("red", "blue")


def test_exact_reward_reads_both_sides():
    samples = [
        sample("so 18 eggs", "16 - 3 - 4 = 9\n9 * 2 = 18\n#### 18"),
        sample(r"\boxed{18.0}", 18),
        sample("first 18, then 19", "18"),
        sample("I cannot say", "18"),
        sample("Paris", "paris"),
        sample("it is #### Paris", "paris"),
        sample("London", "paris"),
    ]
    assert exact_reward(samples) == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert exact_reward([sample("18.5", "18")], tolerance=0.1) == [1.0]


def test_one_of_several_answers_is_enough():
    samples = [sample(f"\\boxed{{{x}}}", ["1/2", "7"]) for x in ("0.5", "7", "8", "1/2, 7")]
    assert exact_reward(samples) == [1, 1, 0, 0]
