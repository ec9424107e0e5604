"""Values of tokens: what leans the policy, what follows what, and where a checkpoint begins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.methods.schedule import AfterView, towards
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.types import TrainState
from jrl.zoo.networks.policies import one_of
from jrl.zoo.networks.token_values import TokenValues

CONFIG = ModelConfig(
    vocab_size=11,
    layers=1,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    max_length=16,
)
PLAIN = transformer(CONFIG)
KEY = jax.random.key(0)
NETWORK = TokenValues(beta=3.0)(PLAIN)


@pytest.fixture(scope="module")
def params():
    """Heads that no longer give 0."""
    all_params = jax.jit(NETWORK.init)(jax.random.key(0))
    noise = lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape)  # noqa: E731
    return all_params | {
        name: jax.tree.map(noise, all_params[name]) for name in ("q", "q_target", "v")
    }


NAMES = ("q", "q_target")


def by_hand(head, hidden):
    head = {name: np.float64(x) for name, x in head.items()}
    inner = np.maximum(hidden @ head["inner"] + head["inner_bias"], 0)
    return inner @ head["outer"] + head["outer_bias"]


def test_the_lower_target_leans_the_policy(params):
    hidden = jax.random.normal(jax.random.key(1), (3, CONFIG.embed_dim))
    wide = np.float64(hidden)
    q, q_target = ([by_hand(one_of(params[name], i), wide) for i in range(2)] for name in NAMES)
    least = np.minimum(*q_target)
    plain = np.float64(PLAIN.logits(params["base"], hidden))
    np.testing.assert_allclose(NETWORK.logits(params, hidden), plain + 3 * least, atol=1e-5)
    view = NETWORK.extras.views.vocabulary(params, hidden)
    np.testing.assert_allclose(view["q"], np.stack(q, 1), atol=1e-5)
    np.testing.assert_allclose(view["q_target"], least, atol=1e-5)
    np.testing.assert_allclose(view["v"], by_hand(params["v"], wide)[:, 0], atol=1e-5)
    np.testing.assert_allclose(view["base"], plain, atol=1e-6)


def test_no_loss_moves_the_targets_which_follow_the_heads(params):
    hidden = jax.random.normal(jax.random.key(1), (3, CONFIG.embed_dim))
    loss = lambda p: (NETWORK.logits(p, hidden) ** 2).sum()  # noqa: E731
    gradient = jax.grad(loss)(params)
    assert not any(x.any() for x in jax.tree.leaves(gradient["q_target"]))
    assert any(x.any() for x in jax.tree.leaves(gradient["base"]))
    after = jax.tree.map(lambda x: x + 1.0, params)
    state = TrainState(jnp.int32(0), {"policy": params}, (), {}, (), jax.random.key_data(KEY))
    view = AfterView(None, NETWORK, state, None)
    follow = towards("q_target", "q", 0.25)
    after_follow = follow.apply(state.replace(params={"policy": after}), view).params["policy"]
    jax.tree.map(
        lambda got, old, new: np.testing.assert_allclose(got, 0.75 * old + 0.25 * new, atol=1e-6),
        after_follow["q_target"],
        params["q_target"],
        after["q"],
    )
    assert after_follow["q"] is after["q"]


def test_decoding_gives_the_distribution_that_is_scored(params):
    tokens = jnp.array([[3, 5, 7, 2]], jnp.int32)
    positions = jnp.arange(4, dtype=jnp.int32)[None]

    @jax.jit
    def scored(params):
        hidden, _ = NETWORK.hidden(params, tokens, positions, jnp.ones_like(tokens))
        return NETWORK.logits(params, hidden)

    @jax.jit
    def decoded(params):
        weights = NETWORK.prepare(params)
        cache = NETWORK.init_cache(1, 4, weights)
        states, _ = NETWORK.extend(weights, cache, tokens, positions, jnp.ones((1, 4), bool))
        return NETWORK.logits(weights, states)

    np.testing.assert_allclose(decoded(params), scored(params), atol=1e-5)


def test_a_checkpoint_is_the_base_and_its_policy_is_unchanged():
    base = jax.jit(PLAIN.init)(jax.random.key(4))
    started = NETWORK.extras.derived.start(jax.random.key(5), base)
    assert jax.tree.structure(started) == jax.tree.structure(NETWORK.axes(), is_leaf=is_names)
    hidden = jax.random.normal(jax.random.key(1), (2, CONFIG.embed_dim))
    np.testing.assert_array_equal(NETWORK.logits(started, hidden), PLAIN.logits(base, hidden))


def is_names(node):
    return type(node) is tuple
