"""Reward models and process reward models against float64 loops, and their identities."""

import numpy as np
import pytest
from harness import check, run
from preferences import softplus, two
from reward_losses import labelled, mean_over_pairs, process

from jrl.methods import get_method

CASES = {
    "bradley_terry": (mean_over_pairs(lambda w, l, gap: softplus(l - w)), {}),
    "bradley_terry with margin and centring": (
        mean_over_pairs(lambda w, l, gap: softplus(l - w + 0.3 + 0.5 * gap) + 0.1 * (w + l) ** 2),
        {"margin": 0.3, "margin_per_point": 0.5, "centring": 0.1},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reward_losses_are_the_papers(case):
    reference, coefficients = CASES[case]
    check(get_method(case.split()[0], **coefficients), reference, wrt=("values",))


def test_prm_judges_the_end_of_each_step():
    check(get_method("prm"), process, wrt=("values",), ids=("step",), prepare=labelled)


def test_with_one_step_prm_is_an_outcome_reward_model():
    check(get_method("prm"), process, wrt=("values",), binary=True)


def test_a_constant_added_to_all_values_changes_nothing_without_centring():
    d, plain = two(1), get_method("bradley_terry")
    before = run(plain, d, ("values",))[0]
    d.values = d.values + 3.0
    assert run(plain, d, ("values",))[0] == pytest.approx(before, abs=1e-5)
    d.values[:] = 2.0
    assert run(plain, d, ("values",))[0] == pytest.approx(np.log(2), abs=1e-6)
