"""The fields of question and answer in a row; imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jrl.data.tables import Dataset
from jrl.errors import UserError
from jrl.system.json_text import json_or_none

QUESTIONS = ("question", "prompt", "problem", "input")
ANSWERS = (
    *("answer", "ground_truth", "reward_model.ground_truth", "verification_info.ground_truth"),
    *("solution", "final_answer", "label"),
)
"""Names that published data sets give the two fields, in the order in which they are looked for.

But see ``_questions``.
"""

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Names that published data sets give to what is no text."""

_SUBJECTS = ("input", "context")
"""Fields of Alpaca's and Dolly's rows that an instruction is about; empty where it needs none."""


def layout(
    source: Dataset,
    question: str | None,
    answer: str | None,
    *,
    needs_answer: bool = True,
    chat: bool = True,
) -> tuple[str, str | None]:
    """The fields of question and answer, by the first row where they have their usual names.

    Args:
      source: the rows.
      question: its configured name; None looks for the usual ones.
      answer: its configured name; None for none.
      needs_answer: False where rows may lack it: then it is None for rows without.
      chat: whether prompts may be messages.
    """
    first = source[0] if len(source) else {}
    if question is None or (question == QUESTIONS[0] and not has(first, question)):
        usual = _questions(first, chat)
        question = next((name for name in usual if has(first, name)), QUESTIONS[0])
    if answer == ANSWERS[0]:
        judged = "completion" in first  # TRL's unpaired preferences: label says whether it is good
        names = [name for name in ANSWERS if not (judged and name == "label")]
        answer = next((name for name in names if has(first, name)), answer)
    if answer is not None and not needs_answer and not has(first, answer):
        answer = None
    return question, answer


def _questions(row: Mapping[str, Any], chat: bool) -> tuple[str, ...]:
    """Names of a row's question, the first that it has.

    verl's rows may keep the bare question beside the prompt's messages, which instruct the policy
    too, and which a chat template alone can render. In Alpaca's, "input" is only what an
    instruction is about, or empty.
    """
    messages = not isinstance(row.get("prompt"), str | None)
    if chat and messages and ("reward_model" in row or "data_source" in row):
        return ("prompt",)
    return tuple(name for name in QUESTIONS if name != "input" or "instruction" not in row)


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
    """Raises UserError that names every field which a row lacks, or that its question would."""
    subject = next((name for name in _SUBJECTS if not is_absent(row.get(name))), None)
    if question == "instruction" and subject is not None:
        raise UserError(
            f"{where}: {subject} has text that the instruction is about, and the prompt would lack"
            " it; write both into one field, and set data.fields.question to that"
        )
    columns = {"question": question, "answer": answer}
    missing = {n: k for n, k in columns.items() if k is not None and not has(row, k)}
    if missing:
        names = " and no field ".join(map(repr, missing.values()))
        raise UserError(f"{where}: there is no field {names}; {_remedy(row, missing, question)}")


def is_absent(value: Any) -> bool:
    """Whether a field says nothing: None, False, blank or empty; or NaN, as pandas has it.

    >>> [is_absent(value) for value in (None, float("nan"), " ", [], "a", ["a"], 0)]
    [True, True, True, True, False, False, False]
    """
    if hasattr(value, "__len__"):  # first, as arrays are neither true nor false
        return not len(value.strip() if isinstance(value, str) else value)
    return value is None or value is False or bool(value != value)


def check_media(row: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a row with an image or sound, without which its text is another task."""
    for name in MEDIA:
        if not is_absent(row.get(name)):
            raise UserError(
                f"{where}: {name} is not read, as the models here take text alone; leave the row"
                " out, or remove the field if the text does without it"
            )


def _remedy(row: Mapping[str, Any], missing: Mapping[str, str], question: str) -> str:
    """What to set for a row without question or answer; other layouts have keys of their own."""
    if "messages" in row and "question" in missing:
        if _ends_with_question(row["messages"]):
            return "its messages end with a question: set data.fields.question to messages"
        return "it has messages: read conversations by data.train=dialogues:FILE"
    if "conversations" in row and "question" in missing:
        return (
            "it has conversations, as ShareGPT has them: write from and value as role (user or"
            " assistant) and content, name the field messages, and read it by"
            " data.train=dialogues:FILE"
        )
    if "chosen" in row and "rejected" in row:
        return "it has chosen and rejected: read pairs by data.pairs=FILE"
    if "completion" in row and "label" in row:
        return "it has completion and label: read judged completions by data.pairs=FILE"
    if "instruction" in row and "input" in row and "question" in missing:
        return (
            "it has instruction and input: set data.fields.question to instruction, or where input"
            " has text write both into one field"
        )
    others = [name for name in row if name != question]
    if not others:
        return "add it, or name rewards that need none, such as a function of completions alone"
    keys = " and ".join(f"data.fields.{name}" for name in missing)
    return f"set {keys} to one of {', '.join(others)}"


def _ends_with_question(messages: Any) -> bool:
    """Whether the last of a row's messages is another one than the assistant's."""
    try:
        return str(messages[-1]["role"]) != "assistant"
    except (IndexError, KeyError, TypeError):  # no messages
        return False


def has(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row has a field of that name, or of that path."""
    head, _, _ = key.partition(".")
    return key in row or (head in row and head != key and look_up(row, key) is not None)
