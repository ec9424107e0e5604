"""Reward models of runs and checkpoints: as rewards, and as what a value network starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.collect.groups import to_batch
from jrl.config import Config
from jrl.config.reward_model import TOKEN_KEYS, RewardModelTable
from jrl.config.tables import RewardTable
from jrl.errors import UserError, unknown_choice
from jrl.hub import model_directory
from jrl.mesh import placed_shapes, tree_shardings
from jrl.methods import find_method, get_method
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.heads import after_token, value_head, value_network, value_networks
from jrl.models.transformer import transformer
from jrl.objectives.members import value_output
from jrl.rewards.model import ModelReward, one_of
from jrl.rewards.reading import check_reader
from jrl.rewards.rules import Rules
from jrl.rewards.text_models import TextModel, load_text_model
from jrl.sampling.params import make_sampling_params
from jrl.setup.adapters import plain_policy, restore_policy, trained_network
from jrl.setup.frozen import run_shape
from jrl.setup.kinds import kind_of
from jrl.setup.reward_parts import RunRewards, model_of_part, parts_of, reward_tables
from jrl.setup.reward_runs import is_reward_run, reward_run, value_shape
from jrl.train.batch_rows import in_parts
from jrl.train.score import score
from jrl.types import Array, Batch, Network, Params, Prompt, Rollout, ValueNetwork

VALUES: dict[str, Callable[[Network, int], ValueNetwork]] = {
    "head": value_head,
    "network": value_network,
    "networks": value_networks,
}
"""Functions by ``value.kind``: (trunk, numbers for each token) -> the value network."""


def trains_reward(config: Config) -> bool:
    """Whether a run trains a reward model: its trunk cannot answer, its values follow tokens."""
    return find_method(config.method).family == "reward_model"


def make_value(
    config: Config, network: Network, trunk: Callable[[ModelConfig], Network] = transformer
) -> ValueNetwork:
    """The value network that a configuration asks for; one of its own is trained as a whole.

    Args:
      config: of the run.
      network: the policy.
      trunk: makes the network of a shape, for one that starts from ``value.path``.

    Raises:
      UserError: a start, or networks, that do not go with the method's numbers for each token.
    """
    kind, outputs = config.value.kind, outputs_of(config)
    if outputs == 1 and kind == "networks":
        raise UserError(
            f"value.kind = 'networks': {config.method} reads one number for each token; set it to"
            " 'network'"
        )
    if config.value.path is not None:
        if outputs > 1:
            raise UserError(
                f"value.path = {config.value.path!r}: {config.method} reads {outputs} numbers for"
                " each token, and a reward model has one; remove it"
            )
        return value_network(trunk(value_shape(config)))
    derived = network.extras.derived
    if derived is not None and kind != "head":
        network = derived.network
    return VALUES[kind](network, outputs)


def outputs_of(config: Config) -> int:
    """Numbers for each token that the method of a run reads from its value network."""
    return get_method(config.method, **config.objective).objective.value_outputs


def load_reward_models(config: Config, rewards: RunRewards, mesh: Mesh) -> RunRewards:
    """The reward parts with the models that a configuration names, placed on the mesh.

    Args:
      config: of the run to be rewarded.
      rewards: its reward parts.
      mesh: of that run.

    Raises:
      UserError: a directory without a run that trained values, a tokenizer that is not the
        policy's, no checkpoint, or one that cannot be read.
    """
    tables = reward_tables(config)
    parts = config.train.minibatches * config.train.microbatches
    models, text_models = dict[str, ModelReward](), dict[str, TextModel]()
    loaded_runs = dict[Any, list[ModelReward]]()
    for name in rewards.given_by("model"):
        key, table = f"rewards.{name}", model_of_part(config, name)
        if not all(is_reward_run(path) for path in table.path):
            if table.by == "turn":
                raise UserError(
                    f"{key}.by = 'turn': a checkpoint's model reads whole texts; name the run"
                    " directory of a reward model, or set it to step"
                )
            paid = None if table.by == "completion" else rewards.weights[name]
            rules = Rules(tables[name].missing, where=tables[name].where, by_token=paid)
            dtype = config.model.dtype
            loaded = tuple(text_models.values())
            text_models[name] = load_text_model(
                table, rules, key, mesh, dtype, seed=config.seed, others=loaded
            )
            continue
        check_reads_tokens(key, table, tables[name])
        theirs = [reward_run(config, f"{key}.path", path) for path in table.path]
        after = trains_reward(theirs[0])
        labels = output_weights(theirs[0], table, key)
        if (table.path, labels) not in loaded_runs:  # passes of one model share its weights
            loaded_runs[table.path, labels] = [
                model_of(one, mesh, parts, after=after, outputs=labels) for one in theirs
            ]
        axis = int(theirs[0].value.kind == "networks")
        models[name] = one_of(loaded_runs[table.path, labels], table, config.seed, axis)
    return rewards._replace(models=models, text_models=text_models)


def check_text_models(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for a reward model's template that these prompts do not fill."""
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.meta)
    answers = not prompts or any(prompt.answer is not None for prompt in prompts)
    for name in parts_of(config).given_by("model"):
        key, table = f"rewards.{name}", model_of_part(config, name)
        if not all(is_reward_run(path) for path in table.path):
            tokenizer = load_tokenizer(model_directory(table.path[0], f"{key}.path"))
            check_reader(table, tokenizer, columns, key, answers=answers)


def check_reads_tokens(key: str, table: RewardModelTable, part: RewardTable) -> None:
    """Raises UserError for keys that a run's reward model, which reads tokens, does not have."""
    if table.reads_text:
        names = sorted(table.model_fields_set - TOKEN_KEYS)
        raise UserError(
            f"{key}.{names[0]} = {getattr(table, names[0])!r}: a run directory's model reads the"
            " policy's tokens; remove it, or name a *ForSequenceClassification checkpoint"
        )
    if part.where or part.missing != "none":
        name = "where" if part.where else "missing"
        raise UserError(
            f"{key}.{name} = {getattr(part, name)!r}: a run directory's model scores every sample;"
            " remove it"
        )


def output_weights(theirs: Config, table: RewardModelTable, key: str) -> tuple[float, ...]:
    """The weight of each number for a token that a run's model gives.

    Args:
      theirs: the run that trained it.
      table: whose ``labels`` name outputs by number, from 0 on; the mean of all without it.
      key: "rewards.NAME", for messages.

    Raises:
      UserError: there is no such output.
    """
    count = outputs_of(theirs)
    names = [str(i) for i in range(count)]
    for name in table.labels:
        if name not in names:
            raise unknown_choice(f"{key}.labels", name, names)
    if not table.labels:
        return (1 / count,) * count
    return tuple(table.labels.get(name, 0.0) for name in names)


def model_of(
    theirs: Config,
    mesh: Mesh,
    parts: int,
    *,
    after: bool,
    checkpoint: int | None = None,
    outputs: tuple[float, ...] = (1.0,),
) -> ModelReward:
    """The values that a run trained, placed on a mesh.

    Args:
      theirs: the run's configuration, with ``run.dir``.
      mesh: of the run that reads them.
      parts: see ``values``.
      after: whether values are those after each token, as a reward model's; else before it.
      checkpoint: a training step; None for the newest.
      outputs: [K] weights of the value network's numbers for a token.
    """
    shape = run_shape(theirs, kind_of(theirs).task)
    network = trained_network(theirs, shape, transformer(shape))
    value = make_value(theirs, network)
    if after:
        value = after_token(value)
    params = params_of(theirs, network, value, mesh, checkpoint)
    fixed = partial(values, network=network, value=value, parts=parts, outputs=outputs)
    return ModelReward(params, fixed)


def values(
    params: Params,
    rollout: Rollout,
    *,
    network: Network,
    value: ValueNetwork,
    parts: int,
    outputs: tuple[float, ...] = (1.0,),
) -> Array:
    """The value of each token of a rollout, as training read it.

    Args:
      params: {"policy", "value"} of the reward model.
      rollout: whose tokens are read.
      network: the reward model's trunk.
      value: its head.
      parts: parts that rows go through the network in, where they divide, to bound memory.
      outputs: [K] weights of its numbers for a token.

    Returns:
      [N, G, T] float32, points; what lies outside the mask is meaningless.
    """
    n, g, _ = rollout.tokens.shape
    batch = to_batch(rollout, jnp.zeros((n, g, 1), jnp.float32), jnp.ones(1, jnp.float32))
    more = tuple(value_output(k) for k in range(1, len(outputs)))

    def of(batch: Batch) -> dict[str, Array]:
        return score(
            params,
            batch,
            make_sampling_params(),
            network=network,
            value=value,
            want=frozenset({"values"}),
            statistics=more,
        )

    scored = in_parts(of, batch, parts if n % parts == 0 else 1)
    names = ["values", *(statistic.name for statistic in more)]
    weighed = [weight * scored[name] for weight, name in zip(outputs, names, strict=True)]
    return sum(weighed[1:], start=weighed[0])


def params_of(
    config: Config, network: Network, value: ValueNetwork, mesh: Mesh, checkpoint: int | None
) -> Params:
    """{"policy", "value"} of a run's checkpoint, the newest for None, placed on a mesh."""
    shapes = jax.eval_shape(
        lambda key: {"policy": network.init(key), "value": value.init(key)}, jax.random.key(0)
    )
    axes = {"policy": network.axes(), "value": value.axes()}
    targets = placed_shapes(shapes, tree_shardings(mesh, axes, shapes))
    also = {"params": {"value": targets["value"]}}
    policy, restored = restore_policy(
        config, network, targets["policy"], checkpoint=checkpoint, also=also
    )
    return {"policy": policy, "value": restored["params"]["value"]}


def value_start(config: Config, mesh: Mesh) -> Params:
    """The parameters of ``heads.value_network`` that hold the reward model in ``value.path``.

    As in "Training language models to follow instructions with human feedback" (arXiv:2203.02155):
    trunk and head are the reward model's, so that at a text's last token the first estimate is its
    score. A checkpoint's head has no bias; it begins at 0.

    Args:
      config: of the run whose value network it is.
      mesh: of that run.

    Returns:
      {"trunk", "head": {"weight" [D], "bias" []}}; leaves in files, on the host or on devices.

    Raises:
      UserError: a checkpoint with several labels, or one that cannot be read.
    """
    path = config.value.path or ""
    dtype = config.model.param_dtype
    if not is_reward_run(path):
        loaded = hf.open_classifier(model_directory(path, "value.path"), dtype=dtype)
        one = {"bias": np.zeros(1, np.float32)} | loaded.params["head"]
        if len(one["weight"]) != 1:
            raise UserError(
                f"value.path = {path!r} scores {', '.join(loaded.labels)}; a value network starts"
                " from a reward model with one label"
            )
        head: dict[str, Any] = {name: x[0] for name, x in one.items()}
        return {"trunk": loaded.params["trunk"], "head": head}
    theirs = reward_run(config, "value.path", path)
    shape = run_shape(theirs, kind_of(theirs).task)
    network = trained_network(theirs, shape, transformer(shape))
    params = params_of(theirs, network, make_value(theirs, network), mesh, None)
    if theirs.value.kind == "network":
        trunk, head = params["value"]["trunk"], params["value"]["head"]
    else:
        trunk, head = plain_policy(params["policy"], network), params["value"]
    return {"trunk": jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), trunk), "head": head}
