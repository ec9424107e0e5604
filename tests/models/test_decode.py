"""Weights laid out once a rollout, and where a cache is written, by column and by kernel."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import batch_sharding, make_mesh, tree_shardings
from jrl.models import decode as decoding
from jrl.models import quant, routing
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.plan.costs import program_costs
from jrl.sampling.cache import share
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.sampling.sequences import first_members, member_keys
from jrl.sampling.slot_sizes import SlotPlan
from jrl.sampling.slots import decode, extend, fork, prefill, rewind, start
from jrl.types import StopReason

CONFIG = ModelConfig(
    vocab_size=64,
    layers=2,
    embed_dim=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    max_length=32,
)
# XLA's CPU backend moves what does not change out of loops, the one for TPUs leaves gathers where
# they are: here they are left there too.
STAY = "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"


def sampler(gather, mesh=None):
    """A rollout's program, and what goes into it."""
    network = transformer(CONFIG, gather=gather)
    params = network.init(jax.random.key(0))
    prompts = jax.random.randint(jax.random.key(1), (4, 8), 0, 64)
    program = jax.jit(
        functools.partial(generate, network=network, group=2, max_new_tokens=8, stop_tokens=())
    )
    if mesh is not None:
        params = jax.device_put(params, tree_shardings(mesh, network.axes(), params))
        prompts = jax.device_put(prompts, batch_sharding(mesh))
    lengths, ids = jnp.full(4, 8, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    return program, (
        jax.random.key(2),
        params,
        prompts,
        lengths,
        make_sampling_params(),
        jnp.int32(0),
        ids,
    )


@functools.cache
def decode_costs(gather):
    """Tokens on eight devices, and the collectives of before and in the token loop, by axis."""
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    with jax.set_mesh(mesh):
        program, args = sampler(gather, mesh)
        lowered = program.lower(*args)
        compiled = lowered.compile(compiler_options={"xla_disable_hlo_passes": STAY})
        tokens = np.asarray(compiled(*args)[0].tokens)
    costs = program_costs(compiled.as_text(), list(mesh.shape.values()))
    before, loop = [cost for cost in costs if cost.flops]  # prefill; a token

    def bytes_of(cost, axis):
        at, size = (list(mesh.shape).index(axis),), mesh.shape[axis]
        return {c.kind: c.bytes for c in cost.collectives if c.axes == at and c.size == size}

    return tokens, bytes_of(before, "fsdp"), bytes_of(loop, "fsdp"), bytes_of(loop, "tensor")


def test_no_token_waits_for_weights_that_the_mesh_divides():
    # three quarters of both layers' matrices and of the head, halved over tensor
    matrices = 2 * (32 * (4 + 2 + 2 + 4) * 8 + 3 * 32 * 64) + 32 * 64
    least = 4 * matrices / 2 * 3 / 4
    _, before, loop, _ = decode_costs(True)
    assert before["all-gather"] > least
    assert not loop  # nor does one for what other devices keep: rows of the cache, norms
    _, before, loop, _ = decode_costs(False)
    assert loop["all-gather"] > 0.9 * least


def test_devices_that_divide_the_vocabulary_keep_their_logits():
    bytes_by_kind = decode_costs(True)[3]
    half = 2 * 64 * 4 / 2  # bytes, of the logits of a device's rows
    assert bytes_by_kind["all-reduce"] > 0  # what layers and the draw add up
    assert (
        bytes_by_kind.get("all-gather", 0) + bytes_by_kind.get("collective-permute", 0) < half / 2
    )


@pytest.mark.parametrize("gather", [True, False])
def test_gathered_weights_draw_what_one_device_draws(gather):
    program, args = sampler(True)
    np.testing.assert_array_equal(decode_costs(gather)[0], program(*args)[0].tokens)


# ---------------------------------------------------------------- the cache

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
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
N, P, G, T = 2, 5, 4, 48
LENGTHS = np.array([5, 2], np.int32)
STOPS = (3,)


def networks(kind):
    """The same network, its cache written in each row's own column and, where it can, in one."""
    config = SPARSE if kind == "experts" else DENSE
    network = transformer(config)
    if kind == "experts":
        network = routing.recording(network, config)
    if kind == "int8":
        network = quant.sampler(network, config, weights="same", cache="int8")

    def extend(weights, cache, *args):
        return network.extend(weights, cache.replace(column=None), *args)

    return network._replace(extend=extend), network


@functools.cache
def params(network):
    return jax.tree.map(lambda x: 1.5 * x, jit(network.init)(jax.random.key(0)))


def prompts():
    return np.random.default_rng(0).integers(0, 16, (N, P)).astype(np.int32)


def tokens_of(network, params, **choices):
    sample = functools.partial(
        generate, network=network, group=G, max_new_tokens=T, stop_tokens=STOPS
    )
    args = (prompts(), LENGTHS, make_sampling_params(0.9), jnp.int32(4), np.arange(N))
    rollout, _ = jit(functools.partial(sample, **choices))(jax.random.key(1), params, *args)
    return jax.device_get(rollout)


@pytest.mark.parametrize("kind", ["dense", "int8", "experts"])
def test_what_is_drawn_is_the_same_however_it_is_written(kind, monkeypatch):
    """In one column of all rows; and as on TPUs, in tiles by the kernel, with rows that queue."""
    each, together = networks(kind)
    expected = tokens_of(each, params(each), slots=SlotPlan(shrink=False))
    assert (expected.lengths > 16).sum() > 2
    assert (expected.lengths < 16).any()
    samples = [tokens_of(together, params(each), slots=SlotPlan(shrink=kind == "dense"))]
    monkeypatch.setattr(decoding, "caches_in_tiles", lambda how: True)
    samples.append(tokens_of(each, params(each), slots=SlotPlan(3, shrink=False)))
    for got in samples:
        for name in ("lengths", "stop", "versions"):
            assert np.array_equal(getattr(got, name), getattr(expected, name)), name
        # What lies behind an end is what was in the slot before.
        assert np.array_equal(got.tokens[got.mask], expected.tokens[got.mask])
        # A router turns what is rounded into another weight of an expert.
        atol = 1e-4 if kind == "experts" else 1e-5
        np.testing.assert_allclose(got.sampler_logprobs, expected.sampler_logprobs, atol=atol)
        if kind == "experts":
            assert np.array_equal(got.routing.tokens, expected.routing.tokens)


def test_rows_that_began_together_continue_apart():
    """Forked, rewound and given a tool's tokens after 20 tokens."""
    network = networks("dense")[1]
    lengths = np.array([20, 3, 17, 16, 15, 9, 20, 18], np.int32)
    tool = np.random.default_rng(3).integers(0, 16, (N * G, 3)).astype(np.int32)
    run = functools.partial(decode, network=network, steps=20, stop_tokens=())

    @functools.partial(jit, static_argnums=0)
    def sample_twice(aligned, params):
        weights = network.prepare(params)
        store = prefill(weights, prompts(), LENGTHS, network=network)
        prefilled = share(store, LENGTHS - 1, G, network=network, weights=weights, length=T)
        slots = start(
            prefilled,
            np.repeat(prompts(), G, axis=0),
            np.repeat(LENGTHS, G),
            member_keys(jax.random.key(1), np.arange(N), first_members(N, G).number).reshape(-1),
            make_sampling_params(0.9),
            jnp.full(N * G, T, jnp.int32),
            max_new_tokens=T,
        ).replace(aligned=aligned)
        slots, _ = run(weights, slots, jnp.int32(1))
        assert slots.aligned == aligned
        slots = fork(slots, jnp.arange(N * G)[::-1], slots.keys)
        slots = extend(weights, rewind(slots, lengths), tool, np.arange(N * G) % 4, network=network)
        return run(weights, slots, jnp.int32(2))[0]

    one, other = (sample_twice(aligned, params(network)) for aligned in (False, True))
    for name in ("tokens", "lengths", "versions", "mask"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert (other.stop == StopReason.RUNNING).all()
    assert not other.aligned


@pytest.mark.parametrize("sizes", [{}, {"tied_embeddings": True, "qk_norm": True}], ids=str)
def test_float32_activations_leave_16_bit_weights_in_16_bits(sizes):
    """And compute what they do on the same weights in float32, bit for bit."""
    config = dataclasses.replace(CONFIG, param_dtype="bfloat16", **sizes)
    wide_config = dataclasses.replace(config, param_dtype="float32")
    params = transformer(config).init(jax.random.key(0))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    prompts = jax.random.randint(jax.random.key(1), (4, 8), 0, 64)

    @functools.partial(jax.jit, static_argnames="config")
    def run(params, config):
        network = transformer(config)
        weights = network.prepare(params)
        cache = network.init_cache(4, 8, weights)
        place = jnp.broadcast_to(jnp.arange(8), (4, 8))
        hidden, cache = network.extend(weights, cache, prompts, place, place >= 0)
        return weights, cache, network.logits(weights, hidden)

    weights, cache, logits = run(params, config)
    matrices = [x for x in jax.tree.leaves(weights) if x.ndim > 1]
    assert {x.dtype.name for x in matrices} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(cache)} == {"float32"}
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits, run(wide, wide_config)[2])
    rough = run(params, dataclasses.replace(config, dtype="bfloat16"))[2]
    assert np.abs(logits - rough).max() > 1e-3
