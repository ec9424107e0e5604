"""Run directories that hold a reward model, and the shape of a value network that starts so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jrl.config import Config
from jrl.config.stored import config_of_run, is_run
from jrl.errors import UserError
from jrl.hub import hub_name, model_directory
from jrl.methods import get_method
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.setup.frozen import run_shape
from jrl.setup.kinds import kind_of


def is_reward_run(path: str) -> bool:
    """Whether a path is a run directory, or nothing at all; else it is a checkpoint."""
    has_config = (Path(path).expanduser() / "config.json").exists()
    return is_run(path) or (not has_config and hub_name(path) is None)


def reward_run(config: Config, key: str, path: str) -> Config:
    """The configuration of the run that trained a reward model, checked.

    Args:
      config: of the run that reads it.
      key: that names it, for messages.
      path: its directory.

    Raises:
      UserError: it is none, trained no values, or has another tokenizer than the policy.
    """
    if not is_run(path):
        raise UserError(
            f"{key} = {path!r} is no run directory: it holds no config.toml; train one with"
            " configs/reward_model.toml, or name a *ForSequenceClassification checkpoint"
        )
    theirs = config_of_run(path)
    if not get_method(theirs.method, **theirs.objective).value:
        raise UserError(
            f"{key} = {path!r} trained {theirs.method!r}, which has no values to "
            "score with; name a run of a reward model such as bradley_terry"
        )
    outputs = get_method(theirs.method, **theirs.objective).objective.value_outputs
    if outputs > 1 and key == "value.path":
        raise UserError(
            f"{key} = {path!r} trained {theirs.method!r}, which gives {outputs} numbers for each"
            " token; a value network starts from a reward model with one"
        )
    if kind_of(theirs).tokenizer_facts != kind_of(config).tokenizer_facts:
        raise UserError(
            f"{key} = {path!r} was trained with another tokenizer than the policy's; "
            "train it from a checkpoint with the policy's tokenizer"
        )
    return theirs


def value_shape(config: Config) -> ModelConfig:
    """The shape of the reward model in ``value.path``, computed in the run's own types.

    Raises:
      UserError: it is no reward model, or has another tokenizer than the policy.
    """
    path = config.value.path or ""
    types: dict[str, Any] = {"dtype": config.model.dtype, "param_dtype": config.model.param_dtype}
    if is_reward_run(path):
        theirs = reward_run(config, "value.path", path)
        shape = (
            run_shape(theirs, kind_of(theirs).task)
            if theirs.value.path is None
            else value_shape(theirs)
        )
        return dataclasses.replace(shape, **types)
    directory = model_directory(path, "value.path")
    shape = hf.read_config(directory, "value.path", classifier=True)
    file = directory / "tokenizer.json"
    if not file.exists() or file.read_bytes() != kind_of(config).tokenizer_facts:
        raise UserError(
            f"value.path = {path!r} has another tokenizer than the policy's; name a reward model"
            " that was trained from a checkpoint with the policy's tokenizer"
        )
    return dataclasses.replace(shape, tied_embeddings=True, **types)
