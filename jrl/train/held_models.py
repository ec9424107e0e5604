"""Judges, likelihoods and reward models on a run's devices beside the policy, and their bytes.

models = held_models(config, rewards, policy)          # shapes alone: nothing is loaded
sum(model.weight_bytes() for model in models)
max(model.working_bytes() for model in models)         # they are asked one after the other
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrl.config import Config
from jrl.errors import UserError
from jrl.hub import model_directory
from jrl.judging.models import judge_directory, judge_shape
from jrl.mesh import RULES
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.setup.frozen import run_shape
from jrl.setup.gather import token_bytes, weight_numbers
from jrl.setup.kinds import kind_of
from jrl.setup.reward_parts import RunRewards, judge_of, likelihood_of, model_of_part
from jrl.train.reward_runs import is_reward_run, reward_run, value_shape

UNDIVIDED: Mapping[str, int] = {axis: 1 for axes in RULES.values() for axis in axes}
"""A mesh of one device."""


class HeldModel(NamedTuple):
    """A model of a reward part on the run's devices.

    Attributes:
      part: its reward part.
      networks: its shape, and that of a value network of its own; () for the policy, and for a
        judge whose weights an earlier part has.
      copies: models of an ensemble.
      judge: the shape that a judge's replies are decoded with, or answers are scored with; None for
        a reward model.
      slots: replies decoded, or texts scored, at a time.
      tokens: of the longest question with its reply, or of the longest text.
      answer: tokens of the longest answer of a likelihood; 0 of a judge.
      in_8_bits: parts of the sampler in 8 bits.
    """

    part: str
    networks: tuple[ModelConfig, ...]
    copies: int = 1
    judge: ModelConfig | None = None
    slots: int = 0
    tokens: int = 0
    answer: int = 0
    in_8_bits: tuple[str, ...] = ()

    def weight_bytes(self, axes: Mapping[str, int] = UNDIVIDED) -> float:
        """Bytes of the weights on one device of a mesh with these axes; by default all of them."""
        sizes = [
            weight_numbers(each, axes) * jnp.dtype(each.param_dtype).itemsize
            for each in self.networks
        ]
        return self.copies * sum(sizes)

    def working_bytes(self, axes: Mapping[str, int] = UNDIVIDED) -> float:
        """Bytes on one device while it is asked, besides weights; 0 of a reward model.

        Keys and values of a judge; of a likelihood the last states of its texts, and float32
        distributions of one answer.
        """
        if self.judge is None:
            return 0.0
        rows = -(-self.slots // math.prod(axes.get(axis, 1) for axis in RULES["batch"]))
        if self.answer:
            state = self.judge.embed_dim * jnp.dtype(self.judge.dtype).itemsize
            return rows * self.tokens * state + 4.0 * self.answer * self.judge.vocab_size
        each = token_bytes(self.judge, axes.get("tensor", 1), self.in_8_bits)
        return rows * self.tokens * each


def held_models(config: Config, rewards: RunRewards, policy: ModelConfig | None) -> list[HeldModel]:
    """The judges, likelihoods and reward models of a run, from their configurations alone.

    Args:
      config: of the run.
      rewards: its reward parts.
      policy: its shape; None for a network of one's own, whose cache as a judge is not counted.

    Raises:
      UserError: a directory that is neither a checkpoint nor a run.
    """
    models, directories = [], set[str]()
    for name in rewards.given_by("judge"):
        if not (table := judge_of(config, name)).local:
            continue
        directory, shape = judge_directory(config, name), judge_shape(config, name)
        models.append(
            HeldModel(
                name,
                () if shape is None or directory in directories else (shape,),
                judge=shape or policy,
                slots=table.at_once,
                tokens=table.max_prompt_tokens + table.max_tokens,
                in_8_bits=() if shape else config.sampling.in_8_bits,
            )
        )
        directories.add(directory or "")
    for name in rewards.given_by("likelihood"):
        likely, longest = likelihood_of(config, name), config.data.longest_prompt
        longest += kind_of(config).new_tokens + likely.max_answer_tokens
        if policy is not None:
            tokens, answer = min(longest, policy.max_length), likely.max_answer_tokens
            models.append(HeldModel(name, (), 1, policy, likely.rows, tokens, answer))
    for name in rewards.given_by("model"):
        paths = model_of_part(config, name).path
        models.append(HeldModel(name, _reward_networks(config, name, paths), len(paths)))
    return models


def _reward_networks(config: Config, name: str, paths: tuple[str, ...]) -> tuple[ModelConfig, ...]:
    """The networks of a reward model, of the first of an ensemble."""
    key = f"rewards.{name}.path"
    if not all(is_reward_run(path) for path in paths):
        answers = model_of_part(config, name).answers is not None
        try:
            shape = hf.read_config(model_directory(paths[0], key), classifier=not answers)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
        tied = shape.tied_embeddings or not answers  # a classifier has no head of the vocabulary
        types: dict[str, Any] = {"param_dtype": config.model.dtype, "dtype": config.model.dtype}
        return (dataclasses.replace(shape, tied_embeddings=tied, **types),)
    theirs = reward_run(config, key, paths[0])
    trunk = run_shape(theirs, kind_of(theirs).task)
    if theirs.value.path is not None:
        return trunk, value_shape(theirs)
    return (trunk, trunk) if theirs.value.kind == "network" else (trunk,)
