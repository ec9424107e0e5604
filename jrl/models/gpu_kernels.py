"""Kernels for decoding on NVIDIA GPUs, in Pallas' Triton dialect; ``models/gpu.py`` calls them.

A token step on a GPU moves few bytes in each of some hundred kernels, so that what counts beside
the bytes is how many kernels there are. ``attend_cache`` is all of a layer's attention between its
two products: norms and rotation of queries and keys, the new entry of the cache, and the values
seen of the prompt's and the row's own keys. Only columns that a query sees are read.
``added_norm`` is a residual and the norm after it, ``block_sums`` and ``pick`` the draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jrl.models.attention.dense import MASKED
from jrl.types import Array

COLUMNS, WARPS, STAGES = 32, 2, 3
"""Columns of a cache that a program reads at a time, its warps, and blocks of columns under way.
Measured on an H200 beside 64 and 128 columns, 1 to 8 warps, 2 to 4 blocks."""

QUERIES = 64
"""Most queries of a program: more would spill the sums of their values."""

PROGRAMS = 528
"""Programs that fill a GPU: four for each of the 132 processors of an H100."""

_LEAST = 16
"""Fewest rows of a product on the matrix units."""

_HALF_EVEN = 1.5 * 2.0**23
"""Added to a float32 of up to 2^22 and taken away again, rounds it as ``round`` does."""


class Turn(NamedTuple):
    """What turns a layer's products into queries, keys and values.

    Attributes:
      cos: [S, h / 2] float32, of each row's position.
      sin: the same.
      q_norm: [h], weight of the queries' norm; None for no norms.
      k_norm: [h].
      bias: [K, H / K + 2, h], in the layout of the products; None for none.
    """

    cos: Array
    sin: Array
    q_norm: Array | None = None
    k_norm: Array | None = None
    bias: Array | None = None


class Reach(NamedTuple):
    """Columns that each row's query sees; the same in all layers with a window of this size.

    Attributes:
      columns: [S] int32, the own column that the token is written to, -1 for a row that has ended.
      positions: [S] int32, tokens; the token's.
      firsts: [N] int32, the first column of a prompt that any of its rows sees; None for 0.
      lengths: [N] int32, columns of each prompt that count; None without prompts.
    """

    columns: Array
    positions: Array
    firsts: Array | None = None
    lengths: Array | None = None


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class Scores(NamedTuple):
    """How a model's attention scores are made; static.

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


class _Sizes(NamedTuple):
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
        return pl.cdiv(self.members, self.tile) if self.chunks else 0


def _sizes(x: Array, own: dict, prompt: dict | None, scores: Scores) -> _Sizes:
    _, s, heads, per_head, d = x.shape
    group, columns = per_head - 2, own["k"].shape[2]
    n = s if prompt is None else prompt["k"].shape[0]
    members = s // n
    tile = min(members, max(QUERIES // group, 1))

    def parts(programs: int, columns: int) -> int:
        # More parts than fill the GPU are only more to merge; each has two blocks of columns.
        wanted = min(pl.cdiv(PROGRAMS, programs), 8)
        return max(min(wanted, columns // (2 * COLUMNS)), 1)

    chunks = 0
    if prompt is not None:
        chunks = parts(n * heads * pl.cdiv(members, tile), prompt["k"].shape[2])
    splits = parts(s * heads, columns)
    return _Sizes(members, group, d, chunks, splits, tile, scores)


@functools.partial(jax.jit, static_argnames=("how", "interpret"))
def attend_cache(
    x_nskgh: Array,
    own: dict[str, Array],
    prompt: dict[str, Array] | None,
    turn: Turn,
    reach: Reach,
    *,
    how: Scores,
    interpret: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """A decode step's attention from its product to what the output matrix multiplies.

    The numbers are those of norms, rotation, ``decode.write`` and ``dense.attend_parts`` one after
    the other, up to the order of sums.

    Args:
      x_nskgh: [n, S, K, H / K + 2, h], the queries of a key-value head, its key, its value, in
        parts that are added up, as of ``few_rows``.
      own: "k" and "v" [S, K, C, h] of 16-bit floats, or as int8 with "k_scale" and "v_scale"
        [S, K, 1, C] float32. Written in place where the caller gives it up.
      prompt: the same of N prompts of P columns; row s continues prompt s // (S / N). None for no
        prompts.
      turn: norms and rotation.
      reach: what is seen.
      how: scores are made.
      interpret: runs the kernel's steps as plain JAX, for tests on other platforms.

    Returns:
      The values seen [S, H, h] and ``own`` with the new entries. Zeros for a row that sees nothing.
    """
    pieces, s, heads, per_head, d = x_nskgh.shape
    z = _sizes(x_nskgh, own, prompt, how)
    n, m, parts = s // z.members, z.members, z.chunks + z.splits

    def rows(*shape: int, heads_axis: bool = True) -> pl.BlockSpec:
        """All members of a prompt; of one head."""
        zeros = (0,) * len(shape)
        if heads_axis:
            return pl.BlockSpec((m, None, *shape), lambda i, k, n: (n, k, *zeros))
        return pl.BlockSpec((m, *shape), lambda i, k, n: (n, *zeros))

    def of_prompt(*shape: int) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, None, *shape), lambda i, k, n: (n, k, *zeros))

    def vector(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size,), lambda i, k, n: (0,))

    c = own["k"].shape[2]
    cache_specs = {"k": (c, d), "v": (c, d), "k_scale": (1, c), "v_scale": (1, c)}
    inputs: dict[str, tuple[Any, pl.BlockSpec]] = {
        name: (own[name], rows(*cache_specs[name])) for name in own
    }
    whole = pl.BlockSpec((pieces, m, None, per_head, d), lambda i, k, n: (0, n, k, 0, 0))
    inputs["x"] = x_nskgh, whole
    inputs["cos"] = turn.cos, rows(d // 2, heads_axis=False)
    inputs["sin"] = turn.sin, rows(d // 2, heads_axis=False)
    inputs["columns"] = reach.columns, rows(heads_axis=False)
    inputs["positions"] = reach.positions, rows(heads_axis=False)
    if turn.q_norm is not None:
        assert turn.k_norm is not None
        inputs["q_norm"], inputs["k_norm"] = (
            (turn.q_norm, vector(d)),
            (turn.k_norm, vector(d)),
        )
    if turn.bias is not None:
        spec = pl.BlockSpec((None, per_head, d), lambda i, k, n: (k, 0, 0))
        inputs["bias"] = turn.bias, spec
    if prompt is not None:
        p = prompt["k"].shape[2]
        shapes = {"k": (p, d), "v": (p, d), "k_scale": (1, p), "v_scale": (1, p)}
        inputs |= {f"past_{name}": (prompt[name], of_prompt(*shapes[name])) for name in prompt}
        one = pl.BlockSpec((1,), lambda i, k, n: (n,))
        inputs["lengths"] = reach.lengths, one
        if reach.firsts is not None:
            inputs["firsts"] = reach.firsts, one
    names = list(inputs)
    results: dict[str, tuple[Any, pl.BlockSpec]] = {
        name: (own[name], rows(*cache_specs[name])) for name in own
    }
    values = jax.ShapeDtypeStruct((s, heads, parts, z.group, d), jnp.float32)
    sums = jax.ShapeDtypeStruct((s, heads, parts, z.group), jnp.float32)
    results |= {
        "values": (values, rows(parts, z.group, d)),
        "peak": (sums, rows(parts, z.group)),
        "total": (sums, rows(parts, z.group)),
    }
    out = pl.pallas_call(
        functools.partial(_attend, names=names, results=list(results), z=z),
        grid=(z.chunks * z.tiles + m * z.splits, heads, n),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in results.values()],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results.values()],
        input_output_aliases={names.index(name): i for i, name in enumerate(own)},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="attend_cache",
    )(*(x for x, _ in inputs.values()))
    by_name = dict(zip(results, out, strict=True))
    seen = _merged(by_name["values"], by_name["peak"], by_name["total"])
    seen = seen.reshape(s, heads * z.group, d).astype(how.dtype)
    return seen, {name: by_name[name] for name in own}


def _merged(values: Array, peak: Array, total: Array) -> Array:
    """[S, K, G, h]: the parts of [S, K, parts, G, h] under one softmax.

    Part by part, not by reductions, which would each be a kernel.
    """
    parts = range(peak.shape[2])
    top = functools.reduce(jnp.maximum, [peak[:, :, i] for i in parts])
    shares = [jnp.exp(peak[:, :, i] - top) for i in parts]
    sums = functools.reduce(jnp.add, [total[:, :, i] * shares[i] for i in parts])
    read = functools.reduce(jnp.add, [values[:, :, i] * shares[i][..., None] for i in parts])
    return read / jnp.maximum(sums, 1e-30)[..., None]


# ---------------------------------------------------------------- inside the kernel


def _attend(*refs: Any, names: list[str], results: list[str], z: _Sizes) -> None:
    """One program: some columns of a prompt for several rows, or of one row's own cache."""
    ins = dict(zip(names, refs, strict=False))
    outs = dict(zip(results, refs[len(names) :], strict=True))
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


def _attend_prompt(ins: dict, outs: dict, chunk: Any, tile: Any, z: _Sizes) -> None:
    """Some columns of a prompt, for the queries of ``z.tile`` of its rows."""
    index = jnp.arange(max(_power(z.tile * z.group), _LEAST))
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
        position = plgpu.load(_at(ins["positions"], member))
        oldest = position - z.scores.window + 1
    peak, total, values = _read(q, cache, (), lo, hi, first, length, oldest, z)
    where = member, chunk, g
    plgpu.store(_at(outs["peak"], *where), peak, mask=real)
    plgpu.store(_at(outs["total"], *where), total, mask=real)
    columns = jnp.arange(z.head_dim)[None]
    at = member[:, None], chunk, g[:, None], columns
    plgpu.store(_at(outs["values"], *at), values, mask=real[:, None] & (columns >= 0))


def _attend_own(ins: dict, outs: dict, member: Any, split: Any, z: _Sizes) -> None:
    """Some of a row's own columns; the first split also has the new one, and writes it."""
    g = jnp.arange(max(_power(z.group), _LEAST))
    real = g < z.group
    members = jnp.zeros_like(g) + member
    q = _queries(ins, members, g, real, z)
    column = ins["columns"][member]
    first = 0 if z.scores.window is None else jnp.maximum(column - z.scores.window + 1, 0)
    lo, hi = _share(first, column, split, z.splits)
    cache = {name: ins[name] for name in ("k", "v", "k_scale", "v_scale") if name in ins}
    peak, total, values = _read(q, cache, (member,), lo, hi, first, column, None, z)
    here = (split == 0) & (column >= 0)
    (k1, k2), v, (k_scale, v_scale) = _new_entry(ins, outs, member, column, here, z)
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
    plgpu.store(_at(outs["peak"], *at), top, mask=real)
    plgpu.store(_at(outs["total"], *at), total * old + weight, mask=real)
    columns = jnp.arange(z.head_dim)[None]
    at_values = members[:, None], part, g[:, None], columns
    plgpu.store(_at(outs["values"], *at_values), values, mask=real[:, None] & (columns >= 0))


def _at(ref: Any, *index: Any) -> Any:
    """A place of ``ref``, Python's integers as arrays, which interpreted loads ask for."""
    return ref.at[tuple(jnp.int32(i) if isinstance(i, int) else i for i in index)]


def _share(first: Any, end: Any, part: Any, parts: int) -> tuple[Any, Any]:
    """The blocks of columns [first, end) that one of the parts reads."""
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
    z: _Sizes,
) -> tuple[Array, Array, Array]:
    """Peak [M], total [M] and values [M, h] of a running softmax over blocks lo to hi."""
    m, half, dtype = q[0].shape[0], z.head_dim // 2, q[0].dtype

    def block(j: Any, carry: tuple) -> tuple:
        peak, total, values = carry
        columns = j * COLUMNS + jnp.arange(COLUMNS)
        inside = (columns >= first) & (columns < end)

        def load(name: str, start: int, size: int) -> Array:
            across = start + jnp.arange(size)[None]
            at = _at(cache[name], *row, columns[:, None], across)
            x = plgpu.load(at, mask=inside[:, None] & (across >= 0), other=0)
            return x.astype(dtype)

        scores = plgpu.dot(q[0], load("k", 0, half).T) + plgpu.dot(q[1], load("k", half, half).T)
        scores = scores * z.scores.scale
        if "k_scale" in cache:
            k_scale = plgpu.load(_at(cache["k_scale"], *row, 0, columns), mask=inside, other=0)
            scores = scores * k_scale[None]
        seen = inside[None] if oldest is None else inside[None] & (columns[None] >= oldest[:, None])
        scores = jnp.where(seen, _capped(scores, z), MASKED)
        top = jnp.maximum(peak, scores.max(1))
        weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
        old = jnp.exp(peak - top)
        total = total * old + weights.sum(1)
        if "v_scale" in cache:
            v_scale = plgpu.load(_at(cache["v_scale"], *row, 0, columns), mask=inside, other=0)
            weights = weights * v_scale[None]
        read = plgpu.dot(weights.astype(dtype), load("v", 0, z.head_dim))
        return top, total, values * old[:, None] + read

    begin = (
        jnp.full(m, MASKED, jnp.float32),
        jnp.zeros(m, jnp.float32),
        jnp.zeros((m, z.head_dim), jnp.float32),
    )
    return jax.lax.fori_loop(lo, hi, block, begin)


def _capped(scores: Array, z: _Sizes) -> Array:
    return (
        scores
        if z.scores.softcap is None
        else z.scores.softcap * jnp.tanh(scores / z.scores.softcap)
    )


def _queries(ins: dict, member: Array, g: Array, real: Array, z: _Sizes) -> tuple[Array, Array]:
    """Both halves of some queries [M, h / 2], normalised and rotated."""
    half = z.head_dim // 2
    x1, x2 = (_halves(ins, (member[:, None], g[:, None]), i, real[:, None], z) for i in (0, 1))
    columns = jnp.arange(half)[None]
    cos, sin = (
        plgpu.load(_at(ins[name], member[:, None], columns), mask=real[:, None] & (columns >= 0),
                   other=0)
        for name in ("cos", "sin")
    )  # fmt: skip
    return _turned(ins, "q_norm", x1, x2, cos, sin, z)


def _halves(ins: dict, where: tuple, i: int, real: Any, z: _Sizes) -> Array:
    """One half of some vectors of the product, float32; the last axis has it."""
    half = z.head_dim // 2
    columns = i * half + jnp.arange(half)
    columns = columns[None] if real is not None else columns
    mask = None if real is None else real & (columns >= 0)
    other = None if real is None else 0
    return _product(ins, where, columns, mask, other, z)


def _product(ins: dict, where: tuple, columns: Array, mask: Any, other: Any, z: _Sizes) -> Array:
    """Numbers of the product, its parts added and rounded to activations, and the bias; float32."""
    load = functools.partial(plgpu.load, mask=mask, other=other)
    parts = [load(_at(ins["x"], i, *where, columns)) for i in range(ins["x"].shape[0])]
    x = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(
        z.scores.dtype
    )
    if "bias" in ins:
        x = x + load(_at(ins["bias"], *where[1:], columns)).astype(z.scores.dtype)
    return x.astype(jnp.float32)


def _turned(
    ins: dict, norm: str, x1: Array, x2: Array, cos: Array, sin: Array, z: _Sizes
) -> tuple[Array, Array]:
    """``layers.rms_norm`` and ``layers.rotate`` of vectors in two halves."""
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
    ins: dict, outs: dict, member: Any, column: Any, here: Any, z: _Sizes
) -> tuple[tuple[Array, Array], Array, tuple[Any, Any]]:
    """The token's own key, in halves, and value, float32 as the cache holds them, with scales.

    Written to the cache where ``here`` says so.
    """
    half = z.head_dim // 2
    x1, x2 = (_halves(ins, (member, z.group), i, None, z) for i in (0, 1))
    columns = jnp.arange(half)
    cos, sin = (plgpu.load(_at(ins[name], member, columns)) for name in ("cos", "sin"))
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
    at = jnp.maximum(column, 0)
    stored = outs["k"].dtype
    plgpu.store(_at(outs["k"], member, at, columns), k1.astype(stored), mask=here & (columns >= 0))
    plgpu.store(
        _at(outs["k"], member, at, half + columns), k2.astype(stored), mask=here & (columns >= 0)
    )
    plgpu.store(_at(outs["v"], member, at, whole), v.astype(stored), mask=here & (whole >= 0))
    if "k_scale" in ins:
        plgpu.store(_at(outs["k_scale"], member, 0, at), k_scale, mask=here)
        plgpu.store(_at(outs["v_scale"], member, 0, at), v_scale, mask=here)
    return (k1, k2), v, (k_scale, v_scale)


def _entry_scale(peak: Any) -> Any:
    return jnp.where(peak > 0, peak / 127, 1.0)


def _eighth(x: Array, scale: Any) -> Array:
    return jnp.clip((x / scale + _HALF_EVEN) - _HALF_EVEN, -127, 127)


# ---------------------------------------------------------------- products of few rows

FEW = 64
"""Most rows of a device for which these kernels take less time than XLA's products and sums."""

_WIDE, _DEEP = 64, 128
"""Outputs and inputs of a weight that a program reads at a time."""

_LEAST_DEEP = 64
"""Inputs where ``_DEEP`` does not divide them, and of ``gated``."""

PAIRED = 32
"""Columns of a gate that lie beside those of up; see ``gated``."""

_ENOUGH = 128
"""Programs of a product: about one for each processor of an H100; more parts are only more to add
up."""


class Weight(NamedTuple):
    """A matrix to multiply by.

    Attributes:
      values: [D, N], 16-bit floats, or int8.
      scales: [N] float32 of int8 values; else None.
    """

    values: Array
    scales: Array | None = None


def takes_product(rows: int, inputs: int, outputs: int) -> bool:
    """Whether ``few_rows`` has a kernel for these sizes."""
    return rows <= FEW and inputs % _LEAST_DEEP == 0 and outputs % _WIDE == 0


@functools.partial(jax.jit, static_argnames=("interpret",))
def few_rows(x_sd: Array, weight: Weight, *, interpret: bool = False) -> Array:
    """The product of few rows with a matrix, in parts that whoever reads them adds up.

    Args:
      x_sd: [S, D], 16-bit floats.
      weight: of sizes that ``takes_product``.
      interpret: see ``attend_cache``.

    Returns:
      [n, S, N] float32. A GPU is filled by some hundred programs, so that with few outputs each
      sums a part of the inputs; adding the parts in a kernel of its own would take as long as a
      fifth of the product.
    """
    (s, d), n = x_sd.shape, weight.values.shape[1]
    parts, deep = 1, _DEEP if d % _DEEP == 0 else _LEAST_DEEP
    while n // _WIDE * parts < _ENOUGH and d % (2 * parts * deep) == 0 and parts < 8:
        parts *= 2

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        i, part = pl.program_id(0), pl.program_id(1)
        at = i * _WIDE + jnp.arange(_WIDE)
        sums = _accumulated(x_ref, w_ref, at, part * (d // parts), d // parts, s, deep)
        if weight.scales is not None:
            sums = sums * plgpu.load(_at(refs[0], at))[None]
        rows = jnp.arange(sums.shape[0])[:, None]
        out = _at(refs[-1], part, rows, at[None])
        plgpu.store(out, sums, mask=(rows < s) & (at[None] >= 0))

    scales = [] if weight.scales is None else [weight.scales]
    return pl.pallas_call(
        kernel,
        grid=(n // _WIDE, parts),
        out_shape=jax.ShapeDtypeStruct((parts, s, n), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="few_rows",
    )(x_sd, weight.values, *scales)


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def gated(
    x_sd: Array,
    weight: Weight,
    activation: Callable[[Array], Array],
    *,
    interpret: bool = False,
) -> Array:
    """activation(x @ gate) * (x @ up) of few rows.

    Args:
      x_sd: [S, D], 16-bit floats.
      weight: [D, 2 F], ``PAIRED`` columns of the gate and those of up, in turn, so that a program
        reads whole lines of memory and has both; ``takes_product`` holds for 2 F.
      activation: of the gate.
      interpret: see ``attend_cache``.

    Returns:
      [S, F] in the dtype of ``x_sd``.
    """
    (s, d), f = x_sd.shape, weight.values.shape[1] // 2
    dtype = x_sd.dtype

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        i = pl.program_id(0)
        at = i * 2 * PAIRED + jnp.arange(2 * PAIRED)
        sums = _accumulated(x_ref, w_ref, at, 0, d, s, _LEAST_DEEP)
        if weight.scales is not None:
            sums = sums * plgpu.load(_at(refs[0], at))[None]
        pair = sums.reshape(-1, 2, PAIRED)
        second = jax.lax.broadcasted_iota(jnp.int32, pair.shape, 1)
        gate, up = (jnp.where(second == n, pair, 0.0).sum(1) for n in (0, 1))
        gate, up = (x.astype(dtype).astype(jnp.float32) for x in (gate, up))
        gate = activation(gate).astype(dtype).astype(jnp.float32)
        rows = jnp.arange(gate.shape[0])[:, None]
        columns = i * PAIRED + jnp.arange(PAIRED)[None]
        out = _at(refs[-1], rows, columns)
        plgpu.store(out, (gate * up).astype(dtype), mask=(rows < s) & (columns >= 0))

    scales = [] if weight.scales is None else [weight.scales]
    return pl.pallas_call(
        kernel,
        grid=(f // PAIRED,),
        out_shape=jax.ShapeDtypeStruct((s, f), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=5),
        interpret=interpret,
        name="gated",
    )(x_sd, weight.values, *scales)


def _accumulated(
    x_ref: Any, w_ref: Any, columns: Array, start: Any, inputs: int, s: int, deep: int
) -> Array:
    """Sums over some inputs of x times some columns of the weight, [S or more, n]."""
    rows = jnp.arange(max(_power(s), _LEAST))[:, None]

    def block(j: Any, sums: Array) -> Array:
        at = start + j * deep + jnp.arange(deep)
        x = plgpu.load(_at(x_ref, rows, at[None]), mask=(rows < s) & (at[None] >= 0), other=0)
        w = plgpu.load(_at(w_ref, at[:, None], columns[None])).astype(x.dtype)
        return sums + plgpu.dot(x, w)

    begin = jnp.zeros((rows.shape[0], columns.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, inputs // deep, block, begin)


# ---------------------------------------------------------------- residuals


@functools.partial(jax.jit, static_argnames=("eps", "plus_one", "interpret"))
def added_norm(
    x_sd: Array,
    out_nsd: Array,
    weight: Array,
    *,
    eps: float,
    plus_one: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """``x + out`` and the norm of that, as ``layers.rms_norm`` has it.

    Args:
      x_sd: [S, D].
      out_nsd: [n, S, D], parts that are added up and rounded to the dtype of ``x_sd``.
      weight: [D].
      eps: of the norm.
      plus_one: whether it multiplies by 1 + weight.
      interpret: see ``attend_cache``.
    """
    s, d = x_sd.shape
    wide, parts = _power(d), out_nsd.shape[0]

    def kernel(x_ref: Any, out_ref: Any, w_ref: Any, sum_ref: Any, normed_ref: Any) -> None:
        columns = jnp.arange(wide)
        mask = columns < d

        def read(ref: Any, *lead: int) -> Array:
            return plgpu.load(_at(ref, *lead, columns), mask=mask, other=0)

        out = [read(out_ref, i, 0).astype(jnp.float32) for i in range(parts)]
        x = read(x_ref, 0) + functools.reduce(jnp.add, out).astype(x_sd.dtype)
        plgpu.store(_at(sum_ref, 0, columns), x, mask=mask)
        x32, w = x.astype(jnp.float32), read(w_ref).astype(jnp.float32)
        scale = jax.lax.rsqrt((x32 * x32).sum(0) / d + eps)
        normed = (x32 * scale * (1.0 + w if plus_one else w)).astype(x.dtype)
        plgpu.store(_at(normed_ref, 0, columns), normed, mask=mask)

    row = pl.BlockSpec((1, d), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((s, d), x_sd.dtype)
    out_spec = pl.BlockSpec((parts, 1, d), lambda i: (0, i, 0))
    return pl.pallas_call(
        kernel,
        grid=(s,),
        in_specs=[row, out_spec, pl.BlockSpec((d,), lambda i: (0,))],
        out_specs=[row, row],
        out_shape=[shape, shape],
        compiler_params=plgpu.CompilerParams(num_warps=4 if wide <= 4096 else 8),
        interpret=interpret,
        name="added_norm",
    )(x_sd, out_nsd, weight)


# ---------------------------------------------------------------- the draw

BLOCK, BLOCKS = 64, 64
"""Tokens whose weights are summed together, and such blocks of one program."""


@functools.partial(jax.jit, static_argnames=("interpret",))
def block_sums(
    logits_sv: Array, temperature: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Sums of exponentials over blocks of tokens: what a draw needs of the whole vocabulary.

    Args:
      logits_sv: [S, V] float32.
      temperature: [S] float32; 0 counts the tokens of the largest logit in place of exponentials.
      interpret: see ``attend_cache``.

    Returns:
      [S, n] float32, the largest scaled logit of each ``BLOCK * BLOCKS`` tokens; and [S, n, BLOCKS]
      float32, sums of exp(logit / temperature - that) over each ``BLOCK``.
    """
    s, v = logits_sv.shape
    n = pl.cdiv(v, BLOCK * BLOCKS)

    def kernel(x_ref: Any, t_ref: Any, peak_ref: Any, sum_ref: Any) -> None:
        start = pl.program_id(1) * (BLOCK * BLOCKS)
        block = jax.lax.broadcasted_iota(jnp.int32, (BLOCKS, BLOCK), 0)
        token = start + block * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (BLOCKS, BLOCK), 1)
        x = plgpu.load(_at(x_ref, 0, token), mask=token < v, other=-jnp.inf)
        t = t_ref[0]
        scaled = x / jnp.where(t <= 0, 1.0, t)
        # Finite, so that tokens that are all forbidden weigh nothing.
        peak = jnp.maximum(scaled.max(1).max(0), MASKED)
        weights = jnp.where(t <= 0, (scaled == peak).astype(jnp.float32), jnp.exp(scaled - peak))
        peak_ref[0, 0] = peak
        plgpu.store(_at(sum_ref, 0, 0, jnp.arange(BLOCKS)), weights.sum(1))

    return tuple(
        pl.pallas_call(
            kernel,
            grid=(s, n),
            in_specs=[
                pl.BlockSpec((1, v), lambda i, j: (i, 0)),
                pl.BlockSpec((1,), lambda i, j: (i,)),
            ],
            out_specs=[
                pl.BlockSpec((1, 1), lambda i, j: (i, j)),
                pl.BlockSpec((1, 1, BLOCKS), lambda i, j: (i, j, 0)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct((s, n), jnp.float32),
                jax.ShapeDtypeStruct((s, n, BLOCKS), jnp.float32),
            ],
            compiler_params=plgpu.CompilerParams(num_warps=4),
            interpret=interpret,
            name="block_sums",
        )(logits_sv, temperature)
    )


@functools.partial(jax.jit, static_argnames=("interpret",))
def pick(
    uniform: Array,
    logits_sv: Array,
    temperature: Array,
    peaks: Array,
    sums: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The token of each row where the running sum of weights passes its random number.

    Args:
      uniform: [S] float32 in [0, 1).
      logits_sv: [S, V] float32.
      temperature: [S] float32; 0 takes the first of the largest.
      peaks: of ``block_sums``.
      sums: of ``block_sums``.
      interpret: see ``attend_cache``.

    Returns:
      tokens [S] int32 and their log-probabilities [S] float32, nats; see ``params.sample``.
    """
    (s, v), n = logits_sv.shape, peaks.shape[1]
    wide = _power(n)

    def kernel(*refs: Any) -> None:
        u_ref, x_ref, t_ref, peak_ref, sum_ref, token_ref, logprob_ref = refs
        t = t_ref[0]
        cold = t <= 0
        chunk = jnp.arange(wide)
        local = plgpu.load(_at(peak_ref, 0, chunk), mask=chunk < n, other=MASKED)
        peak = local.max(0)
        share = jnp.where(cold, (local == peak).astype(jnp.float32), jnp.exp(local - peak))
        share = jnp.where(chunk < n, share, 0.0)
        rows = jax.lax.broadcasted_iota(jnp.int32, (wide, BLOCKS), 0)
        blocks = jax.lax.broadcasted_iota(jnp.int32, (wide, BLOCKS), 1)
        mass = plgpu.load(_at(sum_ref, 0, rows, blocks), mask=rows < n, other=0.0) * share[:, None]
        of_chunks = mass.sum(1)
        total = of_chunks.sum(0)
        left = jnp.where(cold, 0.0, u_ref[0] * total)
        at_chunk, left = _inverted(left, of_chunks)
        inside = jnp.where(rows == at_chunk, mass, 0.0).sum(0)
        at_block, left = _inverted(left, inside)
        first = (at_chunk * BLOCKS + at_block) * BLOCK
        index = jnp.arange(BLOCK)
        x = plgpu.load(_at(x_ref, 0, first + index), mask=first + index < v, other=-jnp.inf)
        scaled = x / jnp.where(cold, 1.0, t)
        weights = jnp.where(cold, (scaled == peak).astype(jnp.float32), jnp.exp(scaled - peak))
        at_token, _ = _inverted(left, weights)
        chosen = jnp.where(index == at_token, scaled, -jnp.inf).max(0)
        token_ref[0] = first + at_token
        logprob_ref[0] = jnp.where(cold, 0.0, chosen - peak - jnp.log(total))

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda i: (i, *(0,) * len(shape)))

    return tuple(
        pl.pallas_call(
            kernel,
            grid=(s,),
            in_specs=[row(), row(v), row(), row(n), row(n, BLOCKS)],
            out_specs=[row(), row()],
            out_shape=[
                jax.ShapeDtypeStruct((s,), jnp.int32),
                jax.ShapeDtypeStruct((s,), jnp.float32),
            ],
            compiler_params=plgpu.CompilerParams(num_warps=4),
            interpret=interpret,
            name="pick",
        )(uniform, logits_sv, temperature, peaks, sums)
    )


def _inverted(target: Any, mass: Array) -> tuple[Any, Any]:
    """``params._invert`` of one row: the entry where the running sum passes, and what is left."""
    index, above = jnp.arange(mass.shape[0]), jnp.cumsum(mass)
    last = jnp.where(mass > 0, index, 0).max(0)
    passed = jnp.minimum((above <= target).astype(jnp.int32).sum(0), last)
    # A target that lands in an empty entry by rounding moves to the next one with mass.
    at = jnp.where((mass > 0) & (index >= passed), index, last).min(0)
    below = jnp.where(index == at, above - mass, 0.0).sum(0)
    return at, jnp.maximum(target - below, 0.0)
