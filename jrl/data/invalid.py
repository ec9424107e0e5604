"""Rows that cannot be used: all of them named at once, or left out and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jrl.data.tables import Dataset
from jrl.errors import UserError, unknown_choice

T = TypeVar("T")
OVERLONG = ("error", "drop", "truncate")

_SHOWN = 4
"""Rows that a message names."""

_LOOKED = 10_000
"""Rows that are still read after the first that cannot be used, to say how many there are."""


class TooLong(UserError):
    """A row is above a limit; ``data.overlong`` says what happens to it."""


class SlowPattern(UserError):
    """A pattern takes too long over a row; so it does over others, which are not tried."""


class Overlong:
    """Decides about rows above a limit, and counts them.

    Args:
      choice: of ``OVERLONG``.

    Attributes:
      dropped: rows left out.
      truncated: rows of which a part is used.

    Raises:
      UserError: it is none of these.
    """

    def __init__(self, choice: str) -> None:
        if choice not in OVERLONG:
            raise unknown_choice("data.overlong", choice, OVERLONG)
        self._choice, self.dropped, self.truncated = choice, 0, 0

    def truncates(self, error: TooLong, useful: bool = True) -> bool:
        """Whether a row is to be truncated; it is to be left out otherwise.

        Args:
          error: about the row, raised where such rows are errors.
          useful: whether what truncation leaves can be used.
        """
        if self._choice == "error":
            raise error
        truncates = self._choice == "truncate" and useful
        self.truncated += truncates
        self.dropped += not truncates
        return truncates


def read_rows(
    source: Dataset,
    read: Callable[[int, Mapping[str, Any], str], T | None],
    *,
    invalid: str,
    system: str | None = None,
) -> tuple[list[T], str]:
    """What a function makes of the rows of a source.

    Args:
      source: the rows.
      read: (index, row, file and line) -> what it makes of the row, None to leave it out; a
        UserError for a row that cannot be used.
      invalid: for those rows: "error", or "skip", which counts them.
      system: ``Wording.system``.

    Returns:
      (all that was made, the skipped rows and a column that is not read for a log, or "").

    Raises:
      UserError: there were such rows and they are not to be skipped, or there were no others; or
        TooLong or SlowPattern from ``read``.
    """
    made: list[T] = []
    problems: list[tuple[str, str]] = []
    skip, last, unread = invalid == "skip", len(source), 0
    for index in range(len(source)):
        if index > last and not skip:
            break
        where = source.where(index)
        try:
            item = read(index, row := source[index], where)
        except UserError as error:
            if isinstance(error, TooLong) or (isinstance(error, SlowPattern) and not skip):
                raise
            last = last if problems else index + _LOOKED
            message = str(error)  # one about the template or the tokenizer does not know the row
            problems.append((where, message if where in message else f"{where}: {message}"))
        else:
            made += [] if item is None else [item]
            unread += _lacks_system(row, system)
    notes = [_skipped(problems, len(source), skip)]
    if unread:
        notes.append(
            f"the column system of {unread} rows is in no prompt: set data.system for all rows, or"
            " write each row's as the first message"
        )
    return made, "; ".join(filter(None, notes))


def _lacks_system(row: Mapping[str, Any], system: str | None) -> bool:
    """Whether the prompt lacks the text of a column "system", as files of Alpaca's form have it."""
    text = row.get("system")
    if system is not None or not isinstance(text, str) or not text.strip():
        return False
    lists = [x for x in row.values() if isinstance(x, list | tuple | np.ndarray) and len(x)]
    return not any(isinstance(x[0], Mapping) and x[0].get("role") == "system" for x in lists)


def _skipped(problems: Sequence[tuple[str, str]], rows: int, skip: bool) -> str:
    if not problems:
        return ""
    (_, first), more = problems[0], [where for where, _ in problems[1:]]
    places = ", ".join(more[:_SHOWN]) + (", ..." if len(more) > _SHOWN else "")
    if skip and len(problems) < rows:
        rest = f"; and {places}" if more else ""
        return f"{len(problems)} of {rows} rows skipped: {first}{rest}"
    if len(problems) == rows or not more:
        hint = "" if rows == 1 or more else "; data.invalid = 'skip' leaves such rows out"
        raise UserError(f"{first}{hint}")
    raise UserError(
        f"{first}; and {len(more)} more rows cannot be used ({places}); data.invalid ="
        " 'skip' leaves them out"
    )
