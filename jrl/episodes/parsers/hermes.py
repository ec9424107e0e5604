"""Hermes, Qwen 2.5 and Qwen 3: a JSON object between <tool_call> and </tool_call>."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from jrl.episodes.parsers.base import Call, Malformed, Part, Schemas, family, malformed
from jrl.episodes.parsers.json_calls import OBJECT, after_space, call_of, dumps, json_at

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LIST_TAGS = ("<tools>\n", "\n</tools>")
Read = Callable[[str, int], tuple[Call | Malformed, int]]
"""(text, start of a call) -> (the call, its end). A broken call ends where it starts."""


def tagged(
    text: str, read: Read, first: re.Pattern[str], bare: re.Pattern[str] | None = None
) -> Iterator[Part]:
    """The calls after <tool_call>.

    Args:
      text: of a turn.
      read: reads one call.
      first: what a call begins with. So may another one behind it, before the closing tag.
      bare: how a call may begin without the tag.
    """
    at = 0
    while True:
        starts = [(text.find(OPEN, at), OPEN)]
        if bare is not None and (match := bare.search(text, at)):
            starts.append((match.start(), ""))
        start, mark = min(((i, m) for i, m in starts if i >= 0), default=(-1, ""))
        if start < 0:
            return
        begin = at = start + len(mark)
        close, again = text.find(CLOSE, at), text.find(OPEN, at)
        word = first.match(text, at) is None and (close < 0 or 0 <= again < close)
        call, end = read(text, at)
        while isinstance(call, Call) and first.match(text, end):
            yield Part(start, end, call)
            start, (call, end) = end, read(text, end)
        closed = text.startswith(CLOSE, after_space(text, end))
        if isinstance(call, Call) and mark and not closed:
            close, again = text.find(CLOSE, end), text.find(OPEN, end)
            closed = close >= 0 and not 0 <= again < close
        if mark and not closed and CLOSE not in text[at:]:
            call = malformed(f"{CLOSE} is missing")
        yield Part(start, end, call, word)
        # After a broken call the search goes on inside it: where it ends is not known.
        at = max(end, begin + (not mark))


def _scan(text: str, schemas: Schemas) -> Iterator[Part]:
    def read(text: str, at: int) -> tuple[Call | Malformed, int]:
        value, end = json_at(text, at)
        return call_of(value), end

    return tagged(text, read, OBJECT)


def _render(call: Call) -> str:
    body = dumps({"name": call.name, "arguments": call.arguments}, mark="<")
    return f"{OPEN}\n{body}\n{CLOSE}"


HERMES = family(
    "hermes",
    _scan,
    _render,
    template=(OPEN,),
    others=("<parameter=", "<arg_key>"),  # Qwen3-Coder's, and GLM's
    list_tags=LIST_TAGS,
)
