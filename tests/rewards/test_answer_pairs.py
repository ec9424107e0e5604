"""Pairs of answers that were judged by hand, and laws that hold for any answer."""

import collections
import json
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jrl.rewards import Sample, exact_reward, math_reward
from jrl.rewards.compare import same
from jrl.rewards.exact import to_number
from jrl.rewards.markup import LONGEST
from jrl.types import Prompt

PAIRS = [
    json.loads(line)
    for line in (pathlib.Path(__file__).parent / "answer_pairs.jsonl")
    .read_text("utf-8")
    .splitlines()
]
NEEDS_ALGEBRA = {"expression", "factor", "interval", "list", "named", "set", "tuple"}


def judge(reward, pair):
    prompt = Prompt(0, "?", np.zeros(1, np.int32), pair["answer"])
    [points] = reward([Sample(prompt, pair["completion"], np.zeros(1, np.int32), "stop_token")])
    return points == 1.0


def test_there_are_many_pairs_of_many_kinds():
    kinds = collections.Counter(pair["kind"] for pair in PAIRS)
    assert len(PAIRS) >= 500
    assert len(kinds) >= 20
    for kind in kinds:
        verdicts = {pair["right"] for pair in PAIRS if pair["kind"] == kind}
        assert verdicts == {True, False}, kind


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
@pytest.mark.extra("math")
def test_verdicts_are_those_by_hand(kind):
    wrong = [p for p in PAIRS if p["kind"] == kind and judge(math_reward, p) != p["right"]]
    assert not wrong


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_without_algebra_verdicts_differ_for_expressions_alone(kind):
    wrong = [p for p in PAIRS if p["kind"] == kind and judge(exact_reward, p) != p["right"]]
    if kind in NEEDS_ALGEBRA:
        # what is called right is right; equal expressions in other words are not known to be
        wrong = [p for p in wrong if not p["right"]]
    assert not wrong


# Laws ------------------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-(10**7), 10**7).map(str),
    st.integers(0, 10**7).map(lambda n: f"{n:,}"),
    st.decimals(-1000, 1000, places=3, allow_nan=False).map(str),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda p: f"{p[0]}/{p[1]}"),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(
        lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"
    ),
    st.tuples(st.integers(1, 99), st.integers(1, 9)).map(lambda p: f"{p[0]} {p[1]}/10"),
    st.integers(-99, 99).map(lambda n: f"{n}%"),
)
UNITS = [
    "km",
    "cm",
    "hours",
    "minutes",
    "kg",
    "dollars",
    "cents",
    "apples",
    "pears",
    "cm^2",
    "km/h",
]
CHANGING = [
    "million",
    "billion",
    "dozen",
    "percent",
    "pi",
    "i",
    "x",
    r"\pi",
    "halves",
    "e",
    "thousand",
]
units = st.sampled_from(UNITS)
names = st.sampled_from(
    [
        "Ada",
        "Ben",
        "Eve",
        "Noor",
        "Lena",
        "Alan",
        "Neal",
        "Amy",
        "May",
        "Carl",
        "Sina",
        "Asin",
    ]
)
quantities = st.tuples(numbers, st.one_of(st.just(""), units)).map(
    lambda p: f"{p[0]} {p[1]}".strip()
)
times = st.tuples(
    st.integers(1, 12), st.integers(0, 59), st.sampled_from(["", " AM", " PM", " p.m."])
).map(lambda t: f"{t[0]}:{t[1]:02d}{t[2]}")
items = st.one_of(numbers.filter(lambda text: "," not in text), names)
lists = st.lists(items, min_size=2, max_size=5).map(", ".join)
sets = lists.map(lambda text: rf"\{{{text}\}}")
tuples = lists.map(lambda text: f"({text})")
intervals = st.tuples(
    st.sampled_from("(["), st.integers(-9, 9), st.integers(10, 20), st.sampled_from(")]")
).map(lambda t: f"{t[0]}{t[1]}, {t[2]}{t[3]}")
answers = st.one_of(quantities, names, times, lists, sets, tuples, intervals, st.text(max_size=30))
WRAPPERS = [
    "{}",
    " {} ",
    "${}$",
    r"\text{{{}}}",
    r"\boxed{{{}}}",
    "**{}**",
    "{}.",
    r"\( {} \)",
    "`{}`",
]


@given(answers)
def test_an_answer_is_itself(text):
    assert same(text, text)


@given(answers, answers)
def test_order_of_comparison_says_nothing(one, other):
    assert same(one, other) == same(other, one)


@given(st.one_of(quantities, names, times, tuples, intervals), st.sampled_from(WRAPPERS))
def test_markup_says_nothing(text, wrapper):
    assert same(wrapper.format(text), text)
    assert same(text, wrapper.format(text))


@given(numbers.filter(lambda text: "%" not in text), units, units)
def test_a_unit_may_be_missing_and_two_differ(number, one, other):
    assert same(f"{number} {one}", number)
    assert same(number, f"{number} {one}")
    assert same(f"{number} {one}", f"{number} {other}") == (one == other)
    assert same(rf"{number} \text{{ {one}}}", f"{number} {one}")


@given(st.integers(2, 99), st.sampled_from(CHANGING), st.sampled_from(CHANGING))
def test_words_that_change_a_number_are_no_units(number, word, other):
    if word != "percent":
        assert not same(f"{number} {word}", f"{number}")
        assert not same(f"{number}", f"{number} {word}")
    if word.removeprefix("\\") != other.removeprefix("\\"):
        assert not same(f"{number} {word}", f"{number} {other}")


@given(numbers.filter(lambda text: "%" not in text), st.integers(1, 9))
def test_another_number_is_another_answer(number, more):
    value = to_number(number)
    assert value is not None
    assert not same(number, str(value + more))
    assert not same(f"-{abs(value)}", str(abs(value))) or value == 0


@given(st.integers(0, 99), st.integers(1, 9), st.integers(2, 12), st.booleans())
def test_mixed_numbers_are_sums(integer, above, below, negative):
    above = min(above, below - 1)
    sign = "-" if negative else ""
    value = Fraction(integer * below + above, below) * (-1 if negative else 1)
    forms = (f"{integer} {above}/{below}", rf"{integer}\frac{{{above}}}{{{below}}}")
    for text in forms:
        assert to_number(sign + text) == value
        assert same(sign + text, f"{value.numerator}/{value.denominator}")
        assert integer == 0 or not same(sign + text, f"{sign}{above}/{below}")


@given(st.integers(-999, 999).filter(bool))
def test_per_cent_is_a_part_or_its_number(number):
    for text in (f"{number}%", rf"{number}\%", f"{number} percent"):
        assert same(text, f"{number}")
        assert same(text, str(Fraction(number, 100)))
        assert not same(text, f"{number * 10}")
        assert not same(text, str(Fraction(number, 10)))


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**9), st.integers(1, 300))
def test_tiny_numbers_differ(digits, other, power):
    assert same(f"{digits}e-{power}", f"{other}e-{power}") == (
        abs(digits - other) <= 1e-6 * max(abs(digits), abs(other))
    )


@given(
    st.lists(items, min_size=2, max_size=5, unique=True),
    st.sampled_from([", ", "; ", " and ", " or ", ","]),
    st.randoms(use_true_random=False),
)
def test_lists_and_sets_have_no_order_and_tuples_have_one(parts, separator, random):
    # "5 and 1/2" is a number
    assume(separator != " and " or not any("/" in part or "frac" in part for part in parts))
    shuffled = parts[:]
    random.shuffle(shuffled)
    assert same(separator.join(parts), ", ".join(shuffled))
    assert same(r"\{" + ", ".join(parts) + r"\}", r"\{" + separator.join(shuffled) + r"\}")
    assert not same(separator.join(parts), separator.join(parts[1:]))
    distinct = not any(same(a, b) for i, a in enumerate(parts) for b in parts[:i])
    if distinct and shuffled != parts:
        assert not same(f"({', '.join(parts)})", f"({', '.join(shuffled)})")


@given(names, names, st.randoms(use_true_random=False))
def test_anagrams_are_other_names(one, other, random):
    letters = list(one.lower())
    random.shuffle(letters)
    shuffled = "".join(letters)
    assert same(shuffled, one) == (shuffled == one.lower())
    assert same(one, other) == (one == other)


@given(st.integers(0, 23), st.integers(0, 59), st.integers(0, 23), st.integers(0, 59))
def test_times_of_day_in_both_clocks(hour, minute, other_hour, other_minute):
    def twelve(h, m):
        return f"{h % 12 or 12}:{m:02d} {'PM' if h >= 12 else 'AM'}"

    same_moment = (hour, minute) == (other_hour, other_minute)
    assert same(twelve(hour, minute), twelve(other_hour, other_minute)) == same_moment
    if hour > 12 or hour == 0:
        assert same(f"{hour}:{minute:02d}", twelve(hour, minute))


@given(st.integers(-99, 99), st.integers(1, 99), st.sampled_from(["", " km", "%"]))
def test_ranges_and_intervals(low, size, unit):
    high = low + size
    assert same(f"{low} to {high}{unit}", f"[{low}, {high}]")
    assert same(f"between {low} and {high}{unit}", f"{low} to {high}{unit}")
    assert not same(f"{low} to {high}{unit}", f"{low} to {high + 1}{unit}")
    assert same(f"{low} < x \\le {high}", f"({low}, {high}]")
    assert same(f"x \\ge {low}", rf"[{low}, \infty)")
    assert not same(f"({low}, {high})", f"[{low}, {high}]")


@given(st.text(max_size=LONGEST + 10), st.text(max_size=LONGEST + 10))
def test_any_text_can_be_compared(one, other):
    assert same(one, other) in (True, False)
