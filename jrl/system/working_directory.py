"""The working directory of the process, which code of users may change under everybody else."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator


@contextlib.contextmanager
def same_working_directory(user_code: str, remedy: str) -> Iterator[None]:
    """Goes back at the end, and warns, where something inside has changed the working directory.

    All threads share it: files of the run that are named by relative paths would be written and
    looked for elsewhere from then on.

    Args:
      user_code: what runs inside, for the warning.
      remedy: what would do in its place, for the warning.
    """
    before = os.getcwd()
    try:
        yield
    finally:
        now = ""
        with contextlib.suppress(OSError):  # it may have been removed since
            now = os.getcwd()
        if now != before:
            os.chdir(before)
            logging.getLogger("jrl").warning(
                "%s changed the working directory of the process to %s, which everything in it"
                " shares; it was set back; %s",
                user_code,
                now or "one that is gone",
                remedy,
            )
