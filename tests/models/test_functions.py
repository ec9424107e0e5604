"""Networks of plain functions, beside the same network as a Flax module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jrl.errors import UserError
from jrl.models.flax_bridge import linen_network
from jrl.models.functions import function_network

V, MAX, WIDTH = 7, 6, 4
TOKENS = jnp.array([[3, 1, 4, 1], [5, 2, 6, 0]], jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4))
SEGMENTS = jnp.array([[1, 1, 1, 1], [1, 1, 1, 0]], jnp.int32)


class Module(linen.Module):
    """Each token sees the sum of those before it."""

    @linen.compact
    def __call__(self, tokens, positions, segments):
        x = linen.Embed(V, WIDTH, name="embed")(tokens) * (segments != 0)[..., None]
        return linen.Dense(V, use_bias=False, name="head")(jnp.cumsum(x, axis=1))


def init(key):
    first, second = jax.random.split(key)
    embed, head = jax.random.normal(first, (V, WIDTH)), jax.random.normal(second, (WIDTH, V))
    return {"embed": {"embedding": embed}, "head": {"kernel": head}}


def logits(params, tokens, positions, segments):
    x = params["embed"]["embedding"][tokens] * (segments != 0)[..., None]
    return jnp.cumsum(x, axis=1) @ params["head"]["kernel"]


def network(function=logits, **more):
    return function_network(init, function, vocab_size=V, max_length=MAX, **more)


def test_functions_give_what_the_module_gives():
    params = init(jax.random.key(0))
    module = linen_network(Module(), vocab_size=V, max_length=MAX)
    hidden, want = (
        each.hidden(params, TOKENS, POSITIONS, SEGMENTS)[0] for each in (network(), module)
    )
    np.testing.assert_allclose(hidden, want, atol=1e-6)
    assert np.abs(want).max() > 0.1
    assert jax.tree.structure(network().axes(), is_leaf=lambda x: isinstance(x, tuple)) == (
        jax.tree.structure(module.axes(), is_leaf=lambda x: isinstance(x, tuple))
    )


def test_one_sequence_a_row_needs_tokens_alone():
    """A gap between prompt and completion is closed for a function that knows columns only."""
    dense = network(lambda params, tokens: logits(params, tokens, None, tokens + 1), packed=False)
    params = init(jax.random.key(1))
    alone, _ = dense.hidden(params, TOKENS[:1, :3], POSITIONS[:1, :3], SEGMENTS[:1, :3])
    with_gap = (jnp.array([[3, 0, 1, 4]]), jnp.array([[0, 0, 1, 2]]), jnp.array([[1, 0, 1, 1]]))
    packed_hidden, _ = dense.hidden(params, *with_gap)
    np.testing.assert_allclose(packed_hidden[0, [0, 2, 3]], alone[0], atol=1e-6)


def test_parameters_lie_where_their_axes_say():
    assert network().axes()["head"]["kernel"] == (None, None)
    names = {"embed": {"embedding": ("vocab", None)}, "head": {"kernel": ()}}
    assert network(axes=names).axes()["embed"]["embedding"] == ("vocab", None)
    assert network(axes=names).axes()["head"]["kernel"] == (None, None)
    wrong = {"embed": {"embedding": ("vocabulary",)}, "head": {"kernel": ()}}
    with pytest.raises(UserError, match="logits.*'vocabulary'; name the axes as JRL does: "):
        network(axes=wrong).axes()


@pytest.mark.parametrize("wrong", [lambda *a: logits(*a)[..., 0], lambda *a: (logits(*a),)])
def test_a_wrong_result_is_named(wrong):
    with pytest.raises(UserError, match="the network returned .*a policy returns logits"):
        network(wrong).hidden(init(jax.random.key(0)), TOKENS, POSITIONS, SEGMENTS)
