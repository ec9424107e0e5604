import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.objectives.corrections import CORRECTIONS, Correction, named_correction

WEIGHTS = jnp.array([0.25, 1.0, 1.5, 8.0])
STATS = {"sampler_logprobs": jnp.full(4, -1.0), "proximal_logprobs": jnp.log(WEIGHTS) - 1}


def test_sequence_weights_count_live_tokens_only():
    live = jnp.array([True, True, False, True])
    weight = Correction("truncate", "sequence", 0.0, 100.0).weight(STATS, live)
    np.testing.assert_allclose(weight, [2.0] * 4, rtol=1e-5)


def test_no_gradient_passes_through_a_weight():
    def total(proximal):
        stats = {**STATS, "proximal_logprobs": proximal}
        return Correction().weight(stats, jnp.ones(4, bool)).sum()

    assert not jax.grad(total)(STATS["proximal_logprobs"]).any()


def test_corrections_by_name_use_their_cap():
    assert named_correction("none", 3.0) is None
    assert named_correction("sequence_tis", 3.0) == Correction("truncate", "sequence", 0.0, 3.0)
    for name in set(CORRECTIONS) - {"none", "proximal", "decoupled"}:
        assert named_correction(name, 2.0) != named_correction(name, 3.0)
    with pytest.raises(UserError, match="did you mean 'icepop'"):
        named_correction("icepopp", 2.0)


@pytest.mark.parametrize(
    ("cap", "low", "expected"), [(5.0, 0.5, [0, 0.5, 1, 5, 0]), (2.0, None, [0, 0.5, 1, 0, 0])]
)
def test_icepop_is_that_of_ring_with_two_bounds_and_that_of_glm_with_one(cap, low, expected):
    """Ring-1T (arXiv:2510.18855), Eq. 1-3: 0.5 and 5; GLM-5 (arXiv:2602.15763): 1/2 and 2."""
    rho = [0.4, 0.5, 1.0, 5.0, 5.1]
    stats = {"sampler_logprobs": jnp.zeros(5), "proximal_logprobs": jnp.log(jnp.array(rho))}
    correction = named_correction("icepop", cap * (1 + 1e-6), low and low * (1 - 1e-6))
    weight = correction.weight(stats, jnp.ones(5, bool))
    np.testing.assert_allclose(weight, expected, rtol=1e-5)


def test_geometric_rejection_does_not_weigh_what_it_keeps():
    stats = {"sampler_logprobs": jnp.zeros(2), "proximal_logprobs": jnp.array([0.1, -0.3])}
    live = jnp.ones(2, bool)
    assert named_correction("geometric_mis", 2.0).weight(stats, live).tolist() == [1, 1]
    assert named_correction("geometric_mis", 1.001, 0.999).weight(stats, live).tolist() == [0, 0]
