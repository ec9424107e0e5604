"""JSON that others wrote: read whole, or refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jrl.errors import UserError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | str, where: str) -> Any:
    """The value of a JSON text.

    Args:
      data: UTF-8, with or without a byte order mark.
      where: file and line, or what the text is, for errors.

    Raises:
      UserError: not UTF-8, not JSON, nested too deeply, or with half of a character (a lone
        surrogate), which no tokenizer and no file takes.
    """
    try:
        raw = data.encode() if isinstance(data, str) else data
        found = json.loads(raw.decode("utf-8-sig"))
        if _SURROGATE.search(raw):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(
            f"{where}: holds {half}, half of a character (a lone surrogate); write the whole "
            "character, or remove it"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text: {error}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply to be read; use fewer levels") from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None


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
    found = parse_json(data, str(path))
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(found).__name__}")
    return found
