"""External JSON: parsed completely, or refused in one line."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from jrl.errors import UserError

_POINTER = b"version https://git-lfs"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | str, where: str) -> Any:
    """The value of a JSON text.

    Args:
      data: UTF-8, with or without a byte order mark.
      where: file and line, or what the text is, for errors.

    Raises:
      UserError: not UTF-8, not JSON, nested too deeply, with half of a character (a lone
        surrogate), which no tokenizer and no file takes, or with two values for one key.
    """
    try:
        raw = data.encode() if isinstance(data, str) else data
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=one_value_each)
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(
            f"{where}: holds {half}, half of a character (a lone surrogate); write the whole "
            "character, or remove it"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text: {not_utf8(raw, error)}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply to be read; use fewer levels") from None
    except TwoValues as error:
        raise UserError(f"{where}: {error}; keep one of them") from None
    except ValueError as error:
        why = str(error)
        if "digits" in why:  # Python's remedy is not one of files
            why = "a number with thousands of digits; write it as text"
        raise UserError(f"{where}: not valid JSON: {why}") from None


def json_or_none(text: str | bytes) -> Any:
    """The value of a text that may be JSON, as Python reads it; None for any other text.

    >>> json_or_none('{"a": 1}'), json_or_none("{a")
    ({'a': 1}, None)
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_BEGINNINGS = {
    b"\x1f\x8b": "it begins as a gzip file; name it .jsonl.gz, or decompress it",
    b"PK\x03\x04": "it begins as a zip archive, as sheets of Excel do; unpack or export it",
    b"PAR1": "it begins as a Parquet file; name it .parquet",
    b"\xff\xfe": "it begins as UTF-16; save it as UTF-8",
    b"\xfe\xff": "it begins as UTF-16; save it as UTF-8",
}


def not_utf8(data: bytes, error: UnicodeDecodeError) -> str:
    """Why bytes are no UTF-8: the kind of file that they begin like, else what Python says."""
    usual = f"{error}; save it as UTF-8"
    return next((text for mark, text in _BEGINNINGS.items() if data.startswith(mark)), usual)


class TwoValues(Exception):
    """A JSON object has a key twice, and not with the same value."""


def one_value_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook``: Python's own takes the last value of a key, others the first.

    Raises:
      TwoValues: that.
    """
    entries = dict(pairs)
    if len(entries) < len(pairs):
        for key, value in pairs:
            if repr(value) != repr(entries[key]):  # 1, 1.0 and true are three values
                one, other = repr(value)[:60], repr(entries[key])[:60]
                raise TwoValues(f"the key {key!r} is there twice, with {one} and with {other}")
    return entries


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when the file is missing.

    Raises:
      UserError: the file cannot be read, or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    refuse_pointer(path)
    value = parse_json(data, str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def refuse_pointer(path: Path) -> None:
    """Raises UserError for the pointer file of a clone without Git LFS."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise UserError(
                f"{path}: a Git LFS pointer instead of the file; run `git lfs pull` where it came"
                " from"
            )


def as_object(value: Any, where: str) -> dict[str, Any]:
    """The value, if it is an object; raises UserError, which names the place, if it is not."""
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: must hold a JSON object with named fields, not a {type(value).__name__}"
        )
    return value
