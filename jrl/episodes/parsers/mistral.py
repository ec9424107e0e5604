"""Mistral: a list of JSON objects, or a name and JSON arguments, behind [TOOL_CALLS]."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jrl.episodes.parsers.base import Call, Malformed, Part, Schemas, family, malformed
from jrl.episodes.parsers.json_calls import call_of, call_with, dumps, json_at

_MARK = "[TOOL_CALLS]"
# Possessive: spaces without end, which a policy may write, would be tried in every division.
_HEAD = re.compile(r"\s*+([^\s\[\]{}]++)\s*+(?:\[CALL_ID\](\w*+))?(?:\[ARGS\])?\s*+(?=\{)")
_NEXT = re.compile(r"[\s,;]*+(?=[\[{]\s*+[\"{])")
"""A further object or list behind one."""
_LIST = re.compile(r"\s*[\[{]")


def _scan(text: str, schemas: Schemas) -> Iterator[Part]:
    mark = text.find(_MARK)
    while mark >= 0:
        at = mark + len(_MARK)
        head = _HEAD.match(text, at)
        value, end = json_at(text, head.end() if head else at)
        if head:  # from version 11 of the format on
            call = call_with(head[1], value)
            call = call._replace(id=head[2] or "") if isinstance(call, Call) else call
            yield Part(mark, end, call)
        else:
            while True:
                items = value if isinstance(value, list) else [value]
                for item in items:
                    yield Part(mark, end, call_of(item), _LIST.match(text, at) is None)
                if not items:
                    yield Part(mark, end, malformed("[TOOL_CALLS] without a call"))
                further = None if isinstance(value, Malformed) else _NEXT.match(text, end)
                if further is None:
                    break
                value, end = json_at(text, further.end())
        mark = text.find(_MARK, max(at, end))


def _render(call: Call) -> str:
    value = {"name": call.name, "arguments": call.arguments}
    body = dumps(value | ({"id": call.id} if call.id else {}), mark=_MARK)
    return f"{_MARK}[{body}]"


MISTRAL = family(
    "mistral",
    _scan,
    _render,
    template=(_MARK,),
    list_tags=("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)
