"""Frozen policies: their shapes and weights, read from a checkpoint or a run directory.

A directory is a Hugging Face checkpoint when it holds config.json, and a run of this library when
it holds config.toml.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.config import Config, from_table
from jrl.config.stored import config_of_run, is_run
from jrl.data.tasks import Task
from jrl.episodes import Env
from jrl.errors import UserError
from jrl.hub import model_directory
from jrl.models import hf
from jrl.models.config import ModelConfig, check_read
from jrl.models.soup import average
from jrl.models.transformer import transformer
from jrl.setup.adapters import plain_policy, restore_policy, trained_network
from jrl.setup.kinds import kind_of
from jrl.setup.objective import method_of
from jrl.types import Params


def run_shape(config: Config, task: Task | Env | None, *, runs: bool = True) -> ModelConfig:
    """The shape of a run's policy, from its checkpoint or its own sizes.

    Args:
      config: of the run.
      task: the task or environment on the device, which has a tokenizer; None without one.
      runs: whether the policy reads text; a plan counts its sizes alone, without a tokenizer.

    Raises:
      UserError: neither is given, or it is a network of one's own.
    """
    choice = config.model
    if choice.network is not None:
        raise UserError(
            f"model.network = {choice.network!r}: only the library's own decoder can be planned,"
            " served, or be the frozen policy or reward model of another run"
        )
    types: dict[str, Any] = {"dtype": choice.dtype, "param_dtype": choice.param_dtype}
    if choice.path is not None:
        return dataclasses.replace(hf.read_config(Path(choice.path), "model.path"), **types)
    if task is None and runs:
        raise UserError(
            "model.path is missing: training on data.train needs a checkpoint directory with a "
            "tokenizer; for a model from random weights name a procedural task in data.task, or an"
            " environment in data.env"
        )
    if choice.config is None:
        raise UserError("model.path and model.config are both missing; give one of them")
    if task is None:
        return from_table("model.config", ModelConfig, types | choice.config)
    length = task.prompt_tokens + task.completion_tokens
    sizes = {"vocab_size": task.vocab_size, "max_length": length} | types | choice.config
    shape = from_table("model.config", ModelConfig, sizes)
    if shape.vocab_size < task.tokenizer.vocab_size:
        raise UserError(
            f"model.config.vocab_size = {shape.vocab_size}; {config.data.kind} ="
            f" {config.data.name!r} has {task.tokenizer.vocab_size} ids; remove it"
        )
    check_read(shape, choice.config)
    return shape


def check_named(config: Config, needed: frozenset[str]) -> None:
    """Raises UserError for a frozen policy that is named and that the method does not read."""
    for name, directories in config.frozen.items():
        if name not in needed:
            raise UserError(
                f"frozen.{name} = {_shown(directories)} is not read by method = {config.method!r}"
                " with these coefficients; remove it, or choose a method or a coefficient that"
                " needs it"
            )


def frozen_shape(config: Config, name: str) -> ModelConfig:
    """The shape of a frozen policy, computed in the run's own types.

    Raises:
      UserError: a directory is neither a checkpoint nor a run, or two hold networks of other sizes.
    """
    types: dict[str, Any] = {"dtype": config.model.dtype, "param_dtype": config.model.param_dtype}
    directories = config.frozen[name]
    key = f"frozen.{name}"
    shapes = [dataclasses.replace(model_shape(path, key), **types) for path in directories]
    for path, shape in zip(directories, shapes, strict=True):
        if shape != shapes[0]:
            raise UserError(
                f"frozen.{name} = {_shown(directories)}: {path!r} holds a network of other sizes"
                " than the first; weights of one network can be averaged"
            )
    return shapes[0]


def model_shape(directory: str, key: str) -> ModelConfig:
    """The shape of a model in a checkpoint or a run directory.

    Args:
      directory: of one or the other.
      key: of the configuration, which names it, for messages.

    Raises:
      UserError: it is neither.
    """
    if not is_run_not_checkpoint(directory, key):
        return hf.read_config(Path(directory))
    theirs = config_of_run(directory)
    return run_shape(theirs, kind_of(theirs).task)


def frozen_params(config: Config, name: str) -> Params:
    """The weights of a frozen policy, on the host or in their files, in the run's own type.

    A run directory gives its newest checkpoint: the first policy where it trained several, and
    without what its method adds to the network. Of several directories it is the mean.
    """
    dtype = config.model.param_dtype
    key = f"frozen.{name}"
    trees = [model_params(directory, key, dtype) for directory in config.frozen[name]]
    return trees[0] if len(trees) == 1 else jax.device_get(average([*map(hf.in_memory, trees)]))


def model_params(directory: str, key: str, dtype: str) -> Params:
    """The weights of a model in a checkpoint or a run directory; see ``model_shape``."""
    if not is_run_not_checkpoint(directory, key):
        return hf.open_checkpoint(Path(directory), dtype=dtype)[1]
    theirs = config_of_run(directory)
    shape = run_shape(theirs, kind_of(theirs).task)
    network = trained_network(theirs, shape, transformer(shape))
    network = method_of(theirs, kind_of(theirs).new_tokens).network(network)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    host = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    policy, _ = restore_policy(theirs, network, host)
    policy = jax.device_get(plain_policy(policy, network))
    return jax.tree.map(lambda x: x.astype(dtype), policy)


def _shown(directories: tuple[str, ...]) -> str:
    return repr(directories[0] if len(directories) == 1 else list(directories))


def is_run_not_checkpoint(directory: str, key: str) -> bool:
    """Whether a directory is a run's and no checkpoint; raises UserError where it is neither."""
    if (model_directory(Path(directory), key) / "config.json").exists():
        return False
    if is_run(directory):
        return True
    raise UserError(
        f"{key} = {directory!r} is neither a Hugging Face checkpoint (config.json) nor a"
        " run directory (config.toml); name one of them"
    )
