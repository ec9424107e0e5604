"""Attention by NVIDIA's cuDNN, through JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jrl.types import Array

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

    The logarithms of sums that it returns besides are rounded and have no gradient, so that two
    results cannot be merged: keys that rows share are given to it once for each row.

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


def continued(
    q_rchd: Array,
    before: Keys,
    own: Keys,
    before_lengths: Array,
    lengths: Array,
    *,
    scale: float,
    implementation: str = "cudnn",
) -> Array:
    """The same of rows that each continue a prompt, without a mask, which grows with their square.

    Each row is put behind the end of its prompt, so that a query sees the columns up to its own.

    Args:
      q_rchd: [R, C, H, h].
      before: [B, K, P, h] twice, prompts, of R / B rows each.
      own: [R, K, C, h] twice.
      before_lengths: [R] int32, tokens of a row's prompt that count.
      lengths: [R] int32, tokens of a row, from column 0.
      scale: what scores are multiplied by.
      implementation: see ``cudnn``.

    Returns:
      [R, C, H, h]. What a query behind its row's end gets has no meaning.
    """
    rows, c = q_rchd.shape[:2]
    p = before[0].shape[2]
    inside = (jnp.arange(p)[None] < before_lengths[:, None])[:, :, None, None]

    def behind(x_rckh: Array, prompt_rpkh: Array | None) -> Array:
        start = jnp.zeros((rows, p, *x_rckh.shape[2:]), x_rckh.dtype)
        moved = _rolled(jnp.concatenate([x_rckh, start], axis=1), before_lengths)
        if prompt_rpkh is None:
            return moved
        first = jnp.where(inside, prompt_rpkh, moved[:, :p])
        return jnp.concatenate([first, moved[:, p:]], axis=1)

    by_token = lambda x: x.transpose(0, 2, 1, 3)  # noqa: E731
    prompts = (jnp.repeat(by_token(x), rows // x.shape[0], axis=0) for x in before)
    k, v = (behind(by_token(x), prompt) for x, prompt in zip(own, prompts, strict=True))
    keys = [by_token(x) for x in (k, v)]
    # Of a row without any token a query must see something, or the result is no number.
    in_all = jnp.maximum(before_lengths + lengths, 1)
    q = behind(q_rchd, None)
    out = cudnn(q, *keys, scale=scale, lengths=in_all, implementation=implementation)
    return _rolled(out, -before_lengths)[:, :c]


@jax.custom_vjp
def _rolled(x_rc: Array, by: Array) -> Array:
    """``x`` [R, C, ...] with each row moved on by its own number of columns, around the end."""
    columns = x_rc.shape[1]
    source = (jnp.arange(columns)[None] - by[:, None]) % columns
    return jax.vmap(lambda row, at: row[at])(x_rc, source)


# Of a gather JAX makes a scatter, which adds numbers one by one; this one only moves them.
_rolled.defvjp(
    lambda x_rc, by: (_rolled(x_rc, by), by), lambda by, g_rc: (_rolled(g_rc, -by), None)
)
