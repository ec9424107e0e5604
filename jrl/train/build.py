"""From a configuration to the values a run is made of. Strings become functions here, once.

run = setup(config)                       # everything but the state; see ``programs``
run = policy_run(config)                  # without data and judges, to draw from it or export it
run = bare_run(config, mesh, model=...)   # without data and weights, to plan it
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.collect.sources_own import tried
from jrl.config.checks import check_batch
from jrl.config.features import check_features
from jrl.config.secrets import reveal
from jrl.config.tables import Config
from jrl.data.datasets import open_dataset
from jrl.errors import UserError
from jrl.judging.models import load_judge_models
from jrl.mesh import batch_shards
from jrl.methods.base import Method
from jrl.models import hf
from jrl.models.attention.choice import check_attention_on_mesh
from jrl.models.config import ModelConfig
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.heads import after_token
from jrl.models.tokenizer import check_ids, check_vocab
from jrl.models.transformer import transformer
from jrl.sampling.params import SamplingParams, make_sampling_params
from jrl.setup.adapters import lora_of, start_params, trained_network
from jrl.setup.features import features_of
from jrl.setup.frozen import frozen_shape, run_shape
from jrl.setup.kind import Kind, RunData
from jrl.setup.kinds import kind_of
from jrl.setup.objective import method_of
from jrl.setup.placement import check_model_on_mesh, check_sampler_mesh, make_meshes
from jrl.setup.reward_parts import accuracy_part, parts_of
from jrl.setup.run import Run, policy_network
from jrl.train.memory_check import check_training
from jrl.train.optimizer import make_optimizer
from jrl.train.reward_model import load_reward_models, make_value, trains_reward
from jrl.train.state import frozen_names
from jrl.train.step import check_vocabularies
from jrl.types import NOTHING, Array, Network, Params
from jrl.user_code import check_options, check_takes, load, made_by


def setup(config: Config, *, trains: bool = True) -> Run:
    """Builds and checks a run; what is wrong with the configuration is said here.

    Args:
      config: of the run.
      trains: False to set no devices aside for rollout.

    Raises:
      UserError: naming the key, the value and what would do, before any step runs.
    """
    kind = kind_of(config)
    method = method_of(config, kind.new_tokens)
    mesh, rollout_mesh = make_meshes(config, apart=trains)
    tokenizer, model, params = _model(config, kind)
    data = kind.read(tokenizer, method, open_dataset)
    run = bare_run(
        config,
        mesh,
        kind=kind,
        model=model,
        tokenizer=tokenizer,
        width=kind.width(data),
        networks=frozen_networks(config, method),
        trains=trains,
    )
    _check_tokens(config, data, run.network.vocab_size)
    if trains:
        check_training(run._replace(data=data))
    return run._replace(
        rollout_mesh=rollout_mesh,
        params=params if model is None else start_params(config, model, run.network, params),
        data=data,
        rewards=load_reward_models(config, run.rewards, rollout_mesh or mesh)._replace(
            accuracy_part=accuracy_part(config, kind.eval_parts),
            judges=load_judge_models(config, run.rewards, mesh, run.network.max_length),
        ),
    )


def policy_run(config: Config) -> Run:
    """A run's policy and what prompts are made with; reads no data and loads no judges.

    Its width is that of an empty prompt where the data decide it.

    Args:
      config: of the run; the files of ``[data]`` may be on another machine.

    Raises:
      UserError: there is no such model, or it does not fit the mesh.
    """
    kind = kind_of(config)
    mesh, _ = make_meshes(config, apart=False)
    tokenizer, model, params = _model(config, kind)
    width = kind.width(RunData({}, {}, {}))
    run = bare_run(
        config, mesh, kind=kind, model=model, tokenizer=tokenizer, width=width, trains=False
    )
    if model is not None:
        params = start_params(config, model, run.network, params)
    return run._replace(params=params)


def bare_run(
    config: Config,
    mesh: Mesh,
    *,
    kind: Kind,
    model: ModelConfig | None,
    tokenizer: Any,
    width: int,
    networks: Mapping[str, Network] = NOTHING,
    trains: bool = True,
) -> Run:
    """A run without data and weights: what its two programs are made of, and what a plan compiles.

    Args:
      config: of the run.
      mesh: where it trains.
      kind: of its data.
      model: the policy's shape, or None for ``model.network``.
      tokenizer: only its ``stop_ids`` are read, and its size for a network of one's own.
      width: P, tokens.
      networks: frozen policies that are not like the policy, by name.
      trains: False for a run that is evaluated or exported alone.

    Raises:
      UserError: what does not fit together, or does not divide over the mesh.
    """
    method = method_of(config, kind.new_tokens)
    check_batch(config, batch_shards(mesh))
    if model is None:
        network = own_network(kind, tokenizer)
        check_network(network, f"model.network = {config.model.network!r}", mesh)
    else:
        network = trained_network(config, model, policy_network(config, model, mesh))
    one = network
    network = made_by(method.network, f"method = {config.method!r}", network)
    if not isinstance(network, Network):
        raise UserError(
            f"method = {config.method!r}: network returned {network!r:.40}; return a jrl.Network"
        )
    if trains:
        data = kind.features
        check_features(features_of(config, method, network=network, model=model, data=data))
    check_vocabularies(network, networks)
    new_tokens = kind.new_tokens
    for each in (network, *networks.values()):
        kind.check_lengths(each, width)
    if model is not None:
        check_model_on_mesh(mesh, model, width, new_tokens)
        check_attention_on_mesh(mesh, model, config.model.attention)
    check_sampler_mesh(config, mesh, model, width, new_tokens)
    trunk = partial(policy_network, config, mesh=mesh)
    value = make_value(config, one, trunk) if method.value else None
    if value is not None and trains_reward(config):
        value = after_token(value)
    updates = method.schedule.epochs * config.train.minibatches
    optimizer = make_optimizer(config.optimizer, config.train.steps, updates)
    return Run(
        config=config,
        mesh=mesh,
        rollout_mesh=None,
        model=model,
        network=network,
        value=value,
        networks=dict(networks),
        params=None,
        tokenizer=tokenizer,
        kind=kind,
        data=RunData({}, {}, {}),
        width=width,
        sampling_params=sampling_params_of(config, network.vocab_size),
        rewards=parts_of(config),
        method=method,
        optimizer=optimizer(config.optimizer.learning_rate),
    )


def frozen_networks(config: Config, method: Method) -> dict[str, Network]:
    """The frozen policies that are named and read, each of its own size."""
    needed = frozen_names(method.objective, method.schedule)
    names = [name for name in config.frozen if name in needed]
    how = config.model.attention
    return {name: transformer(frozen_shape(config, name), attention=how) for name in names}


def sampling_params_of(config: Config, vocab_size: int) -> SamplingParams:
    """The distribution that a run draws from and trains.

    Raises:
      UserError: ``sampling.top_k`` is more than the vocabulary.
    """
    s = config.sampling
    if s.top_k > vocab_size:
        raise UserError(
            f"sampling.top_k = {s.top_k}: the vocabulary has {vocab_size} tokens; 0 keeps all"
        )
    return make_sampling_params(s.temperature, s.top_k, s.top_p, s.min_p)


def own_network(kind: Kind, tokenizer: Any) -> Network:
    """The network of one's own that ``model.network`` names, for the run's tokens and lengths.

    Raises:
      UserError: there is no such function, it does not take ``model.config``, or it returns
        something else.
    """
    config, spec = kind.config, kind.config.model.network or ""
    sizes = {
        "vocab_size": tokenizer.vocab_size,
        "max_length": kind.prompt_tokens + kind.new_tokens,
    }
    make = load(spec, "model.network")
    check_takes(make, tuple(sizes), f"model.network = {spec!r}")
    sizes |= reveal(config.model.config or {}, "model.config")
    check_options(make, sizes, "model.config")
    network = made_by(make, f"model.network = {spec!r}", **sizes)
    if not isinstance(network, Network):
        raise UserError(
            f"model.network = {spec!r} returned {network!r:.40}; return a jrl.Network, which"
            " jrl.linen_network and jrl.nnx_network make of a Flax module, and"
            " jrl.function_network of functions"
        )
    for name in ("vocab_size", "embed_dim", "max_length"):
        size = getattr(network, name)
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise UserError(
                f"model.network = {spec!r}: {name} = {size!r:.40}; must be a whole number, at"
                " least 1"
            )
    check_vocab(tokenizer, network.vocab_size)
    return network


def check_network(network: Network, key: str, mesh: Mesh) -> None:
    """Raises UserError for a network of one's own that does not fit, by tracing it once.

    Args:
      network: of one's own.
      key: that names it, for messages.
      mesh: of the run, whose axes the network may divide its arrays over.
    """
    axes = dict(mesh.shape)
    ids = jax.ShapeDtypeStruct(
        (2 * mesh.size, min(network.max_length, 3 * axes.get("context", 1))), jnp.int32
    )

    def logits(params: Params, tokens: Array) -> Array:
        return network.logits(params, network.hidden(params, tokens, tokens, tokens)[0])

    with jax.set_mesh(mesh):
        params = made_by(jax.eval_shape, key, network.init, jax.random.key(0))
        leaves = jax.tree.leaves(params)
        if not leaves or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
            raise UserError(
                f"{key}: init returned {params!r:.80}; return a tree of float arrays, the"
                " parameters"
            )
        scores = tried(key, made_by, jax.eval_shape, key, logits, params, ids)
    if scores.shape != (*ids.shape, network.vocab_size):
        raise UserError(
            f"{key}: logits of {ids.shape} tokens have the shape {scores.shape}; return"
            f" {(*ids.shape, network.vocab_size)}, a number for each of the vocabulary"
        )


def _model(config: Config, kind: Kind) -> tuple[Any, ModelConfig | None, Params]:
    """Tokenizer, shape (None for ``model.network``), and weights when a checkpoint is named."""
    choice, tokenizer = config.model, kind.tokenizer
    if choice.network is not None:
        if tokenizer is None and choice.path is None:
            raise UserError(
                f"model.network = {choice.network!r} with text needs model.path, the directory of"
                " its tokenizer"
            )
        return tokenizer or load_tokenizer(Path(choice.path or "")), None, None
    shape = run_shape(config, kind.task)
    if choice.path is None:  # sizes without a checkpoint are those of a task's model
        return tokenizer, shape, None
    directory = Path(choice.path)
    tokenizer = kind.tokenizer_in(directory)
    check_vocab(tokenizer, shape.vocab_size)
    if (lora := lora_of(config)) is not None:
        lora.check(shape)
    _, params = hf.open_checkpoint(directory, dtype=choice.param_dtype)
    return tokenizer, shape, params


def _check_tokens(config: Config, data: RunData, vocab_size: int) -> None:
    """Raises UserError for a token that the model has no row for."""
    texts = {split: [p.tokens for p in listed] for split, listed in data.prompts.items()}
    for split, listed in data.judged.items():
        where = f"data.{split} = {str(getattr(config.data, split))!r}"
        for j in listed:
            for name, ids in (
                ("the prompt", j.prompt),
                *(("a response", x) for x in j.completions),
            ):
                if ids.max(initial=0) >= vocab_size:
                    raise UserError(
                        f"{where}: {name} of row {j.id + 1} holds token id {ids.max()}, and the"
                        f" model's vocabulary has only {vocab_size} ids; write the rows with the"
                        " tokenizer of this model"
                    )
    texts["train"] += [x.tokens for group in data.recorded for row in group for x in row.segments]
    for split, arrays in texts.items():
        check_ids(max((int(x.max()) for x in arrays), default=0), vocab_size, f"data.{split}")
