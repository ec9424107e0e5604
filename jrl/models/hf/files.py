"""Checkpoints in Hugging Face layout: safetensors, one file or many, and ``config.json``.

Everything that can be wrong is found from the files' headers, before weights are read. A run reads
them part by part, where they are to lie (``open_checkpoint`` and ``stored.place``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError, unknown_choice
from jrl.hub import model_directory, near_models
from jrl.models.chat_template import TEMPLATES
from jrl.models.config import DTYPES, ModelConfig
from jrl.models.hf.names import Tensor, leaf_at, leaves, tensors
from jrl.models.hf.parse import parse
from jrl.models.hf.render import render
from jrl.models.hf.stored import in_memory, open_safetensors, stored_tree
from jrl.models.weights import weights
from jrl.system.json_text import read_object
from jrl.types import Params

SHARD_BYTES = 5_000_000_000
"""A checkpoint above this size is split into files of at most about this size, in bytes."""

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    "generation_config.json",
)

# ---------------------------------------------------------------- reading


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file of a checkpoint.

    Raises:
      UserError: there is no such file, or it holds something else.
    """
    if path.parent.is_file():
        raise UserError(f"{path.parent}: is a file; name the directory of a checkpoint")
    if not path.is_file():
        if (path.parent / "adapter_config.json").is_file():
            raise UserError(
                f"{path}: no such file; this directory holds adapters alone: name it as lora.path,"
                " and their model as model.path"
            )
        raise UserError(
            f"{path}: no such file {near_models(path.parent)}; give a Hugging Face checkpoint"
            " directory, or a name of the Hub such as Qwen/Qwen3-0.6B"
        )
    return read_object(path)


def read_config(
    dir: str | os.PathLike[str], key: str = "", *, classifier: bool = False
) -> ModelConfig:
    """The model that ``dir/config.json`` describes.

    Args:
      dir: a directory, or a model of the Hugging Face Hub as ORG/NAME[@REVISION].
      key: the configuration key that names it, for messages; "" where there is none.
      classifier: see ``parse``.

    Raises:
      UserError: no such file, no such architecture, or a key asking for what is not supported.
    """
    path = model_directory(dir) / "config.json"
    try:
        raw = read_json(path)
    except UserError as error:
        raise UserError(f"{key} = {str(dir)!r}: {error}" if key else str(error)) from None
    try:
        return parse(raw, classifier=classifier)
    except UserError as error:
        raise UserError(f"{path.parent}: {error}") from None


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    if (directory / _FILE).exists():
        return [directory / _FILE]
    if (directory / _INDEX).exists():
        index = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise UserError(f"{directory / _INDEX}: has no weight_map")
        for tensor, name in index.items():
            if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
                raise UserError(
                    f"{directory / _INDEX}: weight_map has {tensor!r}: {str(name)[:60]!r}; it must "
                    "be the name of a file in the same directory"
                )
        return [directory / name for name in sorted(set(index.values()))]
    hint = ""
    if list(directory.glob("*.bin")) or list(directory.glob("*.pth")):
        hint = "; pickled weights are not read, convert them with save_pretrained"
    raise UserError(f"{directory}: has neither {_FILE} nor {_INDEX}{hint}")


class TensorInfo(NamedTuple):
    """A tensor in a file's header: the file, the shape, the name of the dtype."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str


def headers_of(directory: pathlib.Path) -> dict[str, TensorInfo]:
    """The headers of all tensors of a checkpoint, by name."""
    headers = {}
    for path in _files(directory):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                part = file.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise UserError(
                        f"{path}: tensor {name!r} has type {part.get_dtype()}; only "
                        f"{', '.join(_FLOATS)} are read (a quantised checkpoint?)"
                    )
                headers[name] = TensorInfo(path, tuple(part.get_shape()), _FLOATS[part.get_dtype()])
    return headers


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(repr(name) for name in names[:8]) + more


def _check(
    directory: pathlib.Path, expected: dict[str, Tensor], stored: dict[str, TensorInfo]
) -> None:
    """Raises for tensors that are missing, unexpected or of another shape than the config says."""
    if missing := [name for name in expected if name not in stored]:
        hint = ""
        if "lm_head.weight" in missing:
            hint = "; for a tied output set tie_word_embeddings = true in config.json"
        raise UserError(f"{directory}: missing tensors {_some(missing)}{hint}")
    if extra := sorted(set(stored) - set(expected)):
        raise UserError(
            f"{directory}: unexpected tensors {_some(extra)}; config.json describes a model "
            "without them (see attention_bias, mlp_bias, num_hidden_layers, model_type)"
        )
    for name, tensor in expected.items():
        file, shape, _ = stored[name]
        if shape == tensor.shape:
            continue
        where = "number of axes"
        if len(shape) == len(tensor.shape):
            axis = next(i for i, n in enumerate(shape) if n != tensor.shape[i])
            where = f"axis {axis} is {' x '.join(tensor.meaning[axis])}"
        raise UserError(
            f"{file}: tensor {name!r} has shape {list(shape)}, expected {list(tensor.shape)}; "
            f"{where} in config.json"
        )


def load(
    dir: str | os.PathLike[str], *, dtype: str | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """A checkpoint directory as a configuration and parameters.

    Args:
      dir: holds config.json and safetensors, one file or several with an index; or a model of the
        Hugging Face Hub as ORG/NAME[@REVISION].
      dtype: what parameters are converted to, and computed in; None keeps the files' (the widest
        one, where they differ).

    Returns:
      The configuration, and the parameters as NumPy arrays on the host; nothing is placed on a
      device.

    Raises:
      UserError: as ``open_checkpoint``, or damage inside a file's data.
    """
    config, params = open_checkpoint(dir, dtype=dtype)
    return config, in_memory(params)


def open_checkpoint(
    dir: str | os.PathLike[str], *, dtype: str | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """A checkpoint directory whose weights stay in their files until they are placed.

    Args:
      dir: as for ``load``.
      dtype: as for ``load``.

    Returns:
      The configuration, and the parameters as ``Stored`` weights, for ``place``.

    Raises:
      UserError: an unsupported architecture or key, a missing or damaged file, tensors that are
        missing, unexpected or of the wrong shape. All but damage inside a file's data is found
        here, before weights are read.
    """
    directory = model_directory(dir)
    config = read_config(directory)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_choice("dtype", dtype, DTYPES)
    headers = headers_of(directory)
    # Some exports hold a copy of a tied output matrix.
    copy = headers.pop("lm_head.weight", None) if config.tied_embeddings else None
    config, params = open_trunk(directory, config, headers, dtype)
    if copy is not None:
        with open_safetensors(copy.file) as file:
            if not np.array_equal(
                file.get_tensor("lm_head.weight").astype(config.dtype), params["embed"]
            ):
                raise UserError(
                    f"{copy.file}: tensor 'lm_head.weight' differs from the embedding although "
                    "config.json says tie_word_embeddings = true; set it to false"
                )
    return config, params


def open_trunk(
    directory: pathlib.Path,
    config: ModelConfig,
    headers: Mapping[str, TensorInfo],
    dtype: str | None,
) -> tuple[ModelConfig, dict[str, Any]]:
    """The weights of a model, still in their files.

    Args:
      directory: of the checkpoint.
      config: the model.
      headers: of its tensors, and of no others.
      dtype: as for ``load``.

    Returns:
      (the configuration with the dtype of the weights, ``Stored`` weights).

    Raises:
      UserError: tensors that are missing, unexpected or of the wrong shape.
    """
    expected = tensors(config)
    # Old exports hold the rotation's constants.
    headers = {name: f for name, f in headers.items() if not name.endswith("rotary_emb.inv_freq")}
    _check(directory, expected, headers)
    dtypes = {f.dtype for f in headers.values()}
    dtype_name = dtype or (dtypes.pop() if len(dtypes) == 1 else "float32")
    if dtype_name not in DTYPES:
        dtype_name = "float32"
    config = dataclasses.replace(config, dtype=dtype_name, param_dtype=dtype_name)
    files = {name: headers[name].file for name in expected}
    return config, stored_tree(list(leaves(weights(config))), expected, files, dtype_name)


# ---------------------------------------------------------------- writing


def save(
    dir: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    *,
    source_dir: str | os.PathLike[str] | None = None,
    stop_ids: Sequence[int] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a checkpoint directory that ``load`` and transformers read back unchanged.

    The directory appears whole or not at all: it is written beside its place and renamed. An
    older checkpoint there is replaced.

    Args:
      dir: the directory to make.
      config: the model; its ``family`` decides the architecture written.
      params: its parameters, NumPy or JAX arrays; written in their own dtype, one layer at a time.
      source_dir: the checkpoint it came from: tokenizer files are copied from it and the keys of
        its config.json that we do not know are kept.
      stop_ids: ids that end a completion. Base models often name only the end of a text in
        generation_config.json, and a policy trained to end its turns would not stop elsewhere.
      shard_bytes: split into files of about this size.

    Raises:
      UserError: parameters that are not this configuration's, a family that cannot express it, or
        a directory that holds something other than a checkpoint.
    """
    target = pathlib.Path(dir)
    if target.exists() and not (target / "config.json").exists() and any(target.iterdir()):
        raise UserError(f"{target}: exists and is not a checkpoint; choose another directory")
    _check_params(config, params)
    source = None if source_dir is None else model_directory(source_dir)
    base = read_json(source / "config.json") if source else None
    config_stored = dataclasses.replace(config, param_dtype=str(np.dtype(params["embed"].dtype)))
    document = render(config_stored, base)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}") from None
    try:
        _write_tensors(draft, config, params, shard_bytes)
        (draft / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        if source is not None:
            for path in (source / name for name in _COMPANIONS):
                if path.exists():
                    shutil.copyfile(path, draft / path.name)
            if (templates := source / TEMPLATES).is_dir():
                shutil.copytree(templates, draft / TEMPLATES)
        _write_stops(draft / "generation_config.json", stop_ids)
        _replace(target, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_stops(path: pathlib.Path, stop_ids: Sequence[int]) -> None:
    """Adds the ids that end a completion to those of a generation_config.json."""
    generation = read_object(path)
    named = generation.get("eos_token_id")
    before = named if isinstance(named, list) else [] if named is None else [named]
    if ids := [i for i in stop_ids if i not in before]:
        ids = [*before, *ids]
        generation["eos_token_id"] = ids[0] if len(ids) == 1 else ids
        path.write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _replace(target: pathlib.Path, draft: pathlib.Path) -> None:
    if not target.exists():
        draft.rename(target)
        return
    old = draft.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    draft.rename(target)
    shutil.rmtree(old)


def _check_params(config: ModelConfig, params: Params) -> None:
    expected = {".".join(path): spec.shape for path, spec in leaves(weights(config))}
    shapes = {".".join(path): tuple(np.shape(leaf)) for path, leaf in leaves(params)}
    if missing := sorted(set(expected) - set(shapes)):
        raise UserError(f"params: missing {_some(missing)} of this configuration")
    if extra := sorted(set(shapes) - set(expected)):
        raise UserError(f"params: unexpected {_some(extra)} for this configuration")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(f"params: {name} has shape {shapes[name]}, expected {shape}")


def _write_tensors(
    directory: pathlib.Path, config: ModelConfig, params: Params, shard_bytes: int
) -> None:
    from safetensors.numpy import save_file

    table = tensors(config)
    sizes = {
        name: int(np.prod(t.shape)) * np.dtype(leaf_at(params, t.path).dtype).itemsize
        for name, t in table.items()
    }
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    where: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        single = len(shards) == 1
        file = _FILE if single else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        values = {name: _fetch(params, table[name]) for name in names}
        save_file(values, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _fetch(params: Params, tensor: Tensor) -> np.ndarray:
    """One tensor in the file's layout, on the host."""
    value = np.asarray(leaf_at(params, tensor.path)[tensor.at or ...])
    if tensor.transposed:
        return np.ascontiguousarray(value.reshape(tensor.shape[::-1]).T)
    return np.ascontiguousarray(value.reshape(tensor.shape))
