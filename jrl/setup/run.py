"""The record of a run's parts, which its programs, sources and judges read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optax
from jax.sharding import Mesh

from jrl.config.features import Features
from jrl.config.tables import Config
from jrl.data.datasets import MemoryRows
from jrl.data.messages import Wording
from jrl.data.prompts import build_prompts
from jrl.data.tasks import Task
from jrl.episodes import Env
from jrl.methods.base import Method
from jrl.models.config import ModelConfig
from jrl.models.quant import sampler
from jrl.models.routing import recording
from jrl.models.transformer import transformer
from jrl.sampling.params import SamplingParams
from jrl.setup.features import features_of
from jrl.setup.gather import gathers
from jrl.setup.kind import Kind, RunData
from jrl.setup.reward_parts import RunRewards
from jrl.types import Network, Params, Prompt, ValueNetwork


class Run(NamedTuple):
    """Everything a run is made of, before its state.

    Attributes:
      config: the configuration.
      mesh: devices of training.
      rollout_mesh: devices that sample completions to train on; None for ``mesh``.
      model: the policy's shape, or None for a user's network.
      network: the policy.
      value: the value network, or None.
      networks: the frozen policies that the configuration names and the method reads, by name.
      params: the checkpoint's weights, on the host or in their files; None to initialise them.
      tokenizer: the model's, or the task's.
      kind: the kind of data.
      data: prompts, pairs and recordings read from files.
      width: P, tokens of a prompt.
      sampling_params: of the distribution that is sampled and trained.
      rewards: the reward parts, their weights and givers.
      method: the method, with the schedule of this run.
      optimizer: from optax.
    """

    config: Config
    mesh: Mesh
    rollout_mesh: Mesh | None
    model: ModelConfig | None
    network: Network
    value: ValueNetwork | None
    networks: dict[str, Network]
    params: Params
    tokenizer: Any
    kind: Kind
    data: RunData
    width: int
    sampling_params: SamplingParams
    rewards: RunRewards
    method: Method
    optimizer: optax.GradientTransformation

    @property
    def task(self) -> Task | Env | None:
        """The procedural task or the environment on the device, or None."""
        return self.kind.task

    @property
    def shape(self) -> ModelConfig:
        """The policy's shape, in a run of the library's own decoder."""
        assert self.model is not None
        return self.model


def run_features(run: Run) -> Features:
    """The run's features for ``check_features``."""
    data = run.kind.features
    return features_of(run.config, run.method, network=run.network, model=run.model, data=data)


def sampler_of(run: Run, network: Network | None = None) -> Network:
    """The policy as completions to train on are drawn from it; ``network`` is it elsewhere."""
    network = network or run.network
    if run.model is None or network.extras.own_layout:
        return network
    network = sampler(network, run.model, **run.config.sampling.formats)
    return recording(network, run.model) if run.config.replays_routing else network


def remat_of(config: Config) -> str:
    """``model.remat``; "elementwise" where ``remat.settled`` has not replaced "auto" yet."""
    return "elementwise" if config.model.remat == "auto" else config.model.remat


def policy_network(config: Config, model: ModelConfig, mesh: Mesh) -> Network:
    """The policy as a function of whole weights."""
    return transformer(
        model,
        attention=config.model.attention,
        remat=remat_of(config),
        gather=gathers(config, model, mesh),
    )


def question_prompts(run: Run, questions: Sequence[str], most: int = 0) -> list[Prompt]:
    """Prompts without answers, made as the run's own are; at most as long as those, or ``most``."""
    data = run.config.data
    prompts, _ = build_prompts(
        MemoryRows([{"question": q} for q in questions], "prompt"),
        Wording(run.tokenizer, **data.wording),
        answer_key=None,
        max_prompt_tokens=most or run.width,
    )
    return prompts
