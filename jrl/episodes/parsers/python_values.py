"""Python that a policy wrote: its statements, and literals as JSON values."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

from jrl.episodes.parsers.base import Malformed, malformed

_LONGEST = 1 << 16
"""Characters of Python that are parsed at most; the parser's memory grows a hundredfold."""


def statements(body: str) -> list[ast.stmt] | Malformed:
    """The statements of a code, which is read and never run."""
    if len(body) > _LONGEST:
        return malformed(f"longer than {_LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(body.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return malformed(f"not Python: {error}")


_WORDS = {"true": True, "false": False, "null": None}


class _JsonWords(ast.NodeTransformer):
    """Reads JSON's words for truth and nothing as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def value_of(node: ast.expr) -> Any:
    """The JSON value of a Python literal, or ``Malformed``; tuples become lists."""
    try:
        value = ast.literal_eval(_JsonWords().visit(node))
        # Sets and bytes are Python, but no arguments.
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return malformed("not a literal")


def literal(text: str) -> Any:
    """The JSON value of a text that is a Python literal, or ``Malformed``."""
    lines = statements(text)
    if isinstance(lines, Malformed) or len(lines) != 1:
        return malformed("not a literal")
    node = lines[0]
    return value_of(node.value) if isinstance(node, ast.Expr) else malformed("not a literal")
