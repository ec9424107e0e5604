"""All of a layer's attention in a token step, between its two products.

Norms and rotation of queries and keys, the new entry of the cache, and the values seen of the
prompt's and the row's own keys. Only columns that a query sees are read.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jrl.models.gpu_kernels.attention_program import COLUMNS, Scores, Sizes, attend
from jrl.types import Array

WARPS, STAGES = 2, 3
"""Warps of a program, and blocks of columns under way. Measured on an H200, with ``COLUMNS``,
beside 16 to 128 columns, 1 to 8 warps, and 2 to 6 blocks."""

QUERIES = 64
"""Most queries of a program: more would spill the sums of their values."""

PROGRAMS = 528
"""Programs that fill a GPU: four for each of the 132 processors of an H100."""


class Rotation(NamedTuple):
    """Norms and rotation that turn a layer's products into queries, keys and values.

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


def _sizes(x: Array, rows: dict, prompt: dict | None, scores: Scores) -> Sizes:
    _, s, heads, per_head, d = x.shape
    group, columns = per_head - 2, rows["k"].shape[2]
    n = s if prompt is None else prompt["k"].shape[0]
    members = s // n
    # As many rows of a prompt in a program as its registers hold sums for.
    tile = min(members, max(QUERIES // group, 1))

    def parts(programs: int, columns: int) -> int:
        # More parts than fill the GPU are only more to merge; each has two blocks of columns.
        count = min(pl.cdiv(PROGRAMS, programs), 8)
        return max(min(count, columns // (2 * COLUMNS)), 1)

    chunks = 0
    if prompt is not None:
        chunks = parts(n * heads * pl.cdiv(members, tile), prompt["k"].shape[2])
    splits = parts(s * heads, columns)
    return Sizes(members, group, d, chunks, splits, tile, scores)


@functools.partial(jax.jit, static_argnames=("how", "interpret"))
def attend_cache(
    x_nskgh: Array,
    row_cache: dict[str, Array],
    prompt: dict[str, Array] | None,
    turn: Rotation,
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
      row_cache: "k" and "v" [S, K, C, h] of 16-bit floats, or as int8 with "k_scale" and "v_scale"
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
    _, s, heads, _, d = x_nskgh.shape
    z = _sizes(x_nskgh, row_cache, prompt, how)
    n, m, parts = s // z.members, z.members, z.chunks + z.splits
    # Blocks are whole along the columns. A program loads the few that it needs by their places;
    # Pallas itself moves nothing.
    cache: Placed = {name: (x, _of_members(m, *x.shape[2:])) for name, x in row_cache.items()}
    inputs = cache | _inputs(x_nskgh, prompt, turn, reach, m)
    names = list(inputs)
    values = jax.ShapeDtypeStruct((s, heads, parts, z.group, d), jnp.float32)
    sums = jax.ShapeDtypeStruct((s, heads, parts, z.group), jnp.float32)
    results = cache | {
        "values": (values, _of_members(m, parts, z.group, d)),
        "peak": (sums, _of_members(m, parts, z.group)),
        "total": (sums, _of_members(m, parts, z.group)),
    }
    out = pl.pallas_call(
        functools.partial(attend, names=names, results=list(results), z=z),
        # Programs of one prompt and head follow each other, and find its columns in the L2 cache.
        grid=(z.chunks * z.tiles + m * z.splits, heads, n),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in results.values()],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results.values()],
        # In place: as results of their own, all caches would be copied with every token.
        input_output_aliases={names.index(name): i for i, name in enumerate(row_cache)},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="attend_cache",
    )(*(x for x, _ in inputs.values()))
    by_name = dict(zip(results, out, strict=True))
    attended = _merged(by_name["values"], by_name["peak"], by_name["total"])
    attended = attended.reshape(s, heads * z.group, d).astype(how.dtype)
    return attended, {name: by_name[name] for name in row_cache}


Placed = dict[str, tuple[Any, pl.BlockSpec]]
"""Arrays of the kernel by name, each with its blocks; a program is (part, head, prompt)."""


def _of_members(m: int, *shape: int, by_head: bool = True) -> pl.BlockSpec:
    """Blocks of all ``m`` members of a prompt; of one head, or of arrays without heads."""
    zeros = (0,) * len(shape)
    if by_head:
        return pl.BlockSpec((m, None, *shape), lambda i, k, n: (n, k, *zeros))
    return pl.BlockSpec((m, *shape), lambda i, k, n: (n, *zeros))


def _inputs(
    x_nskgh: Array, prompt: dict[str, Array] | None, turn: Rotation, reach: Reach, m: int
) -> Placed:
    """What the kernel reads beside the rows' cache; ``m`` is the members of a prompt."""
    pieces, _, _, per_head, d = x_nskgh.shape
    inputs: Placed = {
        "x": (
            x_nskgh,
            pl.BlockSpec((pieces, m, None, per_head, d), lambda i, k, n: (0, n, k, 0, 0)),
        ),
        "cos": (turn.cos, _of_members(m, d // 2, by_head=False)),
        "sin": (turn.sin, _of_members(m, d // 2, by_head=False)),
        "columns": (reach.columns, _of_members(m, by_head=False)),
        "positions": (reach.positions, _of_members(m, by_head=False)),
    }
    if turn.q_norm is not None:
        assert turn.k_norm is not None
        vector = pl.BlockSpec((d,), lambda i, k, n: (0,))
        inputs |= {"q_norm": (turn.q_norm, vector), "k_norm": (turn.k_norm, vector)}
    if turn.bias is not None:
        spec = pl.BlockSpec((None, per_head, d), lambda i, k, n: (k, 0, 0))
        inputs["bias"] = turn.bias, spec
    if prompt is not None:

        def of_prompt(*shape: int) -> pl.BlockSpec:
            zeros = (0,) * len(shape)
            return pl.BlockSpec((None, None, *shape), lambda i, k, n: (n, k, *zeros))

        inputs |= {f"past_{name}": (x, of_prompt(*x.shape[2:])) for name, x in prompt.items()}
        one = pl.BlockSpec((1,), lambda i, k, n: (n,))
        inputs["lengths"] = reach.lengths, one
        if reach.firsts is not None:
            inputs["firsts"] = reach.firsts, one
    return inputs


def _merged(values: Array, peak: Array, total: Array) -> Array:
    """[S, K, G, h]: the parts of [S, K, parts, G, h] under one softmax.

    Part by part, not by reductions, which would each be a kernel.
    """
    # A row that sees nothing in a part has its peak at the mask and weighs nothing here.
    parts = range(peak.shape[2])
    top = functools.reduce(jnp.maximum, [peak[:, :, i] for i in parts])
    shares = [jnp.exp(peak[:, :, i] - top) for i in parts]
    sums = functools.reduce(jnp.add, [total[:, :, i] * shares[i] for i in parts])
    read = functools.reduce(jnp.add, [values[:, :, i] * shares[i][..., None] for i in parts])
    return read / jnp.maximum(sums, 1e-30)[..., None]
