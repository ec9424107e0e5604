"""SALSA: PPO's objective, held to a reference that is an average."""

import jax.numpy as jnp
import numpy as np
from harness import ragged, run

from jrl.methods.actor_critic import ppo
from jrl.methods.reference_soup import salsa
from jrl.models.soup import average


def test_salsa_is_ppo_held_to_the_soup():
    d = ragged(0)
    wrt = ("logprobs", "values")
    value, gradients = run(salsa(kl_coef=0.3), d, wrt)
    expected, g_expected = run(ppo(kl_coef=0.3), d, wrt)
    assert value == expected
    for name in wrt:
        np.testing.assert_array_equal(gradients[name], g_expected[name])
    assert "ref" in salsa().objective.frozen
    d.ref_logprobs = d.ref_logprobs - 1  # another soup is another loss
    assert run(salsa(kl_coef=0.3), d, wrt)[0] != value


def test_the_average_of_equal_checkpoints_is_that_checkpoint():
    tree = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.float32(2.5)}
    soup = average([tree, tree, tree])
    np.testing.assert_allclose(soup["a"]["w"], tree["a"]["w"], rtol=1e-6)
    np.testing.assert_allclose(soup["b"], tree["b"], rtol=1e-6)
