"""Records of functions as text."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.methods import all_methods, get_method
from jrl.system.readable import LONGEST, as_text, readable


class Part(NamedTuple):
    apply: Any
    size: int = 1

    __repr__ = readable


def scaled(by, power=2, *, note=None):
    extra = by + 1
    return lambda x: by * x**power + extra


def test_a_function_is_the_call_that_made_it():
    assert as_text(scaled(3)) == "scaled(3, power=2, extra=4)"
    assert as_text(functools.partial(max, 1, key=abs)) == "max(1, key=abs)"
    assert as_text(scaled) == "scaled"


def test_fields_at_their_defaults_are_left_out():
    assert repr(Part(scaled)) == "Part(scaled)"
    assert repr(Part(scaled, 2)) == "Part(scaled, size=2)"


def test_no_value_of_an_array_is_read():
    texts = []

    def traced(x):
        texts.append(repr(Part(scaled(x))))
        return x

    jax.jit(traced)(jnp.ones(()))
    assert texts == ["Part(scaled(float32[], power=2, extra=float32[]))"]


def test_long_text_is_cut():
    assert len(repr(Part([1] * 1000))) == LONGEST


def test_a_method_shows_its_parts_and_their_coefficients():
    text = str(get_method("gspo", clip_high=0.5, kl_coef=0.1))
    assert text.splitlines()[:6] == [
        "gspo(clip_high=0.5, kl_coef=0.1)",
        "  advantage   per_group(group_mean_std(eps=1e-06, ddof=1))",
        "  surrogate   RatioParts(ratio=sequence, rule=clip_between(clip(low=0.0003, high=0.5)))",
        "  aggregate   sequence_mean",
        "  kl          kl_in_loss(coef=0.1, divergence=k3)",
        "  statistics  ref_logprobs, sampler_logprobs",
    ]
    changed = get_method("grpo").with_(epochs=3)
    assert str(changed).startswith("Method\n")
    assert "Schedule(epochs=3)" in str(changed)


def test_every_method_is_a_few_lines_without_addresses():
    for name, published in all_methods().items():
        method = published.example()
        text = str(method)
        assert text.startswith(f"{name}("), text
        assert " at 0x" not in text + repr(method.objective) + repr(published), text
        assert 5 <= len(text.splitlines()) <= 16, text
