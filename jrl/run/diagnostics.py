"""Everything a configuration is missing on this machine; nothing is compiled or trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from jax.sharding import Mesh

from jrl.config import Config
from jrl.config.data import DIALOGUES, RECORDED, SOURCE
from jrl.config.features import check_features
from jrl.data.datasets import open_dataset
from jrl.data.tables import Dataset, FirstRows
from jrl.errors import Mistakes, UserError
from jrl.judging.judges import check_judges
from jrl.methods.base import Method
from jrl.models.config import ModelConfig
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.transformer import transformer
from jrl.run.own_parts import check_own_parts
from jrl.run.reward_probe import check_reward_columns, check_searched_parts, missing_math
from jrl.setup.features import features_of
from jrl.setup.frozen import run_shape
from jrl.setup.kind import Kind, RunData
from jrl.setup.kinds import kind_of
from jrl.setup.objective import method_of
from jrl.setup.placement import make_meshes
from jrl.setup.reward_parts import reward_pool
from jrl.system.devices import find_devices
from jrl.system.extras import install_line, missing
from jrl.train import build
from jrl.train.memory_check import check_training
from jrl.train.optimizer import make_optimizer
from jrl.train.reward_model import check_text_models
from jrl.train.trainable import check_trainable

_ROWS = 100
"""Rows of each source that become prompts at least, to see whether fields and template fit."""


def obstacles(config: Config, *, together: bool = True) -> list[str]:
    """The obstacles of a configuration here, one line each; [] if none.

    Each part is looked at alone, so that one that is wrong does not hide the others. Checkpoints
    are read up to their headers, data up to its first rows.

    Args:
      config: of the run.
      together: whether parts that are right are also checked to go together, as a run checks them,
        which calls functions of one's own.
    """
    mistakes = Mistakes()
    look = mistakes.look
    if look(find_devices) is None:
        return mistakes.lines  # nothing else can be looked at
    kind = look(lambda: kind_of(config))
    method = look(lambda: method_of(config, kind and kind.new_tokens))
    look(lambda: make_optimizer(config.optimizer, config.train.steps, 1))
    meshes = look(lambda: make_meshes(config, apart=True))
    tokenizer, model = (None, None) if kind is None else _model(config, kind, mistakes)
    # What is recorded, and dialogues, are read below.
    for name in ("train", "eval", "pairs"):
        spec = getattr(config.data, name, None)
        if spec is not None and not str(spec).startswith((RECORDED, DIALOGUES, SOURCE)):
            look(partial(_first_row, spec, f"data.{name}"))
    if getattr(config.data, "train", "") is None:
        mistakes.lines.append(
            "data.train and data.task are both missing; name a file of prompts or a procedural task"
        )
    if kind is not None and (pool := look(lambda: reward_pool(config))) is not None:
        if method is not None:
            look(partial(check_searched_parts, config, method, kind, pool))
        pool.close()
    if kind is not None and method is not None and tokenizer is not None:
        read = look(lambda: kind.read(tokenizer, method, partial(_head, config)))
        if read is not None:
            has_network = model is not None or config.model.network is not None
            if together and meshes is not None and has_network:
                training, sampling = meshes
                look(
                    lambda: _check_run(
                        config, kind, method, tokenizer, model, training, sampling, read
                    )
                )
            elif together and model is not None:  # on other devices than the run's
                look(lambda: _check_features(config, kind, method, model))
            look(lambda: check_reward_columns(config, kind, read))
            look(lambda: check_judges(config, read.prompts["train"]))
            look(lambda: check_text_models(config, read.prompts["train"]))
    if note := missing_math(config):
        mistakes.lines.append(note)
    return mistakes.lines + list(_missing_sinks(config))


def with_others(error: UserError, config: Config) -> UserError:
    """An error at a run's start, with further mistakes of its configuration, a line each.

    Args:
      error: what was raised.
      config: of the run.
    """

    def bare(line: str) -> str:  # counts differ, as only the first rows are read here
        return re.sub(r"\d+", "", line)

    lines = str(error).splitlines()
    seen_lines = {bare(line) for line in lines}
    # Without math-verify a run continues, so that is no mistake beside another.
    parts = obstacles(config, together=False)
    others = [line for line in parts if line != missing_math(config)]
    return UserError("\n".join(lines + [line for line in others if bare(line) not in seen_lines]))


def _check_features(config: Config, kind: Kind, method: Method, model: ModelConfig) -> None:
    """Raises UserError where features do not go together, whatever the devices are."""
    network = method.network(transformer(model))
    present = features_of(config, method, network=network, model=model, data=kind.features)
    check_features(present)


def _check_run(
    config: Config,
    kind: Kind,
    method: Method,
    tokenizer: Any,
    model: ModelConfig | None,
    mesh: Mesh,
    rollout_mesh: Mesh | None,
    data: RunData,
) -> None:
    """Raises UserError where parts that are right by themselves do not go together.

    Args:
      config: of the run.
      kind: of its data.
      method: of the run.
      tokenizer: of the policy.
      model: its shape; None for a network of one's own.
      mesh: of training.
      rollout_mesh: devices that sample; None for ``mesh``.
      data: the first rows, more than a step has.
    """
    run = build.bare_run(
        config,
        mesh,
        kind=kind,
        model=model,
        tokenizer=tokenizer,
        width=kind.width(data),
        networks=build.frozen_networks(config, method),
    )
    run = run._replace(rollout_mesh=rollout_mesh, data=data)
    check_training(run)
    check_trainable(run)
    check_own_parts(run)


def _model(config: Config, kind: Kind, mistakes: Mistakes) -> tuple[Any, ModelConfig | None]:
    """The tokenizer and the shape of a run's policy; collects mistakes in ``mistakes``."""
    look, path = mistakes.look, config.model.path
    tokenizer, model = kind.tokenizer, None
    if config.model.network is not None:
        if tokenizer is None and path is not None:
            tokenizer = look(lambda: load_tokenizer(path))
        if tokenizer is not None:
            look(lambda: build.own_network(kind, tokenizer))
    elif path is not None:
        model = look(lambda: run_shape(config, kind.task))
        if model is not None and tokenizer is None:
            tokenizer = look(lambda: load_tokenizer(path))
    else:
        model = look(lambda: run_shape(config, kind.task))
    return tokenizer, model


def _head(config: Config, spec: str | Mapping[str, float], *, key: str) -> Dataset:
    return FirstRows(open_dataset(spec, key=key), max(_ROWS, 2 * config.train.prompts))


def _first_row(spec: str | Mapping[str, float], key: str) -> dict[str, Any]:
    return open_dataset(spec, key=key)[0]


def _missing_sinks(config: Config) -> Iterator[str]:
    for target in config.log.to:
        extra = target.partition(":")[0]
        if missing({"tensorboard": ["tensorboardX"]}.get(extra, [extra])):
            yield f"log.to = {target!r} needs the extra {extra}: {install_line(extra)}"
