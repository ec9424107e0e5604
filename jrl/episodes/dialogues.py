"""Conversations in messages, as transcripts that train the assistant's turns.

    dialogues = read_dialogues(open_dataset("talks.jsonl"), Wording(tokenizer))
    print(dialogues.counts)

A row is {"messages": [...], "reward": 0.7}, or with "rewards", one number for each message of the
assistant. Each such message becomes the tokens that a policy would have sampled there: the ids that
the chat template writes for it, up to the token that ends the turn. ``episodes.recorded`` makes
rows of them, without log-probabilities, of version -1. If the template renders earlier messages
differently once more follow, as those that drop thinking do, a new row of the episode begins.

What the user and the system say is data and never a control token. The assistant's own words may
hold tokens such as "<think>" that models write, but none that the tokenizer marks special.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.data.fields import check_media
from jrl.data.invalid import read_rows
from jrl.data.messages import Wording, after_prompt, end_of_turn, read_tools, until_stop
from jrl.data.tables import Dataset
from jrl.episodes.chat import PlainFormat
from jrl.episodes.recorded import ROW, joined_groups
from jrl.episodes.recorded_files import Distribution, RecordedCompletion
from jrl.episodes.transcript import Transcript
from jrl.errors import UserError, nearest
from jrl.models.chat_frames import (
    ASSISTANT,
    Frames,
    Message,
    chat_template,
    conversation_ids,
    refuse_controls,
    whole_text,
)
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import Tokenizer
from jrl.system.float32 import fits_float32
from jrl.types import StopReason

ROLES = ("system", "user", "assistant")


class DialogueCounts(NamedTuple):
    """Counts of a reading.

    Attributes:
      dialogues: that can be used.
      turns: messages of the assistant.
      rows: transcripts, of which a dialogue has several where it was split.
      rewarded: dialogues with a reward.
      rewritten: splits, where the chat template writes earlier messages otherwise once more follow.
      invalid: what is wrong with the rows that were left out, and a column that is not read; "".
    """

    dialogues: int
    turns: int
    rows: int
    rewarded: int
    rewritten: int
    invalid: str = ""

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.turns} turns of the assistant in {self.dialogues} dialogues, {self.rewarded} "
            f"with a reward, in {self.rows} rows; split where the chat template writes earlier "
            f"messages otherwise {self.rewritten} times{'; ' * bool(self.invalid)}{self.invalid}"
        )


class Dialogues(NamedTuple):
    """Dialogues of a file.

    Attributes:
      groups: of rows whose dialogues open with the same ids; see ``recorded.Recorded``.
      counts: what was read.
      where: a row -> file and line of its dialogue.
    """

    groups: tuple[tuple[Transcript, ...], ...]
    counts: DialogueCounts
    where: Callable[[Transcript], str]


def read_dialogues(
    source: Dataset,
    wording: Wording | Tokenizer,
    *,
    invalid: str = "error",
) -> Dialogues:
    """The dialogues of a file, tokenized.

    Args:
      source: the rows.
      wording: how their messages become ids; with the template "plain" contents stand one after
        another, each of the assistant's ended by the end-of-text token.
      invalid: for rows that cannot be used: "error", or "skip", which counts them.

    Raises:
      UserError: a row cannot be used; names file and line, and what is wrong with it.
    """
    tokenizer, system, template, variables = Wording.of(wording)
    writer = _writer(tokenizer, template, variables)

    def read(index: int, row: Mapping[str, Any], where: str) -> list[RecordedCompletion]:
        messages = dialogue_messages(row, where)
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        points = dialogue_points(row, messages, where)
        return _turns(messages, points, writer, index, where)

    sessions, left_out = read_rows(source, read, invalid=invalid, system=system)
    groups, episodes = joined_groups(sessions)
    turns = [node for nodes in sessions for node in nodes]
    counts = DialogueCounts(
        dialogues=len(sessions),
        turns=len(turns),
        rows=sum(map(len, groups)),
        rewarded=sum(episode.points is not None for episode in episodes),
        rewritten=sum(node.parent is not None and not node.joined for node in turns),
        invalid=left_out,
    )
    return Dialogues(groups, counts, lambda row: source.where(row.labels[ROW]))


# ---------------------------------------------------------------- a row


def dialogue_messages(row: Mapping[str, Any], where: str) -> list[Message]:
    """The messages of a row, checked.

    Args:
      row: the fields.
      where: file and line, for errors.

    Raises:
      UserError: there are none, one is of an unknown role, without text, or holds what would be
        lost, or none is the assistant's.
    """
    value = row.get("messages")
    if value is None or isinstance(value, str | Mapping) or not hasattr(value, "__len__"):
        have = f"only {', '.join(row)}" if "messages" not in row else f"{str(value)[:40]!r}"
        raise UserError(
            f"{where}: messages must be a list of messages, each with role and content; there is "
            f"{have}"
        )
    check_media(row, where)
    if read_tools(row.get("tools"), where):
        raise UserError(f"{where}: tools are not read in dialogues; record such sessions instead")
    if row.get("chat_template_kwargs") is not None:
        raise UserError(
            f"{where}: chat_template_kwargs are not read in dialogues; set data.template_variables"
            " for all of them"
        )
    messages = [_message(m, f"{where}: messages[{i}]") for i, m in enumerate(value)]
    if not any(m["role"] == ASSISTANT for m in messages):
        raise UserError(f"{where}: no message is the assistant's; nothing could be learned")
    if messages[0]["role"] == ASSISTANT:
        raise UserError(
            f"{where}: the first message is the assistant's; add the message that it answers"
        )
    return messages


def _message(message: Any, name: str) -> Message:
    """One message, of role and content alone."""
    fields = dict(message) if isinstance(message, Mapping) else {}
    role, content = fields.pop("role", None), fields.pop("content", None)
    if not (isinstance(role, str) and isinstance(content, str)):
        raise UserError(f"{name} is {str(message)[:60]}; a message has role and content, both text")
    if role not in ROLES:
        raise UserError(f"{name}: role = {role!r}; {nearest(role, ROLES)}")
    more = [key for key, value in fields.items() if value is not None]
    if more:
        raise UserError(f"{name} has {', '.join(more)}, which would be lost; write content alone")
    if role == ASSISTANT and not content.strip():
        raise UserError(f"{name}: the assistant says nothing; give it a text, or remove it")
    return whole_text({"role": role, "content": content})


def dialogue_points(
    row: Mapping[str, Any], messages: Sequence[Message], where: str
) -> list[float | None]:
    """Rewards at the end of each assistant turn; None for none.

    Raises:
      UserError: both rewards are given, one is no finite number, or turns have another number.

    >>> talk = [{"role": role, "content": "Yes."} for role in ("user", "assistant")]
    >>> dialogue_points({"reward": 0.5}, talk * 2, "a.jsonl, line 1")
    [None, 0.5]
    """
    turns = sum(m["role"] == ASSISTANT for m in messages)
    total, each = row.get("reward"), row.get("rewards")
    if total is not None and each is not None:
        raise UserError(f"{where}: reward and rewards are both given; remove one")
    if each is None:
        paid = None if total is None else _number(total, f"{where}: reward")
        return [*[None] * (turns - 1), paid]
    if isinstance(each, str | Mapping) or not hasattr(each, "__len__"):
        raise UserError(f"{where}: rewards = {str(each)[:40]}; give a list of numbers")
    if len(each) != turns:
        raise UserError(
            f"{where}: rewards holds {len(each)} numbers and the assistant has {turns} messages; "
            "give one each"
        )
    return [_number(value, f"{where}: rewards[{i}]") for i, value in enumerate(each)]


def _number(value: Any, name: str) -> float:
    """A number that float32 holds."""
    number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not number or not fits_float32(value):
        raise UserError(f"{name} = {value!r:.40}; write a finite number")
    return float(value)


# ---------------------------------------------------------------- from messages to ids


class _Plain(NamedTuple):
    """Contents one after another."""

    tokenizer: Tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The policy's input before an answer."""
        ids = PlainFormat(self.tokenizer).begin()
        for message in messages:
            if message["role"] == ASSISTANT:
                ids += self.turn((), message)
            else:
                ids += self.tokenizer.encode_plain(message["content"])
        return ids

    def turn(self, before: Sequence[Message], message: Message) -> list[int]:
        """The ids of a message, with the token that ends the turn."""
        return [*self.tokenizer.encode_plain(message["content"]), self.tokenizer.eos_id]


class _Chat(NamedTuple):
    """Encoder of conversations with a chat template."""

    frames: Frames

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return conversation_ids(self.frames, messages, ASSISTANT)

    def turn(self, before: Sequence[Message], message: Message) -> list[int]:
        tokenizer, content = self.frames.tokenizer, message["content"]
        refuse_controls(tokenizer, content, f"the assistant's message {content!r:.40}")
        text = self.frames.render(before)
        finished = self.frames.render([*before, message], prompt=False)
        _, ids = after_prompt(tokenizer, finished, text, content)
        return until_stop(ids, tokenizer, end_of_turn(tokenizer, "chat"))


_Writer = _Plain | _Chat
"""Writes messages in ids."""


def _writer(tokenizer: Tokenizer, template: str, variables: Mapping[str, Any]) -> _Writer:
    """The encoder of messages.

    Raises:
      UserError: no template of this kind holds several messages, or the tokenizer has none.
    """
    if template == "plain":
        return _Plain(tokenizer)
    if template != "chat":
        raise UserError(
            f"data.template = {template!r} holds one question, and dialogues have many messages; "
            "set it to chat or plain"
        )
    if not isinstance(tokenizer, FileTokenizer) or not tokenizer.templates:
        raise UserError(
            "the model has no chat template, which dialogues are written with; set data.template to"
            " plain, or add chat_template.jinja to the checkpoint"
        )
    name = chat_template(tokenizer, tools=False)
    return _Chat(Frames(tokenizer, name, {**variables, "tools": None}))


def _turns(
    messages: Sequence[Message],
    points: Sequence[float | None],
    writer: _Writer,
    row: int,
    where: str,
) -> list[RecordedCompletion]:
    """The turns of the assistant, each with what it continues."""
    nodes: list[RecordedCompletion] = []
    for at, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        prompt = np.array(writer.prompt(messages[:at]), np.int32)
        if not len(prompt):
            raise UserError(f"{where}: there is no message before the assistant's first one")
        ids = np.array(writer.turn(messages[:at], message), np.int32)
        node = RecordedCompletion(
            prompt=prompt,
            drawn=ids,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.full(len(ids), -1, np.int32),
            stop=StopReason.STOP_TOKEN,
            sampling=Distribution(),
            number=len(nodes),
            seen=len(nodes),
            points=points[len(nodes)],
            row=row,
        )
        if nodes:
            node.parent = nodes[-1]
            node.joined = node.start.startswith(nodes[-1].whole)
        nodes.append(node)
    return nodes
