"""The working directory of the process, which code of users may change under everybody else."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator


@contextlib.contextmanager
def same_working_directory(user_code: str) -> Iterator[None]:
    """Goes back at the end, and warns, where something inside has changed the working directory.

    All threads share it: files of the run that are named by relative paths would be written and
    looked for elsewhere from then on.

    Args:
      user_code: what runs inside, for the warning.
    """
    before = _directory()
    try:
        yield
    finally:
        now = _directory()
        if before and now != before:
            os.chdir(before)
            logging.getLogger("jrl").warning(
                "%s changed the working directory of the process to %s, which everything in it"
                " shares; it was set back; write absolute paths, or play it in a process of its own"
                " (data.isolate)",
                user_code,
                now or "one that is gone",
            )


def _directory() -> str:
    """The working directory; "" where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""
