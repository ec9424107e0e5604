"""Errors meant for people: each names the key, the value and what would do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

_FEW = 24
"""Of more choices than this a message names the nearest alone."""


class UserError(ValueError):
    """Something the user can mend; the command line prints it without a traceback.

    Attributes:
      exit_code: what ``jrl`` ends with; ``configs/README.md`` lists them all.
    """

    exit_code = 2


class RunStopped(UserError):
    """A run that ended itself because training on would do no good; the message says what to do."""

    exit_code = 3


class Overdue(RunStopped):
    """A wait on the host took longer than ``train.wait_seconds``."""


class StorageError(UserError):
    """What a run writes cannot be written: the disk is full, read-only or gone."""

    exit_code = 4


INTERRUPTED = 130
"""The exit code after SIGINT, SIGTERM or SIGHUP; the same command resumes."""


def unknown_choice(key: str, value: object, choices: Iterable[str]) -> UserError:
    """An error for a value outside a closed set, with the nearest choice named.

    Args:
      key: the configuration key or argument, as the user writes it.
      value: what was given.
      choices: what would do.

    Returns:
      The error, for the caller to raise.

    >>> str(unknown_choice("objective.advantage", "rlo", ["grpo", "rloo"]))
    "objective.advantage = 'rlo'; did you mean 'rloo'? choose from grpo, rloo"
    """
    return UserError(f"{key} = {value!r}; {nearest(value, choices)}")


def nearest(value: object, choices: Iterable[str]) -> str:
    """What could be meant by a value outside a closed set: the nearest, and all if they are few.

    >>> nearest("rlo", ["grpo", "rloo"])
    "did you mean 'rloo'? choose from grpo, rloo"
    """
    names = sorted(choices)
    if len(names) > _FEW:
        near = difflib.get_close_matches(str(value), names, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "none is like it;"
        return f"{hint} there are {len(names)}"
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}choose from {', '.join(names)}"


class Mistakes:
    """Collects what is wrong with parts of an input, so that all of it is told at once.

    >>> mistakes = Mistakes()
    >>> mistakes.look(lambda: 3)
    3
    >>> mistakes.look(lambda: int("x"), ValueError)
    >>> len(mistakes.lines)
    1
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def look(self, work: Callable[[], Any], kind: type[Exception] = UserError) -> Any:
        """What ``work`` returns; None where it raises, with the lines of its error kept."""
        try:
            return work()
        except kind as error:
            self.lines += [line for line in str(error).splitlines() if line not in self.lines]
        return None

    def check(self) -> None:
        """Raises a UserError with a line for each mistake; does nothing if there is none."""
        if self.lines:
            raise UserError("\n".join(self.lines))
