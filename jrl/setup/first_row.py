"""The fields that prompts of a run need, looked up in a file's first row; imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.config.tables import Config
from jrl.data.datasets import open_dataset
from jrl.data.fields import ANSWERS, check_fields, layout
from jrl.errors import UserError
from jrl.rewards import ANSWERLESS, FROM_COLUMNS, FUNCTION_NAMES
from jrl.rewards.columns import reads_answer
from jrl.rewards.judge_prompts import asks_with_reference
from jrl.user_code import load

LARGE = 64 << 20
"""Bytes of a file that is read twice rather than found wrong late."""


def needs_answer(config: Config) -> bool:
    """Whether rows must have a reference answer: not where no reward reads it.

    A configuration that names the field, or a pattern in it, needs it in any case.
    """
    parts = {name: part for name, part in config.rewards.items() if part.combine is None}

    def read() -> bool:
        each = [(name, part.function or name, part.options) for name, part in parts.items()]
        return not parts or any(_reads_answer(*part) for part in each)

    return config.data.needs_answer(read)


def _reads_answer(name: str, function: str, options: Mapping[str, Any]) -> bool:
    if function == "judge":
        return asks_with_reference(options)
    if ":" not in function:
        # a misspelt name reads nothing: what makes the function names that mistake
        return function in set(FUNCTION_NAMES) - ANSWERLESS - FROM_COLUMNS
    try:
        loaded = load(function, "rewards")
    except UserError:  # what calls the function names the mistake; a sampler calls none
        return False
    return reads_answer(loaded, f"rewards.{name}")


def check_first_row(config: Config) -> None:
    """Raises UserError where the first row of a local file lacks a field that prompts need.

    Reading all rows does that too, after imports that take seconds and with the tokenizer loaded.
    What cannot be looked at here, such as data of the Hub, is left to that.

    Args:
      config: of the run.
    """
    data: Any = config.data
    for split, path in data.plain_files.items():
        if not isinstance(path, str) or not _is_small(Path(path).expanduser()):
            continue
        source = open_dataset(path, key=f"data.{split}")
        if len(source):
            names = {"answer": ANSWERS[0], **data.fields}
            question, answer = layout(
                source,
                names.get("question"),
                names["answer"],
                needs_answer=needs_answer(config),
                chat=data.wording["template"] == "chat",
            )
            check_fields(source[0], question, answer, source.where(0))


def _is_small(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= LARGE
    except (OSError, ValueError):
        return False
