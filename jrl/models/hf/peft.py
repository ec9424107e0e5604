"""Adapters in the file layout of the PEFT library: one safetensors file and a small JSON.

``adapter_model.safetensors`` holds ``base_model.model.NAME.lora_A.weight`` [rank, inputs] and
``lora_B.weight`` [outputs, rank] for every adapted matrix NAME of the checkpoint, and
``adapter_config.json`` says rank, alpha and which projections those are.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import numpy as np

from jrl.errors import UserError
from jrl.hub import hub_name, model_directory
from jrl.models.config import ModelConfig
from jrl.models.hf.names import leaf_at, tensors
from jrl.models.hf.stored import is_finite
from jrl.models.lora import TARGETS, Lora
from jrl.system.json_text import as_object, parse_json
from jrl.types import Params

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN = {"use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "bias": "none"}
"""Adapter settings, and the value that another directory must have for each."""
_OTHER_FUNCTIONS = ("alora_invocation_tokens", "layer_replication", "use_qalora", "lora_bias")
"""Settings of PEFT with which adapters of the same tensors are another function."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of PEFT's ``init_lora_weights`` after which the frozen weights are others."""


def _modules(config: ModelConfig, lora: Lora) -> dict[str, tuple[tuple[str, ...], int]]:
    """The prefix of every adapted matrix's tensors -> its path in the adapters and its layer."""
    return {
        f"base_model.model.{name.removesuffix('.weight')}": (tensor.path, tensor.at[0])
        for name, tensor in tensors(config).items()
        if tensor.path[-1] in lora.targets and tensor.path[-2] in ("attention", "mlp")
    }


def save_adapters(
    dir: str | os.PathLike[str],
    config: ModelConfig,
    adapters: Params,
    *,
    lora: Lora,
    base: str | None = None,
) -> None:
    """Writes adapters as a directory that PEFT loads onto the checkpoint they belong to.

    Args:
      dir: a new or empty directory.
      config: the model.
      adapters: the trained part of its parameters, NumPy or JAX arrays.
      lora: their description.
      base: what PEFT shall load the model from; None to leave it open.

    Raises:
      UserError: the directory holds something.
    """
    from safetensors.numpy import save_file

    target = pathlib.Path(dir)
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} exists and is not empty; name a new directory")
    target.mkdir(parents=True, exist_ok=True)
    name = hub_name(base or "")
    values: dict[str, np.ndarray] = {}
    for prefix, (path, layer) in _modules(config, lora).items():
        a, b = (np.asarray(leaf_at(adapters, path)[name][layer], np.float32) for name in ("a", "b"))
        values[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, lora.rank).T)
        values[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(b.reshape(lora.rank, -1).T)
    save_file(values, target / TENSORS, metadata={"format": "pt"})
    about = _PLAIN | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name.repo if name else base,
        "revision": name.revision if name else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [f"{name}_proj" for name in TARGETS if name in lora.targets],
        "inference_mode": True,
        "init_lora_weights": True,
    }
    (target / CONFIG).write_text(json.dumps(about, indent=2) + "\n")


def load_adapters(dir: str | os.PathLike[str], config: ModelConfig, *, lora: Lora) -> Params:
    """The adapters of a directory as ``save_adapters`` and PEFT write it, on the host.

    Args:
      dir: holds adapter_config.json and adapter_model.safetensors.
      config: the model.
      lora: what they must be.

    Returns:
      The trained part of the parameters, float32.

    Raises:
      UserError: a file is missing or damaged, or holds adapters of another kind, size or place.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    directory = model_directory(dir, "lora.path")
    try:
        config_path = directory / CONFIG
        about = as_object(parse_json(config_path.read_bytes(), str(config_path)), str(config_path))
        tensors = load_file(directory / TENSORS)
    except UserError as error:
        raise UserError(f"lora.path = {str(dir)!r}: {error}") from None
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"lora.path = {str(dir)!r} cannot be read as adapters: {reason}") from None
    _check_alike(str(dir), about, lora)
    modules = _modules(config, lora)
    expected = {f"{m}.lora_{x}.weight" for m in modules for x in "AB"}
    if odd := sorted(expected ^ set(tensors)):
        where = "missing from" if odd[0] in expected else "not expected in"
        raise UserError(
            f"lora.path: tensor {odd[0]!r} is {where} {directory / TENSORS}; it must hold one pair "
            "for each of lora.targets in every layer"
        )
    for name in sorted(expected):
        if not is_finite(tensors[name]):
            raise UserError(
                f"lora.path: tensor {name!r} of {directory / TENSORS} holds numbers that are not"
                " finite; the file is damaged, or of a run that diverged"
            )
    stacks: dict[tuple, dict[str, list[np.ndarray]]] = {}
    for prefix, (path, _) in modules.items():
        pair = stacks.setdefault(path, {"a": [], "b": []})
        for name, letter in (("a", "A"), ("b", "B")):
            pair[name].append(tensors[f"{prefix}.lora_{letter}.weight"].astype(np.float32).T)
    return _shaped(config, lora, stacks)


def _check_alike(directory: str, about: dict[str, Any], lora: Lora) -> None:
    theirs = {
        "lora.rank": (about.get("r"), lora.rank),
        "lora.alpha": (about.get("lora_alpha"), lora.alpha),
        "adapter kind": (about.get("peft_type"), "LORA"),
    } | {key: (about.get(key, value), value) for key, value in _PLAIN.items()}
    for key in ("rank_pattern", "alpha_pattern", "modules_to_save", *_OTHER_FUNCTIONS):
        theirs[key] = (about.get(key) or None, None)
    for key, (stored, required) in theirs.items():
        if stored != required:
            raise UserError(
                f"lora.path = {directory!r}: {key} is {stored!r} there, and must be {required!r}"
            )
    start = str(about.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise UserError(
            f"lora.path = {directory!r}: init_lora_weights is {start!r} there, whose start changes"
            " the model's own weights, so that these adapters do not belong to model.path; write"
            " them again with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...),"
            " or merge them into a checkpoint"
        )


def _shaped(config: ModelConfig, lora: Lora, stacks: dict[tuple, Any]) -> Params:
    """The stacked tensors in the shapes of the adapters."""
    import jax

    from jrl.models.lora import init_adapters

    shapes = jax.eval_shape(
        lambda key: init_adapters(key, config=config, lora=lora), jax.random.key(0)
    )

    def fill(path: tuple, leaf: Any) -> np.ndarray:
        *keys, name = (part.key for part in path)
        layers = stacks[tuple(keys)][name]
        size = int(np.prod(leaf.shape[1:]))
        if odd := next((layer.shape for layer in layers if layer.size != size), None):
            raise UserError(
                f"lora.path: {'.'.join(keys)} has {odd} numbers a layer there, and "
                f"{leaf.shape[1:]} in this model; it belongs to another model"
            )
        return np.stack(layers).reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(fill, shapes)
