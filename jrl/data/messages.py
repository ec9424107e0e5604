"""Chat messages of data files: read and checked, and written in token ids by the chat template.

What a file's messages say is text: where it spells a control token it is encoded as plain text.
What the policy is to learn to say may hold tokens such as "<think>" that models write themselves,
and is refused where it spells one that the tokenizer marks special, or that ends a turn.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError
from jrl.models.chat_frames import (
    ASSISTANT,
    MESSAGE_FIELDS,
    Frames,
    chat_template,
    check_fields,
    check_variables,
    conversation_ids,
    left_out,
    refuse_controls,
)
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import Tokenizer
from jrl.system.json_text import parse_json
from jrl.types import NOTHING

_dumps = functools.partial(json.dumps, ensure_ascii=False)
Messages = list[dict[str, Any]]
_THINK, _THOUGHT = "<think>", "</think>"
_MESSAGE_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""Beginning of messages in JSON, or as Python writes them."""
_REASONS = "JRLREASONSJRL"
"""Placeholder for the reasons of an answer."""


def read_messages(value: Any, name: str, where: str) -> Messages:
    """A list of messages, checked, with the fields that chat templates read.

    A content may be text, None beside tool calls, or a list of parts of text.

    Args:
      value: of the row.
      name: of its field, for errors.
      where: file and line, for errors.

    Raises:
      UserError: it is no list of messages, or a message holds what would be dropped, such as an
        image or a field that no template reads.
    """
    items = [] if isinstance(value, str | Mapping | int | float | None) else list(value)
    if not items:
        raise UserError(f"{where}: {name} must be text or a list of messages")
    return [_read_message(message, name, where) for message in items]


def _refuse_message_text(value: str, name: str, where: str) -> None:
    """Raises UserError for messages as text, as CSV has them: a user would say their braces."""
    if _MESSAGE_TEXT.match(value) and "role" in value and "content" in value:
        raise UserError(
            f"{where}: {name} is text that holds messages, {value[:40]!r}; give a list of them, in"
            " a JSONL or Parquet file"
        )


def _read_message(message: Any, name: str, where: str) -> dict[str, Any]:
    fields = message if isinstance(message, Mapping) else {}
    content = fields.get("content")
    if content is None and fields.get("tool_calls") is not None:
        content = ""
    if isinstance(content, list | tuple | np.ndarray):
        content = _text_of_parts(list(content), name, where)
    if not isinstance(fields.get("role"), str) or not isinstance(content, str):
        raise UserError(
            f"{where}: {name} holds {str(message)[:60]}; a message has role and content, both text"
        )
    unknown = [k for k, v in fields.items() if k not in MESSAGE_FIELDS and v is not None]
    if unknown:
        raise UserError(
            f"{where}: {name} holds a message with {unknown[0]!r}, which chat templates do not"
            f" read; a message has {', '.join(MESSAGE_FIELDS)}"
        )
    rest = {k: v for k, v in fields.items() if k in MESSAGE_FIELDS[2:] and v is not None}
    if "tool_calls" in rest:
        rest["tool_calls"] = _read_calls(rest["tool_calls"], name, where)
    return {"role": fields["role"], "content": content, **rest}


def _text_of_parts(parts: Sequence[Any], name: str, where: str) -> str:
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: {name} holds a content with {str(parts)[:60]}; give text alone")
    return "".join(map(str, texts))


def _read_calls(calls: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Tool calls in the form of chat templates: arguments as an object, not as JSON text."""
    read: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list | tuple | np.ndarray) else [None]:
        call = call if isinstance(call, Mapping) else {}
        function = call.get("function", call)
        function = function if isinstance(function, Mapping) else {}
        arguments = _read_arguments(function.get("arguments", {}), f"{where}: {name}")
        if not isinstance(arguments, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where}: {name} holds tool_calls {str(calls)[:60]}; a call has a function with a"
                " name and arguments, a JSON object"
            )
        function_call = {"name": function["name"], "arguments": dict(arguments)}
        call_id = {"id": str(call["id"])} if call.get("id") is not None else {}
        read.append({"type": "function", "function": function_call, **call_id})
    return read


def _read_arguments(value: Any, where: str) -> Any:
    """The arguments of a call as JSON has them.

    Raises:
      UserError: the text is no JSON, has two values for one key, of which a dict would lose one, or
        half of a character; or a value is none of JSON's, such as NaN, which no parser reads.
    """
    if isinstance(value, str):
        value = parse_json(value, f"{where}: a tool call")
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_of_numpy))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{where}: the arguments of a tool call are {str(value)[:60]}, which JSON does not"
            f" have: {error}; write another value, or remove the row"
        ) from None


def _of_numpy(value: Any) -> Any:
    """An array as lists, and its numbers as Python's; raises TypeError for any other value."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of its kinds")


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools that a row offers, as OpenAI's API writes them; None for none.

    Args:
      value: the row's "tools": a list of objects, or text that holds one in JSON.
      where: file and line, for errors.

    Raises:
      UserError: it is none of these.
    """
    if isinstance(value, str):
        value = parse_json(value, f"{where}: tools") if value.strip() else None
    if value is None or value == {}:
        return None
    tools: list[Any] = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
    if not tools:
        return None
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where}: tools holds {str(tool)[:60]}; a tool is an object with a function, which"
                " has a name"
            )
    return [
        dict(t) if "function" in t else {"type": "function", "function": dict(t)} for t in tools
    ]


def answer_message(value: Any, name: str, where: str) -> dict[str, Any]:
    """A completion, text or one message of the assistant, as that message."""
    if isinstance(value, str):
        _refuse_message_text(value, name, where)
        message: dict[str, Any] = {"role": "assistant", "content": value}
    else:
        messages = read_messages(value, name, where)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"{where}: {name} holds messages of {roles} after the prompt; it must be one "
                "message of the assistant: move the turns before it into prompt"
            )
        message = messages[0]
    if not (message["content"].strip() or message.get("tool_calls")):
        raise UserError(f"{where}: {name} is empty; give it a text, or remove the row")
    return message


# ---------------------------------------------------------------- from messages to ids


class Wording(NamedTuple):
    """Encoding of prompts and completions.

    Attributes:
      tokenizer: the policy's.
      system: a system message for conversations without one, or None. Without a chat template it
        precedes the question, with a blank line between.
      template: "chat" for the tokenizer's chat template, "plain" for the question as it is, or a
        text with ``{question}`` in it. The last two are encoded with the special tokens that the
        tokenizer puts around a text, such as BOS.
      variables: further variables of the chat template, such as ``{"enable_thinking": False}``;
        those that a row has in its field "chat_template_kwargs" come before them.
    """

    tokenizer: Tokenizer
    system: str | None = None
    template: str = "chat"
    variables: Mapping[str, Any] = NOTHING

    @classmethod
    def of(cls, wording: Wording | Tokenizer) -> Wording:
        """The checked encoding; a tokenizer alone stands for one by its chat template.

        Raises:
          UserError: a variable that the chat template does not read.
        """
        made = wording if isinstance(wording, Wording) else cls(wording)
        check_variables(made.variables, made.tokenizer, "data.template_variables")
        return made

    def of_row(self, row: Mapping[str, Any], where: str) -> Wording:
        """This format with the row's own variables, in "chat_template_kwargs".

        Args:
          row: the fields.
          where: file and line, for errors.

        Raises:
          UserError: they are no object, or a variable that the chat template does not read.
        """
        variables = row.get("chat_template_kwargs")
        if variables is None or self.template != "chat":
            return self
        if not isinstance(variables, Mapping):
            raise UserError(
                f"{where}: chat_template_kwargs is {str(variables)[:60]}; give an object, such as"
                ' {"enable_thinking": false}'
            )
        # Columns of Parquet files have all keys of all rows.
        row_variables = {name: value for name, value in variables.items() if value is not None}
        check_variables(row_variables, self.tokenizer, f"{where}: chat_template_kwargs")
        return self._replace(variables={**self.variables, **row_variables})

    def conversation(self, value: Any, name: str, where: str) -> Messages:
        """The messages of a prompt, from text or messages, with the system message first.

        Raises:
          UserError: it is neither, it is empty, it ends with the assistant's message, or the
            template holds one question alone.
        """
        if isinstance(value, str):
            if self.template == "chat":
                _refuse_message_text(value, name, where)
            messages: Messages = [{"role": "user", "content": value}]
        else:
            messages = read_messages(value, name, where)
            if self.template != "chat":
                raise UserError(
                    f"{where}: {name} is a list of messages, which data.template ="
                    f" {self.template!r} cannot render; set it to 'chat'"
                )
        if messages[-1]["role"] == ASSISTANT:
            raise UserError(
                f"{where}: {name} ends with a message of the assistant; end it with the user's"
            )
        if self.system is not None and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.system}, *messages]
        return messages

    def prompt(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, where: str
    ) -> tuple[str, list[int]]:
        """The text of a prompt, control tokens escaped, and its token ids.

        Raises:
          UserError: the template refuses the messages, or leaves out tools or calls.
        """
        if self.template != "chat":
            if tools:
                raise UserError(
                    f"{where}: data.template = {self.template!r:.60} has no place for the row's"
                    " tools; set it to 'chat', or remove them"
                )
            return self._without_chat(messages[-1]["content"])
        frames = self._frames(tools)
        if frames is not None:
            check_fields(frames.tokenizer, messages, tools, where)
        try:
            text = self._render(messages, tools)
        except UserError as error:
            if messages[0] != {"role": "system", "content": self.system}:
                raise
            self._render(messages[1:], tools)  # raises where the system message is not the reason
            raise UserError(f"data.system = {self.system!r:.40}: {error}; remove it") from None
        _check_written(left_out(self._render, messages, tools or ()), where)
        if frames is None:
            return text, self.tokenizer.encode(text)
        return text, conversation_ids(frames, messages, ASSISTANT)

    def _without_chat(self, question: str) -> tuple[str, list[int]]:
        """The text of a prompt by a template of one's own, or by none, and its token ids."""
        text, spans = "", []
        if self.system is not None:
            spans.append((0, len(self.system)))
            text = f"{self.system}\n\n"
        template = "{question}" if self.template == "plain" else self.template
        for words, field, *_ in string.Formatter().parse(template):
            text += words
            if field is not None:
                spans.append((len(text), len(text) + len(question)))
                text += question
        return text, _plain_ids(self.tokenizer, text, spans)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """The chat template's text of a conversation, which may end where the policy speaks."""
        if (frames := self._frames(tools)) is None:
            return self.tokenizer.chat(messages, add_generation_prompt=prompt)
        return frames.render(messages, prompt=prompt)

    def completion(
        self,
        message: Mapping[str, Any],
        messages: Messages,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None,
        name: str,
        where: str,
    ) -> list[int]:
        """Token ids of the assistant's message after a prompt, up to the token that ends the turn.

        Args:
          message: with "content", and perhaps "tool_calls" and "reasoning_content".
          messages: of the prompt, whose text is ``text``.
          text: of the prompt.
          tools: of the prompt.
          name: of the message's field, for errors.
          where: file and line, for errors.

        Raises:
          UserError: a part of it spells a control token, or the template leaves a part out.
        """
        answer = str(message["content"])
        parts = [
            answer,
            *(_dumps(message[key]) for key in MESSAGE_FIELDS[2:] if key in message),
        ]
        for part in parts:
            refuse_controls(self.tokenizer, part, f"{where}: {name}")
        if self.template == "chat":
            whole = self._render([*messages, dict(message)], tools, prompt=False)
            _, ids = after_prompt(self.tokenizer, whole, text, answer)
        else:
            ids = ids_after(self.tokenizer, text, without_repeated_mark(text, answer))
        self._check_message_written(message, messages, text, tools, where)
        end = end_of_turn(self.tokenizer, self.template)
        return until_stop(ids, self.tokenizer, end)

    def _check_message_written(
        self,
        message: Mapping[str, Any],
        messages: Messages,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None,
        where: str,
    ) -> None:
        """Raises UserError where calls or reasons of the answer are not written behind a prompt."""
        reasons = message.get("reasoning_content")
        if not reasons and not message.get("tool_calls"):
            return

        def written(finished: Messages, _: Any = None) -> str:
            if self.template != "chat":
                return ""
            whole = self._render([*messages, *finished], tools, prompt=False)
            return whole[len(text) :] if whole.startswith(text) else ""

        _check_written(left_out(written, [dict(message)]), where)
        # Then the answer would be its bare content (``after_prompt``), without calls and reasons.
        thought = _thought_of(str(message["content"]))
        _check_written(thought if thought not in written([dict(message)]) else "", where)
        marked = {**message, "reasoning_content": _REASONS}
        if reasons and _REASONS not in written([marked]):
            _check_written(str(reasons).strip(), where)

    def _frames(self, tools: Sequence[Mapping[str, Any]] | None) -> Frames | None:
        """The chat template; None for a tokenizer that is not of a checkpoint."""
        if not isinstance(self.tokenizer, FileTokenizer):
            return None
        name = chat_template(self.tokenizer, tools=bool(tools))
        tool_values = {"tools": list(tools)} if tools else {}
        return Frames(self.tokenizer, name, {**self.variables, **tool_values})


def _plain_ids(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Token ids of a text with the special tokens around it; those in the spans are text."""
    inside = "\n".join(text[begin:end] for begin, end in spans)
    if not isinstance(tokenizer, FileTokenizer) or not tokenizer.controls(inside):
        return tokenizer.encode(text, add_special=True)
    return tokenizer.encode_framed(text, spans, add_special=True)


def _check_written(missing: str, where: str) -> None:
    """Raises UserError for what a template leaves out, if anything."""
    if missing:
        raise UserError(
            f"{where}: the model's chat template does not write {missing!r:.60}, of the row's"
            " tools, tool_calls or reasoning_content; remove it, or take a template that does"
        )


def ids_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Token ids of a text behind another, which the space of some tokenizers depends on."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.encode_after(before, text)
    return tokenizer.encode(text)


def after_prompt(
    tokenizer: Tokenizer, conversation: str, prompt: str, answer: str
) -> tuple[str, list[int]]:
    """The template's rendering of the assistant's message, from the text of the conversation.

    Some templates render a finished conversation differently, or without the thought of its last
    answer; then it is the bare answer.

    Returns:
      (text, token ids).
    """
    rendered = conversation[len(prompt) :]
    if conversation.startswith(prompt) and _thought_of(answer) in rendered:
        answer = rendered
    else:
        answer = after_opened_thought(prompt, answer)
    return answer, ids_after(tokenizer, prompt, answer)


def _thought_of(answer: str) -> str:
    """What an answer says before the end of its last thought; "" for none."""
    return answer.rpartition(_THOUGHT)[0].strip().removeprefix(_THINK).strip()


def without_repeated_mark(prompt: str, answer: str) -> str:
    r"""An answer without the mark that begins a thought, where the prompt ends with it already.

    >>> without_repeated_mark("<|assistant|><think>\n", "<think>\na</think>b")
    'a</think>b'
    """
    begun = prompt.rstrip().endswith(_THINK) and answer.lstrip().startswith(_THINK)
    if not begun:
        return answer
    answer = answer.lstrip()[len(_THINK) :]
    return answer.removeprefix("\n") if prompt.endswith("\n") else answer


def after_opened_thought(prompt: str, answer: str) -> str:
    r"""An answer after a chat template's prompt, which may have begun a thought.

    An answer without one ends that thought first; else the policy would learn to answer in it, and
    to end its turn there.

    >>> after_opened_thought("<|assistant|><think>\n", "b"), after_opened_thought("a", "b")
    ('\n</think>\n\nb', 'b')
    """
    if prompt.rstrip().endswith(_THINK) and _THOUGHT not in answer:
        return ("\n" if prompt.endswith("\n") else "\n\n") + f"{_THOUGHT}\n\n{answer.lstrip()}"
    return without_repeated_mark(prompt, answer)


def end_of_turn(tokenizer: Tokenizer, template: str) -> int:
    """The token that ends what the assistant says: the chat template's with "chat", else EOS."""
    if template == "chat" and isinstance(tokenizer, FileTokenizer):
        return tokenizer.eos_id if tokenizer.turn_id is None else tokenizer.turn_id
    return tokenizer.eos_id


def until_stop(ids: list[int], tokenizer: Tokenizer, end: int) -> list[int]:
    """The ids up to the first stop token; ``end`` is added when there is none."""
    for i, token in enumerate(ids):
        if token in tokenizer.stop_ids:
            return ids[: i + 1]
    return [*ids, end]
