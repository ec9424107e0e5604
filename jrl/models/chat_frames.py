"""A chat template's words around messages whose contents come from outside.

What a template writes is found by rendering placeholders: where a content stands, where an
assistant's turn ends. Contents are never searched for in a rendered text, so they may look like
anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.errors import UserError
from jrl.models.chat_template import variables_read
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import Tokenizer

ASSISTANT = "assistant"
"""The role of the policy."""
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Fields of a message that chat templates read."""

Message = Mapping[str, Any]
"""A dict with "role" and "content", both text, and what else the template reads."""

ANSWER = "JRLANSWER"
"""Placeholder for the assistant's content in sample conversations."""

_PLAIN_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
"""Names and ids that a template may write into a frame: no control token has only such letters."""

Span = tuple[int, int]
"""(begin, end) of a part of a text, in characters."""


def _is_trusted(message: Message, trusted: str) -> bool:
    """Whether a content is trusted: of the role ``trusted``, or empty with tool calls."""
    return message["role"] == trusted or bool(message.get("tool_calls") and not message["content"])


class Frames(NamedTuple):
    """A template of a checkpoint, with the variables it is always rendered with.

    Attributes:
      tokenizer: the policy's.
      name: of the template.
      variables: of the template, tools among them.
      prompts: whether texts end where the assistant is to speak; else with the last message.
    """

    tokenizer: FileTokenizer
    name: str
    variables: Mapping[str, Any]
    prompts: bool = True

    def render(self, messages: Sequence[Message], *, prompt: bool | None = None) -> str:
        """The conversation; with ``prompt`` ending where the assistant is to speak.

        Raises:
          UserError: the template refuses it.
        """
        prompt = self.prompts if prompt is None else prompt
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

    def marked(self, messages: Sequence[Message], trusted: str = "") -> list[Message]:
        """The messages with placeholders for contents, but for those of the role ``trusted``."""
        return [
            m if _is_trusted(m, trusted) else {**m, "content": f"JRLCONTENT{i}JRL"}
            for i, m in enumerate(messages)
        ]

    def spans(
        self, before: Sequence[Message], messages: Sequence[Message], trusted: str = ""
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and where in it the contents of ``messages`` stand.

        Each content is found by rendering a placeholder in its place, so that a template may trim
        or quote it. Contents of the role ``trusted`` are none.

        Raises:
          UserError: the template does not write each content once, or frames it by what it says.
        """
        marked = self.marked(messages, trusted)
        frame = self.render([*before, *marked])
        marks, parts, rest = [], [], frame
        outside = [(i, m) for i, m in enumerate(messages) if not _is_trusted(m, trusted)]
        for i, message in outside:
            mark = marked[i]["content"]
            part, separator, rest = rest.partition(mark)
            if not separator or mark in rest:
                raise UserError(
                    f"the chat template writes the content of a {message['role']} message "
                    f"{'more than once' if separator else 'nowhere, or not in its turn'}"
                )
            marks.append(mark)
            parts.append(part)
        text, spans = "", []
        for (i, message), mark, part in zip(outside, marks, parts, strict=True):
            rendered = self.render([*before, *marked[:i], message, *marked[i + 1 :]])
            head, _, tail = frame.partition(mark)
            if not (rendered.startswith(head) and rendered.endswith(tail)):
                raise UserError(
                    f"the chat template renders a {message['role']} message differently because of"
                    f" its content: {message['content']!r:.60}"
                )
            text += part
            spans.append((len(text), len(text) + len(rendered) - len(head) - len(tail)))
            text += rendered[len(head) : len(rendered) - len(tail)]
        return text + rest, spans

    def stops(self) -> list[str]:
        """The texts of the tokens that end a turn."""
        return [self.tokenizer.decode([i], skip_special=False) for i in self.tokenizer.stop_ids]

    def last_end(self, messages: Sequence[Message]) -> str:
        """The stop token that ends the last turn of a conversation, "" where none does."""
        try:
            _, marker, rest = self.render(messages, prompt=False).rpartition(ANSWER)
        except UserError:
            return ""
        return next((stop for stop in self.stops() if marker and rest.startswith(stop)), "")


def chat_template(tokenizer: FileTokenizer, *, tools: bool) -> str:
    """The name of the template that conversations are rendered with.

    Checkpoints with a template of their own for tools call it "tool_use".
    """
    return "tool_use" if tools and "tool_use" in tokenizer.templates else "default"


def conversation_ids(frames: Frames, messages: Sequence[Message], trusted: str = "") -> list[int]:
    """Token ids of a conversation, in which contents are never control tokens.

    The ids are those of the rendered text unless a content spells a control token; then its place
    in the text is found, and it is encoded as plain text.

    Args:
      frames: the template.
      messages: dicts with "role" and "content", in order.
      trusted: a role whose contents may hold control tokens such as "<think>", because the policy
        writes them. Where one of them spells a token that is marked special, none may.

    Raises:
      UserError: the template refuses the messages, or a content that spells a control token cannot
        be told from the template's own words.
    """
    text = frames.render(messages)
    if any(
        spelled_control(frames.tokenizer, m["content"]) for m in messages if m["role"] == trusted
    ):
        trusted = ""
    if _only_frames_control(frames, messages, text, trusted):
        return frames.tokenizer.encode(text)
    return frames.tokenizer.encode_framed(*frames.spans([], messages, trusted))


def _only_frames_control(
    frames: Frames, messages: Sequence[Message], text: str, trusted: str
) -> bool:
    """Whether the control tokens of a text are those of its frame.

    Two renderings, where finding the places of the contents takes one for each of them.
    """
    controls, marked = frames.tokenizer.controls, frames.marked(messages, trusted)
    try:
        frame = frames.render(marked)
    except UserError:  # a template that reads contents, and finds none it knows
        frame = ""
    marks = [mark["content"] for m, mark in zip(messages, marked, strict=True) if m is not mark]
    counts = {frame.count(mark) for mark in marks}
    if frame and counts <= {1}:
        return controls(text) == controls(frame)
    if 0 in counts:
        return False
    # Some templates repeat contents: then the contents themselves are looked at.
    return not any(controls(str(m["content"])) for m in messages if not _is_trusted(m, trusted))


def spelled_control(tokenizer: Tokenizer, text: str) -> str:
    """A control token that a text would be read as, "" for none.

    Control tokens are those that are marked special, as ends of turns are, and the stop tokens.
    "<think>", which a model writes itself, often is none.
    """
    if not isinstance(tokenizer, FileTokenizer):
        return ""
    if special := tokenizer.controls(text, special=True):
        return special[0]
    stops = set(tokenizer.stop_ids) & set(tokenizer.encode(text))
    return tokenizer.decode([min(stops)], skip_special=False) if stops else ""


def refuse_controls(tokenizer: Tokenizer, text: str, name: str) -> None:
    """Raises UserError where a text to learn from spells a control token.

    Args:
      tokenizer: the policy's.
      text: to be drawn by the policy.
      name: of the text, for the message.
    """
    if control := spelled_control(tokenizer, text):
        raise UserError(
            f"{name} spells the control token {control!r}, which the policy would learn to draw"
            " there; write it otherwise"
        )


def left_out(
    render: Callable[[list[Any], list[Any]], str],
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
) -> str:
    """The first name of tools and calls that a template does not write; "" where it writes all.

    A text may hold such a name, and a call that of its tool, so marks of their own stand in their
    places.

    Args:
      render: the text of messages and tools.
      messages: of a conversation.
      tools: offered in it.
    """
    names: dict[str, str] = {}

    def marked(entry: Message) -> Message:
        mark = f"JRLNAME{len(names)}JRL"
        names[mark] = entry["function"]["name"]
        return {**entry, "function": {**entry["function"], "name": mark}}

    marked_tools = [marked(tool) for tool in tools]
    marked_messages = [
        {**m, "tool_calls": [marked(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]
    text = render(marked_messages, marked_tools) if names else ""
    return next((name for mark, name in names.items() if mark not in text), "")


def check_fields(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    where: str,
) -> None:
    """Raises UserError if text outside the contents spells a control token.

    A template writes roles, names, calls and what else it reads into its frame.

    Args:
      tokenizer: the policy's.
      messages: of the conversation.
      tools: offered in it.
      where: they are from, for errors.
    """
    if not isinstance(tokenizer, FileTokenizer):
        return
    templates = tokenizer.templates.values()
    outside: list[tuple[Any, str]] = [(tool, "tools") for tool in tools or ()]
    # The assistant writes tokens such as "<think>" itself: only those marked special are refused.
    by_assistant: list[tuple[Any, str]] = []
    for message in messages:
        for key, value in message.items():
            if key == "content" or (isinstance(value, str) and _PLAIN_NAME.fullmatch(value)):
                continue
            # An environment's own fields, which no template reads, may hold anything.
            if key not in MESSAGE_FIELDS and not any(str(key) in text for text in templates):
                continue
            written = message["role"] == ASSISTANT and key in ("tool_calls", "reasoning_content")
            (by_assistant if written else outside).append((value, key))
    controls = [(spelled_control(tokenizer, _as_text(value)), name) for value, name in by_assistant]
    controls += [((controls_in(tokenizer, value) or [""])[0], name) for value, name in outside]
    for control, name in controls:
        if control:
            raise UserError(
                f"{where}: {name} of the prompt spells the control token {control!r}, which the"
                " model would read as one; write it otherwise"
            )


def reads_variable(tokenizer: Tokenizer, name: str) -> bool:
    """Whether a chat template of a checkpoint reads a variable.

    A malformed template counts as one that does; rendering it says what is wrong.
    """
    templates = tokenizer.templates.values() if isinstance(tokenizer, FileTokenizer) else ()
    read = [variables_read(template) for template in templates]
    return any(names is None or name in names for names in read)


def check_variables(variables: Mapping[str, Any], tokenizer: Tokenizer, key: str) -> None:
    """Raises UserError for a variable that no chat template reads, or that the run sets.

    So is one refused whose text spells a control token, for a template writes it into its frame.

    Args:
      variables: of the template, by name.
      tokenizer: the policy's.
      key: that holds the variables, for the message.
    """
    for name, value in variables.items():
        reserved = name in ("messages", "tools", "add_generation_prompt", "template")
        if reserved or not reads_variable(tokenizer, name):
            why = "is set by the run" if reserved else "is not read by the chat template"
            raise UserError(f"{key}.{name} {why}; remove it, or correct its name")
        if control := (controls_in(tokenizer, value) or [""])[0]:
            raise UserError(
                f"{key}.{name} spells the control token {control!r}, which the model would read as"
                " one; write it otherwise"
            )


def controls_in(tokenizer: Tokenizer, value: Any) -> list[str]:
    """The control tokens that a template would write with a JSON value, also those not special."""
    if not isinstance(tokenizer, FileTokenizer):
        return []
    return tokenizer.controls(_as_text(value))


def _as_text(value: Any) -> str:
    """A text as it is, another value in JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def calling(
    names: Sequence[str], ids: Sequence[str], *, content: str | None, as_text: bool
) -> Message:
    """An assistant's message that calls tools.

    Templates read arguments as an object or as text that holds JSON, and a turn that says nothing
    as an empty content or as none.
    """
    arguments: Any = {"it": ANSWER}
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if as_text else arguments,
            },
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
        name_given = plain.get(key, other)
        if (
            not (isinstance(name_given, str) and _PLAIN_NAME.fullmatch(name_given))
            or ANSWER in name_given
        ):
            plain[key] = other
    return plain


def outside_spans(text: str, span: Span, pieces: Sequence[tuple[str, bool]]) -> list[Span]:
    """Positions in a text of the pieces of one untrusted content.

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
        if controls := tokenizer.controls(json.dumps(tool, ensure_ascii=False)):
            name = tool.get("function", {}).get("name", "")
            raise UserError(
                f"tool {name!r}: its description or schema spells the control token "
                f"{controls[0]!r}, which the model would read as one; write it otherwise"
            )
