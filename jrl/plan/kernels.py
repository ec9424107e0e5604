"""Kernels that a GPU is given in the loops of a compiled program, and returns to the host.

Read from the optimised program's text, so that no GPU is needed. A fusion, a library call, a copy
or a collective is one launch; what only names a part of a buffer is none. A loop whose number of
turns is not known when it is compiled copies its condition to the host before each turn, and a
conditional its branch (unless XLA records either in a CUDA graph, which the text does not say).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jrl.plan.hlo import (
    HloProgram,
    Operation,
    called_as,
    called_computations,
    known_trips,
    op_name,
)

SCOPES: Mapping[str, tuple[str, ...]] = {
    "draw": ("draw",),
    "layers": ("attention", "mlp", "experts"),
}
"""Part of a token step -> the ``jax.named_scope`` of its operations; all others are "rest"."""

_NO_LAUNCH = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("optimization-barrier", "add-dependency", "partition-id", "replica-id", "domain"),
        *("while", "conditional", "call", "async-start", "async-update"),
    )
)
"""Operations that launch nothing themselves; nor does the end of an asynchronous one."""
_NO_CALL = re.compile(
    r'custom_call_target="(?:Sharding|SPMD\w*|AllocateBuffer|annotate_device_placement|nop)"'
)


class Launches(NamedTuple):
    """Launches of one turn of a loop, those of loops inside it included.

    Of the branches of a conditional the one with the most launches counts.

    Attributes:
      layers: by ``SCOPES``, for all layers together.
      draw: by ``SCOPES``.
      rest: of no scope.
      conditionals: run in a turn; each may copy its branch to the host.
      returns: to the host in a turn: by the loop itself and by those inside it where their number
        of turns is not known (each counts as one turn), and by conditionals.
    """

    layers: float = 0.0
    draw: float = 0.0
    rest: float = 0.0
    conditionals: float = 0.0
    returns: float = 0.0

    @property
    def total(self) -> float:
        """Launches, of whatever scope."""
        return self.layers + self.draw + self.rest

    def plus(self, other: Launches, times: float = 1.0) -> Launches:
        """The sum with ``times`` the other's."""
        return Launches(*(a + times * b for a, b in zip(self, other, strict=True)))


class LoopLaunches(NamedTuple):
    """A loop of a program.

    Attributes:
      body: name of the computation that it repeats.
      scope: ``op_name`` of the loop, such as "jit(generate)/decode/while".
      trips: its number of turns; None where it returns to the host before each.
      inside: bodies of the loops around it, outermost first.
      launches: of one turn; with those of the condition where that is evaluated before each.
    """

    body: str
    scope: str
    trips: int | None
    inside: tuple[str, ...]
    launches: Launches


def loop_launches(program: HloProgram) -> list[LoopLaunches]:
    """The loops of a program, in the order of the text, outer ones before those inside them."""
    return list(_loops(program, program.entry, ()))


def token_loop(program: HloProgram) -> LoopLaunches | None:
    """The loop of which a turn is a token step of a sampler; None for a program without one.

    Its body itself has operations of the scope "draw". With several, as in a sampler that compiles
    a loop for each number of slots, it is the one with the most launches.
    """
    loops = [loop for loop in loop_launches(program) if _draws(program, loop.body)]
    return max(loops, key=lambda loop: loop.launches.total, default=None)


def token_step(program: HloProgram) -> Launches | None:
    """Launches of one token step of a sampler; None for a program without one.

    Where a loop with a known number of turns is inside one that asks the host, the latter's other
    launches and its return count in equal parts: with 16 turns, 1/16 each.
    """
    step = token_loop(program)
    if step is None:
        return None
    loops = {loop.body: loop for loop in loop_launches(program)}
    around, turns = [loops[name] for name in step.inside], 1
    while step.trips is not None and around:
        turns *= step.trips
        step = around.pop()
    return Launches().plus(step.launches, 1 / turns)


def program_launches(program: HloProgram) -> Launches:
    """Launches of one run of a program; loops without a known number of turns count as one turn."""
    return _launches(program, program.entry)


def _loops(program: HloProgram, name: str, inside: tuple[str, ...]) -> Iterator[LoopLaunches]:
    for operation in program.computations[name].values():
        if operation.kind == "while":
            body = called_as(operation, "body")
            one, scope = _turn(program, operation), op_name(operation)
            yield LoopLaunches(body, scope, known_trips(operation), inside, one)
            yield from _loops(program, body, (*inside, body))
        elif operation.kind in ("conditional", "call", "async-start"):
            for called in _called(program, operation):
                yield from _loops(program, called, inside)


def _turn(program: HloProgram, loop: Operation, part: str = "rest") -> Launches:
    """Launches of one turn of a loop, and of its condition where that decides."""
    one = _launches(program, called_as(loop, "body"), part)
    if known_trips(loop) is not None:
        return one
    condition = _launches(program, called_as(loop, "condition"), part)
    return one.plus(condition).plus(Launches(returns=1))


def _launches(program: HloProgram, name: str, part: str = "rest") -> Launches:
    """Launches of one run of a computation; ``part`` is that of operations without a name."""
    operations, total = program.computations[name], Launches()
    for operation in operations.values():
        called = _called(program, operation)
        if operation.kind == "while":
            inner = _scope(program, operation, operations) or part
            total = total.plus(_turn(program, operation, inner), known_trips(operation) or 1)
        elif operation.kind == "conditional":
            inner = _scope(program, operation, operations) or part
            branches = [_launches(program, branch, inner) for branch in called]
            longest = max(branches, key=lambda x: x.total, default=Launches())
            total = total.plus(longest).plus(Launches(conditionals=1, returns=1))
        elif operation.kind in ("call", "async-start"):
            for computation in called:
                total = total.plus(_launches(program, computation, part))
        elif launches(operation):
            scope = _scope(program, operation, operations) or part
            total = total.plus(Launches(**{scope: 1.0}))
    return total


def launches(operation: Operation) -> bool:
    """Whether an operation, outside fusions, is a launch."""
    if operation.kind in _NO_LAUNCH or operation.kind.endswith("-done"):
        return False
    return operation.kind != "custom-call" or not _NO_CALL.search(operation.text)


def _called(program: HloProgram, operation: Operation) -> list[str]:
    return [name for name in called_computations(operation) if name in program.computations]


def _scope(program: HloProgram, operation: Operation, operations: Mapping[str, Operation]) -> str:
    """The part of a token step that an operation belongs to; "" where nothing tells.

    XLA drops the names of some: then the nearest of what it reads decides.
    """
    near, visited = [operation], {operation.name}
    while near:
        for each in near:
            if names := _names(program, each):
                return Counter(map(_part, names)).most_common(1)[0][0]
        reads = [name for each in near for name in each.operands if name in operations]
        near = [operations[name] for name in dict.fromkeys(reads) if name not in visited]
        near = [each for each in near if each.kind not in ("constant", "iota", "parameter")]
        visited.update(each.name for each in near)
    return ""


def _names(program: HloProgram, operation: Operation) -> list[str]:
    """The traced name of an operation, or those of what is fused where XLA dropped it.

    A name without a path, such as "cumsum" of a loop that a sharded one becomes, tells no scope.
    """
    if "/" in (name := op_name(operation)):
        return [name]
    called = _called(program, operation) if operation.kind == "fusion" else []
    fused = [o for c in called for o in program.computations[c].values()]
    return [name for name in map(op_name, fused) if "/" in name]


def _part(name: str) -> str:
    scopes = set(re.split(r"[/()]", name))
    return next((part for part, names in SCOPES.items() if scopes & set(names)), "rest")


def _draws(program: HloProgram, body: str) -> bool:
    """Whether operations of the draw are in this computation, and not in a loop of the draw's."""
    operations = filter(launches, program.computations[body].values())
    names = [name for each in operations for name in _names(program, each)]
    return any("/draw/" in n and "/while/" not in n.rpartition("/draw/")[2] for n in names)
