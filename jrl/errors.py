"""Errors meant for people: each names the key, the value and what would do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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


def choose(key: str, value: object, choices: Iterable[str]) -> UserError:
    """An error for a value outside a closed set, with the nearest choice named.

    Args:
      key: the configuration key or argument, as the user writes it.
      value: what was given.
      choices: what would do.

    Returns:
      The error, for the caller to raise.

    >>> str(choose("objective.advantage", "rlo", ["grpo", "rloo"]))
    "objective.advantage = 'rlo'; did you mean 'rloo'? choose from grpo, rloo"
    """
    names = sorted(choices)
    if len(names) > _FEW:
        near = difflib.get_close_matches(str(value), names, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "none is like it;"
        return UserError(f"{key} = {value!r}; {hint} there are {len(names)}")
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"{key} = {value!r}; {hint}choose from {', '.join(names)}")
