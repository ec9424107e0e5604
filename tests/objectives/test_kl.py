"""The claims about values and gradients, by enumerating a categorical distribution in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.objectives.kl import KL_ESTIMATORS, LOG_RATIO_LIMIT, AdaptiveCoef, estimator, k1, k2, k3

V = 6


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def distributions(seed):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=V)), jax.nn.log_softmax(jnp.asarray(rng.normal(size=V)))


def divergence(log_p, log_q):
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


def mean_value(kind, theta, log_q):
    """The estimator's mean over tokens drawn from the policy; the drawing carries no gradient."""
    log_p = jax.nn.log_softmax(theta)
    probs = jax.lax.stop_gradient(jnp.exp(log_p))
    return jnp.sum(probs * KL_ESTIMATORS[kind](log_p, log_q))


def reverse(theta, log_q):
    return divergence(jax.nn.log_softmax(theta), log_q)


def forward(theta, log_q):
    return divergence(log_q, jax.nn.log_softmax(theta))


@pytest.mark.parametrize("seed", range(3))
def test_k1_and_k3_are_unbiased_and_k2_is_not(seed):
    theta, log_q = distributions(seed)
    assert theta.dtype == jnp.float64
    true = float(reverse(theta, log_q))
    assert float(mean_value("k1", theta, log_q)) == pytest.approx(true, rel=1e-12)
    assert float(mean_value("k3", theta, log_q)) == pytest.approx(true, rel=1e-12)
    assert abs(float(mean_value("k2", theta, log_q)) - true) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_gradient_of_each_in_a_loss_is_what_is_claimed(seed):
    theta, log_q = distributions(seed)
    slope = {k: jax.grad(lambda x, k=k: mean_value(k, x, log_q))(theta) for k in KL_ESTIMATORS}
    np.testing.assert_allclose(slope["k1"], 0, atol=1e-12)
    np.testing.assert_allclose(slope["k2"], jax.grad(reverse)(theta, log_q), atol=1e-12)
    np.testing.assert_allclose(slope["k3"], jax.grad(forward)(theta, log_q), atol=1e-12)
    assert np.abs(slope["k2"] - slope["k3"]).max() > 1e-3


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_in_the_reward_the_unbiased_ones_give_the_reverse_gradient(kind):
    theta, log_q = distributions(0)

    def surrogate(x):
        log_p = jax.nn.log_softmax(x)
        probs = jax.lax.stop_gradient(jnp.exp(log_p))
        charge = jax.lax.stop_gradient(KL_ESTIMATORS[kind](log_p, log_q))
        return jnp.sum(probs * charge * log_p)

    got, true = jax.grad(surrogate)(theta), jax.grad(reverse)(theta, log_q)
    if kind == "k1":
        np.testing.assert_allclose(got, true, atol=1e-12)
    else:  # the value is unbiased, the score-weighted gradient is not
        assert np.abs(got - true).max() > 1e-3


def test_k2_and_k3_are_never_negative_and_agree_near_zero():
    gaps = jnp.linspace(-30, 30, 601)
    zero = jnp.zeros_like(gaps)
    assert (k2(gaps, zero) >= 0).all()
    assert (k3(gaps, zero) >= 0).all()
    small = jnp.array([1e-4, -1e-4])
    np.testing.assert_allclose(k3(small, 0 * small), k2(small, 0 * small), rtol=1e-4)
    assert k1(small, 0 * small).tolist() == small.tolist()


@pytest.mark.parametrize("gap", [-1e30, -1e3, 1e3, 1e30])
def test_k3_stays_finite_and_its_clamped_gradient_is_zero(gap):
    gap = jnp.array([gap], jnp.float32)
    value, slope = jax.value_and_grad(lambda x: k3(x, jnp.zeros_like(x)).sum())(gap)
    assert 0 < value <= np.exp(LOG_RATIO_LIMIT) * 1.001
    assert slope[0] == 0


def test_an_unknown_estimator_names_the_three():
    with pytest.raises(UserError, match="choose from k1, k2, k3"):
        estimator("k4")


def test_the_adaptive_coefficient_holds_its_target():
    steer = AdaptiveCoef(initial=1.0, target=0.5, rate=0.1)
    coef = steer.init()
    for _ in range(200):  # a divergence that falls as the coefficient grows
        coef = steer.next(coef, 2.0 / coef)
    assert float(coef) == pytest.approx(4.0, rel=0.05)
    assert coef.dtype == jnp.float32
