"""Reference solutions, run before a run begins: rows whose own solution is judged wrong are named.

Those that pass are remembered by their content, so that the next start runs none of them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jrl.errors import UserError

_NAMED = 5
"""Rows that a message names."""


class Reference(NamedTuple):
    """Test of a row's own solution.

    Attributes:
      row: which row it is, for messages.
      content: everything that the verdict depends on, as text.
      complaint: () -> why the solution is judged wrong; "" where it is right.
    """

    row: str
    content: str
    complaint: Callable[[], str]


def broken_rows(
    references: Sequence[Reference], threads: int, done: Callable[[], None] | None = None
) -> list[tuple[str, str]]:
    """(row, complaint) of the references that are judged wrong, in their order.

    Args:
      references: of the rows.
      threads: that run them at the same time.
      done: called after each.
    """
    passed, memory = set[str](), _memory()
    with contextlib.suppress(OSError):
        passed = set((memory.read_text(encoding="utf-8") if memory else "").split())
    digests = [hashlib.sha256(each.content.encode()).hexdigest() for each in references]

    def look(at: int) -> str:
        if digests[at] in passed:
            return ""
        try:
            return references[at].complaint()
        except UserError as error:
            return str(error)
        finally:
            if done is not None:
                done()

    with ThreadPoolExecutor(max(1, threads)) as pool:
        complaints = list(pool.map(look, range(len(references))))
    new = {d for d, complaint in zip(digests, complaints, strict=True) if not complaint} - passed
    if new and memory is not None:
        with contextlib.suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            with memory.open("a", encoding="utf-8") as file:
                file.write("".join(f"{digest}\n" for digest in sorted(new)))
    return [
        (each.row, complaint)
        for each, complaint in zip(references, complaints, strict=True)
        if complaint
    ]


def message_of(part: str, broken: Sequence[tuple[str, str]], checked: int) -> str:
    """Message about rows whose own solution fails, a line for each of the first."""
    head = (
        f"rewards.{part}: {len(broken)} of {checked} rows have a solution of their own that is"
        " judged wrong; repair them or leave them out, or set"
        f" rewards.{part}.check_rows = 0 to check none"
    )
    return with_rows(head, broken)


def with_rows(head: str, broken: Sequence[tuple[str, str]]) -> str:
    """A message, and (row, complaint) of the first rows that it is about, a line each."""
    shown = [f"  {row}: {complaint}" for row, complaint in broken[:_NAMED]]
    more = [f"  and {len(broken) - _NAMED} more"] if len(broken) > _NAMED else []
    return "\n".join([head, *shown, *more])


def _memory() -> Path | None:
    """The file with the digests of references that passed; None where nothing is to be kept."""
    chosen = os.environ.get("JRL_CACHE_DIR")
    if chosen == "":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jrl"
    return Path(chosen or home).expanduser() / "references"
