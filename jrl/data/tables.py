"""Rows of CSV and JSON files, of several files in a row, and of sources by weight."""

from __future__ import annotations

import bisect
import codecs
import csv
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from jrl.errors import UserError
from jrl.system.json_text import as_object, not_utf8, parse_json
from jrl.system.memory import check_fits


class Dataset(Protocol):
    """Rows with random access."""

    def __len__(self) -> int:
        """Rows."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row ``index`` as a dict of text, numbers, lists and dicts."""
        ...

    def where(self, index: int) -> str:
        """The location of row ``index`` for error messages: "train.jsonl, line 12"."""
        ...


_LONGEST = 1 << 28
"""Characters of a CSV field and of a line; Python's own limit is 131,072, which conversations
exceed."""


class CsvDataset:
    """Rows of a CSV or TSV file whose first line names the columns; all is kept in memory.

    Args:
      path: a UTF-8 file; values are text, between tabs where its suffix is .tsv.

    Raises:
      UserError: it has no line of names, or is not UTF-8.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[tuple[int, list[str]]] = []
        form, mark = ("TSV", "\t") if path.suffix.lower() == ".tsv" else ("CSV", ",")
        usual, begin = csv.field_size_limit(_LONGEST), 1
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(_lines(file), strict=True, delimiter=mark)
                filled = (values for values in reader if any(values))  # sheets end in empty rows
                self._names = next(filled, [])
                if [name.lower() for name in self._names[:1]] == ["sep="]:  # as Excel notes it
                    self._names = next(filled, [])
                self._check_names(reader.line_num, mark)
                begin = reader.line_num + 1
                for values in reader:
                    if any(values):
                        self._rows.append((begin, values))
                    begin = reader.line_num + 1
        except UnicodeDecodeError as error:
            with path.open("rb") as raw:
                why = not_utf8(raw.read(4), error)
            raise UserError(f"{path} is not a {form} file in UTF-8: {why}") from None
        except csv.Error as error:
            raise UserError(
                f"{path}, line {begin}: not a {form} file: {error}; a quote that begins a field"
                " has another one at its end, and quotes inside of it are written twice"
            ) from None
        finally:
            csv.field_size_limit(usual)

    def _check_names(self, line: int, mark: str) -> None:
        """Raises UserError for column names that nobody meant."""
        where = f"{self.path}, line {line}"
        other = next((x for x in ";\t,|" if len(self._names) == 1 and x in self._names[0]), None)
        if other is not None:
            raise UserError(
                f"{where}: {self._names[0]!r:.80} is one name, without {mark!r}; the columns"
                f" seem to stand between {other!r}: write {mark!r} there"
                + (", or name the file .tsv" if other == "\t" else "")
            )
        if any(name and self._names.count(name) > 1 for name in self._names):
            names = ", ".join(self._names)
            raise UserError(f"{where}: two columns have one name: {names}")
        if padded := [name for name in self._names if name != name.strip()]:
            raise UserError(
                f"{where}: the column {padded[0]!r} has a space around its name; remove it"
            )

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The row's values by column, as text; those of columns without a name are left out.

        Raises:
          UserError: the line has more or fewer values than there are columns.
        """
        values = self._rows[index][1]
        if len(values) != len(self._names):
            raise UserError(
                f"{self.where(index)}: {len(values)} values for the {len(self._names)} columns"
                f" {', '.join(self._names)}"
            )
        return {name: x for name, x in zip(self._names, values, strict=True) if name}

    def where(self, index: int) -> str:
        """The file and line of a row."""
        return f"{self.path}, line {self._rows[index][0]}"


def _lines(file: IO[str]) -> Iterator[str]:
    """The lines of a file; csv.Error for one that is too long, before it is read whole."""
    while line := file.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise csv.Error(f"a line is longer than {_LONGEST} characters")
        yield line


class JsonDataset:
    """The objects of a JSON file that holds one list; all of it is kept in memory.

    Args:
      path: a UTF-8 file.

    Raises:
      UserError: it is not JSON as ``parse_json`` takes it, or not a list.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The bytes and their text, before there is any row.
        check_fits(str(path), 2 * path.stat().st_size, "write one object a line, as FILE.jsonl")
        rows = parse_json(path.read_bytes(), str(path))
        if not isinstance(rows, list):
            raise UserError(
                f"{path} must hold a list of objects; name a file of one object a line FILE.jsonl"
            )
        self._rows = rows

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The object.

        Raises:
          UserError: the item of the list is not an object.
        """
        return as_object(self._rows[index], self.where(index))

    def where(self, index: int) -> str:
        """File and row, counted from 0."""
        return f"{self.path}, row {index}"


def holds_lines(path: Path) -> bool:
    """Whether a .json file has one object per line: the first line is one, and more follow."""
    with path.open("rb") as file:
        lines = (line for line in iter(lambda: file.readline(_LONGEST), b"") if line.strip())
        first, second = next(lines, b""), b""
        if first.removeprefix(codecs.BOM_UTF8).strip().startswith(b"{"):
            second = next(lines, b"")
    try:
        return bool(second) and isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


class _Placed:
    """Rows that lie in other sources: ``_find`` says in which, and where in it."""

    _size: int

    def _find(self, index: int) -> tuple[Dataset, int]:
        raise NotImplementedError

    def __len__(self) -> int:
        """Rows, repeated ones included."""
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The row."""
        source, inside = self._find(index)
        return source[inside]

    def where(self, index: int) -> str:
        """The location of a row in its own source."""
        source, inside = self._find(index)
        return source.where(inside)


class Chain(_Placed):
    """The rows of several sources, one source after the other.

    Args:
      sources: at least one.
    """

    def __init__(self, sources: Sequence[Dataset]) -> None:
        self._sources = list(sources)
        self._starts = [0, *itertools.accumulate(map(len, sources))]
        self._size = self._starts[-1]

    def _find(self, index: int) -> tuple[Dataset, int]:
        number = bisect.bisect_right(self._starts, index) - 1
        return self._sources[number], index - self._starts[number]


class FirstRows(_Placed):
    """The first rows of a source.

    Args:
      source: all rows.
      most: rows at the most.
    """

    def __init__(self, source: Dataset, most: int) -> None:
        self._source, self._size = source, min(len(source), most)

    def _find(self, index: int) -> tuple[Dataset, int]:
        return self._source, index


_RECORD_BYTES = 400
"""Of the prompt or the completions that a row becomes, at the least (486 were measured)."""


def check_rows_fit(source: Dataset, key: str) -> None:
    """Raises UserError where there are more rows than memory holds once they are read.

    Args:
      source: of the rows; a small compressed file may hold any number of them.
      key: that names it, with its value, for the message.
    """
    check_fits(f"{key}: {len(source)} rows", _RECORD_BYTES * len(source), "give fewer rows")


_ROW_BYTES = 5 * 8
"""Of a row of a mixture while the order is found."""


class Mixture(_Placed):
    """Rows of several sources in given proportions.

    An epoch ends when the source largest relative to its weight is exhausted; the others repeat.
    Rows of the sources alternate evenly.

    Args:
      sources: by name.
      weights: name -> weight, above 0; only their proportions count.
    """

    def __init__(self, sources: Mapping[str, Dataset], weights: Mapping[str, float]) -> None:
        self._sources = [sources[name] for name in weights]
        shares = np.array(list(weights.values()), np.float64)
        parts = shares / shares.sum()
        sizes = np.array([len(source) for source in self._sources])
        largest = int(np.argmax(sizes / parts))
        rows = np.maximum(np.round(parts * sizes[largest] / parts[largest]), 1)
        weights_text = ", ".join(f"{name!r} = {weight:g}" for name, weight in weights.items())
        remedy = "bring the weights nearer to the sizes of the sources"
        setting = f"data of {rows.sum():.3g} rows by the weights {weights_text}"
        check_fits(setting, _ROW_BYTES * float(rows.sum()), remedy)
        counts = rows.astype(np.int64)
        # The i-th of n rows of a source has its place at (i + 1/2) / n of the whole.
        place = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
        order = np.argsort(place, kind="stable")
        self._number = np.repeat(np.arange(len(counts)), counts)[order]
        self._inside = np.concatenate(
            [np.arange(n) % size for n, size in zip(counts, sizes, strict=True)]
        )[order]
        self._size = len(order)

    def _find(self, index: int) -> tuple[Dataset, int]:
        return self._sources[self._number[index]], int(self._inside[index])
