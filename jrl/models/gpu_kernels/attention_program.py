"""One program of ``attend_cache``: some columns of a cache, for the queries of one head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jrl.models.attention.dense import MASKED
from jrl.models.gpu_kernels.common import LEAST, place, power
from jrl.types import Array

COLUMNS = 32
"""Columns of a cache that a program reads at a time."""

_HALF_EVEN = 1.5 * 2.0**23
"""Added to a float32 of up to 2^22 and taken away again, rounds it as ``round`` does."""


class Scores(NamedTuple):
    """Settings of a model's attention scores; static.

    Attributes:
      dtype: of activations, 16-bit floats.
      scale: what products are multiplied by.
      softcap: scores become cap * tanh(score / cap); None for no cap.
      window: columns back that are seen, the token's own among them; None for all.
      eps: of the norms of queries and keys.
      plus_one: whether these multiply by 1 + weight.
    """

    dtype: Any
    scale: float
    softcap: float | None = None
    window: int | None = None
    eps: float = 1e-6
    plus_one: bool = False


class Sizes(NamedTuple):
    """Static sizes of ``attend_cache``.

    Attributes:
      members: rows of a prompt.
      group: queries of a key-value head, H / K.
      head_dim: h.
      chunks: programs that share the columns of a prompt.
      splits: programs that share a row's own columns.
      tile: rows of a prompt that a program reads for.
      scores: how they are made.
    """

    members: int
    group: int
    head_dim: int
    chunks: int
    splits: int
    tile: int
    scores: Scores

    @property
    def tiles(self) -> int:
        """Programs that share the rows of a prompt."""
        return pl.cdiv(self.members, self.tile) if self.chunks else 0


def attend(*refs: Any, names: list[str], results: list[str], z: Sizes) -> None:
    """One program: some columns of a prompt for several rows, or of one row's own cache."""
    ins = dict(zip(names, refs, strict=False))
    outs = dict(zip(results, refs[len(names) :], strict=True))
    # Both kinds of programs in one launch: whichever is done leaves its processor to the other.
    i, of_prompts = pl.program_id(0), z.chunks * z.tiles
    if of_prompts:

        @pl.when(i < of_prompts)
        def _() -> None:
            _attend_prompt(ins, outs, i // z.tiles, i % z.tiles, z)

        @pl.when(i >= of_prompts)
        def _() -> None:
            j = i - of_prompts
            _attend_own(ins, outs, j // z.splits, j % z.splits, z)
    else:
        _attend_own(ins, outs, i // z.splits, i % z.splits, z)


def _attend_prompt(ins: dict, outs: dict, chunk: Any, tile: Any, z: Sizes) -> None:
    """Some columns of a prompt, for the queries of ``z.tile`` of its rows."""
    # Queries of several rows and heads stand in one block, so that a column is read once for all.
    index = jnp.arange(max(power(z.tile * z.group), LEAST))
    member, g = tile * z.tile + index // z.group, index % z.group
    # What is masked keeps places of its own: interpreted stores write the old number there.
    real = (index < z.tile * z.group) & (member < z.members)
    q = _queries(ins, member, g, real, z)
    first, length = ins["firsts"][0] if "firsts" in ins else 0, ins["lengths"][0]
    lo, hi = _share(first, length, chunk, z.chunks)
    cache = {name: ins[f"past_{name}"] for name in ("k", "v", "k_scale", "v_scale")
             if f"past_{name}" in ins}  # fmt: skip
    oldest = None
    if z.scores.window is not None:
        # Rows of a prompt are at positions of their own: what the earliest sees is read, and each
        # row masks what is too old for it.
        position = plgpu.load(place(ins["positions"], member), mask=real, other=0)
        oldest = position - z.scores.window + 1
    peak, total, values = _read(q, cache, (), lo, hi, first, length, oldest, z)
    where = member, chunk, g
    plgpu.store(place(outs["peak"], *where), peak, mask=real)
    plgpu.store(place(outs["total"], *where), total, mask=real)
    columns = jnp.arange(z.head_dim)[None]
    at = member[:, None], chunk, g[:, None], columns
    plgpu.store(place(outs["values"], *at), values, mask=real[:, None] & (columns >= 0))


def _attend_own(ins: dict, outs: dict, member: Any, split: Any, z: Sizes) -> None:
    """Some of a row's own columns; the first split also has the new one, and writes it."""
    g = jnp.arange(max(power(z.group), LEAST))
    real = g < z.group
    members = jnp.zeros_like(g) + member
    column = ins["columns"][member]
    first = 0 if z.scores.window is None else jnp.maximum(column - z.scores.window + 1, 0)
    lo, hi = _share(first, column, split, z.splits)
    cache = {name: ins[name] for name in ("k", "v", "k_scale", "v_scale") if name in ins}
    here = (split == 0) & (column >= 0)
    # Before the cache is read: the query and the new entry then arrive together.
    (k1, k2), v, (k_scale, v_scale) = _new_entry(ins, outs, member, column, here, z)
    q = _queries(ins, members, g, real, z)
    peak, total, values = _read(q, cache, (member,), lo, hi, first, column, None, z)
    # The new key by itself: the row of a product would have to be a whole block.
    halves = [x.astype(jnp.float32) for x in q]
    score = (halves[0] * k1[None]).sum(1) + (halves[1] * k2[None]).sum(1)
    score = _capped(score * z.scores.scale * k_scale, z)
    score = jnp.where(here, score, MASKED)
    top = jnp.maximum(peak, score)
    old, weight = jnp.exp(peak - top), jnp.where(here, jnp.exp(score - top), 0.0)
    dtype = q[0].dtype
    values = values * old[:, None]
    values += (weight * v_scale).astype(dtype).astype(jnp.float32)[:, None] * v[None]
    part = z.chunks + split
    at = members, jnp.zeros_like(g) + part, g
    plgpu.store(place(outs["peak"], *at), top, mask=real)
    plgpu.store(place(outs["total"], *at), total * old + weight, mask=real)
    columns = jnp.arange(z.head_dim)[None]
    at_values = members[:, None], part, g[:, None], columns
    plgpu.store(place(outs["values"], *at_values), values, mask=real[:, None] & (columns >= 0))


def _share(first: Any, end: Any, part: Any, parts: int) -> tuple[Any, Any]:
    """The blocks of columns [first, end) that one of the parts reads."""
    # In whole blocks, so that no two parts read the same ones.
    begin, stop = first // COLUMNS, (end + COLUMNS - 1) // COLUMNS
    each = (jnp.maximum(stop - begin, 0) + parts - 1) // parts
    lo = begin + part * each
    return lo, jnp.minimum(lo + each, stop)


def _read(
    q: tuple[Array, Array],
    cache: dict,
    row: tuple,
    lo: Any,
    hi: Any,
    first: Any,
    end: Any,
    oldest: Array | None,
    z: Sizes,
) -> tuple[Array, Array, Array]:
    """Peak [M], total [M] and values [M, h] of a running softmax over blocks lo to hi."""
    m, half, dtype = q[0].shape[0], z.head_dim // 2, q[0].dtype

    def block(j: Any, carry: tuple) -> tuple:
        peak, total, values = carry
        columns = j * COLUMNS + jnp.arange(COLUMNS)
        inside = (columns >= first) & (columns < end)

        def load(name: str, start: int, size: int) -> Array:
            across = start + jnp.arange(size)[None]
            at = place(cache[name], *row, columns[:, None], across)
            x = plgpu.load(at, mask=inside[:, None] & (across >= 0), other=0)
            return x.astype(dtype)

        # Rotation leaves queries in two halves, which Triton cannot join.
        scores = plgpu.dot(q[0], load("k", 0, half).T) + plgpu.dot(q[1], load("k", half, half).T)
        scores = scores * z.scores.scale
        if "k_scale" in cache:
            # A column has one scale: on its score it is one product, on its numbers it would be h.
            k_scale = plgpu.load(place(cache["k_scale"], *row, 0, columns), mask=inside, other=0)
            scores = scores * k_scale[None]
        visible = (
            inside[None] if oldest is None else inside[None] & (columns[None] >= oldest[:, None])
        )
        scores = jnp.where(visible, _capped(scores, z), MASKED)
        top = jnp.maximum(peak, scores.max(1))
        # Masked once more: where nothing has been seen, every score is the peak, and exp gives 1.
        weights = jnp.where(visible, jnp.exp(scores - top[:, None]), 0.0)
        old = jnp.exp(peak - top)
        total = total * old + weights.sum(1)
        if "v_scale" in cache:
            v_scale = plgpu.load(place(cache["v_scale"], *row, 0, columns), mask=inside, other=0)
            weights = weights * v_scale[None]
        read = plgpu.dot(weights.astype(dtype), load("v", 0, z.head_dim))
        return top, total, values * old[:, None] + read

    begin = (
        jnp.full(m, MASKED, jnp.float32),
        jnp.zeros(m, jnp.float32),
        jnp.zeros((m, z.head_dim), jnp.float32),
    )
    return jax.lax.fori_loop(lo, hi, block, begin)


def _capped(scores: Array, z: Sizes) -> Array:
    return (
        scores
        if z.scores.softcap is None
        else z.scores.softcap * jnp.tanh(scores / z.scores.softcap)
    )


def _queries(ins: dict, member: Array, g: Array, real: Array, z: Sizes) -> tuple[Array, Array]:
    """Both halves of some queries [M, h / 2], normalised and rotated."""
    half = z.head_dim // 2
    x1, x2 = (_halves(ins, (member[:, None], g[:, None]), i, real[:, None], z) for i in (0, 1))
    columns = jnp.arange(half)[None]
    cos, sin = (
        plgpu.load(place(ins[name], member[:, None], columns), mask=real[:, None] & (columns >= 0),
                   other=0)
        for name in ("cos", "sin")
    )  # fmt: skip
    return _turned(ins, "q_norm", x1, x2, cos, sin, z)


def _halves(ins: dict, where: tuple, i: int, real: Any, z: Sizes) -> Array:
    """One half of some vectors of the product, float32; the last axis has it."""
    half = z.head_dim // 2
    columns = i * half + jnp.arange(half)
    columns = columns[None] if real is not None else columns
    mask = None if real is None else real & (columns >= 0)
    other = None if real is None else 0
    return _product(ins, where, columns, mask, other, z)


def _product(ins: dict, where: tuple, columns: Array, mask: Any, other: Any, z: Sizes) -> Array:
    """Numbers of the product, its parts added and rounded to activations, and the bias; float32."""
    load = functools.partial(plgpu.load, mask=mask, other=other)
    # The parts of the product before are added up here, by whoever reads them.
    parts = [load(place(ins["x"], i, *where, columns)) for i in range(ins["x"].shape[0])]
    x = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(
        z.scores.dtype
    )
    if "bias" in ins:
        x = x + load(place(ins["bias"], *where[1:], columns)).astype(z.scores.dtype)
    return x.astype(jnp.float32)


def _turned(
    ins: dict, norm: str, x1: Array, x2: Array, cos: Array, sin: Array, z: Sizes
) -> tuple[Array, Array]:
    """``layers.rms_norm`` and ``rope.rotate`` of vectors in two halves."""
    half, last, dtype = z.head_dim // 2, x1.ndim - 1, z.scores.dtype
    if norm in ins:
        square = (x1 * x1).sum(last) + (x2 * x2).sum(last)
        scale = jax.lax.rsqrt(square / z.head_dim + z.scores.eps)
        if last:
            scale = scale[:, None]
        w1, w2 = (ins[norm][pl.ds(i * half, half)].astype(jnp.float32) for i in (0, 1))
        if z.scores.plus_one:
            w1, w2 = 1.0 + w1, 1.0 + w2
        if last:
            w1, w2 = w1[None], w2[None]
        # Rounded between the two, as the plain functions do.
        x1 = (x1 * scale * w1).astype(dtype).astype(jnp.float32)
        x2 = (x2 * scale * w2).astype(dtype).astype(jnp.float32)
    return (x1 * cos - x2 * sin).astype(dtype), (x2 * cos + x1 * sin).astype(dtype)


def _new_entry(
    ins: dict, outs: dict, member: Any, column: Any, here: Any, z: Sizes
) -> tuple[tuple[Array, Array], Array, tuple[Any, Any]]:
    """The token's own key, in halves, and value, float32 as the cache holds them, with scales.

    Written to the cache where ``here`` says so.
    """
    half = z.head_dim // 2
    x1, x2 = (_halves(ins, (member, z.group), i, None, z) for i in (0, 1))
    columns = jnp.arange(half)
    cos, sin = (plgpu.load(place(ins[name], member, columns)) for name in ("cos", "sin"))
    k1, k2 = _turned(ins, "k_norm", x1, x2, cos, sin, z)
    whole = jnp.arange(z.head_dim)
    v = _product(ins, (member, z.group + 1), whole, None, None, z)
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    k1, k2 = k1.astype(jnp.float32), k2.astype(jnp.float32)
    if "k_scale" in ins:
        peak = jnp.maximum(jnp.abs(k1).max(0), jnp.abs(k2).max(0))
        k_scale, v_scale = _entry_scale(peak), _entry_scale(jnp.abs(v).max(0))
        k1, k2, v = _eighth(k1, k_scale), _eighth(k2, k_scale), _eighth(v, v_scale)
    # A store that is masked still names a place, which must exist.
    at = jnp.maximum(column, 0)
    stored = outs["k"].dtype
    half_mask = here & (columns >= 0)
    plgpu.store(place(outs["k"], member, at, columns), k1.astype(stored), mask=half_mask)
    second = place(outs["k"], member, at, half + columns)
    plgpu.store(second, k2.astype(stored), mask=half_mask)
    plgpu.store(place(outs["v"], member, at, whole), v.astype(stored), mask=here & (whole >= 0))
    if "k_scale" in ins:
        plgpu.store(place(outs["k_scale"], member, 0, at), k_scale, mask=here)
        plgpu.store(place(outs["v_scale"], member, 0, at), v_scale, mask=here)
    return (k1, k2), v, (k_scale, v_scale)


def _entry_scale(peak: Any) -> Any:
    return jnp.where(peak > 0, peak / 127, 1.0)


def _eighth(x: Array, scale: Any) -> Array:
    return jnp.clip((x / scale + _HALF_EVEN) - _HALF_EVEN, -127, 127)
