"""Everything a configuration is missing on this machine; nothing is compiled or trained."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jrl.config import Config
from jrl.config.data import DIALOGUES, RECORDED, SOURCE
from jrl.data.sources import open_source
from jrl.data.tables import FirstRows, Source
from jrl.errors import Mistakes, UserError
from jrl.judging.judges import check_judges
from jrl.models import hf
from jrl.models.file_tokenizer import load_tokenizer
from jrl.run.reward_probe import check_reward_columns, missing_math
from jrl.setup.frozen import run_shape
from jrl.setup.kinds import Kind, kind_of
from jrl.setup.objective import method_of
from jrl.setup.placement import make_meshes
from jrl.setup.reward_parts import reward_pool
from jrl.system.devices import find_devices
from jrl.system.extras import install_line, missing
from jrl.train import build
from jrl.train.optimizer import make_optimizer
from jrl.train.reward_model import check_text_models

_ROWS = 100
"""Rows of each source that become prompts, to see whether fields and template fit."""


def obstacles(config: Config) -> list[str]:
    """The obstacles of a configuration here, one line each; [] if none.

    Each part is looked at alone, so that one that is wrong does not hide the others. Checkpoints
    are read up to their headers, data up to its first rows.
    """
    mistakes = Mistakes()
    look = mistakes.look
    if look(find_devices) is None:
        return mistakes.lines  # nothing else can be looked at
    kind = look(lambda: kind_of(config))
    method = look(lambda: method_of(config, kind and kind.new_tokens))
    look(lambda: make_optimizer(config.optimizer, config.train.steps, 1))
    look(lambda: make_meshes(config, apart=True))
    tokenizer = None if kind is None else _model(config, kind, mistakes)
    # What is recorded, and dialogues, are read below.
    for name in ("train", "eval", "pairs"):
        spec = getattr(config.data, name, None)
        if spec is not None and not str(spec).startswith((RECORDED, DIALOGUES, SOURCE)):
            look(functools.partial(_first_row, spec, f"data.{name}"))
    if getattr(config.data, "train", "") is None:
        mistakes.lines.append(
            "data.train and data.task are both missing; name a file of prompts or a procedural task"
        )
    if kind is not None:
        look(lambda: reward_pool(config).close())
    if kind is not None and method is not None and tokenizer is not None:
        read = look(lambda: kind.read(tokenizer, method, _head))
        if read is not None:
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
    others = [line for line in obstacles(config) if line != missing_math(config)]
    return UserError("\n".join(lines + [line for line in others if bare(line) not in seen_lines]))


def _model(config: Config, kind: Kind, mistakes: Mistakes) -> Any:
    """The tokenizer of a run; collects mistakes of its model in ``mistakes``."""
    look, path = mistakes.look, config.model.path
    tokenizer = kind.tokenizer
    if config.model.network is not None:
        if tokenizer is None and path is not None:
            tokenizer = look(lambda: load_tokenizer(path))
        if tokenizer is not None:
            look(lambda: build.own_network(kind, tokenizer))
    elif path is not None:
        if look(lambda: hf.read_config(path, "model.path")) is not None and tokenizer is None:
            tokenizer = look(lambda: load_tokenizer(path))
    else:
        look(lambda: run_shape(config, kind.task))
    return tokenizer


def _head(spec: str | Mapping[str, float], *, key: str) -> Source:
    return FirstRows(open_source(spec, key=key), _ROWS)


def _first_row(spec: str | Mapping[str, float], key: str) -> dict[str, Any]:
    return open_source(spec, key=key)[0]


def _missing_sinks(config: Config) -> Iterator[str]:
    for target in config.log.to:
        extra = target.partition(":")[0]
        if missing({"tensorboard": ["tensorboardX"]}.get(extra, [extra])):
            yield f"log.to = {target!r} needs the extra {extra}: {install_line(extra)}"
