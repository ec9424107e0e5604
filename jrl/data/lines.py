"""Rows of files of one JSON object a line, as they are or compressed by gzip, read where they lie.

Memory holds the place and the number of each line, 16 bytes a row, and one row at a time.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from jrl.errors import UserError
from jrl.system.json_text import as_object, parse_json
from jrl.system.memory import in_units

_BLOCK = 1 << 18
"""Bytes that are looked through at a time; that takes up to fifty times as many."""
_LONGEST_LINE = 1 << 28
"""Bytes of a line; one without end takes no room in a compressed file, or in one with holes."""
Check = Callable[[int, int], None]
"""Called with the number of the line that a piece of a text ends in, and its bytes so far."""
_NEWLINE = 10
_IS_TEXT = np.ones(256, np.int32)
_IS_TEXT[list(b" \t\n\r\v\f")] = 0


class JsonlDataset:
    """One JSON object on each line. Only the lines' offsets are kept in memory.

    Args:
      path: a UTF-8 file; empty lines are skipped.

    Raises:
      UserError: it has a line of more than 256 MiB.
    """

    _counted = ""  # how the bytes of a line are counted

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._index(_blocks(file))

    def _index(self, blocks: Iterable[bytes]) -> None:
        self._starts, self._lines, self._size = index_lines(blocks, self._check_line)

    def _check_line(self, number: int, size: int) -> None:
        if size > _LONGEST_LINE:  # which would be read whole before anybody looks at it
            raise UserError(
                f"{self.path}, line {number}: longer than {_LONGEST_LINE} bytes{self._counted};"
                " write one record a line"
            )

    def _read(self, start: int, end: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def __len__(self) -> int:
        """Rows."""
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The object on the row's line.

        Raises:
          UserError: the line is not a JSON object; names file and line.
        """
        index = range(len(self))[index]
        end = self._size if index + 1 == len(self) else int(self._starts[index + 1])
        data = self._read(int(self._starts[index]), end)
        where = self.where(index)
        return as_object(parse_json(data, where), where)

    def where(self, index: int) -> str:
        """The file and line of a row."""
        return f"{self.path}, line {self._lines[index]}"


class GzipDataset(JsonlDataset):
    """One JSON object on each line of a compressed file, which is decompressed to a temporary one.

    That file is in the directory for such files (``TMPDIR``), has no name, and is gone with the
    process.

    Args:
      path: UTF-8 text, compressed by gzip; empty lines are skipped.

    Raises:
      UserError: it is not compressed by gzip, is cut short, has a line of more than 256 MiB, or
        there is no room for what it holds.
    """

    _counted = ", decompressed"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as self is
            weakref.finalize(self, self._file.close)
            with gzip.open(path, "rb") as file:
                self._index(self._stored(_blocks(cast(IO[bytes], file))))
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is not a readable gzip file: {error}") from None

    def _stored(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        size = 0
        for block in blocks:
            try:
                _write(self._file.fileno(), block)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                free = shutil.disk_usage(tempfile.gettempdir()).free
                raise UserError(
                    f"{self.path}: decompressed it has more than {in_units(size)}, and"
                    f" {tempfile.gettempdir()} has {in_units(free)} left; set TMPDIR to a directory"
                    " with more room, or decompress it to a .jsonl"
                ) from None
            size += len(block)
            yield block

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._file.fileno(), end - start, start)


def _write(file: int, block: bytes) -> None:
    while block:
        block = block[os.write(file, block) :]


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK), b"")


def index_lines(
    blocks: Iterable[bytes], check: Check | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    r"""Start offsets of the nonblank lines of a text.

    Args:
      blocks: the text, in pieces of any size.
      check: called after each piece.

    Returns:
      ([n] int64, bytes before each line; [n] int64, its number from 1; bytes of the text).

    >>> starts, numbers, size = index_lines([b"a\n \nb", b"c\n"])
    >>> starts.tolist(), numbers.tolist(), size
    ([0, 4], [1, 3], 7)
    """
    starts, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    begin, number, size, has_text = 0, 1, 0, False  # of the line that the last piece ended in
    for block in blocks:
        piece = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(piece == _NEWLINE)
        text = np.cumsum(_IS_TEXT[piece])
        at_ends = text[ends]
        solid = np.diff(at_ends, prepend=0) > 0
        if len(ends):
            solid[0] |= has_text
            first = np.append(np.int64(begin), ends[:-1] + (size + 1))
            starts.append(first[solid])
            numbers.append(np.flatnonzero(solid) + number)
            begin, number = size + int(ends[-1]) + 1, number + len(ends)
            has_text = bool(text[-1] > at_ends[-1])
        else:
            has_text |= bool(text[-1] > 0)
        size += len(piece)
        if check is not None:
            check(number, size - begin)
    if has_text:
        starts.append(np.array([begin], np.int64))
        numbers.append(np.array([number], np.int64))
    begins = np.concatenate(starts)
    starts.clear()  # before the numbers are joined, too
    return begins, np.concatenate(numbers), size
