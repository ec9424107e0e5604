"""XLA's memory for decoding: no copy of the cache, with prefixes, refills and requests."""

from functools import partial

import jax
import jax.numpy as jnp

from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling import batch
from jrl.sampling.cache import share
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.sampling.slot_sizes import SlotPlan
from jrl.sampling.slots import IdleLimit, decode, start

NETWORK = transformer(
    ModelConfig(
        vocab_size=32,
        layers=2,
        embed_dim=16,
        heads=2,
        kv_heads=2,
        head_dim=32,
        mlp_dim=32,
        max_length=1024,
    )
)
N, G, P, T = 4, 4, 256, 512
PARAMS = jax.eval_shape(NETWORK.init, jax.random.key(0))
WEIGHTS = jax.eval_shape(NETWORK.prepare, PARAMS)


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def temporaries(function, *args, donate):
    compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def members_of_prompts(weights):
    """Slots of a batch: G members of each of N prompts, in pieces."""
    sized = {"network": NETWORK, "weights": weights, "length": T}
    cache = share(NETWORK.init_cache(N, P, weights), jnp.full(N, P - 1), G, **sized)
    s = N * G
    return start(
        cache,
        jnp.zeros((s, P), jnp.int32),
        jnp.full(s, P, jnp.int32),
        jax.random.split(jax.random.key(0), s),
        make_sampling_params(),
        jnp.full(s, T, jnp.int32),
        max_new_tokens=T,
    )


def test_decoding_with_prefixes_makes_no_copy_of_the_cache():
    slots = jax.eval_shape(members_of_prompts, WEIGHTS)
    run = partial(decode, network=NETWORK, steps=16, stop_tokens=(3,))
    used = temporaries(run, WEIGHTS, slots, jnp.int32(0), donate=1)
    assert used < 0.1 * bytes_of(slots.cache)


def test_serving_makes_no_copy_of_the_cache():
    sizes = {"rows": 16, "prompt_tokens": P, "max_new_tokens": T}
    empty = partial(batch.empty_batch, network=NETWORK, stop_width=4, biases=False, **sizes)
    state = jax.eval_shape(empty, WEIGHTS)
    run = partial(batch.decode_chunk, network=NETWORK, width=16)
    idle = IdleLimit(jnp.int32(0), jnp.int32(0))
    chunk = batch.ChunkInputs(jnp.int32(0), jnp.zeros(16, jnp.int32), jnp.int32(16), idle)
    used = temporaries(run, WEIGHTS, state, chunk, donate=1)
    assert used < 0.1 * bytes_of(state.slots.cache)


def test_slots_that_are_filled_again_make_no_copy_of_the_cache():
    """A whole batch holds its prompts, what shares them, its results, and little else."""
    slots, p = 8, 32
    run = partial(generate, network=NETWORK, group=G, max_new_tokens=T, stop_tokens=(3,))
    run = partial(run, slots=SlotPlan(slots, shrink=False))
    prompts = (jnp.zeros((N, p), jnp.int32), jnp.full(N, p), make_sampling_params(), jnp.int32(0))
    used = temporaries(run, jax.random.key(0), PARAMS, *prompts, jnp.arange(N), donate=())
    rows = lambda n, length: bytes_of(jax.eval_shape(lambda: NETWORK.init_cache(n, length)))  # noqa: E731
    cache = rows(slots, T) + rows(slots, p) + rows(N, p)
    assert cache < used < 1.15 * cache
