"""Lower bound on a run's memory, checked before anything is compiled.

Counted are arrays that exist in every run of such sizes: weights, also of judges and reward models,
completions, and the keys and values of those that are decoded at a time. Activations, gradients and
copies come on top, so what is refused here could not run, and what passes may still be too large;
``jrl plan`` measures programs.

    models = held_models(config, rewards, policy)      # models of rewards beside the policy
    sum(model.weight_bytes() for model in models)
    max(model.working_bytes() for model in models)     # they are asked one after the other
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.config import Config
from jrl.errors import UserError
from jrl.hub import model_directory
from jrl.judging.models import judge_directory, judge_shape
from jrl.mesh import RULES
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.setup.frozen import run_shape
from jrl.setup.gather import cached_tokens, token_bytes, weight_numbers
from jrl.setup.kinds import kind_of
from jrl.setup.reward_parts import RunRewards, judge_of, likelihood_of, model_of_part
from jrl.setup.reward_runs import is_reward_run, reward_run, value_shape
from jrl.setup.run import Run
from jrl.system.memory import check_fits, host_bytes

_TOKEN_BYTES = 4 + 4 + 4 + 1
"""Of a completion: its id, log-probability and policy version, and whether it is live."""


def available_bytes() -> int:
    """Memory of the devices of all processes; on CPUs that of the hosts."""
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return host_bytes() * jax.process_count()
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in local]
    return int(max(limits)) * jax.device_count() or host_bytes() * jax.process_count()


def check_training(run: Run) -> None:
    """Raises a UserError where weights, a step's completions or those of evaluation cannot fit.

    Args:
      run: from ``build.setup``.
    """
    config, draw = run.config, run.method.draw
    check_weights(run)
    check_held_models(run)
    setting = f"train.prompts = {config.train.prompts}"
    if run.kind.samples(run.method):
        setting += f" with sampling.group = {config.sampling.group}"
        group = config.sampling.group + draw.baseline_members
        shape = run.kind.batch_shape(run.method)
        _check(run, setting, config.prompts_at_once, group, batch=shape)
    else:
        _check(run, setting, config.train.prompts, 1, sampled=False)
    if config.warmup.steps:
        setting = f"warmup.batch = {config.warmup.batch}"
        _check(run, setting, config.warmup.batch, 1, sampled=False)
    if run.kind.held_out(run.config, run.data).problems:
        check_evaluation(run)


def check_weights(run: Run, *, key: str = "", times: int = 1) -> None:
    """Raises a UserError where the policy's weights alone cannot fit.

    Args:
      run: from ``build.setup``.
      key: what sets how many policies there are.
      times: as many.
    """
    path = run.config.model.path
    model = "model.config" if path is None else f"model.path = {path!r}"
    setting = f"{key} = {times}" if key else model
    remedy = f"lower {key}" if key else "choose a smaller model"
    needed = times * _policy_bytes(run)
    check_fits(f"{setting}: the weights", needed, remedy, available=available_bytes())


def check_held_models(run: Run) -> None:
    """Raises a UserError where models of rewards do not fit beside the policy's weights.

    Judges and likelihoods are asked one after the other, so that the one that takes most counts.

    Args:
      run: from ``build.bare_run``, before anything is loaded.
    """
    models = held_models(run.config, run.rewards, run.model)
    if not models:
        return
    size = sum(model.weight_bytes() for model in models)
    working = max(model.working_bytes() for model in models)
    parts = " and ".join(f"rewards.{model.part}" for model in models)
    with_work = " with what a part keeps while it is asked" if working else ""
    lower = ", lower at_once or rows, or name a server with url" if working else ""
    check_fits(
        f"{parts}: the weights beside the policy's{with_work}",
        _policy_bytes(run) + size + working,
        f"choose smaller models{lower}",
        available=available_bytes(),
    )


def _policy_bytes(run: Run) -> float:
    """Bytes of the policy's weights, at the least those of an int8 base."""
    shapes = jax.eval_shape(run.network.init, jax.random.key(0))
    lora = run.config.lora
    least = 1 if lora is not None and lora.base == "int8" else 8
    return sum(
        float(np.prod(x.shape)) * min(x.dtype.itemsize, least) for x in jax.tree.leaves(shapes)
    )


def check_evaluation(run: Run, keys: Sequence[str] = ("eval.problems", "eval.samples")) -> None:
    """Raises a UserError where the completions of an evaluation cannot fit.

    Args:
      run: from ``build.setup``, ``config.eval`` as it will be.
      keys: what the number of problems and that of completions for each are called.
    """
    table = run.config.eval
    setting = f"{keys[0]} = {table.problems} with {keys[1]} = {table.samples}"
    held_out = run.kind.held_out(run.config, run.data)
    # Some kinds decode as many at a time as a training step has.
    _check(run, setting, min(held_out), table.samples)
    _check(run, setting, held_out.problems, table.samples, sampled=False)


def check_problems(run: Run, key: str, problems: int) -> None:
    """Raises a UserError where problems and one completion of each cannot fit.

    Args:
      run: from ``build.setup``.
      key: what sets how many there are.
      problems: as many.
    """
    _check(run, f"{key} = {problems}", problems, 1, sampled=False)


def check_slots(key: str, slots: int, tokens: int, model: ModelConfig | None) -> None:
    """Raises a UserError where the keys and values of an engine's slots cannot fit.

    Args:
      key: what sets how many there are.
      slots: completions decoded at once.
      tokens: of each, its prompt's included.
      model: the policy's shape; None where it is not known.
    """
    each = _TOKEN_BYTES if model is None else token_cache_bytes(model)
    setting = f"{key} = {slots} of {tokens} tokens each"
    check_fits(setting, float(slots) * tokens * each, f"lower {key}", available=available_bytes())


def token_cache_bytes(model: ModelConfig, itemsize: int | None = None) -> int:
    """Bytes of one token's keys and values, at the least 1 a number, as with an int8 cache."""
    return 2 * model.layers * model.kv_heads * model.head_dim * (itemsize or 1)


def _check(
    run: Run,
    setting: str,
    prompts: int,
    group: int,
    *,
    sampled: bool = True,
    batch: tuple[int, int, int] | None = None,
) -> None:
    """Checks completions of a group for each prompt; those that are drawn have a cache, too.

    Args:
      run: from ``build.setup``.
      setting: the keys that set the sizes.
      prompts: that the sampler has at a time.
      group: completions of each.
      sampled: whether the policy draws them.
      batch: groups, members and tokens of the batch that is made of them; None for these.
    """
    config: Config = run.config
    new = run.kind.new_tokens * run.kind.contexts  # a row of training holds all of an episode's
    groups, members, longest = batch or (prompts, group, new)
    size = 4.0 * groups * run.width + float(groups) * members * longest * _TOKEN_BYTES
    model = run.kind.cached(run.model) if sampled else None
    if model is not None:
        itemsize = 1 if "cache" in config.sampling.in_8_bits else np.dtype(model.dtype).itemsize
        cached = cached_tokens(prompts, group, run.width, new, config.sampling.slots)
        size += cached * token_cache_bytes(model, itemsize)
    keys = " or ".join(part.split(" = ")[0] for part in setting.split(" with "))
    setting = f"{setting}, {run.width} + {new} tokens each"
    check_fits(setting, size, f"lower {keys}", available=available_bytes())


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
