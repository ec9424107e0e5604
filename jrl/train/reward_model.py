"""Trained reward models as rewards: read from the directories of their runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.config import Config, load_config
from jrl.errors import UserError
from jrl.hub import model_directory
from jrl.mesh import tree_shardings
from jrl.methods import find_method, get_method
from jrl.models.heads import after_token, value_head, value_network
from jrl.models.transformer import transformer
from jrl.rewards.model import ModelReward
from jrl.sampling.params import make_sampling_params
from jrl.train.adapters import restore_policy, trained_network
from jrl.train.frozen import run_shape
from jrl.train.groups import to_batch
from jrl.train.kinds import kind_of
from jrl.train.reward_parts import RunRewards, reward_tables
from jrl.train.score import in_parts, score
from jrl.types import Array, Batch, Network, Params, Rollout, ValueNetwork

VALUES: dict[str, Callable[[Network], ValueNetwork]] = {
    "head": value_head,
    "network": value_network,
}
"""What ``value.kind`` names."""


def trains_reward(config: Config) -> bool:
    """Whether a run trains a reward model: its trunk cannot answer, its values follow tokens."""
    return find_method(config.method).family == "reward_model"


def make_value(config: Config, network: Network) -> ValueNetwork:
    """The value network that a configuration asks for; one of its own is trained as a whole."""
    derived = network.extras.derived
    if derived is not None and config.value.kind == "network":
        network = derived.network
    return VALUES[config.value.kind](network)


def load_reward_models(config: Config, rewards: RunRewards, mesh: Mesh) -> dict[str, ModelReward]:
    """The reward models that a configuration names, their newest checkpoints placed on the mesh.

    Args:
      config: of the run to be rewarded.
      rewards: its reward parts.
      mesh: of that run.

    Raises:
      UserError: no path or another option, a directory without a run that trained values, a
        tokenizer that is not the policy's, or no checkpoint.
    """
    tables = reward_tables(config)
    parts = config.train.minibatches * config.train.microbatches
    models = {}
    for name in rewards.given_by("model"):
        theirs = _model_config(config, f"rewards.{name}", tables[name].options)
        models[name] = model_of(theirs, mesh, parts, behind=trains_reward(theirs))
    return models


def _model_config(config: Config, key: str, options: dict[str, Any]) -> Config:
    """The configuration of the run that trained a reward model, checked."""
    path = options.pop("path", None)
    if not isinstance(path, str) or options:
        wrong = [f"{key}.{name} = {value!r}: no such key" for name, value in options.items()]
        wrong += [f"{key}.path is missing"] if path is None else []
        wrong = wrong or [f"{key}.path = {path!r}"]
        raise UserError(f"{wrong[0]}; it takes path, a run directory, and weight")
    directory = Path(path)
    if not (directory / "config.toml").exists():
        raise UserError(
            f"{key}.path = {path!r} is no run directory: it holds no config.toml; train "
            "one with configs/reward_model.toml"
        )
    theirs = load_config(directory / "config.toml", [f"run.dir={json.dumps(str(directory))}"])
    if not get_method(theirs.method, **theirs.objective).value:
        raise UserError(
            f"{key}.path = {path!r} trained {theirs.method!r}, which has no values to "
            "score with; name a run of a reward model such as bradley_terry"
        )
    if _tokenizer(theirs) != _tokenizer(config):
        raise UserError(
            f"{key}.path = {path!r} was trained with another tokenizer than the policy's; "
            "train it from a checkpoint with the policy's tokenizer"
        )
    return theirs


def model_of(
    theirs: Config, mesh: Mesh, parts: int, *, behind: bool, checkpoint: int | None = None
) -> ModelReward:
    """The values that a run trained, placed on a mesh.

    Args:
      theirs: the run's configuration, with ``run.dir``.
      mesh: of the run that reads them.
      parts: see ``values``.
      behind: whether values are those behind each token, as a reward model's; else before it.
      checkpoint: a training step; None for the newest.
    """
    shape = run_shape(theirs, kind_of(theirs).task)
    network = trained_network(theirs, shape, transformer(shape))
    value = make_value(theirs, network)
    if behind:
        value = after_token(value)
    params = _params(theirs, network, value, mesh, checkpoint)
    return ModelReward(params, partial(values, network=network, value=value, parts=parts))


def values(
    params: Params, rollout: Rollout, *, network: Network, value: ValueNetwork, parts: int
) -> Array:
    """The value of each token of a rollout, as training read it.

    Args:
      params: {"policy", "value"} of the reward model.
      rollout: whose tokens are read.
      network: the reward model's trunk.
      value: its head.
      parts: parts that rows go through the network in, where they divide, to bound memory.

    Returns:
      [N, G, T] float32, points; what lies outside the mask is meaningless.
    """
    n, g, _ = rollout.tokens.shape
    batch = to_batch(rollout, jnp.zeros((n, g, 1), jnp.float32), jnp.ones(1, jnp.float32))

    def of(batch: Batch) -> dict[str, Array]:
        want = frozenset({"values"})
        return score(params, batch, make_sampling_params(), network=network, value=value, want=want)

    return in_parts(of, batch, parts if n % parts == 0 else 1)["values"]


def _tokenizer(config: Config) -> bytes | str:
    """What two configurations share when their tokens mean the same."""
    if config.data.has_solutions:
        return "the tasks' own"
    return (model_directory(config.model.path or "") / "tokenizer.json").read_bytes()


def _params(
    config: Config, network: Network, value: ValueNetwork, mesh: Mesh, checkpoint: int | None
) -> Params:
    shapes = jax.eval_shape(
        lambda key: {"policy": network.init(key), "value": value.init(key)}, jax.random.key(0)
    )
    axes = {"policy": network.axes(), "value": value.axes()}
    wanted = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        shapes,
        tree_shardings(mesh, axes, shapes),
    )
    also = {"params": {"value": wanted["value"]}}
    policy, restored = restore_policy(
        config, network, wanted["policy"], checkpoint=checkpoint, also=also
    )
    return {"policy": policy, "value": restored["params"]["value"]}
