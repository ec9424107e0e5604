import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.models.config import ModelConfig
from jrl.models.heads import reward_network, value_head, value_network
from jrl.models.transformer import transformer

NETWORK = transformer(
    ModelConfig(
        vocab_size=16,
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=32,
        max_length=16,
    )
)


def batch(rows=4, length=6):
    tokens = jax.random.randint(jax.random.key(3), (rows, length), 0, 16)
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    return tokens, positions, jnp.ones_like(positions)


def same_structure(params, axes):
    leaves, treedef = jax.tree.flatten(params)
    return all(
        leaf.ndim == len(names)
        for leaf, names in zip(leaves, treedef.flatten_up_to(axes), strict=True)
    )


def test_value_head_is_linear_in_the_hidden_states_and_reaches_the_trunk():
    value = value_head(NETWORK)
    policy = NETWORK.init(jax.random.key(0))
    head = value.init(jax.random.key(1))
    data = batch()
    hidden, _ = jax.jit(NETWORK.hidden)(policy, *data)
    np.testing.assert_array_equal(value.apply(head, hidden, *data), np.zeros((4, 6)))
    head = {"weight": jnp.arange(16.0) / 16, "bias": jnp.asarray(2.0)}
    expected = np.asarray(hidden, np.float64) @ (np.arange(16.0) / 16) + 2.0
    np.testing.assert_allclose(value.apply(head, hidden, *data), expected, rtol=1e-5, atol=1e-5)

    def loss(policy):
        return value.apply(head, NETWORK.hidden(policy, *data)[0], *data).sum()

    gradient = jax.jit(jax.grad(loss))(policy)
    assert float(jnp.abs(gradient["layers"]["attention"]["q"]).max()) > 0
    assert same_structure(head, value.axes())


def test_value_network_reads_tokens_and_not_the_policy():
    value = value_network(NETWORK)
    params = value.init(jax.random.key(0))
    params["head"]["weight"] += 1.0
    tokens, positions, segments = batch()
    hidden = jnp.zeros((4, 6, 16))
    apply = jax.jit(value.apply)
    first = apply(params, hidden, tokens, positions, segments)
    assert first.shape == (4, 6)
    assert first.dtype == jnp.float32
    np.testing.assert_array_equal(apply(params, hidden + 1, tokens, positions, segments), first)
    changed = apply(params, hidden, (tokens + 1) % 16, positions, segments)
    assert float(jnp.abs(changed - first).max()) > 1e-3
    gradient = jax.grad(lambda h: apply(params, h, tokens, positions, segments).sum())(hidden)
    np.testing.assert_array_equal(gradient, np.zeros_like(hidden))
    assert same_structure(params, value.axes())


def test_reward_reads_the_last_token_whatever_follows():
    reward = reward_network(NETWORK)
    params = reward.init(jax.random.key(0))
    params["head"]["weight"] += jnp.arange(16.0) / 16
    tokens, _, _ = batch()
    lengths = jnp.array([1, 3, 6, 3])
    apply = jax.jit(reward.apply)
    scores = apply(params, tokens, lengths)
    padding = jnp.arange(6)[None] >= lengths[:, None]
    np.testing.assert_allclose(
        apply(params, jnp.where(padding, 0, tokens), lengths), scores, atol=1e-6
    )
    alone = [
        apply(params, tokens[i : i + 1, :n], lengths[i : i + 1])[0]
        for i, n in enumerate(lengths.tolist())
    ]
    np.testing.assert_allclose(scores, jnp.stack(alone), atol=1e-5)
    assert same_structure(params, reward.axes())


def test_reward_network_learns_to_separate_two_kinds_of_sequences():
    reward = reward_network(NETWORK)
    params = reward.init(jax.random.key(0))
    optimiser = optax.adam(1e-2)

    def draw(key):
        """Chosen sequences hold a 7 somewhere, rejected ones none."""
        k1, k2, k3, k4 = jax.random.split(key, 4)
        rejected = jax.random.randint(k1, (32, 8), 8, 16)
        lengths = jax.random.randint(k2, (32,), 2, 9)
        at = jax.random.randint(k3, (32,), 0, lengths)
        chosen = jax.random.randint(k4, (32, 8), 8, 16).at[jnp.arange(32), at].set(7)
        return chosen, rejected, lengths

    @jax.jit
    def margins(params, data):
        chosen, rejected, lengths = data
        return reward.apply(params, chosen, lengths) - reward.apply(params, rejected, lengths)

    @jax.jit
    def step(params, state, key):
        def loss(params):
            return -jax.nn.log_sigmoid(margins(params, draw(key))).mean()

        gradient = jax.grad(loss)(params)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, updates), state

    held_out = draw(jax.random.key(9))
    assert float((margins(params, held_out) > 0).mean()) < 0.9
    state = optimiser.init(params)
    for key in jax.random.split(jax.random.key(1), 60):
        params, state = step(params, state, key)
    assert float((margins(params, held_out) > 0).mean()) > 0.95
