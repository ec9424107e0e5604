"""Every weight of a decoder, described once: shape, logical axes and how it starts.

``init``, ``axes``, ``abstract`` and ``count_params`` are readings of that one table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.mesh import Axes
from jrl.models.config import ModelConfig
from jrl.types import Array, Params


class Factored:
    """A weight that is held as several arrays, or in another order, and multiplied as one.

    For example ``quant.Quantised`` and ``lora.Adapted``.
    """

    def times(self, spec: str, x: Array, dtype: Any = None, axes: Axes | None = None) -> Array:
        """``matmul(spec, x, self, dtype, axes)``."""
        raise NotImplementedError

    def scaled(self) -> tuple[Array, Array] | None:
        """Numbers in 8 bits and the scales of the outputs, if that is what the weight is."""
        return None

    def in_8_bits(self, inputs: int, quantise: Callable[..., Any]) -> Any:
        """The weight with its matrix in 8 bits.

        Args:
          inputs: axes that products sum over, the first ones.
          quantise: ``quant.quantise``.
        """
        raise NotImplementedError


class WeightSpec(NamedTuple):
    """One weight: its shape, logical axes and initialiser.

    Attributes:
      shape: sizes; layer weights have the number of layers first.
      axes: a logical axis name (see ``jrl.mesh.RULES``) or None for each of them.
      std: standard deviation of the normal distribution it is drawn from; 0 for a constant.
      constant: the value when ``std`` is 0.
      inputs: axes (layers and expert aside) that the product sums over; they come first.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float = 0.0
    constant: float = 0.0
    inputs: int = 0


@functools.cache
def weights(config: ModelConfig) -> Mapping[str, Any]:
    """The table of all weights: a nested dict of ``WeightSpec``, shaped like the parameters.

    Made once for a model, and not to be changed.

    A model whose layers are partly sparse has two stacks, ``mlp`` over the dense layers and
    ``experts`` over the sparse ones, each in the order of the layers.
    """
    c = config
    one = 0.0 if c.norm_plus_one else 1.0
    depth = (2 * c.layers) ** -0.5  # keeps the residual stream's size independent of depth

    def vector(n: int, *axes: tuple[int, str], start: float = 0.0) -> WeightSpec:
        shape, names = zip(*axes, strict=True)
        return WeightSpec((n, *shape), ("layers", *names), constant=start)

    def matrix(n: int, inputs: int, *axes: tuple[int, str], scale: float = 1.0) -> WeightSpec:
        shape, names = zip(*axes, strict=True)
        summed = [size for size, name in axes if name != "expert"][:inputs]
        std = scale * math.prod(summed) ** -0.5
        return WeightSpec((n, *shape), ("layers", *names), std=std, inputs=inputs)

    embed, head_dim = (c.embed_dim, "embed"), (c.head_dim, "head_dim")
    heads, kv_heads = (c.heads, "heads"), (c.kv_heads, "kv_heads")
    n, sparse = c.layers, sum(c.sparse)
    attention = {
        "q": matrix(n, 1, embed, heads, head_dim),
        "k": matrix(n, 1, embed, kv_heads, head_dim),
        "v": matrix(n, 1, embed, kv_heads, head_dim),
        "o": matrix(n, 2, heads, head_dim, embed, scale=depth),
    }
    if c.qkv_bias:
        attention |= {"q_bias": vector(n, heads, head_dim)}
        attention |= {name: vector(n, kv_heads, head_dim) for name in ("k_bias", "v_bias")}
    if c.o_bias:
        attention["o_bias"] = vector(n, embed)
    if c.qk_norm:
        attention |= {name: vector(n, head_dim, start=one) for name in ("q_norm", "k_norm")}
    norms = ["attention_norm", "mlp_norm"]
    norms += ["attention_post_norm", "mlp_post_norm"] if c.post_norms else []
    layers: dict[str, Any] = {name: vector(n, embed, start=one) for name in norms}
    layers["attention"] = attention
    if n - sparse:
        mlp = (c.mlp_dim, "mlp")
        layers["mlp"] = {name: matrix(n - sparse, 1, embed, mlp) for name in ("gate", "up")}
        layers["mlp"]["down"] = matrix(n - sparse, 1, mlp, embed, scale=depth)
        if c.mlp_bias:
            biases = {name: vector(n - sparse, mlp) for name in ("gate_bias", "up_bias")}
            layers["mlp"] |= biases | {"down_bias": vector(n - sparse, embed)}
    if sparse:
        expert, mlp = (c.experts, "expert"), (c.expert_mlp_dim, "mlp")
        layers["experts"] = {
            "router": matrix(sparse, 1, embed, (c.experts, "expert")),
            "gate": matrix(sparse, 1, expert, embed, mlp),
            "up": matrix(sparse, 1, expert, embed, mlp),
            "down": matrix(sparse, 1, expert, mlp, embed, scale=depth),
        }
    std = c.embed_dim**-0.5
    table = {
        "embed": WeightSpec((c.vocab_size, c.embed_dim), ("vocab", "embed"), std=std),
        "layers": layers,
        "final_norm": WeightSpec((c.embed_dim,), ("embed",), constant=one),
    }
    if not c.tied_embeddings:
        shape = (c.embed_dim, c.vocab_size)
        table["head"] = WeightSpec(shape, ("embed", "vocab"), std=std, inputs=1)
    return table


def is_spec(x: object) -> bool:
    """Whether a node of ``weights`` is a weight; for ``is_leaf``."""
    return isinstance(x, WeightSpec)


def init(key: Array, config: ModelConfig) -> Params:
    """Random parameters in ``config.param_dtype``; matrices are scaled by their fan-in."""
    specs, treedef = jax.tree.flatten(weights(config), is_leaf=is_spec)
    dtype = jnp.dtype(config.param_dtype)

    def draw(key: Array, spec: WeightSpec) -> Array:
        if not spec.std:
            return jnp.full(spec.shape, spec.constant, dtype)
        return (spec.std * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)

    return jax.tree.unflatten(treedef, map(draw, jax.random.split(key, len(specs)), specs))


def axes(config: ModelConfig) -> Any:
    """The logical axis names of every parameter, as a tree like the parameters."""
    return jax.tree.map(lambda spec: spec.axes, weights(config), is_leaf=is_spec)


def abstract(config: ModelConfig) -> Any:
    """The shapes and dtypes of the parameters (``jax.ShapeDtypeStruct``), for planning."""
    dtype = jnp.dtype(config.param_dtype)
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), weights(config), is_leaf=is_spec
    )


def count_params(config: ModelConfig) -> int:
    """The number of parameters; a tied output matrix counts once."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(weights(config), is_leaf=is_spec))
