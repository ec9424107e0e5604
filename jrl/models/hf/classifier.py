"""Published reward models: checkpoints of the classes ``*ForSequenceClassification``.

Those of ``*ForTokenClassification``, which are process reward models, are read at a text's last
token as well.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError, unknown_choice
from jrl.hub import model_directory
from jrl.models.config import DTYPES, ModelConfig
from jrl.models.hf.files import headers_of, open_trunk, read_config, read_json
from jrl.models.hf.stored import open_safetensors

_HEAD, _BIAS, _OUTPUT = "score.weight", "score.bias", "lm_head.weight"


class Classifier(NamedTuple):
    """A reward model of a checkpoint, with one score for each of K labels.

    Attributes:
      config: of the trunk, which has no output matrix: ``tied_embeddings`` is set.
      params: {"trunk": ``Stored`` weights, "head": {"weight": [K, D] float32}}; with "bias" [K] in
        the head where the file has one.
      labels: K names, from ``id2label``; "LABEL_0", ... where the file has none.
      pad_id: tokens of this id at a text's end are not read, as in transformers; None for none.
    """

    config: ModelConfig
    params: dict[str, Any]
    labels: tuple[str, ...]
    pad_id: int | None


def open_classifier(dir: str | os.PathLike[str], *, dtype: str | None = None) -> Classifier:
    """A reward model whose trunk stays in its files until it is placed.

    The scores of a text are those of ``transformers``: the head on the trunk's last hidden state
    at the text's last token (``heads.label_scores``).

    Args:
      dir: as for ``load``.
      dtype: of the trunk; the head stays in float32.

    Raises:
      UserError: as ``open_checkpoint``, or a head that is missing, of another shape or not finite.
    """
    directory = model_directory(dir)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_choice("dtype", dtype, DTYPES)
    config = read_config(directory, classifier=True)
    config = dataclasses.replace(config, tied_embeddings=True)
    headers = headers_of(directory)
    headers.pop(_OUTPUT, None)  # left over from the language model it was trained from
    head, bias = headers.pop(_HEAD, None), headers.pop(_BIAS, None)
    if head is None:
        raise UserError(f"{directory}: missing tensor {_HEAD!r}, the head of a reward model")
    config, trunk = open_trunk(directory, config, headers, dtype)
    if len(head.shape) != 2 or head.shape[1] != config.embed_dim:
        raise UserError(
            f"{head.file}: tensor {_HEAD!r} has shape {list(head.shape)}, expected [labels,"
            f" {config.embed_dim}]"
        )
    weight = _tensor(head.file, _HEAD)
    heads = {"weight": weight}
    if bias is not None:
        if bias.shape != head.shape[:1]:
            raise UserError(
                f"{bias.file}: tensor {_BIAS!r} has shape {list(bias.shape)}, expected"
                f" [{head.shape[0]}], the labels of {_HEAD!r}"
            )
        heads["bias"] = _tensor(bias.file, _BIAS)
    raw = read_json(directory / "config.json")
    pad = raw.get("pad_token_id")
    params = {"trunk": trunk, "head": heads}
    return Classifier(config, params, _labels(raw, len(weight)), pad if type(pad) is int else None)


def _tensor(path: pathlib.Path, name: str) -> np.ndarray:
    """A tensor of a file in float32."""
    with open_safetensors(path) as file:
        values: np.ndarray = file.get_tensor(name).astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"{path}: tensor {name!r} holds numbers that are not finite")
    return values


def _labels(raw: dict[str, Any], count: int) -> tuple[str, ...]:
    """The names of a head's outputs, in their order."""
    names = raw.get("id2label")
    if isinstance(names, dict) and {str(k) for k in names} == {str(i) for i in range(count)}:
        return tuple(str(names[str(i)]) for i in range(count))
    return tuple(f"LABEL_{i}" for i in range(count))
