"""Checksums and finiteness of arrays, wherever they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import make_mesh, tree_shardings
from jrl.storage.integrity import checksum, checksums, first_nonfinite, host_checksum


def tree():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(2, 8, 4, 3)).astype(np.float32),
        "b": jnp.asarray(rng.normal(size=(8, 12)), jnp.bfloat16),
        "s": np.arange(5, dtype=np.int32),
    }


def mix(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


def reference(array):
    """The checksum in Python integers."""
    words = np.ascontiguousarray(array).reshape(-1)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[words.itemsize]
    bits = words.view(kind).tolist()
    return sum(mix(w ^ mix((i + 0x9E3779B9) % 2**32)) for i, w in enumerate(bits)) % 2**32


def test_the_checksum_is_that_of_integers_whatever_the_type():
    arrays = [np.asarray(x) for x in tree().values()]
    arrays += [np.array([[True, False]]), np.array([-3, 7], np.int8), np.float32(np.nan)]
    assert jax.jit(checksum)(arrays).tolist() == [reference(x) for x in arrays]


def test_the_checksum_knows_bits_and_places_but_not_shards():
    """What resharding can get wrong is two shards in each other's place, or a bit."""
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    axes = {"w": ("layers", "embed", "heads", None), "b": ("vocab", "embed"), "s": (None,)}
    full, total = tree(), jax.jit(checksum)
    placed = jax.device_put(full, tree_shardings(mesh, axes, full))
    assert placed["w"].addressable_shards[0].data.shape == (2, 4, 2, 3)
    right = total(full)
    assert total(placed).tolist() == right.tolist()
    w = full["w"]
    bits = w.view(np.uint32).copy()
    bits[1, 7, 3, 2] ^= 1
    wrong = {
        "a bit": bits.view(np.float32),
        "two shards": w[:, [4, 5, 6, 7, 0, 1, 2, 3]],
        "minus zero": np.where(w == w[0, 0, 0, 0], -0.0, w).astype(np.float32),
    }
    for what, array in wrong.items():
        different = total(full | {"w": array}) != right
        assert different.tolist() == [False, False, True], what


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint8", "bool", "int32", "uint32", "int4"]
)
def test_numpy_and_the_device_find_the_same(dtype):
    bits = np.random.default_rng(0).integers(0, 255, (3, 70_001), np.uint8)
    device = jnp.asarray(bits).astype(dtype)
    assert host_checksum(device) == int(jax.jit(checksum)([device])[0])
    assert host_checksum(np.zeros((), dtype)) == int(checksum([jnp.zeros((), dtype)])[0])


def test_wide_numbers_are_two_words():
    wide = np.array([1.5, -2.0])
    assert host_checksum(wide) == host_checksum(wide.view(np.uint32))
    assert host_checksum(np.array([1, 2**40])) != host_checksum(np.array([1, 2**41]))


def test_arrays_are_summed_where_they_lie():
    sharded = jax.device_put(
        jnp.arange(64.0).reshape(8, 8),
        jax.NamedSharding(make_mesh({"fsdp": 8}), jax.P("fsdp")),
    )
    sums = checksums({"b": sharded, "a": np.arange(64.0, dtype=np.float32), "n": 3})
    assert list(sums) == ["b", "a", "n"]
    assert sums["a"] == sums["b"] == int(checksum([sharded])[0])


def test_the_first_leaf_that_is_not_finite_is_named():
    good = {"a": jnp.ones(3), "b": {"c": jnp.array([1, 2]), "d": jnp.ones(2, jnp.bfloat16)}}
    assert first_nonfinite(good) is None
    worst = good | {"b": good["b"] | {"d": jnp.array([1, jnp.inf], jnp.bfloat16)}}
    assert first_nonfinite(worst) == "b.d"
    assert first_nonfinite(worst, nan_only=True) is None
    assert first_nonfinite(good | {"a": jnp.array([0, jnp.nan])}, nan_only=True) == "a"
