import inspect

import jax.numpy as jnp
import pytest

from jrl.errors import UserError
from jrl.methods.domains import (
    Choice,
    Coefficient,
    Count,
    NonNegative,
    Range,
    Switch,
    coefficients_of,
    is_zero,
)


def test_domains_hold_what_they_say():
    open_range = Range(1.0, 2.0, open_low=True)
    assert 1.0 not in open_range
    assert 1.5 in open_range
    assert 2.0 in open_range
    assert 2.1 not in open_range
    assert str(open_range) == "a number above 1, at most 2"
    for domain in (open_range, Range(0.0), Range(1, whole=True), Choice(("a", "b")), Switch()):
        assert domain.example in domain


def test_a_number_may_be_an_array_but_a_count_may_not():
    Coefficient("x", Range(0.0), 1.0).check("method", jnp.float32(-1.0))
    with pytest.raises(UserError, match=r"method.x = .*; give a whole number of at least 1"):
        Coefficient("x", Range(1, whole=True), 1).check("method", jnp.float32(2.0))


def test_coefficients_are_read_from_the_signature():
    def build(strength: NonNegative, rounds: Count | None = None):
        return strength, rounds

    coefficients = coefficients_of(build)
    assert coefficients["strength"].required
    assert not coefficients["strength"].optional
    assert coefficients["strength"].default is inspect.Parameter.empty
    assert coefficients["rounds"].optional
    assert coefficients["rounds"].domain == Range(1, whole=True)


def test_only_the_plain_number_is_zero():
    assert is_zero(0.0)
    assert not is_zero(0.1)
    assert not is_zero(jnp.float32(0.0))
