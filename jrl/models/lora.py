"""Low-rank adapters: a frozen matrix plus a trained product of two thin ones.

"LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685): W x becomes
W x + (alpha / rank) B A x, where A is drawn from a normal distribution and B starts at zero. With
8-bit frozen matrices it is the scheme of "QLoRA: Efficient Finetuning of Quantized LLMs"
(arXiv:2305.14314), with integers of 8 bits in place of its 4-bit type.

The parameters fall into two trees, ``types.Split``: the frozen base, kept once, and the adapters,
which alone have gradients, moments and checkpoints. The base alone is the policy with its adapters
off.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.errors import UserError, unknown_choice
from jrl.mesh import Axes, constrain
from jrl.models import low_rank
from jrl.models.config import ModelConfig
from jrl.models.decode import output_matrix
from jrl.models.layers import layer_weights, stored_dtype
from jrl.models.matmul import matmul
from jrl.models.quant import (
    Quantised,
    check_dense,
    dequantise,
    layer_axes,
    quantise_layers,
)
from jrl.models.weights import Factored, WeightSpec, weights
from jrl.types import Array, Derived, Network, Params, Split

ATTENTION, FEED_FORWARD = ("q", "k", "v", "o"), ("gate", "up", "down")
TARGETS = (*ATTENTION, *FEED_FORWARD)
"""The projections that may have adapters."""
BASES = ("float", "int8")
"""Storage formats of the frozen matrices."""


class Lora(NamedTuple):
    """The projections with adapters, and their size.

    Attributes:
      rank: of the product of the two thin matrices.
      alpha: what they add is multiplied by alpha / rank.
      targets: names of projections, of ``TARGETS``.
      base: "float" keeps frozen matrices as they are given, "int8" the layers' in 8 bits.
    """

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS
    base: str = "float"

    @property
    def scale(self) -> float:
        """The scale of the adapters' product."""
        return self.alpha / self.rank

    def check(self, config: ModelConfig) -> Lora:
        """Returns self, or raises UserError for settings that this model does not support."""
        if self.rank < 1:
            raise UserError(f"lora.rank = {self.rank}; must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"lora.alpha = {self.alpha}; must be above 0")
        if self.base not in BASES:
            raise unknown_choice("lora.base", self.base, BASES)
        if self.rank > config.embed_dim:
            raise UserError(
                f"lora.rank = {self.rank}; the model's matrices have {config.embed_dim} rows, and "
                f"adapters of that rank are no smaller; lower it"
            )
        check_targets(self.targets)
        unsupported = sorted(set(self.targets) & set(FEED_FORWARD))
        if unsupported and any(config.sparse):
            raise UserError(
                f"lora.targets has {', '.join(unsupported)}: the model's feed-forward parts are "
                f"{config.experts} routed experts, which have no adapters; choose from "
                + ", ".join(ATTENTION)
            )
        if self.base == "int8":
            check_dense(config, "lora.base = 'int8'")
        return self


def check_targets(targets: tuple[str, ...]) -> None:
    """Raises UserError for a name that is no projection with adapters, or no name at all."""
    if not targets:
        raise UserError(f"lora.targets = []; name one or more of {', '.join(TARGETS)}")
    for i, name in enumerate(targets):
        if name in targets[:i]:
            raise UserError(f"lora.targets names {name!r} twice; remove one")
        if name in ("embed", "head"):
            raise UserError(
                f"lora.targets has {name!r}: the products with the vocabulary have no adapters; "
                f"choose from {', '.join(TARGETS)}"
            )
        if name not in TARGETS:
            raise unknown_choice("lora.targets", name, TARGETS)


class Adapted(struct.PyTreeNode, Factored):
    """A frozen weight with its adapter.

    Attributes:
      base: [inputs, outputs], an array or ``Quantised``; layers, where stacked, lead.
      a: [inputs, rank] float32.
      b: [rank, outputs] float32.
      scale: what the adapter's product is multiplied by.
    """

    base: Any
    a: Any
    b: Any
    scale: float = struct.field(pytree_node=False)

    def times(self, spec: str, x: Array, dtype: Any = None, axes: Axes | None = None) -> Array:
        """``matmul`` with both, summed in float32 before it is rounded."""
        if not isinstance(self.base, Factored) and low_rank.joins(spec, x, self.base, axes):
            dtype = dtype or x.dtype
            return low_rank.joined(spec, self.scale, dtype, x, self.base, self.a, self.b)
        operands, out = spec.split("->")
        left, right = operands.split(",")
        r = next(c for c in string.ascii_letters if c not in spec)
        inputs = "".join(c for c in right if c not in out)
        outputs = "".join(c for c in right if c in out)
        middle = "".join(c for c in left if c not in inputs) + r
        if isinstance(self.base, Factored):
            full = self.base.times(spec, x, jnp.float32)
        else:
            full = matmul(spec, x, self.base, jnp.float32)
        low = matmul(f"{left},{inputs}{r}->{middle}", x, self.a)
        low = low * jnp.asarray(self.scale, low.dtype)
        update = matmul(f"{middle},{r}{outputs}->{out}", low, self.b, jnp.float32)
        return (full + update).astype(dtype or x.dtype)

    def in_8_bits(self, inputs: int, quantise: Callable[..., Quantised]) -> Adapted | Quantised:
        """Merged and rounded; with a base in 8 bits itself."""
        return self if isinstance(self.base, Quantised) else quantise(self.merged(), inputs)

    def merged(self) -> Array:
        """The weight that computes the same, in the dtype of the base (float32 if in 8 bits)."""
        base = self.base.whole() if isinstance(self.base, Quantised) else self.base
        multiply: Callable[..., Array] = partial(jnp.tensordot, axes=1)
        if self.a.ndim + self.b.ndim == base.ndim + 3:  # layers are stacked
            multiply = jax.vmap(multiply)
        update = self.scale * multiply(self.a, self.b)
        return (base.astype(jnp.float32) + update).astype(base.dtype)


# ---------------------------------------------------------------- the two trees


def split(params: Any) -> tuple[Any, Any]:
    """(adapters, base) of a tree with ``Adapted`` leaves; see ``types.Split.split``."""
    trained, base = {}, {}
    for name, node in params.items():
        if isinstance(node, Adapted):
            trained[name], base[name] = {"a": node.a, "b": node.b}, node.base
        elif isinstance(node, Mapping):
            below, base[name] = split(node)
            trained |= {name: below} if below else {}
        else:
            base[name] = node
    return trained, base


def join(trained: Any, base: Any, *, scale: float) -> Any:
    """The joined tree, the inverse of ``split``."""
    tree = dict(base)
    for name, node in trained.items():
        if set(node) == {"a", "b"}:
            tree[name] = Adapted(base[name], node["a"], node["b"], scale)
        else:
            tree[name] = join(node, base[name], scale=scale)
    return tree


def _targeted(config: ModelConfig, lora: Lora) -> dict[str, dict[str, WeightSpec]]:
    """The described weights that have adapters, by part of a layer and name."""
    layers = weights(config)["layers"]
    parts = {"attention": ATTENTION, "mlp": FEED_FORWARD}
    adapted = {
        part: {name: layers[part][name] for name in names if name in lora.targets}
        for part, names in parts.items()
        if part in layers
    }
    return {part: specs for part, specs in adapted.items() if specs}


def init_adapters(key: Array, *, config: ModelConfig, lora: Lora) -> Params:
    """Adapters that change nothing: A normal, scaled by its fan-in, B zero; float32."""
    out: Params = {"layers": {}}
    for part, specs in _targeted(config, lora).items():
        out["layers"][part] = {}
        for name, spec in specs.items():
            n, sizes = spec.shape[0], spec.shape[1:]
            inputs, outputs = sizes[: spec.inputs], sizes[spec.inputs :]
            weight_key = jax.random.fold_in(key, TARGETS.index(name))
            normal = jax.random.normal(weight_key, (n, *inputs, lora.rank), jnp.float32)
            zeros = jnp.zeros((n, lora.rank, *outputs), jnp.float32)
            pair = {"a": normal * math.prod(inputs) ** -0.5, "b": zeros}
            out["layers"][part][name] = pair
    return out


def adapter_axes(config: ModelConfig, lora: Lora) -> Any:
    """The logical axes of the adapters; their rank is not divided."""

    def pair(spec: WeightSpec) -> dict[str, tuple]:
        layers, inputs = spec.axes[:1], spec.axes[1 : 1 + spec.inputs]
        outputs = spec.axes[1 + spec.inputs :]
        return {"a": (*layers, *inputs, None), "b": (*layers, None, *outputs)}

    specs_by_part = _targeted(config, lora).items()
    return {
        "layers": {part: {n: pair(s) for n, s in specs.items()} for part, specs in specs_by_part}
    }


def merge(params: Params, *, config: ModelConfig) -> Params:
    """Equivalent full weights: adapters added in, 8-bit matrices as floats.

    Frozen matrices are rounded to their dtype again, so that the two agree to that dtype's
    precision, not bit for bit.
    """
    is_adapted = lambda x: isinstance(x, Adapted)  # noqa: E731
    dtype = jnp.dtype(config.param_dtype)
    merged = jax.tree.map(
        lambda x: x.merged().astype(dtype) if is_adapted(x) else x, params, is_leaf=is_adapted
    )
    return dequantise(merged, dtype)


def count_trained(config: ModelConfig, lora: Lora) -> int:
    """The number of elements in the adapters."""
    shapes = jax.eval_shape(partial(init_adapters, config=config, lora=lora), jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


# ---------------------------------------------------------------- the network


def with_adapters(
    network: Network, config: ModelConfig, lora: Lora, *, gather: bool = True
) -> Network:
    """The decoder with adapters, as a network whose base is frozen.

    Its parameters are those of ``network`` with ``Adapted`` weights; its functions take the base
    alone too, which is the policy with adapters off. ``prepare`` adds the adapters into float
    matrices where weights and activations are float32, and keeps them separate otherwise: rounding
    W + B A to a shorter dtype would lose small adapters, and sample from another distribution than
    is trained.

    Args:
      network: the built-in decoder of ``config``.
      config: its shape.
      lora: the adapters.
      gather: as in ``decode.prepare``, for matrices that are kept separate.

    Raises:
      UserError: adapters that this model cannot have; see ``Lora.check``.
    """
    lora = lora.check(config)
    dtype = jnp.dtype(config.param_dtype)
    adapters = partial(init_adapters, config=config, lora=lora)
    join_adapters = partial(join, scale=lora.scale)

    def freeze(params: Params) -> Params:
        return quantise_layers(params, config) if lora.base == "int8" else params

    def init(key: Array) -> Params:
        return join_adapters(adapters(jax.random.fold_in(key, 1)), freeze(network.init(key)))

    def axes() -> Any:
        base = network.axes()
        base = layer_axes(config, base) if lora.base == "int8" else base
        return join_adapters(adapter_axes(config, lora), base)

    def prepare(params: Params) -> Any:
        exact = lora.base == "float" and config.dtype == config.param_dtype == "float32"
        if exact or not _factored(params):
            return network.prepare(merge(params, config=config))
        names = axes() if split(params)[0] else split(axes())[1]
        return _prepare_separate(params, config, names["layers"], gather)

    return network._replace(
        init=init,
        axes=axes,
        prepare=prepare,
        extras=network.extras._replace(
            derived=Derived(
                network=network,
                start=lambda key, base: join_adapters(adapters(jax.random.fold_in(key, 1)), base),
                plain=lambda params, policy: merge(params, config=config),
                split=Split(
                    init=adapters,
                    split=split,
                    join=join_adapters,
                    freeze=freeze,
                    thaw=partial(dequantise, dtype=dtype),
                ),
            )
        ),
    )


def _factored(params: Params) -> bool:
    is_factored = lambda x: isinstance(x, Factored)  # noqa: E731
    return any(is_factored(x) for x in jax.tree.leaves(params, is_leaf=is_factored))


def _prepare_separate(params: Params, config: ModelConfig, axes: Any, gather: bool) -> Any:
    """``prepare`` with every matrix separate, adapters and integers unchanged.

    Args:
      params: of the network.
      config: the model.
      axes: the logical axes of its layers.
      gather: whether fsdp's parts are sent now, once for many tokens.
    """
    dtype, small = stored_dtype(config), {"attention_norm", "mlp_norm"}
    small |= {"attention_post_norm", "mlp_post_norm", "q_norm", "k_norm", "router"}

    def lay(path: tuple, names: tuple, w: Array) -> Array:
        name = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else ""
        if not (w.dtype == jnp.int8 or _is_scale(path) or name in small or name.endswith("_bias")):
            w = w.astype(config.dtype if _is_adapter(path) else dtype)
        return constrain(w, *("act_embed" if gather and n == "embed" else n for n in names[1:]))

    def lay_layer(i: int) -> Params:
        layer = layer_weights(config, params["layers"], i)
        names = {name: axes[name] for name in layer}
        is_names = lambda x: isinstance(x, tuple)  # noqa: E731
        return jax.tree_util.tree_map_with_path(lay, names, layer, is_leaf=is_names)

    return {
        "embed": params["embed"].astype(dtype),
        "head": output_matrix(config, params),
        "layers": tuple(map(lay_layer, range(config.layers))),
        "final_norm": params["final_norm"],
    }


def _is_adapter(path: tuple) -> bool:
    return isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in ("a", "b")


def _is_scale(path: tuple) -> bool:
    return isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "scales"
