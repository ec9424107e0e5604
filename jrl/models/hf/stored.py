"""Weights that are still in their files, read when and where they are needed.

    config, params = open_checkpoint(directory)
    params = place(params, shardings)        # each device's part is read by itself

No process holds more on the host than one part of one weight, and of a model that is divided over
several hosts each reads its own parts alone.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401  lets numpy and safetensors understand "bfloat16"
import numpy as np

from jrl.errors import UserError
from jrl.models.hf.names import Tensor
from jrl.system.json_text import refuse_pointer
from jrl.types import Params


class Piece(NamedTuple):
    """A tensor of a file that is one layer, or one expert, of a weight.

    Attributes:
      name: of the tensor.
      file: that holds it.
      tensor: which weight it is, and in what layout.
    """

    name: str
    file: pathlib.Path
    tensor: Tensor


class Stored:
    """One weight, read from its files on first use.

    Attributes:
      shape: of the weight as the network has it; layers first.
      dtype: what the files' numbers are converted to.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, pieces: Sequence[Piece]) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._pieces = {piece.tensor.at: piece for piece in pieces}

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, on the host."""
        array = self.read(None)
        return array if dtype is None else array.astype(dtype)

    def astype(self, dtype: Any) -> np.ndarray:
        """All of it in another type, on the host."""
        return np.asarray(self).astype(dtype)

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """A part of it, on the host.

        Args:
          index: a slice for each axis, of step 1; None for all of it.
        """
        index = (slice(None),) * self.ndim if index is None else index
        spans = [range(n)[part] for n, part in zip(self.shape, index, strict=True)]
        part = np.empty([len(span) for span in spans], self.dtype)
        stacked = len(next(iter(self._pieces)))  # layers, and experts, are tensors of their own
        for at, piece in self._pieces.items():
            if all(i in span for i, span in zip(at, spans, strict=False)):
                region = tuple(i - span.start for i, span in zip(at, spans, strict=False))
                target = part[region] if region else part
                self._read_piece(piece, spans[stacked:], target)
        return part

    def _read_piece(self, piece: Piece, spans: list[range], target: np.ndarray) -> None:
        """Fills ``target`` with the part of one tensor that ``spans`` are of the weight's axes."""
        sizes, tensor = self.shape[self.ndim - len(spans) :], piece.tensor
        with open_safetensors(piece.file) as file:
            view = file.get_slice(piece.name)
            if tensor.transposed:
                inputs = _axes_of(tensor.shape[1], sizes)
                left = _Axes(spans[:inputs], sizes[:inputs])
                right = _Axes(spans[inputs:], sizes[inputs:])
                part = view[right.read, left.read].T
            elif len(tensor.shape) == 1:
                left, right = _Axes(spans, sizes), _Axes([], ())
                part = view[left.read]
            else:
                left, right = _Axes(spans[:1], sizes[:1]), _Axes(spans[1:], sizes[1:])
                part = view[left.read, right.read]
        if not is_finite(part):
            raise UserError(
                f"{piece.file}: tensor {piece.name!r} holds numbers that are not finite; the "
                "checkpoint is damaged, or of a run that diverged"
            )
        target[...] = part.reshape(*left.shape, *right.shape)[left.keep + right.keep]


class _Axes:
    """Axes of a weight that are one axis of a tensor in a file, and the part of them that is read.

    Attributes:
      read: what is read of the tensor's axis: whole entries of the first of the weight's axes.
      shape: of what was read, as the weight's axes.
      keep: the part of it that was asked for.
    """

    def __init__(self, spans: Sequence[range], sizes: Sequence[int]) -> None:
        each = int(np.prod(sizes[1:]))
        self.read = slice(spans[0].start * each, spans[0].stop * each) if spans else slice(None)
        self.shape = (len(spans[0]), *sizes[1:]) if spans else ()
        self.keep = (slice(None), *(slice(s.start, s.stop) for s in spans[1:]))[: len(spans)]


def _axes_of(size: int, sizes: Sequence[int]) -> int:
    """The number of leading axes whose sizes multiply to this size."""
    count, product = 1, sizes[0]
    while product < size:
        product *= sizes[count]
        count += 1
    return count


def is_finite(value: np.ndarray) -> bool:
    """Whether no number is NaN or infinite: such have all bits of the exponent set.

    On the bits, because NumPy has to convert 16-bit floats one by one to look at them.
    """
    mask = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}.get(value.dtype.name)
    if mask is None:
        return bool(np.isfinite(value).all())
    kind = np.uint32 if value.itemsize == 4 else np.uint16
    bits: Any = np.ascontiguousarray(value).view(kind).reshape(-1)
    chunk = 1 << 24  # numbers at a time, so that little memory is needed
    return not any(
        ((bits[i : i + chunk] & kind(mask)) == kind(mask)).any() for i in range(0, bits.size, chunk)
    )


@contextlib.contextmanager
def open_safetensors(path: pathlib.Path) -> Iterator[Any]:
    """A safetensors file, with its own errors turned into ones that name the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the checkpoint is incomplete") from None
    except (SafetensorError, OSError) as error:
        refuse_pointer(path)
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: truncated or not a safetensors file ({reason})") from error


def place(params: Params, where: Any) -> Params:
    """Weights on the devices, leaf by leaf: no device and no host ever holds more than its part.

    Args:
      params: a tree of arrays, ``Stored`` or not.
      where: shardings of the same shape.
    """

    def put(x: Any, at: Any) -> Any:
        if isinstance(x, Stored):
            return jax.make_array_from_callback(x.shape, at, x.read)
        return jax.device_put(x, at)

    return jax.tree.map(put, params, where)


def in_memory(params: Params) -> Params:
    """The weights as NumPy arrays on the host; those in files are read."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, Stored) else x, params)


def stored_tree(
    specs: Sequence[tuple[tuple[str, ...], Any]],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, pathlib.Path],
    dtype: str,
) -> dict[str, Any]:
    """The parameters of a checkpoint as ``Stored`` weights.

    Args:
      specs: (keys, ``WeightSpec``) of every weight.
      tensors: every tensor by its name in the files.
      files: which file holds it.
      dtype: of the weights.
    """
    pieces: dict[tuple[str, ...], list[Piece]] = {}
    for name, tensor in tensors.items():
        pieces.setdefault(tensor.path, []).append(Piece(name, files[name], tensor))
    params: dict[str, Any] = {}
    for path, spec in specs:
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = Stored(spec.shape, dtype, pieces[path])
    return params
