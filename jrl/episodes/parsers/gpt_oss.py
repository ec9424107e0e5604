"""gpt-oss: messages of the harmony format, some of which are calls."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jrl.episodes.parsers.base import Call, Malformed, Part, Schemas, family, malformed
from jrl.episodes.parsers.json_calls import after_space, call_with, dumps, json_at

_HEAD = re.compile(
    r"(?:\A|<\|start\|>|<\|channel\|>)([^<]*(?:<\|(?:channel|constrain)\|>[^<]*){0,8})<\|message\|>"
)  # of a header without an end, every mark would be tried up to the text's
_END_OF_MESSAGE = re.compile(r"<\|call\|>|<\|end\|>|<\|return\|>|\Z")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CALL_END = "<|call|>"


def _scan(text: str, schemas: Schemas) -> Iterator[Part]:
    at = calls = 0
    while head := _HEAD.search(text, at):
        at = head.end()
        recipient = _RECIPIENT.search(head[1])
        if recipient is None:  # words, up to the mark that ends a message
            closing = _END_OF_MESSAGE.search(text, at)
            at = closing.end() if closing else at
            continue
        name = recipient[1]
        value, end = json_at(text, at)
        at_end = text.startswith(_CALL_END, after_space(text, end))
        complete = at_end or (isinstance(value, Malformed) and _CALL_END in text[at:])
        call = call_with(name, value) if complete else None
        calls += 1
        yield Part(head.start(), end, call or malformed(f"{_CALL_END} is missing", name))
        at = max(at, end)
    if not calls and _RECIPIENT.search(text, at):
        yield Part(at, at, malformed("<|message|> is missing"))


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _channels(text: str) -> tuple[str, str] | None:
    """The text of the channel "analysis" (thinking), and that of the others."""
    texts: dict[bool, list[str]] = {True: [], False: []}
    at = 0
    while head := _HEAD.search(text, at):
        end = _END_OF_MESSAGE.search(text, head.end())
        at = end.end() if end else len(text)
        channel = _CHANNEL.search(head[0])
        message = text[head.end() : end.start() if end else at]
        texts[channel is not None and channel[1] == "analysis"].append(message)
    if not at and _CHANNEL.match(text) is None:
        return None
    thinking, answer = ("\n".join(filter(None, texts[key])) for key in (True, False))
    return thinking, answer


def _render(call: Call) -> str:
    body = dumps(call.arguments, mark="<")
    return (
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{body}<|call|>"
    )


GPT_OSS = family(
    "gpt_oss", _scan, _render, template=("<|channel|>",), ends_turn=True, channels=_channels
)
