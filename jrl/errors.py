"""Errors for users: each names the key, the value and the valid choices."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_FEW = 24
"""With more choices than this a message lists only the nearest ones."""
_TEXT = 500
"""Characters that a message takes of an error's text."""


class UserError(ValueError):
    """An error that the user can fix; the command line prints it without a traceback.

    Attributes:
      exit_code: of the ``jrl`` command; ``configs/README.md`` lists them all.
    """

    exit_code = 2


class RunStopped(UserError):
    """A run that stopped itself because further training is pointless; says what to do."""

    exit_code = 3


class Overdue(RunStopped):
    """A wait on the host took longer than ``train.wait_seconds``."""


class StorageError(UserError):
    """A failed write of the run: the disk is full, read-only or gone."""

    exit_code = 4


INTERRUPTED = 130
"""The exit code after SIGINT, SIGTERM or SIGHUP; the same command resumes."""


def error_text(error: BaseException) -> str:
    """The text of an exception, shortened; a note if ``str`` of it raises."""
    try:
        # Without lone surrogates, which no terminal takes.
        return str(error)[:_TEXT].encode("utf-8", "backslashreplace").decode()
    except BaseException as another:
        return f"(and its text raises {class_name(another)})"


def class_name(value: object) -> str:
    """The name of a value's class, whatever its metaclass says it is."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name


def unknown_choice(key: str, value: object, choices: Iterable[str]) -> UserError:
    """An error for a value outside a closed set, with the nearest choice.

    Args:
      key: the configuration key or argument, as the user writes it.
      value: the user's value.
      choices: the valid values.

    Returns:
      The error, for the caller to raise.

    >>> str(unknown_choice("objective.advantage", "rlo", ["grpo", "rloo"]))
    "objective.advantage = 'rlo'; did you mean 'rloo'? choose from grpo, rloo"
    """
    return UserError(f"{key} = {value!r}; {nearest(value, choices)}")


def nearest(value: object, choices: Iterable[str]) -> str:
    """Suggestions for a value outside a closed set: the nearest choice, and all if they are few.

    >>> nearest("rlo", ["grpo", "rloo"])
    "did you mean 'rloo'? choose from grpo, rloo"
    """
    names = sorted(choices)
    if not names:
        return "there is none to choose from"
    if len(names) > _FEW:
        close = _close(str(value), names, 3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "none is like it;"
        return f"{hint} there are {len(names)}"
    close = _close(str(value), names, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choose from {', '.join(names)}"


def _close(value: str, names: Sequence[str], n: int) -> list[str]:
    """The nearest names: those that differ in the case of letters alone, else by their letters."""
    same = [name for name in names if name.casefold() == value.strip().casefold()]
    return same[:n] or difflib.get_close_matches(value, names, n=n)


class Mistakes:
    """Collects the errors of an input's parts, to report all of them at once.

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
        """The result of ``work``; None if it raises, with the lines of its error recorded."""
        try:
            return work()
        except kind as error:
            self.lines += [line for line in str(error).splitlines() if line not in self.lines]
        return None

    def check(self) -> None:
        """Raises a UserError with a line for each mistake; does nothing if there is none."""
        if self.lines:
            raise UserError("\n".join(self.lines))
