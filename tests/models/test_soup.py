import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.models.soup import average


def tree(seed):
    rng = np.random.default_rng(seed)
    return {
        "layers": {"q": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)},
        "embed": jnp.asarray(rng.normal(size=4), jnp.bfloat16),
    }


def test_the_average_is_weighted_leaf_by_leaf_and_keeps_dtypes():
    one, two, three = tree(0), tree(1), tree(2)
    soup = average([one, two, three], [0.5, 0.2, 0.3])
    for name in ("q",):
        leaves = [np.asarray(x["layers"][name], np.float64) for x in (one, two, three)]
        expected = 0.5 * leaves[0] + 0.2 * leaves[1] + 0.3 * leaves[2]
        np.testing.assert_allclose(soup["layers"][name], expected, rtol=1e-6)
    assert soup["embed"].dtype == jnp.bfloat16
    halves = average([one, two])
    middle = (np.asarray(one["layers"]["q"]) + np.asarray(two["layers"]["q"])) / 2
    np.testing.assert_allclose(halves["layers"]["q"], middle, rtol=1e-6)


def test_one_checkpoint_is_its_own_average():
    one = tree(0)
    assert average([one])["layers"]["q"] is one["layers"]["q"]


@pytest.mark.parametrize(
    ("others", "shares", "message"),
    [
        ([], [0.5], r"shares = \[0\.5\] for 1 checkpoints"),
        ([tree(1)], [0.9, 0.2], "adding up to 1"),
        ([tree(1) | {"more": jnp.zeros(1)}], None, r"\['more'\] is in checkpoint 1 only"),
        ([tree(1) | {"embed": jnp.zeros(5)}], None, r"\(4,\) in checkpoint 0 and \(5,\)"),
    ],
)
def test_checkpoints_that_do_not_match_are_refused(others, shares, message):
    with pytest.raises(UserError, match=message):
        average([tree(0), *others], shares)


def test_no_checkpoint_is_refused():
    with pytest.raises(UserError, match="no checkpoint"):
        average([])
