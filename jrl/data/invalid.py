"""Rows that cannot be used: all of them named at once, or left out and counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jrl.errors import UserError

_SHOWN = 4
"""Rows that a message names."""

_LOOKED = 10_000
"""Rows that are still read after the first that cannot be used, to say how many there are."""


class TooLong(UserError):
    """A row is above a limit; ``data.overlong`` says what happens to it."""


class BadRows:
    """Collects the errors of rows.

    Args:
      skip: whether such rows are left out; else ``finish`` raises.
    """

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self._problems: list[tuple[str, str]] = []
        self._last = 0

    @contextlib.contextmanager
    def row(self, index: int, where: str) -> Iterator[None]:
        """Notes a UserError raised inside instead of letting it out; TooLong goes out at once."""
        try:
            yield
        except TooLong:
            raise
        except UserError as error:
            if not self._problems:
                self._last = index + _LOOKED
            message = str(error)  # one about the template or the tokenizer does not know the row
            self._problems.append((where, message if where in message else f"{where}: {message}"))

    def enough(self, index: int) -> bool:
        """Whether no more rows need be read, because an error will be raised."""
        return bool(self._problems) and not self._skip and index > self._last

    def finish(self, rows: int) -> str:
        """The skipped rows, for a log; "" if none.

        Args:
          rows: read, usable or not.

        Raises:
          UserError: there were such rows and they are not to be skipped, or there were no others.
        """
        if not self._problems:
            return ""
        (_, first), more = self._problems[0], [where for where, _ in self._problems[1:]]
        places = ", ".join(more[:_SHOWN]) + (", ..." if len(more) > _SHOWN else "")
        if self._skip and len(self._problems) < rows:
            rest = f"; and {places}" if more else ""
            return f"{len(self._problems)} of {rows} rows skipped: {first}{rest}"
        if len(self._problems) == rows or not more:
            hint = "" if rows == 1 or more else "; data.invalid = 'skip' leaves such rows out"
            raise UserError(f"{first}{hint}")
        raise UserError(
            f"{first}; and {len(more)} more rows cannot be used ({places}); data.invalid ="
            " 'skip' leaves them out"
        )
