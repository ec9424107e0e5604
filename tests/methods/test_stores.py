"""Rows that a store keeps and returns: the bookkeeping under arrays and rows on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.methods.stores import (
    FREE,
    empty_slots,
    insert,
    pick_at_random,
    pick_of_prompt,
    take_oldest,
)


def filled(capacity, prompts, each=0, most=0, priority=None):
    """Slots after rows of these prompts, one at a time."""
    slots = empty_slots(capacity, each, most)
    for i, prompt in enumerate(prompts):
        weight = None if priority is None else jnp.array([priority[i]], jnp.float32)
        slots, _ = insert(slots, jnp.array([prompt]), jnp.ones(1, bool), weight)
    return slots


def contents(slots):
    """(prompt, age) of the rows, the oldest first."""
    rows = zip(slots.prompt.tolist(), slots.age.tolist(), strict=True)
    return sorted((row for row in rows if row[1] != FREE), key=lambda row: row[1])


def test_the_oldest_rows_make_room_and_of_too_many_the_last_ones_are_taken():
    assert contents(filled(3, [1, 2, 3, 4])) == [(2, 1), (3, 2), (4, 3)]
    slots, at = insert(empty_slots(2), jnp.arange(4), jnp.ones(4, bool))
    assert contents(slots) == [(2, 2), (3, 3)]
    assert at.tolist()[:2] == [2, 2]  # past the end: not inserted
    skipped, _ = insert(empty_slots(4), jnp.arange(4), jnp.array([True, False, True, False]))
    assert contents(skipped) == [(0, 0), (2, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_limits_by_prompt_are_those_of_a_dictionary(seed):
    rng = np.random.default_rng(seed)
    prompts, memory = rng.integers(0, 5, 40).tolist(), {}
    slots = empty_slots(6, 2, 3)
    for age, prompt in enumerate(prompts):
        slots, _ = insert(slots, jnp.array([prompt]), jnp.ones(1, bool))
        memory[prompt] = (*memory.pop(prompt, ()), age)[-2:]  # the newest two
        while len(memory) > 3:
            del memory[next(iter(memory))]  # the prompt added to longest ago
        rows = [(p, a) for p, ages in memory.items() for a in ages]
        assert contents(slots) == sorted(rows, key=lambda row: row[1])


def test_rows_come_out_in_their_order_and_once():
    slots = filled(4, [1, 2, 3])
    slots, at, valid = take_oldest(slots, 2)
    assert slots.prompt[at].tolist() == [1, 2]
    assert valid.tolist() == [True, True]
    slots, at, valid = take_oldest(slots, 2)
    assert (int(slots.prompt[at[0]]), valid.tolist()) == (3, [True, False])
    assert contents(slots) == []


def test_rows_are_drawn_by_their_priority():
    slots = filled(4, [0, 1, 2, 3], priority=[1.0, 1e-6, 3.0, 1e-6])
    draw = jax.jit(jax.vmap(lambda key: pick_at_random(slots, 1, key, 1.0)[0][0]))
    rows = np.asarray(slots.prompt)[draw(jax.random.split(jax.random.key(0), 2000))]
    first = np.bincount(rows, minlength=4)
    assert abs(first[2] / first[0] - 3) < 0.4
    assert first[[1, 3]].sum() < 10
    even = jax.vmap(lambda key: pick_at_random(slots, 1, key, 0.0)[0][0])
    assert np.bincount(even(jax.random.split(jax.random.key(1), 2000)), minlength=4).min() > 400
    at, valid = pick_at_random(slots, 6, jax.random.key(2), 0.0)
    assert sorted(at[:4].tolist()) == [0, 1, 2, 3]  # different ones
    assert valid.tolist() == [True] * 4 + [False] * 2


def test_rows_of_a_prompt_are_different_and_those_that_fit():
    slots = filled(6, [7, 8, 7, 7])
    fits = jnp.array([[True, True, False, True, True, True]] * 2)
    keys = jax.random.split(jax.random.key(0), 2)
    at, valid = pick_of_prompt(slots, jnp.array([7, 9]), fits, 3, keys)
    assert sorted(at[0, :2].tolist()) == [0, 3]
    assert valid.tolist() == [[True, True, False], [False] * 3]
