"""DeepSeek V3 and R1: a name and JSON arguments between control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jrl.episodes.parsers.base import Call, Malformed, Part, Schemas, family, malformed
from jrl.episodes.parsers.json_calls import after_space, call_with, dumps, json_at


def _token(words: str) -> str:
    """A control token of DeepSeek's, written with wide bars and low lines of its own."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


BEGIN, _END, _SEP = (_token(f"tool {words}") for words in ("call begin", "call end", "sep"))
_FENCE_BEGIN = re.compile(r"([^\n`]*)\n```json\n")  # the older form: "function", separator, name
_FENCE_END = re.compile(r"\s*```")
_MARK = re.compile(rf"(?:{re.escape(_token('tool calls begin'))}\s*)?{re.escape(BEGIN)}")


def _scan(text: str, schemas: Schemas) -> Iterator[Part]:
    at = 0
    while mark := _MARK.search(text, at):
        at = mark.end()
        separator, again = text.find(_SEP, at), text.find(BEGIN, at)
        if separator < 0 or 0 <= again < separator:
            yield Part(mark.start(), at, malformed(f"{_SEP} is missing"), again >= 0)
            continue
        name, body = text[at:separator].strip(), separator + len(_SEP)
        fence = _FENCE_BEGIN.match(text, body) if name == "function" else None
        if fence:
            name, body = fence[1].strip(), fence.end()
        value, end = json_at(text, body)
        if fence and (close := _FENCE_END.match(text, end)):
            end = close.end()
        if not isinstance(value, Malformed) and text.startswith(_END, after_space(text, end)):
            call = call_with(name, value)
        elif _END not in text[body:]:
            call = malformed(f"{_END} is missing")
        else:
            call = malformed("the arguments must be a JSON object")
            call = value if isinstance(value, Malformed) else call
        call = call if name else malformed("a call without the name of a tool")
        yield Part(mark.start(), end, call)
        at = max(body, end)


def _render(call: Call) -> str:
    body = dumps(call.arguments, mark="<")
    one = f"{BEGIN}{call.name}{_SEP}{body}{_END}"
    return _token("tool calls begin") + one + _token("tool calls end")


DEEPSEEK = family("deepseek", _scan, _render, template=(BEGIN,))
