"""Trip counts of the computations in a compiled program.

XLA's own analysis counts the body of a loop once. Here it counts as often as it runs: the loop's
counter is followed from its start, by its step, to the bound that its condition compares it with.
The branches of a conditional count once together, in equal parts.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jrl.plan.hlo import HloProgram, Operation, called_as, called_computations, known_trips

Value = int | None
"""An integer, or None where it does not follow from constants."""

_PASSED_ON = frozenset(
    ("copy", "convert", "bitcast", "reshape", "copy-start", "copy-done", "optimization-barrier")
)
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    **{"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge},
    **{"EQ": operator.eq, "NE": operator.ne},
}


class Scope:
    """A computation with what is known of its parameters; values are found once each.

    Args:
      program: that the computation is part of.
      operations: of the computation.
      state: what its one parameter, a tuple, holds, as in the body of a loop.
      caller: otherwise, where it is called from, and the names of its parameters there.
    """

    def __init__(
        self,
        program: HloProgram,
        operations: Mapping[str, Operation],
        state: Sequence[Value] = (),
        caller: tuple[Scope, Sequence[str]] | None = None,
    ) -> None:
        self.program, self.operations = program, operations
        self._state, self._caller = state, caller
        self._values: dict[tuple[str, int | None], Value] = {}
        self._below: dict[str, tuple[Scope, str] | None] = {}

    def inside(self, operation: Operation) -> tuple[Scope, str] | None:
        """The computation of a fusion or call, and the name of its result there."""
        if operation.name not in self._below:
            names = [n for n in called_computations(operation) if n in self.program.computations]
            inner = None
            if len(names) == 1:
                operations = self.program.computations[names[0]]
                scope = Scope(self.program, operations, caller=(self, operation.operands))
                inner = scope, result_of(operations)
            self._below[operation.name] = inner
        return self._below[operation.name]

    def value(self, name: str) -> Value:
        """The integer that an operation makes, if it follows from constants and known ones."""
        if (name, None) not in self._values:
            operation = self.operations.get(name)
            scalar = (
                operation is not None
                and len(operation.outputs) == 1
                and not operation.outputs[0].sizes
            )
            self._values[name, None] = self._made(operation) if operation and scalar else None
        return self._values[name, None]

    def element(self, name: str, index: int) -> Value:
        """Value of an element of the tuple that an operation makes."""
        if (name, index) not in self._values:
            operation = self.operations.get(name)
            self._values[name, index] = self._part(operation, index) if operation else None
        return self._values[name, index]

    def _made(self, operation: Operation) -> Value:
        if operation.kind == "constant":
            return _constant(operation.text)
        if operation.kind == "parameter" and self._caller is not None:
            scope, names = self._caller
            return scope.value(names[_number(operation)])
        if operation.kind == "get-tuple-element":
            return self.element(operation.operands[0], _index(operation))
        if operation.kind in _PASSED_ON and operation.operands:
            return self.value(operation.operands[0])
        if operation.kind in ("fusion", "call"):
            below = self.inside(operation)
            return None if below is None else below[0].value(below[1])
        return self._computed(operation)

    def _part(self, operation: Operation, index: int) -> Value:
        if operation.kind == "tuple" or (
            operation.kind == "optimization-barrier" and len(operation.operands) > 1
        ):
            return (
                self.value(operation.operands[index]) if index < len(operation.operands) else None
            )
        if operation.kind == "optimization-barrier":
            return self.element(operation.operands[0], index)
        if operation.kind == "parameter" and self._caller is not None:
            scope, names = self._caller
            return scope.element(names[_number(operation)], index)
        if operation.kind == "parameter":
            return self._state[index] if index < len(self._state) else None
        if operation.kind in ("fusion", "call"):
            below = self.inside(operation)
            return None if below is None else below[0].element(below[1], index)
        return None

    def _computed(self, operation: Operation) -> Value:
        if operation.kind not in _ARITHMETIC and operation.kind not in ("select", "compare"):
            return None
        values = [self.value(name) for name in operation.operands]
        if operation.kind == "select" and len(values) == 3 and values[0] is not None:
            return values[1] if values[0] else values[2]
        if len(values) != 2:
            return None
        a, b = values
        if a is None or b is None:
            return None
        if operation.kind == "compare":
            return int(_COMPARISONS[_direction(operation)](a, b))
        return _ARITHMETIC[operation.kind](a, b)


def result_of(operations: Mapping[str, Operation]) -> str:
    """The name of the operation whose result is the computation's: the one marked as root."""
    root = [name for name, each in operations.items() if each.root]
    return root[0] if root else list(operations)[-1]


def _constant(text: str) -> Value:
    number = re.match(r"constant\((-?\d+|true|false)\)", text)
    if number is None:
        return None
    return {"true": 1, "false": 0}.get(number[1]) if number[1][0] in "tf" else int(number[1])


def _number(operation: Operation) -> int:
    return int(operation.text.removeprefix("parameter(").split(")")[0])


def _index(operation: Operation) -> int:
    index = re.search(r"index=(\d+)", operation.text)
    assert index is not None
    return int(index[1])


def _direction(operation: Operation) -> str:
    direction = re.search(r"direction=(\w+)", operation.text)
    assert direction is not None
    return direction[1]


# ---------------------------------------------------------------- runs


def computation_runs(
    program: HloProgram, trips: Mapping[str, int] = MappingProxyType({})
) -> dict[str, float]:
    """The run count of each computation, the entry and the bodies of loops, by name.

    Args:
      program: compiled.
      trips: iterations of loops that end early, by the ``jax.named_scope`` that they are traced in.
    """
    runs: dict[str, float] = defaultdict(float)
    entry = Scope(program, program.computations[program.entry])
    _count_runs(entry, program.entry, 1.0, runs, trips)
    return runs


def _count_runs(
    scope: Scope, name: str, times: float, runs: dict[str, float], trips: Mapping[str, int]
) -> None:
    """Adds the runs of a computation and of those that it calls outside fusions."""
    runs[name] += times
    program = scope.program

    def below(computation: str, count: float, **values: Any) -> None:
        inner = Scope(program, program.computations[computation], **values)
        _count_runs(inner, computation, count, runs, trips)

    for operation in scope.operations.values():
        if operation.kind == "while":
            loop = read_loop(scope, operation, trips)
            for callee in (loop.body, loop.condition):
                below(callee, times * loop.trips, state=loop.fixed)
        elif operation.kind == "conditional":
            branches = [c for c in called_computations(operation) if c in program.computations]
            for branch in branches:
                below(branch, times / len(branches))
        elif operation.kind in ("call", "async-start"):
            for callee in called_computations(operation):
                below(callee, times, caller=(scope, operation.operands))


class Loop(NamedTuple):
    """A loop.

    Attributes:
      body: name of the computation that it repeats.
      condition: name of the computation that says whether to continue.
      trips: the most iterations.
      fixed: the integers that it carries and does not change; None for the others.
    """

    body: str
    condition: str
    trips: float
    fixed: tuple[Value, ...]


def read_loop(scope: Scope, loop: Operation, trips: Mapping[str, int]) -> Loop:
    """The loop that an operation is.

    Its trip count is the one given for its scope, or XLA's own. Otherwise it follows from the start
    and the step of the counters that the condition compares; a counter whose start is not known is
    taken to start at 0. A loop without any bound counts once.
    """
    body, condition = called_as(loop, "body"), called_as(loop, "condition")
    start = tuple(scope.element(loop.operands[0], i) for i in range(len(loop.outputs)))
    after, later = _turn(scope.program, body, start)
    fixed = tuple(a if a == b else None for a, b in zip(start, after, strict=True))
    # The innermost scope alone: a loop in the body of a named one has a scope of its own or none.
    match = re.search(r'op_name="(?:[^"]*/)?([^"/]+)/while"', loop.text)
    if match is not None and match[1] in trips:
        return Loop(body, condition, float(trips[match[1]]), fixed)
    if (count := known_trips(loop)) is not None:
        return Loop(body, condition, float(count), fixed)
    count = _least(scope.program, condition, start, after, later)
    if count is None:
        scalar = [b.dtype[:1] in "su" and not b.sizes for b in loop.outputs]
        start = tuple(0 if x is None and s else x for x, s in zip(start, scalar, strict=True))
        after, later = _turn(scope.program, body, start)
        count = _least(scope.program, condition, start, after, later)
    return Loop(body, condition, 1.0 if count is None else float(count), fixed)


def _turn(
    program: HloProgram, body: str, start: tuple[Value, ...]
) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """A loop's carried values after one iteration and after two."""
    operations, states = program.computations[body], [start]
    result = result_of(operations)
    for _ in range(2):
        scope = Scope(program, operations, states[-1])
        states.append(tuple(scope.element(result, i) for i in range(len(start))))
    return states[1], states[2]


def _least(program: HloProgram, condition: str, *states: tuple[Value, ...]) -> int | None:
    """The fewest turns after which one of the condition's comparisons fails; None for no bound.

    Args:
      program: that the loop is part of.
      condition: name of the computation.
      states: what the loop carries at its start, after one turn and after two.
    """
    operations = program.computations[condition]
    scopes = [Scope(program, operations, state) for state in states]
    failures = [_failure(*each) for each in _comparisons(scopes, result_of(operations))]
    return min((n for n in failures if n is not None), default=None)


def _comparisons(
    scopes: Sequence[Scope], name: str
) -> Iterator[tuple[str, list[tuple[Value, Value]]]]:
    """The comparisons that must all hold for a result to be true, with both sides' values."""
    operation = scopes[0].operations.get(name)
    if operation is None:
        return
    if operation.kind == "compare":
        sides = [(s.value(operation.operands[0]), s.value(operation.operands[1])) for s in scopes]
        yield _direction(operation), sides
    elif operation.kind == "and":
        for each in operation.operands:
            yield from _comparisons(scopes, each)
    elif operation.kind in _PASSED_ON:
        yield from _comparisons(scopes, operation.operands[0])
    elif operation.kind in ("fusion", "call"):
        inner = [s.inside(operation) for s in scopes]
        if inner[0] is not None:
            yield from _comparisons([each[0] for each in inner if each is not None], inner[0][1])


def _failure(direction: str, sides: Sequence[tuple[Value, Value]]) -> int | None:
    """After how many turns a comparison fails first; None where that is never, or not known."""
    gaps = [a - b if isinstance(a, int) and isinstance(b, int) else None for a, b in sides]
    first, second, third = gaps
    if first is None or second is None or third is None or third - second != second - first:
        return None
    if not _COMPARISONS[direction](first, 0):
        return 0
    step = second - first
    if direction == "EQ":
        return 1 if step else None
    if direction == "NE":
        return -first // step if step and -first % step == 0 and -first // step > 0 else None
    towards = step if direction in ("LT", "LE") else -step
    if towards <= 0:
        return None
    away = abs(first) + (direction in ("LE", "GE"))
    return math.ceil(away / towards)
