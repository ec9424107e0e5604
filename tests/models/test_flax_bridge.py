"""Linen and NNX modules in the three roles, against themselves and against their own calls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jrl.errors import UserError
from jrl.models.flax_bridge import (
    linen_network,
    linen_reward,
    linen_value,
    nnx_network,
    nnx_reward,
    nnx_value,
)
from jrl.models.heads import value_head

V, D, MAX = 11, 16, 24


def packed_mask(positions, segments):
    """[B, 1, L, L]: same live segment, and not later."""
    same = segments[:, :, None] == segments[:, None, :]
    earlier = positions[:, :, None] >= positions[:, None, :]
    return (same & earlier & (segments[:, :, None] != 0))[:, None]


class LinenTrunk(nn.Module):
    """One attention block; masks by segments when they are given, else by columns."""

    outputs: int = V

    @nn.compact
    def __call__(self, tokens, positions=None, segments=None):
        if segments is None:
            mask = nn.make_causal_mask(tokens)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        else:
            mask = packed_mask(positions, segments)
        x = nn.Embed(V, D)(tokens) + nn.Embed(MAX, D)(positions)
        x = x + nn.MultiHeadDotProductAttention(2, deterministic=True)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(nn.LayerNorm()(x))))
        return nn.Dense(self.outputs)(x)


class LinenScalar(nn.Module):
    @nn.compact
    def __call__(self, tokens, positions=None, segments=None):
        return LinenTrunk(1)(tokens, positions, segments)[..., 0]


class NnxTrunk(nnx.Module):
    def __init__(self, rngs, outputs=V, rate=0.0):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.place = nnx.Embed(MAX, D, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(D, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            2, D, decode=False, deterministic=True, rngs=rngs, keep_rngs=False
        )
        self.up = nnx.Linear(D, 2 * D, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, rngs=rngs)
        self.dropout = nnx.Dropout(rate, deterministic=rate == 0.0, rngs=rngs)
        self.head = nnx.Linear(D, outputs, rngs=rngs)

    def __call__(self, tokens, positions=None, segments=None):
        if segments is None:
            mask = nn.make_causal_mask(tokens)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        else:
            mask = packed_mask(positions, segments)
        x = self.embed(tokens) + self.place(positions)
        x = x + self.attention(self.norms[0](x), mask=mask)
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.head(self.dropout(x))


class NnxScalar(nnx.Module):
    def __init__(self, rngs):
        self.trunk = NnxTrunk(rngs, 1)

    def __call__(self, *inputs):
        return self.trunk(*inputs)[..., 0]


POLICIES = {
    "linen": lambda **k: linen_network(LinenTrunk(), vocab_size=V, max_length=MAX, **k),
    "nnx": lambda **k: nnx_network(NnxTrunk, vocab_size=V, max_length=MAX, **k),
}
VALUES = {
    "linen": lambda **k: linen_value(LinenScalar(), **k),
    "nnx": lambda **k: nnx_value(NnxScalar, **k),
}
REWARDS = {
    "linen": lambda **k: linen_reward(LinenScalar(), **k),
    "nnx": lambda **k: nnx_reward(NnxScalar, **k),
}
kinds = pytest.mark.parametrize("kind", ["linen", "nnx"])
ways = pytest.mark.parametrize("packed", [True, False])
crossed = pytest.mark.parametrize(("kind", "packed"), [("linen", True), ("nnx", False)])


def padded_rows():
    """Prompt [3 columns, right-padded] and completion [5 columns], as a training step lays them."""
    prompt_lengths, lengths = np.array([3, 1, 2]), np.array([5, 2, 4])
    tokens = np.array(jax.random.randint(jax.random.key(5), (3, 8), 0, V), np.int32)
    column = np.arange(8)
    positions = np.where(column < 3, column, prompt_lengths[:, None] + column - 3)
    live = np.where(column < 3, column < prompt_lengths[:, None], column - 3 < lengths[:, None])
    return tokens, positions.astype(np.int32), live.astype(np.int32)


def alone(tokens, segments, row):
    """One sequence of the batch without its padding, [1, n]."""
    return jnp.asarray(tokens[row][segments[row] == 1])[None]


@kinds
@ways
def test_padding_does_not_matter(kind, packed):
    network = POLICIES[kind](packed=packed)
    params = jax.jit(network.init)(jax.random.key(0))
    tokens, positions, segments = padded_rows()
    hidden, aux = jax.jit(network.hidden)(params, tokens, positions, segments)
    logits = network.logits(params, hidden)
    assert aux == {}
    assert logits.dtype == jnp.float32
    # Each sequence without its gaps, padded on the right to one shape: a single compilation.
    closed = np.zeros_like(tokens)
    for row in range(3):
        one = tokens[row][segments[row] == 1]
        closed[row, : len(one)] = one
    position_ids = np.broadcast_to(np.arange(8), closed.shape)
    live = (position_ids < segments.sum(axis=1, keepdims=True)).astype(np.int32)
    want, _ = jax.jit(network.hidden)(params, closed, position_ids, live)
    for row in range(3):
        got = logits[row][segments[row] == 1]
        np.testing.assert_allclose(got, want[row][live[row] == 1], atol=1e-5)


def test_a_bridged_module_gives_what_the_module_gives():
    tokens = jnp.arange(6)[None]
    positions, live = jnp.arange(6)[None], jnp.ones_like(tokens)
    network = POLICIES["linen"](packed=False)
    params = jax.jit(network.init)(jax.random.key(0))
    want = jax.jit(LinenTrunk().apply)({"params": params}, tokens)
    np.testing.assert_allclose(
        jax.jit(network.hidden)(params, tokens, positions, live)[0], want, atol=1e-6
    )
    network = POLICIES["nnx"](packed=False)
    params = jax.jit(network.init)(jax.random.key(0))
    want = NnxTrunk(nnx.Rngs(jax.random.key(0)))(tokens)
    np.testing.assert_allclose(
        jax.jit(network.hidden)(params, tokens, positions, live)[0], want, atol=1e-6
    )


@kinds
def test_segments_of_one_row_are_apart_or_refused(kind):
    tokens, _, segments = padded_rows()
    first, second = alone(tokens, segments, 0), alone(tokens, segments, 1)
    row = jnp.concatenate([first, second], axis=1)
    positions = jnp.concatenate([jnp.arange(x.shape[1]) for x in (first, second)])[None]
    parts = jnp.concatenate([jnp.ones_like(first), jnp.full_like(second, 2)], axis=1)
    network = POLICIES[kind](packed=True)
    params = jax.jit(network.init)(jax.random.key(0))
    got, _ = jax.jit(network.hidden)(params, row, positions, parts)
    want, _ = jax.jit(network.hidden)(params, second, jnp.arange(3)[None], jnp.ones_like(second))
    np.testing.assert_allclose(got[:, first.shape[1] :], want, atol=1e-5)
    plain = POLICIES[kind](packed=False)
    got, _ = plain.hidden(params, row, positions, parts)
    assert bool(jnp.isnan(got).all())


@kinds
@ways
def test_extend_equals_hidden(kind, packed):
    network = POLICIES[kind](packed=packed)
    params = jax.jit(network.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, V)
    lengths = jnp.array([[4], [2]])  # of the prompts; decoding continues there
    cache = network.init_cache(2, 12, params)
    assert {x.shape[0] for x in jax.tree.leaves(cache)} == {2}
    extend = jax.jit(network.extend)
    column = jnp.broadcast_to(jnp.arange(4), (2, 4))
    prefilled, cache = extend(params, cache, tokens[:, :4], column, column < lengths)
    outputs = [prefilled[0, 3], prefilled[1, 1]]
    for step in range(3):
        at = lengths + step
        new = jnp.take_along_axis(tokens, at, axis=1)
        # The second row stands still at the last step.
        live = jnp.array([[True], [step < 2]])
        out, cache = extend(params, cache, new, at, live)
        outputs += [out[0, 0]] + ([out[1, 0]] if step < 2 else [])
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    want, _ = jax.jit(network.hidden)(params, tokens, positions, jnp.ones_like(tokens))
    index = [(0, 3), (1, 1), (0, 4), (1, 2), (0, 5), (1, 3), (0, 6)]
    got = jnp.stack(outputs)
    np.testing.assert_allclose(got, jnp.stack([want[i] for i in index]), atol=1e-5)
    assert cache.rows["live"].sum(axis=1).tolist() == [7, 4]


@kinds
@ways
def test_a_policy_learns(kind, packed):
    network = POLICIES[kind](packed=packed)
    params = jax.jit(network.init)(jax.random.key(0))
    tokens, positions, segments = padded_rows()
    optimizer = optax.adam(1e-2)

    def nll(params):
        hidden, _ = network.hidden(params, tokens, positions, segments)
        logprobs = jax.nn.log_softmax(network.logits(params, hidden[:, 3:-1]))
        picked = jnp.take_along_axis(logprobs, jnp.asarray(tokens)[:, 4:, None], axis=2)[..., 0]
        live = segments[:, 4:]
        return -(picked * live).sum() / live.sum()

    @jax.jit
    def step(params, opt_state):
        loss, gradient = jax.value_and_grad(nll)(params)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for _ in range(30):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    assert losses[0] > 1.5
    assert losses[-1] < 0.3


@crossed
def test_a_value_network_learns(kind, packed):
    value = VALUES[kind](packed=packed)
    params = jax.jit(value.init)(jax.random.key(0))
    tokens, positions, segments = padded_rows()
    target = positions * 0.25
    optimizer = optax.adam(1e-2)

    def loss_of(params):
        values = value.apply(params, None, tokens, positions, segments)
        assert values.dtype == jnp.float32
        return (jnp.square(values - target) * segments).sum() / segments.sum()

    step = jax.jit(jax.value_and_grad(loss_of))
    opt_state, losses = optimizer.init(params), []
    for _ in range(40):
        loss, gradient = step(params)
        updates, opt_state = optimizer.update(gradient, opt_state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]


@crossed
def test_a_reward_network_reads_the_last_token_and_learns(kind, packed):
    reward, value = REWARDS[kind](packed=packed), VALUES[kind](packed=packed)
    params = jax.jit(reward.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 7), 0, V)
    lengths = jnp.array([7, 1, 4, 5])
    apply = jax.jit(reward.apply)
    scores = apply(params, tokens, lengths)
    assert scores.shape == (4,)
    assert scores.dtype == jnp.float32
    positions = jnp.broadcast_to(jnp.arange(7), (4, 7))
    every = jax.jit(value.apply)(params, None, tokens, positions, jnp.ones_like(tokens))
    np.testing.assert_allclose(scores, every[jnp.arange(4), lengths - 1], atol=1e-5)
    past = tokens.at[1, 1:].set(0)
    np.testing.assert_allclose(apply(params, past, lengths)[1], scores[1], atol=1e-6)

    # Bradley-Terry on (0, 1) and (2, 3).
    def loss_of(params):
        points = reward.apply(params, tokens, lengths)
        return -jax.nn.log_sigmoid(points[::2] - points[1::2]).mean()

    step, before = jax.jit(jax.value_and_grad(loss_of)), None
    for _ in range(30):
        loss, gradient = step(params)
        before = loss if before is None else before
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    assert loss < 0.5 * before


@kinds
def test_a_value_head_reads_the_logits(kind):
    network = POLICIES[kind]()
    tokens, positions, segments = padded_rows()
    params = jax.jit(network.init)(jax.random.key(0))
    hidden, _ = jax.jit(network.hidden)(params, tokens, positions, segments)
    head = value_head(network)
    values = head.apply(head.init(jax.random.key(1)), hidden, tokens, positions, segments)
    assert values.shape == tokens.shape


@kinds
def test_call_adapts_a_signature(kind):
    def call(module, tokens, positions, segments):
        return module(tokens, segments=segments, positions=positions) / 2.0

    tokens, positions, segments = padded_rows()
    plain, adapted = POLICIES[kind](), POLICIES[kind](call=call)
    params = jax.jit(plain.init)(jax.random.key(0))
    want, _ = plain.hidden(params, tokens, positions, segments)
    got, _ = adapted.hidden(params, tokens, positions, segments)
    np.testing.assert_allclose(got, want / 2.0, atol=1e-6)


@kinds
def test_init_is_a_function_of_the_key(kind):
    network = POLICIES[kind]()
    a, b, c = (jax.jit(network.init)(jax.random.key(k)) for k in (0, 0, 1))
    assert jax.tree.structure(a) == jax.tree.structure(
        jax.eval_shape(network.init, jax.random.key(0))
    )
    same = jax.tree.map(lambda x, y: bool((x == y).all()), a, b)
    other = jax.tree.map(lambda x, y: bool((x == y).all()), a, c)
    assert all(jax.tree.leaves(same))
    assert not all(jax.tree.leaves(other))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(a))


@kinds
def test_axes_are_open_without_metadata(kind):
    network = POLICIES[kind]()
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    axes = jax.tree.map(lambda x: (None,) * x.ndim, shapes)
    assert jax.tree.leaves(network.axes(), is_leaf=is_axes) == jax.tree.leaves(
        axes, is_leaf=is_axes
    )


class LinenNamed(nn.Module):
    names: tuple = ("vocab", "embed")

    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(nn.initializers.normal(), self.names)
        x = nn.Embed(V, D, embedding_init=init)(tokens)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", None))
        return nn.Dense(V, kernel_init=init)(x)


class NnxNamed(nnx.Module):
    def __init__(self, rngs, names=("vocab", "embed")):
        init = nnx.with_partitioning(nnx.initializers.normal(), names)
        self.Embed_0 = nnx.Embed(V, D, embedding_init=init, rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", None))
        self.Dense_0 = nnx.Linear(D, V, kernel_init=init, rngs=rngs)

    def __call__(self, tokens):
        return self.Dense_0(self.Embed_0(tokens))


@kinds
def test_axes_come_from_partitioning_metadata(kind):
    options = {"vocab_size": V, "max_length": MAX, "packed": False}
    if kind == "linen":
        network = linen_network(LinenNamed(), **options)
        wrong = linen_network(LinenNamed(("vocab", "model")), **options)
    else:
        network = nnx_network(NnxNamed, **options)
        wrong = nnx_network(lambda rngs: NnxNamed(rngs, ("vocab", "model")), **options)
    assert network.axes() == {
        "Dense_0": {"kernel": ("embed", None), "bias": (None,)},
        "Embed_0": {"embedding": ("vocab", "embed")},
    }
    params = jax.jit(network.init)(jax.random.key(0))
    tokens = jnp.zeros((1, 3), jnp.int32)
    hidden, _ = network.hidden(params, tokens, jnp.arange(3)[None], tokens + 1)
    assert hidden.shape == (1, 3, V)
    with pytest.raises(UserError, match="partitioned over 'model'; name the axes as JRL does"):
        wrong.axes()


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, tokens, positions, segments):
        return nn.Dropout(0.5, deterministic=False)(nn.Embed(V, V)(tokens))


class LinenBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, tokens, positions, segments):
        return nn.BatchNorm(use_running_average=False)(nn.Embed(V, V)(tokens))


class NnxBatchNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(V, rngs=rngs)


def test_state_and_dropout_are_refused():
    options = {"vocab_size": V, "max_length": MAX}
    tokens, positions, segments = padded_rows()
    with pytest.raises(UserError, match="LinenDropout draws random numbers"):
        linen_network(LinenDropout(), **options).init(jax.random.key(0))
    with pytest.raises(UserError, match="LinenBatchNorm keeps state .*'batch_stats'"):
        linen_network(LinenBatchNorm(), **options).init(jax.random.key(0))
    with pytest.raises(UserError, match="NnxBatchNorm keeps state .*BatchStat norm.mean"):
        nnx_network(NnxBatchNorm, **options).init(jax.random.key(0))
    network = nnx_network(lambda rngs: NnxTrunk(rngs, rate=0.5), **options)
    params = jax.jit(network.init)(jax.random.key(0))
    with pytest.raises(UserError, match="NnxTrunk draws random numbers"):
        network.hidden(params, tokens, positions, segments)


@kinds
def test_a_wrong_result_is_named(kind):
    tokens, positions, segments = padded_rows()

    def run(call, vocab_size=V):
        make = {
            "linen": lambda **k: linen_network(LinenTrunk(), **k),
            "nnx": lambda **k: nnx_network(NnxTrunk, **k),
        }[kind]
        network = make(vocab_size=vocab_size, max_length=MAX, call=call)
        params = jax.jit(network.init)(jax.random.key(0))
        return network.hidden(params, tokens, positions, segments)

    with pytest.raises(UserError, match=r"float32\[3, 8, 11\], expected floats \[3, 8, 12\]"):
        run(None, vocab_size=V + 1)
    with pytest.raises(UserError, match="returned a tuple"):
        run(lambda module, *inputs: (module(*inputs), 0))
    with pytest.raises(UserError, match=r"int32\[3, 8, 11\], expected floats"):
        run(lambda module, *inputs: module(*inputs).astype(jnp.int32))
