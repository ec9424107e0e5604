"""The kernel that writes caches on TPUs against the plain way, and over devices."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import make_mesh
from jrl.models.attention.cache_write import takes, write_columns
from jrl.models.config import ModelConfig
from jrl.models.decode import AXES, cache_writer, entries_of, init_cache, write
from jrl.models.quant import _short_cache

ROWS, COLUMNS = 6, 256
CONFIG = ModelConfig(
    vocab_size=8, layers=1, embed_dim=8, heads=4, kv_heads=2, head_dim=16, mlp_dim=8, max_length=512
)
AT = np.array([0, 255, 130, 127, -3, 256], np.int32)  # the last two are outside
QUICK = {"xla_backend_optimization_level": 0}


def inputs(kind):
    """A piece of a cache full of numbers, and new keys and values of one token a row."""
    config = CONFIG if kind == "int8" else dataclasses.replace(CONFIG, dtype=kind)
    make = partial(init_cache, config=config)
    make = _short_cache(make) if kind == "int8" else make
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def numbers(shape, dtype):
        return (10 * jax.random.normal(next(keys), shape)).astype(dtype)

    cache = jax.tree.map(lambda x: numbers(x.shape, x.dtype), make(ROWS, COLUMNS).rows[0][0])
    shape = (ROWS, config.kv_heads, 1, config.head_dim)
    return cache, {name: numbers(shape, config.dtype) for name in ("k", "v")}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_the_kernel_writes_what_the_plain_way_writes(kind):
    cache, new = inputs(kind)
    live = np.array([True, True, True, False, True, True])
    assert takes(cache)

    @partial(jax.jit, compiler_options=QUICK)
    def both(cache, new):
        plain = write(cache, new, AT[:, None], live[:, None])
        return plain, write_columns(
            cache, entries_of(cache, new), jnp.where(live, AT, -1), axes=AXES, interpret=True
        )

    expected, written = both(cache, new)
    assert set(written) == set(cache)
    for name in cache:
        assert np.array_equal(written[name], expected[name]), name
        changed = np.not_equal(written[name], cache[name]).reshape(ROWS, -1).any(-1)
        assert changed.tolist() == [True, True, True, False, False, False], name


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"fsdp": 4}])
def test_each_device_writes_its_own_rows_and_heads(axes):
    """Six rows do not divide over four devices, where every device writes all of them."""
    cache, new = inputs("float32")
    live = jnp.ones((ROWS, 1), bool)
    expected = write(cache, new, AT[:, None], live)
    with jax.set_mesh(make_mesh(axes)):
        written = jax.jit(cache_writer("splash", CONFIG), compiler_options=QUICK)(
            cache, new, AT[:, None], live
        )
    for name in cache:
        assert np.array_equal(written[name], expected[name]), name


def test_caches_for_kernels_have_columns_in_whole_tiles():
    def sizes(how, rows, length, pieces):
        make = partial(init_cache, rows, length, None, pieces, config=CONFIG, attention=how)
        return [piece["v"].shape[2] for piece in jax.eval_shape(make).rows[0]]

    assert sizes("xla", 400, 600, 5) == [120] * 5
    # the kernel finds what is filled by itself, as long as it has tables for all rows
    assert sizes("splash", 400, 600, 5) == [640]
    assert sizes("splash", 20_000, 600, 5) == [128] * 5
    assert sizes("splash", 20_000, 600, 4) == [640]  # no number of up to 4 divides its 5 tiles
