"""Attention at several places under one softmax, each place by a kernel that keeps no scores.

"FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (arXiv:2205.14135):
scores exist for a block of queries and keys at a time, and the backward pass makes them again.
Queries may look at several places, such as a row of their own and a prompt that rows share. Each
place is a kernel's work; what the kernels saw is merged by the logarithms of their sums, and each
finds its own part of the gradient from the merged result alone.

Queries are ``[B, H, Q, h]`` here, and keys and values ``[B, K, C, h]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.models.matmul import ATTENDED
from jrl.types import Array


class Marks(NamedTuple):
    """Visibility: a query sees the keys of its own id, at distances from 0 to the window.

    Attributes:
      ids: [B, L] int32; 0 is padding, which sees nothing and is not seen.
      positions: [B, L] int32, tokens.
      ends: [B, L] int32, of keys: queries of ids from the key's own up to below this see it; None
        for its own id alone.
    """

    ids: Array
    positions: Array
    ends: Array | None = None


class Place(NamedTuple):
    """Keys and values that queries look at, each held once for ``members`` consecutive rows.

    Attributes:
      k_bkcd: [R / members, K, C, h].
      v_bkcd: the same.
      keys: of [R / members, C].
      queries: of [R, Q], for this place.
      columns: [R, Q] int32, in which column of the row's own keys each query is; None where query c
        is in column c, and for keys that are not the row's own.
    """

    k_bkcd: Array
    v_bkcd: Array
    keys: Marks
    queries: Marks
    columns: Array | None = None


class Kernel(NamedTuple):
    """Forward and backward functions of one place, for queries of as many rows as the place has.

    Attributes:
      forward: (q, place, window) -> (values seen [B, H, Q, h], log of the sum of the exponentials
        of the scores [B, H, Q] float32).
      backward: (q, place, window, seen, log_sums, g) -> (dq, dk, dv), the part of this place in the
        gradient of what was seen at all places together, whose log sums are given.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


def attend_places(
    q_rqhd: Array, places: tuple[Place, ...], kernels: tuple[Kernel, ...], window: Array | int
) -> Array:
    """The values each query sees at all places, under one softmax.

    Args:
      q_rqhd: [R, Q, H, h].
      places: at least one; the rows of each divide R.
      kernels: one for each place.
      window: [] int32, tokens.

    Returns:
      [R, Q, H, h] in the dtype of the values. What a query that sees nothing gets is finite and
      has no meaning.
    """
    out = _attend(kernels, q_rqhd.transpose(0, 2, 1, 3), places, jnp.asarray(window, jnp.int32))
    return out.transpose(0, 2, 1, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    kernels: tuple[Kernel, ...], q: Array, places: tuple[Place, ...], window: Array
) -> Array:
    return _forward(kernels, q, places, window)[0]


def _forward(
    kernels: tuple[Kernel, ...], q: Array, places: tuple[Place, ...], window: Array
) -> tuple[Array, tuple]:
    outputs, log_sums = [], []
    for kernel, place in zip(kernels, places, strict=True):
        # Rows that share a place are queries of one row, so its keys are read once for all of them.
        out, log_sum = kernel.forward(*_together(q, place), window)
        outputs.append(_split(out, q.shape[0]))
        log_sums.append(_split(log_sum[..., None], q.shape[0])[..., 0])
    # Each place divided by its own sum; its share of the sum of all puts that right.
    merged = functools.reduce(jnp.logaddexp, log_sums)
    if len(outputs) > 1:
        # exp of a difference of log sums is at most 1, so nothing overflows.
        shares = [jnp.exp(x - merged)[..., None] for x in log_sums]
        parts = [x.astype(jnp.float32) * w for x, w in zip(outputs, shares, strict=True)]
        outputs = [functools.reduce(jnp.add, parts)]
    # Named with the log sums: rematerialisation that keeps both never runs the kernels again.
    out = checkpoint_name(outputs[0].astype(places[0].v_bkcd.dtype), ATTENDED)
    merged = checkpoint_name(merged, ATTENDED)
    return out, (q, places, window, out, merged)


def _backward(kernels: tuple[Kernel, ...], residuals: tuple, g: Array) -> tuple:
    q, places, window, out, log_sum = residuals
    dq, key_gradients = jnp.zeros(q.shape, jnp.float32), []
    for kernel, place in zip(kernels, places, strict=True):
        n = place.k_bkcd.shape[0]
        queries, place = _together(q, place)
        # The merged result and sums are all a place needs of the others: not their scores.
        rest = [_join(x, n) for x in (out, log_sum[..., None], g)]
        part, dk, dv = kernel.backward(queries, place, window, rest[0], rest[1][..., 0], rest[2])
        # Each place contributes to the same queries; float32 until all are added.
        dq = dq + _split(part, q.shape[0]).astype(jnp.float32)
        key_gradients.append(Place(dk, dv, Marks(None, None), Marks(None, None)))  # type: ignore[arg-type]
    # Marks are integers and the window is no weight: they have no gradient.
    return dq.astype(q.dtype), tuple(key_gradients), None


_attend.defvjp(_forward, _backward)


def _join(x: Array, n: int) -> Array:
    """[R, H, Q, ...] as [n, H, R / n * Q, ...]: rows that share a place, one after the other."""
    r, h, q, d = x.shape
    if r == n:
        return x
    # Heads stay the outer axis, so a kernel sees one long row of queries per head.
    return x.reshape(n, r // n, h, q, d).transpose(0, 2, 1, 3, 4).reshape(n, h, -1, d)


def _split(x: Array, r: int) -> Array:
    """[R, H, Q, ...] again: the reverse of ``_join``."""
    n, h, _, d = x.shape
    if r == n:
        return x
    return x.reshape(n, h, r // n, -1, d).transpose(0, 2, 1, 3, 4).reshape(r, h, -1, d)


def _together(q: Array, place: Place) -> tuple[Array, Place]:
    """Queries, and their marks, with as many rows as the place has."""
    n = place.k_bkcd.shape[0]
    marks = jax.tree.map(lambda x: x.reshape(n, -1), place.queries)
    return _join(q, n), place._replace(queries=marks)
