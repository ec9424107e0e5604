"""Judged completions from files as groups: pairs, labelled completions and scored lists.

``data.records`` has the file formats. A pair is a group of two with scores 1 (chosen) and 0
(rejected), a labelled completion a group of one, a list of n a group of n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.data.datasets import Dataset
from jrl.data.fields import check_media
from jrl.data.invalid import Overlong, TooLong, read_rows
from jrl.data.messages import Wording, answer_message, read_tools
from jrl.data.records import in_tokens, read_record, read_tokens, row_kind
from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.types import Batch
from jrl.user_code import load

READINGS = {"goals": "jrl.zoo.methods.goals:GoalRows"}
"""Need of a method -> (rows of pairs) -> the rows that it is trained on, a ``Dataset``."""


def rows_for(reads: frozenset[str], rows: Dataset) -> Dataset:
    """Rows of pairs as a method reads them.

    Args:
      reads: of the method's ``Needs``, of which those in ``READINGS`` say how.
      rows: as they are in the file.
    """
    for need in sorted(reads & READINGS.keys()):
        rows = load(READINGS[need], "method")(rows)
    return rows


class Judged(NamedTuple):
    """One prompt with completions and their scores.

    Attributes:
      id: the record's index in its source.
      text: the prompt as it was tokenized.
      prompt: [p] int32, tokens.
      completions: G arrays [t] int32, tokens, the stop token included unless truncated.
      scores: G points; 1 and 0 for chosen and rejected.
      cut: G bools, True where a completion was truncated.
      visits: how often a search went through each completion; empty where nobody counted.
      steps: of each completion [t] int32, the number of the step that each token belongs to; empty
        where there are none.
      step_values: of each completion [t] float32, points, the value of the token's step.
      context: of each completion how many tokens at its beginning are read and not trained on;
        empty where all are trained. A completion with such tokens is no answer, but a rationale.
      attributes: of each completion [K] numbers, NaN where nobody gave one; empty for none.
    """

    id: int
    text: str
    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    scores: tuple[float, ...]
    cut: tuple[bool, ...]
    visits: tuple[float, ...] = ()
    steps: tuple[np.ndarray, ...] = ()
    step_values: tuple[np.ndarray, ...] = ()
    context: tuple[int, ...] = ()
    attributes: tuple[tuple[float, ...], ...] = ()


class JudgedCounts(NamedTuple):
    """Counts of the records read.

    Attributes:
      kind: "pairs", "labels" or "lists".
      rows: records read.
      used: groups made from them.
      dropped: records skipped because a text was too long.
      truncated: records with a text that was truncated.
      longest_prompt: tokens, before any limit.
      longest_completion: tokens, before any limit.
      invalid: what is wrong with the records that were left out, and a column that is not read; "".
    """

    kind: str
    rows: int
    used: int
    dropped: int
    truncated: int
    longest_prompt: int
    longest_completion: int
    invalid: str = ""

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.used} {self.kind} of {self.rows} rows; too long: {self.dropped} dropped, "
            f"{self.truncated} truncated; longest prompt {self.longest_prompt} and completion "
            f"{self.longest_completion} tokens{'; ' * bool(self.invalid)}{self.invalid}"
        )


def build_judged(
    source: Dataset,
    wording: Wording | Tokenizer,
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    overlong: str = "error",
    invalid: str = "error",
    rationales: bool = False,
) -> tuple[list[Judged], JudgedCounts]:
    """The groups of all records, tokenized as if a policy had sampled them.

    Prompt and completion are encoded separately, as in sampling, and a completion ends with the
    stop token. Under a chat template a completion is what the
    template writes between the prompt and that token. Records in token ids stay as they are.

    Args:
      source: the records.
      wording: how their texts become ids; messages need the template "chat", which a tokenizer
        alone stands for. A prompt that is a string is a message of the user.
      max_prompt_tokens: the longest prompt, tokens; in records of token ids it may be longer by
        what the completions leave of their own limit.
      max_completion_tokens: the longest completion, tokens.
      overlong: for longer ones: "error"; "drop", which skips the record; or "truncate", which
        keeps the end of a prompt and the beginning of a completion. A record whose completions
        are then all equal is skipped.
      invalid: for records that cannot be used: "error", or "skip", which counts them.
      rationales: whether pairs have a column "rationale", which becomes a further member of the
        group with 0 points: the two answers as context, then the rationale.

    Returns:
      The groups in the order of the records, and the counts.

    Raises:
      UserError: a record lacks a field, is of another kind than those before it, has an empty
        text, compares a text with itself, or is too long with overlong="error"; or no record
        is left. Names file, line and remedy.
    """
    limits = max_prompt_tokens, max_completion_tokens
    reader = _Reader(Wording.of(wording), rationales, *limits, Overlong(overlong))
    system = reader.wording.system
    rows, left_out = read_rows(source, reader.read, invalid=invalid, system=system)
    prompt, completion = reader.longest
    if not rows:
        raise UserError(
            f"no record of {len(source)} is left: the longest prompt has {prompt} tokens and "
            f"data.max_prompt_tokens is {max_prompt_tokens}, the longest completion {completion} "
            f"and sampling.max_new_tokens is {max_completion_tokens}; raise them"
            if len(source)
            else "the data has no rows; give at least one with prompt, chosen and rejected"
        )
    long, sizes = reader.overlong, (len(source), len(rows))
    counts = *sizes, long.dropped, long.truncated, prompt, completion, left_out
    return rows, JudgedCounts(reader.kind, *counts)


@dataclasses.dataclass
class _Reader:
    """Makes the group of a record; the first fields are the arguments of ``build_judged``.

    Attributes:
      longest: tokens of the longest prompt and completion so far, before any limit.
      kind: of the records so far; "" before the first.
      form: of the records so far, as ``_form``; None before the first.
    """

    wording: Wording
    rationales: bool
    most_prompt: int
    most_completion: int
    overlong: Overlong
    longest: tuple[int, int] = (0, 0)
    kind: str = ""
    form: tuple[bool, bool, int] | None = None

    def read(self, index: int, row: Mapping[str, Any], where: str) -> Judged | None:
        """The group; None where it is dropped for its length."""
        kind, ids = row_kind(row, where), in_tokens(row)
        check_media(row, where)
        if self.kind not in ("", kind):
            raise UserError(f"{where}: {kind} after {self.kind}; put them into separate files")
        if self.rationales and (ids or kind != "pairs"):
            raise UserError(f"{where}: a rationale belongs to chosen and rejected in text")
        if ids:
            labelled = _from_ids(index, row, where, kind, self.wording.tokenizer)
        else:
            labelled = _encode(index, row, where, kind, self.wording, self.rationales)
        if self.form not in (None, _form(labelled)):
            raise UserError(
                f"{where}: visits, steps or attributes are in some rows only, or differ in"
                " number; give them in all rows, or use separate files"
            )
        self.kind, self.form = kind, _form(labelled)
        p, t = len(labelled.prompt), max(map(len, labelled.completions))
        self.longest = max(self.longest[0], p), max(self.longest[1], t)
        room = self.most_prompt
        if ids:  # its prompt may hold the beginning of a completion
            room += max(self.most_completion - t, 0)
        if p <= room and t <= self.most_completion:
            return labelled
        more = " with what is left of sampling.max_new_tokens" * ids
        by_rationale = bool(labelled.context) and len(labelled.completions[-1]) == t
        name = "rationale behind both answers" if by_rationale else "completion"
        error = _too_long(where, p, t, room, self.most_completion, more, name)
        shorter = _cut(labelled, room, self.most_completion)
        return shorter if self.overlong.truncates(error, not _all_same(shorter)) else None


def judged_batch(
    rows: Sequence[Judged], *, prompt_tokens: int, group: int, completion_tokens: int
) -> Batch:
    """Groups as one batch, on the host.

    Args:
      rows: N groups.
      prompt_tokens: P.
      group: G, the size of the largest group; smaller ones are padded with absent members.
      completion_tokens: T.

    Returns:
      A Batch of NumPy arrays, with the scores in its one reward part, the statistic "external" 1
      on every token that is trained on and the id "prompt"; where the records have them also the
      statistics "visits", "step_labels", "attribute_0" and on, and the id "step"; with rationales
      the id "stratum", 1 for them. No policy sampled the tokens, so there are no sampler_logprobs.
    """
    n, g, t = len(rows), group, completion_tokens
    prompts, tokens = np.zeros((n, prompt_tokens), np.int32), np.zeros((n, g, t), np.int32)
    lengths, scores = np.zeros((n, g), np.int32), np.zeros((n, g, 1), np.float32)
    members, cut = np.zeros((n, g), bool), np.zeros((n, g), bool)
    for row, one in enumerate(rows):
        size = len(one.completions)
        prompts[row, : len(one.prompt)] = one.prompt
        for member, completion in enumerate(one.completions):
            tokens[row, member, : len(completion)] = completion
            lengths[row, member] = len(completion)
        scores[row, :size, 0], members[row, :size], cut[row, :size] = one.scores, True, one.cut
    read = np.zeros((n, g), np.int32)
    for row, one in enumerate(rows):
        read[row, : len(one.context)] = one.context
    mask = (np.arange(t) < lengths[:, :, None]) & (np.arange(t) >= read[:, :, None])
    stats, ids = _of_a_search(rows, (n, g, t))
    for k in range(_form(rows[0])[2]):
        label = np.full((n, g, t), np.nan, np.float32)
        for row, one in enumerate(rows):
            label[row, : len(one.attributes)] = np.array(one.attributes)[:, k, None]
        stats[f"attribute_{k}"] = label
    if rows[0].context:
        ids["stratum"] = (read > 0).astype(np.int32)
    fields: dict[str, Any] = {
        "prompt_tokens": prompts,
        "prompt_lengths": np.array([len(one.prompt) for one in rows], np.int32),
        "tokens": tokens,
        "lengths": lengths,
        "mask": mask,
        "rewards": scores,
        "reward_weights": np.ones(1, np.float32),
        "members": members,
        "baseline": np.zeros((n, g), bool),
        "truncated": cut,
        "stats": {"external": mask.astype(np.float32), **stats},
        "ids": {"prompt": np.array([one.id for one in rows], np.int32), **ids},
    }
    return Batch(**fields)


def _of_a_search(
    rows: Sequence[Judged], shape: tuple[int, int, int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Further statistics and ids [N, G, T] of the records of a search."""
    visits, labels = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    step = np.zeros(shape, np.int32)
    for row, one in enumerate(rows):
        for member, completion in enumerate(one.completions):
            size = len(completion)
            if one.visits:
                visits[row, member, :size] = one.visits[member]
            if one.steps:
                step[row, member, :size] = one.steps[member]
                labels[row, member, :size] = one.step_values[member]
    has_visits, stepped, _ = _form(rows[0])
    stats = ({"visits": visits} if has_visits else {}) | (
        {"step_labels": labels} if stepped else {}
    )
    return stats, {"step": step} if stepped else {}


def pairs_of_samples(
    samples: Iterable[Mapping[str, Any]], *, gap: float = 0.0
) -> list[dict[str, Any]]:
    """Preference pairs in text from judged samples: the best against the worst of each prompt.

    Args:
      samples: records with "prompt", "completion" and "reward", as ``samples.jsonl`` of a run and
        ``jrl sample --json`` hold them; in any order.
      gap: points; the difference of the two must exceed it.

    Returns:
      One {"prompt", "chosen", "rejected"} for each prompt with two such; the earliest win ties.
      Empty completions are ignored.

    >>> sampled = [("5", 0.0), ("4", 1.0)]
    >>> samples = [{"prompt": "2+2=", "completion": c, "reward": r} for c, r in sampled]
    >>> pairs_of_samples(samples)
    [{'prompt': '2+2=', 'chosen': '4', 'rejected': '5'}]
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        if sample["completion"].strip():
            groups.setdefault(sample["prompt"], []).append(sample)
    pairs = []
    for prompt, members in groups.items():
        best = max(members, key=lambda s: s["reward"])
        worst = min(members, key=lambda s: s["reward"])
        if best["reward"] - worst["reward"] > gap and best["completion"] != worst["completion"]:
            texts = {"chosen": best["completion"], "rejected": worst["completion"]}
            pairs.append({"prompt": prompt, **texts})
    return pairs


# ---------------------------------------------------------------- from text to tokens


def _encode(
    index: int,
    row: Mapping[str, Any],
    where: str,
    kind: str,
    wording: Wording,
    rationales: bool = False,
) -> Judged:
    """One record, tokenized."""
    record = read_record(kind, row, where, plain=wording.template == "plain")
    if isinstance(record.prompt, str) and not record.prompt.strip():
        raise UserError(f"{where}: prompt is empty; give it a text, or remove the row")
    wording = wording.of_row(row, where)
    messages = wording.conversation(record.prompt, "prompt", where)
    tools = read_tools(row.get("tools"), where)
    text, prompt = wording.prompt(messages, tools, where)
    completions = []
    for name, value in record.completions.items():
        message = answer_message(value, name, where)
        completions.append(wording.completion(message, messages, text, tools, name, where))
    labelled = Judged(
        id=index,
        text=text,
        prompt=np.array(prompt, np.int32),
        completions=tuple(np.array(ids, np.int32) for ids in completions),
        scores=record.scores,
        cut=(False,) * len(completions),
        attributes=record.attributes,
    )
    if kind == "pairs" and _all_same(labelled):
        raise UserError(f"{where}: chosen and rejected are the same tokens; remove the row")
    if not rationales:
        return labelled
    rationale = row.get("rationale")
    if not isinstance(rationale, str) or not rationale.strip():
        raise UserError(
            f"{where}: rationale = {rationale!r:.40}; the method learns why one answer is better,"
            " so each row has a text that says it"
        )
    message = answer_message(rationale, "rationale", where)
    ids = wording.completion(message, messages, text, tools, "rationale", where)
    answers = np.concatenate(labelled.completions)
    return labelled._replace(
        completions=(*labelled.completions, np.concatenate([answers, np.array(ids, np.int32)])),
        scores=(*labelled.scores, 0.0),
        cut=(*labelled.cut, False),
        context=(0, 0, len(answers)),
    )


def _from_ids(
    index: int, row: Mapping[str, Any], where: str, kind: str, tokenizer: Tokenizer
) -> Judged:
    """One record that is in token ids."""
    record = read_tokens(kind, row, where)
    steps = record.steps or ()
    return Judged(
        id=index,
        text=tokenizer.decode(record.prompt),
        prompt=np.array(record.prompt, np.int32),
        completions=tuple(np.array(ids, np.int32) for ids in record.responses),
        scores=record.scores,
        cut=(False,) * len(record.responses),
        visits=record.visits or (),
        steps=tuple(np.array(numbers, np.int32) for numbers, _ in steps),
        step_values=tuple(np.array(values, np.float32) for _, values in steps),
    )


def _form(row: Judged) -> tuple[bool, bool, int]:
    """Whether a record has visits, and steps, and how many attributes; all of a batch agree."""
    return bool(row.visits), bool(row.steps), len(row.attributes[0]) if row.attributes else 0


def _all_same(row: Judged) -> bool:
    """Whether there are several completions and all have the same tokens."""
    first, *others = row.completions
    return bool(others) and all(np.array_equal(first, other) for other in others)


def _cut(row: Judged, prompt_tokens: int, completion_tokens: int) -> Judged:
    return row._replace(
        prompt=row.prompt[-prompt_tokens:],
        completions=tuple(c[:completion_tokens] for c in row.completions),
        cut=tuple(len(c) > completion_tokens for c in row.completions),
        steps=tuple(x[:completion_tokens] for x in row.steps),
        step_values=tuple(x[:completion_tokens] for x in row.step_values),
    )


def _too_long(
    where: str, p: int, t: int, max_p: int, max_t: int, more: str, completion: str
) -> TooLong:
    name, size, key, limit = "prompt", p, f"data.max_prompt_tokens{more}", max_p
    if p <= max_p:
        name, size, key, limit = completion, t, "sampling.max_new_tokens", max_t
    return TooLong(
        f"{where}: the {name} has {size} tokens and {key} is {limit}; raise it, or set "
        "data.overlong to drop or truncate"
    )
