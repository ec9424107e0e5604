"""The decoder: parameters described once, and the functions that read them.

Parameters are a nested dict in which the weights of all layers are stacked on a leading "layers"
axis. ``hidden`` scans over that axis, so that a deep model compiles as fast as a shallow one;
``extend`` unrolls it, so that the cache of each layer is updated in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import choose
from jrl.mesh import constrain
from jrl.models import moe
from jrl.models.attention import (
    NO_WINDOW,
    Past,
    attend,
    attend_shared,
    attention_weights,
    frequencies,
    rotate,
    rotation,
    visible,
)
from jrl.models.config import ModelConfig
from jrl.models.decode import Part, View, attend_parts, cache_views, init_cache, prepare, write
from jrl.models.product import PRODUCT, contract
from jrl.models.weights import abstract as abstract
from jrl.models.weights import axes, init, layer_weights
from jrl.models.weights import count_params as count_params
from jrl.types import Array, Cache, Head, Network, Params, SharedRows

REMAT = ("dots", "full", "none")
"""What the backward pass of a layer recomputes: all but products with weights, all, nothing."""

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


# ---------------------------------------------------------------- arithmetic


def _row(x: Array, ndim: int) -> Array:
    """Leading axes of size 1, so that ``x`` lines up with the last axes of an ndim array."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def rms_norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """``x`` over the root of its mean square, times the weight; float32, then as ``x``."""
    x32, w = x.astype(jnp.float32), _row(weight.astype(jnp.float32), x.ndim)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_eps)
    return (x32 * scale * (1.0 + w if config.norm_plus_one else w)).astype(x.dtype)


# ---------------------------------------------------------------- one layer

Mix = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(q [B, Q, H, h], k [B, K, Q, h], v [B, K, Q, h]) -> (values seen [B, Q, H, h], anything)."""


def _attention(
    config: ModelConfig, w: Params, x_bqd: Array, turn: tuple[Array, Array], mix: Mix
) -> tuple[Array, Any]:
    """Projections, head norms and rotation around ``mix``, which sees the keys and values."""
    if "qkv" in w:  # prepared for sampling
        out_bqkgd = contract("bqd,dkgh->bqkgh", x_bqd, w["qkv"])  # g: queries, key, value
        q_bqhd = out_bqkgd[:, :, :, :-2].reshape(*x_bqd.shape[:2], config.heads, config.head_dim)
        k_bkqd, v_bkqd = (out_bqkgd[:, :, :, i].transpose(0, 2, 1, 3) for i in (-2, -1))
    else:
        q_bqhd = contract("bqd,dhk->bqhk", x_bqd, w["q"])
        k_bkqd = contract("bqd,dhk->bhqk", x_bqd, w["k"])
        v_bkqd = contract("bqd,dhk->bhqk", x_bqd, w["v"])
    if config.qkv_bias:
        q_bqhd = q_bqhd + _row(w["q_bias"], 4).astype(x_bqd.dtype)
        k_bkqd = k_bkqd + w["k_bias"][None, :, None].astype(x_bqd.dtype)
        v_bkqd = v_bkqd + w["v_bias"][None, :, None].astype(x_bqd.dtype)
    if config.qk_norm:
        q_bqhd = rms_norm(q_bqhd, w["q_norm"], config)
        k_bkqd = rms_norm(k_bkqd, w["k_norm"], config)
    cos, sin = turn
    q_bqhd = rotate(q_bqhd, cos[:, :, None], sin[:, :, None])
    k_bkqd = rotate(k_bkqd, cos[:, None], sin[:, None])
    q_bqhd = constrain(q_bqhd, "batch", "length", "heads", None)
    k_bkqd = constrain(k_bkqd, "batch", "kv_heads", "length", None)
    v_bkqd = constrain(v_bkqd, "batch", "kv_heads", "length", None)
    seen_bqhd, extra = mix(q_bqhd, k_bkqd, v_bkqd)
    out = contract("bqhk,hkd->bqd", seen_bqhd, w["o"])
    if config.o_bias:
        out = out + _row(w["o_bias"], 3).astype(out.dtype)
    return out, extra


def _mlp(config: ModelConfig, w: Params, x_bqd: Array) -> Array:
    """The gated feed-forward part of a dense layer."""

    def bias(name: str, x: Array) -> Array:
        return x + _row(w[f"{name}_bias"], 3).astype(x.dtype) if config.mlp_bias else x

    if "gate_up" in w:  # prepared for sampling
        both = contract("bqd,dcf->bqcf", x_bqd, w["gate_up"])
        gate, up = both[:, :, 0], both[:, :, 1]
    else:
        gate, up = (contract("bqd,df->bqf", x_bqd, w[name]) for name in ("gate", "up"))
    hidden_bqf = _ACTIVATIONS[config.activation](bias("gate", gate)) * bias("up", up)
    hidden_bqf = constrain(hidden_bqf, "batch", "length", "mlp")
    return bias("down", contract("bqf,fd->bqd", hidden_bqf, w["down"]))


def _experts(
    config: ModelConfig, w: Params, x_bqd: Array, live_bq: Array
) -> tuple[Array, dict[str, Array]]:
    """The feed-forward part of a sparse layer, with its router's statistics."""
    x_md = x_bqd.reshape(-1, x_bqd.shape[-1])
    logits_me = contract("md,de->me", x_md, w["router"], jnp.float32)
    weights_mk, experts_mk, probs_me = moe.route(
        logits_me,
        experts_per_token=config.experts_per_token,
        norm_topk_prob=config.norm_topk_prob,
    )
    act = _ACTIVATIONS[config.activation]
    y_md = moe.routed(x_md, weights_mk, experts_mk, w["gate"], w["up"], w["down"], act)
    return y_md.reshape(x_bqd.shape), moe.router_statistics(
        experts_mk, probs_me, live_bq.reshape(-1)
    )


def _block(
    config: ModelConfig,
    w: Params,
    x_bqd: Array,
    live_bq: Array,
    turn: tuple[Array, Array],
    mix: Mix,
) -> tuple[Array, Any, dict[str, Array]]:
    """One layer: x plus attention plus feed-forward; also what ``mix`` gave and router numbers."""
    with jax.named_scope("attention"):
        normed = rms_norm(x_bqd, w["attention_norm"], config)
        out, extra = _attention(config, w["attention"], normed, turn, mix)
        if config.post_norms:
            out = rms_norm(out, w["attention_post_norm"], config)
        x_bqd = constrain(x_bqd + out, "batch", "length", "act_embed")
    with jax.named_scope("experts" if "experts" in w else "mlp"):
        normed = rms_norm(x_bqd, w["mlp_norm"], config)
        stats: dict[str, Array] = {}
        if "experts" in w:
            out, stats = _experts(config, w["experts"], normed, live_bq)
        else:
            out = _mlp(config, w["mlp"], normed)
        if config.post_norms:
            out = rms_norm(out, w["mlp_post_norm"], config)
        x_bqd = constrain(x_bqd + out, "batch", "length", "act_embed")
    return x_bqd, extra, stats


# ---------------------------------------------------------------- the network


def _embed(config: ModelConfig, params: Params, tokens: Array) -> Array:
    dtype = jnp.dtype(config.dtype)
    x_bld = params["embed"][tokens].astype(dtype)
    if config.embed_scale != 1.0:
        x_bld = x_bld * jnp.asarray(config.embed_scale, dtype)
    return constrain(x_bld, "batch", "length", "act_embed")


def _turns(config: ModelConfig, positions: Array) -> tuple[list[tuple[Array, Array]], list[int]]:
    """The distinct rotations of the model at these positions, and which one each layer uses."""
    distinct = list(dict.fromkeys(config.ropes))
    turns = [rotation(positions, jnp.asarray(frequencies(r, config.head_dim))) for r in distinct]
    return turns, [distinct.index(rope) for rope in config.ropes]


def hidden(
    params: Params,
    tokens: Array,
    positions: Array,
    segments: Array,
    *,
    config: ModelConfig,
    remat: str = "none",
) -> tuple[Array, dict[str, Array]]:
    """The normalised output of the last layer for whole sequences; see ``types.Network.hidden``."""
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape([tokens, positions, segments])
    x_bld, live = _embed(config, params, tokens), segments != 0
    mask, distance = visible(positions, segments, positions, segments)
    turns, turn_ids = _stacked_turns(config, positions)
    scale, cap = _query_scale(config), config.attention_softcap

    def body(x_bld: Array, layer: tuple) -> tuple[Array, dict[str, Array]]:
        w, turn_id, window = layer
        near = mask if config.window is None else mask & (distance < window)

        def mix(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            return attend(q, k, v, near, scale=scale, softcap=cap), None

        x_bld, _, stats = _block(config, w, x_bld, live, _pick(turns, turn_id), mix)
        return x_bld, stats

    x_bld, stats = _through_layers(config, remat, params["layers"], turn_ids, body, x_bld)
    with jax.named_scope("final_norm"):
        return rms_norm(x_bld, params["final_norm"], config), stats


def attention(
    params: Params, tokens: Array, positions: Array, segments: Array, *, config: ModelConfig
) -> Array:
    """The attention weights of the middle layer; see ``types.Network.attention``."""
    chex.assert_equal_shape([tokens, positions, segments])
    x_bld, live = _embed(config, params, tokens), segments != 0
    mask, distance = visible(positions, segments, positions, segments)
    turns, turn_ids = _turns(config, positions)
    scale, cap = _query_scale(config), config.attention_softcap
    weights = jnp.zeros(())
    for i in range(config.layers // 2 + 1):
        window = config.windows[i]
        near = mask if window is None else mask & (distance < window)

        def mix(q: Array, k: Array, v: Array, near: Array = near) -> tuple[Array, Array]:
            seen = attention_weights(q, k, near, scale=scale, softcap=cap)
            return attend(q, k, v, near, scale=scale, softcap=cap), seen

        w = layer_weights(config, params["layers"], i)
        x_bld, weights, _ = _block(config, w, x_bld, live, turns[turn_ids[i]], mix)
    b, l = tokens.shape
    seen_bhll = weights.reshape(b, config.heads, l, l)
    return jnp.where(near[:, None], seen_bhll, 0)


def hidden_shared(
    params: Params, laid: SharedRows, *, config: ModelConfig, remat: str = "none"
) -> tuple[Array, dict[str, Array]]:
    """The same for rows that share prompts; see ``types.Network.hidden_shared``.

    Prompts and rows go through each layer one after the other, and the rows read the prompts' keys
    and values there. Router statistics are over the tokens of both.
    """
    chex.assert_rank([laid.prompt_tokens, laid.tokens], [3, 2])
    chex.assert_equal_shape([laid.tokens, laid.positions, laid.segments, laid.owners])
    m, b, p = laid.prompt_tokens.shape
    members = laid.tokens.shape[0] // m
    places = jnp.broadcast_to(jnp.arange(p, dtype=jnp.int32)[None], (m * b, p))
    inside = places < laid.prompt_lengths.reshape(m * b, 1)
    segments, live = inside.astype(jnp.int32), laid.segments != 0
    ahead = live[:, :, None] & jnp.repeat(inside.reshape(m, b * p), members, axis=0)[:, None]
    if b > 1:
        slots = jnp.repeat(jnp.arange(b, dtype=jnp.int32), p)[None, None]
        ahead &= laid.owners[:, :, None] == slots
    views = (
        visible(places, segments, places, segments),
        visible(laid.positions, laid.segments, laid.positions, laid.segments),
        (ahead, laid.positions[:, :, None] - jnp.tile(places[:1], (1, b))[:, None]),
    )
    prompts = laid.prompt_tokens.reshape(m * b, p)
    xs = _embed(config, params, prompts), _embed(config, params, laid.tokens)
    prompt_turns, turn_ids = _stacked_turns(config, places[:1])
    row_turns, _ = _stacked_turns(config, laid.positions)
    scale, cap = _query_scale(config), config.attention_softcap

    def body(xs: tuple[Array, Array], layer: tuple) -> tuple[tuple, dict[str, Array]]:
        (x_npd, x_rcd), (w, turn_id, window) = xs, layer
        near_pp, near_cc, near_cp = (
            mask if config.window is None else mask & (distance < window)
            for mask, distance in views
        )

        def read(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            return attend(q, k, v, near_pp, scale=scale, softcap=cap), (k, v)

        turn = _pick(prompt_turns, turn_id)
        x_npd, (k_nkpd, v_nkpd), of_prompts = _block(config, w, x_npd, inside, turn, read)
        past = Past(_side_by_side(k_nkpd, m), _side_by_side(v_nkpd, m), near_cp)

        def go_on(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            return attend_shared(q, past, k, v, near_cc, scale=scale, softcap=cap), None

        turn = _pick(row_turns, turn_id)
        x_rcd, _, of_rows = _block(config, w, x_rcd, live, turn, go_on)
        share = inside.sum() / jnp.maximum(inside.sum() + live.sum(), 1).astype(jnp.float32)
        both = jax.tree.map(lambda a, b: share * a + (1 - share) * b, of_prompts, of_rows)
        return (x_npd, x_rcd), both

    (_, x_rcd), stats = _through_layers(config, remat, params["layers"], turn_ids, body, xs)
    with jax.named_scope("final_norm"):
        return rms_norm(x_rcd, params["final_norm"], config), stats


def _side_by_side(x_nkpd: Array, blocks: int) -> Array:
    """[M, K, b * P, h]: keys or values of the prompts of a block one after the other."""
    n, k, p, d = x_nkpd.shape
    if n == blocks:
        return x_nkpd
    x_mkbpd = x_nkpd.reshape(blocks, n // blocks, k, p, d).transpose(0, 2, 1, 3, 4)
    return x_mkbpd.reshape(blocks, k, -1, d)


def _stacked_turns(config: ModelConfig, positions: Array) -> tuple[tuple[Array, Array], np.ndarray]:
    """All distinct rotations, cosines and sines stacked; which one each layer uses."""
    turns, turn_ids = _turns(config, positions)
    cos, sin = (jnp.stack(part) for part in zip(*turns, strict=True))
    return (cos, sin), np.array(turn_ids, np.int32)


def _pick(turns: tuple[Array, Array], i: Array) -> tuple[Array, Array]:
    return turns[0][i], turns[1][i]


def _through_layers(
    config: ModelConfig,
    remat: str,
    layers: Params,
    turn_ids: np.ndarray,
    body: Callable[[Any, tuple], tuple[Any, dict[str, Array]]],
    carry: Any,
) -> tuple[Any, dict[str, Array]]:
    """``body`` over (weights, rotation, window) of every layer; what it gives beside is stacked."""
    if remat != "none":
        kept = jax.checkpoint_policies.save_only_these_names(PRODUCT)
        body = jax.checkpoint(body, policy=kept if remat == "dots" else None, prevent_cse=False)
    windows = np.array([NO_WINDOW if w is None else np.int32(w) for w in config.windows])
    if len(set(config.sparse)) == 1:
        return jax.lax.scan(body, carry, (layers, jnp.asarray(turn_ids), jnp.asarray(windows)))
    per_layer = []  # layers of two shapes cannot be stacked
    for i in range(config.layers):
        carry, stats = body(carry, (layer_weights(config, layers, i), turn_ids[i], windows[i]))
        per_layer += [stats] if stats else []
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *per_layer)


def logits(params: Params, hidden: Array, *, config: ModelConfig) -> Array:
    """[..., V] float32 scores of the next token; soft cap applied, no temperature."""
    lead = "abcdefg"[: hidden.ndim - 1]
    with jax.named_scope("logits"):
        turned = "head" not in params  # tied, and not prepared for sampling
        head = params["embed" if turned else "head"]
        spec = f"{lead}x,vx->{lead}v" if turned else f"{lead}x,xv->{lead}v"
        out = contract(spec, hidden.astype(jnp.dtype(config.dtype)), head, jnp.float32)
        if config.logit_softcap is not None:
            out = config.logit_softcap * jnp.tanh(out / config.logit_softcap)
        return out


def head(params: Params, *, config: ModelConfig) -> Head:
    """The product behind ``logits``; see ``types.Network.head``."""
    if config.tied_embeddings:
        return Head(params["embed"], 0, config.logit_softcap)
    return Head(params["head"], 1, config.logit_softcap)


def extend(
    weights: Any,
    cache: Cache,
    tokens: Array,
    positions: Array,
    live: Array,
    *,
    config: ModelConfig,
) -> tuple[Array, Cache]:
    """The same as ``hidden`` for the next Q tokens of each row; see ``types.Network.extend``.

    Own column c of a row holds the token at position c + the length of its prefix. Every row must
    have written its tokens up to p before position p is asked for; what lies beyond is not looked
    at, and a piece of the cache that no live row has reached is not read.
    """
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape([tokens, positions, live])
    x_sqd = _embed(config, weights, tokens)
    views = {window: cache_views(cache, positions, live, window) for window in set(config.windows)}
    turns, turn_ids = _turns(config, positions)
    scale, cap, written = _query_scale(config), config.attention_softcap, []

    def bind_cache(i: int, views: list[View]) -> Mix:
        def mix(q: Array, k: Array, v: Array) -> tuple[Array, tuple]:
            parts, pieces = [], []
            for view in views:
                if view.columns is None:
                    held = cache.prefix[i][view.piece]
                else:
                    held = write(cache.own[i][view.piece], {"k": k, "v": v}, view.columns, live)
                    held = {
                        n: constrain(a, "batch", "kv_heads", None, None) for n, a in held.items()
                    }
                    pieces.append(held)
                scales = held.get("k_scale"), held.get("v_scale")
                parts.append(Part(held["k"], held["v"], view.mask, view.reached, *scales))
            return attend_parts(q, parts, scale=scale, softcap=cap), tuple(pieces)

        return mix

    for i, window in enumerate(config.windows):
        mix = bind_cache(i, views[window])
        x_sqd, new, _ = _block(config, weights["layers"][i], x_sqd, live, turns[turn_ids[i]], mix)
        written.append(new)
    with jax.named_scope("final_norm"):
        x_sqd = rms_norm(x_sqd, weights["final_norm"], config)
    return x_sqd, cache.replace(own=tuple(written))


def _query_scale(config: ModelConfig) -> float:
    return config.head_dim**-0.5 if config.query_scale is None else config.query_scale


def transformer(config: ModelConfig, *, remat: str = "none", gather: bool = True) -> Network:
    """The decoder of a configuration, as functions over its parameters.

    Args:
      config: the model.
      remat: what the backward pass of ``hidden`` recomputes for each layer: "none" keeps
        everything, "dots" keeps the results of products with weights, "full" keeps the layer's
        input.
      gather: see ``decode.prepare``.

    Returns:
      A ``Network``; its functions are pure and not jitted.

    Raises:
      UserError: an unknown ``remat``.
    """
    if remat not in REMAT:
        raise choose("remat", remat, REMAT)
    bind = functools.partial
    return Network(
        vocab_size=config.vocab_size,
        embed_dim=config.embed_dim,
        max_length=config.max_length,
        init=bind(init, config=config),
        axes=bind(axes, config),
        hidden=bind(hidden, config=config, remat=remat),
        logits=bind(logits, config=config),
        prepare=bind(prepare, config=config, gather=gather),
        init_cache=bind(init_cache, config=config),
        extend=bind(extend, config=config),
        hidden_shared=bind(hidden_shared, config=config, remat=remat),
        head=bind(head, config=config),
        attention=bind(attention, config=config),
    )
