"""File formats of judged completions, each read as (prompt, completions, scores).

| fields                                   | completions               | scores              |
| ---------------------------------------- | ------------------------- | ------------------- |
| prompt, chosen, rejected                 | two                       | 1 and 0             |
| chosen, rejected that begin alike        | two                       | 1 and 0             |
| prompt, completion, label                | one                       | 1 for true, else 0  |
| prompt, responses, scores                | as many as there are      | as given            |

A text is a string, or a list of chat messages ({"role": ..., "content": ...}). If the prompt is
missing, it is the common beginning of chosen and rejected. Responses in text may have "attributes",
a list of numbers for each, such as HelpSteer2's five.

Prompt and responses may be lists of token ids, which are trained on as they are: nothing is put
before, between or behind them. Such a record may also say of each response how often a search went
through it ("visits"), and of which steps it is made ("steps", their sizes in tokens) with the value
of each ("step_values"); ``episodes.tree_rows`` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.data.fields import is_absent
from jrl.data.messages import read_messages
from jrl.errors import UserError
from jrl.system.float32 import fits_float32

KINDS: dict[str, tuple[str, ...]] = {
    "pairs": ("chosen", "rejected"),
    "labels": ("prompt", "completion", "label"),
    "lists": ("prompt", "responses", "scores"),
}
"""The kinds of records and their required fields; pairs may have a prompt as well."""


class Record(NamedTuple):
    """One prompt with its completions, still in text.

    Attributes:
      prompt: text or messages.
      completions: text or messages by name; the names are for errors.
      scores: points, one a completion.
      attributes: of each completion [K] numbers, NaN where nobody gave one; () for none.
    """

    prompt: Any
    completions: dict[str, Any]
    scores: tuple[float, ...]
    attributes: tuple[tuple[float, ...], ...] = ()


def row_kind(row: Mapping[str, Any], where: str) -> str:
    """The kind of a row, one of ``KINDS``.

    Args:
      row: the fields.
      where: file and line, for errors.

    Raises:
      UserError: none of them; names the fields missing for the nearest.
    """
    for kind, fields in KINDS.items():
        if all(row.get(field) is not None for field in fields):
            return kind
    fields_present = {field for field in row if row[field] is not None} - {
        "prompt"
    }  # all have a prompt
    nearest = max(KINDS, key=lambda kind: len(fields_present & set(KINDS[kind])))
    missing = " and no ".join(field for field in KINDS[nearest] if row.get(field) is None)
    forms = "; or ".join(", ".join(fields) for fields in KINDS.values())
    raise UserError(
        f"{where}: there is no {missing}, only {', '.join(row) or 'an empty row'}; a record holds "
        f"{forms}"
    )


def read_record(kind: str, row: Mapping[str, Any], where: str, *, plain: bool) -> Record:
    """A row of one kind.

    Args:
      kind: one of ``KINDS``.
      row: the fields.
      where: file and line, for errors.
      plain: whether the template is "plain"; only then can the prompt be the common beginning of
        two texts.

    Raises:
      UserError: names what is wrong with the row and the remedy.
    """
    if kind == "pairs":
        return _pair(row, where, plain)
    if kind == "labels":
        label = row["label"]
        if isinstance(label, str):  # of CSV
            label = {"true": 1, "false": 0, "1": 1, "0": 0}.get(label.strip().lower(), label)
        if label not in (0, 1):  # True and False are, too
            raise UserError(f"{where}: label = {label!r}; write true or false")
        return Record(row["prompt"], {"completion": row["completion"]}, (float(label),))
    for field in ("responses", "scores"):
        if _length(row[field]) < 0:
            raise UserError(f"{where}: {field} = {str(row[field])[:60]!r}; give a list")
    responses, scores = list(row["responses"]), list(row["scores"])
    if len(responses) != len(scores):
        raise UserError(
            f"{where}: {len(responses)} responses but {len(scores)} scores; give one score each"
        )
    if not responses:
        raise UserError(f"{where}: responses is empty; give at least one, or remove the row")
    for score in scores:
        if not isinstance(score, int | float | np.number) or not fits_float32(score):
            raise UserError(f"{where}: scores holds {score!r:.40}; write finite float32 numbers")
    completions = {f"responses[{i}]": response for i, response in enumerate(responses)}
    points = tuple(float(score) for score in scores)
    return Record(row["prompt"], completions, points, _attributes(row, len(scores), where))


def _attributes(row: Mapping[str, Any], count: int, where: str) -> tuple[tuple[float, ...], ...]:
    """The attributes of a row's responses."""
    listed: Any = row.get("attributes")
    if listed is None:
        return ()
    sizes = {_length(numbers) for numbers in listed} if _length(listed) == count else set()
    if len(sizes) != 1 or min(sizes) < 1:
        raise UserError(
            f"{where}: attributes = {str(listed)[:60]}; give each of the {count}"
            " responses a list of equally many numbers, null for an unknown one"
        )
    size = sizes.pop()
    filled = [[math.nan if x is None else x for x in numbers] for numbers in listed]
    finite = [[0.0 if x is None else x for x in numbers] for numbers in listed]
    for i, numbers in enumerate(finite):
        _numbers(numbers, size, f"{where}: attributes[{i}]")
    return tuple(tuple(map(float, numbers)) for numbers in filled)


class TokenRecord(NamedTuple):
    """One prompt with its responses in token ids.

    Attributes:
      prompt: ids.
      responses: ids of each.
      scores: points, one a response.
      visits: of each response; None where the record has none.
      steps: of each response the number of the step and the value of the step at every token, 0, 1,
        ... and points; None where the record has none.
    """

    prompt: list[int]
    responses: list[list[int]]
    scores: tuple[float, ...]
    visits: tuple[float, ...] | None
    steps: tuple[tuple[list[int], list[float]], ...] | None


def in_tokens(row: Mapping[str, Any]) -> bool:
    """Whether a record's prompt is a list of ids."""
    prompt = row.get("prompt")
    return not isinstance(prompt, str | Mapping) and _is_ids(prompt)


def read_tokens(kind: str, row: Mapping[str, Any], where: str) -> TokenRecord:
    """A row in token ids.

    Args:
      kind: one of ``KINDS``; "lists" alone may be in ids.
      row: the fields.
      where: file and line, for errors.

    Raises:
      UserError: names what is wrong with the row and the remedy.
    """
    if kind != "lists":
        raise UserError(
            f"{where}: the prompt is a list of token ids, and only records of prompt, responses,"
            " scores may be; write chosen and rejected as two responses with the scores 1 and 0"
        )
    record = read_record(kind, row, where, plain=True)
    responses = list(record.completions.values())
    for name, response in record.completions.items():
        if not _is_ids(response):
            raise UserError(
                f"{where}: {name} = {str(response)[:40]} with a prompt of token ids; give a list of"
                " at least one id"
            )
    response_ids = [[int(token) for token in response] for response in responses]
    visits = row.get("visits")
    if visits is not None:
        visits = tuple(_numbers(visits, len(response_ids), f"{where}: visits", least=0))
    prompt = [int(token) for token in row["prompt"]]
    return TokenRecord(
        prompt, response_ids, record.scores, visits, _steps(row, response_ids, where)
    )


def _steps(row: Mapping[str, Any], responses: list[list[int]], where: str) -> Any:
    """Number and value of the step at every token of each response, where the row has steps."""
    sizes: Any = row.get("steps")
    values: Any = row.get("step_values")
    if sizes is None and values is None:
        return None
    if not _length(sizes) == _length(values) == len(responses):
        raise UserError(
            f"{where}: steps and step_values go together, with a list for each of the"
            f" {len(responses)} responses"
        )
    out = []
    for i, (size, value, response) in enumerate(zip(sizes, values, responses, strict=True)):
        counts = _numbers(size, _length(size), f"{where}: steps[{i}]", least=1)
        if sum(counts) != len(response):
            raise UserError(
                f"{where}: steps[{i}] holds {sum(counts):g} tokens and responses[{i}]"
                f" {len(response)}; the sizes must add up to it"
            )
        points = _numbers(value, len(counts), f"{where}: step_values[{i}]")
        numbers = [number for number, count in enumerate(counts) for _ in range(int(count))]
        out.append((numbers, [points[number] for number in numbers]))
    return tuple(out)


def _length(value: Any) -> int:
    """The length of a list or an array; -1 for anything else."""
    return -1 if value is None or isinstance(value, str | Mapping | int | float) else len(value)


def _is_ids(value: Any) -> bool:
    """Whether something is a list of one token id or more."""
    return _length(value) > 0 and all(isinstance(x, int | np.integer) and x >= 0 for x in value)


def _numbers(value: Any, count: int, name: str, least: float = -math.inf) -> list[float]:
    """A list of ``count`` finite numbers, each at least ``least``.

    Raises:
      UserError: it is none.
    """
    kinds = int | float | np.integer | np.floating
    fine = _length(value) == count >= 0 and all(
        isinstance(x, kinds) and math.isfinite(x) and x >= least for x in value
    )
    if not fine:
        limits = "" if least == -math.inf else f" of at least {least:g}"
        raise UserError(f"{name} = {str(value)[:60]}; give {max(count, 1)} numbers{limits}")
    return [float(x) for x in value]


def _pair(row: Mapping[str, Any], where: str, plain: bool) -> Record:
    """Chosen and rejected; public datasets often repeat the prompt at the start of both."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if chosen == rejected:
        raise UserError(f"{where}: chosen and rejected are equal; remove the row")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(
            f"{where}: one of chosen and rejected is text, the other messages; use one form"
            " for both"
        )
    if not isinstance(chosen, str):
        chosen = read_messages(chosen, "chosen", where)
        rejected = read_messages(rejected, "rejected", where)
        size = min(_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    elif prompt is None:
        others = (x for x in ("question", "instruction", "input") if not is_absent(row.get(x)))
        if other := next(others, ""):
            raise UserError(
                f"{where}: there is no prompt; write {other} as prompt, with what belongs to it"
            )
        if not plain:
            raise UserError(
                f"{where}: there is no prompt, and the common beginning of chosen and rejected is "
                "a prompt only with data.template = 'plain'; set that, or give the field prompt"
            )
        size = _shared(chosen, rejected)
        while size and chosen[size - 1].isspace():  # the space belongs to the word after it
            size -= 1
    else:
        size = 0
    if size:
        prompt = _whole_prompt(prompt, chosen[:size], where)
        chosen, rejected = chosen[size:], rejected[size:]
    if prompt is None:
        raise UserError(
            f"{where}: there is no prompt, and chosen and rejected have no common beginning; give "
            "the field prompt"
        )
    return Record(prompt, {"chosen": chosen, "rejected": rejected}, (1.0, 0.0))


def _whole_prompt(prompt: Any, shared: Any, where: str) -> Any:
    """What stands before the answers: the common beginning of both, and the row's own prompt.

    The beginning repeats the prompt, or the end of it such as all behind a system message, and may
    go on from there; or it continues the prompt, with the assistant's turn.
    """
    if prompt is None or isinstance(shared, str):
        return shared
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    before = read_messages(prompt, "prompt", where)
    most = min(len(before), len(shared))
    repeated = next((n for n in range(most, 0, -1) if before[-n:] == shared[:n]), 0)
    continues = repeated or shared[0]["role"] == "assistant"
    return [*before, *shared[repeated:]] if continues else shared


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the common beginning of two sequences."""
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)
