"""Attention by NVIDIA's cuDNN, through JAX."""

from __future__ import annotations

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.models.matmul import ATTENDED
from jrl.types import Array

try:  # jax.nn has neither the sums in float32 nor a gradient of a part
    from jax._src.cudnn import fused_attention_stablehlo as fused
except ImportError:  # see ``continues``
    fused = None  # type: ignore[assignment]

Keys = tuple[Array, Array]
"""Keys and values."""


def cudnn(
    q_bqhd: Array,
    k_bkcd: Array,
    v_bkcd: Array,
    *,
    scale: float,
    mask: Array | None = None,
    lengths: Array | None = None,
    implementation: str = "cudnn",
) -> Array:
    """``attend`` by cuDNN through ``jax.nn.dot_product_attention``.

    Keys that rows share are given to it once for each row; of one segment, see ``continued``.

    Args:
      q_bqhd: [B, Q, H, h], bfloat16 or float16.
      k_bkcd: [B, K, C, h].
      v_bkcd: [B, K, C, h].
      scale: what scores are multiplied by.
      mask: [B, Q, C] bool, True where visible; it takes two bytes a number.
      lengths: [B] int32, instead of a mask: how many keys count; a query sees those at its own
        column and before it.
      implementation: "xla" computes the same without cuDNN.

    Returns:
      [B, Q, H, h]. What a query that sees nothing gets has no meaning.
    """
    q = q_bqhd.shape[1]
    k, v = k_bkcd.transpose(0, 2, 1, 3), v_bkcd.transpose(0, 2, 1, 3)
    call = functools.partial(
        jax.nn.dot_product_attention, scale=scale, implementation=implementation
    )
    if lengths is not None:
        return call(q_bqhd, k, v, is_causal=True, key_value_seq_lengths=lengths)
    assert mask is not None, "a mask or lengths"
    even = lambda x, *axes: jnp.pad(  # noqa: E731
        x, [(0, x.shape[i] % 2 if i in axes else 0) for i in range(x.ndim)]
    )
    # With a mask it takes an even number of queries and of keys.
    out = call(even(q_bqhd, 1), even(k, 1), even(v, 1), mask=even(mask, 1, 2)[:, None])
    return out[:, :q]


class Lengths(NamedTuple):
    """Lengths of rows that each continue a prompt.

    Attributes:
      before: [M] int32, tokens of each prompt that count; may be 0.
      rows: [R] int32, tokens of each row, from column 0.
    """

    before: Array
    rows: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def continued(scale: float, q_rchd: Array, before: Keys, rows: Keys, lengths: Lengths) -> Array:
    """Attention of rows that each continue a prompt, without a mask and without a copy of prompts.

    All rows of a prompt look at it together, and each at itself, up to its own column. Both results
    are merged by the logarithms of their sums, and both backward passes get the sums of the whole:
    with those, and the whole result, cuDNN's gradients of a part are exact. The ring attention of
    Transformer Engine (its ``context_parallel.py``) asks cuDNN for them the same way.

    Args:
      scale: what scores are multiplied by.
      q_rchd: [R, C, H, h], bfloat16 or float16.
      before: [M, K, P, h] twice, prompts, of R / M rows each, one after the other.
      rows: [R, K, C, h] twice.
      lengths: see ``Lengths``.

    Returns:
      [R, C, H, h]. What a query behind its row's end gets has no meaning.
    """
    return _continued_forward(scale, q_rchd, before, rows, lengths)[0]


def _continued_forward(
    scale: float, q_rchd: Array, before: Keys, rows: Keys, lengths: Lengths
) -> tuple[Array, tuple]:
    blocks = before[0].shape[0]
    ahead, log_ahead = forward(scale, _together(q_rchd, blocks), before, lengths.before, False)
    itself, log_itself = forward(scale, q_rchd, rows, lengths.rows, True)
    exists = jnp.repeat(lengths.before > 0, q_rchd.shape[0] // blocks)[:, None, None]
    log_ahead = jnp.where(exists, _logs_apart(log_ahead, q_rchd), -jnp.inf)
    log_whole = jnp.logaddexp(log_ahead, log_itself)

    shares = [jnp.exp(x - log_whole).transpose(0, 2, 1) for x in (log_ahead, log_itself)]
    # Made first, or XLA makes each share again for all numbers of a head.
    shares = jax.lax.optimization_barrier(shares)
    parts = zip((ahead.reshape(itself.shape), itself), shares, strict=True)
    out = functools.reduce(
        jnp.add, (x.astype(jnp.float32) * share[..., None] for x, share in parts)
    )
    # Named, so that rematerialisation keeps these two, and neither part.
    out = checkpoint_name(out.astype(q_rchd.dtype), ATTENDED)
    log_whole = checkpoint_name(log_whole, ATTENDED)
    return out, (q_rchd, before, rows, lengths, out, log_whole)


def _continued_backward(scale: float, residuals: tuple, g_rchd: Array) -> tuple:
    q_rchd, before, rows, lengths, out, log_whole = residuals
    blocks = before[0].shape[0]
    q, whole, g = (_together(x, blocks) for x in (q_rchd, out, g_rchd))
    logs = _logs_together(log_whole, blocks)
    dq, *of_before = backward(scale, q, whole, g, logs, before, lengths.before, False)
    dq_own, *of_own = backward(scale, q_rchd, out, g_rchd, log_whole, rows, lengths.rows, True)
    # Of a prompt without tokens cuDNN was shown one.
    exists = (lengths.before > 0)[:, None, None, None]
    dq, *of_before = (jnp.where(exists, x, 0) for x in (dq, *of_before))
    return dq.reshape(dq_own.shape) + dq_own, tuple(of_before), tuple(of_own), None


continued.defvjp(_continued_forward, _continued_backward)


def _together(x_rchd: Array, blocks: int) -> Array:
    """[M, R / M * C, H, h], the rows of a prompt one after the other."""
    return x_rchd.reshape(blocks, -1, *x_rchd.shape[2:])


def _logs_apart(x_mhn: Array, q_rchd: Array) -> Array:
    """[R, H, C] of logarithms [M, H, R / M * C]."""
    rows, columns, heads = q_rchd.shape[:3]
    x_mhrc = x_mhn.reshape(x_mhn.shape[0], heads, -1, columns)
    return x_mhrc.transpose(0, 2, 1, 3).reshape(rows, heads, columns)


def _logs_together(x_rhc: Array, blocks: int) -> Array:
    """Its inverse."""
    _, heads, columns = x_rhc.shape
    x_mrhc = x_rhc.reshape(blocks, -1, heads, columns)
    return x_mrhc.transpose(0, 2, 1, 3).reshape(blocks, heads, -1)


# ---------------------------------------------------------------- what jax.nn does not show


def forward(
    scale: float, q_bqhd: Array, keys: Keys, lengths: Array, causal: bool
) -> tuple[Array, Array]:
    """CuDNN's result [B, Q, H, h], and the logarithms of the sums, [B, H, Q] float32.

    ``jax.nn`` rounds these to the dtype of the queries.

    Args:
      scale: what scores are multiplied by.
      q_bqhd: [B, Q, H, h].
      keys: [B, K, C, h] twice.
      lengths: [B] int32, how many keys count; where it is 0 the first one does.
      causal: whether a query sees those up to its own column alone.
    """
    k, v = (x.transpose(0, 2, 1, 3) for x in keys)
    of_queries, of_keys = _lengths(q_bqhd, lengths)
    return fused.dot_product_attention(
        q_bqhd,
        k,
        v,
        q_seqlen=of_queries,
        kv_seqlen=of_keys,
        scale=scale,
        mask_type=_mask(causal),
        return_residual=True,
    )


def backward(
    scale: float,
    q_bqhd: Array,
    out_bqhd: Array,
    g_bqhd: Array,
    logs_bhq: Array,
    keys: Keys,
    lengths: Array,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, whose layouts they have.

    Args:
      scale: as before, and so are the others.
      q_bqhd: queries.
      out_bqhd: the result, of these and any other keys.
      g_bqhd: its gradient.
      logs_bhq: logarithms of the sums, over all those keys.
      keys: the keys and values to get the gradients of.
      lengths: of them.
      causal: as before.
    """
    k, v = (x.transpose(0, 2, 1, 3) for x in keys)
    unused = jnp.zeros(0, q_bqhd.dtype)
    # Offsets of packed rows, and tables of pages, of which there are none.
    inputs = (q_bqhd, k, v, unused, *_lengths(q_bqhd, lengths), *[unused] * 4)
    residuals = (*inputs, *([()] if "score_mod" in _RULE else []), logs_bhq, out_bqhd)
    values = _OPTIONS | {"scale": scale, "mask_type": _mask(causal), "res": residuals}
    values["grad_output"] = g_bqhd
    rule = fused._dot_product_attention_bwd_rule
    dq, dk, dv, *_ = rule(*(values[name] for name in _RULE))
    return dq, dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


_RULE = tuple(inspect.signature(fused._dot_product_attention_bwd_rule).parameters) if fused else ()
"""Arguments of JAX's own gradient, which differ between its releases."""

_OPTIONS = {
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),
    "layout": fused.AttentionLayout.BTNH.value if fused else 0,
    "sliding_window_length": None,
    "is_training": True,
    "return_residual": False,
    "score_mod": None,  # from JAX 0.12 on, and so is the next, which it does not read
    "cudnn_version": None,
}
"""Their values here, except those that differ between calls."""


def continues() -> bool:
    """Whether this release of JAX lets ``continued`` have a gradient."""
    return bool(_RULE) and set(_RULE) <= {*_OPTIONS, "scale", "mask_type", "res", "grad_output"}


def _mask(causal: bool) -> fused.MaskType:
    return fused.MaskType.PADDING_CAUSAL if causal else fused.MaskType.PADDING


def _lengths(q_bqhd: Array, lengths: Array) -> tuple[Array, Array]:
    """Lengths of queries and keys in cuDNN's form."""
    return jnp.full(q_bqhd.shape[0], q_bqhd.shape[1], jnp.int32), jnp.maximum(lengths, 1)
