"""FLOPs and bytes of operations that only a GPU's programs have: libraries' and Triton kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from jrl.plan.hlo import Operation

_ATTENTION = ("attend_cache",)
_PRODUCTS = ("few_rows", "gated", "grouped_rows", "grouped_matrices")
"""Names of the kernels of ``models.gpu_kernels``, by kind."""


def kernel_name(operation: Operation) -> str:
    """The name of a Pallas kernel for GPUs; "" for another operation."""
    if 'custom_call_target="__gpu$xla.gpu.triton"' not in operation.text:
        return ""
    match = re.search(r'op_name="[^"]*?([^"/]+)/pallas_call', operation.text)
    return match[1] if match else ""


def gpu_kind(operation: Operation) -> str | None:
    """The kind of a custom call, of ``costs.KINDS``; None where it is not one of GPUs."""
    name = kernel_name(operation)
    if "__cudnn$fmha" in operation.text or name in _ATTENTION:
        return "attention"
    if '="__cublas$' in operation.text or name in _PRODUCTS:
        return "products"
    return "the rest" if name else None


def gpu_flops(operation: Operation, operations: Mapping[str, Operation]) -> float:
    """Operations of matrix products; 0 where the operation is none of GPUs."""
    sizes = [operations[n].outputs[0].sizes for n in operation.operands if n in operations]
    return (
        _cudnn_flops(operation, sizes)
        + _cublas_flops(operation, sizes)
        + _kernel_flops(kernel_name(operation), sizes)
    )


def _cudnn_flops(operation: Operation, sizes: Sequence[tuple[int, ...]]) -> float:
    """Cost of cuDNN's attention: two products with all keys, backward five; no mask saves any."""
    match = re.search(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"', operation.text)
    shape = r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^\]]*)\]'
    scores = re.search(shape, operation.text)
    if match is None or scores is None:
        return 0.0
    pairs = _size([int(n) for n in re.findall(r"\d+", scores[1])])
    return 2.0 * (5 if match[1] else 2) * pairs * sizes[0][-1]


def _cublas_flops(operation: Operation, sizes: Sequence[tuple[int, ...]]) -> float:
    """Cost of a product by cuBLAS, whose first result it is."""
    if 'custom_call_target="__cublas$' not in operation.text:
        return 0.0
    match = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', operation.text)
    inner = [sizes[0][int(i)] for i in re.findall(r"\d+", match[1])] if match else []
    return 2.0 * _size(operation.outputs[0].sizes) * _size(inner)


def _kernel_flops(name: str, sizes: Sequence[tuple[int, ...]]) -> float:
    if name in ("few_rows", "gated"):  # rows, and the whole matrix
        return 2.0 * sizes[0][0] * _size(sizes[1])
    if name == "grouped_rows":  # three tables, rows, matrices: each row has one of these
        return 2.0 * sizes[3][0] * _size(sizes[4][1:])
    if name == "grouped_matrices":  # two tables, rows, rows
        return 2.0 * _size(sizes[2]) * sizes[3][1]
    return 0.0


def _size(sizes: Sequence[int]) -> float:
    return float(np.prod(sizes, dtype=np.float64))


def kernel_bytes(
    operation: Operation, operations: Mapping[str, Operation], live: Mapping[str, float]
) -> float:
    """Bytes that a Pallas kernel reads and writes.

    Of what it updates in place, a row's own cache, it reads the share that ``live`` has for its
    name, and writes next to nothing.
    """
    aliases = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", operation.text)
    pairs = re.findall(r"\{(\d+)\}: \((\d+),", aliases[1]) if aliases else []
    results, updated = ({int(pair[i]) for pair in pairs} for i in (0, 1))
    share = live.get(kernel_name(operation), 1.0)
    arrays = [operations[n].outputs[0] for n in operation.operands if n in operations]
    reads = sum(a.bytes * (share if i in updated else 1.0) for i, a in enumerate(arrays))
    return reads + sum(a.bytes for i, a in enumerate(operation.outputs) if i not in results)
