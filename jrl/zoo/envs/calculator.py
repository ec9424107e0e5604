"""A calculator for the policy: arithmetic read as Python's, with bounds on everything."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

from jrl.episodes.tools import Tool, ToolError, one_text

_LONGEST, _MOST_BITS = 1000, 4096
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}


def calculate(expression: str) -> int | float:
    """The value of an arithmetic expression: + - * / // % **, brackets and a few functions.

    Args:
      expression: at most 1,000 characters; "^" is read as "**", "," between digits is not.

    Raises:
      ToolError: it is no such expression, or its value has more than 4,096 bits.

    >>> calculate("2 * (3 + 4) ** 2")
    98
    """
    if len(expression) > _LONGEST:
        raise ToolError(f"an expression has at most {_LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r:.80} is not arithmetic") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(str(error)) from None


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        value = -inner if isinstance(node.op, ast.USub) else inner
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_value(node.left), _value(node.right))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.Name) and node.id in ("pi", "e"):
        value = getattr(math, node.id)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise ToolError(f"there is no function {node.func.id}; use {', '.join(_FUNCTIONS)}")
        value = _FUNCTIONS[node.func.id](*map(_value, node.args))
    else:
        raise ToolError("only numbers, + - * / // % **, brackets and functions are allowed")
    if isinstance(value, complex) or type(value) not in (int, float):
        raise ToolError("the value is not a real number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ToolError(f"a number has more than {_MOST_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("a number is too large")
    return value


def _power(base: int | float, exponent: int | float) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    # Before it is computed: 9**9**9 has 369 million digits.
    if whole and abs(exponent) * int(base).bit_length() > 2 * _MOST_BITS:
        raise ToolError(f"a number has more than {_MOST_BITS} bits")
    return base**exponent


def calculator_tool() -> Tool:
    """``calculate`` as a tool with one argument, "expression"."""

    async def call(expression: str) -> str:
        return str(calculate(expression))

    return Tool(
        name="calculator",
        description="Computes an arithmetic expression.",
        parameters=one_text("expression", description="such as 2 * (3 + 4) ** 2"),
        call=call,
    )
