"""A batch through few slots against the same batch through as many as it has sequences."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.errors import UserError
from jrl.mesh import make_mesh, tree_shardings
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.sampling.sequences import first_members
from jrl.sampling.slot_sizes import SHRINK_TOKENS, SlotPlan, shrinking_pays, smaller_sizes
from jrl.types import StopReason

CONFIG = ModelConfig(
    vocab_size=16,
    layers=1,
    embed_dim=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_length=32,
)
NETWORK = transformer(CONFIG)
N, P, G, T = 4, 5, 4, 16
LENGTHS = np.array([1, 5, 3, 2], np.int32)
IDS = np.array([7, 0, 3, 12], np.int32)
STOPS = (3, 9)
STATIC = ("group", "max_new_tokens", "stop_tokens", "slots")


@cache
def params():
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(0)))


def prompts():
    return np.random.default_rng(0).integers(0, 16, (N, P)).astype(np.int32)


@partial(jit, static_argnames=STATIC)
def _sample(*args, **sizes):
    return generate(*args, network=NETWORK, **sizes)


def sampled(order=(0, 1, 2, 3), members=(), shrink=False, **plan):
    order = list(order)
    sizes = {"max_new_tokens": T, "stop_tokens": STOPS, "slots": SlotPlan(**plan, shrink=shrink)}
    sizes |= {} if members else {"group": G}
    key, sampling_params = jax.random.key(1), make_sampling_params(0.9)
    args = (prompts()[order], LENGTHS[order], sampling_params, jnp.int32(4), IDS[order])
    rollout, steps = _sample(key, params(), *args, *members, **sizes)
    return jax.device_get(rollout), int(steps)


@cache
def reference():
    return sampled()


def assert_same(got, expected):
    for name in ("lengths", "mask", "versions", "stop", "baseline"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    assert np.array_equal(got.tokens[got.mask], expected.tokens[expected.mask])
    np.testing.assert_allclose(got.sampler_logprobs, expected.sampler_logprobs, atol=1e-5)


def test_as_many_slots_as_sequences_wait_for_the_longest():
    rollout, steps = reference()
    assert steps == N * G * rollout.lengths.max()
    assert set(rollout.stop.ravel().tolist()) == {StopReason.STOP_TOKEN, StopReason.LENGTH}
    assert len(set(rollout.lengths.ravel().tolist())) > 4


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 4, "chunk": 1},
        {"slots": 3, "chunk": 4},
        {"slots": 6, "block": 2, "chunk": 3},
        {"slots": 4, "block": 4, "chunk": 50},
        {"slots": 1, "chunk": 2},
        {"slots": 6, "chunk": 2, "shrink": True},
        {"shrink": True},
        {"slots": 16, "block": 2},
    ],
    ids=str,
)
def test_draws_do_not_depend_on_the_slots(sizes):
    rollout, steps = sampled(**sizes)
    assert_same(rollout, reference()[0])
    assert rollout.lengths.sum() <= steps <= sizes.get("slots", N * G) * rollout.lengths.sum()


def test_draws_do_not_depend_on_the_order_of_arrival():
    order = [2, 0, 3, 1]
    rollout, _ = sampled(order, slots=5, chunk=2)
    pick = lambda x: x[order]  # noqa: E731
    assert_same(rollout, jax.tree.map(pick, reference()[0]))


def test_greedy_members_among_few_slots():
    temperature = jnp.where(jnp.arange(4) < 3, jnp.float32(0.9), 0.0)
    members = first_members(N, 4).replace(temperature=jnp.broadcast_to(temperature, (N, 4)))
    few, _ = sampled(members=[members], slots=4, chunk=2)
    expected, _ = sampled(members=[members])
    assert_same(few, expected)
    assert (few.sampler_logprobs[:, 3] == 0).all()
    assert np.array_equal(
        few.tokens[:, :3][few.mask[:, :3]], reference()[0].tokens[:, :3][few.mask[:, :3]]
    )


@pytest.mark.parametrize("slots", [16, pytest.param(0, marks=pytest.mark.slow)])
def test_slots_stay_full(slots):
    """32 requests whose lengths vary from 1 to 256, half as many slots or all."""
    network = transformer(ModelConfig(64, 1, 8, 1, 1, 8, 8, max_length=264))
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    # A policy that draws every token alike: one in 64 ends the completion.
    flat = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sizes = {"group": 8, "max_new_tokens": 256, "stop_tokens": (5,)}
    run = partial(generate, network=network, **sizes)
    prompts = (np.ones((4, 2), np.int32), np.full(4, 2, np.int32))
    args = (flat, *prompts, make_sampling_params(), jnp.int32(0), np.arange(4, dtype=np.int32))
    rollout, steps = jit(partial(run, slots=SlotPlan(slots, shrink=True)))(jax.random.key(0), *args)
    assert rollout.lengths.mean() < 0.45 * rollout.lengths.max()
    assert rollout.mask.sum() == rollout.lengths.sum()
    assert float(rollout.mask.sum() / steps) >= (0.8 if slots else 0.65)


def test_smaller_states_are_for_long_completions_that_may_end():
    assert smaller_sizes(32) == (16, 8, 4)  # each is the decode loop compiled once more
    assert smaller_sizes(1024) == (512, 256, 128, 64, 32)
    assert smaller_sizes(2) == ()
    assert shrinking_pays(SHRINK_TOKENS, (1,), alone=True)
    assert not shrinking_pays(SHRINK_TOKENS - 1, (1,), alone=True)
    assert not shrinking_pays(SHRINK_TOKENS, (), alone=True)
    assert not shrinking_pays(SHRINK_TOKENS, (1,), alone=False)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"slots": 2, "block": 4}, "slots = 2 do not hold one block of 4"),
        ({"slots": 6, "block": 3}, "block = 3 does not divide the 4 members"),
    ],
)
def test_sizes_that_do_not_go_together(sizes, message):
    with pytest.raises(UserError, match=message):
        sampled(**sizes)


# ---------------------------------------------------------------- over devices


@pytest.mark.parametrize(
    "sizes", [{"data": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}], ids=str
)
def test_sharded_sampling_is_the_same(sizes):
    """Where data and fsdp alone divide the mesh, each device draws from its prompts by itself."""
    mesh = make_mesh(sizes)
    placed = jax.device_put(params(), tree_shardings(mesh, NETWORK.axes(), params()))
    run = partial(generate, network=NETWORK, group=G, max_new_tokens=T)
    run = jit(partial(run, stop_tokens=STOPS, slots=SlotPlan(2, chunk=2)))
    args = (prompts(), LENGTHS, make_sampling_params(0.9), jnp.int32(4), IDS)
    with jax.set_mesh(mesh):
        compiled = run.lower(jax.random.key(1), placed, *args).compile()
        rollout, _ = jax.device_get(compiled(jax.random.key(1), placed, *args))
    assert_same(rollout, reference()[0])
    if "tensor" not in sizes:
        assert collectives_in_loops(compiled.as_text()) == []


COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def collectives_in_loops(text):
    """Collective operations in the bodies and conditions of loops, and in what they call."""
    bodies, name = {}, None
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")) and "{" in line:
            name = line.replace("ENTRY ", "").split()[0].lstrip("%")
            bodies[name] = []
        elif name is not None:
            bodies[name].append(line)
    callees = {
        name: {
            word.strip("%,){}(")
            for line in lines
            for word in line.replace("=", " ").replace(",", " ").split()
            if word.strip("%,){}(") in bodies
        }
        for name, lines in bodies.items()
    }
    inside = set()
    for lines in bodies.values():
        for line in lines:
            if " while(" in line:
                inside |= {w.strip("%,") for w in line.replace("=", " ").split()} & set(bodies)
    assert inside  # there is a loop over tokens
    frontier = set(inside)
    while frontier:
        frontier = set().union(*(callees[name] for name in frontier)) - inside
        inside |= frontier
    return [
        line.strip()
        for name in inside
        for line in bodies[name]
        if any(f" {c}(" in line or f" {c}-start(" in line for c in COLLECTIVES)
    ]
