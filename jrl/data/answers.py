"""Final answers in reference answers, found by a regular expression within a time limit."""

from __future__ import annotations

import collections
import re

from jrl.errors import UserError
from jrl.system.time_limit import time_limit

MOST_SECONDS = 5.0
"""Of the processor for one answer; usual patterns take a millionth of it."""


class _TooSlow(Exception):
    """A pattern takes too long."""


def find_answer(pattern: str, text: str, where: str) -> str | None:
    r"""The first group of a pattern's last match in a text; None where it does not match.

    Args:
      pattern: a regular expression with a group.
      text: the reference answer.
      where: file and line, for errors.

    Raises:
      UserError: the pattern takes longer than ``MOST_SECONDS`` over the text, as "(a+)+b" may.

    >>> find_answer(r"#### (\d+)", "#### 1 or #### 2", "a.jsonl, line 1")
    '2'
    """
    try:
        with time_limit(MOST_SECONDS, _TooSlow, processor=True):
            last = collections.deque(re.finditer(pattern, text), maxlen=1)
    except _TooSlow:
        raise UserError(
            f"{where}: data.answer_pattern = {pattern!r} takes longer than {MOST_SECONDS:g} s on"
            " this answer; avoid repeats inside repeats, such as (a+)+"
        ) from None
    return (last[0].group(1) or "") if last else None
