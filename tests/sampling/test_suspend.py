"""Rows that leave their slots and return, against rows that stay."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.cache import share
from jrl.sampling.params import make_sampling_params
from jrl.sampling.slots import decode, extend, prefill, start
from jrl.sampling.suspend import extend_rows, put_rows, take_rows

CONFIG = ModelConfig(
    vocab_size=23,
    layers=1,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    max_length=24,
)
NETWORK = transformer(CONFIG)
S, P, T = 4, 5, 9
LENGTHS = np.array([1, 5, 3, 4], np.int32)
FIELDS = ("pending", "prompt_lengths", "lengths", "limits", "tokens", "mask", "logprobs", "stop")


@cache
def weights():
    return jit(lambda k: NETWORK.prepare(NETWORK.init(k)))(jax.random.key(0))


@partial(jit, static_argnames="seed")
def begin(weights, seed):
    """S slots, each with a prompt of its own as its prefix."""
    tokens = jax.random.randint(jax.random.key(seed), (S, P), 0, 23)
    lengths = jnp.asarray(LENGTHS)
    past = prefill(weights, tokens, lengths, network=NETWORK)
    cache = share(past, lengths - 1, 1, network=NETWORK, weights=weights, length=T)
    keys = jax.random.split(jax.random.key(seed + 1), S)
    limits = jnp.full(S, 6, jnp.int32)
    sampling_params = make_sampling_params(temperature=1.5)
    return start(cache, tokens, lengths, keys, sampling_params, limits, max_new_tokens=T)


@jit
def run(weights, slots, steps):
    return decode(weights, slots, jnp.int32(0), network=NETWORK, steps=steps, stop_tokens=(-1,))[0]


pick, put = jit(take_rows), jit(put_rows)
some, every = (jit(partial(f, network=NETWORK)) for f in (extend_rows, extend))


def assert_row(slots, row, other, other_row):
    for name in FIELDS:
        a, b = getattr(slots, name)[row], getattr(other, name)[other_row]
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=name)


def test_a_row_that_returns_to_another_slot_resumes_as_if_it_had_stayed():
    slots = run(weights(), begin(weights(), 0), 3)
    stayed = run(weights(), slots, 3)
    parked = pick(slots, np.array([1]))
    elsewhere = put(run(weights(), begin(weights(), 5), 2), np.array([3]), parked)
    resumed = run(weights(), elsewhere, 3)
    assert_row(resumed, 3, stayed, 1)
    assert stayed.lengths.tolist() == [6] * S
    # and whoever was there before it is as it was
    others = run(weights(), begin(weights(), 5), 5)
    for row in range(3):
        assert_row(resumed, row, others, row)


def test_a_place_that_is_not_there_takes_nothing():
    slots = begin(weights(), 0)
    same = put(slots, np.array([S]), pick(slots, np.array([2])))
    for row in range(S):
        assert_row(same, row, slots, row)


def test_tokens_for_a_few_rows_are_those_for_all_rows():
    slots = run(weights(), begin(weights(), 0), 2)
    tokens = np.arange(1, 1 + S * 4, dtype=np.int32).reshape(S, 4)
    counts = np.array([0, 3, 0, 4], np.int32)
    raised = slots.replace(limits=jnp.where(counts > 0, 8, slots.limits))
    expected = every(weights(), raised, tokens, counts)
    rows = np.array([3, 1, S], np.int32)  # in any order, and one that is none
    arguments = tokens[[3, 1, 0]], counts[[3, 1, 0]], np.full(3, 8, np.int32)
    resumed = some(weights(), slots, rows, *arguments)
    for row in range(S):
        assert_row(resumed, row, expected, row)
    a, b = run(weights(), resumed, T), run(weights(), expected, T)
    assert a.lengths.tolist() == [6, 8, 6, 8]
    for row in range(S):
        assert_row(a, row, b, row)


def test_a_shared_prefix_does_not_leave_with_one_row():
    slots = begin(weights(), 0)
    lengths = slots.cache.prefix_lengths[:2]
    shared = slots.replace(cache=slots.cache.replace(prefix_lengths=lengths))
    with pytest.raises(AssertionError, match="several rows share"):
        put_rows(shared, jnp.array([0]), slots)
