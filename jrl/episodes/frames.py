"""A chat template's words around messages whose contents come from outside.

What a template writes is found by rendering placeholders: where a content stands, where an
assistant's turn ends. Contents are never searched for in a rendered text, so they may look like
anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jrl.errors import UserError
from jrl.models.tokenizer import FileTokenizer

Message = Mapping[str, Any]
"""A dict with "role" and "content", both text, and what else the template reads."""

ANSWER = "JRLANSWER"
"""What the assistant says in conversations of placeholders."""

_PLAIN_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
"""Names and ids that a template may write into a frame: no control token has only such letters."""

Span = tuple[int, int]
"""(begin, end) of a part of a text, in characters."""


class Frames(NamedTuple):
    """A template of a checkpoint, with the variables it is always rendered with.

    Attributes:
      tokenizer: the policy's.
      name: of the template.
      variables: of the template, tools among them.
    """

    tokenizer: FileTokenizer
    name: str
    variables: Mapping[str, Any]

    def render(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        """The conversation; with ``prompt`` ending where the assistant is to speak.

        Raises:
          UserError: the template refuses it.
        """
        return self.tokenizer.chat(
            messages, add_generation_prompt=prompt, template=self.name, **self.variables
        )

    def refuses(self, messages: Sequence[Message]) -> bool:
        """Whether the template raises for a conversation."""
        try:
            self.render(messages)
        except UserError:
            return True
        return False

    def marked(self, messages: Sequence[Message], own: str = "") -> list[Message]:
        """The messages with placeholders for contents, but for those of the role ``own``."""
        return [
            m if m["role"] == own else {**m, "content": f"JRLCONTENT{i}JRL"}
            for i, m in enumerate(messages)
        ]

    def spans(
        self, before: Sequence[Message], messages: Sequence[Message], own: str = ""
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and where in it the contents of ``messages`` stand.

        Each content is found by rendering a placeholder in its place, so that a template may trim
        or quote it. Contents of the role ``own`` are none.

        Raises:
          UserError: the template does not write each content once, or frames it by what it says.
        """
        marked = self.marked(messages, own)
        frame = self.render([*before, *marked])
        marks, parts, rest = [], [], frame
        outside = [(i, m) for i, m in enumerate(messages) if m["role"] != own]
        for i, message in outside:
            mark = marked[i]["content"]
            part, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise UserError(
                    f"the chat template writes the content of a {message['role']} message "
                    f"{'more than once' if found else 'nowhere, or not in its turn'}"
                )
            marks.append(mark)
            parts.append(part)
        text, spans = "", []
        for (i, message), mark, part in zip(outside, marks, parts, strict=True):
            whole = self.render([*before, *marked[:i], message, *marked[i + 1 :]])
            head, _, tail = frame.partition(mark)
            if not (whole.startswith(head) and whole.endswith(tail)):
                raise UserError(
                    f"the chat template writes a {message['role']} message in another frame "
                    f"because of what it says: {message['content']!r:.60}"
                )
            text += part
            spans.append((len(text), len(text) + len(whole) - len(head) - len(tail)))
            text += whole[len(head) : len(whole) - len(tail)]
        return text + rest, spans

    def stops(self) -> list[str]:
        """The texts of the tokens that end a turn."""
        return [self.tokenizer.decode([i], skip_special=False) for i in self.tokenizer.stop_ids]

    def last_end(self, said: Sequence[Message]) -> str:
        """The stop token that ends the last turn of a conversation, "" where none does."""
        try:
            _, found, rest = self.render(said, prompt=False).rpartition(ANSWER)
        except UserError:
            return ""
        return next((stop for stop in self.stops() if found and rest.startswith(stop)), "")


def calling(
    names: Sequence[str], ids: Sequence[str], *, content: str | None, as_text: bool
) -> Message:
    """An assistant's message that calls tools.

    Templates read arguments as an object or as text that holds JSON, and a turn that says nothing
    as an empty content or as none.
    """
    given: Any = {"it": ANSWER}
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given) if as_text else given},
        }
        for name, call_id in zip(names, ids, strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def whole_text(message: Message) -> Message:
    """The message with "?" for halves of characters, which no tokenizer takes."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": content.encode("utf-8", "replace").decode()}


def plain_names(message: Message, number: int) -> Message:
    """The message with names and ids that a template may write into its frame."""
    if message["role"] == "tool":
        message = {"name": "unknown", "tool_call_id": "", **message}
    plain = dict(message)
    for key, other in (("name", "unknown"), ("tool_call_id", f"jrlcall{number % 100:02d}")):
        given = plain.get(key, other)
        if not (isinstance(given, str) and _PLAIN_NAME.fullmatch(given)) or ANSWER in given:
            plain[key] = other
    return plain


def outside_spans(text: str, span: Span, pieces: Sequence[tuple[str, bool]]) -> list[Span]:
    """Where in a text the pieces of one content stand that come from outside.

    All of the content, where the template does not write it as it is.
    """
    content = "".join(piece for piece, _ in pieces)
    begin, end = span
    at = content.find(text[begin:end])
    if at < 0:
        return [span]
    spans, start = [], begin - at
    for piece, outside in pieces:
        place = max(start, begin), min(start + len(piece), end)
        if outside and place[0] < place[1]:
            spans.append(place)
        start += len(piece)
    return spans


def check_descriptions(tokenizer: FileTokenizer, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError where a template would write a control token of a tool's author."""
    for tool in tools:
        if found := tokenizer.controls(json.dumps(tool, ensure_ascii=False)):
            name = tool.get("function", {}).get("name", "")
            raise UserError(
                f"tool {name!r}: its description or schema spells the control token {found[0]!r}, "
                "which the model would read as one; write it otherwise"
            )
