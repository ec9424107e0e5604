"""Weights in 8 bits with one float32 scale for each output channel, and keys and values.

Symmetric rounding: a channel's largest magnitude becomes the dtype's, 127 of int8 and 448 of
float8_e4m3fn ("FP8 Formats for Deep Learning", arXiv:2209.05433). A number in int8 is off by at
most half of a scale, max |channel| / 254. One in float8 has 4 significant bits down to 2^-6 scales
and steps of 2^-9 scales below: it is off by at most |number| / 16 or 2^-10 scales, whichever is
more, which is max |channel| / 28 for the largest. Products multiply the 8-bit numbers, which every
dtype of activations holds exactly, and scale what comes out: no weight is ever held as longer
floats beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.errors import UserError
from jrl.mesh import Axes
from jrl.models.config import ModelConfig
from jrl.models.layers import rounded
from jrl.models.matmul import summed_short
from jrl.models.weights import Factored, WeightSpec, is_spec, weights
from jrl.types import Array, Cache, Network, Params

LARGEST = {"int8": 127, "float8": 448}
"""The largest magnitude of each format; that of float8 is float8_e4m3fn's."""

_DTYPES = {"int8": np.dtype(np.int8), "float8": jnp.dtype(jnp.float8_e4m3fn)}


class Quantised(struct.PyTreeNode, Factored):
    """A weight in 8 bits and scales; its product carries gradient to the activations alone.

    Attributes:
      values: int8 or float8_e4m3fn, the shape of the weight.
      scales: float32, the same with size 1 along the axes that products sum over.
    """

    values: Any
    scales: Any

    def times(self, spec: str, x: Array, dtype: Any = None, axes: Axes | None = None) -> Array:
        """``matmul(spec, x, whole, dtype, axes)``."""
        short = summed_short(spec, self.values.shape, axes)
        return _times(spec, x, self.values, self.scales, dtype, short)

    def scaled(self) -> tuple[Array, Array]:
        """Values and scales."""
        return self.values, self.scales

    def in_8_bits(self, inputs: int, quantise: Callable[..., Quantised]) -> Quantised:
        """Itself."""
        del inputs, quantise
        return self

    def whole(self, dtype: Any = jnp.float32) -> Any:
        """The weight that values and scales stand for."""
        return (self.values.astype(np.float32) * self.scales).astype(dtype)


def is_quantised(x: object) -> bool:
    """Whether a node of a tree is such a weight; for ``is_leaf``."""
    return isinstance(x, Quantised)


def quantise(w: Any, inputs: int, lead: int = 0, *, to: str = "int8") -> Quantised:
    """A weight in 8 bits.

    Args:
      w: floats, NumPy or JAX; [lead axes, input axes, output axes].
      inputs: axes that products sum over.
      lead: axes before them, such as the layers.
      to: the format, "int8" or "float8".

    Returns:
      The weight, NumPy for NumPy; |whole - w| is within the bounds of the module's docstring.

    >>> w = np.array([[1.0, -4.0], [-0.5, 2.0]])
    >>> quantise(w, 1).values.tolist()
    [[127, -127], [-64, 64]]
    >>> quantise(w, 1, to="float8").values.tolist()
    [[448.0, -448.0], [-224.0, 224.0]]
    """
    xp: Any = np if isinstance(w, np.ndarray) else jnp
    w = w.astype(np.float32)
    scales = _scales(w, tuple(range(lead, lead + inputs)), xp, to)
    return Quantised(_round(w, scales, xp, to), scales)


def _scales(x: Any, axes: tuple[int, ...], xp: Any, to: str) -> Any:
    peak = xp.max(xp.abs(x), axis=axes, keepdims=True)
    return xp.where(peak > 0, peak / LARGEST[to], 1.0).astype(np.float32)


def _round(x: Any, scales: Any, xp: Any, to: str) -> Any:
    x = xp.round(x / scales) if to == "int8" else x / scales
    # Clipped: a quotient that is rounded up past the largest would be NaN in float8.
    values = xp.clip(x, -LARGEST[to], LARGEST[to]).astype(_DTYPES[to])
    # Where float32 becomes float8 and then the dtype of activations in one program, XLA for GPUs
    # without float8 leaves the step between out, and what is multiplied is not what is held.
    return values if xp is np or to == "int8" else jax.lax.optimization_barrier(values)


def _letters(spec: str) -> tuple[str, str, str]:
    operands, out = spec.split("->")
    x, w = operands.split(",")
    return x, w, out


def _along_output(scales: Array, spec: str) -> Array:
    """The scales of a weight, lined up with the result of a product with it."""
    _, w, out = _letters(spec)
    order = [w.index(c) for c in out if c in w]
    order += [i for i in range(len(w)) if i not in order]
    sizes = [scales.shape[w.index(c)] if c in w else 1 for c in out]
    return scales.transpose(order).reshape(sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4, 5))
def _times(
    spec: str, x: Array, values: Array, scales: Array, dtype: Any, short: str | None
) -> Array:
    accumulator = x.dtype if short == "inputs" else jnp.float32
    out = jnp.einsum(spec, x, values.astype(x.dtype), preferred_element_type=accumulator)
    return (out.astype(jnp.float32) * _along_output(scales, spec)).astype(dtype or x.dtype)


def _forward(
    spec: str, x: Array, values: Array, scales: Array, dtype: Any, short: str | None
) -> tuple[Array, tuple]:
    # No numbers of x are kept: only their dtype is needed to go back.
    residuals = jnp.zeros((), x.dtype), values, scales
    return _times(spec, x, values, scales, dtype, short), residuals


def _backward(
    spec: str, dtype: Any, short: str | None, residuals: tuple, g: Array
) -> tuple[Array, None, None]:
    proxy, values, scales = residuals
    x, w, out = _letters(spec)
    g = (g.astype(jnp.float32) * _along_output(scales, spec)).astype(proxy.dtype)
    accumulator = proxy.dtype if short == "outputs" else jnp.float32
    spec = f"{w},{out}->{x}"
    gradient = jnp.einsum(spec, values.astype(proxy.dtype), g, preferred_element_type=accumulator)
    return gradient.astype(proxy.dtype), None, None


_times.defvjp(_forward, _backward)


# ---------------------------------------------------------------- whole models


def check_dense(config: ModelConfig, key: str) -> None:
    """Raises UserError for a model with routed experts, whose products take floats."""
    if any(config.sparse):
        raise UserError(
            f"{key}: the model has {config.experts} routed experts, whose weights are not kept "
            "in 8 bits; remove it"
        )


def quantise_layers(params: Params, config: ModelConfig, to: str = "int8") -> Params:
    """The parameters with every matrix of a layer in 8 bits; embedding, head and norms as given.

    Args:
      params: the decoder's, on the host or the device.
      config: a model without experts.
      to: see ``quantise``.
    """
    check_dense(config, "quantise_layers")

    def turn(spec: WeightSpec, w: Any) -> Any:
        if not spec.inputs:
            return w
        if not isinstance(w, np.ndarray):
            return quantise(w, spec.inputs, 1, to=to)
        layers = [quantise(layer, spec.inputs, to=to) for layer in w]  # one at a time in float32
        return jax.tree.map(lambda *parts: np.stack(parts), *layers)

    layers = jax.tree.map(turn, weights(config)["layers"], params["layers"], is_leaf=is_spec)
    return params | {"layers": layers}


def layer_axes(config: ModelConfig, axes: Any) -> Any:
    """Logical axes of the result of ``quantise_layers``, from those of the parameters."""

    def turn(spec: WeightSpec, names: tuple) -> Any:
        if not spec.inputs:
            return names
        scales = (names[0], *(None,) * spec.inputs, *names[1 + spec.inputs :])
        return Quantised(names, scales)

    layers = jax.tree.map(turn, weights(config)["layers"], axes["layers"], is_leaf=is_spec)
    return axes | {"layers": layers}


def dequantise(params: Params, dtype: Any) -> Params:
    """The parameters with every weight in 8 bits as floats."""
    turn = lambda x: x.whole(dtype) if is_quantised(x) else x  # noqa: E731
    return jax.tree.map(turn, params, is_leaf=is_quantised)


# ---------------------------------------------------------------- sampling


INPUTS = {"q": 1, "k": 1, "v": 1, "qkv": 1, "o": 2, "gate": 1, "up": 1, "gate_up": 1, "down": 1}
"""Axes that products sum over, of the matrices that sampling reads."""


def sampler(network: Network, config: ModelConfig, *, weights: str, cache: str) -> Network:
    """The network as it samples with 8-bit weights, an 8-bit cache, or both.

    It draws from another distribution than the network trains: that of the rounded weights, or of
    rounded keys and values. Log-probabilities that a sampler records with it are those of that
    distribution.

    Args:
      network: the policy, of ``config``.
      config: the decoder's shape.
      weights: "int8" or "float8" for the policy's matrices, the output matrix among them, in 8
        bits; "same". Matrices that adapters keep in int8 already stay so.
      cache: "int8" for keys and values in 8 bits, a scale for each position and head; "same".

    Returns:
      The network, itself when both are "same".

    Raises:
      UserError: 8-bit weights of a model with routed experts.
    """
    if weights != "same":
        check_dense(config, f"sampling.{weights} = 'weights'")
        network = network._replace(prepare=_rounding(network, config, weights))
    if cache == "int8":
        network = network._replace(init_cache=_short_cache(network.init_cache))
    return network


def in_8_bits(params: Params, config: ModelConfig, to: str) -> Params:
    """The parameters with every matrix that sampling reads in 8 bits, the output matrix too.

    Each number is rounded to the dtype that ``prepare`` would give it first. What is divided over
    devices stays so: they agree on the largest number of a channel alone, and what is then sent
    has half the bytes of 16-bit weights.

    Args:
      params: the decoder's, floats.
      config: a model without experts.
      to: see ``quantise``.
    """
    params = rounded(params, config=config)
    head = params["head"] if "head" in params else params["embed"].T
    return quantise_layers(params, config, to) | {"head": quantise(head, 1, to=to)}


def axes_in_8_bits(config: ModelConfig, axes: Any) -> Any:
    """Logical axes of the result of ``in_8_bits``, from those of the parameters."""
    embed = axes["embed"]
    head = axes["head"] if "head" in axes else (embed[1], embed[0])
    return layer_axes(config, axes) | {"head": Quantised(head, (None, head[1]))}


def _rounding(network: Network, config: ModelConfig, to: str) -> Callable[[Params], Any]:
    prepare, plain = network.prepare, network.extras.split is None
    quantised = functools.partial(quantise, to=to)

    def prepare_in_8_bits(params: Params) -> Any:
        is_factored = lambda x: isinstance(x, Factored)  # noqa: E731
        # Rounded before they are joined and sent, if not already; adapters are added first.
        rounded = any(map(is_factored, jax.tree.leaves(params, is_leaf=is_factored)))
        weights = prepare(in_8_bits(params, config, to) if plain and not rounded else params)

        def short(w: Any, inputs: int) -> Any:
            if isinstance(w, Factored):
                return w.in_8_bits(inputs, quantised)
            return quantised(w, inputs)

        def turn(path: tuple, w: Any) -> Any:
            inputs = INPUTS.get(path[-1].key, 0)
            return short(w, inputs) if inputs else w

        layers = jax.tree_util.tree_map_with_path(turn, weights["layers"], is_leaf=is_factored)
        return weights | {"layers": layers, "head": short(weights["head"], 1)}

    return prepare_in_8_bits


def _short_cache(init_cache: Callable[..., Cache]) -> Callable[..., Cache]:
    def init_int8_cache(rows: int, length: int, weights: Any = None, pieces: int = 1) -> Cache:
        empty = init_cache(rows, length, weights, pieces)

        def short(piece: dict[str, Array]) -> dict[str, Array]:
            k, v = piece["k"], piece["v"]
            scale = k[:, :, None, :, 0].astype(jnp.float32)
            return piece | {
                "k": k.astype(jnp.int8),
                "v": v.astype(jnp.int8),
                "k_scale": scale,
                "v_scale": scale,
            }

        return Cache(rows=tuple(tuple(map(short, pieces)) for pieces in empty.rows))

    return init_int8_cache


def quantise_entries(x: Array) -> tuple[Array, Array]:
    """Keys or values [..., h] as int8 [..., h] and float32 scales [..., 1], one a vector."""
    x = x.astype(jnp.float32)
    scales = _scales(x, (x.ndim - 1,), jnp, "int8")
    return _round(x, scales, jnp, "int8"), scales
