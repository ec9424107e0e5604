"""NVIDIA GPUs: all that only they need; the kernels are in ``models/gpu_kernels``.

A token step reads the weights and the caches once, which takes about a millisecond for a small
model, in some hundred kernels. What else takes time is the kernels that move next to nothing, and
each return of the loop to the host. So attention, from one product to the next, is one kernel that
reads the columns a row has reached, norms are fused with the residual before them, the draw is two
kernels, and the loop over tokens looks every ``STEPS`` tokens whether it should end.

Everything here is chosen by the mesh that a program is made for, and holds for token steps alone,
but for ``norm_rotated``: prompts and training go through the plain functions and cuDNN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrl.mesh import RULES, by_device, divided, parts_of, platform
from jrl.models.config import ModelConfig
from jrl.models.weights import Factored
from jrl.types import Array, Cache

STEPS = 16
"""Token steps between two looks of the decode loop at the host."""

HALVINGS = 8
"""The same of a search for the threshold of top-k or top-p."""

_OLDEST = 8
"""Compute capability from which Triton has what the kernels use."""


def kernels(attention: str) -> bool:
    """Whether token steps run on the kernels: on GPUs, and where "triton" asks for them."""
    if attention == "triton":
        return True
    return attention in ("auto", "cudnn") and platform() == "gpu" and new_enough()


def new_enough() -> bool:
    """Whether this machine's GPU, if it has one, is of NVIDIA's since Ampere."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:  # compiled for a GPU that is not here
        return True
    capability = str(getattr(device, "compute_capability", _OLDEST))
    # That of GPUs of other vendors is a name.
    return capability.replace(".", "", 1).isdigit() and float(capability) >= _OLDEST


def unfit(config: ModelConfig) -> str:
    """The reason that the kernels cannot decode this model; "" if they can."""
    if config.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, and model.dtype = {config.dtype!r}"
    size = config.head_dim
    # Blocks of Triton have sizes that are powers of two; others would compute on padding.
    if size < 32 or size > 256 or size & (size - 1):
        return f"it takes heads of 32, 64, 128 or 256, and model.config.head_dim = {size}"
    return ""


def decodes(attention: str, config: ModelConfig) -> bool:
    """Whether token steps of this model run on the kernels."""
    return kernels(attention) and not unfit(config)


def steps_at_once() -> int:
    """Token steps between two returns of a decode loop to the host; 1 for no inner loop.

    A loop whose end is computed returns to the host for it with every step; one with a known
    number of steps does not.
    """
    return STEPS if platform() == "gpu" else 1


def block_of(steps: int) -> int:
    """Token steps between two returns to the host in a call of so many; 1 for no inner loop.

    Blocks are as even as can be, since those of a call of 20 in 16 would take 12 steps for nothing.
    """
    steps = max(steps, 1)
    return -(-steps // -(-steps // steps_at_once()))


def branches() -> bool:
    """Whether programs of the sampler may branch; on a GPU a branch returns to the host.

    There what is done for some rows alone is done for all, in a program of its own.
    """
    return platform() != "gpu"


def halvings_at_once() -> int:
    """Halvings of a search between two returns to the host; 1 for no inner loop."""
    return HALVINGS if platform() == "gpu" else 1


def _interpret() -> bool:
    return platform() != "gpu"


# ---------------------------------------------------------------- whole sequences


def norm_rotated(
    config: ModelConfig,
    x_bqhd: Array,
    weight: Array | None,
    rotation: tuple[Array, Array],
    heads: str,
) -> Array:
    """Queries or keys, normalised and rotated in one pass, and one more for their gradient.

    Args:
      config: one that ``decodes`` holds for.
      x_bqhd: [B, Q, H, h].
      weight: [h] of the norm, or None for none.
      rotation: cosines and sines, [B, Q, h / 2] float32, or of one row for all.
      heads: logical name of the axis H.
    """
    from jrl.models.gpu_kernels import Norm
    from jrl.models.gpu_kernels import norm_rotated as kernel

    how = Norm(config.norm_eps, config.norm_plus_one, _interpret())
    rows, length = _over("batch", x_bqhd.shape[0]), _over("length", x_bqhd.shape[1])
    turn = PartitionSpec(_over("batch", rotation[0].shape[0]), length)
    of_x = PartitionSpec(rows, length, _over(heads, x_bqhd.shape[2]))

    def local(x: Array, weight: Array | None, cos: Array, sin: Array) -> Array:
        flat = [a.reshape(-1, *a.shape[2:]) for a in (x, cos, sin)]
        return kernel(how, flat[0], weight, *flat[1:]).reshape(x.shape)

    specs = of_x, None if weight is None else PartitionSpec(), turn, turn
    return by_device(local, specs, x_bqhd, weight, *rotation)


# ---------------------------------------------------------------- a layer of a token step


class Sum(NamedTuple):
    """A product in parts [n, S, N] float32, which the kernel that reads it adds up."""

    parts: Array


class Fused(NamedTuple):
    """Functions with which ``layers.block`` does a token step, in place of ``Mix``.

    Attributes:
      attend: (product with "qkv" [S, 1, K, H / K + 2, h] or a ``Sum``, weights of the norms of
        queries and keys [h] and the bias [K, H / K + 2, h], None for what is not there) -> (values
        seen [S, 1, H, h], anything).
      added_norm: (x [S, 1, D], out [S, 1, D] or a ``Sum``, norm weight [D]) -> their sum, its norm.
    """

    attend: Callable[[Any, tuple[Array | None, ...]], tuple[Array, Any]]
    added_norm: Callable[[Array, Any, Array], tuple[Array, Array]]


def product(x: Array, w: Any, inputs: int) -> Sum | None:
    """The product of a token step's rows with a matrix, by the kernel where it is the faster one.

    Args:
      x: [S, 1, ...], 16-bit floats.
      w: [input axes, output axes], or ``Quantised``.
      inputs: how many axes are summed over.

    Returns:
      Its parts; None where XLA's product is to be taken.
    """
    weight = _streamed(x, w, inputs)
    if weight is None:
        return None
    from jrl.models.gpu_kernels import few_rows

    return Sum(few_rows(x.reshape(x.shape[0], -1), weight, interpret=_interpret()))


def gated(x: Array, w: Any, activation: str, function: Callable[[Array], Array]) -> Array | None:
    """activation(x @ gate) * (x @ up) [S, 1, F] of a token step, or None as ``product``.

    Args:
      x: [S, 1, D], 16-bit floats.
      w: "gate_up" as ``prepare`` makes it; the kernel takes those of ``in_pairs``.
      activation: its name.
      function: and what it is.
    """
    # Columns in another order are another product, so the layout decides, not the mesh of today.
    weight = _streamed(x, w, 1) if activation in _IN_KERNELS and in_pairs(w) else None
    if weight is None:
        return None
    from jrl.models import gpu_kernels

    # The kernel writes F numbers a row where a product of its own would write 2 F and read them.
    rows = x.reshape(x.shape[0], -1)
    return gpu_kernels.gated(rows, weight, function, interpret=_interpret())[:, None]


def scores(x: Array, head: Any) -> Array | None:
    """Products [S, V] float32 of few rows with a matrix in float8, by the kernel on a GPU; or None.

    XLA for GPUs before Hopper converts such a matrix in a kernel of its own, which writes it in 16
    bits for every token: 1.2 GB more in each with 2,048 inputs and 151,936 outputs.

    Args:
      x: [S, D], 16-bit floats.
      head: the output matrix [D, V]; None for one that is not float8.
    """
    in_8_bits = head.scaled() if isinstance(head, Factored) else None
    if in_8_bits is None or in_8_bits[0].dtype != jnp.float8_e4m3fn:
        return None
    if platform() != "gpu" or not new_enough() or x.ndim != 2 or x.dtype.itemsize != 2:
        return None
    out = product(x, head, 1)
    return None if out is None else out.parts.sum(0)


def pairs(width: int) -> int:
    """Columns of a gate that ``prepare`` lays beside those of up; 0 for all."""
    # Where devices divide the width, each needs gate and up in one piece for XLA's product.
    if platform() != "gpu" or parts_of("mlp", width) > 1:
        return 0
    from jrl.models.gpu_kernels import PAIRED

    return PAIRED if width % PAIRED == 0 else 0


def in_pairs(w: Any) -> bool:
    """Whether a prepared "gate_up" is [D, F / n, 2, n], and not [D, 2, F]."""
    return getattr(getattr(w, "values", w), "ndim", 3) == 4


_IN_KERNELS = ("silu", "gelu_tanh", "relu")
"""Activations that Triton has what they take for."""


def _streamed(x: Array, w: Any, inputs: int) -> Any:
    """The weight as [D, N], where the kernels take so few rows of it; else None."""
    from jrl.models.gpu_kernels import Weight, takes_product

    in_8_bits = w.scaled() if isinstance(w, Factored) else None
    # Matrices that devices divide are left to XLA, which sums over devices.
    if divided() or (isinstance(w, Factored) and in_8_bits is None):
        return None
    values, scales = in_8_bits or (w, None)
    summed, outputs = (math.prod(part) for part in (values.shape[:inputs], values.shape[inputs:]))
    same = values.dtype == x.dtype or scales is not None
    if not same or not takes_product(x.shape[0], summed, outputs):
        return None
    if scales is not None:
        scales = jnp.broadcast_to(scales, (*(1,) * inputs, *values.shape[inputs:])).reshape(-1)
    return Weight(values.reshape(summed, outputs), scales)


def whole(out: Array | Sum, dtype: Any) -> Array:
    """A product as one array, [S, 1, N] of its parts."""
    return out.parts.sum(0).astype(dtype)[:, None] if isinstance(out, Sum) else out


def _parts(out: Array | Sum, *shape: int) -> Array:
    """[n, S, ...]: the parts of a product; one of an array [S, 1, ...]."""
    parts = out.parts if isinstance(out, Sum) else out.reshape(1, out.shape[0], -1)
    return parts.reshape(*parts.shape[:2], *(shape or (-1,)))


def _over(axis: str, size: int) -> tuple[str, ...] | None:
    """The mesh axes that an axis of this size is divided over, if it is."""
    return RULES[axis] if parts_of(axis, size) > 1 else None


def _divides(rows: int) -> bool:
    """Whether each device has rows of its own; others would be sent to all of them."""
    return _over("batch", rows) is not None or parts_of("batch", 0) == 1


def _prompts(cache: Cache) -> int:
    """Rows of a cache that go to a device together: its prompts, or rows without any."""
    pieces = cache.rows if cache.prefix is None else cache.prefix
    return pieces[0][0]["k"].shape[0]


def takes(attention: str, config: ModelConfig, cache: Cache, tokens: Array) -> bool:
    """Whether one step of these tokens [S, Q] to this cache runs on the kernels."""
    # Caches in pieces are for XLA's attention, which reads a piece or leaves it; the kernel reads
    # the columns that a row has reached, of one array.
    if tokens.shape[1] != 1 or len(cache.rows[0]) != 1 or not decodes(attention, config):
        return False
    return _divides(_prompts(cache))


def fused(
    config: ModelConfig,
    cache: Cache,
    layer: int,
    rotation: tuple[Array, Array],
    reach: Any,
    scale: float,
) -> Fused:
    """The step of one layer.

    Args:
      config: the model.
      cache: that ``takes`` holds for.
      layer: its number.
      rotation: of its positions.
      reach: of ``reaches``, for its window.
      scale: of scores.

    Returns:
      Functions for ``layers.block``; ``attend`` returns the layer's new pieces besides.
    """
    # Pallas is slow to import.
    from jrl.models.gpu_kernels import Reach, Rotation, Scores, added_norm, attend_cache

    window = config.windows[layer]
    rows, prompt = cache.rows[layer][0], None
    if cache.prefix is not None:
        prompt = _numbers(cache.prefix[layer][0])
    cos, sin = (x[:, 0] for x in rotation)
    batch, heads = _over("batch", _prompts(cache)), _over("kv_heads", config.kv_heads)
    by_row, by_head = PartitionSpec(batch), PartitionSpec(batch, heads)
    how = Scores(
        jnp.dtype(config.dtype),
        scale,
        config.attention_softcap,
        window,
        config.norm_eps,
        config.norm_plus_one,
    )

    # Each device looks at its own rows and heads; nothing is sent.
    def look(x: Array, rows: Any, prompt: Any, turn: tuple, reached: tuple) -> Any:
        positions = Rotation(*turn), Reach(*reached)
        return attend_cache(x, rows, prompt, *positions, how=how, interpret=_interpret())

    def attend(out: Any, vectors: tuple[Array | None, ...]) -> tuple[Array, Any]:
        everywhere, of_heads = PartitionSpec(), PartitionSpec(heads)
        turn, reached = (cos, sin, *vectors), tuple(reach)
        of_turn = by_row, by_row, everywhere, everywhere, of_heads
        specs = (
            PartitionSpec(None, batch, heads),
            jax.tree.map(lambda _: by_head, _numbers(rows)),
            jax.tree.map(lambda _: by_head, prompt),
            tuple(None if x is None else s for x, s in zip(turn, of_turn, strict=True)),
            tuple(None if x is None else by_row for x in reached),
        )
        per_head = config.heads // config.kv_heads + 2
        x = _parts(out, config.kv_heads, per_head, config.head_dim)
        inputs = x, _numbers(rows), prompt, turn, reached
        attended, new = by_device(look, specs, *inputs, results=(by_head, specs[1]))
        return attended[:, None], ({**rows, **new},)

    def norm(x: Array, out: Any, weight: Array) -> tuple[Array, Array]:
        add = functools.partial(
            added_norm, eps=how.eps, plus_one=how.plus_one, interpret=_interpret()
        )
        specs = by_row, PartitionSpec(None, batch), PartitionSpec()
        inputs = x[:, 0], _parts(out), weight
        total, normed = by_device(add, specs, *inputs, results=(by_row, by_row))
        return total[:, None], normed[:, None]

    return Fused(attend, norm)


def _numbers(piece: dict[str, Array]) -> dict[str, Array]:
    """The arrays of a piece of a cache that attention reads."""
    return {name: piece[name] for name in ("k", "v", "k_scale", "v_scale") if name in piece}


def reaches(
    config: ModelConfig, cache: Cache, positions: Array, live: Array
) -> dict[int | None, Any]:
    """Visible columns of the cache in a token step, for each window of the model's layers.

    Args:
      config: the model.
      cache: of S rows.
      positions: [S, 1] int32, tokens.
      live: [S, 1] bool.
    """
    from jrl.models.gpu_kernels import Reach

    at, lives = positions[:, 0], live[:, 0]
    columns, lengths = jnp.where(lives, at - cache.offsets(), -1), cache.prefix_lengths
    if lengths is None:
        return {window: Reach(columns, at) for window in set(config.windows)}
    # The earliest row of a prompt decides where reading begins.
    earliest = jnp.where(lives, at, jnp.iinfo(jnp.int32).max).reshape(lengths.shape[0], -1).min(1)

    def reach_of(window: int | None) -> Any:
        begin = None if window is None else jnp.clip(earliest - (window - 1), 0, lengths)
        return Reach(columns, at, begin, lengths)

    return {window: reach_of(window) for window in set(config.windows)}


# ---------------------------------------------------------------- the draw


def draws(logits: Array) -> bool:
    """Whether tokens of these logits [S, V] are drawn by the kernels."""
    return platform() == "gpu" and new_enough() and _divides(logits.shape[0])


def _of_rows(function: Callable[..., Any], logits: Array, *others: Array) -> Any:
    """``function`` of the rows that each device draws from: logits [S, V], and others [S].

    Devices that divide the vocabulary divide the rows, too, and send each other the logits once:
    XLA makes a running sum of what several devices have a loop over all of its numbers.
    """
    rows, vocab = logits.shape
    batch, parts = _over("batch", rows) or (), parts_of("vocab", vocab)
    over = _over("vocab", vocab) or ()
    divided = parts > 1 and rows % (parts * parts_of("batch", rows)) == 0

    def one(logits: Array, *others: Array) -> Any:
        if divided:
            logits = jax.lax.all_to_all(logits, over, 0, 1, tiled=True)
        elif parts > 1:
            logits = jax.lax.all_gather(logits, over, axis=1, tiled=True)
        return function(logits, *others)

    in_rows = PartitionSpec((*batch, *(over if divided else ())) or None)
    specs = PartitionSpec(batch or None, over or None), *(in_rows for _ in others)
    return by_device(one, specs, logits, *others, results=in_rows)


def draw(
    uniform: Array, logits: Array, temperature: Array, truncation: tuple[Array, ...] = ()
) -> tuple[Array, Array]:
    """``params.sample`` on the kernels.

    Args:
      uniform: [S] float32 in [0, 1).
      logits: [S, V] float32.
      temperature: [S] float32; 0 is greedy.
      truncation: top-k [S] int32, top-p and min-p [S] float32; () where all tokens are kept.
    """
    from jrl.models import gpu_kernels

    interpret = _interpret()

    def one(logits: Array, uniform: Array, temperature: Array, *truncation: Array) -> Any:
        least: tuple[Array, ...] = ()
        if truncation:
            inputs = logits, temperature, *truncation
            least = (gpu_kernels.least_kept(*inputs, interpret=interpret),)
        sums = gpu_kernels.block_sums(logits, temperature, *least, interpret=interpret)
        inputs = uniform, logits, temperature, *sums, *least
        return gpu_kernels.pick(*inputs, interpret=interpret)

    return _of_rows(one, logits.astype(jnp.float32), uniform, temperature, *truncation)


def least_kept(logits: Array, *truncation: Array) -> Array:
    """[S] float32, the smallest logit that truncation keeps; -inf for all.

    XLA's search for it, whose length is not known, returns to the host.

    Args:
      logits: [S, V] float32, over their temperature.
      truncation: top-k [S] int32, top-p and min-p [S] float32.
    """
    from jrl.models import gpu_kernels

    search = functools.partial(gpu_kernels.least_kept, interpret=_interpret())
    return _of_rows(search, logits, jnp.ones(logits.shape[0]), *truncation)
