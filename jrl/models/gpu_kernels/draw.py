"""The draw of a token from logits over a vocabulary, in two kernels for GPUs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jrl.models.attention.dense import MASKED
from jrl.models.gpu_kernels.common import place, power
from jrl.types import Array

BLOCK, BLOCKS = 64, 64
"""Tokens whose weights are summed together, and such blocks of one program."""


@functools.partial(jax.jit, static_argnames=("interpret",))
def block_sums(
    logits_sv: Array, temperature: Array, least: Array | None = None, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Sums of exponentials over blocks of tokens: what a draw needs of the whole vocabulary.

    Args:
      logits_sv: [S, V] float32.
      temperature: [S] float32; 0 counts the tokens of the largest logit in place of exponentials.
      least: [S] float32, the smallest logit that counts, of ``least_kept``; None for all.
      interpret: see ``attend_cache``.

    Returns:
      [S, n] float32, the largest scaled logit of each ``BLOCK * BLOCKS`` tokens; and [S, n, BLOCKS]
      float32, sums of exp(logit / temperature - that) over each ``BLOCK``.
    """
    s, v = logits_sv.shape
    n, each = pl.cdiv(v, BLOCK * BLOCKS), () if least is None else (least,)

    def kernel(x_ref: Any, t_ref: Any, *refs: Any) -> None:
        *least_ref, peak_ref, sum_ref = refs
        # Sums over each 64 tokens tell later where to look: the draw then reads 64 logits of V.
        start = pl.program_id(1) * (BLOCK * BLOCKS)
        block = jax.lax.broadcasted_iota(jnp.int32, (BLOCKS, BLOCK), 0)
        token = start + block * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (BLOCKS, BLOCK), 1)
        x = plgpu.load(place(x_ref, 0, token), mask=token < v, other=-jnp.inf)
        t = t_ref[0]
        scaled = x / jnp.where(t <= 0, 1.0, t)
        # Finite, so that tokens that are all forbidden weigh nothing.
        peak = jnp.maximum(scaled.max(1).max(0), MASKED)
        weights = jnp.where(t <= 0, (scaled == peak).astype(jnp.float32), jnp.exp(scaled - peak))
        weights = _truncated(weights, x, least_ref)
        peak_ref[0, 0] = peak
        plgpu.store(place(sum_ref, 0, 0, jnp.arange(BLOCKS)), weights.sum(1))

    return tuple(
        pl.pallas_call(
            kernel,
            grid=(s, n),
            in_specs=[
                pl.BlockSpec((1, v), lambda i, j: (i, 0)),
                *(pl.BlockSpec((1,), lambda i, j: (i,)) for _ in (temperature, *each)),
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
        )(logits_sv, temperature, *each)
    )


@functools.partial(jax.jit, static_argnames=("interpret",))
def pick(
    uniform: Array,
    logits_sv: Array,
    temperature: Array,
    peaks: Array,
    sums: Array,
    least: Array | None = None,
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
      least: as ``block_sums`` had it.
      interpret: see ``attend_cache``.

    Returns:
      tokens [S] int32 and their log-probabilities [S] float32, nats; see ``params.sample``.
    """
    (s, v), n, each = logits_sv.shape, peaks.shape[1], () if least is None else (least,)
    wide = power(n)

    def kernel(*refs: Any) -> None:
        u_ref, x_ref, t_ref, peak_ref, sum_ref, *least_ref, token_ref, logprob_ref = refs
        t = t_ref[0]
        cold = t <= 0
        # Peaks of chunks differ, so their sums are brought to the largest of the row first.
        chunk = jnp.arange(wide)
        local = plgpu.load(place(peak_ref, 0, chunk), mask=chunk < n, other=MASKED)
        peak = local.max(0)
        share = jnp.where(cold, (local == peak).astype(jnp.float32), jnp.exp(local - peak))
        share = jnp.where(chunk < n, share, 0.0)
        rows = jax.lax.broadcasted_iota(jnp.int32, (wide, BLOCKS), 0)
        blocks = jax.lax.broadcasted_iota(jnp.int32, (wide, BLOCKS), 1)
        mass = (
            plgpu.load(place(sum_ref, 0, rows, blocks), mask=rows < n, other=0.0) * share[:, None]
        )
        of_chunks = mass.sum(1)
        total = of_chunks.sum(0)
        left = jnp.where(cold, 0.0, u_ref[0] * total)
        # From coarse to fine, chunk, block and token, each with what is left of the target.
        at_chunk, left = _inverted(left, of_chunks)
        inside = jnp.where(rows == at_chunk, mass, 0.0).sum(0)
        at_block, left = _inverted(left, inside)
        first = (at_chunk * BLOCKS + at_block) * BLOCK
        index = jnp.arange(BLOCK)
        x = plgpu.load(place(x_ref, 0, first + index), mask=first + index < v, other=-jnp.inf)
        scaled = x / jnp.where(cold, 1.0, t)
        # Over the row's peak here and the chunk's there: the same but for rounding, which
        # ``_inverted`` is safe from.
        weights = jnp.where(cold, (scaled == peak).astype(jnp.float32), jnp.exp(scaled - peak))
        at_token, _ = _inverted(left, _truncated(weights, x, least_ref))
        chosen = jnp.where(index == at_token, scaled, -jnp.inf).max(0)
        token_ref[0] = first + at_token
        # Over the sum of what is kept, as the plain functions report it; a greedy token is certain.
        logprob_ref[0] = jnp.where(cold, 0.0, chosen - peak - jnp.log(total))

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda i: (i, *(0,) * len(shape)))

    return tuple(
        pl.pallas_call(
            kernel,
            grid=(s,),
            in_specs=[row(), row(v), row(), row(n), row(n, BLOCKS), *(row() for _ in each)],
            out_specs=[row(), row()],
            out_shape=[
                jax.ShapeDtypeStruct((s,), jnp.int32),
                jax.ShapeDtypeStruct((s,), jnp.float32),
            ],
            compiler_params=plgpu.CompilerParams(num_warps=4),
            interpret=interpret,
            name="pick",
        )(uniform, logits_sv, temperature, peaks, sums, *each)
    )


def _truncated(weights: Array, logits: Array, least_ref: Sequence[Any]) -> Array:
    """The weights of tokens that no truncation leaves out, 0 for the others."""
    return jnp.where(logits >= least_ref[0][0], weights, 0.0) if least_ref else weights


def _inverted(target: Any, mass: Array) -> tuple[Any, Any]:
    """``params._invert`` of one row: the entry where the running sum passes, and what is left."""
    index, above = jnp.arange(mass.shape[0]), jnp.cumsum(mass)
    last = jnp.where(mass > 0, index, 0).max(0)
    passed = jnp.minimum((above <= target).astype(jnp.int32).sum(0), last)
    # A target that lands in an empty entry by rounding moves to the next one with mass.
    at = jnp.where((mass > 0) & (index >= passed), index, last).min(0)
    below = jnp.where(index == at, above - mass, 0.0).sum(0)
    return at, jnp.maximum(target - below, 0.0)
