"""Meshes, placements and their errors; a training step on a mesh against one device."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jrl.collect.groups import place_batch
from jrl.errors import UserError
from jrl.mesh import (
    AXES,
    RULES,
    arrange,
    batch_sharding,
    batch_shards,
    constrain,
    make_mesh,
    replicated,
    sharding,
    spec,
    tree_shardings,
)
from jrl.methods import get_method
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.params import make_sampling_params
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step
from jrl.types import Batch


def sizes(mesh):
    return {axis: n for axis, n in mesh.shape.items() if n > 1}


def test_sizes():
    assert make_mesh().shape == dict.fromkeys(AXES, 1)
    assert make_mesh().axis_names == AXES
    assert sizes(make_mesh({"fsdp": 4, "tensor": 2})) == {"fsdp": 4, "tensor": 2}
    assert sizes(make_mesh({"data": 2})) == {"data": 2}  # some devices may be left over
    assert sizes(make_mesh({"data": -1})) == {"data": 8}
    assert sizes(make_mesh({"fsdp": -1, "tensor": 2})) == {"fsdp": 4, "tensor": 2}
    assert sizes(make_mesh({"fsdp": -1}, jax.devices()[:3])) == {"fsdp": 3}
    assert sizes(make_mesh({"fsdp": -1, "data": 8})) == {"data": 8}


def test_devices_stand_in_order():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    assert mesh.devices.reshape(4, 2)[1].tolist() == jax.devices()[2:4]
    assert make_mesh({}, jax.devices()[5:]).devices.ravel().tolist() == [jax.devices()[5]]


def test_axes_are_automatic():
    assert set(make_mesh({"data": 2}).axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"fdsp": 2}, "mesh.fdsp.*choose from data, fsdp"),
        ({"data": -1, "fsdp": -1}, "mesh.fsdp = -1.*only one"),
        ({"data": -1, "fsdp": 3}, "mesh.data = -1: 8 devices do not divide by the 3"),
        ({"data": 3, "tensor": 4}, "mesh.data = 3, mesh.tensor = 4 needs 12 devices; there are 8"),
        ({"data": 0}, "mesh.data = 0; must be at least 1"),
        ({"tensor": -2}, "mesh.tensor = -2; must be at least 1"),
    ],
)
def test_sizes_that_cannot_be(axes, message):
    with pytest.raises(UserError, match=message):
        make_mesh(axes)


def test_where_arrays_lie():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    assert spec(("batch", None)) == PartitionSpec(("data", "fsdp", "expert"), None)
    assert sharding(mesh, ("embed", "mlp"), (4, 6)).shard_shape((4, 6)) == (2, 3)
    assert sharding(mesh, (None, "head_dim"), (3, 5)).is_fully_replicated
    assert batch_sharding(mesh).shard_shape((8, 3)) == (2, 3)
    assert batch_shards(mesh) == 4
    assert replicated(mesh).is_fully_replicated
    with pytest.raises(
        UserError, match=r"w.o: axis 'heads' of size 5 .* tensor=2; choose a divisor of 5"
    ):
        sharding(mesh, ("heads", None), (5, 4), "w.o")


def test_trees_name_what_does_not_divide():
    mesh = make_mesh({"tensor": 2})
    axes = {"a": ("mlp", None), "b": {"c": ("vocab",)}}
    shapes = jax.eval_shape(lambda: {"a": jnp.zeros((4, 3)), "b": {"c": jnp.zeros(6)}})
    out = tree_shardings(mesh, axes, shapes)
    assert out["a"].shard_shape((4, 3)) == (2, 3)
    assert out["b"]["c"].shard_shape((6,)) == (3,)
    shapes = jax.eval_shape(lambda: {"a": jnp.zeros((4, 3)), "b": {"c": jnp.zeros(7)}})
    with pytest.raises(UserError, match=r"\['b'\]\['c'\]: axis 'vocab' of size 7"):
        tree_shardings(mesh, axes, shapes)


def test_every_rule_names_mesh_axes():
    assert set().union(*RULES.values()) <= set(AXES)


def test_constrain():
    x = jnp.ones((8, 4))
    assert constrain(x, "batch", None) is x
    with jax.set_mesh(make_mesh({}, jax.devices()[:1])):
        assert constrain(x, "batch", None) is x
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, "batch", "mlp"))(x)
    assert y.sharding.shard_shape(y.shape) == (2, 2)
    assert np.array_equal(y, 2 * x)


# ---------------------------------------------------------------- training on a mesh

CONFIG = ModelConfig(
    vocab_size=20,
    layers=1,
    embed_dim=16,
    heads=2,
    kv_heads=2,
    head_dim=8,
    mlp_dim=16,
    max_length=16,
)


def ragged_batch():
    rng = np.random.default_rng(0)
    n, g, p, t = 8, 3, 3, 4
    lengths = rng.integers(1, t + 1, (n, g)).astype(np.int32)
    members = np.ones((n, g), bool)
    members[2, 1] = False
    return Batch(
        prompt_tokens=rng.integers(0, 20, (n, p)).astype(np.int32),
        prompt_lengths=rng.integers(1, p + 1, n).astype(np.int32),
        tokens=rng.integers(0, 20, (n, g, t)).astype(np.int32),
        lengths=lengths,
        mask=np.arange(t) < lengths[:, :, None],
        rewards=rng.normal(size=(n, g, 2)).astype(np.float32),
        reward_weights=np.array([1.0, 0.5], np.float32),
        members=members,
        baseline=~members,
        truncated=lengths == t,
        stats={"sampler_logprobs": np.full((n, g, t), -3.0, np.float32)},
    )


def trained(mesh_sizes, devices):
    """Two steps of SGD with minibatches, microbatches and a reference policy."""
    mesh = make_mesh(mesh_sizes, jax.devices()[:devices])
    common = {
        "network": transformer(CONFIG),
        "objective": get_method("grpo", kl_coef=0.1).objective,
        "optimizer": optax.sgd(0.2, momentum=0.9),
    }
    make = partial(init_state, **common)
    shapes = jax.eval_shape(make, jax.random.key(0))
    shardings = state_shardings(shapes, mesh, network=common["network"])
    with jax.set_mesh(mesh):
        state = jax.jit(make, out_shardings=shardings)(jax.random.key(0))
        step = compile_step(make_step(**common, microbatches=2), shardings, mesh)
        sampling_params = jax.device_put(make_sampling_params(), replicated(mesh))
        batch, log = place_batch(ragged_batch(), mesh), []
        for _ in range(2):
            state, metrics = step(state, batch, sampling_params)
            log.append(jax.device_get(metrics))
    spread = [x for x in jax.tree.leaves(state.params) if not x.sharding.is_fully_replicated]
    return jax.device_get((state.params, state.opt_state)), log, len(spread)


def test_fsdp_and_tensor_shards_train_as_one_device():
    (one, one_log, none) = trained({}, 1)
    (many, many_log, spread) = trained({"fsdp": 4, "tensor": 2}, 8)
    assert none == 0
    assert spread >= 8
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path((one, one_log)),
        jax.tree.leaves((many, many_log)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    assert one_log[1]["kl"] > 1e-6


# ---------------------------------------------------------------- several slices


def chip(number, member, slices=None):
    place = {"id": number, "process_index": slices or 0, "platform": "cpu", "device_kind": "x"}
    return SimpleNamespace(**place, **({} if slices is None else {"slice_index": slices}), m=member)


def test_slices_follow_each_other_along_the_data_axis_alone():
    """Devices are given slice by slice in turn, as several hosts may list them."""
    devices = [chip(2 * i + s, i, s) for i in range(4) for s in (0, 1)]
    shape = {"data": 4, "fsdp": 1, "tensor": 2, "context": 1, "expert": 1}
    grid = arrange(devices, shape, 2)
    assert grid.shape == (4, 1, 2, 1, 1)
    assert [[d.slice_index for d in row.ravel()] for row in grid] == [
        [0, 0],
        [0, 0],
        [1, 1],
        [1, 1],
    ]
    assert sorted(d.id for d in grid.ravel()) == list(range(8))
    assert (arrange(devices, shape) == grid).all()
    with pytest.raises(UserError, match="mesh.slices = 4: the devices are in 2; start that many"):
        arrange(devices, shape, 4)
    with pytest.raises(UserError, match="mesh.data = 1 does not divide over 2 slices"):
        arrange(devices, shape | {"data": 1, "fsdp": 4}, 2)


def test_devices_that_name_no_slice_are_slices_in_their_order():
    mesh = make_mesh({"data": 4, "tensor": 2}, slices=2)
    assert mesh.devices.ravel().tolist() == jax.devices()
    with pytest.raises(UserError, match="mesh.data = 3 does not divide over 2 slices"):
        make_mesh({"data": 3}, slices=2)
