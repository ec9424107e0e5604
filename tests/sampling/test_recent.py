"""A cache that is written a block of columns at a time against one that is written every token."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import quant, recent, routing
from jrl.models.config import ModelConfig
from jrl.models.decode import block_of, width_of
from jrl.models.transformer import transformer
from jrl.sampling.cache import share
from jrl.sampling.continuous import generate
from jrl.sampling.draw import make_law
from jrl.sampling.engine import decode, extend, fork, prefill, rewind, sequence_keys, start
from jrl.types import Cache, StopReason

SIZES = {
    "vocab_size": 16,
    "layers": 2,
    "embed_dim": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 32,
    "max_length": 64,
}
DENSE = ModelConfig(**SIZES, window=10, window_pattern=(True, False))
SPARSE = ModelConfig(**SIZES, experts=4, experts_per_token=2, expert_mlp_dim=8)
# These programs take longer to compile than to run.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
N, P, G, T = 2, 5, 4, 48
LENGTHS = np.array([5, 2], np.int32)
STOPS = (3,)


def level(cache):
    return recent.begin(cache.replace(column=jnp.int32(0)))


def networks(kind):
    """The same network, its cache written every token and in blocks."""
    config = SPARSE if kind == "experts" else DENSE
    network = transformer(config)._replace(level=None)
    if kind == "experts":
        network = routing.recording(network, config)
    if kind == "int8":
        network = quant.sampler(network, config, weights="same", cache="int8")
    return network, network._replace(level=level)


@cache
def params(network):
    return jax.tree.map(lambda x: 1.5 * x, jit(network.init)(jax.random.key(0)))


def prompts():
    return np.random.default_rng(0).integers(0, 16, (N, P)).astype(np.int32)


def drawn(network, params, shrink):
    sample = partial(generate, network=network, group=G, max_new_tokens=T, stop_tokens=STOPS)
    args = (prompts(), LENGTHS, make_law(0.9), jnp.int32(4), np.arange(N))
    return jax.device_get(jit(partial(sample, shrink=shrink))(jax.random.key(1), params, *args))


@pytest.mark.parametrize(
    ("kind", "shrink"), [("dense", True), ("int8", False), ("experts", False)], ids=str
)
def test_what_is_drawn_is_the_same(kind, shrink):
    each, blocks = networks(kind)
    expected = drawn(each, params(each), shrink=False)
    got = drawn(blocks, params(each), shrink)
    assert (expected.lengths > 16).sum() > 2
    assert (expected.lengths < 16).any()
    for name in ("tokens", "lengths", "stop", "versions"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    # A router turns what is rounded into another weight of an expert.
    atol = 1e-4 if kind == "experts" else 1e-5
    np.testing.assert_allclose(got.sampler_logprobs, expected.sampler_logprobs, atol=atol)
    if kind == "experts":
        assert np.array_equal(got.routing.tokens, expected.routing.tokens)


def test_from_the_middle_of_a_block():
    """Forked, taken back and given a tool's tokens after 20 tokens, of which the block holds 4."""
    each, blocks = networks("dense")
    ends = []
    for network in (each, blocks):
        weights = jit(network.prepare)(params(each))
        store = jit(partial(prefill, network=network))(weights, prompts(), LENGTHS)
        sized = {"network": network, "weights": weights, "length": T}
        held = share(store, jnp.array(LENGTHS - 1), G, **sized)
        slots = start(
            held if network.level is None else network.level(held),
            np.repeat(prompts(), G, axis=0),
            np.repeat(LENGTHS, G),
            sequence_keys(jax.random.key(1), np.arange(N), G).reshape(-1),
            make_law(0.9),
            jnp.full(N * G, T, jnp.int32),
            max_new_tokens=T,
        )
        run = jit(partial(decode, network=network, steps=20, stop_tokens=()))
        slots = run(weights, slots, jnp.int32(1))
        if network is blocks:
            assert [int(x) for x in block_of(slots.cache)] == [16, 4]
        slots = fork(slots, jnp.arange(N * G)[::-1], slots.keys)
        slots = rewind(slots, jnp.array([20, 3, 17, 16, 15, 9, 20, 18], jnp.int32))
        tool = np.random.default_rng(3).integers(0, 16, (N * G, 3)).astype(np.int32)
        slots = extend(weights, slots, tool, jnp.arange(N * G) % 4, network=network)
        ends.append(run(weights, slots, jnp.int32(2)))
    for name in ("tokens", "lengths", "versions", "mask"):
        assert np.array_equal(getattr(ends[0], name), getattr(ends[1], name)), name
    np.testing.assert_allclose(ends[0].logprobs, ends[1].logprobs, atol=1e-5)
    assert (ends[1].stop == StopReason.RUNNING).all()
    assert ends[1].cache.recent is None


@pytest.mark.parametrize("column", [16, 32, 48, 37])
def test_a_block_goes_where_it_belongs(column):
    def layer(columns, first):
        numbers = np.arange(first, first + columns, dtype=np.float32)
        v = np.broadcast_to(numbers[:, None], (2, 3, columns, 5))
        return {"k": v.swapaxes(2, 3), "v": v}

    sizes = (32, 16)
    own = (tuple(jax.tree.map(np.zeros_like, layer(n, 0)) for n in sizes),)
    held = recent.begin(Cache(own=own, column=jnp.int32(column)))
    width, first = width_of(held.recent), column - (column % 16 or 16)
    assert width == 16
    held = held.replace(recent=((layer(16, 100),),))
    expected = np.zeros(48)
    expected[first : first + 16] = np.arange(100, 116)
    moved = recent.settle(held) if column % 16 == 0 else recent.close(held)
    for name, axis in (("k", 3), ("v", 2)):
        whole = np.concatenate([piece[name] for piece in moved.own[0]], axis=axis)
        assert np.array_equal(np.moveaxis(whole, axis, 0)[:, 1, 2, 3], expected)
    untouched = recent.close(held) if column % 16 == 0 else recent.settle(held)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(untouched.own))


def test_caches_that_do_not_fall_into_blocks_have_none():
    for network, columns in ((networks("dense")[0], 40), (networks("dense")[0], 16)):
        empty = network.init_cache(2, columns)
        assert level(empty).recent is None
