"""Gemma 3: lines of Python between fences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jrl.episodes.parsers.base import Call, Malformed, Part, Schemas, family, malformed
from jrl.episodes.parsers.json_calls import call_with
from jrl.episodes.parsers.python_values import statements, value_of

_CODE_BEGIN, _CODE_END = re.compile(r"```tool_code[ \t\r]*\n"), "```"
_MOST_FENCES = 16
"""Closing fences that are tried; one inside a string leaves the code before it unfinished."""


def _scan(text: str, schemas: Schemas) -> Iterator[Part]:
    at = 0
    while mark := _CODE_BEGIN.search(text, at):
        calls, at = _code_at(text, mark.end())
        for call in calls:
            yield Part(mark.start(), at, call)


def _code_at(text: str, begin: int) -> tuple[list[Call | Malformed], int]:
    """The calls of a block of code, and where its closing fence ends."""
    first: tuple[list[Call | Malformed], int] | None = None
    close = begin
    for _ in range(_MOST_FENCES):
        close = text.find(_CODE_END, close)
        if close < 0:
            break
        body = text[begin:close]
        close += len(_CODE_END)
        lines = statements(body)
        if not isinstance(lines, Malformed):
            calls = [_python_call(node) for line in lines for node in _expressions(line)]
            return calls or [malformed("tool_code without a call")], close
        first = first or ([lines], close)
    return first or ([malformed("``` is missing")], len(text))


def _expressions(statement: ast.stmt) -> Sequence[ast.expr | None]:
    """The expression of a line, or those of the list that it is."""
    node = statement.value if isinstance(statement, ast.Expr) else None
    return node.elts if isinstance(node, ast.List) and node.elts else [node]


def _python_call(node: ast.expr | None) -> Call | Malformed:
    """The call of a line such as ``name(a=1)`` or ``print(name(a=1))``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        node = node.args[0] if len(node.args) == 1 and not node.keywords else None
    if not isinstance(node, ast.Call):
        return malformed("each line must be one call, name(argument=value)")
    try:
        name = ast.unparse(node.func)
    except (ValueError, RecursionError, MemoryError):
        return malformed("each line must be one call, name(argument=value)")
    if node.args or not all(k.arg for k in node.keywords):
        return malformed("arguments must be given by name", name)
    names = [keyword.arg for keyword in node.keywords]
    if len(set(names)) < len(names):
        return malformed("an argument is there twice", name)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        value = value_of(keyword.value)
        if isinstance(value, Malformed):
            return malformed(f"arguments must be JSON values: {keyword.arg}", name)
        arguments[str(keyword.arg)] = value
    return call_with(name, arguments)


def _render(call: Call) -> str:
    inside = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
    # Backquotes stand in strings alone; other readers of this format search for the fence.
    body = f"{call.name}({inside})".replace("`", "\\x60")
    return f"```tool_code\n{body}\n```"


GEMMA = family(
    "gemma",
    _scan,
    _render,
    role="user",
    result=lambda text: f"```tool_output\n{text}\n```",
    template=("<start_of_turn>",),
)
