"""Schedules at known points, and every optimizer at work."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.config import build_config
from jrl.errors import UserError
from jrl.train.optimizer import NAMES, make_optimizer, schedule


def table(**keys):
    """[optimizer] with these keys."""
    return build_config({"optimizer": keys}).optimizer


def rates(name, updates, warmup, peak=2.0):
    rate = schedule(table(schedule=name), peak, updates, warmup)
    return [float(rate(jnp.int32(i))) for i in range(updates)]


def test_constant():
    assert rates("constant", 4, 0) == [2.0] * 4
    np.testing.assert_allclose(rates("constant", 6, 4), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_linear():
    np.testing.assert_allclose(rates("linear", 4, 0), [2.0, 1.5, 1.0, 0.5])
    np.testing.assert_allclose(rates("linear", 6, 2), [1.0, 2.0, 2.0, 1.5, 1.0, 0.5])


def test_cosine():
    fall = [1 + math.cos(math.pi * i / 4) for i in range(4)]
    np.testing.assert_allclose(rates("cosine", 4, 0), fall, rtol=1e-6)
    np.testing.assert_allclose(rates("cosine", 7, 3), [2 / 3, 4 / 3, 2.0, *fall], rtol=1e-6)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_at_the_edges(name):
    rate = schedule(table(schedule=name), 1.0, 5, 0)
    assert float(rate(jnp.int32(5))) == pytest.approx(1.0 if name == "constant" else 0.0, abs=1e-6)
    assert float(rate(jnp.int32(50))) == pytest.approx(1.0 if name == "constant" else 0.0, abs=1e-6)
    assert np.isfinite(rates(name, 3, 9)).all()  # a rise longer than the run
    assert max(rates(name, 3, 9)) < 2.0


def run(chosen, updates=3, rate=0.1, gradient=1.0, steps=10, updates_per_step=1):
    optimizer = make_optimizer(chosen, steps, updates_per_step)(rate)
    params = {"w": jnp.full((4, 3), 2.0), "b": jnp.ones(3)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    gradients = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)
    for _ in range(updates):
        changes, state = update(gradients, state, params)
        params = optax.apply_updates(params, changes)
    return params


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_goes_down(name):
    out = run(table(name=name))
    assert float(out["w"].max()) < 2.0
    assert float(out["b"].max()) < 1.0


def test_sgd_by_hand():
    plain = run(table(name="sgd", clip_norm=0.0))
    np.testing.assert_allclose(plain["w"], 2.0 - 3 * 0.1, rtol=1e-6)
    momentum = run(table(name="sgd", momentum=0.5, clip_norm=0.0))
    np.testing.assert_allclose(momentum["w"], 2.0 - 0.1 * (1 + 1.5 + 1.75), rtol=1e-6)


def test_the_norm_is_clipped():
    root = math.sqrt(15)  # of a gradient of fifteen ones
    clipped = run(table(name="sgd", clip_norm=1.0), updates=1)
    np.testing.assert_allclose(clipped["w"], 2.0 - 0.1 / root, rtol=1e-6)
    small = run(table(name="sgd", clip_norm=1.0), updates=1, gradient=0.1)
    np.testing.assert_allclose(small["w"], 2.0 - 0.01, rtol=1e-6)
    free = run(table(name="sgd", clip_norm=0.0), updates=1)
    np.testing.assert_allclose(free["w"], 2.0 - 0.1, rtol=1e-6)


KNOBS = [
    ("adamw", {"weight_decay": 0.1}),
    ("adamw", {"b1": 0.5}),
    ("adamw", {"b2": 0.5}),
    ("adamw", {"eps": 0.5}),
    ("adam", {"b1": 0.5}),
    ("adam", {"b2": 0.5}),
    ("adam", {"eps": 0.5}),
    ("sgd", {"momentum": 0.5}),
    ("sgd", {"momentum": 0.5, "nesterov": True}),
    ("lion", {"weight_decay": 0.1}),
    ("lion", {"b1": 0.1}),
    ("lion", {"b2": 0.1}),
    ("adafactor", {"weight_decay_rate": 0.1}),
    ("adafactor", {"eps": 0.5}),
]


@pytest.mark.parametrize(("name", "knob"), KNOBS)
def test_every_knob_changes_a_number(name, knob):
    """Over gradients that turn round, so that moments matter even to a sign."""

    def walk(table):
        optimizer = make_optimizer(table, 10)(0.1)
        params = {"w": jnp.full((4, 3), 2.0)}
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for size in (1.0, -0.0051, 1.003, -1.0):
            changes, state = update({"w": jnp.full((4, 3), size)}, state, params)
            params = optax.apply_updates(params, changes)
        return np.asarray(params["w"])

    free = {"name": name, "clip_norm": 0.0}
    assert np.abs(walk(table(**free)) - walk(table(**free, **knob))).max() > 1e-5


def test_warm_up_counts_training_steps():
    """Two training steps of two updates each: rates 1/4, 2/4, 3/4 and 1 of the peak."""
    chosen = table(name="sgd", clip_norm=0.0, warmup_steps=2)
    out = run(chosen, updates=5, rate=1.0, steps=4, updates_per_step=2)
    np.testing.assert_allclose(out["w"], 2.0 - (0.25 + 0.5 + 0.75 + 1 + 1), rtol=1e-5)


def test_the_schedule_is_as_long_as_the_run():
    chosen = table(name="sgd", clip_norm=0.0, schedule="linear")
    out = run(chosen, updates=4, rate=1.0, steps=2, updates_per_step=2)
    np.testing.assert_allclose(out["w"], 2.0 - (1 + 0.75 + 0.5 + 0.25), rtol=1e-5)


def test_the_rate_may_be_traced():
    chosen = table(name="adamw", schedule="cosine", warmup_steps=1)

    @jax.jit
    @jax.vmap
    def step(rate):
        optimizer = make_optimizer(chosen, 4)(rate)
        params = {"w": jnp.ones(3)}
        changes, _ = optimizer.update({"w": jnp.ones(3)}, optimizer.init(params), params)
        return changes["w"]

    small, large = step(jnp.array([0.01, 0.1]))
    np.testing.assert_allclose(10 * small, large, rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "lion", "adan", "nadamw", "adamaxw"])
def test_weights_decay_only_where_it_is_asked_for(name):
    """Some of optax's decay weights unless told not to."""
    without = run(table(name=name), updates=1, gradient=0.0)
    np.testing.assert_array_equal(without["w"], 2.0)
    decayed = run(table(name=name, weight_decay=0.1), updates=1, gradient=0.0)
    np.testing.assert_allclose(decayed["w"], 2.0 - 0.1 * 0.1 * 2.0, rtol=1e-6)


WRONG = {
    "nesterov = 'maybe'; must be true or false": {"nesterov": "maybe"},
    "nesterov = 1; must be true or false": {"nesterov": 1},
    "eps = 0; must be above 0": {"eps": 0},
    "name = 'admw'; did you mean 'adamw'? choose from": {"name": "admw"},
    "learning_rates = 1.0: there is no such option; did you mean 'learning_rate'": {
        "learning_rates": 1.0
    },
    "weight_decay = 0.1: there is no such option; choose from": {
        "name": "sgd",
        "weight_decay": 0.1,
    },
    "b1 = 'x'; must be a number": {"b1": "x"},
    "b1 = 1.5; must be at least 0 and below 1": {"b1": 1.5},
    "weight_decay = -1.0; must be at least 0": {"weight_decay": -1.0},
    "name = 'nothing.py:mine': there is no file nothing.py": {"name": "nothing.py:mine"},
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_key_is_named_before_anything_runs(key):
    with pytest.raises(UserError) as caught:
        make_optimizer(table(**WRONG[key]), 1)
    assert f"optimizer.{key}" in str(caught.value)


def test_a_function_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import optax\n"
        "def halved(learning_rate, share=0.5):\n"
        "    return optax.chain(optax.sgd(learning_rate), optax.scale(share))\n"
    )
    name = f"{tmp_path}/mine.py:halved"
    out = run(table(name=name, share=0.25, clip_norm=0.0), updates=1)
    np.testing.assert_allclose(out["w"], 2.0 - 0.25 * 0.1, rtol=1e-6)
    swept = make_optimizer(table(name=name, clip_norm=0.0), 1)(0.1, share=jnp.float32(0.125))
    changes, _ = swept.update({"w": jnp.ones(2)}, swept.init({"w": jnp.ones(2)}))
    np.testing.assert_allclose(changes["w"], -0.0125, rtol=1e-6)
    with pytest.raises(UserError, match="optimizer = 'part'; choose from clip_norm, share, warm"):
        make_optimizer(table(name=name), 1)(0.1, part=0.5)


def test_numbers_that_decide_shapes_are_not_swept():
    optimizer_of = make_optimizer(table(name="adafactor", min_dim_size_to_factor=4), 1)
    assert optimizer_of(0.1).init({"w": jnp.ones((8, 8))})
    message = "optimizer = 'min_dim_size_to_factor'; choose from"
    with pytest.raises(UserError, match=message) as caught:
        optimizer_of(0.1, min_dim_size_to_factor=jnp.float32(4))
    assert "min_dim" not in str(caught.value).partition("choose from")[2]
