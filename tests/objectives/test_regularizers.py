import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.objectives.aggregates import sequence_sum
from jrl.objectives.kl import AdaptiveCoef, k2, k3
from jrl.objectives.regularizers import entropy_bonus, kl_in_loss, value_loss

STATS = {
    "logprobs": jnp.array([-1.0, -2.0]),
    "ref_logprobs": jnp.array([-2.0, -1.0]),
    "entropy": jnp.array([0.5, 0.25]),
    "values": jnp.array([1.0, 3.0]),
    "rollout_values": jnp.array([0.9, 1.0]),
    "returns": jnp.array([0.0, 2.0]),
}
MASK = jnp.ones(2, bool)


def test_kl_in_loss_is_the_estimator_asked_for():
    for kind, function in (("k2", k2), ("k3", k3)):
        term = kl_in_loss(kind, 0.3)
        expected = function(STATS["logprobs"], STATS["ref_logprobs"])
        assert term.value(STATS, MASK).tolist() == expected.tolist()
        assert term.coef(term.init()) == 0.3
        assert term.needs == {"ref_logprobs"}
        assert term.name == "kl"


def test_k1_in_the_loss_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"gradient is the score function, zero on average.*k2"):
        kl_in_loss("k1")
    with pytest.raises(UserError, match="choose from k2, k3"):
        kl_in_loss("k4")


def test_an_adaptive_coefficient_moves_with_the_metric():
    term = kl_in_loss("k2", AdaptiveCoef(initial=0.5, target=1.0, rate=0.5))
    state = term.init()
    assert float(term.coef(state)) == 0.5
    assert float(term.coef(term.update(state, {"kl": jnp.float32(9.0)}))) == pytest.approx(0.55)
    assert float(term.coef(term.update(state, {"kl": jnp.float32(0.9)}))) == pytest.approx(0.475)


def test_a_plain_coefficient_keeps_no_state():
    term = kl_in_loss("k2", 0.5)
    assert term.init() == ()
    assert term.update((), {}) == ()


def test_entropy_bonus_lowers_the_loss():
    term = entropy_bonus(0.1)
    assert term.value(STATS, MASK).tolist() == [0.5, 0.25]
    assert term.coef(()) == -0.1
    assert term.needs == {"entropy"}


def test_value_loss_takes_the_worse_of_free_and_clipped():
    free = value_loss(0.5, None)
    assert free.value(STATS, MASK).tolist() == [0.5, 0.5]
    assert free.needs == {"values", "returns"}
    clipped = value_loss(0.5, 0.2)
    np.testing.assert_allclose(clipped.value(STATS, MASK), [0.5, 0.5])  # 1.2 is nearer to 2
    np.testing.assert_allclose(
        clipped.value({**STATS, "returns": jnp.array([0.0, 3.0])}, MASK), [0.5, 1.8**2 / 2]
    )
    assert clipped.needs == {"values", "returns", "rollout_values"}
    assert clipped.coef(()) == 0.5


def test_a_term_may_bring_its_own_aggregate():
    assert kl_in_loss(aggregate=sequence_sum).aggregate is sequence_sum
    assert value_loss(aggregate=sequence_sum).aggregate is sequence_sum
    assert kl_in_loss().aggregate is None
