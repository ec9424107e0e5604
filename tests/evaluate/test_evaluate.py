"""The numbers of an evaluation, against enumeration and published values."""

import itertools

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.evaluate.statistics import (
    calibration,
    evaluation_metrics,
    majority_vote,
    pass_at_k,
    wilson,
)

CORRECT = np.array(
    [
        [True, False, False, True, False],
        [False, False, False, False, False],
        [True, True, True, True, True],
        [False, False, False, False, True],
    ]
)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    hits = [
        any(row[i] for i in subset)
        for row in CORRECT
        for subset in itertools.combinations(range(5), k)
    ]
    assert pass_at_k(CORRECT, k) == pytest.approx(np.mean(hits))


def test_pass_at_k_at_its_ends():
    assert pass_at_k(CORRECT, 1) == pytest.approx(CORRECT.mean())
    assert pass_at_k(CORRECT, 5) == pytest.approx(CORRECT.any(axis=1).mean())
    many = np.zeros((1, 2000), bool)
    many[0, 0] = True
    assert pass_at_k(many, 1000) == pytest.approx(0.5)  # no overflow


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_needs_that_many_completions(k):
    with pytest.raises(UserError, match=rf"pass@{k}.*5 completions"):
        pass_at_k(CORRECT, k)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(successes, trials, low, high):
    got = wilson(successes, trials)
    assert got == pytest.approx((low, high), abs=6e-5)
    mirrored = wilson(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=6e-5)


def test_wilson_solves_its_equation():
    """At both ends, the distance to the proportion is z deviations of the end itself."""
    for end in wilson(30, 100, z=2.5):
        assert abs(end - 0.3) == pytest.approx(2.5 * np.sqrt(end * (1 - end) / 100))
    assert wilson(0, 0) == (0.0, 1.0)


def test_majority():
    answers = [
        ["3", "5", "5"],  # the winner is right
        ["3", "3", "5"],  # the winner is wrong
        ["5", "3", None],  # a tie: the earliest, which is right
        ["3", "5", None],  # a tie: the earliest, which is wrong
        [None, None, "5"],  # those without an answer do not vote
        [None, None, None],
    ]
    correct = np.array([[a == "5" for a in row] for row in answers])
    assert majority_vote(answers, correct) == pytest.approx(3 / 6)
    assert majority_vote([], np.zeros((0, 3), bool)) == 0


def test_summarise():
    lengths = np.arange(20).reshape(4, 5)
    out = evaluation_metrics(CORRECT, lengths, pass_k=(1, 4))
    assert out["accuracy"] == pytest.approx(0.4)
    assert out["length"] == pytest.approx(9.5)
    assert out["problems"] == 4
    assert out["pass@1"] == pytest.approx(0.4)
    assert out["pass@4"] == pytest.approx(pass_at_k(CORRECT, 4))
    assert "majority" not in out
    # Completions of one problem are no independent trials: four, not twenty.
    assert (out["accuracy_low"], out["accuracy_high"]) == pytest.approx(wilson(1.6, 4))
    answers = [["5" if c else "3" for c in row] for row in CORRECT]
    assert evaluation_metrics(CORRECT, lengths, pass_k=(1,), answers=answers)["majority"] == 0.25
    assert "all_variants" not in out
    correct = np.array([[1, 1, 0], [1, 0, 1], [1, 1, 1], [0, 1, 1]]) == 1
    of = ["theorem", "theorem", None, "other"]  # right at once: 1 of 3, all three, 2 of 3
    variants = evaluation_metrics(correct, lengths[:, :3], pass_k=(1,), variants_of=of)
    assert variants["all_variants"] == pytest.approx((1 / 3 + 1 + 2 / 3) / 3)
    sure = np.where(CORRECT, 0.95, 0.15)
    out = evaluation_metrics(CORRECT, lengths, pass_k=(1,), confidence=sure)
    assert out["auroc"] == 1.0
    single = evaluation_metrics(CORRECT[:, :1], lengths[:, :1], pass_k=(1,), answers=answers)
    assert "majority" not in single


def test_calibration_by_hand():
    stated, right = np.array([0.95, 0.95, 0.15, 0.15]), np.array([1, 0, 0, 0]) == 1
    out = calibration(stated, right)
    assert out["ece"] == pytest.approx(0.5 * 0.45 + 0.5 * 0.15)
    assert out["brier"] == pytest.approx((0.05**2 + 0.95**2 + 2 * 0.15**2) / 4)
    assert out["auroc"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert "auroc" not in calibration(stated, right | True)
