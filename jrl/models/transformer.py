"""The decoder of a configuration: a ``Network`` of the functions over its parameters.

Parameters are a nested dict, described once in ``weights``. ``layers`` has the pass of whole
sequences, for training; ``decode`` the one that writes a cache, for sampling.
"""

from __future__ import annotations

import functools

import chex
import jax.numpy as jnp

from jrl.errors import unknown_choice
from jrl.models.attention.choice import ATTENTION, scale_of
from jrl.models.attention.dense import attend, attention_weights, visible
from jrl.models.config import ModelConfig
from jrl.models.decode import extend, fill, init_cache, prepare
from jrl.models.grouped import KERNELS
from jrl.models.layers import REMAT as REMAT
from jrl.models.layers import (
    Options,
    block,
    embed,
    head,
    hidden,
    hidden_shared,
    layer_weights,
    logits,
)
from jrl.models.rope import rotations
from jrl.models.weights import abstract as abstract
from jrl.models.weights import axes, init
from jrl.models.weights import count_params as count_params
from jrl.types import Array, Network, NetworkExtras, Params, Views


def attention_of(
    params: Params, tokens: Array, positions: Array, segments: Array, *, config: ModelConfig
) -> Array:
    """Attention weights of five layers over the middle third; ``NetworkExtras.attention``.

    Fewer where there are not as many; their heads stand side by side, the lowest layer's first.
    """
    chex.assert_equal_shape([tokens, positions, segments])
    x_bld, live = embed(config, params, tokens), segments != 0
    mask, distance = visible(positions, segments, positions, segments)
    tables, rotation_ids = rotations(config, positions)
    scale, cap = scale_of(config), config.attention_softcap
    third = config.layers // 3
    layers = {round(third + part * (2 * config.layers // 3 - third) / 4) for part in range(5)}
    weights_of: list[Array] = []
    for i in range(max(layers) + 1):
        window = config.windows[i]
        layer_mask = mask if window is None else mask & (distance < window)

        def mix(q: Array, k: Array, v: Array, near: Array = layer_mask) -> tuple[Array, Array]:
            weights_of_layer = attention_weights(q, k, near, scale=scale, softcap=cap)
            return attend(q, k, v, near, scale=scale, softcap=cap), weights_of_layer

        w = layer_weights(config, params["layers"], i)
        x_bld, weights, _ = block(config, w, x_bld, live, tables[rotation_ids[i]], mix)
        if i in layers:
            seen_bhll = weights.reshape(tokens.shape[0], config.heads, *layer_mask.shape[1:])
            weights_of.append(jnp.where(layer_mask[:, None], seen_bhll, 0))
    return jnp.concatenate(weights_of, axis=1)


def transformer(
    config: ModelConfig,
    *,
    attention: str = "auto",
    remat: str = "elementwise",
    gather: bool = True,
    grouped_matmul: str = "auto",
) -> Network:
    """The decoder of a configuration, as functions over its parameters.

    Args:
      config: the model.
      attention: which kernel it runs on, of ``attention.choice.ATTENTION``.
      remat: what the backward pass of ``hidden`` recomputes for each layer: "full" keeps the
        layer's input, "dots" also the results of products with weights, "elementwise" also what
        attention's backward pass starts from, so that only norms, rotations and activations are
        made again, which costs less than to keep them, "scores" the vocabulary's scores as well,
        "mlp" the same as "elementwise" but for the two wide results of the feed-forward part, half
        of what there is to keep, and "none" keeps everything.
      gather: see ``decode.prepare``.
      grouped_matmul: how products with routed experts are made; of ``grouped.KERNELS``.

    Returns:
      A ``Network``; its functions are pure and not jitted.

    Raises:
      UserError: an unknown ``attention``, ``remat`` or ``grouped_matmul``.
    """
    if attention not in ATTENTION:
        raise unknown_choice("attention", attention, ATTENTION)
    if remat not in REMAT:
        raise unknown_choice("remat", remat, REMAT)
    if grouped_matmul not in KERNELS:
        raise unknown_choice("grouped_matmul", grouped_matmul, KERNELS)
    bind = functools.partial
    options = Options(attention, grouped_matmul)
    sampling = options._replace(fsdp=not gather)
    return Network(
        vocab_size=config.vocab_size,
        embed_dim=config.embed_dim,
        max_length=config.max_length,
        init=bind(init, config=config),
        axes=bind(axes, config),
        hidden=bind(hidden, config=config, remat=remat, options=options),
        logits=bind(logits, config=config),
        prepare=bind(prepare, config=config, gather=gather),
        init_cache=bind(init_cache, config=config, attention=attention),
        extend=bind(extend, config=config, options=sampling),
        extras=NetworkExtras(
            fill=bind(fill, config=config, options=sampling),
            hidden_shared=bind(hidden_shared, config=config, remat=remat, options=options),
            head=bind(head, config=config, remat=remat),
            views=Views(attention=bind(attention_of, config=config)),
            gathered=gather,
        ),
    )
