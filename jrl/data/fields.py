"""The fields of question and answer; imports no JAX, so that a mistake is found at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.config.reward_model import MODEL_NAMES
from jrl.config.tables import Config
from jrl.data.tables import Source
from jrl.errors import UserError
from jrl.system.json_text import json_or_none

LARGE = 64 << 20
"""Bytes of a file that is read twice rather than found wrong late."""

QUESTIONS = ("question", "prompt", "problem", "input")
ANSWERS = (
    *("answer", "ground_truth", "reward_model.ground_truth", "verification_info.ground_truth"),
    *("solution", "final_answer", "label"),
)
_SURE = 5
"""The first of them, which mean an answer also where none is needed."""
"""Names that published data sets give the two fields, in the order in which they are looked for."""


def layout(
    source: Source, question: str, answer: str | None, *, needs_answer: bool = True
) -> tuple[str, str | None]:
    """The fields of question and answer, by the first row where they have their usual names.

    Args:
      source: the rows.
      question: its configured name.
      answer: its configured name; None for none.
      needs_answer: False where rows may lack it: then it is None for rows without.
    """
    first = source[0] if len(source) else {}
    if question == QUESTIONS[0]:
        question = next((name for name in QUESTIONS if has(first, name)), question)
    if answer == ANSWERS[0]:
        names = ANSWERS if needs_answer else ANSWERS[:_SURE]
        answer = next((name for name in names if has(first, name)), answer)
    if answer is not None and not needs_answer and not has(first, answer):
        answer = None
    return question, answer


def needs_answer(config: Config) -> bool:
    """Whether rows must have a reference answer: not where reward models alone judge completions.

    A configuration that names the field, or a pattern in it, needs it in any case.
    """
    if not config.data.answer_optional:
        return True
    parts = {name: part for name, part in config.rewards.items() if part.combine is None}
    return not parts or any((p.function or n) not in MODEL_NAMES for n, p in parts.items())


def look_up(row: Mapping[str, Any], key: str) -> Any:
    """The field of that name, or of a path such as "reward_model.ground_truth"; None for none.

    A field on the path may be text that holds an object in JSON, as prime-rl's sets have it.
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = json_or_none(value)
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def check_fields(row: Mapping[str, Any], question: str, answer: str | None, where: str) -> None:
    """Raises UserError that names every field which a row lacks."""
    columns = {"question": question, "answer": answer}
    missing = {n: k for n, k in columns.items() if k is not None and not has(row, k)}
    if missing:
        names = " and no field ".join(map(repr, missing.values()))
        keys = " and ".join(f"data.fields.{name}" for name in missing)
        raise UserError(
            f"{where}: there is no field {names}; set {keys} to one of {', '.join(row)}"
        )


def has(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row has a field of that name, or of that path."""
    head, _, _ = key.partition(".")
    return key in row or (head in row and head != key and look_up(row, key) is not None)


def check_first_row(config: Config) -> None:
    """Raises UserError where the first row of a local file lacks a field that prompts need.

    Reading all rows does that too, after imports that take seconds and with the tokenizer loaded.
    What cannot be looked at here, such as data of the Hub, is left to that.

    Args:
      config: of the run.
    """
    from jrl.data.sources import open_source

    data: Any = config.data
    names = {"question": QUESTIONS[0], "answer": ANSWERS[0]}
    for split, path in data.plain_files.items():
        if not isinstance(path, str) or not _is_small(Path(path).expanduser()):
            continue
        source = open_source(path, key=f"data.{split}")
        if len(source):
            names |= data.fields
            question, answer = layout(
                source, names["question"], names["answer"], needs_answer=needs_answer(config)
            )
            check_fields(source[0], question, answer, source.where(0))


def _is_small(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= LARGE
    except (OSError, ValueError):
        return False
