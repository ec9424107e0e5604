"""Training a policy with routed experts: the sampler's routing replayed, the routers' losses."""

import contextlib
import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.collect.groups import to_batch
from jrl.collect.members import demonstration_rollout, join_members
from jrl.collect.packing import Packer
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.models import moe
from jrl.models.config import ModelConfig
from jrl.models.routing import record_dtype, recording
from jrl.models.transformer import transformer
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.sampling.slot_sizes import SlotPlan
from jrl.train.batch_rows import shared_rows, undivided
from jrl.train.router import RouterTraining
from jrl.train.score import score
from jrl.train.state import init_state
from jrl.train.step import make_step

N, G, P, T, E, K = 4, 3, 3, 6, 5, 2
CONFIG = ModelConfig(
    vocab_size=11,
    layers=3,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    max_length=16,
    experts=E,
    experts_per_token=K,
    expert_mlp_dim=8,
    expert_pattern=(True, False, True),
)
NETWORK = recording(transformer(CONFIG), CONFIG)
OBJECTIVE = get_method("reinforce").objective


def params(seed=0):
    weights = NETWORK.init(jax.random.key(seed))
    weights["layers"]["experts"]["router"] *= 3  # so that it matters where a token goes
    return weights


@cache
def rollout(slots=0):
    rng = np.random.default_rng(0)
    sample = partial(
        generate,
        network=NETWORK,
        group=G,
        max_new_tokens=T,
        stop_tokens=(3, 5, 8),
        slots=SlotPlan(slots, chunk=2),
    )
    prompts = rng.integers(0, 11, (N, P)).astype(np.int32)
    args = (
        prompts,
        np.array([3, 1, 2, 3], np.int32),
        make_sampling_params(),
        np.int32(0),
        np.arange(N),
    )
    sampled, _ = jax.jit(sample)(jax.random.key(1), params(), *args)
    return jax.device_get(sampled)


def batch(sampled=None):
    sampled = sampled or rollout()
    rewards = np.random.default_rng(1).normal(size=(*sampled.lengths.shape, 1)).astype(np.float32)
    return jax.device_get(to_batch(sampled, rewards, np.ones(1, np.float32)))


# ---------------------------------------------------------------- what the sampler records


@contextlib.contextmanager
def spying(experts):
    """Every routing decided while a program runs goes into a list, in order."""
    real = moe.route

    def spy(logits, **options):
        routing = real(logits, **options)
        jax.debug.callback(lambda e: experts.append(np.asarray(e)), routing.experts, ordered=True)
        return routing

    moe.route = spy
    try:
        yield
        jax.effects_barrier()
    finally:
        moe.route = real


def whole_sequences(sampled):
    """Prompt and completion end to end: tokens [N * G, P + T], lengths."""
    tokens, lengths = np.zeros((N * G, P + T), np.int32), np.zeros(N * G, np.int32)
    for i in range(N * G):
        n, g = divmod(i, G)
        p, t = sampled.prompt_lengths[n], sampled.lengths[n, g]
        both = np.concatenate([sampled.prompt_tokens[n, :p], sampled.tokens[n, g, :t]])
        tokens[i, : p + t], lengths[i] = both, p + t
    return tokens, lengths


def test_the_record_is_where_the_router_sends_whole_sequences():
    unqueued, queued = rollout(), rollout(slots=5)
    assert len(set(unqueued.lengths.reshape(-1))) > 2
    tokens, lengths = whole_sequences(unqueued)
    positions = np.broadcast_to(np.arange(P + T, dtype=np.int32), tokens.shape)
    segments = (positions < lengths[:, None]).astype(np.int32)
    experts = []
    with spying(experts):
        hidden = jax.jit(NETWORK.hidden)(params(), tokens, positions, segments)
        jax.block_until_ready(hidden)
    expected = np.stack([x.reshape(*tokens.shape, K) for x in experts], axis=2)
    assert expected.shape[2] == sum(CONFIG.sparse)
    for i in range(N * G):
        n, g = divmod(i, G)
        p, t = unqueued.prompt_lengths[n], unqueued.lengths[n, g]
        of_prompt, of_tokens = unqueued.routing.prompts[n], unqueued.routing.tokens[n, g]
        np.testing.assert_array_equal(of_prompt[: p - 1], expected[i, : p - 1])
        np.testing.assert_array_equal(of_tokens[:t], expected[i, p - 1 : p - 1 + t])
        assert (of_prompt[p - 1 :] == -1).all()
        assert (of_tokens[t:] == -1).all()
    jax.tree.map(np.testing.assert_array_equal, unqueued.routing, queued.routing)
    assert unqueued.routing.tokens.dtype == np.int8


def test_many_experts_are_recorded_in_16_bits():
    config = dataclasses.replace(CONFIG, experts=300)
    assert record_dtype(config) == jnp.int16
    assert record_dtype(dataclasses.replace(CONFIG, experts=128)) == jnp.int8
    with pytest.raises(UserError, match="router_replay = true: the model has no routed experts"):
        recording(transformer(config), dataclasses.replace(CONFIG, experts=0))


def test_members_that_nobody_sampled_have_no_record():
    sampled = rollout()
    ones = np.full(N, 4, np.int32)
    reported = demonstration_rollout(
        sampled.prompt_tokens, sampled.prompt_lengths, sampled.tokens[:, 0], ones, ones > 0, 1
    )
    joined = join_members([sampled, reported])
    np.testing.assert_array_equal(joined.routing.tokens[:, :G], sampled.routing.tokens)
    assert (joined.routing.tokens[:, G:] == -1).all()
    np.testing.assert_array_equal(joined.routing.prompts, sampled.routing.prompts)
    assert join_members([reported, reported]).routing is None


# ---------------------------------------------------------------- replay


@cache
def scored():
    """Log-probabilities, and the routers' sums, of a batch as a program of its weights."""

    def run(policy, rows):
        return score(
            {"policy": policy},
            undivided(rows),
            make_sampling_params(),
            network=NETWORK,
            value=None,
            want=frozenset({"logprobs", "router"}),
        )

    return jax.jit(run)


def elsewhere():
    """Weights whose routers would send many tokens to other experts."""
    weights = params()
    other = NETWORK.init(jax.random.key(9))
    return jax.tree.map(lambda a, b: a + 0.3 * b, weights, other)


def test_replay_changes_nothing_where_the_weights_are_the_samplers():
    rows = batch()
    plain, replayed = scored()(params(), rows.replace(routing=None)), scored()(params(), rows)
    live = rows.mask
    np.testing.assert_allclose(
        replayed["logprobs"][live], plain["logprobs"][live], atol=1e-6, rtol=0
    )
    np.testing.assert_allclose(
        replayed["logprobs"][live], rows.stats["sampler_logprobs"][live], atol=1e-5
    )
    assert float(replayed["router_moved"].sum()) == 0


def test_training_visits_the_recorded_experts_whatever_its_own_router_says():
    rows, experts = batch(), []
    with spying(experts):
        packed_rows = jax.jit(shared_rows)(rows)
        hidden, sums = jax.jit(NETWORK.extras.hidden_shared)(elsewhere(), packed_rows)
        jax.block_until_ready(hidden)
    assert float(sums["router_moved"].sum()) > 10
    inside = np.asarray(packed_rows.segments) != 0
    prompts = np.arange(P) < np.asarray(packed_rows.prompt_lengths).reshape(N, 1)
    for layer, (of_prompts, of_rows) in enumerate(zip(experts[::2], experts[1::2], strict=True)):
        record = rows.routing.prompts[:, :, layer]
        np.testing.assert_array_equal(of_prompts.reshape(N, P, K)[prompts], record[prompts])
        record = rows.routing.tokens.reshape(N * G, T, -1, K)[:, :, layer]
        np.testing.assert_array_equal(of_rows.reshape(N * G, T, K)[inside], record[inside])
    assert len(experts) == 2 * sum(CONFIG.sparse)


@pytest.mark.slow
def test_packed_rows_replay_the_same_routing():
    rows = batch()
    packed = Packer(1, 1, 0.0)(rows)
    assert packed.packing is not None
    a, b = scored()(elsewhere(), rows), scored()(elsewhere(), packed)
    np.testing.assert_allclose(a["logprobs"][rows.mask], b["logprobs"][rows.mask], atol=1e-5)
    assert float(a["router_moved"].sum()) == float(b["router_moved"].sum()) > 10


def test_the_router_learns_through_a_replayed_routing():
    """With the experts fixed the loss is smooth: its slope along the gradient is the gradient's."""
    rows = batch()

    def loss(policy):
        return jnp.where(rows.mask, scored()(policy, rows)["logprobs"], 0).sum()

    at = elsewhere()
    slope = jax.jit(jax.grad(loss))(at)["layers"]["experts"]["router"]
    size = float(jnp.sqrt((slope**2).sum()))
    assert size > 0.1

    def along(step):
        experts = at["layers"]["experts"]
        along_gradient = {**experts, "router": experts["router"] + step * slope / size}
        return float(loss({**at, "layers": {**at["layers"], "experts": along_gradient}}))

    np.testing.assert_allclose((along(1e-2) - along(-1e-2)) / 2e-2, size, rtol=2e-2)


# ---------------------------------------------------------------- a training step


def stepped(rows, microbatches=1, **options):
    optimizer = optax.sgd(1.0)
    parts = {"network": NETWORK, "objective": OBJECTIVE, "optimizer": optimizer}
    step = make_step(**parts, microbatches=microbatches, **options)
    state = init_state(jax.random.key(0), params(), **parts)
    state, metrics = jax.jit(step)(state, rows, make_sampling_params())
    return jax.device_get(state.params["policy"]), jax.device_get(metrics)


@pytest.mark.slow
def test_a_step_reports_its_routers_and_adds_their_losses():
    rows = batch()
    plain, metrics = stepped(rows, router=RouterTraining(replay=True))
    assert metrics["router_dropped"] == metrics["router_moved"] == 0
    assert 0 < metrics["router_entropy"] < np.log(E)
    assert 1 <= metrics["router_max_load"] <= E
    assert metrics["router_balance"] > 0.8
    losses = RouterTraining(z=0.5)
    full, with_z = stepped(rows, router=losses)
    parts, _ = stepped(rows, microbatches=2, router=losses)
    np.testing.assert_allclose(
        with_z["loss"], metrics["loss"] + 0.5 * metrics["router_z"], rtol=1e-5
    )
    differs = [
        float(np.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(full), strict=True)
    ]
    assert max(differs) > 1e-3
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_batch_without_the_routing_to_replay_is_refused():
    tokens, lengths = np.full((N, T), 2, np.int32), np.full(N, T, np.int32)
    prompt_part = tokens[:, :P], np.full(N, P, np.int32)
    unsampled = demonstration_rollout(*prompt_part, tokens, lengths, lengths > 0, G)
    with pytest.raises(UserError, match="objective.router_replay = true: the batch does not say"):
        stepped(batch(unsampled), router=RouterTraining(replay=True))
