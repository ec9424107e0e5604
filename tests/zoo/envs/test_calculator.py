"""The calculator: Python's own values, and nothing that is large, slow or no arithmetic."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.episodes.tools import ToolError
from jrl.zoo.envs.calculator import calculate

numbers = st.integers(0, 99).map(str) | st.floats(0.01, 99).map(repr)
operators = st.sampled_from([" + ", " - ", "*", " / ", "//", "%", "**"])
expressions = st.recursive(
    numbers, lambda e: st.tuples(e, operators, e).map(lambda t: f"({''.join(t)})"), max_leaves=5
)


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_values_are_pythons(expression):
    try:
        value = calculate(expression)
    except ToolError:
        return
    assert value == eval(expression)
    assert type(value) is type(eval(expression))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2^10", 1024), ("sqrt(16) + -3", 1.0), ("max(1, 2.5)", 2.5), ("cos(pi)", -1.0)],
)
def test_functions(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "4096 bits"),
        ("2**4000 * 2**4000", "4096 bits"),
        ("exp(1000)", "math range error"),
        ("1e999", "too large"),
        ("(-8)**0.5", "not a real number"),
        ("1/0", "division by zero"),
        ("__import__('os')", "there is no function __import__"),
        ("().__class__", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True", "only numbers"),
        ("1 +", "not arithmetic"),
        ("(" * 300, "not arithmetic"),
        ("-" * 900 + "1x", "not arithmetic"),
        ("1" * 1001, "at most 1000 characters"),
        ("sqrt(1, 2)", "takes exactly one argument"),
    ],
)
def test_what_is_refused(expression, message):
    begin = time.perf_counter()
    with pytest.raises(ToolError, match=message):
        calculate(expression)
    assert time.perf_counter() - begin < 1


def test_factors_of_many_digits_end():
    assert calculate("*".join(["9" * 50] * 15)) == int("9" * 50) ** 15
