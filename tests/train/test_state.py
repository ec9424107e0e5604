"""The training state: what it starts as, where it is placed, and its streams of keys."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.models.heads import value_head, value_network
from jrl.train.state import init_state, state_shardings
from jrl.types import STREAMS, stream

KEY = jax.random.key(11)
PLAIN = get_method("grpo").objective
WITH_REF = get_method("grpo", kl_coef=0.1).objective


def test_a_fresh_state(network, params):
    state = init_state(KEY, params, network=network, objective=PLAIN, optimizer=optax.adam(1.0))
    assert state.step.dtype == jnp.int32
    assert int(state.step) == 0
    assert set(state.params) == {"policy"}
    assert jax.tree.all(jax.tree.map(np.array_equal, state.params["policy"], params))
    assert jax.tree.leaves(state.params["policy"])[0] is not jax.tree.leaves(params)[0]
    assert state.frozen == {}
    assert not jnp.array_equal(state.key, KEY)
    mu = state.opt_state[0].mu["policy"]
    assert jax.tree.structure(mu) == jax.tree.structure(params)


def test_weights_at_random_follow_the_key(network):
    make = jax.jit(
        partial(
            init_state,
            network=network,
            objective=PLAIN,
            optimizer=optax.sgd(1.0),
            value=value_network(network),
        )
    )
    a, same, b = make(KEY), make(KEY), make(jax.random.key(12))
    embed = lambda s: s.params["policy"]["embed"]  # noqa: E731
    assert np.array_equal(embed(a), embed(same))
    assert not np.array_equal(embed(a), embed(b))
    # The value network does not start as the policy.
    assert not np.array_equal(a.params["value"]["trunk"]["embed"], embed(a))


def test_the_reference_is_a_copy_of_its_own(network, params):
    state = init_state(KEY, params, network=network, objective=WITH_REF, optimizer=optax.sgd(1.0))
    for a, b in zip(
        jax.tree.leaves(state.frozen["ref"]), jax.tree.leaves(state.params["policy"]), strict=True
    ):
        assert np.array_equal(a, b)
        assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()


@pytest.mark.parametrize("optimizer", ["adam", "clipped adamw", "momentum", "lion"])
@pytest.mark.parametrize("value", [None, value_head, value_network])
def test_moments_lie_with_their_weights(network, optimizer, value):
    optimizer = {
        "adam": optax.adam(1.0),
        "clipped adamw": optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 9))
        ),
        "momentum": optax.sgd(1.0, momentum=0.9),
        "lion": optax.lion(1.0),
    }[optimizer]
    value = value and value(network)
    mesh = make_mesh({"fsdp": 4, "tensor": 1, "data": 2})
    make = partial(
        init_state, network=network, objective=WITH_REF, optimizer=optimizer, value=value
    )
    shapes = jax.eval_shape(make, KEY)
    shardings = state_shardings(shapes, mesh, network=network, value=value)
    assert jax.tree.structure(shardings) == jax.tree.structure(shapes)
    assert shardings.params["policy"]["embed"].shard_shape((19, 16)) == (19, 4)
    assert shardings.frozen["ref"] == shardings.params["policy"]
    # Every leaf of the optimiser's state shaped like a weight of that name is sharded like it.
    placed = {
        jax.tree_util.keystr(path): (leaf.shape, where)
        for (path, leaf), where in zip(
            jax.tree_util.tree_leaves_with_path(shapes.params),
            jax.tree.leaves(shardings.params),
            strict=True,
        )
    }
    moments = 0
    for (path, leaf), where in zip(
        jax.tree_util.tree_leaves_with_path(shapes.opt_state),
        jax.tree.leaves(shardings.opt_state),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        places = [at for weight, at in placed.items() if name.endswith(weight)]
        if places:
            moments += 1
            assert (leaf.shape, where) == places[0], name
        else:
            assert leaf.shape == ()
            assert where.is_fully_replicated
    assert moments in (len(placed), 2 * len(placed))
    for alone in (shardings.step, shardings.key):
        assert alone.is_fully_replicated


def test_factored_moments_are_on_every_device(network):
    """Adafactor's rows and columns have no weight's shape; they are small."""
    mesh = make_mesh({"fsdp": 8})
    make = partial(
        init_state,
        network=network,
        objective=PLAIN,
        optimizer=optax.adafactor(1.0, min_dim_size_to_factor=8),
    )
    shapes = jax.eval_shape(make, KEY)
    shardings = state_shardings(shapes, mesh, network=network)
    factored = {x.shape for x in jax.tree.leaves(shapes.opt_state)}
    weights = {x.shape for x in jax.tree.leaves(shapes.params)}
    assert len(factored - weights) >= 3
    for leaf, where in zip(
        jax.tree.leaves(shapes.opt_state), jax.tree.leaves(shardings.opt_state), strict=True
    ):
        assert where.is_fully_replicated
        assert where.shard_shape(leaf.shape) == leaf.shape


def test_a_mesh_that_does_not_divide_a_weight(network):
    make = partial(init_state, network=network, objective=PLAIN, optimizer=optax.sgd(1.0))
    with pytest.raises(UserError, match=r"embed.*size 19 does not divide.*tensor=2"):
        state_shardings(
            jax.eval_shape(make, KEY), make_mesh({"tensor": 2, "fsdp": 4}), network=network
        )


def test_streams_never_meet():
    keys = [KEY, jax.random.key(12)]
    keys_of = {}
    for root in keys:
        for name in STREAMS:
            for index in [*range(30), 1000, 2**31 - 1]:
                data = tuple(jax.random.key_data(stream(root, name, index)).tolist())
                assert data not in keys_of, (name, index, keys_of[data])
                keys_of[data] = (name, index)
    assert len(keys_of) == 2 * len(STREAMS) * 32
    assert not {tuple(jax.random.key_data(k).tolist()) for k in keys} & set(keys_of)
    with pytest.raises(ValueError):
        stream(KEY, "nothing", 0)
