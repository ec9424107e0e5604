"""Qwen3-Coder: parameters without quotes, each between tags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jrl.episodes.parsers.base import Call, Malformed, Part, Schemas, family, malformed
from jrl.episodes.parsers.hermes import CLOSE, LIST_TAGS, OPEN, tagged
from jrl.episodes.parsers.json_calls import call_with, dumps, json_value
from jrl.episodes.parsers.python_values import literal
from jrl.episodes.schemas import JSON_TYPES, allowed_kinds, resolved

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
# Strings are not quoted here, so the end of a value is a closing tag that something follows which
# may follow a value. A closing tag in the middle of a text is text.
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>|\Z))")
# A tag that may follow a value; the space before </function> is removed afterwards, since a search
# for space would begin at every one.
_UNCLOSED = re.compile(r"\n?(?=\n<parameter=[^>\n]+>\n)|</function>\s*+(?:</tool_call>|\Z)")
_FUNCTION_END = re.compile(r"\s*</function>")


def _scan(text: str, schemas: Schemas) -> Iterator[Part]:
    def read(text: str, at: int) -> tuple[Call | Malformed, int]:
        head = _FUNCTION.match(text, at)
        if head is None:
            return malformed("a call is <function=NAME> ... </function>"), at
        name, begin, at = head[1].strip(), at, head.end()
        schema = schemas.get(name, {})
        types = schema.get("properties", {})
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, at):
            value, at = _parameter_value(text, parameter.end())
            key = parameter[1].strip()
            arguments[key] = _typed(value, resolved(types.get(key, {}), schema), schema)
        end = _FUNCTION_END.match(text, at)
        if end is None:
            rest = text[at:].partition("</function>")[0]
            return malformed(f"not a <parameter=...>: {rest.strip()!r:.60}", name), begin
        return call_with(name, arguments), end.end()

    offered = "|".join(map(re.escape, schemas))
    bare = re.compile(rf"^[ \t]*<function=(?:{offered})>", re.MULTILINE) if offered else None
    return tagged(text, read, _FUNCTION, bare)


def _parameter_value(text: str, at: int) -> tuple[str, int]:
    """The text of a parameter, and where its closing tag ends; the tag may be missing."""
    closed, unclosed = _VALUE_END.search(text, at), _UNCLOSED.search(text, at)
    if unclosed:
        begin, end = unclosed.span()
        if unclosed[0].startswith("<"):
            begin = end = at + len(text[at:begin].rstrip())
        between = text[at : closed.start()] if closed else ""
        if closed is None or (begin < closed.start() and "\n<parameter=" in between):
            return text[at:begin], end
    if closed:
        return text[at : closed.start()], closed.end()
    return text[at:], len(text)


_TRUTHS = {"true": True, "false": False, "null": None, "none": None}


def _typed(text: str, schema: Any, root: Any) -> Any:
    """The value of a parameter that is written without quotes, by its schema.

    JSON and Python literals are read where the schema allows their type; any other text is text.
    """
    kinds = allowed_kinds(schema, root)
    if kinds == {"string"}:
        return text
    value = json_value(text)
    if not kinds:
        return text if isinstance(value, Malformed) else value
    checks = [JSON_TYPES[kind] for kind in kinds - {"string"} if kind in JSON_TYPES]
    for candidate in (value, literal(text), _TRUTHS.get(text.strip().lower(), value)):
        if not isinstance(candidate, Malformed) and any(fits(candidate) for fits in checks):
            return candidate
    if isinstance(value, Malformed) or "string" in kinds:
        return text
    return value  # of a type that the schema does not allow, which ``check_call`` will say


def _render(call: Call) -> str:
    lines = [f"{OPEN}\n<function={call.name}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else dumps(value)
        lines.append(f"<parameter={name}>\n{text}\n</parameter>")
    return "\n".join([*lines, f"</function>\n{CLOSE}"])


QWEN3_CODER = family("qwen3_coder", _scan, _render, template=("<parameter=",), list_tags=LIST_TAGS)
