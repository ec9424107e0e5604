"""Cost of a compiled program on one chip: FLOPs, bytes moved, collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jrl.plan.gpu_costs import gpu_flops, gpu_kind, kernel_bytes, kernel_name
from jrl.plan.hlo import (
    COLLECTIVES,
    HloProgram,
    Operation,
    called_as,
    fused_operations,
    parse_program,
    replica_groups,
)
from jrl.plan.loops import computation_runs, result_of

_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "iota"),
        *("conditional", "call", "after-all", "partition-id", "replica-id", "copy-done"),
        *("async-done", "async-update", "all-gather-done", "all-reduce-done", "slice-done"),
        *("collective-permute-done", "optimization-barrier", "fusion-done"),
    )
)
"""Operations that move no bytes themselves."""


KINDS = ("products", "attention", "prefetches", "collectives", "copies", "the rest")
"""Operations by what they are for: matrix products, experts' among them; the attention kernels;
copies to the chip's fast memory of what one of these will read, mostly weights; what is sent and
received; what only moves arrays; and everything else, mostly element by element. What is fused with
a product counts with it."""


class Collective(NamedTuple):
    """Collectives of one kind over the same mesh axes.

    Attributes:
      kind: of ``COLLECTIVES``.
      axes: indices of the mesh's axes.
      size: chips of a group.
      times: collectives that a chip takes part in.
      bytes: sent by a chip in all of them.
    """

    kind: str
    axes: tuple[int, ...]
    size: int
    times: float
    bytes: float


class Cost(NamedTuple):
    """Cost of one run of a computation, without the computations it calls.

    Attributes:
      runs: of the computation in the program.
      flops: operations of matrix products and convolutions.
      bytes: read from and written to the chip's main memory.
      collectives: one for each kind and set of axes.
      kinds: (flops, bytes) of the operations of each kind of ``KINDS``.
      name: of the computation.
    """

    runs: float
    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    kinds: Mapping[str, tuple[float, float]] = MappingProxyType({})
    name: str = ""


def program_costs(
    text: str,
    mesh_shape: Sequence[int],
    live: Mapping[str, float] = MappingProxyType({}),
    trips: Mapping[str, int] = MappingProxyType({}),
) -> list[Cost]:
    """The cost of each computation that runs: the entry and the bodies of loops.

    Args:
      text: ``compiled.as_text()``.
      mesh_shape: the sizes of the mesh's axes; the program's device number i is the mesh's i-th.
      live: of the kernels that read caches, by the start of their names: the share that they read
        of what a row has of its own, on average. The prompts are read whole, and so are caches
        without such a kernel.
      trips: iterations of loops that end early, by the scope that they are traced in.
    """
    program = parse_program(text)
    costs = []
    for name, times in computation_runs(program, trips).items():
        operations = program.computations[name]
        kinds: dict[str, tuple[float, float]] = {}
        collective_totals: dict[tuple[str, tuple[int, ...], int], list[float]] = {}
        for operation in operations.values():
            traffic = _bytes_moved(program, operation, operations, live)
            inside = list(fused_operations(program, operation, operations))
            flops = sum(_flops(inner, inner_operations, live) for inner, inner_operations in inside)
            if flops or traffic:
                kind = _kind(operation, [inner for inner, _ in inside])
                before = kinds.get(kind, (0.0, 0.0))
                kinds[kind] = before[0] + flops, before[1] + traffic
            for inner, inner_operations in inside:
                if (hit := _collective(inner, inner_operations, mesh_shape)) is not None:
                    total = collective_totals.setdefault(hit[:3], [0.0, 0.0])
                    total[0] += 1
                    total[1] += hit[3]
        collectives = tuple(Collective(*key, *total) for key, total in collective_totals.items())
        flops, traffic = (sum(each[i] for each in kinds.values()) for i in (0, 1))
        costs.append(Cost(times, flops, traffic, collectives, kinds, name))
    return costs


def _kind(operation: Operation, inside: Sequence[Operation]) -> str:
    """The kind of an operation, of ``KINDS``, by its inner operations."""
    kinds = {each.kind.removesuffix("-start") for each in inside}
    if operation.kind == "custom-call":
        if operation.name.startswith("read_cache") or _SPLASH.match(operation.name):
            return "attention"
        if operation.name.startswith("write_columns"):
            return "copies"
        if kind := gpu_kind(operation):
            return kind
        return "products" if re.search(r'"flops":"?[1-9]', operation.text) else "the rest"
    if kinds & {"dot", "convolution"}:
        return "products"
    if operation.kind in (
        "copy-start",
        "slice-start",
    ):  # (destination, ...), ((source), slice, ...)
        return "copies" if operation.outputs[operation.kind == "slice-start"].main else "prefetches"
    if kinds & {*COLLECTIVES, "send", "recv"}:
        return "collectives"
    return "copies" if kinds <= _MOVES else "the rest"


# ---------------------------------------------------------------- operations and bytes


def _flops(
    operation: Operation, operations: dict[str, Operation], live: Mapping[str, float]
) -> float:
    if operation.kind == "custom-call":
        match = re.search(r'"flops":"?(\d+)', operation.text)
        if match is None:
            if flops := gpu_flops(operation, operations):
                return flops / _one_of(operation)
            custom_flops = _splash_flops(operation, operations) + _cache_flops(
                operation, operations
            )
            return custom_flops * _share_read(operation, live)
        return float(match[1]) / _one_of(operation)
    if operation.kind == "dot":
        return _dot_flops(operation, operations)
    if operation.kind != "convolution":
        return 0.0
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.text)
    left, right = (operations[name].outputs[0].sizes for name in operation.operands[:2])
    out = operation.outputs[0].sizes
    assert labels is not None
    in_features = right[labels[2].index("i")]
    count = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * in_features
    spatial = sorted(c for c in labels[3] if c.isdigit())
    window = _window(operation.text, len(spatial))
    for i, digit in enumerate(spatial):
        size = left[labels[1].index(digit)]
        count *= _valid(size, out[labels[3].index(digit)], *window[i])
    return count


def _one_of(operation: Operation) -> int:
    """The number of devices that share the rows of a grouped product.

    The kernel visits the rows of this device's experts alone (``models.grouped``), but reports all.
    Experts are taken to be visited equally often.
    """
    match = re.search(r'op_name="[^"]*one_of_(\d+)[/)]', operation.text)
    return int(match[1]) if match else 1


_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)_")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matrix products of the size of queries by keys in each pass of the attention kernel."""


def _splash_flops(operation: Operation, operations: dict[str, Operation]) -> float:
    """Cost of JAX's attention kernel, which reports none: all blocks, masked ones included."""
    match = _SPLASH.match(operation.name)
    if match is None:
        return 0.0
    sources = [operations[name].outputs[0] for name in operation.operands if name in operations]
    q, k = [x.sizes for x in sources if x.dtype in ("bf16", "f16", "f32")][:2]
    keys = k[-1] * k[-2] / q[-1]  # keys may be transposed
    return 2.0 * _PRODUCTS[match[1]] * float(np.prod(q, dtype=np.float64)) * keys


def _cache_flops(operation: Operation, operations: dict[str, Operation]) -> float:
    """Cost of the kernel that reads caches in decoding: two products with all columns."""
    if not operation.name.startswith("read_cache"):
        return 0.0
    sources = [operations[name].outputs[0].sizes for name in operation.operands]
    q, k = [sizes for sizes in sources if len(sizes) == 4][:2]
    return 4.0 * float(np.prod(q, dtype=np.float64)) * k[2]


def _share_read(operation: Operation, live: Mapping[str, float]) -> float:
    """The share of a row's own cache that a kernel reads (``attention.choice``)."""
    if not re.search(r'op_name="[^"]*/own_cache/', operation.text):
        return 1.0
    return next((share for name, share in live.items() if operation.name.startswith(name)), 1.0)


def _dot_flops(operation: Operation, operations: dict[str, Operation]) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.text)
    left = operations[operation.operands[0]].outputs[0].sizes
    inner = [left[int(i)] for i in contracted[1].split(",") if i] if contracted else []
    return 2.0 * float(np.prod(operation.outputs[0].sizes, dtype=np.float64) * np.prod(inner))


def _window(text: str, dims: int) -> list[tuple[int, int, int, int, int]]:
    """(size, stride, padding before, dilation of the left, of the right) of each dimension."""
    inside = re.search(r"window=\{([^}]*)\}", text)
    parts = dict(item.split("=") for item in inside[1].split()) if inside else {}

    def numbers(key: str, default: int) -> list[int]:
        entry = parts.get(key)
        return [int(x.split("_")[0]) for x in entry.split("x")] if entry else [default] * dims

    names = (("size", 1), ("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
    return list(zip(*(numbers(*name) for name in names), strict=True))


def _valid(size: int, out: int, window: int, stride: int, pad: int, left: int, right: int) -> float:
    """Pairs of an output and a window position that read an element of the input.

    XLA writes batch axes as spatial ones in which all positions but one are padding or dilation.
    """
    if window == 1 and pad == 0 and left == 1:
        return float(out)
    index = np.arange(out)[:, None] * stride - pad + np.arange(window)[None] * right
    inside = (index >= 0) & (index < (size - 1) * left + 1) & (index % left == 0)
    return float(inside.sum())


def _bytes_moved(
    program: HloProgram,
    operation: Operation,
    operations: dict[str, Operation],
    live: Mapping[str, float],
) -> float:
    """Bytes between the chip's main memory and its units for one operation.

    A slice reads, and an update in place writes, only what it touches.
    """
    if operation.kind in _FREE or '="AllocateBuffer"' in operation.text:
        return 0.0
    sources = [operations[name] for name in operation.operands if name in operations]
    if operation.kind == "fusion":
        inner = program.computations[called_as(operation, "calls")]
        return _fusion_bytes(program, inner, operation, sources)
    if kernel_name(operation):
        return kernel_bytes(operation, operations, live)
    if reported := re.search(r'"bytes_accessed":"?(\d+)', operation.text):
        # A kernel that reports its traffic, of which what lies in the fast memory is no part. Of a
        # grouped product all matrices are read, [E, D, F], and of the rows, [M, D], those that it
        # visits.
        arrays = [a for s in sources for a in s.outputs[:1]] + list(operation.outputs)
        visited = 1 / _one_of(operation)
        traffic = [a.bytes * a.main * (visited if len(a.sizes) == 2 else 1.0) for a in arrays]
        return max(float(reported[1]) - sum(a.bytes for a in arrays) + sum(traffic), 0.0)
    arrays = [a for s in sources for a in s.outputs[:1] if a.main]
    reads = [a.bytes for a in arrays]
    if operation.kind == "custom-call" and (share := _share_read(operation, live)) < 1:
        # Keys, values and their masks have columns, last or last but one; queries have none.
        floats = ("bf16", "f16", "f32", "s8")
        values = [a.sizes for s in sources for a in s.outputs[:1] if a.dtype in floats][2]
        reads = [a.bytes * (share if values[-2] in a.sizes[-2:] else 1.0) for a in arrays]
    writes = [a.bytes for a in operation.outputs if a.main]
    if operation.kind in ("copy-start", "collective-permute-start", "all-gather-start"):
        # (destination, source, ...): one of them is in main memory
        return sum(a.bytes for a in operation.outputs[:2] if a.main)
    if operation.kind == "slice-start":  # ((source), slice, ...)
        return operation.outputs[1].bytes
    if operation.kind in _SLICES:
        return 2 * sum(writes)
    if operation.kind in _UPDATES:
        return 2 * sum(a.bytes for s in sources[1:] for a in s.outputs[:1] if a.main)
    return sum(reads) + sum(writes)


def _fusion_bytes(
    program: HloProgram,
    inner: dict[str, Operation],
    fusion: Operation,
    sources: list[Operation],
) -> float:
    total, updated = 0.0, 0.0
    for number, parameter in _parameters(inner).items():
        if number >= len(sources) or not any(a.main for a in sources[number].outputs[:1]):
            continue
        if _is_updated(program, inner, parameter):
            updated += parameter.outputs[0].bytes
        else:
            total += _read_of(program, inner, parameter)
    roots = _roots(inner)
    writes = sum(
        a.bytes
        for i, a in enumerate(fusion.outputs)
        if a.main and not (len(roots) == len(fusion.outputs) and _passes(roots[i]))
    )
    if updated:
        updated_bytes = [
            inner_operations[o.operands[1 if o.kind == "dynamic-update-slice" else -1]]
            .outputs[0]
            .bytes
            for o, inner_operations in fused_operations(program, fusion, {})
            if o.kind in _UPDATES
        ]
        writes = max(writes - updated, 0.0) + 2 * sum(updated_bytes)
    return total + writes


_MOVES = frozenset(
    (
        *("copy", "transpose", "bitcast", "reshape", "slice", "dynamic-slice", "gather"),
        *("dynamic-update-slice", "scatter", "concatenate", "pad", "broadcast", "reverse"),
        *("parameter", "constant", "iota", "tuple", "get-tuple-element"),
    )
)
"""Operations that compute nothing."""
_ELEMENTWISE = frozenset(
    (
        *("add", "and", "compare", "convert", "divide", "exponential", "log", "maximum"),
        *("minimum", "multiply", "negate", "or", "select", "subtract"),
    )
)
"""Operations of which a fusion computes no more numbers than are read."""
_SLICES, _UPDATES = ("dynamic-slice", "gather", "slice"), ("dynamic-update-slice", "scatter")


def _parameters(inner: dict[str, Operation]) -> dict[int, Operation]:
    """The parameters of a computation by their number."""
    parameters = (o for o in inner.values() if o.kind == "parameter")
    return {int(re.match(r"parameter\((\d+)\)", o.text)[1]): o for o in parameters}  # type: ignore[index]


def _read_of(
    program: HloProgram, inner: dict[str, Operation], source: Operation, inside: bool = False
) -> float:
    """Bytes that a fusion reads of one of its parameters, or of what passes it on.

    Where all that reads it are slices, in fusions within the fusion too, they alone are read: a
    loop over layers slices what is stacked over them where it is multiplied, and a gather of one
    token's logit has the others not computed. What leaves a fusion within (``inside``) as it is is
    read by another one.
    """
    full, partial = source.outputs[0].bytes, 0.0
    readers = _readers(inner, source)
    if inside and (not readers or source.root or _is_result(inner, source)):
        return full
    for reader in readers:
        if partial >= full:
            return full
        if reader.kind in _SLICES:
            partial += reader.outputs[0].bytes
        elif reader.kind == "bitcast":
            partial += _read_of(program, inner, reader, inside=True)
        elif reader.kind in _ELEMENTWISE and _sizes(reader) == _sizes(source):
            share = _read_of(program, inner, reader, inside=True) / reader.outputs[0].bytes
            partial += share * full
        elif reader.kind == "fusion":
            for within, parameter in _entries(program, source, reader):
                partial += _read_of(program, within, parameter, inside=True)
        else:
            return full
    return min(partial, full)


def _sizes(operation: Operation) -> tuple[int, ...]:
    return operation.outputs[0].sizes


def _is_updated(program: HloProgram, inner: dict[str, Operation], source: Operation) -> bool:
    """Whether a fusion does nothing with a buffer but update a part of it in place.

    It may read that part before, as where something is added to it.
    """
    updates = False
    for reader in _readers(inner, source):
        if reader.kind == "fusion":
            if not all(_is_updated(program, *each) for each in _entries(program, source, reader)):
                return False
        elif reader.kind == "dynamic-slice":
            continue
        elif reader.kind not in _UPDATES or reader.operands[0] != source.name:
            return False
        updates = True
    return updates


def _is_result(inner: dict[str, Operation], source: Operation) -> bool:
    """Whether an operation is one of a computation's results."""
    return any(o.root and o.kind == "tuple" and source.name in o.operands for o in inner.values())


def _readers(inner: dict[str, Operation], source: Operation) -> list[Operation]:
    return [o for o in inner.values() if source.name in o.operands and not _passes(o)]


def _entries(
    program: HloProgram, source: Operation, fusion: Operation
) -> Iterator[tuple[dict[str, Operation], Operation]]:
    """The computation of a fusion, with each of its parameters that is ``source``."""
    within = program.computations[called_as(fusion, "calls")]
    parameters = _parameters(within)
    for number, name in enumerate(fusion.operands):
        if name == source.name:
            yield within, parameters[number]


def _passes(operation: Operation) -> bool:
    """Whether an operation inside a fusion passes a buffer on without reading it."""
    asynchronous = "AsyncCollective" in operation.text
    return asynchronous or operation.kind in ("parameter", "tuple", *COLLECTIVES)


def _roots(inner: dict[str, Operation]) -> list[Operation]:
    """The producer of each output of a fusion."""
    last = inner[result_of(inner)]
    return [inner[n] for n in last.operands if n in inner] if last.kind == "tuple" else [last]


def _collective(
    operation: Operation,
    operations: dict[str, Operation],
    mesh_shape: Sequence[int],
) -> tuple[str, tuple[int, ...], int, float] | None:
    """(kind, axes, chips of a group, bytes that a chip sends) of a collective, or None."""
    kind = operation.kind.removesuffix("-start")
    if operation.kind == "send":
        return _between_slices(operation)
    if kind not in COLLECTIVES:
        return None
    sources = [operations[n] for n in operation.operands if n in operations]
    operand = sum(s.outputs[0].bytes for s in sources if s.outputs)
    if kind == "collective-permute":
        inside = re.search(r"source_target_pairs=\{(.*?)\}\}", operation.text)
        pairs = np.array(re.findall(r"(\d+),(\d+)", inside[1] + "}") if inside else [], int)
        pairs = pairs.reshape(-1, 2)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        if not len(pairs):
            return None
        axes = _axes(pairs, mesh_shape)
        return kind, axes, int(np.prod([mesh_shape[a] for a in axes])), operand
    groups = replica_groups(operation.text, int(np.prod(mesh_shape)))
    n = groups.shape[1]
    if n < 2:
        return None
    return kind, _axes(groups, mesh_shape), n, _sent(kind, operand, n)


def _sent(kind: str, operand: float, n: int) -> float:
    """Bytes that each of n chips sends of an operand."""
    share = (n - 1) / n
    return {
        "all-gather": operand * (n - 1),
        "all-reduce": 2 * operand * share,
        "reduce-scatter": operand * share,
        "all-to-all": operand * share,
    }[kind]


def _between_slices(operation: Operation) -> tuple[str, tuple[int, ...], int, float] | None:
    """``_collective`` of a transfer to other slices, which XLA does through the host.

    Only a mesh's first axis, that of data, crosses slices.
    """
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', operation.text)
    slices = re.search(r'_xla_megascale_target="\{([\d,]+)\}', operation.text)
    if match is None or slices is None:
        return None
    kind, n = match[1].lower().replace("_", "-"), len(slices[1].split(","))
    kind = kind if kind in COLLECTIVES else "collective-permute"
    operand = operation.outputs[0].bytes
    return kind, (0,), n, operand if kind == "collective-permute" else _sent(kind, operand, n)


def _axes(groups: np.ndarray, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes along which the members of a group differ."""
    coords = np.stack(np.unravel_index(groups, tuple(mesh_shape)), axis=-1)
    differs = (coords != coords[:, :1]).any((0, 1))
    return tuple(int(i) for i in np.flatnonzero(differs))
