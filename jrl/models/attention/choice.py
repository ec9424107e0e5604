"""Attention by the best kernel: within rows, to shared prompts, and to a cache.

"xla" makes all scores of a layer at once and suits short rows; "blockwise" keeps memory linear in
the length on any platform; "splash" is JAX's kernel for TPUs, "cudnn" NVIDIA's, through JAX;
"triton" is "auto" with the kernels of ``models/gpu.py`` for token steps on any platform. All
compute the same numbers up to rounding. "auto" takes the fastest one that is exact for the model,
the platform and the shapes at hand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jrl.errors import UserError, unknown_choice
from jrl.mesh import RULES, by_device, named_platform, parts_of, platform
from jrl.models import gpu
from jrl.models.attention.blockwise import blockwise
from jrl.models.attention.cudnn import Lengths, continued, continues, cudnn
from jrl.models.attention.dense import (
    Part,
    PartialAttention,
    attend,
    attend_part,
    attend_parts,
    attend_shared,
    visible,
)
from jrl.models.attention.flash import Kernel, Marks, Place, attend_places
from jrl.models.config import ModelConfig
from jrl.types import Array, SharedRows

ATTENTION = ("auto", "blockwise", "cudnn", "splash", "triton", "xla")

DENSE_BYTES = 2**30
"""Scores of a layer, float32, that a device makes at once; beyond it they go in blocks."""

CPU_BLOCKWISE = 1024
"""Queries, and keys, of a row from which blocks are faster on a CPU. Forward and backward they took
0.43 of the time at 1,024 tokens, 0.28 at 2,048, 0.24 at 8,192; at 512 as long."""

MASK_BYTES = 2**32
"""The mask that cuDNN is given, two bytes a number, of a device; larger ones go in blocks."""

MOST_TABLES = 512
"""Rows of a cache times key-value heads, of a device, that splash keeps tables of blocks for. Each
takes 1.5 KiB of the 1 MiB of scalar memory that a core has, for up to 128 blocks."""

SHORTEST = 128
"""Fewest keys for which splash is chosen: it pads shorter rows to this length."""


_OLD = "it needs a GPU of compute capability 8.0 or above, and this one is older"


class Shape(NamedTuple):
    """Size of a layer's attention: rows, queries per row, and keys per query."""

    rows: int
    queries: int
    keys: int


def check_attention_on_mesh(mesh: Mesh, config: ModelConfig, kernel: str) -> None:
    """``check_attention`` before anything runs on a mesh, and whether its axes allow it."""
    check_attention(config, kernel, named_platform(mesh.devices.flat[0].platform))
    context = math.prod(mesh.shape[axis] for axis in RULES["length"])
    if kernel == "cudnn" and context > 1:
        raise UserError(
            f"model.attention = 'cudnn' needs complete rows, and mesh.context = {context} divides "
            "them; set mesh.context to 1, or model.attention to 'auto', 'xla' or 'blockwise'"
        )


def check_attention(config: ModelConfig, kernel: str, where: str) -> None:
    """Raises UserError where attention of this model cannot be computed as asked.

    Args:
      config: the model.
      kernel: one of ``ATTENTION``.
      where: the platform, "cpu", "gpu" or "tpu".
    """
    if kernel not in ATTENTION:
        raise unknown_choice("model.attention", kernel, ATTENTION)
    if kernel == "cudnn" and (reason := _no_cudnn(config, where)):
        raise UserError(f"model.attention = 'cudnn': {reason}; use 'auto', 'xla' or 'blockwise'")
    if kernel == "triton" and (reason := gpu.unfit(config)):
        raise UserError(f"model.attention = 'triton': {reason}; use 'auto' or 'xla'")
    if kernel == "triton" and where == "gpu" and not gpu.new_enough():
        raise UserError(f"model.attention = 'triton': {_OLD}; use 'auto' or 'xla'")
    if kernel == "triton" and where == "tpu":
        raise UserError(
            "model.attention = 'triton' runs on NVIDIA GPUs (and, interpreted, on the CPU), not on "
            "TPUs; use 'auto' or 'splash'"
        )
    if kernel == "splash" and where == "gpu":
        raise UserError(
            "model.attention = 'splash' runs on TPUs (and, interpreted, on the CPU), not on GPUs; "
            "use 'auto' or 'cudnn'"
        )


def _no_cudnn(config: ModelConfig, where: str) -> str:
    """The reason that cuDNN cannot compute this model's attention; "" if it can."""
    if where != "gpu":
        return f"it needs a GPU, and this runs on {where}"
    if not gpu.new_enough():
        return _OLD
    if config.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, and model.dtype = {config.dtype!r}"
    if config.attention_softcap is not None:
        return (
            f"it has no soft cap, and model.config.attention_softcap = {config.attention_softcap}"
        )
    if config.head_dim % 8 or config.head_dim > 128:
        return (
            f"it takes heads of up to 128 in eights, and model.config.head_dim = {config.head_dim}"
        )
    return ""


def kernel_for(
    requested: str, config: ModelConfig, shape: Shape, *, steady: bool, lengths: bool = False
) -> str:
    """The kernel that attention of this shape runs on, never "auto".

    Args:
      requested: one of ``ATTENTION``.
      config: the model.
      shape: of one layer's attention, all devices together.
      steady: whether the next column of a row is always the next position, which splash needs
        where there are windows.
      lengths: whether lengths of rows say what is visible, so that cuDNN needs no mask.

    Raises:
      UserError: see ``check_attention``.
    """
    where = platform()
    check_attention(config, requested, where)
    # Splash measures windows in columns; with gaps in positions it would hide the wrong keys.
    exact = steady or config.window is None
    requested = "auto" if requested == "triton" else requested
    if requested == "splash" and not exact:
        return "blockwise"
    if requested != "auto":
        return requested
    # Shorter rows would be padded to a tile of 128 columns.
    if where == "tpu" and exact and shape.keys >= SHORTEST:
        return "splash"
    # A device's own part decides, since that is what its kernel is given.
    context = parts_of("length", shape.queries)
    cells = shape.rows // parts_of("batch", shape.rows) * shape.queries // context * shape.keys
    # cuDNN gets whole rows, so the context axis must be 1, and a mask of 2 bytes a cell must fit.
    fits = lengths or 2 * cells <= MASK_BYTES
    if where == "gpu" and context == 1 and fits and not _no_cudnn(config, where):
        return "cudnn"
    scores = 4 * cells * config.heads // parts_of("heads", config.kv_heads)
    # Both must be long: with few queries the scores are small however many keys there are.
    several = where == "cpu" and min(shape.queries, shape.keys) >= CPU_BLOCKWISE
    return "blockwise" if several or scores > DENSE_BYTES else "xla"


def mesh_axes(axis: str, size: int) -> tuple[str, ...] | None:
    """The mesh axes that an array axis of this logical name and size is divided over."""
    return RULES[axis] if parts_of(axis, size) > 1 else None


def reads_caches_by_kernel(kernel: str) -> bool:
    """Whether attention to a cache runs on the kernel for TPUs."""
    return kernel == "splash" or (kernel == "auto" and platform() == "tpu")


def reads_in_one_piece(kernel: str, rows: int, columns: int) -> bool:
    """Whether the kernel reads of a device's rows, with this many columns, only what is filled."""
    if not reads_caches_by_kernel(kernel):
        return False
    from jrl.models.attention.cache_read import has_tables  # Pallas takes long to import

    return has_tables(rows, columns)


def caches_in_tiles(kernel: str) -> bool:
    """Whether caches have lengths that kernels take: on TPUs all are written by one."""
    return kernel == "splash" or platform() == "tpu"


def scale_of(config: ModelConfig) -> float:
    """Scale of a model's attention scores."""
    return config.head_dim**-0.5 if config.query_scale is None else config.query_scale


def is_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """A rematerialisation policy that saves cuDNN's results, which have no checkpoint name."""
    return primitive.name.startswith("dot_product_attention_fwd")


# ---------------------------------------------------------------- of rows

RowAttention = Callable[[Array, Array, Array, Array | int], Array]
"""(q [B, Q, H, h], k [B, K, C, h], v, window [] int32) -> values seen [B, Q, H, h]."""


def row_attention(
    kernel: str,
    config: ModelConfig,
    positions: Array,
    segments: Array,
    *,
    lengths: Array | None = None,
) -> RowAttention:
    """Attention of the tokens of rows to each other; see ``types.Network.hidden``.

    Args:
      kernel: one of ``ATTENTION``.
      config: the model.
      positions: [B, L] int32, tokens.
      segments: [B, L] int32; 0 is padding.
      lengths: [B] int32, where a row is one segment of this length from column and position 0.
    """
    b, l = positions.shape
    by_length = lengths is not None and config.window is None
    kind = kernel_for(kernel, config, Shape(b, l, l), steady=lengths is not None, lengths=by_length)
    scale, cap = scale_of(config), config.attention_softcap
    if kind in ("splash", "blockwise"):
        row_marks = Marks(segments, positions)
        kernels = (_kernel(kind, config, None),)

        def by_places(q: Array, k: Array, v: Array, window: Array | int) -> Array:
            return _places(q, (Place(k, v, row_marks, row_marks),), kernels, window)

        return by_places
    # Lengths say it without a mask, which would be [B, L, L].
    if kind == "cudnn" and by_length:
        return lambda q, k, v, window: cudnn(q, k, v, scale=scale, lengths=lengths)
    mask, distance = visible(positions, segments, positions, segments)

    def by_mask(q: Array, k: Array, v: Array, window: Array | int) -> Array:
        visible_keys = mask if config.window is None else mask & (distance < window)
        if kind == "cudnn":
            return cudnn(q, k, v, scale=scale, mask=visible_keys)
        return attend(q, k, v, visible_keys, scale=scale, softcap=cap)

    return by_mask


SharedAttention = Callable[[Array, Array, Array, Array, Array, Array | int], Array]
"""(q [R, C, H, h], prompts' k and v [M, K, b * P, h], own k and v [R, K, C, h], window) -> values
seen [R, C, H, h]; see ``types.NetworkExtras.hidden_shared``."""


def shared_attention(kernel: str, config: ModelConfig, rows: SharedRows) -> SharedAttention:
    """Attention of the tokens of rows to the prompts that they continue and to each other."""
    (r, c), (m, b, p) = rows.tokens.shape, rows.prompt_tokens.shape
    by_length = rows.lengths is not None and config.window is None and continues()
    # Rows are looked at prompt by prompt, which devices must not share.
    by_length &= parts_of("batch", r) == parts_of("batch", m)
    kind = kernel_for(kernel, config, Shape(r, c, b * p + c), steady=True, lengths=by_length)
    if kind in ("splash", "blockwise"):
        return _shared_by_places(kind, config, rows)
    if kind == "cudnn" and by_length:
        return _shared_by_lengths(config, rows)
    return _shared_by_mask(kind, config, rows)


def _prompt_columns(rows: SharedRows) -> tuple[Array, Array, Array]:
    """The columns of a block of prompts.

    Returns:
      For each [b * P] the number of its prompt, to compare with ``owners``, and its column in that
      prompt; and whether it holds a token, [M, b * P].
    """
    _, b, p = rows.prompt_tokens.shape
    columns = jnp.tile(jnp.arange(p, dtype=jnp.int32), b)
    inside = columns[None] < jnp.repeat(rows.prompt_lengths, p, axis=1)
    return jnp.repeat(jnp.arange(b, dtype=jnp.int32), p), columns, inside


def _shared_by_places(kind: str, config: ModelConfig, rows: SharedRows) -> SharedAttention:
    """By kernels that compare segments and positions, as "splash" and "blockwise" do."""
    slots, columns, inside = _prompt_columns(rows)
    row_marks = Marks(rows.segments, rows.positions)
    own_keys = row_marks._replace(ends=rows.ends)
    # A prompt's id is 1 + its number in the row; 0 is padding, which nothing sees.
    # Ids tell prompts of a block apart inside one row of keys, which kernels compare for equality.
    keys = Marks(
        jnp.where(inside, slots[None] + 1, 0), jnp.broadcast_to(columns[None], inside.shape)
    )
    queries = Marks(jnp.where(rows.segments != 0, rows.owners + 1, 0), rows.positions)
    # Splash sees equal ids alone, so rows that branch are looked at block by block.
    of_rows = kind if rows.ends is None else "blockwise"
    kernels = _kernel(of_rows, config, None), _kernel(kind, config, rows.prompt_tokens.shape[2])

    def by_places(
        q: Array, before_k: Array, before_v: Array, k: Array, v: Array, window: Array | int
    ) -> Array:
        both = Place(k, v, own_keys, row_marks), Place(before_k, before_v, keys, queries)
        return _places(q, both, kernels, window)

    return by_places


def _shared_by_lengths(config: ModelConfig, rows: SharedRows) -> SharedAttention:
    """By cuDNN, which is told the lengths of rows that continue one prompt each."""
    assert rows.lengths is not None
    lengths, scale = Lengths(rows.prompt_lengths[:, 0], rows.lengths), scale_of(config)

    def by_lengths(
        q: Array, before_k: Array, before_v: Array, k: Array, v: Array, window: Array | int
    ) -> Array:
        of_rows = mesh_axes("batch", rows.prompt_lengths.shape[0])
        heads = mesh_axes("kv_heads", k.shape[1])
        of_q, of_keys = PartitionSpec(of_rows, None, heads), PartitionSpec(of_rows, heads)
        of_lengths = jax.tree.map(lambda _: PartitionSpec(of_rows), lengths)
        specs = of_q, (of_keys, of_keys), (of_keys, of_keys), of_lengths
        look = functools.partial(continued, scale)
        return by_device(look, specs, q, (before_k, before_v), (k, v), lengths)

    return by_lengths


def _shared_by_mask(kind: str, config: ModelConfig, rows: SharedRows) -> SharedAttention:
    """By masks over all prompts of a row and over the row itself."""
    scale, cap = scale_of(config), config.attention_softcap
    slots, columns, inside = _prompt_columns(rows)
    each = rows.positions.shape[0] // rows.prompt_lengths.shape[0]
    prefix_mask = (rows.segments != 0)[:, :, None] & jnp.repeat(inside, each, axis=0)[:, None]
    # With one prompt a block every token belongs to it, and the mask [R, C, P] is not needed.
    if rows.prompt_lengths.shape[1] > 1:
        prefix_mask &= rows.owners[:, :, None] == slots[None, None]
    back_distance = rows.positions[:, :, None] - columns[None, None]
    where = rows.positions, rows.segments
    mask, distance = visible(*where, *where, rows.ends)

    def by_mask(
        q: Array, before_k: Array, before_v: Array, k: Array, v: Array, window: Array | int
    ) -> Array:
        own_mask, shared_mask = mask, prefix_mask
        if config.window is not None:
            own_mask, shared_mask = (
                mask & (distance < window),
                prefix_mask & (back_distance < window),
            )
        if kind == "cudnn":
            # cuDNN takes one set of keys a row, so prompts are copied for each of their rows.
            both = [jnp.repeat(x, each, axis=0) for x in (before_k, before_v)]
            k, v = (jnp.concatenate(x, axis=2) for x in zip(both, (k, v), strict=True))
            both_masks = jnp.concatenate([shared_mask, own_mask], axis=2)
            return cudnn(q, k, v, scale=scale, mask=both_masks)
        prefix = Part(before_k, before_v, shared_mask)
        return attend_shared(q, prefix, k, v, own_mask, scale=scale, softcap=cap)

    return by_mask


def _kernel(kind: str, config: ModelConfig, prefix_length: int | None) -> Kernel:
    scale, cap = scale_of(config), config.attention_softcap
    if kind == "blockwise":
        return blockwise(scale=scale, softcap=cap)
    from jrl.models.attention.splash import splash_kernel  # Pallas takes long to import

    windows, interpret = tuple(set(config.windows)), platform() != "tpu"
    return splash_kernel(
        scale=scale, softcap=cap, windows=windows, prefix_length=prefix_length, interpret=interpret
    )


def _places(
    q: Array, places: tuple[Place, ...], kernels: tuple[Kernel, ...], window: Array | int
) -> Array:
    """``attend_places`` over devices; where they divide the length, each has its own queries.

    The first place is the rows' own keys.
    """

    def look(q: Array, places: tuple[Place, ...], window: Array) -> Array:
        return attend_places(q, places, kernels, window)

    # The place with the fewest rows limits how far the batch can be divided.
    n, c = min(place.k_bkcd.shape[0] for place in places), q.shape[1]
    batch, heads = mesh_axes("batch", n), mesh_axes("kv_heads", places[0].k_bkcd.shape[1])
    length = mesh_axes("length", c)
    # A device that has some of the queries must still know in which columns they are.
    if length:
        columns = jnp.broadcast_to(jnp.arange(c, dtype=jnp.int32)[None], q.shape[:2])
        places = (places[0]._replace(columns=columns), *places[1:])
    row, part, heads_spec = (PartitionSpec(batch, *x) for x in ((), (length,), (heads,)))

    def spec(place: Place) -> Place:
        keys = jax.tree.map(lambda _: row, place.keys)
        queries, columns = jax.tree.map(lambda _: part, (place.queries, place.columns))
        return Place(heads_spec, heads_spec, keys, queries, columns)  # type: ignore[arg-type]

    specs = PartitionSpec(batch, length, heads), tuple(map(spec, places)), PartitionSpec()
    return by_device(look, specs, q, places, jnp.asarray(window, jnp.int32))


# ---------------------------------------------------------------- to a cache


def cached_attention(kernel: str, config: ModelConfig) -> Callable[..., Array]:
    """``attend_parts`` as a model does it, by the kernel that is chosen.

    Args:
      kernel: one of ``choice.ATTENTION``.
      config: the model.

    Returns:
      (queries, parts, how many of them are first that each row has of its own, whether those have
      the same length in all rows) -> values seen.
    """
    dense = functools.partial(
        attend_parts, scale=scale_of(config), softcap=config.attention_softcap
    )
    if not reads_caches_by_kernel(kernel):
        return lambda q, parts, row_parts=0, together=False: dense(q, parts)
    from jrl.models.attention import cache_read  # Pallas takes long to import
    from jrl.models.attention.splash_cache import fits, splash_look

    interpret = platform() != "tpu"

    def look(
        q: Array, part: Part, scale: float, softcap: float | None, together: bool
    ) -> PartialAttention:
        if cache_read.takes(q, part):
            return cache_read.look(q, part, scale, softcap, together=together, interpret=interpret)
        if fits(q, part, MOST_TABLES):
            return splash_look(q, part, scale, softcap, interpret=interpret)
        return attend_part(q, part, scale, softcap)

    def attend(
        q: Array, parts: Sequence[Part], row_parts: int = 0, together: bool = False
    ) -> Array:
        def by_kernel(q: Array, parts: list[Part]) -> Array:
            # By identity: parts of equal shape cannot be distinguished otherwise.
            firsts = {id(part) for part in parts[:row_parts]}

            def attend_one(
                q: Array, part: Part, scale: float, softcap: float | None
            ) -> PartialAttention:
                # The rows' own pieces fill up while decoding; only for those a plan can know how
                # much is read.
                if id(part) not in firsts:
                    return look(q, part, scale, softcap, False)
                with jax.named_scope("own_cache"):  # of which plan.costs knows how much is filled
                    return look(q, part, scale, softcap, together)

            return dense(q, parts, attend_one=attend_one)

        batch = mesh_axes("batch", min(part.v_mkcd.shape[0] for part in parts))
        heads = mesh_axes("kv_heads", config.kv_heads)
        if batch is None and mesh_axes("batch", 0):  # every device would be sent the whole cache
            return dense(q, parts)

        def spec(x: Array) -> PartitionSpec:
            # Keys, values and scales have rank 4, masks 3, flags 0.
            by_rank = {4: (batch, heads), 3: (batch,), 1: (), 0: ()}
            return PartitionSpec(*by_rank[x.ndim])

        specs = PartitionSpec(batch, None, heads), jax.tree.map(spec, list(parts))
        return by_device(by_kernel, specs, q, list(parts))

    return attend
