"""The process of its own in which chat templates are rendered.

A list in a list in a list, a method of bytes, the digits of a number: a single step of Python's may
need more memory than the machine has, and no look at a clock comes between. Which steps do is a
list without end, so the system itself keeps the limits. The process starts with the first
conversation and serves all that follow.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from jrl.errors import UserError

MOST_MEMORY = 1 << 30
"""Bytes of addresses; an interpreter with Jinja takes a tenth of it."""

MOST_BYTES = 10_000_000
"""Of a conversation, before and after it is rendered; the longest contexts hold fewer."""

_START_SECONDS = 60.0
_HEAD = struct.Struct("<??Q")  # whether it is a text or an error, read the clock; bytes that follow

_PROGRAM = (
    "import jinja2.sandbox; from jrl.models import chat_template, template_process;"
    " template_process.serve(chat_template.render_here)"
)

_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None


def _forget() -> None:
    """In a fork: its parent's process is not its own, and no thread is there to free the lock."""
    global _lock, _process
    _lock = threading.Lock()
    if _process is not None:
        _process.returncode = 0  # or it would warn that the process still runs
        for stream in (_process.stdin, _process.stdout):
            assert stream is not None
            os.close(stream.fileno())  # first: what is left to be written is the parent's
            with contextlib.suppress(OSError):
                stream.close()
        _process = None


os.register_at_fork(after_in_child=_forget)


def render_apart(
    template: str, variables: Mapping[str, Any], source: str, seconds: float
) -> tuple[str, bool]:
    """``chat_template.render_here`` in another process, within ``MOST_MEMORY``.

    Args:
      template: Jinja.
      variables: of the template, values that can be pickled.
      source: where the template is from, for errors.
      seconds: limit of time.

    Raises:
      UserError: what ``render_here`` raises; or it ran out of memory or time in a single step.
    """
    says = f"the chat template of {source} says: "
    try:
        request = pickle.dumps((template, dict(variables), source))
    except Exception as error:  # whatever a value's own methods raise
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{says}a value cannot be sent to it: {reason}") from None
    if len(request) > MOST_BYTES:
        raise UserError(
            f"the messages hold more than {MOST_BYTES} bytes, the most that a conversation may"
            " have; shorten them, or leave the row out"
        )
    with _lock:
        try:
            process = _started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(struct.pack("<dQ", seconds, len(request)) + request)
            process.stdin.flush()
            end = time.monotonic() + seconds
            good, clock, size = _HEAD.unpack(_read(process.stdout, _HEAD.size, end))
            text = _read(process.stdout, size, end).decode()
        except TimeoutError:
            _end()
            reason = f"it takes longer than {seconds:g} s; loop over the messages only"
            raise UserError(says + reason) from None
        except (EOFError, OSError):
            _end()
            raise UserError(f"{says}it ended the process that renders it") from None
        except BaseException:  # an interrupt: the answer would be taken for the next one's
            _end()
            raise
    if not good:
        raise UserError(text)
    return text, clock


def _started() -> subprocess.Popen[bytes]:
    """The process, ready for a conversation."""
    global _process
    if _process is None or _process.poll() is not None:
        paths = [os.path.abspath(path or ".") for path in sys.path]
        code = f"import sys; sys.path[:] = {paths!r}; {_PROGRAM}"
        _process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8"},
            start_new_session=True,  # Ctrl-C is for the caller, who may render another
        )
        assert _process.stdout is not None
        if _read(_process.stdout, 1, time.monotonic() + _START_SECONDS) != b"!":
            raise OSError("no start")
    return _process


@atexit.register
def _end() -> None:
    global _process
    if _process is not None:
        with contextlib.suppress(OSError):
            _process.kill()
        _process.wait()
        for stream in (_process.stdin, _process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
    _process = None


def _read(stream: BinaryIO | Any, size: int, end: float) -> bytes:
    """Reads bytes of a pipe; TimeoutError at ``end`` on the clock, or EOFError."""
    data = bytearray()
    while len(data) < size:
        left = end - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            raise TimeoutError
        piece = os.read(stream.fileno(), min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def serve(render: Callable[[str, dict[str, Any], str], tuple[str, bool]]) -> None:
    """Renders the requests on standard input until it ends; the main program of the process."""
    import resource

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(b"!")
    answers.flush()
    head = struct.Struct("<dQ")
    while sizes := requests.read(head.size):
        seconds, size = head.unpack(sizes)
        template, variables, source = pickle.loads(requests.read(size))
        # Where the caller is gone, nobody else would end a step without end.
        used = resource.getrusage(resource.RUSAGE_SELF)
        last = math.ceil(used.ru_utime + used.ru_stime + 2 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (last, resource.RLIM_INFINITY))
        try:
            text, clock = render(template, variables, source)
            good, data = True, text.encode()
        except UserError as error:
            good, clock, data = False, False, str(error).encode("utf-8", "replace")
        answers.write(_HEAD.pack(good, clock, len(data)) + data)
        answers.flush()
