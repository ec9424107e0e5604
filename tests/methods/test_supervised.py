"""The methods of supervised.py against float64 references, and what their papers state."""

import numpy as np
import pytest
from harness import (
    check,
    means,
    ragged,
    run,
)

from jrl.methods import get_method

EVERY = ("sft", "sequence_kd", "dft", "otr")


def unread(d, rng):
    d.rewards[:] = np.nan


@pytest.mark.parametrize("weigh", ["tokens", "sequences"])
@pytest.mark.parametrize("name", ["sft", "sequence_kd"])
def test_sft_is_the_mean_negative_log_likelihood(name, weigh):
    check(
        get_method(name, weigh=weigh),
        lambda d, frozen: means(d, weigh, lambda at: -d.logprobs[at]),
        prepare=unread,
        g=1,
        demonstrations=1,
    )


@pytest.mark.parametrize("weigh", ["tokens", "sequences"])
def test_dft_weighs_each_token_by_its_probability(weigh):
    def reference(d, frozen):
        return means(d, weigh, lambda at: -np.exp(frozen.logprobs[at]) * d.logprobs[at])

    def probable(d, rng):
        unread(d, rng)
        d.logprobs = np.minimum(d.logprobs, -0.125)

    method = get_method("dft", weigh=weigh)
    check(method, reference, prepare=probable, g=1, demonstrations=1)


def test_dft_has_sft_s_gradient_times_the_probability():
    d = ragged(3, g=1)
    d.logprobs = np.minimum(d.logprobs, -0.125)
    _, sft = run(get_method("sft"), d)
    _, dft = run(get_method("dft"), d)
    expected = sft["logprobs"] * np.exp(d.logprobs)
    np.testing.assert_allclose(dft["logprobs"], expected, atol=1e-6)


def test_sequence_kd_is_sft_on_the_same_completions():
    assert get_method("sequence_kd").objective.aggregate is get_method("sft").objective.aggregate
    d = ragged(2, g=1)
    (one, a), (other, b) = (run(get_method(name), d) for name in ("sequence_kd", "sft"))
    assert one == other
    np.testing.assert_array_equal(a["logprobs"], b["logprobs"])


@pytest.mark.parametrize("name", EVERY)
def test_supervised_methods_draw_nothing_and_need_nothing_recorded(name):
    method = get_method(name)
    assert (method.draw.samples, method.draw.demonstrations) == (False, 1)
    assert method.objective.frozen == frozenset()
    assert not method.objective.needs & {"sampler_logprobs", "ref_logprobs", "values"}
    assert method.least_group == 1


def test_sft_on_nothing_is_zero():
    d = ragged(0)
    d.mask[:] = False
    d.live[:] = False
    value, gradients = run(get_method("sft"), d)
    assert value == 0
    assert not gradients["logprobs"].any()
