"""Prompts from rows: template, tokens, reference answer, and the length limit."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.data.answers import find_answer
from jrl.data.datasets import Dataset
from jrl.data.fields import check_fields, check_media, layout, look_up
from jrl.data.invalid import Overlong, TooLong, read_rows
from jrl.data.messages import (
    Wording,
    after_opened_thought,
    end_of_turn,
    ids_after,
    read_tools,
    without_repeated_mark,
)
from jrl.errors import UserError
from jrl.models.chat_frames import refuse_controls
from jrl.models.tokenizer import Tokenizer
from jrl.types import Prompt


class PromptCounts(NamedTuple):
    """Counts of the rows read.

    Attributes:
      rows: rows read.
      used: prompts made from them.
      dropped: rows skipped because their prompt was too long.
      truncated: prompts that lost their beginning because they were too long.
      longest_tokens: tokens of the longest prompt before any limit.
      invalid: what is wrong with the rows that were left out, and a column that is not read; "".
      fields: the fields of question and answer; "" where they have these names.
    """

    rows: int
    used: int
    dropped: int
    truncated: int
    longest_tokens: int
    invalid: str = ""
    fields: str = ""

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.used} prompts of {self.rows} rows; too long: {self.dropped} dropped, "
            f"{self.truncated} truncated; longest {self.longest_tokens} tokens"
            f"{'; ' * bool(self.fields)}{self.fields}{'; ' * bool(self.invalid)}{self.invalid}"
        )


def build_prompts(
    source: Dataset,
    wording: Wording | Tokenizer,
    *,
    question_key: str | None = None,
    answer_key: str | None = "answer",
    answer_pattern: str | None = None,
    solution_key: str | None = None,
    solutions: int | None = None,
    needs_answer: bool = True,
    max_prompt_tokens: int,
    overlong: str = "error",
    invalid: str = "error",
) -> tuple[list[Prompt], PromptCounts]:
    r"""The prompts of all rows, tokenized.

    Args:
      source: the rows.
      wording: how their text becomes ids; a tokenizer stands for its chat template.
      question_key: the field that holds the question: text, or a list of chat messages (with a
        system message, examples, calls of tools). A path such as "extra_info.question" names a
        field of a field. None, or "question" where rows have none, is the first of
        ``fields.QUESTIONS`` that they have; of verl's rows the messages in "prompt".
      answer_key: the field that holds the reference answer, or its path; None if there is none.
        Where rows have no "answer", it is the first of ``fields.ANSWERS`` that they have.
      answer_pattern: a regular expression whose first group is the final answer inside the answer
        field, such as ``####\s*(.+)`` for GSM8K; its last match counts. Spaces around it and
        commas between its digits are removed. None takes the complete field.
      solution_key: the field that holds a completion to learn from, or None; its text and the token
        that ends a turn by the chat template, without one the end-of-text token, become
        ``Prompt.solution``.
      solutions: how many completions that field lists at the least, which stand one after the other
        in ``Prompt.solution``, each with the token that ends it; None for one text.
      needs_answer: False where rows may lack the answer, or have an empty one, which is None.
      max_prompt_tokens: the longest prompt, tokens.
      overlong: for longer prompts: "error", "drop", or "truncate", which keeps the end.
      invalid: for rows that cannot be used: "error", or "skip", which counts them.

    Returns:
      The prompts in the order of the rows, ``id`` the row's index and ``meta`` the row's fields,
      those of question and answer only under other names than these; and the counts.

    Raises:
      UserError: a row lacks question or answer (names file and line), the pattern takes too long
        over one, a prompt is empty, or too long with overlong="error", or no prompt is left.
    """
    wording = Wording.of(wording)
    chat = wording.template == "chat"
    question_key, answer_key = layout(
        source, question_key, answer_key, needs_answer=needs_answer, chat=chat
    )
    fields = question_key, answer_key, answer_pattern, solution_key, solutions
    reader = _Reader(wording, *fields, needs_answer, max_prompt_tokens, Overlong(overlong))
    prompts, left_out = read_rows(source, reader.read, invalid=invalid, system=wording.system)
    if not prompts:
        raise _none_left(len(source), reader.longest, max_prompt_tokens)
    if chat and len(reader.questions) > 1:
        _check_questions_show(prompts)
    long, rows = reader.overlong, len(source)
    counts = rows, len(prompts), long.dropped, long.truncated, reader.longest, left_out
    read = {"question": question_key, "answer": answer_key}
    named = ", ".join(f"{name}: {key}" for name, key in read.items() if key not in (name, None))
    return prompts, PromptCounts(*counts, named)


@dataclasses.dataclass
class _Reader:
    """Makes the prompt of a row; the first fields are the arguments of ``build_prompts``.

    Attributes:
      longest: tokens of the longest prompt so far, before any limit.
      questions: one or two of them, which are enough to tell whether they differ.
    """

    wording: Wording
    question_key: str
    answer_key: str | None
    answer_pattern: str | None
    solution_key: str | None
    solutions: int | None
    needs_answer: bool
    most: int
    overlong: Overlong
    longest: int = 0
    questions: set[str] = dataclasses.field(default_factory=set)

    def read(self, index: int, row: Mapping[str, Any], where: str) -> Prompt | None:
        """The prompt; None where it is dropped for its length."""
        check_fields(row, self.question_key, self.answer_key if self.needs_answer else None, where)
        check_media(row, where)
        question = _question(row, self.question_key, self.wording.template, where)
        if len(self.questions) < 2:
            self.questions.add(str(question))
        answer = None
        if self.answer_key is not None:
            answer = _answer(
                row, self.answer_key, self.answer_pattern, where, needed=self.needs_answer
            )
        wording = self.wording
        messages = wording.conversation(question, self.question_key, where)
        tools = read_tools(row.get("tools"), where)
        text, ids = wording.of_row(row, where).prompt(messages, tools, where)
        if not ids:
            raise UserError(f"{where}: the prompt is empty")
        self.longest = max(self.longest, len(ids))
        if len(ids) > self.most:
            if not self.overlong.truncates(_too_long(where, len(ids), self.most)):
                return None
            ids = ids[-self.most :]
            text = wording.tokenizer.decode(ids, skip_special=False)
        usual = {"question", "answer"} & {self.question_key, self.answer_key}
        return Prompt(
            id=index,
            text=text,
            tokens=np.array(ids, np.int32),
            answer=answer,
            meta={k: v for k, v in row.items() if k not in usual},
            solution=self._solution(row, text, where),
            messages=() if isinstance(question, str) else tuple(messages),
            question=question if isinstance(question, str) else "",
        )

    def _solution(self, row: Mapping[str, Any], prompt: str, where: str) -> np.ndarray | None:
        """[s] int32: the tokens of the row's completions, one after the other; None for none."""
        if (key := self.solution_key) is None:
            return None
        texts = _listed(row, key, self.solutions, where)
        each = [_solution(row, key, prompt, where, self.wording, text) for text in texts]
        return np.concatenate(each)


def _too_long(where: str, tokens: int, limit: int) -> TooLong:
    return TooLong(
        f"{where}: the prompt has {tokens} tokens and data.max_prompt_tokens is {limit}; raise it, "
        "or set data.overlong to drop or truncate"
    )


def _none_left(rows: int, longest: int, limit: int) -> UserError:
    if not rows:
        return UserError("the data has no rows")
    return UserError(
        f"all {rows} prompts are longer than data.max_prompt_tokens = {limit} (the longest has "
        f"{longest}); raise it"
    )


def _check_questions_show(prompts: Sequence[Prompt]) -> None:
    """Raises UserError where a chat template makes the same prompt of different questions."""
    if len({prompt.text for prompt in prompts}) == 1 < len(prompts):
        raise UserError(
            "the tokenizer's chat template writes the same text for every question, without the "
            "question; set data.template"
        )


def pad_prompts(prompts: Sequence[Prompt], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as one array.

    Args:
      prompts: N of them.
      size: P, tokens.

    Returns:
      (tokens [N, P] int32, each from column 0 and padded with 0, lengths [N] int32).

    Raises:
      UserError: a prompt is longer than ``size``.
    """
    tokens = np.zeros((len(prompts), size), np.int32)
    lengths = np.array([len(prompt.tokens) for prompt in prompts], np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        if len(prompt.tokens) > size:
            raise UserError(
                f"prompt {prompt.id} has {len(prompt.tokens)} tokens and the limit is {size}; "
                "raise data.max_prompt_tokens"
            )
        row[: len(prompt.tokens)] = prompt.tokens
    return tokens, lengths


def _question(row: Mapping[str, Any], key: str, template: str, where: str) -> Any:
    question = look_up(row, key)
    if isinstance(question, list | tuple | np.ndarray):
        return list(question)
    if not isinstance(question, str):
        raise UserError(
            f"{where}: {key} must be text or a list of messages, not {type(question).__name__}"
        )
    if not question.strip() and (question or template == "chat"):
        raise UserError(f"{where}: {key} is blank")
    return question


def _answer(
    row: Mapping[str, Any], key: str, pattern: str | None, where: str, *, needed: bool
) -> Any:
    answer = look_up(row, key)
    if pattern is not None:
        match = find_answer(pattern, str(answer), where)
        if match is None:
            raise UserError(
                f"{where}: {key} has no match of data.answer_pattern = {pattern!r}; write one that"
                f" matches, or remove it (data.answer_pattern=) where {key} is the answer alone"
            )
        answer = re.sub(r"(?<=\d),(?=\d{3})", "", match.strip())
    answer = _plain(answer)
    items = answer if isinstance(answer, list) else [answer]
    infinite = [x for x in items if isinstance(x, float) and not math.isfinite(x)]
    empty = all(x is None or x == [] or (isinstance(x, str) and not x.strip()) for x in items)
    if not needed and (infinite or empty):
        return None
    if infinite:
        raise UserError(f"{where}: {key} is {infinite[0]}; a reference answer is finite, or text")
    if empty:
        raise UserError(f"{where}: {key} is empty; every row needs a reference answer")
    return answer


def _listed(row: Mapping[str, Any], key: str, least: int | None, where: str) -> list[Any]:
    """The completions of a row's field: at least so many of a list, or the one that it is."""
    texts = look_up(row, key)
    if least is None or texts is None:
        return [texts]
    listed = list(texts) if isinstance(texts, list | tuple) else [texts]
    if len(listed) < least:
        raise UserError(
            f"{where}: {key} lists {len(listed)} solutions, and objective.demonstrations = {least};"
            " list as many, or lower it"
        )
    return listed


def _plain(value: Any) -> Any:
    """A value with lists for arrays and Python's numbers for NumPy's, as files have them."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {k: _plain(x) for k, x in value.items()} if isinstance(value, dict) else value


def _solution(
    row: Mapping[str, Any],
    key: str,
    prompt: str,
    where: str,
    wording: Wording,
    solution: Any,
) -> np.ndarray:
    """[s] int32: the tokens of a completion that the row gives, the token that ends it last.

    That is the chat template's end of a turn with "chat", else the end-of-text token.
    """
    if solution is None:
        raise UserError(
            f"{where}: there is no field {key!r}; set data.fields.solution to one of"
            f" {', '.join(row)}"
        )
    begin = after_opened_thought if wording.template == "chat" else without_repeated_mark
    solution = begin(prompt, _spoken(solution, key, where))
    if not solution.strip():
        raise UserError(f"{where}: {key} is empty; every row needs a solution to learn from")
    tokenizer = wording.tokenizer
    refuse_controls(tokenizer, solution, f"{where}: {key}")
    end = end_of_turn(tokenizer, wording.template)
    return np.array([*ids_after(tokenizer, prompt, solution), end], np.int32)


def _spoken(solution: Any, key: str, where: str) -> str:
    """The text of a completion, also where it is one message, as in TRL's conversational sets."""
    match _plain(solution):
        case [{"role": "assistant", "content": str(text), **more}] if not any(more.values()):
            return text
        case list() | dict():
            raise UserError(
                f"{where}: {key} must be text, or a list with one message of the assistant, which"
                " has role and content"
            )
    return str(solution)
