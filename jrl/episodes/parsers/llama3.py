"""Llama 3: JSON objects, behind a control token or at the start of a line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from jrl.episodes.parsers.base import THOUGHT_END, Call, Malformed, Part, Schemas, family
from jrl.episodes.parsers.deepseek import BEGIN
from jrl.episodes.parsers.hermes import OPEN
from jrl.episodes.parsers.json_calls import (
    OBJECT,
    after_space,
    call_of,
    dumps,
    has_arguments,
    json_at,
)

_TAG = "<|python_tag|>"
_NAMED = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"\w*"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r'^[ \t]*(?=\{\s*"|```)', re.MULTILINE)
_MOST_OBJECTS = 16
"""Lines with an object that are tried as the first call behind words."""


def _scan(text: str, schemas: Schemas) -> Iterator[Part]:
    last, starts = 0, [0, *(match.end() for match in THOUGHT_END.finditer(text))]
    for start, limit in itertools.pairwise([*starts, len(text) + 1]):
        if start < last:
            continue  # the end of a thought inside a call is text
        for part in _calls_between(text, start, limit, schemas):
            yield part
            last = part.end


def _calls_between(text: str, start: int, limit: int, schemas: Schemas) -> Iterator[Part]:
    """The calls that begin in a part of a text: at once, behind the mark, or at a line's start."""
    at = after_space(text, start)
    tag = -1 if text.startswith("{", at) else text.find(_TAG, at, limit)
    if tag >= 0:
        at = tag + len(_TAG)
        value, end = json_at(text, at)
        yield Part(tag, end, call_of(value))
        at = limit if isinstance(value, Malformed) else _behind(text, end)
    elif not text.startswith("{", at):
        at = _line_of_call(text, at, limit, schemas)
    while at < limit and OBJECT.match(text, at):
        value, end = json_at(text, at)
        if not (tag >= 0 and isinstance(value, dict)) and not _on_offer(text, at, value, schemas):
            return  # an answer, or words after the calls
        yield Part(at, end, call_of(value))
        if isinstance(value, Malformed):
            return
        at = _behind(text, end)


def _behind(text: str, at: int) -> int:
    """The place of what follows a call: spaces, and signs that divide calls, are skipped."""
    while at < len(text) and (text[at].isspace() or text[at] in ";,"):
        at += 1
    return at


def _line_of_call(text: str, at: int, limit: int, schemas: Schemas) -> int:
    """Start of the first line that is a call of an offered tool, or ``limit``.

    What stands between fences is an example.
    """
    fenced, tries = False, 0
    for match in _LINE.finditer(text, at, limit):
        if text.startswith("```", match.end()):
            fenced = not fenced
        elif not fenced and tries < _MOST_OBJECTS:
            tries += 1
            value, _ = json_at(text, match.end())
            if isinstance(value, dict) and _on_offer(text, match.end(), value, schemas):
                return match.end()
    return limit


def _on_offer(text: str, at: int, value: Any, schemas: Schemas) -> bool:
    """Whether JSON calls a tool on offer; broken JSON where it begins with the tool's name."""
    if isinstance(value, Malformed):
        name = _NAMED.match(text, at)
        return name is not None and name[1] in schemas
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return value["name"] in schemas and has_arguments(value)


def _render(call: Call) -> str:
    return dumps({"name": call.name, "parameters": call.arguments})


LLAMA3 = family(
    "llama3", _scan, _render, template=("ipython", _TAG), others=("<function=", OPEN, BEGIN)
)
