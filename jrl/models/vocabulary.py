"""Log-probabilities of tokens, and their entropy, without the scores of all tokens at once.

``[B, T, V]`` is by far the largest array of a training step. Here the vocabulary is walked over in
parts, under a running softmax, and the backward pass makes the scores of each part again, unless
the head says that there is memory to keep them. The gradient is written out because the one that
JAX makes of a loop keeps what every turn made.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jrl.mesh import Axes, constrain, platform
from jrl.models.matmul import einsum, weight_gradient, whole_width
from jrl.types import Array, Head

_LOWEST = -1e30  # finite, so that nothing times it is 0

ROOM = {"cpu": 2**22, "tpu": 2**24, "gpu": 2**26}
"""Scores of a part on a device, by platform. 2**22 float32 are 16 MiB, which stay in a CPU's
last-level cache. Elsewhere each part of the backward pass reads and writes the sums of all tokens'
gradients, and few parts do so seldom: on an H100 parts of 2**24 would spend a fifth of their time
on that (16,384 tokens of 2,048 numbers)."""

KEPT_ROOM = 2**30
"""The same where the scores are kept: parts are few, and each is an array of its own."""

TILE = 128
"""Columns of a part are a multiple of this on a GPU. Its matrix units are fed 16 bytes at a time,
and a part of 1,057 columns has rows that begin anywhere."""


class _Walk(NamedTuple):
    """Partition of the vocabulary into shards and parts; static."""

    axis: int
    softcap: float | None
    entropy: bool
    shards: int
    size: int  # columns of a shard
    width: int  # those that are multiplied at once
    saves_scores: bool = False  # for the backward pass, as float32

    @property
    def parts(self) -> int:
        return -(-self.size // self.width)


class _Sums(NamedTuple):
    """Running sums over the scores, each [B, T] float32."""

    peak: Array
    total: Array  # of exp(score - peak)
    mean: Array  # of the scores so weighted, not divided
    chosen: Array


def fused_logprobs(
    hidden: Array,
    head: Head,
    tokens: Array,
    temperature: Array,
    *,
    entropy: bool = False,
    devices: tuple[int, int] = (1, 1),
    at_once: int = 2**24,
    room: int | None = None,
) -> dict[str, Array]:
    """Log-probabilities of tokens under the softmax of a head's scores, and its entropy.

    Scores, sums and results are float32; products and gradients are rounded as in ``matmul``.

    Args:
      hidden: [B, T, D].
      head: of the policy.
      tokens: [B, T] int32.
      temperature: [] float32, above 0; it carries no gradient.
      entropy: whether to return it.
      devices: over how many the tokens are divided, and over how many the vocabulary.
      at_once: when a device has no more scores than this, the vocabulary is one part.
      room: how many scores a part has on a device; at least 128 for each of its tokens. None for
        ``ROOM``.

    Returns:
      "logprobs" [B, T] float32, nats, and with ``entropy`` also "entropy" [B, T] float32, nats.
    """
    chex.assert_rank([hidden, head.weight, tokens, temperature], [3, 2, 2, 0])
    shards, local_tokens = devices[1], max(tokens.size // devices[0], 1)
    # Each device walks over its own shard of the vocabulary, so that no part crosses devices.
    size = head.weight.shape[head.axis] // shards
    if room is None:
        room = KEPT_ROOM if head.saves_scores else ROOM.get(platform(), ROOM["tpu"])
    most = size if local_tokens * size <= at_once else min(size, max(128, room // local_tokens))
    width = _part_width(size, most, TILE if platform() == "gpu" else 1)
    walk = _Walk(head.axis, head.softcap, entropy, shards, size, width, head.saves_scores)
    temperature = jax.lax.stop_gradient(temperature)
    early = head.softcap is None and hidden.dtype == jnp.float32
    # Dividing D numbers a token in place of V; in bfloat16, or under a cap, the result would
    # differ.
    if early:  # as exact as dividing the scores, of which there are V / D times as many
        hidden = hidden / temperature
    over = None if early else temperature
    logprobs, spread = _fused(walk, hidden, head.weight, tokens, over)
    return {"logprobs": logprobs} | ({"entropy": spread} if entropy else {})


def _part_width(size: int, most: int, tile: int) -> int:
    """Columns of a part: about ``most``, such that the last part repeats few.

    >>> _part_width(151_936, 4_227, 128), _part_width(151_936, 1_057, 1), _part_width(96, 40, 1)
    (4224, 1057, 32)
    """
    if tile > 1 and tile <= most < size:
        tiles = -(-size // tile)
        parts = -(-tiles // (most // tile))
        return min(-(-tiles // parts) * tile, size)
    parts = -(-size // most)
    return size // parts if size % parts == 0 else most  # parts of one length overlap nowhere


def _start(walk: _Walk, i: Array | int) -> Array:
    """The first column of part i; the last part may overlap the one before it."""
    return jnp.minimum(jnp.int32(i) * walk.width, walk.size - walk.width)


def _parts(walk: _Walk) -> Array:
    return jnp.arange(walk.parts, dtype=jnp.int32)


def _shape(walk: _Walk, dim: int) -> tuple[int, ...]:
    return (walk.shards, walk.size, dim) if walk.axis == 0 else (dim, walk.shards, walk.size)


def _part(walk: _Walk, weight: Array, i: Array | int, dtype: Any) -> Array:
    """[s, c, D] (or [D, s, c]), part i of every shard of the weight, for a product in ``dtype``.

    Devices that divide its width send each other the part. XLA would send it slice by slice, and
    add up the scores of as many products of few columns, as compiled for TPUs.
    """
    part = weight.reshape(_shape(walk, weight.shape[1 - walk.axis]))
    if walk.parts > 1:
        part = jax.lax.dynamic_slice_in_dim(part, _start(walk, i), walk.width, walk.axis + 1)
    return whole_width(part.astype(dtype), _axes(walk))


def _axes(walk: _Walk) -> Axes:
    """Logical axes of a part."""
    return ("vocab", None, "embed") if walk.axis == 0 else ("embed", "vocab", None)


def _spec(walk: _Walk) -> str:
    return "svd" if walk.axis == 0 else "dsv"


def _scores(walk: _Walk, hidden: Array, part: Array, temperature: Array | None) -> Array:
    """[B, T, s, c] float32, over the temperature where there is one."""
    scores = einsum(f"btd,{_spec(walk)}->btsv", hidden, part)
    if walk.softcap is not None:
        scores = walk.softcap * jnp.tanh(scores / walk.softcap)
    return scores if temperature is None else scores / temperature


def _local(walk: _Walk, tokens: Array, i: Array | int) -> Array:
    """[B, T, s] int32, where in part i of each shard the tokens are, if they are."""
    first = jnp.arange(walk.shards, dtype=jnp.int32) * walk.size + _start(walk, i)
    return tokens[:, :, None] - first[None, None]


def _new(walk: _Walk, i: Array | int) -> Array:
    """[1, 1, 1, c] bool, the columns that no part before part i has."""
    column = _start(walk, i) + jnp.arange(walk.width, dtype=jnp.int32)
    return (column >= jnp.int32(i) * walk.width)[None, None, None]


def _add(walk: _Walk, sums: _Sums, scores: Array, tokens: Array, i: Array | int) -> _Sums:
    """The sums with the scores of part i."""
    # A token is in one part of one shard; elsewhere some column is read and not counted.
    local = _local(walk, tokens, i)
    column = jnp.clip(local, 0, walk.width - 1)
    inside = (local == column) & jnp.take(_new(walk, i)[0, 0, 0], column)
    gathered = jnp.take_along_axis(scores, column[:, :, :, None], axis=3)[:, :, :, 0]
    chosen = sums.chosen + jnp.where(inside, gathered, 0).sum(-1)
    if walk.size % walk.width:
        scores = jnp.where(_new(walk, i), scores, _LOWEST)  # columns of two parts count once
    # A running softmax: earlier sums are scaled to the new peak, so that no exponential overflows.
    peak = jnp.maximum(sums.peak, scores.max((2, 3)))
    weights, old = jnp.exp(scores - peak[:, :, None, None]), jnp.exp(sums.peak - peak)
    total = sums.total * old + weights.sum((2, 3))
    mean = sums.mean
    if walk.entropy:
        mean = mean * old + (weights * scores).sum((2, 3))
    return _Sums(peak, total, mean, chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(
    walk: _Walk, hidden: Array, weight: Array, tokens: Array, temperature: Array | None
) -> tuple[Array, Array]:
    return _fused_forward(walk, hidden, weight, tokens, temperature)[0]


def _fused_forward(
    walk: _Walk, hidden: Array, weight: Array, tokens: Array, temperature: Array | None
) -> tuple[tuple[Array, Array], tuple]:
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    sums = _Sums(zeros + _LOWEST, zeros, zeros, zeros)

    def visit(sums: _Sums, i: Array | int) -> tuple[_Sums, Array | None]:
        part = _part(walk, weight, i, hidden.dtype)
        scores = _scores(walk, hidden, part, temperature)
        return _add(walk, sums, scores, tokens, i), scores if walk.saves_scores else None

    saved: tuple[Array, ...] = ()
    # One part is not a loop: XLA then fuses the scores with what is done to them. Kept ones are in
    # none, either: a loop would copy each part into a stack of them.
    if walk.parts == 1 or walk.saves_scores:
        for i in range(walk.parts):
            sums, scores = visit(sums, i)
            saved += (scores,) if scores is not None else ()
    else:
        sums, _ = jax.lax.scan(visit, sums, _parts(walk))
    log_total = sums.peak + jnp.log(sums.total)
    mean = sums.mean / sums.total
    out = sums.chosen - log_total, log_total - mean if walk.entropy else zeros
    # Two numbers a token are kept: from them the backward pass gets the softmax of any part.
    return out, (hidden, weight, tokens, temperature, log_total, mean, saved)


def _fused_backward(walk: _Walk, residuals: tuple, g: tuple[Array, Array]) -> tuple:
    hidden, weight, tokens, temperature, log_total, mean, saved = residuals
    of_chosen, of_entropy = (x[:, :, None, None] for x in g)
    spec, looped = _spec(walk), walk.parts > 1 and not walk.saves_scores
    written = jnp.float32 if looped else weight.dtype

    def visit(i: Array | int, scores: Array | None = None) -> tuple[Array, Array]:
        part = _part(walk, weight, i, hidden.dtype)
        scores = _scores(walk, hidden, part, temperature) if scores is None else scores
        # d log p(token) / d scores is its one-hot minus the softmax; the entropy's adds the second.
        probs = jnp.exp(scores - log_total[:, :, None, None])
        column = jnp.arange(walk.width, dtype=jnp.int32)[None, None, None]
        at_token = column == _local(walk, tokens, i)[:, :, :, None]
        slope = jnp.where(at_token, of_chosen, 0) - of_chosen * probs
        if walk.entropy:
            slope -= of_entropy * probs * (scores - mean[:, :, None, None])
        if walk.softcap is not None:
            assert temperature is not None  # rows are divided by it where nothing is capped
            slope *= 1 - jnp.square(scores * temperature / walk.softcap)
        if walk.size % walk.width:
            slope = jnp.where(_new(walk, i), slope, 0)
        # Rounded to the operands' dtype first, so that both products use the fast matrix units.
        slope = (slope if temperature is None else slope / temperature).astype(hidden.dtype)
        # Of each shard by itself: devices add theirs up once, after the last part.
        back = jnp.einsum(f"{spec},btsv->sbtd", part, slope, preferred_element_type=jnp.float32)
        back = constrain(back, "vocab", "batch", "length", None)
        slopes = weight_gradient(f"btd,btsv->{spec}", hidden, slope, _axes(walk), written)
        return back, constrain(slopes, *_axes(walk))

    along = walk.axis + 1
    if not looped:
        visits = [visit(i, saved[i] if saved else None) for i in range(walk.parts)]
        back = functools.reduce(jnp.add, (back for back, _ in visits))
        slopes = _joined(walk, [slopes.astype(weight.dtype) for _, slopes in visits])
    else:

        def add(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], None]:
            back, slopes = carry
            more, part = visit(i)
            at = _start(walk, i)
            if walk.size % walk.width:  # where the part overlaps what is there, it adds 0
                part += jax.lax.dynamic_slice_in_dim(slopes, at, walk.width, along)
            # Written in place: a stack of parts, as scan would collect them, needs a second copy of
            # the weight's gradient.
            slopes = jax.lax.dynamic_update_slice_in_dim(slopes, part, at, along)
            return (back + more, slopes), None

        shape = _shape(walk, weight.shape[1 - walk.axis])
        backs = jnp.zeros((walk.shards, *hidden.shape), jnp.float32)
        start = constrain(backs, "vocab", "batch", "length", None), jnp.zeros(shape, jnp.float32)
        (back, slopes), _ = jax.lax.scan(add, start, _parts(walk))
    slopes = slopes.reshape(weight.shape).astype(weight.dtype)
    return back.sum(0).astype(hidden.dtype), slopes, None, jax.tree.map(jnp.zeros_like, temperature)


def _joined(walk: _Walk, parts: list[Array]) -> Array:
    """All columns of the gradient of a weight, of its parts."""
    # The last part begins inside the one before it; it has zeros there.
    new = walk.size - (walk.parts - 1) * walk.width
    last = jax.lax.slice_in_dim(parts[-1], walk.width - new, walk.width, axis=walk.axis + 1)
    return jnp.concatenate([*parts[:-1], last], axis=walk.axis + 1)


_fused.defvjp(_fused_forward, _fused_backward)
