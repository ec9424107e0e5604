import numpy as np
import pytest

from jrl.errors import UserError
from jrl.scaling import Sigmoid, fit_sigmoid

COMPUTE = np.geomspace(100, 8000, 40)


@pytest.mark.parametrize("true", [Sigmoid(0.2, 0.61, 2000.0, 1.7), Sigmoid(0.3, 0.5, 9000.0, 3.0)])
def test_the_parameters_of_an_exact_curve_are_recovered(true):
    fit = fit_sigmoid(COMPUTE, true.predict(COMPUTE))
    np.testing.assert_allclose(fit[:4], true[:4], rtol=1e-4)
    assert fit.error < 1e-6


def test_a_noisy_curve_is_recovered_and_tells_its_error():
    true = Sigmoid(0.2, 0.61, 1000.0, 1.7)
    noise = 0.003 * np.random.default_rng(0).normal(size=len(COMPUTE))
    fit = fit_sigmoid(COMPUTE, true.predict(COMPUTE) + noise)
    assert fit.asymptote == pytest.approx(0.61, abs=0.02)
    assert fit.middle == pytest.approx(1000, rel=0.1)
    assert fit.error == pytest.approx(0.003, rel=0.4)


def test_a_known_start_is_kept_and_extrapolation_meets_the_curve():
    true = Sigmoid(0.25, 0.8, 3000.0, 1.2)
    early = COMPUTE[COMPUTE < 4000]
    fit = fit_sigmoid(early, true.predict(early), start=0.25)
    assert fit.start == 0.25
    np.testing.assert_allclose(fit.predict([1e5]), true.predict([1e5]), rtol=1e-3)


def test_half_of_the_gain_is_made_at_the_middle():
    curve = Sigmoid(0.2, 0.6, 50.0, 2.0)
    np.testing.assert_allclose(curve.predict([1e-9, 50.0, 1e12]), [0.2, 0.4, 0.6], atol=1e-6)


@pytest.mark.parametrize(
    ("compute", "performance", "message"),
    [
        ([1, 2, 3], [0, 1, 2], "give 5 pairs or more"),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], "compute above 0"),
        ([1, 2, 3, 4, 5], [0, 1, np.nan, 3, 4], "finite"),
        ([2, 2, 2, 2, 2], [0, 1, 2, 3, 4], "all have compute 2"),
    ],
)
def test_points_that_determine_nothing_are_refused(compute, performance, message):
    with pytest.raises(UserError, match=message):
        fit_sigmoid(compute, performance)
