"""Copies standard input to standard output without XLA's alarm about slow compilation.

Run as a script by ``compile_alarm``, outside the package: only the standard library, imported
quickly. Lines are passed on as soon as it is certain that they are not the alarm's.
"""

from __future__ import annotations

import os
import re

ALARM = re.compile(rb"slow_operation_alarm\.cc:\d+\]")
_STARTS = re.compile(rb"[EWIF]\d{4}\b|[EWIF]\d{0,3}$")
_REST = re.compile(rb"\s*$|\*{8,}\s*$|\[Compiling module .*Very slow compile\?|The operation took ")
_MOST = 4
"""Lines of an alarm after its first: a rule, the text, a rule, and an empty one."""


class Filter:
    """Takes bytes as they come, and returns those to pass on."""

    def __init__(self) -> None:
        self._unfinished = b""
        self._left = 0

    def __call__(self, data: bytes) -> bytes:
        """Bytes that can be passed on already."""
        *lines, rest = (self._unfinished + data).split(b"\n")
        out = b"".join(line + b"\n" for line in lines if not self._is_alarm(line))
        # Half a line waits only where it may become the alarm's.
        waits = self._left > 0 or _STARTS.match(rest)
        self._unfinished = rest if waits else b""
        return out + (b"" if waits else rest)

    def end(self) -> bytes:
        """The remaining bytes at the end."""
        rest, self._unfinished = self._unfinished, b""
        return b"" if rest and self._is_alarm(rest) else rest

    def _is_alarm(self, line: bytes) -> bool:
        if ALARM.search(line):
            self._left = _MOST
            return True
        if self._left and _REST.match(line):
            self._left -= 1
            return True
        self._left = 0
        return False


def main() -> None:
    """Filters until the input ends."""
    keep = Filter()
    while data := os.read(0, 65536):
        _write(keep(data))
    _write(keep.end())


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
