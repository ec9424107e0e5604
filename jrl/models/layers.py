"""One layer of the decoder, and the forward pass of complete sequences.

The pass of decoding (``decode.extend``) is made of the same layers. The two differ in ``mix``: what
the queries of a layer attend to. The weights of all layers are stacked on a leading "layers" axis.
``hidden`` scans over it, so that a deep model compiles as fast as a shallow one; ``decode.extend``
unrolls it, so that the cache of each layer is updated in place.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jrl.mesh import constrain
from jrl.models import gpu, moe
from jrl.models.attention.choice import is_cudnn, row_attention, shared_attention
from jrl.models.attention.dense import NO_WINDOW
from jrl.models.config import ModelConfig
from jrl.models.gpu import Fused
from jrl.models.matmul import ATTENDED, PRODUCT, WIDE, project
from jrl.models.rope import Rotation, rotate, rotation_at, stacked_rotations
from jrl.models.weights import WeightSpec, is_spec, weights
from jrl.types import NOTHING, Array, Head, Params, RoutingRecord, SharedRows

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


# ---------------------------------------------------------------- embedding and norms


def embed(config: ModelConfig, params: Params, tokens: Array, *, divided: bool = True) -> Array:
    """[B, L, D] of tokens; ``divided`` where the table is, along its width.

    Then every shard looks its part up for the rows of all shards, and they exchange. The gradient
    takes the same way back. XLA's own way gathers the rows of all devices for it, and sums the
    gradient of the whole table over all of them.
    """
    dtype = jnp.dtype(config.dtype)
    if divided:
        # Both constraints together make XLA exchange activations in place of gathering the table.
        tokens = constrain(tokens, "lookup", "length")
    x_bld = params["embed"][tokens].astype(dtype)
    if divided:
        x_bld = constrain(x_bld, "lookup", "length", "embed")
    # In the activations' dtype, as Gemma was trained: a float32 factor would round differently.
    if config.embed_scale != 1.0:
        x_bld = x_bld * jnp.asarray(config.embed_scale, dtype)
    return constrain(x_bld, "batch", "length", "act_embed")


def _row(x: Array, ndim: int) -> Array:
    """Leading axes of size 1, so that ``x`` lines up with the last axes of an ndim array."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def rms_norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """``x`` over the root of its mean square, times the weight; float32, then as ``x``."""
    # A bfloat16 sum of D squares keeps 8 bits: most of its terms would be rounded away.
    x32, w = x.astype(jnp.float32), _row(weight.astype(jnp.float32), x.ndim)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_eps)
    return (x32 * scale * (1.0 + w if config.norm_plus_one else w)).astype(x.dtype)


# ---------------------------------------------------------------- one layer


def layer_weights(config: ModelConfig, stacked: Params, i: int) -> Params:
    """Layer i's weights out of the stacks; the two feed-forward stacks skip each other's layers."""
    sparse = config.sparse
    # Dense and sparse layers have stacks of their own, so layer i is at its rank among its kind.
    position = sum(s == sparse[i] for s in sparse[:i])
    absent = "mlp" if sparse[i] else "experts"
    return {
        name: jax.tree.map(lambda a, j=j: a[j], part)
        for name, part in stacked.items()
        if name != absent
        for j in [position if name in ("mlp", "experts") else i]
    }


Mix = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(q [B, Q, H, h], k [B, K, Q, h], v [B, K, Q, h]) -> (values seen [B, Q, H, h], anything)."""


class Options(NamedTuple):
    """Kernels of attention and routed experts.

    Attributes:
      attention: of ``attention.choice.ATTENTION``.
      grouped_matmul: of ``grouped.KERNELS``.
      fsdp: whether the mesh's fsdp axis divides the weights, as it does unless they were gathered.
    """

    attention: str = "auto"
    grouped_matmul: str = "auto"
    fsdp: bool = True


PLAIN = Options()


class Routed(NamedTuple):
    """The routing of a layer's tokens; empty for a dense layer.

    Attributes:
      experts: [B, Q, k] int32.
      sums: of ``moe.router_sums``.
    """

    experts: Array | None = None
    sums: Mapping[str, Array] = NOTHING


def _separate_products(w: Params, x_bqd: Array) -> tuple[Array, Array, Array]:
    """Queries [B, Q, H, h], keys and values [B, Q, K, h], as the matrices give them."""
    q, k, v = (
        project("bqd,dhk->bqhk", x_bqd, w[name], axes=("embed", heads, None))
        for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
    )
    return q, k, v


def _joined_bias(config: ModelConfig, w: Params) -> Array:
    """[K, H / K + 2, h]: the biases of a key-value head's queries, its key and its value."""
    of_queries = w["q_bias"].reshape(config.kv_heads, -1, config.head_dim)
    biases = [of_queries, w["k_bias"][:, None], w["v_bias"][:, None]]
    return jnp.concatenate(biases, axis=1)


def _projected(
    config: ModelConfig, w: Params, x_bqd: Array, rotation: Rotation, kernels: bool
) -> tuple[Array, Array, Array]:
    """Queries [B, Q, H, h], keys and values [B, K, Q, h], normalised and rotated.

    By ``gpu.norm_rotated`` with ``kernels``.
    """
    cos, sin = rotation
    q_bqhd, k_bqkd, v_bqkd = _separate_products(w, x_bqd)
    if config.qkv_bias:
        q_bqhd = q_bqhd + _row(w["q_bias"], 4).astype(x_bqd.dtype)
        k_bqkd = k_bqkd + _row(w["k_bias"], 4).astype(x_bqd.dtype)
        v_bqkd = v_bqkd + _row(w["v_bias"], 4).astype(x_bqd.dtype)
    # Norms before the rotation, as Qwen3 and Gemma 3 were trained.
    norms = (w["q_norm"], w["k_norm"]) if config.qk_norm else (None, None)
    if kernels:
        q_bqhd = gpu.norm_rotated(config, q_bqhd, norms[0], rotation, "heads")
        k_bqkd = gpu.norm_rotated(config, k_bqkd, norms[1], rotation, "kv_heads")
    else:
        q_bqhd, k_bqkd = (
            rotate(
                x if norm is None else rms_norm(x, norm, config), cos[:, :, None], sin[:, :, None]
            )
            for x, norm in zip((q_bqhd, k_bqkd), norms, strict=True)
        )
    # Transposed last: before the rotation, XLA would fold this into the product and transpose x.
    return q_bqhd, k_bqkd.transpose(0, 2, 1, 3), v_bqkd.transpose(0, 2, 1, 3)


def _projected_at_once(
    config: ModelConfig, w: Params, x_bqd: Array, rotation: Rotation
) -> tuple[Array, Array, Array]:
    """Queries, keys and values from weights prepared for sampling, in few and small operations.

    The axis g holds the queries of a key-value head, then its key and its value.
    """
    cos, sin = (x[:, :, None, None] for x in rotation)
    queries = config.heads // config.kv_heads
    # One product of a decode step in place of three: each reads its weights at memory speed, and
    # the fixed cost of an operation is what is saved.
    all_bqkgh = project("bqd,dkgh->bqkgh", x_bqd, w["qkv"])
    if config.qkv_bias:
        all_bqkgh = all_bqkgh + _row(_joined_bias(config, w), 5).astype(x_bqd.dtype)
    rotated = all_bqkgh[:, :, :, :-1]
    if config.qk_norm:
        norms = jnp.stack([*[w["q_norm"]] * queries, w["k_norm"]])
        rotated = rms_norm(rotated, norms, config)
    rotated = rotate(rotated, cos, sin)
    q_bqhd = rotated[:, :, :, :-1].reshape(*x_bqd.shape[:2], config.heads, config.head_dim)
    k_bkqd, v_bkqd = (x[:, :, :, -1].transpose(0, 2, 1, 3) for x in (rotated, all_bqkgh))
    return q_bqhd, k_bkqd, v_bkqd


def _products_at_once(config: ModelConfig, w: Params, x_bqd: Array) -> Array | gpu.Sum:
    """[B, Q, K, H / K + 2, h]: the queries of each key-value head, its key and value; no biases."""
    if "qkv" not in w:  # adapters beside a frozen base, whose matrices stay separate
        q, k, v = _separate_products(w, x_bqd)
        q = q.reshape(*x_bqd.shape[:2], config.kv_heads, -1, config.head_dim)
        return jnp.concatenate([q, k[:, :, :, None], v[:, :, :, None]], axis=3)
    in_parts = gpu.product(x_bqd, w["qkv"], 1)
    return in_parts if in_parts is not None else project("bqd,dkgh->bqkgh", x_bqd, w["qkv"])


def _attention(
    config: ModelConfig,
    w: Params,
    x_bqd: Array,
    rotation: Rotation,
    mix: Mix | Fused,
    options: Options,
) -> tuple[Any, Any]:
    """Projections, head norms and rotation around ``mix``, which sees the keys and values."""
    if isinstance(mix, Fused):
        norms = (w["q_norm"], w["k_norm"]) if config.qk_norm else (None, None)
        bias = _joined_bias(config, w) if config.qkv_bias else None
        seen_bqhd, extra = mix.attend(_products_at_once(config, w, x_bqd), (*norms, bias))
        # Parts are added up where the residual is, which has no place for a bias.
        in_parts = None if config.o_bias else gpu.product(seen_bqhd, w["o"], 2)
        return _attention_output(config, w, seen_bqhd) if in_parts is None else in_parts, extra
    if "qkv" in w:
        q_bqhd, k_bkqd, v_bkqd = _projected_at_once(config, w, x_bqd, rotation)
    else:
        kernels = gpu.decodes(options.attention, config)
        q_bqhd, k_bkqd, v_bkqd = _projected(config, w, x_bqd, rotation, kernels)
    q_bqhd = constrain(q_bqhd, "batch", "length", "heads", None)
    # Where the length is divided each device keeps its queries and gets all keys and values.
    # Left to itself XLA may divide keys by length and then gather them inside the scores.
    k_bkqd = constrain(k_bkqd, "batch", "kv_heads", None, None)
    v_bkqd = constrain(v_bkqd, "batch", "kv_heads", None, None)
    seen_bqhd, extra = mix(q_bqhd, k_bkqd, v_bkqd)
    return _attention_output(config, w, seen_bqhd), extra


def _attention_output(config: ModelConfig, w: Params, seen_bqhd: Array) -> Array:
    out = project("bqhk,hkd->bqd", seen_bqhd, w["o"], axes=("heads", None, "embed"))
    return out + _row(w["o_bias"], 3).astype(out.dtype) if config.o_bias else out


def _mlp_step(config: ModelConfig, w: Params, x_bqd: Array) -> Array | gpu.Sum:
    """``_mlp`` of a token step on a GPU."""
    hidden = None
    if not config.mlp_bias and "gate_up" in w:
        activation = config.activation
        hidden = gpu.gated(x_bqd, w["gate_up"], activation, _ACTIVATIONS[activation])
    if hidden is None or (out := gpu.product(hidden, w["down"], 1)) is None:
        return _mlp(config, w, x_bqd)
    return out


def _mlp(config: ModelConfig, w: Params, x_bqd: Array) -> Array:
    """The gated feed-forward part of a dense layer."""

    def bias(name: str, x: Array) -> Array:
        return x + _row(w[f"{name}_bias"], 3).astype(x.dtype) if config.mlp_bias else x

    if "gate_up" in w:  # prepared for sampling
        # One product with both matrices: few rows wait for weights, not for arithmetic.
        if gpu.in_pairs(w["gate_up"]):
            both = project("bqd,dncf->bqncf", x_bqd, w["gate_up"])
            gate, up = (both[:, :, :, i].reshape(*x_bqd.shape[:2], -1) for i in (0, 1))
        else:
            both = project("bqd,dcf->bqcf", x_bqd, w["gate_up"])
            gate, up = both[:, :, 0], both[:, :, 1]
    else:
        wide = "embed", "mlp"
        gate, up = (project("bqd,df->bqf", x_bqd, w[name], axes=wide) for name in ("gate", "up"))
    hidden_bqf = _ACTIVATIONS[config.activation](bias("gate", gate)) * bias("up", up)
    # Divided along F before the second product, whose sum over F is then the only communication.
    hidden_bqf = constrain(hidden_bqf, "batch", "length", "mlp")
    return bias("down", project("bqf,fd->bqd", hidden_bqf, w["down"], axes=("mlp", "embed")))


def _experts(
    config: ModelConfig,
    w: Params,
    x_bqd: Array,
    live_bq: Array,
    recorded_bqk: Array | None,
    options: Options,
) -> tuple[Array, Routed]:
    """The feed-forward part of a sparse layer, and where its router sent the tokens."""
    b, q, _ = x_bqd.shape
    # float32 scores: between bfloat16 ones near ties are common, and sampling and training would
    # send such tokens to different experts.
    logits = project("bqd,de->bqe", x_bqd, w["router"], jnp.float32)
    logits_me = constrain(logits, "batch", "length", None).reshape(b * q, -1)
    routing = moe.route(
        logits_me,
        experts_per_token=config.experts_per_token,
        norm_topk_prob=config.norm_topk_prob,
        recorded=None if recorded_bqk is None else recorded_bqk.reshape(b * q, -1),
    )
    weights_bqk, experts_bqk = (x.reshape(b, q, -1) for x in (routing.weights, routing.experts))
    act = _ACTIVATIONS[config.activation]
    mats = moe.Experts(w["gate"], w["up"], w["down"], act, options.grouped_matmul)
    y_bqd = moe.over_mesh(x_bqd, weights_bqk, experts_bqk, live_bq, mats, fsdp=options.fsdp)
    return y_bqd, Routed(experts_bqk, moe.router_sums(logits_me, routing, live_bq.reshape(-1)))


_BY_TOKEN = "batch", "length", "act_embed"


class Residual(NamedTuple):
    """A sum that the next norm makes: of a kernel that does both."""

    x: Array
    out: Array | gpu.Sum


def residual_sum(x: Array | Residual) -> Array:
    """A layer's output as one array."""
    return x.x + gpu.whole(x.out, x.x.dtype) if isinstance(x, Residual) else x


def _added_norm(
    config: ModelConfig, x: Array | Residual, weight: Array, mix: Mix | Fused
) -> tuple[Array, Array]:
    """A residual, and its norm."""
    if isinstance(x, Residual) and isinstance(mix, Fused):
        return mix.added_norm(x.x, x.out, weight)
    total = x if not isinstance(x, Residual) else constrain(residual_sum(x), *_BY_TOKEN)
    return total, rms_norm(total, weight, config)


def block(
    config: ModelConfig,
    w: Params,
    x_bqd: Array | Residual,
    live_bq: Array,
    rotation: Rotation,
    mix: Mix | Fused,
    recorded_bqk: Array | None = None,
    options: Options = PLAIN,
) -> tuple[Any, Any, Routed]:
    """One layer: x plus attention plus feed-forward; also the result of ``mix`` and the routing.

    With ``Fused`` the last sum is left to the next layer.
    """
    with jax.named_scope("attention"):
        x, normed = _added_norm(config, x_bqd, w["attention_norm"], mix)
        out, extra = _attention(config, w["attention"], normed, rotation, mix, options)
        if config.post_norms:
            out = rms_norm(gpu.whole(out, x.dtype), w["attention_post_norm"], config)
        after = Residual(x, out)
    with jax.named_scope("experts" if "experts" in w else "mlp"):
        x, normed = _added_norm(config, after, w["mlp_norm"], mix)
        routing = Routed()
        if "experts" in w:
            out, routing = _experts(config, w["experts"], normed, live_bq, recorded_bqk, options)
        else:
            feed_forward = _mlp_step if isinstance(mix, Fused) else _mlp
            out = feed_forward(config, w["mlp"], normed)
        if config.post_norms:
            out = rms_norm(gpu.whole(out, x.dtype), w["mlp_post_norm"], config)
        after = Residual(x, out)
        if isinstance(mix, Fused):
            return after, extra, routing
        x_bqd = constrain(residual_sum(after), *_BY_TOKEN)
    return x_bqd, extra, routing


# ---------------------------------------------------------------- complete sequences

_SAVED = {
    "scores": (PRODUCT, WIDE, ATTENDED),
    "elementwise": (PRODUCT, WIDE, ATTENDED),
    "dots": (PRODUCT, WIDE),
    "mlp": (PRODUCT, ATTENDED),
    "full": (),
}
REMAT = (*_SAVED, "none")
"""What the backward pass of a layer recomputes: all but products with weights and attention, all
but products, all but attention and the products that are not wide, all, nothing. "scores" is the
first of these, and keeps the vocabulary's scores as well. All but "none" are in the order of the
memory that they take, the largest first, and of the time, the least first."""


def hidden(
    params: Params,
    tokens: Array,
    positions: Array,
    segments: Array,
    *,
    config: ModelConfig,
    remat: str = "none",
    options: Options = PLAIN,
) -> tuple[Array, dict[str, Array]]:
    """The normalised last-layer output for complete sequences; see ``types.Network.hidden``."""
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape([tokens, positions, segments])
    # Only live tokens may visit experts: padding would change balance statistics and take time.
    x_bld, live = embed(config, params, tokens), segments != 0
    attention = row_attention(options.attention, config, positions, segments)
    tables, rotation_ids = stacked_rotations(config, positions)

    def body(x_bld: Array, layer: tuple) -> tuple[Array, dict[str, Array]]:
        w, rotation_id, window, _ = layer

        def mix(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            return attention(q, k, v, window), None

        rotation = rotation_at(tables, rotation_id)
        x_bld, _, routing = block(config, w, x_bld, live, rotation, mix, None, options)
        return x_bld, dict(routing.sums)

    x_bld, stats = _through_layers(config, remat, params["layers"], rotation_ids, body, x_bld)
    with jax.named_scope("final_norm"):
        return rms_norm(x_bld, params["final_norm"], config), stats


def hidden_shared(
    params: Params,
    rows: SharedRows,
    *,
    config: ModelConfig,
    remat: str = "none",
    options: Options = PLAIN,
) -> tuple[Array, dict[str, Array]]:
    """``hidden`` for rows that share prompts; see ``types.NetworkExtras.hidden_shared``.

    Prompts and rows go through each layer one after the other, and the rows read the prompts' keys
    and values there. A router's sums are over the tokens of both.
    """
    chex.assert_rank([rows.prompt_tokens, rows.tokens], [3, 2])
    chex.assert_equal_shape([rows.tokens, rows.positions, rows.segments, rows.owners])
    m, b, p = rows.prompt_tokens.shape
    columns = jnp.broadcast_to(jnp.arange(p, dtype=jnp.int32)[None], (m * b, p))
    inside = columns < rows.prompt_lengths.reshape(m * b, 1)
    live = rows.segments != 0
    # Prompts start at column 0 without gaps, which kernels can use instead of a mask.
    at_prompts = row_attention(
        options.attention,
        config,
        columns,
        inside.astype(jnp.int32),
        lengths=rows.prompt_lengths.reshape(m * b),
    )
    at_both = shared_attention(options.attention, config, rows)
    prompts = rows.prompt_tokens.reshape(m * b, p)
    xs = embed(config, params, prompts), embed(config, params, rows.tokens)
    # All prompts are at the same positions, so that one row of angles serves them.
    prompt_rotations, rotation_ids = stacked_rotations(config, columns[:1])
    row_rotations, _ = stacked_rotations(config, rows.positions)
    recorded = _by_layer(rows.routing) if rows.routing is not None else None

    def body(xs: tuple[Array, Array], layer: tuple) -> tuple[tuple, dict[str, Array]]:
        (x_npd, x_rcd), (w, rotation_id, window, replay) = xs, layer
        for_prompts, for_rows = replay or (None, None)

        def read(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            return at_prompts(q, k, v, window), (k, v)

        rotation = rotation_at(prompt_rotations, rotation_id)
        x_npd, (k_nkpd, v_nkpd), of_prompts = block(
            config, w, x_npd, inside, rotation, read, for_prompts, options
        )
        # The rows read what this layer made of the prompts, which is neither copied for them nor
        # kept: its gradient is summed over the rows by the product that reads it.
        before = _side_by_side(k_nkpd, m), _side_by_side(v_nkpd, m)

        def mix_rows(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            return at_both(q, *before, k, v, window), None

        rotation = rotation_at(row_rotations, rotation_id)
        x_rcd, _, of_rows = block(config, w, x_rcd, live, rotation, mix_rows, for_rows, options)
        return (x_npd, x_rcd), {name: x + of_rows.sums[name] for name, x in of_prompts.sums.items()}

    (_, x_rcd), stats = _through_layers(
        config, remat, params["layers"], rotation_ids, body, xs, recorded
    )
    with jax.named_scope("final_norm"):
        return rms_norm(x_rcd, params["final_norm"], config), stats


def _by_layer(routing: RoutingRecord) -> tuple[Array, Array]:
    """Recorded experts of prompts [n, M * b, P, k] and rows [n, R, C, k], layers first."""
    prompts = routing.prompts.reshape(-1, *routing.prompts.shape[2:])
    return jnp.moveaxis(prompts, 2, 0), jnp.moveaxis(routing.tokens, 2, 0)


def _side_by_side(x_nkpd: Array, blocks: int) -> Array:
    """[M, K, b * P, h]: keys or values of the prompts of a block one after the other."""
    n, k, p, d = x_nkpd.shape
    # One prompt a block is the layout already; a transpose would copy all keys of the prompts.
    if n == blocks:
        return x_nkpd
    x_mkbpd = x_nkpd.reshape(blocks, n // blocks, k, p, d).transpose(0, 2, 1, 3, 4)
    return x_mkbpd.reshape(blocks, k, -1, d)


def _through_layers(
    config: ModelConfig,
    remat: str,
    layers: Params,
    rotation_ids: np.ndarray,
    body: Callable[[Any, tuple], tuple[Any, dict[str, Array]]],
    carry: Any,
    recorded: Any = None,
) -> tuple[Any, dict[str, Array]]:
    """``body`` over (weights, rotation, window, recorded experts) of every layer.

    Its second results are stacked. The record, if any, has a leading axis of sparse layers.
    """
    if remat in _SAVED:
        policy = jax.checkpoint_policies.save_only_these_names(*_SAVED[remat])
        if ATTENDED in _SAVED[remat]:
            policy = jax.checkpoint_policies.save_from_both_policies(policy, is_cudnn)
        # Inside a scan nothing is shared across the loop's boundary, so the barriers of prevent_cse
        # would only block fusions.
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    # Numbers, so that layers with and without a window share one compiled body.
    windows = np.array([NO_WINDOW if w is None else np.int32(w) for w in config.windows])
    if len(set(config.sparse)) == 1:
        xs = (layers, jnp.asarray(rotation_ids), jnp.asarray(windows), recorded)
        # The body is compiled once, whatever the depth.
        return jax.lax.scan(body, carry, xs)
    per_layer: list[dict[str, Array]] = []  # layers of two shapes cannot be stacked
    for i in range(config.layers):
        record = recorded if config.sparse[i] else None
        replay = jax.tree.map(operator.itemgetter(len(per_layer)), record)
        layer = layer_weights(config, layers, i), rotation_ids[i], windows[i], replay
        carry, stats = body(carry, layer)
        per_layer += [stats] if stats else []
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *per_layer)


def logits(params: Params, hidden: Array, *, config: ModelConfig) -> Array:
    """[..., V] float32 scores of the next token; soft cap applied, no temperature."""
    lead = "abcdefg"[: hidden.ndim - 1]
    with jax.named_scope("logits"):
        # A head prepared for sampling is a copy in another layout, so its presence decides, not the
        # configuration.
        tied = "head" not in params  # and not prepared for sampling, which brings a head
        head = params["embed" if tied else "head"]
        spec = f"{lead}x,vx->{lead}v" if tied else f"{lead}x,xv->{lead}v"
        hidden = hidden.astype(jnp.dtype(config.dtype))
        if (out := gpu.scores(hidden, head)) is None:
            out = project(spec, hidden, head, jnp.float32)
        # The cap before any temperature, as Gemma applies it to scores.
        if config.logit_softcap is not None:
            out = config.logit_softcap * jnp.tanh(out / config.logit_softcap)
        return out


def head(params: Params, *, config: ModelConfig, remat: str = "none") -> Head:
    """The weight and layout of ``logits``; see ``types.NetworkExtras.head``."""
    weight, axis = (params["embed"], 0) if config.tied_embeddings else (params["head"], 1)
    return Head(weight, axis, config.logit_softcap, saves_scores=remat == "scores")


# ---------------------------------------------------------------- dtypes of weights


def stored_dtype(config: ModelConfig) -> Any:
    """Dtype of the matrices of ``prepare``: the shorter of weights and activations."""
    return min(jnp.dtype(config.dtype), jnp.dtype(config.param_dtype), key=lambda x: x.itemsize)


def rounded(params: Params, *, config: ModelConfig) -> Params:
    """The parameters, with those that ``prepare`` rounds to another dtype already rounded."""
    dtype = stored_dtype(config)

    def each(path: tuple, spec: WeightSpec, w: Array) -> Array:
        name = path[-1].key
        matrix = name == "embed" or (spec.inputs and name != "router")
        return w.astype(dtype) if matrix else w

    return jax.tree_util.tree_map_with_path(each, dict(weights(config)), params, is_leaf=is_spec)
