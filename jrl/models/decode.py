"""Decoding: weights laid out for few tokens, the cache, and the forward pass that writes it.

Each layer keeps keys and values ``[B, K, C, h]``, the layout in which a token is written with the
least traffic: a TPU changes whole tiles, 16 columns of this one and 128 of one with columns last. A
layer's room is divided into pieces along the length, so that a step reads only the pieces that some
row has reached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jrl.mesh import by_device, constrain, divided, parts_of, platform
from jrl.models import gpu
from jrl.models.attention.choice import (
    SHORTEST,
    RowAttention,
    Shape,
    cached_attention,
    caches_in_tiles,
    kernel_for,
    mesh_axes,
    reads_in_one_piece,
    row_attention,
    scale_of,
)
from jrl.models.attention.dense import NO_WINDOW, Part
from jrl.models.config import ModelConfig
from jrl.models.layers import (
    PLAIN,
    Mix,
    Options,
    block,
    embed,
    layer_weights,
    residual_sum,
    rms_norm,
    stored_dtype,
)
from jrl.models.matmul import prepare_weight
from jrl.models.quant import INPUTS, Quantised, quantise_entries
from jrl.models.rope import Rotation, rotations
from jrl.models.routing import record
from jrl.models.weights import Factored, WeightSpec, is_spec, weights
from jrl.types import Array, Cache, Params

AXES = {"k": 2, "v": 2, "k_scale": 3, "v_scale": 3, "experts": 1}
"""The column axis of a cache's arrays."""


def prepare(params: Params, *, config: ModelConfig, gather: bool = True) -> Any:
    """The weights as ``extend`` reads them; see ``types.Network.prepare``.

    Layers are unstacked, because a loop over tokens would slice them out of their stacks again
    for every token; the three projections of attention are one product, as are the two of the
    feed-forward part; a tied output matrix is transposed once. The matrices of dense layers, and
    the output matrix, are as ``matmul.prepare_weight`` returns them.

    Weights are rounded to the dtype of activations. Those stored in a shorter one stay in it, and
    products widen them: float32 activations on 16-bit weights, the LayerCast of "Give Me FP32 or
    Give Me Death? Challenges and Solutions for Reproducible Reasoning" (arXiv:2506.09501). XLA may
    widen them before a loop instead of in it, as its CPU backend does.

    Args:
      params: the network's parameters.
      config: the model.
      gather: whether every device gets all the numbers of its part of a matrix that the mesh's
        fsdp axis divides: they are sent once here, instead of once for every token.
    """
    dtype = stored_dtype(config)

    def lay(w: Array, *axes: str | None) -> Array:
        return constrain(w, *("act_embed" if gather and a == "embed" else a for a in axes))

    def vector(spec: WeightSpec, w: Array) -> Array:
        return w if spec.inputs else lay(w, *spec.axes)

    table = weights(config)["layers"]
    # Vectors only: matrices are divided over devices after they have been joined, in ``_fused``.
    stacks = jax.tree.map(vector, table, params["layers"], is_leaf=is_spec)
    layers = [layer_weights(config, stacks, i) for i in range(config.layers)]
    return {
        "embed": lay(params["embed"].astype(dtype), "vocab", "embed"),
        "head": output_matrix(config, params, lay),
        "layers": tuple(_fused(config, layer, lay) for layer in layers),
        "final_norm": lay(params["final_norm"], "embed"),
    }


def output_matrix(
    config: ModelConfig, params: Params, lay: Callable[..., Array] = lambda w, *axes: w
) -> Array | Factored:
    """The one of ``prepare``, [D, V] or as ``matmul.prepare_weight`` returns it.

    Args:
      config: the model.
      params: the network's parameters.
      lay: (matrix, its logical axes) -> the matrix, as the mesh divides it.
    """
    # One in 8 bits is there beside an embedding that it is tied to.
    head = params["head"] if "head" in params else params["embed"].T
    return _ready(head, stored_dtype(config), 1, lay, "embed", "vocab")


def _short(w: Any, dtype: Any) -> Any:
    """A weight in this dtype; one in 8 bits as it is."""
    return w if isinstance(w, Quantised) else w.astype(dtype)


def _ready(w: Any, dtype: Any, inputs: int, lay: Callable[..., Array], *axes: str | None) -> Any:
    """A weight as ``matmul.prepare_weight`` returns it, divided by its logical axes."""
    if isinstance(w, Quantised):  # of the axes that are summed over the scales have nothing
        scales, values = lay(w.scales, *(None,) * inputs, *axes[inputs:]), lay(w.values, *axes)
        # All scales are above 0. Without an operation on what is sent to a device XLA copies it, as
        # late as it can, for which the weights need their room twice: compiled for TPUs, 47.5 GiB
        # more for 405B parameters.
        return Quantised(jnp.where(scales > 0, values, 0) if divided() else values, scales)
    return prepare_weight(lay(w.astype(dtype), *axes), inputs)


def _fused(config: ModelConfig, layer: Params, lay: Callable[..., Array]) -> Params:
    """A layer's weights, q/k/v and gate/up in one matrix each.

    Each key-value head is next to the query heads that read it, [D, K, H / K + 2, h], so that a
    device that has some of the heads has them all: first the queries', then key and value.
    """
    dtype = stored_dtype(config)

    def ready(name: str, w: Any, *axes: str | None) -> Any:
        return _ready(w, dtype, INPUTS[name], lay, *axes)

    def joined(q: Array, k: Array, v: Array) -> Array:
        # For each key-value head the query heads that read it, then its own key and value.
        q = q.reshape(q.shape[0], config.kv_heads, -1, config.head_dim)
        # One product instead of three: with few tokens the fixed cost of each counts.
        return jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)

    def paired(gate: Array, up: Array) -> Array:
        if not (size := gpu.pairs(config.mlp_dim)):
            return jnp.stack([gate, up], axis=1)
        # [D, F / n, 2, n]; scales of 8 bits have one row.
        return jnp.stack([x.reshape(x.shape[0], -1, size) for x in (gate, up)], axis=2)

    attention = dict(layer["attention"])
    # Of weights in 8 bits values and scales are joined alike.
    together = jax.tree.map(joined, *(_short(attention.pop(n), dtype) for n in "qkv"))
    attention["qkv"] = ready("qkv", together, "embed", "kv_heads", None, None)
    attention["o"] = ready("o", attention["o"], "heads", None, "embed")
    fused = layer | {"attention": attention}
    if "mlp" in layer:
        mlp = dict(layer["mlp"])
        pair = jax.tree.map(paired, *(_short(mlp.pop(n), dtype) for n in ("gate", "up")))
        axes = ("mlp", None, None) if jax.tree.leaves(pair)[0].ndim == 4 else (None, "mlp")
        mlp["gate_up"] = ready("gate_up", pair, "embed", *axes)
        mlp["down"] = ready("down", mlp["down"], "mlp", "embed")
        fused["mlp"] = mlp
    else:
        gate, up, down = (layer["experts"][name].astype(dtype) for name in ("gate", "up", "down"))
        fused["experts"] = {
            "router": lay(layer["experts"]["router"], "embed", "expert"),
            "gate": lay(gate, "expert", "embed", "mlp"),
            "up": lay(up, "expert", "embed", "mlp"),
            "down": lay(down, "expert", "mlp", "embed"),
        }
    return fused


def extend(
    weights: Any,
    cache: Cache,
    tokens: Array,
    positions: Array,
    live: Array,
    *,
    config: ModelConfig,
    options: Options = PLAIN,
    fresh: RowAttention | None = None,
) -> tuple[Array, Cache]:
    """``hidden`` for the next Q tokens of each row; see ``types.Network.extend``.

    Own column c of a row holds the token at position c + the length of its prefix. Every row must
    have written its tokens up to p before position p is asked for; what is beyond is not looked
    at, and a piece of the cache that no live row has reached is not read. Where the cache was empty
    the tokens may look at each other instead, ``fresh``.
    """
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape([tokens, positions, live])
    x_sqd = embed(config, weights, tokens, divided=False)
    # Masks and rotations are the same in all layers of a kind, and made once.
    views = {window: cache_views(cache, positions, live, window) for window in set(config.windows)}
    tables, rotation_ids = rotations(config, positions)
    attention = cached_attention(options.attention, config)
    put = cache_writer(options.attention, config)
    entries: list[tuple] = []

    def bind_cache(i: int, views: list[View]) -> Mix:
        def mix(q: Array, k: Array, v: Array) -> tuple[Array, tuple]:
            parts, pieces = [], []
            for view in views:
                entries = view.arrays(cache, i)
                if view.columns is not None:
                    # Written before it is read, so that a token sees itself.
                    entries = put(entries, {"k": k, "v": v}, view.columns, live, column=view.column)
                    entries = {
                        n: constrain(a, "batch", "kv_heads", None, None) for n, a in entries.items()
                    }
                    pieces.append(entries)
                scales = entries.get("k_scale"), entries.get("v_scale")
                parts.append(Part(entries["k"], entries["v"], view.mask, view.reached, *scales))
            if fresh is not None:
                return fresh(q, k, v, config.windows[i] or int(NO_WINDOW)), tuple(pieces)
            same = views[0].column is not None
            return attention(q, parts, row_parts=len(pieces), together=same), tuple(pieces)

        return mix

    by_kernels = fresh is None and gpu.takes(options.attention, config, cache, tokens)
    reached = gpu.reaches(config, cache, positions, live) if by_kernels else {}

    def bind_kernels(i: int, rotation: Rotation) -> gpu.Fused:
        return gpu.fused(config, cache, i, rotation, reached[config.windows[i]], scale_of(config))

    # Unrolled: a scan over layers would copy the cache of each out of a stack and back.
    for i, window in enumerate(config.windows):
        rotation = tables[rotation_ids[i]]
        mix = bind_kernels(i, rotation) if by_kernels else bind_cache(i, views[window])
        x_sqd, new, routing = block(
            config, weights["layers"][i], x_sqd, live, rotation, mix, None, options
        )
        if routing.experts is not None and "experts" in cache.rows[i][0]:
            new = record(cache.rows[i], new, routing.experts, views[window], live)
        entries.append(new)
    with jax.named_scope("final_norm"):
        x_sqd = rms_norm(residual_sum(x_sqd), weights["final_norm"], config)
    return x_sqd, cache.replace(rows=tuple(entries))


def fill(
    weights: Any,
    cache: Cache,
    tokens: Array,
    lengths: Array,
    *,
    config: ModelConfig,
    options: Options = PLAIN,
) -> Cache:
    """``extend`` of an empty cache by complete rows; see ``types.NetworkExtras.fill``."""
    n, p = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(p, dtype=jnp.int32), (n, p))
    live = positions < lengths[:, None]
    kind, fresh = kernel_for(options.attention, config, Shape(n, p, p), steady=True), None
    # What was rounded on its way into the cache is read from there.
    if kind != "xla" and "k_scale" not in cache.rows[0][0]:
        marks = live.astype(jnp.int32)
        fresh = row_attention(options.attention, config, positions, marks, lengths=lengths)
    _, cache = extend(
        weights, cache, tokens, positions, live, config=config, options=options, fresh=fresh
    )
    return cache


# ---------------------------------------------------------------- the cache


def init_cache(
    rows: int,
    length: int,
    weights: Any = None,
    pieces: int = 1,
    *,
    config: ModelConfig,
    attention: str = "auto",
) -> Cache:
    """An empty cache; each layer has pieces {"k": [rows, K, c, h], "v": the same}.

    The lengths c of the pieces add up to ``length``, or where kernels read or write caches to the
    next length that they take.
    """
    del weights  # the shape is in the config; other networks size their cache by the weights
    if caches_in_tiles(attention):
        tiles = -(-length // SHORTEST)
        length = tiles * SHORTEST
        # The kernel that reads finds what is in use by itself, so that one piece does, unless the
        # rows are too many for its tables.
        one_piece = reads_in_one_piece(attention, rows // parts_of("batch", rows), length)
        pieces = 1 if one_piece else max(n for n in range(1, pieces + 1) if tiles % n == 0)

    def empty(*shape: int) -> Array:
        zeros = jnp.zeros((rows, config.kv_heads, *shape), jnp.dtype(config.dtype))
        return constrain(zeros, "batch", "kv_heads", None, None)

    if gpu.decodes(attention, config):
        pieces = 1
    size, d = -(-length // pieces), config.head_dim
    sizes = [min(size, length - start) for start in range(0, length, size)]
    layer = lambda: tuple({"k": empty(c, d), "v": empty(c, d)} for c in sizes)  # noqa: E731
    return Cache(rows=tuple(layer() for _ in range(config.layers)))


# ---------------------------------------------------------------- what queries see


class View(NamedTuple):
    """View of one piece of a cache, shared by all layers with the same window.

    Attributes:
      piece: which piece of the rows' own arrays; None for the prefix.
      mask: [S, Q, C] bool.
      columns: [S, Q] int32, where in the piece the tokens are written; None where they are not.
      column: [] int32, the same where it is one column of all rows; else None.
      reached: [] bool, whether to read it at all; None for always.
    """

    piece: int | None
    mask: Array
    columns: Array | None = None
    column: Array | None = None
    reached: Array | None = None

    def arrays(self, cache: Cache, layer: int) -> dict[str, Array]:
        """The arrays of this piece."""
        return cache.prefix[layer][0] if self.piece is None else cache.rows[layer][self.piece]


def cache_views(cache: Cache, positions: Array, live: Array, window: int | None) -> list[View]:
    """The views of queries at these positions [S, Q] on each piece, and on the prefix, last."""
    reach = NO_WINDOW if window is None else np.int32(window)
    offsets = cache.offsets()[:, None]
    # Several tokens at once go to several columns, which one slice cannot write.
    together = cache.column if positions.shape[1] == 1 else None
    views, start = [], 0
    for piece, arrays in enumerate(cache.rows[0]):
        columns = positions - offsets - start
        size = arrays["v"].shape[2]
        # The mask is made of positions alone, so that stale entries past a row's end are never
        # seen.
        column_ids = jnp.arange(size, dtype=jnp.int32)[None, None, :]
        distance = columns[:, :, None] - column_ids
        mask = (distance >= 0) & (distance < reach)
        # The first piece is always read, so that every query has something to see.
        reached = None if piece == 0 else jnp.any(live & (columns >= 0))
        column = None if together is None else together - start
        views.append(View(piece, mask, columns, column, reached))
        start += size
    if cache.prefix is not None:
        (arrays,) = cache.prefix[0]
        column_ids = jnp.arange(arrays["v"].shape[2], dtype=jnp.int32)[None, None, :]
        mask = (column_ids < offsets[:, :, None]) & (positions[:, :, None] - column_ids < reach)
        views.append(View(None, mask))
    return views


# ---------------------------------------------------------------- writing


def cache_writer(attention: str, config: ModelConfig) -> Callable[..., dict[str, Array]]:
    """``write`` as a model does it, by the kernel for TPUs where there is one.

    Args:
      attention: one of ``choice.ATTENTION``.
      config: the model.
    """
    if not caches_in_tiles(attention):
        return write
    from jrl.models.attention.cache_write import takes, write_columns  # Pallas is slow to import

    def kernel(stored: dict[str, Array], new: dict[str, Array], columns: Array) -> dict[str, Array]:
        entries = entries_of(stored, new)
        return write_columns(stored, entries, columns, axes=AXES, interpret=platform() != "tpu")

    def put(
        old: dict[str, Array], new: dict[str, Array], columns: Array, live: Array, **where: Any
    ) -> dict[str, Array]:
        batch = mesh_axes("batch", columns.shape[0])
        # The kernel writes one token a row; rows that do not divide over the devices are left to
        # XLA.
        several = columns.shape[1] > 1 or (batch is None and mesh_axes("batch", 0))
        if several or not takes(old):
            return write(old, new, columns, live, **where)
        spec = PartitionSpec(batch, mesh_axes("kv_heads", config.kv_heads))
        stored = {name: x for name, x in old.items() if x.ndim == 4}
        specs = dict.fromkeys(stored, spec), dict.fromkeys(new, spec), PartitionSpec(batch)
        return by_device(kernel, specs, stored, new, jnp.where(live, columns, -1)[:, 0])

    return put


def write(
    old: dict[str, Array],
    new: dict[str, Array],
    columns: Array,
    live: Array,
    *,
    column: Array | None = None,
) -> dict[str, Array]:
    """A piece of a layer's cache with live tokens' entries stored.

    Args:
      old: "k" and "v", each [S, K, C, h]; as int8 with "k_scale" and "v_scale" [S, K, 1, C],
        one float32 for each position and head.
      new: "k" and "v", each [S, K, Q, h].
      columns: [S, Q] int32, where in the piece each token goes.
      live: [S, Q] bool; False (and columns outside the piece) write nothing.
      column: [] int32, the one that all live tokens go to, where Q is 1; None where they differ.
        Rows that are not live have ended, and what is past their end may change.
    """
    chex.assert_equal_shape([columns, live])
    size, entries = old["v"].shape[2], entries_of(old, new)
    if column is not None:
        at, inside = jnp.clip(column, 0, size - 1), (column >= 0) & (column < size)
        return {n: put_columns(old[n], x, at, AXES[n], inside) for n, x in entries.items()}

    # Out of range, where writes are dropped: negative indices would count from the end.
    columns = jnp.where(live & (columns >= 0), columns, size)
    entries = {name: x.transpose(0, 2, 1, 3) for name, x in entries.items()}

    # Row by row, so that rows on other devices are seen to be untouched.
    def put(row: Array, x_qk: Array, at: Array, *, columns_last: bool) -> Array:
        target = row.at[:, :, at] if columns_last else row.at[:, at]
        axes = (1, 2, 0) if columns_last else (1, 0, 2)
        return target.set(x_qk.transpose(axes).astype(row.dtype), mode="drop")

    return {
        name: jax.vmap(functools.partial(put, columns_last=AXES[name] == 3))(old[name], x, columns)
        for name, x in entries.items()
    }


def put_columns(x: Array, new: Array, start: Array, axis: int, inside: Array) -> Array:
    """``x`` with some columns replaced, the same in all rows.

    That is one operation; columns of each row's own are a loop over rows on some backends.

    Args:
      x: [S, ...] with C entries along ``axis``.
      new: like ``x``, with fewer entries along that axis.
      start: [] int32, the first column.
      axis: which.
      inside: bool, broadcast against ``new``, False to leave ``x`` as it is there.
    """
    old = jax.lax.dynamic_slice_in_dim(x, start, new.shape[axis], axis)
    new = jnp.where(inside, new.astype(x.dtype), old)
    return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis)


def entries_of(old: dict[str, Array], new: dict[str, Array]) -> dict[str, Array]:
    """New keys and values [S, K, Q, h] as a piece holds them; scales [S, K, Q, 1] if it has any."""
    entries = {name: new[name] for name in ("k", "v")}
    if "k_scale" not in old:
        return entries
    rounded = {name: quantise_entries(x) for name, x in entries.items()}
    scales = {f"{name}_scale": scale for name, (_, scale) in rounded.items()}
    return {name: x for name, (x, _) in rounded.items()} | scales
