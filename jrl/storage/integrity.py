"""Checksums of arrays, and whether their numbers are finite: how damage on disk is seen.

A checksum belongs to the numbers of an array and their places in it, not to the shards that hold
them, so a state saved by one mesh is verified on another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.types import Array, Params

_CHUNK = 1 << 16  # words that a core's cache holds; NumPy is four times faster than on whole arrays
_FIRST = 0x9E3779B9  # mixed for the first word, where 0 would stay 0


def checksum(tree: Params) -> Array:
    """A checksum for each leaf, independent of how the leaf is divided over devices.

    The words of a leaf are hashed together with their places and added up modulo 2^32, so that the
    order of the sum does not matter and the order of the words does: two shards that changed places
    are seen, and a single flipped bit always is.

    Args:
      tree: arrays of any type.

    Returns:
      [leaves] uint32, in the order of ``jax.tree.leaves``.

    >>> checksum([jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])]).tolist()
    [2014006262, 1818859448]
    """
    return jnp.stack([_hashed(_words(x)).sum(dtype=jnp.uint32) for x in jax.tree.leaves(tree)])


def host_checksum(array: Any) -> int:
    """The number that ``checksum`` gives for an array of the host.

    >>> host_checksum(np.array([1.0, 2.0], np.float32))
    2014006262
    """
    words, total = _host_words(np.asarray(array)), 0
    for begin in range(0, words.size, _CHUNK):
        chunk = words[begin : begin + _CHUNK].astype(np.uint32)
        index = np.arange(begin, begin + chunk.size, dtype=np.uint64).astype(np.uint32)
        index += np.uint32(_FIRST)
        chunk ^= _host_mix(index)
        total += int(_host_mix(chunk).sum(dtype=np.uint64))
    return total % 2**32


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """The checksum of each array.

    Arrays of an accelerator, and those of several processes, are summed where they lie, each
    process its own shards; all processes call this together. NumPy reads the others in place, so
    that no program is compiled for them.

    Args:
      arrays: NumPy or JAX arrays, and Python numbers; no typed keys.
    """
    remote = [name for name, x in arrays.items() if _is_far(x)]
    checks = {name: host_checksum(x) for name, x in arrays.items() if name not in remote}
    if remote:
        sums = np.asarray(_checksum([arrays[name] for name in remote]))
        checks |= dict(zip(remote, sums.tolist(), strict=True))
    return {name: checks[name] for name in arrays}


def first_nonfinite(tree: Any, *, nan_only: bool = False) -> str | None:
    """The path of the first leaf with a NaN or an infinity, as ``params.policy.wq``; None of none.

    Args:
      tree: arrays; those of integers, keys and the like are passed over.
      nan_only: whether infinity is no fault, as in an optimizer that starts at the worst loss.
    """
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="."), x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    near = [np.asarray(x) for _, x in leaves if not _is_far(x)]
    remote = [x for _, x in leaves if _is_far(x)]
    test = np.isnan if nan_only else _not_finite
    bad = iter(bool(test(x).any()) for x in near)
    bad_far = iter(np.asarray(_any_bad(remote, nan_only)).tolist() if remote else [])
    for name, x in leaves:
        if next(bad_far if _is_far(x) else bad):
            return name
    return None


def _is_far(x: Any) -> bool:
    """Whether an array is not in this process's own memory."""
    if not isinstance(x, jax.Array):
        return False
    return not x.is_fully_addressable or any(d.platform != "cpu" for d in x.devices())


def _not_finite(x: np.ndarray) -> np.ndarray:
    return ~np.isfinite(x)


def _bad(arrays: list[Array], nan_only: bool) -> Array:
    return jnp.stack([(jnp.isnan(x) if nan_only else ~jnp.isfinite(x)).any() for x in arrays])


_checksum = jax.jit(checksum)
_any_bad = jax.jit(_bad, static_argnums=1)


def _words(x: Array) -> Array:
    """The bits of an array as uint32, one or more words for each number."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    bits = min(jax.dtypes.itemsize_bits(x.dtype), 32)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _host_words(array: np.ndarray) -> np.ndarray:
    """``_words`` of an array of the host, flat, in the smallest type that holds them."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.itemsize > 1:
        return flat.view(f"<u{math.gcd(flat.dtype.itemsize, 4)}")
    bits = 8 if flat.dtype == bool else jax.dtypes.itemsize_bits(flat.dtype)
    return flat.view(np.uint8) & np.uint8(2**bits - 1)


def _hashed(words: Array) -> Array:
    """Each word mixed with its index in the flattened array."""
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        coordinate = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index * jnp.uint32(size & 0xFFFFFFFF) + coordinate
    return _mix(words ^ _mix(index + jnp.uint32(_FIRST)))


def _mix(x: Array) -> Array:
    """A bijection of 32 bits in which every bit moves about half of them (MurmurHash3's last)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _host_mix(x: np.ndarray) -> np.ndarray:
    """``_mix`` in place."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x
