"""Tests of programs in the layouts of published data sets, and the judgement of what they gave.

Imports no JAX.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jrl.errors import UserError

Form = Literal["stdin", "call", "unit"]

COLUMNS = ("input_output", "tests", "test_cases", "unit_tests", "answer")
"""Columns in which tests are looked for, beside MBPP's ``test_list`` and HumanEval's ``test``."""
_LAYOUTS = (
    'give {"inputs": [..], "outputs": [..]}, with "fn_name" for calls, a list of {"input": ..,'
    ' "output": ..}, or a list of asserts'
)


class Case(NamedTuple):
    """One test.

    Attributes:
      sent: what the driver gets: the text for standard input; a list of arguments; ["value",
        expression] or ["assert", statements].
      expected: the output as text, or the value; None for an assert that runs inside.
      compare: of the value, and ``expected``.
    """

    sent: Any
    expected: Any
    compare: Callable[[Any, Any], Any] | None = None


class Tests(NamedTuple):
    """The tests of one row.

    Attributes:
      form: "stdin", "call" or "unit".
      cases: at least one.
      function: the name of the function that "call" calls.
      setup: source that runs after the program in "unit".
    """

    form: Form
    cases: list[Case]
    function: str = ""
    setup: str = ""


def tests_of(meta: Mapping[str, Any], answer: Any, column: str, row: int) -> Tests:
    """The tests of a row.

    Args:
      meta: the columns of the row.
      answer: its answer.
      column: that holds the tests; "" for the first of ``COLUMNS`` that is there, after MBPP's
        ``test_list`` and HumanEval's ``test``.
      row: which row it is, from 1, for messages.

    Raises:
      UserError: there are none, or they are of no layout that is known.
    """
    columns = {**meta, "answer": answer}
    names = [column] if column else ["test_list", "test", *COLUMNS]
    name = next((n for n in names if columns.get(n) not in (None, "", [])), None)
    if name is None:
        raise UserError(
            f"rewards.code: row {row} has no tests in {', '.join(names)}; {_LAYOUTS}, or name the"
            " column with rewards.code.column"
        )
    value = columns[name]
    if isinstance(value, str) and meta.get("entry_point"):
        called = f"{value}\n\ncheck({meta['entry_point']})\n"
        return Tests("unit", [Case(["assert", called], None)])
    try:
        tests = _parsed(value, columns)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise UserError(
            f"rewards.code: column {name!r} of row {row} holds {str(value)[:60]!r}, which are no"
            f" tests ({error}); {_LAYOUTS}"
        ) from None
    if not tests.cases:
        raise UserError(f"rewards.code: column {name!r} of row {row} holds no test; {_LAYOUTS}")
    return tests


def _parsed(value: Any, columns: Mapping[str, Any]) -> Tests:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            ast.parse(value)
            value = [value]
    if isinstance(value, Mapping):
        inputs, outputs = list(value["inputs"]), list(value["outputs"])
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
        return _pairs(inputs, outputs, value.get("fn_name") or "")
    items = list(value)
    if all(isinstance(item, str) for item in items):
        setup = _sources(columns.get("test_setup_code")) + _sources(columns.get("test_imports"))
        return Tests("unit", [assert_case(item) for item in items], setup=setup)
    function = next((item["fn_name"] for item in items if item.get("fn_name")), "")
    return _pairs([i["input"] for i in items], [i["output"] for i in items], function)


def _sources(value: Any) -> str:
    lines = [value] if isinstance(value, str) else list(value or ())
    return "".join(f"{line}\n" for line in lines)


def _pairs(inputs: list[Any], outputs: list[Any], function: str) -> Tests:
    if not function:
        pairs = zip(map(_text, inputs), map(_text, outputs), strict=True)
        return Tests("stdin", [Case(sent, output) for sent, output in pairs])
    cases = [Case(_arguments(a), _loaded(b)) for a, b in zip(inputs, outputs, strict=True)]
    return Tests("call", cases, function=function)


def _text(value: Any) -> str:
    """Input or output as one text; some rows hold lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _arguments(value: Any) -> list[Any]:
    """A call's arguments: a list, or a text with the JSON of one in each line (LiveCodeBench)."""
    if isinstance(value, str):
        return [_loaded(line) for line in value.splitlines() if line.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _loaded(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


# ---------------------------------------------------------------- asserts

_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{"set": set, "frozenset": frozenset, "list": list, "tuple": tuple, "sorted": sorted},
    "dict": dict,
}


def assert_case(source: str) -> Case:
    """A test of an assert.

    Where it compares something with a literal, that something is evaluated inside and compared
    outside, so that the literal stays outside; any other runs inside as it is.

    >>> assert_case("assert add(1, 2) == 3").sent
    ['value', 'add(1, 2)']
    >>> assert_case("assert is_close(add(1, 2), 3)").sent[0]
    'assert'
    """
    body = ast.parse(source).body
    test = body[0].test if len(body) == 1 and isinstance(body[0], ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        compare = _OPERATORS.get(type(test.ops[0]))
        try:
            expected = _literal(test.comparators[0])
        except (ValueError, TypeError, SyntaxError):
            compare = None
        if compare is not None:
            return Case(["value", ast.unparse(test.left)], expected, compare)
    return Case(["assert", source], None)


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of ``set([..])`` and its like."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _MAKERS
        and len(node.args) == 1
        and not node.keywords
    ):
        return _MAKERS[node.func.id](_literal(node.args[0]))
    return ast.literal_eval(node)


# ---------------------------------------------------------------- judging


def passes(tests: Tests, case: Case, how: str, text: str, tolerance: float) -> bool:
    """Whether a test is passed.

    Args:
      tests: of the row.
      case: the test.
      how: as the driver said that it ended.
      text: what it reported.
      tolerance: of numbers, absolute or relative.
    """
    if how != "ok":
        return False
    if tests.form == "stdin":
        return same_output(text, case.expected, tolerance)
    if case.sent and case.sent[0] == "assert" and tests.form == "unit":
        return True
    try:
        value = ast.literal_eval(text)
        if case.compare is not None:
            return bool(case.compare(value, case.expected))
        return same_value(value, case.expected, tolerance) or (
            # APPS has answers in a list of one
            isinstance(case.expected, list)
            and len(case.expected) == 1
            and same_value(value, case.expected[0], tolerance)
        )
    except (ValueError, SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return False


def same_output(text: str, expected: str, tolerance: float) -> bool:
    r"""Whether two outputs agree, line by line and word by word.

    Spaces between and after words do not count, nor do empty lines at the end. A word with a point
    or an exponent is a number, within the tolerance.

    >>> same_output("1 2.0000001 \n\n", "1 2.0\n", 1e-6), same_output("1 2", "1\n2", 1e-6)
    (True, False)
    """
    lines, expected_lines = _lines(text), _lines(expected)
    return len(lines) == len(expected_lines) and all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(lines, expected_lines, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(a: str, b: str, tolerance: float) -> bool:
    if a == b:
        return True
    if not any(c in a + b for c in ".eE"):
        return False  # whole numbers are exact, however large
    try:
        return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values agree; lists and tuples are the same, and so are keys and their texts."""
    if isinstance(value, float) or isinstance(expected, float):
        numbers = [x for x in (value, expected) if isinstance(x, int | float)]
        return len(numbers) == 2 and (
            value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        )
    if _is_sequence(value) and _is_sequence(expected):
        return len(value) == len(expected) and all(
            same_value(a, b, tolerance) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, Mapping):
        mine = {str(key): x for key, x in value.items()}
        theirs = {str(key): x for key, x in expected.items()}
        return mine.keys() == theirs.keys() and all(
            same_value(x, theirs[key], tolerance) for key, x in mine.items()
        )
    return bool(value == expected)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
