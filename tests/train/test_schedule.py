"""Changes of the training state beside its updates: when they are due, and what they see."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.errors import UserError
from jrl.methods import get_method
from jrl.methods.schedule import After, Schedule, at, copies, every
from jrl.sampling.params import make_sampling_params
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.types import NetworkExtras

KEY, SAMPLING = jax.random.key(3), make_sampling_params()


@pytest.fixture
def batch(make_batch):
    return make_batch(n=4)


def states_of(bag, bag_params, batch, quick_jit, count, after, **splits):
    """The states before and after each of ``count`` steps in which no update moves anything."""
    common = {"network": bag, "objective": get_method("grpo").objective}
    common |= {"optimizer": optax.sgd(0.0), "schedule": Schedule(2, after)}
    step = quick_jit(make_step(**common, **splits))
    states = [init_state(KEY, bag_params, **common)]
    for _ in range(count):
        states.append(step(states[-1], batch, SAMPLING)[0])
    return states


def raised(states):
    """By how much the policy's weights stand above those of the first state."""
    first, *rest = (jax.tree.leaves(state.params["policy"])[0] for state in states)
    return [float(np.mean(leaf - first)) for leaf in rest]


def plus_one(state, view):
    policy = jax.tree.map(lambda x: x + 1, state.params["policy"])
    return state.replace(params=state.params | {"policy": policy})


@pytest.mark.parametrize(
    ("on", "due", "expected"),
    [
        ("step", every(2), [0, 1, 1]),
        ("before", every(2), [0, 0, 1]),  # not before the first step, which no step precedes
        ("before", at(0), [1, 1, 1]),
        ("update", at(3), [1, 1, 1]),  # the third of a step's four
        ("update", every(5), [0, 1, 2]),  # counted through the steps
    ],
)
def test_a_change_is_made_when_it_is_due(bag, bag_params, batch, quick_jit, on, due, expected):
    after = (After(plus_one, due, on=on),)
    states = states_of(bag, bag_params, batch, quick_jit, 3, after, minibatches=2)
    np.testing.assert_allclose(raised(states), expected, atol=1e-5)


def test_a_change_sees_the_state_before_the_step_and_the_batch(bag, bag_params, batch, quick_jit):
    def apply(state, view):
        value = view.before.step + jnp.float32(view.batch.tokens.shape[0])
        return state.replace(params=jax.tree.map(lambda x: 0 * x + value, state.params))

    states = states_of(bag, bag_params, batch, quick_jit, 2, (After(apply, every(1)),))
    values = [float(jax.tree.leaves(state.params)[0].ravel()[0]) for state in states[1:]]
    assert values == [batch.tokens.shape[0], batch.tokens.shape[0] + 1]


def test_changes_are_made_in_order(bag, bag_params, batch, quick_jit):
    """A copy that follows a change holds it; one that precedes it does not."""
    change, copy = After(plus_one, every(1)), copies("old", every(1))
    for after, behind in (((change, copy), 0), ((copy, change), 1)):
        state = states_of(bag, bag_params, batch, quick_jit, 1, after)[1]
        pairs = zip(
            *map(jax.tree.leaves, (state.params["policy"], state.frozen["old"])), strict=True
        )
        for new, old in pairs:
            np.testing.assert_allclose(new - old, behind, atol=1e-6)


def test_a_reference_that_nothing_reads_is_not_held(bag, bag_params, batch, quick_jit):
    after = (copies("ref", every(1)),)
    states = states_of(bag, bag_params, batch, quick_jit, 1, after)
    assert states[0].frozen == states[1].frozen == {}


def test_a_copy_of_another_shape_is_named(bag, bag_params, make_bag, batch):
    other = make_bag(d=5)
    common = {"network": bag, "objective": get_method("grpo").objective}
    common |= {"optimizer": optax.sgd(0.0), "schedule": Schedule(after=(copies("old", every(1)),))}
    state = init_state(KEY, bag_params, **common, frozen={"old": other.init(KEY)})
    with pytest.raises(
        UserError, match=r"the frozen policy 'old', and the given one has .* frozen.old out"
    ):
        jax.eval_shape(make_step(**common), state, batch, SAMPLING)


def test_the_core_records_stay_small():
    assert len(inspect.signature(make_step).parameters) <= 11
    assert len(NetworkExtras._fields) <= 7
