"""Final answers in reference answers, found by a regular expression within a time limit."""

from __future__ import annotations

import collections
import json
import re
import signal
import subprocess
import sys
import threading

from jrl.data.invalid import SlowPattern
from jrl.system.time_limit import time_limit

MOST_SECONDS = 5.0
"""Of the processor for one answer; usual patterns take a millionth of it."""

_REPEATS = 2
"""Of a pattern that is matched without a limit where a thread cannot have one."""
_MATCHER = """
import json, re, signal, sys
seconds, pattern, text = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # ends the process
last = None
for last in re.finditer(pattern, text):
    pass
print(json.dumps(None if last is None else last.group(1) or ""))
"""


class _TooSlow(Exception):
    """A pattern takes too long."""


def find_answer(pattern: str, text: str, where: str) -> str | None:
    r"""The first group of a pattern's last match in a text; None where it does not match.

    Args:
      pattern: a regular expression with a group.
      text: the reference answer.
      where: file and line, for errors.

    Raises:
      SlowPattern: it takes longer than ``MOST_SECONDS`` over the text, as "(a+)+b" may.

    >>> find_answer(r"#### (\d+)", "#### 1 or #### 2", "a.jsonl, line 1")
    '2'
    """
    main = threading.current_thread() is threading.main_thread()
    try:
        if not main and _may_be_slow(pattern):
            return _by_process(pattern, text)
        with time_limit(MOST_SECONDS, _TooSlow, processor=True):
            last = collections.deque(re.finditer(pattern, text), maxlen=1)
    except _TooSlow:
        raise SlowPattern(
            f"{where}: data.answer_pattern = {pattern!r} takes longer than {MOST_SECONDS:g} s on"
            " this answer; avoid repeats inside repeats, such as (a+)+"
        ) from None
    return (last[0].group(1) or "") if last else None


def _may_be_slow(pattern: str) -> bool:
    """Whether a pattern repeats a group, without which no repeat is in another, or much."""
    return bool(re.search(r"\)\s*[*+{]", pattern)) or len(re.findall("[*+}]", pattern)) > _REPEATS


def _by_process(pattern: str, text: str) -> str | None:
    """As ``find_answer``; 20 ms, for threads, which no timer interrupts."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MATCHER],
        input=json.dumps([MOST_SECONDS, pattern, text]),
        capture_output=True,
        encoding="ascii",
        check=False,
    )
    if done.returncode == -signal.SIGVTALRM:
        raise _TooSlow
    done.check_returncode()
    answer: str | None = json.loads(done.stdout)
    return answer
