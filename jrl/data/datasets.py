"""Rows of prompts from files, TFDS and the Hub, and the order in which a run visits them."""

from __future__ import annotations

import bisect
import difflib
import glob
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.data.lines import GzipDataset, JsonlDataset
from jrl.data.tables import (
    Chain,
    CsvDataset,
    Dataset,
    JsonDataset,
    Mixture,
    check_rows_fit,
    holds_lines,
)
from jrl.errors import UserError
from jrl.hub import data_files, hub_name
from jrl.system.extras import need
from jrl.system.json_text import refuse_pointer
from jrl.system.memory import check_fits
from jrl.user_code import PYTHON_PREFIX, python_value

_KINDS: Mapping[str, Callable[[Path], Dataset]] = {
    ".csv": CsvDataset,
    ".json": lambda path: JsonlDataset(path) if holds_lines(path) else JsonDataset(path),
    ".jsonl": JsonlDataset,
    ".jsonl.gz": GzipDataset,
    ".parquet": lambda path: ParquetDataset(path),
    ".tsv": CsvDataset,
}
"""Suffixes of files that are read."""

_FORMS = (
    "name a FILE.jsonl, .jsonl.gz, .parquet, .csv, .tsv or .json, files as DIR/*.jsonl,"
    " tfds:NAME[:SPLIT], or a data set of the Hugging Face Hub as ORG/NAME[/CONFIG][:SPLIT]"
)


EPISODES = "episodes:"
"""Prefix of rows that only number episodes, whose environment brings its own problems."""
_MOST_EPISODES = 10_000_000


def _numbered(spec: str, key: str) -> list[dict[str, Any]]:
    """Rows that say nothing but their number."""
    text = spec.removeprefix(EPISODES)
    count = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= count <= _MOST_EPISODES:
        raise UserError(f"{key} = {spec!r}; write episodes:N, with 1 to {_MOST_EPISODES} episodes")
    return [{"question": f"Episode {i}.", "answer": "-"} for i in range(1, count + 1)]


def open_dataset(
    spec: str | Mapping[str, float], *, tfds_dir: str | None = None, key: str = "data"
) -> Dataset:
    """The rows that a specification names.

    Args:
      spec: a file (JSONL, also compressed by gzip, Parquet, CSV, TSV, or JSON with one list or
        with an object a line); several of one kind as a pattern, such as ``DIR/*.jsonl``, in the
        order of their names; ``tfds:NAME[/CONFIG][:SPLIT]``, where
        the split is "train" when left out, and may be a slice ("train[:10%]"), and
        ``tfds:NAME/SPLIT`` works too; a data set of the Hugging Face Hub as
        ``ORG/NAME[/CONFIG][:SPLIT][@REVISION]``; or a table of several of these with their weights
        (see ``tables.Mixture``); or ``episodes:N``, for environments that bring their problems.
      tfds_dir: where prepared TFDS data lies; the environment variable TFDS_DATA_DIR when
        None, else TFDS's own default.
      key: the configuration key that holds the specification, for messages.

    Returns:
      The rows.

    Raises:
      UserError: the file is missing, empty or of another kind, TFDS or the Hub does not have the
        data, or a weight is not above 0.
    """
    if isinstance(spec, Mapping):
        for name, weight in spec.items():
            if not weight > 0:
                raise UserError(f"{key}: the weight of {name!r} is {weight}; it must be above 0")
        return Mixture({x: open_dataset(x, tfds_dir=tfds_dir, key=key) for x in spec}, spec)
    if spec.startswith(PYTHON_PREFIX):
        return MemoryRows(python_value(spec, key))
    if spec.startswith(EPISODES):
        return MemoryRows(_numbered(spec, key), "episode")
    if spec.startswith("tfds:"):
        return _TfdsDataset(spec, tfds_dir, key)
    if (of_hub := hub_name(spec)) is not None:
        return _rows_of(data_files(of_hub, key), spec, key)
    if not spec.strip():
        raise UserError(f"{key} = {spec!r}: is empty; {_FORMS}")
    if "://" in spec:
        raise UserError(
            f"{key} = {spec!r}: is an address, and none is fetched; download it and name the file,"
            " or name a data set of the Hugging Face Hub as ORG/NAME"
        )
    path = Path(spec).expanduser()
    if _suffix(path) is None and not path.is_dir():
        raise UserError(f"{key} = {spec!r}; {_FORMS}")
    if not path.is_file() and set("*?[") & set(spec):
        paths = sorted(glob.glob(str(path), recursive=True))
        if not paths:
            raise UserError(f"{key} = {spec!r}: no file matches (looked from {Path.cwd()})")
        return _rows_of([Path(each) for each in paths], spec, key)
    if path.is_dir():
        raise UserError(f"{key} = {spec!r}: is a directory; {_FORMS}")
    if path.exists() and not path.is_file():
        raise UserError(
            f"{key} = {spec!r}: is a pipe or a device, which is read once only; write its rows to a"
            " file and name that"
        )
    if not path.is_file():
        several = "; name several files as DIR/*.jsonl, or in a table with weights" * ("," in spec)
        raise UserError(f"{key} = {spec!r}: there is no such file {_looked(path)}{several}")
    return _rows_of([path], spec, key)


def _suffix(path: Path) -> str | None:
    """The suffix of a file that is read, or None."""
    return next((suffix for suffix in _KINDS if path.name.lower().endswith(suffix)), None)


def _looked(path: Path) -> str:
    """The searched directory, and its file with the nearest name."""
    directory = path.parent.resolve()
    names = (
        [each.name for each in directory.glob("*") if _suffix(each)] if directory.exists() else []
    )
    nearest = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {path.parent / nearest[0]}?" if nearest else ""
    return f"(looked in {directory}{'' if directory.exists() else ', which is not there'}){hint}"


def _rows_of(paths: Sequence[Path], spec: str, key: str) -> Dataset:
    """The rows of one file, or of several one after the other."""
    unread = [path for path in paths if _suffix(path) is None]
    if unread:
        raise UserError(f"{key} = {spec!r}: it matches {unread[0]}; {_FORMS}")
    for path in paths:
        refuse_pointer(path)
    sources = [_KINDS[_suffix(path) or ""](path) for path in paths]
    if not any(map(len, sources)):
        raise UserError(f"{key} = {spec!r}: the file has no rows")
    rows = sources[0] if len(sources) == 1 else Chain(sources)
    check_rows_fit(rows, f"{key} = {spec!r}")
    return rows


class MemoryRows:
    """Rows in memory.

    Args:
      rows: dicts.
      name: of a row in errors, followed by its number.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], name: str = "row") -> None:
        self._rows, self._name = rows, name

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row ``index``."""
        return self._rows[index]

    def where(self, index: int) -> str:
        """The name of a row for error messages, counted from 1."""
        return f"{self._name} {index + 1}"


class ParquetDataset:
    """The rows of a Parquet file; one row group is in memory at a time.

    Args:
      path: the file.
    """

    def __init__(self, path: Path) -> None:
        parquet = need("pyarrow.parquet", "data", f"reading {path}")
        self.path = path
        try:
            self._file = parquet.ParquetFile(path)
        except need("pyarrow", "data", "Parquet").ArrowException as error:
            raise UserError(f"{path} is not a readable Parquet file: {error}") from None
        groups = [self._file.metadata.row_group(i) for i in range(self._file.num_row_groups)]
        largest = max((group.total_byte_size for group in groups), default=0)
        check_fits(
            f"{path}, its largest row group", 2 * largest, "write it with smaller row groups"
        )
        counts = [group.num_rows for group in groups]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self._group: tuple[int, list[dict[str, Any]]] = (-1, [])

    def __len__(self) -> int:
        """Rows."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The row's columns by name.

        Raises:
          UserError: its row group is damaged.
        """
        number = bisect.bisect_right(self._starts, index) - 1
        if self._group[0] != number:
            # Damage of pages is an OSError, of what is in them an ArrowException.
            damage = (OSError, need("pyarrow", "data", "Parquet").ArrowException)
            try:
                rows = self._file.read_row_group(number).to_pylist()
                self._group = (number, [_without_nulls(row) for row in rows])
            except damage as error:
                reason = " ".join(str(error).split())
                raise UserError(
                    f"{self.where(index)}: row group {number} cannot be read: {reason:.200}"
                ) from None
        return self._group[1][index - self._starts[number]]

    def where(self, index: int) -> str:
        """File and row, counted from 0."""
        return f"{self.path}, row {index}"


def _without_nulls(value: Any, inside: bool = False) -> Any:
    """A row without the keys that Parquet adds to arguments and schemas of tools.

    Its objects have all keys of all rows, and null where a row's own object has none.
    """
    if isinstance(value, list):
        return [_without_nulls(item, inside) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_nulls(item, inside or name in ("arguments", "parameters"))
        for name, item in value.items()
        if not (inside and item is None)
    }


class _TfdsDataset:
    """A split of a TFDS dataset, read without TensorFlow."""

    def __init__(self, spec: str, tfds_dir: str | None, key: str) -> None:
        self.spec = spec
        self._rows = _tfds_rows(spec, tfds_dir, key)
        if not len(self._rows):
            raise UserError(f"{key} = {spec!r}: the split has no rows")

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The example's features, bytes decoded to text."""
        return _plain(self._rows[index])

    def where(self, index: int) -> str:
        """Specification and row, counted from 0."""
        return f"{self.spec}, row {index}"


def _plain(value: Any) -> Any:
    """A TFDS example with text for bytes and Python's own numbers for NumPy's scalars."""
    if isinstance(value, Mapping):
        return {name: _plain(inside) for name, inside in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray | list | tuple):
        if isinstance(value, np.ndarray) and value.dtype != object:
            return value if value.ndim else value.item()
        return [_plain(inside) for inside in value]
    return value.item() if isinstance(value, np.generic) else value


def _tfds_rows(spec: str, tfds_dir: str | None, key: str) -> Any:
    """A random-access source of a TFDS split, downloading what is not prepared."""
    tfds = need("tensorflow_datasets", "tfds", f"{key} = {spec!r}")
    name, _, split = spec.removeprefix("tfds:").partition(":")
    root = Path(tfds_dir or os.environ.get("TFDS_DATA_DIR") or tfds.core.constants.DATA_DIR)
    root = root.expanduser()
    version = _prepared(root / name)
    if version is None and not split and "/" in name and (root / name).parent.is_dir():
        # NAME/SPLIT; a prepared NAME/CONFIG would have been found above
        parent, _, last = name.rpartition("/")
        if (version := _prepared(root / parent)) is not None:
            name, split = parent, last
    split = split or "train"
    try:
        if version is not None:
            return tfds.builder_from_directory(version).as_data_source(split=split)
        if name.split("/")[0] == "gsm8k":
            raise UserError(
                f"{key} = {spec!r}: GSM8K is not prepared in {root}; set TFDS_DATA_DIR to where it "
                "is, or prepare it from its JSONL files with python -m jrl.zoo.tools.gsm8k "
                f"--dir {root} --train train.jsonl --test test.jsonl"
            )
        return tfds.data_source(
            name,
            split=split,
            data_dir=root,
            builder_kwargs={"file_format": "array_record"},
        )
    except UserError:
        raise
    except Exception as error:  # TFDS raises many kinds, most of them its own
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        nearest = difflib.get_close_matches(name.split("/")[0], _tfds_names(root), n=1)
        hint = f"; did you mean tfds:{nearest[0]}?" if nearest else ""
        raise UserError(
            f"{key} = {spec!r}, looked for in {root}: {type(error).__name__}: {first}{hint};"
            " name a prepared dataset and one of its splits as tfds:NAME[/CONFIG][:SPLIT], and its"
            " directory in TFDS_DATA_DIR"
        ) from error


def _tfds_names(root: Path) -> list[str]:
    """Data sets that are prepared here, and GSM8K, which this library prepares itself."""
    names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return [*names, "gsm8k"]


def _prepared(directory: Path) -> str | None:
    """The newest prepared version below a dataset's directory, or None."""
    versions = [path.parent for path in directory.glob("*/dataset_info.json")]
    versions.sort(key=lambda path: [int(part) for part in path.name.split(".") if part.isdigit()])
    return str(versions[-1]) if versions else None


def order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order in which an epoch visits the rows, a pure function of its arguments.

    Args:
      seed: of the run.
      epoch: passes over the data before this one.
      size: rows.

    Returns:
      [size] int64, a permutation, from raw words of the counter-based generator Philox, which no
      version of NumPy changes.

    >>> order(0, 0, 5).tolist() == order(0, 0, 5).tolist() != order(0, 1, 5).tolist()
    True
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    words = np.random.Philox(key=key).random_raw(size)
    return np.argsort(words, kind="stable")
