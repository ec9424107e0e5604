"""Final answers in reference answers, found by a regular expression within a time limit.

Python's ``re`` can take longer than a life over a short text ("(a+)+b"), and cannot be interrupted
in its own process. So another process matches, which imports nothing and starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from types import TracebackType
from typing import Self

from jrl.errors import UserError

MOST_SECONDS = 5.0
"""Of one answer; usual patterns take a millionth of it."""

_MATCHER = """
import json, re, sys
pattern = re.compile(json.loads(sys.stdin.readline()))
for line in sys.stdin:
    last = None
    for last in pattern.finditer(json.loads(line)):
        pass
    print(json.dumps(None if last is None else last.group(1) or ""), flush=True)
"""


class AnswerFinder:
    """Finds the first group of a pattern's last match; use it in a ``with`` statement.

    Args:
      pattern: a regular expression with a group; None finds the complete text.
    """

    def __init__(self, pattern: str | None) -> None:
        self.pattern = pattern
        self._process: subprocess.Popen[str] | None = None

    def find(self, text: str, where: str) -> str | None:
        """The final answer in a text; None where the pattern does not match.

        Args:
          text: the reference answer.
          where: file and line, for errors.

        Raises:
          UserError: the pattern takes longer than ``MOST_SECONDS`` over the text.
        """
        if self.pattern is None:
            return text
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MATCHER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="ascii",
            )
            self._say(self.pattern)
        self._say(text)
        process = self._process
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], MOST_SECONDS)
        reply = process.stdout.readline() if ready else ""
        if not reply:
            problem = f"takes longer than {MOST_SECONDS:g} s" if not ready else "cannot be matched"
            raise UserError(
                f"{where}: data.answer_pattern = {self.pattern!r} {problem} on this answer; avoid "
                "repeats inside repeats, such as (a+)+"
            )
        match: str | None = json.loads(reply)
        return match

    def _say(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a dead process has no reply, which says enough
            self._process.stdin.write(json.dumps(text) + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):  # what a dead process did not read
                self._process.communicate()
            self._process = None
