"""Every mesh axis, and mixtures of them: a training step and a sampler equal one device."""

import dataclasses
import re
from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from tpu_programs import ask, needs_libtpu

from jrl.collect.groups import place_batch
from jrl.mesh import make_mesh, replicated, tree_shardings
from jrl.methods import get_method
from jrl.models.config import ModelConfig
from jrl.models.routing import recording
from jrl.models.transformer import transformer
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.setup.placement import check_model_on_mesh
from jrl.train.router import RouterTraining
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step
from jrl.types import Batch

CONFIG = ModelConfig(
    vocab_size=20,
    layers=2,
    embed_dim=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=16,
    max_length=16,
    experts=4,
    experts_per_token=2,
    expert_mlp_dim=8,
    expert_pattern=(False, True),
)
N, G, P, T = 8, 2, 4, 4
MESHES = {
    "data": {"data": 2},
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "expert": {"expert": 2},
    "fsdp-tensor-expert": {"fsdp": 2, "tensor": 2, "expert": 2},
    "data-context-expert": {"data": 2, "context": 2, "expert": 2},
}
TOLERANCE = 2e-5
"""Largest difference from one device, of the loss and of each gradient relative to its largest
number, and of weights after one step at rate 0.2: what another order of float32 sums comes to."""


def ragged_batch():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, (N, G)).astype(np.int32)
    members = np.ones((N, G), bool)
    members[2, 1] = False
    return Batch(
        prompt_tokens=rng.integers(0, 20, (N, P)).astype(np.int32),
        prompt_lengths=rng.integers(1, P + 1, N).astype(np.int32),
        tokens=rng.integers(0, 20, (N, G, T)).astype(np.int32),
        lengths=lengths,
        mask=np.arange(T) < lengths[:, :, None],
        rewards=rng.normal(size=(N, G, 1)).astype(np.float32),
        reward_weights=np.ones(1, np.float32),
        members=members,
        baseline=~members,
        truncated=lengths == T,
        stats={"sampler_logprobs": np.full((N, G, T), -3.0, np.float32)},
    )


@cache
def trained(name):
    """One step of SGD with momentum, whose trace is the gradient: (params, gradient, metrics)."""
    sizes = MESHES.get(name, {})
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values(), 1]))])
    common = {
        "network": transformer(CONFIG),
        "objective": get_method("grpo").objective,
        "optimizer": optax.sgd(0.2, momentum=0.9),
    }
    make = partial(init_state, **common)
    shapes = jax.eval_shape(make, jax.random.key(0))
    shardings = state_shardings(shapes, mesh, network=common["network"])
    with jax.set_mesh(mesh):
        state = jax.jit(make, out_shardings=shardings)(jax.random.key(0))
        losses = RouterTraining(balance=0.1, z=0.01)
        step = compile_step(make_step(**common, router=losses), shardings, mesh)
        sampling_params = jax.device_put(make_sampling_params(), replicated(mesh))
        state, metrics = step(state, place_batch(ragged_batch(), mesh), sampling_params)
    spread = [x for x in jax.tree.leaves(state.params) if not x.sharding.is_fully_replicated]
    trace = optax.tree.get(state.opt_state, "trace")
    return jax.device_get((state.params, trace, metrics)), len(spread)


# The house test holds data and fsdp on every commit.
SLOW = {"data", "fsdp", "tensor", "data-context-expert"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MESHES]
)
def test_a_step_equals_one_device(name):
    (params, gradient, metrics), none = trained("one")
    (their_params, their_gradient, their_metrics), spread = trained(name)
    assert none == 0
    assert (spread > 0) == (name not in ("data", "context"))
    for key, value in metrics.items():
        np.testing.assert_allclose(their_metrics[key], value, atol=TOLERANCE, err_msg=key)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(their_gradient), strict=True
    ):
        assert np.abs(a).max() > 1e-5
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(b, a, atol=TOLERANCE * np.abs(a).max(), err_msg=where)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(their_params), strict=True):
        np.testing.assert_allclose(b, a, atol=TOLERANCE)


# ---------------------------------------------------------------- sampling


@cache
def sampled(*axes):
    """Completions of eight prompts with three slots to a device, and where their tokens went."""
    sizes = dict.fromkeys(axes, 2)
    mesh = make_mesh(sizes, jax.devices()[: 2 ** len(axes)])
    network = recording(transformer(CONFIG), CONFIG)
    key = jax.random.key(0)
    where = tree_shardings(mesh, network.axes(), jax.eval_shape(network.init, key))
    sample = partial(generate, network=network, group=G, max_new_tokens=T, stop_tokens=(3, 5))
    prompts = np.random.default_rng(0).integers(0, 20, (N, P)).astype(np.int32)
    lengths = np.arange(N, dtype=np.int32) % P + 1
    with jax.set_mesh(mesh):
        params = jax.jit(network.init, out_shardings=where)(key)
        args = prompts, lengths, make_sampling_params(), np.int32(0), np.arange(N, dtype=np.int32)
        out = jax.jit(sample, out_shardings=replicated(mesh))(jax.random.key(1), params, *args)
        return jax.device_get(out)[0]


@pytest.mark.parametrize("axes", [("data", "tensor"), ("fsdp", "expert")], ids="-".join)
def test_a_sampler_equals_one_device(axes):
    one, many = sampled(), sampled(*axes)
    np.testing.assert_array_equal(many.lengths, one.lengths)
    np.testing.assert_array_equal(many.tokens[one.mask], one.tokens[one.mask])
    np.testing.assert_allclose(many.sampler_logprobs, one.sampler_logprobs, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, many.routing, one.routing)


# ---------------------------------------------------------------- what a mesh does not divide


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        (
            {"tensor": 4},
            {},
            "mesh.tensor = 4 does not divide the model's kv_heads = 2; choose 1, 2",
        ),
        ({"tensor": 8}, {"kv_heads": 4}, "mesh.tensor = 8 does not divide the model's heads = 4"),
        (
            {"expert": 8},
            {},
            "mesh.expert = 8 does not divide the model's experts = 4; choose 1, 2, 4",
        ),
        (
            {"fsdp": 8},
            {"embed_dim": 12},
            "mesh.fsdp = 8 does not divide the model's embed_dim = 12",
        ),
        ({"context": 8}, {}, "mesh.context = 8 does not divide the prompts' tokens = 4"),
        ({"tensor": 2}, {"expert_mlp_dim": 7}, "expert_mlp_dim = 7; choose 1 or"),
    ],
)
def test_what_a_mesh_does_not_divide_is_named(sizes, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_model_on_mesh(make_mesh(sizes), dataclasses.replace(CONFIG, **change), P, T)
    check_model_on_mesh(make_mesh({}), dataclasses.replace(CONFIG, **change), P, T)


# ---------------------------------------------------------------- as TPUs would run it


@pytest.mark.slow
@needs_libtpu
def test_two_slices_talk_along_the_data_axis_alone():
    """The programs of a run with experts, compiled for two slices of four chips."""
    fields = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG)}
    model = {name: value for name, value in fields.items() if value is not None}
    wide = {"embed_dim": 128, "heads": 2, "head_dim": 64, "expert_mlp_dim": 128, "max_length": 256}
    tree = {
        "method": "reinforce",
        "model": {"config": model | wide, "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": 16},
        "sampling": {"group": 2, "max_new_tokens": 16},
        "train": {"prompts": 8},
        "objective": {"router_replay": True},
        "mesh": {"data": 2, "fsdp": 2, "expert": 2},
    }
    del tree["model"]["config"]["dtype"], tree["model"]["config"]["param_dtype"]
    planned = ask("planned", tree, "2*v5e:2x2", -1.0)
    assert planned["fits"]
    for program in planned["programs"].values():
        bytes_by_kind = program["collective_bytes_by_kind"]
        between = {k: v for k, v in bytes_by_kind.items() if "data" in k}
        assert {k.partition("/")[2] for k in between} == {"data"}
        assert between["all-reduce/data"] > 0
        assert "all-gather/expert" in bytes_by_kind
