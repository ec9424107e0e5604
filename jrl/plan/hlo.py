"""The text of a compiled program as operations, and the devices of its collectives."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
"""The kinds that are counted."""

_BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4},
    **{"f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "s4": 0.5, "u4": 0.5},
    **{"f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3b11fnuz": 1},
}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)"
)


class Buffer(NamedTuple):
    """An array of a program: dtype, sizes, and whether it is in the chip's main memory (HBM)."""

    dtype: str
    sizes: tuple[int, ...]
    main: bool

    @property
    def bytes(self) -> float:
        """Size in bytes."""
        return float(np.prod(self.sizes, dtype=np.float64)) * _BYTES.get(self.dtype, 0)


class Operation(NamedTuple):
    """One line of a computation."""

    name: str
    kind: str
    outputs: tuple[Buffer, ...]
    operands: tuple[str, ...]
    text: str
    root: bool = False


class HloProgram(NamedTuple):
    """A program: operations by name, by computation.

    Attributes:
      computations: in the order of the text.
      entry: name of the computation that runs first.
    """

    computations: dict[str, dict[str, Operation]]
    entry: str


def parse_program(text: str) -> HloProgram:
    """The program in ``compiled.as_text()``."""
    computations: dict[str, dict[str, Operation]] = {}
    entry, current = "", None
    for line in _lines(text):
        if line[:1] in ("%", "E") and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            current = computations[name] = {}
        elif current is not None and (match := _LINE.match(line)):
            operation = _operation(match[1], match[2])
            operation = operation._replace(root=line.lstrip().startswith("ROOT "))
            current[operation.name] = operation
        elif line.rstrip() == "}":
            current = None
    return HloProgram(computations, entry)


def _lines(text: str) -> Iterator[str]:
    """Lines, joined with their continuations: the attributes of a kernel may contain newlines."""
    pieces: list[str] = []
    for line in text.splitlines():
        if pieces and not (line.startswith(("  ", "%", "ENTRY")) or line.rstrip() in ("", "}")):
            pieces.append(line)
            continue
        yield "".join(pieces)
        pieces = [line]
    yield "".join(pieces)


def _operation(name: str, rest: str) -> Operation:
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[: end + 1], rest[end + 1 :].lstrip()
    kind, _, after = rest.partition("(")
    inside = after[: _closing("(" + after, 0) - 1]
    outputs = tuple(
        Buffer(
            m[1], tuple(int(x) for x in m[2].split(",") if x), not re.search(r"S\(\d", m[3] or "")
        )
        for m in _SHAPE.finditer(shape)
    )
    kind, operands = kind.strip(), tuple(_NAME.findall(inside))
    if kind == "fusion-start":  # runs beside others; ((operands), result, context)
        kind, outputs = "fusion", outputs[len(operands) : -1]
    return Operation(name, kind, outputs, operands, rest)


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


def called_computations(operation: Operation) -> list[str]:
    """Names of the computations that an operation calls."""
    names = _CALLED.findall(operation.text)
    if "branch_computations=" in operation.text:
        inside = operation.text.split("branch_computations={", 1)[1].split("}", 1)[0]
        names += _NAME.findall(inside)
    return names


def called_as(operation: Operation, name: str) -> str:
    """The computation that is an operation's "body", "condition" or "calls"."""
    match = re.search(rf"{name}=%([\w.\-]+)", operation.text)
    assert match is not None
    return match[1]


def op_name(operation: Operation) -> str:
    """The traced name of an operation, its scopes before it; "" where XLA dropped it."""
    match = re.search(r'op_name="([^"]*)"', operation.text)
    return match[1] if match else ""


def known_trips(loop: Operation) -> int | None:
    """The number of turns of a loop that XLA found when it compiled, or None."""
    match = re.search(r"known_trip_count[^\d}]*(\d+)", loop.text)
    return int(match[1]) if match else None


def fused_operations(
    program: HloProgram, operation: Operation, operations: dict[str, Operation]
) -> Iterator[tuple[Operation, dict[str, Operation]]]:
    """The operation, or for a fusion its inner operations, each with its computation."""
    if operation.kind != "fusion":
        yield operation, operations
        return
    for name in re.findall(r"calls=%([\w.\-]+)", operation.text):
        inner = program.computations[name]
        # The end of an asynchronous collective repeats the operation of its start.
        ends = name.startswith("async_collective_fusion")
        ends = ends or any("AsyncCollectiveDone" in o.text for o in inner.values())
        scatters = name.startswith("all-reduce-scatter")
        for each in inner.values():
            if ends and each.kind in COLLECTIVES:
                continue
            if scatters and each.kind == "all-reduce":
                each = each._replace(kind="reduce-scatter")
            yield from fused_operations(program, each, inner)


# ---------------------------------------------------------------- groups of devices


def replica_groups(text: str, devices: int) -> np.ndarray:
    """[groups, members] device numbers of a collective, from any of XLA's three notations."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](.*?)\{([^}]*)\}", text):
        return _mesh_groups(*match.groups())
    if match := re.search(r"replica_groups=\[([\d,]+)\](<=\S+?)(?:,\s|\s|$)", text):
        shape = tuple(map(int, match[1].split(",")))
        return _reordered(shape, match[2].rstrip(",")).reshape(shape)
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        rows = re.findall(r"\{([\d,]+)\}", match[1])
        return np.array([[int(x) for x in row.split(",")] for row in rows])
    if (match := re.search(r"replica_groups=(.{0,80})", text)) and match[1][:2] != "{}":
        warnings.warn(
            f"unknown groups of a collective, assumed all chips: {match[1]}", stacklevel=2
        )
    return np.arange(devices)[None]


def _mesh_groups(mesh: str, order: str, over: str) -> np.ndarray:
    """[groups, members] device numbers, from groups written as axes of a mesh of XLA's.

    Args:
      mesh: names and sizes of its axes, ``'a'=4,'b'=16``.
      order: of the devices where it is not ascending, ``device_ids=([16,4]T(1,0))`` or
        ``device_ids=(0,2,1,3)``.
      over: the axes of a group, ``'b'``, or a factor of one, ``'b':(2)4``: 4 members at a distance
        of size / (2 * 4).
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    ]
    shape: list[int] = []
    grid_axes: list[int] = []
    for name, length in sizes.items():
        cuts = {c for n, before, size in parts if n == name for c in (before, before * size)}
        for low, high in itertools.pairwise(sorted(cuts | {1, length})):
            if any(n == name and b <= low and high <= b * size for n, b, size in parts):
                grid_axes.append(len(shape))
            shape.append(high // low)
    grid = np.moveaxis(_reordered(tuple(shape), order), grid_axes, range(-len(grid_axes), 0))
    return grid.reshape(-1, int(np.prod([shape[i] for i in grid_axes])))


def _reordered(shape: tuple[int, ...], order: str) -> np.ndarray:
    """Device numbers in a grid: ascending, listed, or transposed as in ``[a,b]T(1,0)``."""
    numbers = np.arange(int(np.prod(shape)))
    if match := re.search(r"device_ids=\((\d[\d,]*)\)", order):
        numbers = np.array(match[1].split(","), int)
    if dims := re.search(r"\[([\d,]+)\]", order):
        numbers = numbers.reshape(tuple(map(int, dims[1].split(","))))
    if transposed := re.search(r"T\(([\d,]+)\)", order):
        numbers = numbers.transpose(tuple(map(int, transposed[1].split(","))))
    return numbers.reshape(shape)
