"""Calls that are JSON values, read from the character where they begin."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jrl.episodes.parsers.base import Call, Malformed, malformed

_SPACE = re.compile(r"\s*")


def dumps(value: Any, mark: str = "") -> str:
    """JSON of a value. A mark in its strings begins with an escape: other readers search for it."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace(mark, f"\\u{ord(mark[0]):04x}{mark[1:]}") if mark else text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits[:40])


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a character, after white space, and where it ends.

    A value that cannot be read is ``Malformed``, and ends where it should begin.
    """
    at = after_space(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return malformed(f"not JSON: {error}"), at


def after_space(text: str, at: int) -> int:
    """The first character from ``at`` on that is no white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def json_value(text: str) -> Any:
    """The value of a text, or ``Malformed``."""
    value, end = json_at(text, 0)
    if isinstance(value, Malformed) or not text[end:].strip():
        return value
    return malformed(f"not JSON: extra data: {text[end:]!r:.40}")


def _without_surrogates(value: Any) -> Any:
    """A JSON value without lone surrogates, which cannot be encoded: they become U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


_ARGUMENTS = ("arguments", "parameters")
_BESIDE = {"name", "id", "type"}
OBJECT = re.compile(r'\s*\{\s*["}]')
"""Beginning of a JSON object, leading white space included."""


def call_of(value: Any) -> Call | Malformed:
    """A call from {"name": ..., "arguments": ...}; arguments may be text that holds JSON."""
    if isinstance(value, Malformed):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return malformed('a call is a JSON object with a "name"')
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if not has_arguments(value):
        return malformed('the arguments of a call are the object "arguments"', value["name"])
    call = call_with(value["name"], arguments)
    call_id = value.get("id")
    if isinstance(call, Call) and isinstance(call_id, str):
        return call._replace(id=_without_surrogates(call_id))
    return call


def has_arguments(value: Mapping[str, Any]) -> bool:
    """Whether an object has arguments where a call has them, or none at all."""
    return any(key in value for key in _ARGUMENTS) or value.keys() <= _BESIDE


def call_with(name: str, arguments: Any) -> Call | Malformed:
    """The call of a tool; its arguments are an object, JSON of one, or nothing."""
    name = _without_surrogates(name)
    if arguments is None or arguments == "":  # so OpenAI's clients write none
        arguments = {}
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    if isinstance(arguments, Malformed):
        return arguments._replace(name=name)
    if not isinstance(arguments, dict):
        return malformed("the arguments must be a JSON object", name)
    try:
        return Call(name, _without_surrogates(arguments))
    except RecursionError:
        return malformed("the arguments are nested too deeply", name)
