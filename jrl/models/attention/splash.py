"""Attention by JAX's splash kernel for TPUs, for rows and for prompts that rows share.

``jax.experimental.pallas.ops.tpu.splash_attention``. The kernel hides keys by a mask over columns,
fixed when it is compiled, and by ids that must be equal; positions are not among them. So the
columns of a row must be in the order of their positions, and where there is a window, a step to
the next column must be a step to the next position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from jrl.models.attention.dense import NO_WINDOW
from jrl.models.attention.flash import Kernel, Place
from jrl.types import Array

LANES = 128
"""Lengths are padded to a multiple of this."""

_BLOCKS = (512, 384, 256, 128)
"""Queries, and keys, of a block, the best first."""

_WASTE = 1.1
"""A larger block is taken when it fills a length up to no more than so much of it."""


def splash_kernel(
    *,
    scale: float,
    softcap: float | None,
    windows: tuple[int | None, ...],
    prefix_length: int | None = None,
    interpret: bool = False,
) -> Kernel:
    """A place looked at by the splash kernel, forward and backward.

    Args:
      scale: what scores are multiplied by; queries are, in their own dtype.
      softcap: scores become cap * tanh(score / cap).
      windows: the distinct windows that ``window`` may have, tokens; None for no window.
      prefix_length: None for a row's own keys, where column c belongs to query c. Else the place
      has
        prompts before all queries, each in this many columns from its position 0 on, and ids are
        1 + the prompt's number.
      interpret: runs the kernel's steps as plain JAX, slowly, for tests on other platforms.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "windows": tuple(sorted({NO_WINDOW if w is None else int(w) for w in windows})),
        "prefix_length": prefix_length,
        "interpret": interpret,
    }
    return Kernel(functools.partial(_forward, **options), functools.partial(_backward, **options))


def block_of(length: int) -> int:
    """The number of columns that go into a block for a row of this length."""
    least = -(-length // LANES) * LANES
    return next(b for b in _BLOCKS if -(-length // b) * b <= max(_WASTE * least, least))


def _filled(x: Array, axis: int, block: int) -> Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, pad)


@functools.cache
def _hides(window: int, causal: bool) -> Callable[[Array, Array], Array] | None:
    """The mask of columns less than a window back, and not later; None where all are seen."""
    if causal:
        return lambda query, key: (query >= key) & (query - key < window)
    return (lambda query, key: query - key < window) if window < NO_WINDOW else None


def _made(
    shape: tuple[int, int, int],
    window: int,
    softcap: float | None,
    prefix_length: int | None,
    sequence: Array | None,
    interpret: bool,
) -> splash.SplashAttentionKernel:
    """The kernel for (heads, queries, keys).

    ``sequence`` numbers the columns of queries; None where query c is in column c, which alone lets
    the kernel leave out the blocks above the diagonal.
    """
    heads, q, c = shape
    # Blocks of the padded lengths: the kernel requires them to divide evenly.
    bq, bk = block_of(q), block_of(c)
    # The same blocks forward and backward, so that one padding of the inputs serves both.
    sizes = splash.BlockSizes(
        block_q=bq,
        block_kv=bk,
        block_q_dkv=bq,
        block_kv_dkv=bk,
        block_q_dq=bq,
        block_kv_dq=bk,
    )
    # Blocks above the diagonal, or behind a window, are then not even in the kernel's grid.
    if prefix_length is None and sequence is None:
        # A static mask: the kernel's grid is built from it at trace time.
        mask: masks.Mask = masks.CausalMask((q, c))
        if window < NO_WINDOW:
            mask = masks.LocalMask((q, c), (window - 1, 0), 0)
        return splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )
    hides = _hides(window, prefix_length is None)
    # Without a static mask the kernel visits every block and asks ``mask_function``; ids do the
    # rest.
    info = MaskInfo(None, None, None, None, sequence if hides else None)  # type: ignore[arg-type]
    return splash.SplashAttentionKernel(
        info,
        info,
        info,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=None,
        mask_function=hides,
        interpret=interpret,
    )


def _each_window(
    run: Callable[[int], tuple], windows: tuple[int, ...], window: Array
) -> tuple[Array, ...]:
    """``run`` for the window that it is; the windows are fixed when the kernel is compiled."""
    if len(windows) == 1:
        return run(windows[0])
    # The window is a traced number inside the scan over layers, so the kernel is chosen by a
    # switch.
    index = sum((window > w).astype(jnp.int32) for w in windows[:-1])
    return jax.lax.switch(index, [functools.partial(run, w) for w in windows])


def _inputs(q: Array, place: Place, scale: float, prefix_length: int | None) -> tuple[Any, ...]:
    """Scaled queries, keys, values, ids of queries and keys, columns: padded to whole blocks."""
    # The kernel has no scale of its own.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    bq, bk = block_of(q.shape[2]), block_of(place.k_bkcd.shape[2])
    ids, positions = place.queries.ids, place.queries.positions
    # Among the prompts' columns those of number i begin at i * past, and so do its queries' places.
    columns = place.columns if prefix_length is None else positions + (ids - 1) * prefix_length
    return (
        _filled(q, 2, bq),
        _filled(place.k_bkcd, 2, bk),
        _filled(place.v_bkcd, 2, bk),
        _filled(ids, 1, bq),
        _filled(place.keys.ids, 1, bk),
        None if columns is None else _filled(columns, 1, bq),
    )


def _forward(
    q: Array,
    place: Place,
    window: Array,
    *,
    scale: float,
    softcap: float | None,
    windows: tuple[int, ...],
    prefix_length: int | None,
    interpret: bool,
) -> tuple[Array, Array]:
    inputs = _inputs(q, place, scale, prefix_length)
    shape = q.shape[1], inputs[0].shape[2], inputs[1].shape[2]

    def run(w: int) -> tuple[Array, Array]:
        # The kernel takes one row: [H, Q, h] and ids [Q].
        def one(*row: Any) -> tuple[Array, Array]:
            q, k, v, ids, key_ids, columns = row
            kernel = _made(shape, w, softcap, prefix_length, columns, interpret)
            out, (log_sum,) = kernel(q, k, v, splash.SegmentIds(ids, key_ids))
            return out, log_sum

        return jax.vmap(one)(*inputs)

    out, log_sum = _each_window(run, windows, window)
    # Cut the padding off again before shapes meet the caller's.
    n = q.shape[2]
    return out[:, :, :n], log_sum[:, :, :n]


def _backward(
    q: Array,
    place: Place,
    window: Array,
    outputs: Array,
    log_sums: Array,
    g: Array,
    *,
    scale: float,
    softcap: float | None,
    windows: tuple[int, ...],
    prefix_length: int | None,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    inputs = _inputs(q, place, scale, prefix_length)
    n, c = q.shape[2], place.k_bkcd.shape[2]
    shape = q.shape[1], inputs[0].shape[2], inputs[1].shape[2]
    results = [_filled(x, 2, shape[1]) for x in (outputs, log_sums, g.astype(outputs.dtype))]

    def run(w: int) -> tuple[Array, Array, Array]:
        def one(*row: Any) -> tuple[Array, Array, Array]:
            q, k, v, ids, key_ids, columns, out, log_sum, g = row
            kernel = _made(shape, w, softcap, prefix_length, columns, interpret)
            segments = splash.SegmentIds(ids, key_ids)
            # The kernel's own derivative starts from what it saw by itself. Given what was seen
            # at all places, the same functions make the gradient of that.
            infos = kernel.dq_mask_info, kernel.dkv_mask_info
            residuals = (q, k, v, segments, None, out, log_sum, *infos)
            kwargs = kernel.kwargs | {"save_residuals": False, "res": residuals, "do": g}
            gradients = splash._splash_attention_bwd(**kwargs)
            return gradients[3], gradients[4], gradients[5]

        return jax.vmap(one)(*inputs, *results)

    dq, dk, dv = _each_window(run, windows, window)
    # Queries were scaled outside of the kernel, so its dq is that of scaled queries.
    dq = (dq[:, :, :n].astype(jnp.float32) * scale).astype(q.dtype)
    return dq, dk[:, :, :c], dv[:, :, :c]
