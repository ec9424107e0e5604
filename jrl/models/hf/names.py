"""Names and layouts of Hugging Face tensors for each weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jrl.models.config import ModelConfig
from jrl.models.weights import WeightSpec, weights
from jrl.types import Params

_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "experts.router": "mlp.gate.weight",
    **{f"attention.{x}": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"attention.{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkvo"},
    **{f"mlp.{x}": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{f"mlp.{x}_bias": f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")},
    **{f"experts.{x}": f"mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up", "down")},
}
_PRE_NORMS = {"mlp_norm": "post_attention_layernorm.weight"}
_POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_KEYS = {
    **{"vocab": "vocab_size", "embed": "hidden_size", "head_dim": "head_dim"},
    **{"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"},
    **{"mlp": "intermediate_size", "expert": "num_experts"},
}


class Tensor(NamedTuple):
    """One tensor of a checkpoint and its place in the parameters.

    Attributes:
      path: keys into the parameter tree.
      at: position in the stack: layer, and expert for an expert's matrix.
      shape: the tensor's shape in the file; matrices are [outputs, inputs] there.
      transposed: whether the file's matrix is ours transposed.
      meaning: for each axis, the configuration keys whose product it is.
    """

    path: tuple[str, ...]
    at: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool
    meaning: tuple[tuple[str, ...], ...]


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its Hugging Face name, in the order of the layers."""
    names = _NAMES | (_POST_NORMS if config.post_norms else _PRE_NORMS)
    places: dict[bool, list[int]] = {True: [], False: []}
    for i, sparse in enumerate(config.sparse):
        places[sparse].append(i)
    table: list[tuple[int, str, Tensor]] = []
    for path, spec in leaves(weights(config)):
        name = names[".".join(path[1:] if path[0] == "layers" else path)]
        if path[0] != "layers":
            order = -1 if path == ("embed",) else config.layers
            table.append((order, name, _tensor(path, (), spec)))
            continue
        layers = {"mlp": places[False], "experts": places[True]}.get(path[1], range(config.layers))
        for at, layer in enumerate(layers):
            full = f"model.layers.{layer}.{name}"
            if "{e}" not in full:
                table.append((layer, full, _tensor(path, (at,), spec)))
                continue
            for e in range(config.experts):
                table.append((layer, full.format(e=e), _tensor(path, (at, e), spec)))
    return {name: tensor for _, name, tensor in sorted(table, key=lambda row: row[:2])}


def leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple, Any]]:
    """(keys, leaf) of every leaf of a nested dict, in its own order."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def leaf_at(params: Params, path: tuple[str, ...]) -> Any:
    """The node of nested dicts under these keys."""
    for key in path:
        params = params[key]
    return params


def _tensor(path: tuple[str, ...], at: tuple[int, ...], spec: WeightSpec) -> Tensor:
    sizes, axes = spec.shape[len(at) :], spec.axes[len(at) :]
    keys = tuple(_KEYS[a or ""] for a in axes)
    if path[-2:-1] == ("experts",):
        keys = tuple("moe_" + k if k == "intermediate_size" else k for k in keys)
    if spec.inputs:
        n = spec.inputs
        shape = (int(np.prod(sizes[n:])), int(np.prod(sizes[:n])))
        return Tensor(path, at, shape, True, (keys[n:], keys[:n]))
    if spec.std:  # the embedding, which both sides keep as [V, D]
        return Tensor(path, at, sizes, False, tuple((k,) for k in keys))
    return Tensor(path, at, (int(np.prod(sizes)),), False, (keys,))
