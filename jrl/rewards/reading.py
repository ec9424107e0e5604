"""Input of a reward model: a template, the model's own tokenizer, token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from jrl.config.reward_model import RewardModelTable
from jrl.errors import UserError, nearest, unknown_choice
from jrl.models.chat_frames import (
    ASSISTANT,
    Frames,
    check_fields,
    check_variables,
    conversation_ids,
)
from jrl.models.file_tokenizer import FileTokenizer
from jrl.rewards.base import Sample
from jrl.rewards.judge_prompts import (
    COMMON_FIELDS,
    fields_of,
    filled,
    pieces,
    question_of,
    shown,
    unknown_field,
)


class Reader(NamedTuple):
    """A reward model's view of samples.

    Attributes:
      table: its keys.
      tokenizer: of its checkpoint.
      pad_id: tokens of this id at the end are left out; None for none.
    """

    table: RewardModelTable
    tokenizer: FileTokenizer
    pad_id: int | None = None

    def ids(self, sample: Sample) -> list[int] | None:
        """Token ids of what the model reads; None without ``after``, or a text in ``column``.

        Contents never become control tokens, except that a completion may have those that are not
        marked special, such as "<think>". None, too, where the template would write one that
        stands beside the contents, as in a call's arguments.

        Raises:
          UserError: the chat template refuses the messages.
        """
        if self.table.column:
            text = sample.prompt.meta.get(self.table.column)
            if not isinstance(text, str):
                return None
            sample = dataclasses.replace(sample, completion=text, messages=())
        completion = sample.completion
        if self.table.after:
            _, marker, completion = completion.rpartition(self.table.after)
            if not marker:
                return None
            completion = completion.strip()
        ids = self._ids(sample, completion)
        if ids is None:
            return None
        while len(ids) > 1 and ids[-1] == self.pad_id:
            ids = ids[:-1]
        return ids

    def _ids(self, sample: Sample, completion: str) -> list[int] | None:
        template, table = self.table.template, self.table
        values = fields_of(sample, table.principle) | shown(sample) | {"completion": completion}
        if isinstance(template, str) and template:
            return self._text(template, values)
        messages = (
            [{**m, "content": filled(m["content"], values)} for m in template]
            if template
            else _conversation(sample, completion)
        )
        try:  # the policy's tokenizer, which the data was checked with, has other control tokens
            check_fields(self.tokenizer, messages, None, "")
        except UserError:
            return None
        frames = Frames(self.tokenizer, "default", table.variables, table.answers is not None)
        return conversation_ids(frames, messages, ASSISTANT)

    def _text(self, template: str, values: dict[str, Any]) -> list[int]:
        text, outside = "", []
        for piece, fills in pieces(template, values):
            if fills:
                outside.append((len(text), len(text) + len(piece)))
            text += piece
        return self.tokenizer.encode_framed(text, outside, add_special=True)

    def answer_ids(self, key: str) -> tuple[int, int]:
        """The tokens of the two answers.

        Raises:
          UserError: one of them is not one token.
        """
        ids = [self.tokenizer.encode(word) for word in self.table.answers or ()]
        for word, listed in zip(self.table.answers or (), ids, strict=True):
            if len(listed) != 1:
                raise UserError(
                    f"{key}.answers: {word!r} is {len(listed)} tokens of this tokenizer; give words"
                    " of one token"
                )
        (first,), (second,) = ids
        return first, second


def _conversation(sample: Sample, completion: str) -> list[dict[str, Any]]:
    """The prompt's messages and the completion, or what was said in an episode."""
    opening = sample.prompt.messages or ({"role": "user", "content": question_of(sample)},)
    spoken = [dict(m) for m in sample.messages] or [{"role": ASSISTANT, "content": ""}]
    last = max((i for i, m in enumerate(spoken) if m["role"] == ASSISTANT), default=None)
    if last is not None:
        spoken[last]["content"] = completion
    return [*map(dict, opening), *spoken]


def check_reader(
    table: RewardModelTable,
    tokenizer: FileTokenizer,
    columns: Iterable[str],
    key: str,
    *,
    answers: bool = True,
) -> None:
    """Raises UserError for a template that cannot be filled or rendered.

    Args:
      table: the reward model's keys.
      tokenizer: of its checkpoint.
      columns: of the data.
      key: "rewards.NAME", for messages.
      answers: whether rows have reference answers.
    """
    template, columns = table.template, list(columns)
    if table.column and table.column not in columns:
        raise unknown_choice(f"{key}.column", table.column, columns)
    texts = [template] if isinstance(template, str) else [m["content"] for m in template]
    common = [name for name in COMMON_FIELDS if answers or name != "reference"]
    allowed = [*dict.fromkeys([*common, "completion", "conversation", *columns])]
    if field := unknown_field(texts, allowed):
        raise UserError(
            f"{key}.template has {{{field}}}, which is no field and no column of the data;"
            f" {nearest(field, allowed)}"
        )
    if template and not any(f in t for t in texts for f in ("{completion}", "{conversation}")):
        raise UserError(
            f"{key}.template does not show what is judged; write {{completion}} into it"
        )
    if isinstance(template, str) and template:
        return
    if not tokenizer.templates:
        raise UserError(
            f"{key}: the model's tokenizer has no chat template; set {key}.template to a text with"
            " {question} and {completion} in it"
        )
    check_variables(table.variables, tokenizer, f"{key}.variables")
