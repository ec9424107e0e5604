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
import pathlib
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

_PROGRAM = """
import sys
sys.path[:] = {paths!r}
try:
    import jinja2.sandbox
    from jrl.models import chat_template, template_process
except BaseException as error:
    print(f"?{{type(error).__name__}}: {{error}}", flush=True)
    sys.exit(1)
template_process.serve(chat_template.render_here, chat_template.variables_here)
"""
_KEPT = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables of the environment that the process has, for its clock and to start at all."""

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
    template: str, variables: Mapping[str, Any] | None, source: str, seconds: float
) -> tuple[str, bool]:
    """``chat_template.render_here`` in another process, within ``MOST_MEMORY``.

    Args:
      template: Jinja.
      variables: of the template, values that can be pickled; None for
        ``chat_template.variables_here``.
      source: where the template is from, for errors.
      seconds: limit of time.

    Raises:
      UserError: what the function raises; or it ran out of memory or time in a single step.
      RuntimeError: the process does not start, which says nothing about the template.
    """
    says = f"the chat template of {source} says: "
    try:
        # Another module's classes, which the process may not find, are read as what they hold.
        values = None if variables is None else pickle.dumps(_plain(dict(variables)))
        request = pickle.dumps((template, values, source))
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
            good, clock, text = _answered(request, seconds)
        except TimeoutError:
            reason = f"it takes longer than {seconds:g} s; loop over the messages only"
            raise UserError(says + reason) from None
        except (EOFError, OSError):
            raise UserError(f"{says}it ended the process that renders it") from None
    if not good:
        raise UserError(text)
    return text, clock


def _answered(request: bytes, seconds: float, tries: int = 2) -> tuple[bool, bool, str]:
    """(whether it is no error, whether the clock was read, the text) of the process.

    A process that has ended, by the system for its memory perhaps, is replaced once.
    """
    process = _started()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(struct.pack("<dQ", seconds, len(request)) + request)
        process.stdin.flush()
        end = time.monotonic() + seconds
        good, clock, size = _HEAD.unpack(_read(process.stdout, _HEAD.size, end))
        return good, clock, _read(process.stdout, size, end).decode()
    except BaseException as error:  # an interrupt, too: this answer would be taken for the next's
        _end()
        ended = isinstance(error, EOFError | OSError) and not isinstance(error, TimeoutError)
        if tries == 1 or not ended:
            raise
    return _answered(request, seconds, tries - 1)


def _plain(value: Any) -> Any:
    """A value of Python's own types where it is of one derived from them."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not str(value), which an Enum writes in its own way
    if isinstance(value, int | float):
        return int.__pos__(value) if isinstance(value, int) else float.__pos__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _started() -> subprocess.Popen[bytes]:
    """The process, ready for a conversation.

    Raises:
      RuntimeError: it does not start.
    """
    global _process
    if _process is not None and _process.poll() is None:
        return _process
    _end()
    paths = [os.path.abspath(path or ".") for path in sys.path]
    # A finder of an editable installation, which is no path, is not there.
    paths.append(str(pathlib.Path(__file__).resolve().parents[2]))
    try:
        _process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM.format(paths=paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8", **{n: os.environ[n] for n in _KEPT if n in os.environ}},
            start_new_session=True,  # Ctrl-C is for the caller, who may render another
        )
        assert _process.stdout is not None
        end = time.monotonic() + _START_SECONDS
        if _read(_process.stdout, 1, end) == b"!":
            return _process
        reason = _process.stdout.read(500).decode("utf-8", "replace").strip()
    except TimeoutError:
        reason = f"not within {_START_SECONDS:g} s"
    except (EOFError, OSError) as error:
        reason = str(error) or "it ends at once"
    except BaseException:
        _end()
        raise
    _end()
    raise RuntimeError(f"the process that renders chat templates does not start: {reason}")


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
    data, ready = bytearray(), select.poll()  # not select(), whose descriptors are below 1024
    ready.register(stream, select.POLLIN)
    while len(data) < size:
        left = end - time.monotonic()
        if left <= 0 or not ready.poll(left * 1000):
            raise TimeoutError
        piece = os.read(stream.fileno(), min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def serve(
    render: Callable[[str, dict[str, Any], str], tuple[str, bool]],
    variables: Callable[[str, str], tuple[str, bool]],
) -> None:
    """Answers the requests on standard input until it ends; the main program of the process.

    Args:
      render: (template, variables, source) -> (text, whether the clock was read).
      variables: (template, source) -> (text, False).
    """
    import resource

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _limit(resource.RLIMIT_AS, MOST_MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(b"!")
    answers.flush()
    head = struct.Struct("<dQ")
    while sizes := requests.read(head.size):
        seconds, size = head.unpack(sizes)
        template, values, source = pickle.loads(requests.read(size))
        # Where the caller is gone, nobody else would end a step without end.
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + 2 * seconds))
        try:
            if values is None:
                text, clock = variables(template, source)
            else:
                text, clock = render(template, _values(values, source), source)
            good, data = True, text.encode()
        except UserError as error:
            good, clock, data = False, False, str(error).encode("utf-8", "replace")
        answers.write(_HEAD.pack(good, clock, len(data)) + data)
        answers.flush()


def _values(pickled: bytes, source: str) -> dict[str, Any]:
    """The variables of a request; UserError for a value of a class that is not here."""
    try:
        return pickle.loads(pickled)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(
            f"the chat template of {source} says: a value cannot be sent to it: {reason}"
        ) from None


def _limit(what: int, most: int) -> None:
    """Lowers a limit of this process; a lower one that the system has set stays."""
    import resource

    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
