"""Runs the tests of a program, each in a process of its own: what ``code`` sends to the sandbox.

Standard library only. It is sent as text, and its globals are none of the program's. It knows the
tests' inputs and no expected output; what it reports of each is judged outside.
"""

import atexit
import contextlib
import ctypes
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from typing import Any

_REPORT, _TOKEN = 3, 4  # file descriptors in the process of a test
_PR_SET_DUMPABLE = 4
_CHUNK = 1 << 16
_COMPILER_TEXT = 2000


def main(spec: dict[str, Any]) -> None:
    """Runs all tests and writes one line of JSON for each.

    Args:
      spec: "form" ("stdin", "call" or "unit"), "program" and "setup" (source), "function" (of
        "call"), "tests" (stdin's text; a list of arguments; ["value", expression] or ["assert",
        statements]), "seconds" and "output" (of one test), "stop" (at the first test that did not
        end well), "compile" (commands) and "command" of another language than Python, "file".
    """
    # What a test starts has this user id, too: it must not reach this process through /proc.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    trouble = _compile(spec)
    if trouble:
        _write(report, json.dumps({"compiler": trouble}) + "\n")
        return
    compiling = _seconds()
    for test in spec["tests"]:
        before = _seconds()
        try:
            how, text = _one(spec, test)
        except OSError as error:  # a test before it has left no room for its input, or its process
            how, text = "error", str(error)
        line = {"how": how, "text": text, "seconds": _seconds() - before, "compiling": compiling}
        _write(report, json.dumps(line) + "\n")
        if spec["stop"] and how != "ok":
            return


def _seconds() -> float:
    """Processor time of the children that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _write(place: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(place, data) :]


def _compile(spec: dict[str, Any]) -> str:
    """Writes the source and compiles it; the compiler's complaint, or ""."""
    if not spec["command"]:
        return ""
    os.chdir(tempfile.mkdtemp())
    with open(spec["file"], "w", encoding="utf-8") as file:
        file.write(spec["program"])
    for command in spec["compile"]:
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            text = (done.stdout + done.stderr).decode("utf-8", "replace")[-_COMPILER_TEXT:]
            return text or f"{command[0]} ended with {done.returncode}"
    return ""


def _one(spec: dict[str, Any], test: Any) -> tuple[str, str]:
    """A test's status ("ok", "error", "failed", "timeout", "output") and its report."""
    with tempfile.TemporaryFile() as source:
        if spec["form"] == "stdin":
            source.write(test.encode("utf-8", "surrogatepass"))
            source.seek(0)
        reading, writing = os.pipe()
        asking, telling = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_the_test(spec, test, source.fileno(), writing, asking)
        os.close(writing)
        os.close(asking)
        token = secrets.token_hex(16)
        with contextlib.suppress(OSError):
            os.write(telling, token.encode())
        os.close(telling)
        try:
            how, text = _read(reading, pid, spec)
        finally:
            os.close(reading)
            _end(pid)
    if spec["form"] == "unit" and test[0] == "assert":
        passed = how == "ok" and text == token
        return ("ok", "") if passed else (how if how != "ok" else "failed", "")
    return how, text


def _read(reading: int, pid: int, spec: dict[str, Any]) -> tuple[str, str]:
    """Reads what a test reports until its process has ended, or is beyond a limit."""
    end = time.monotonic() + spec["seconds"]
    data, status, closed = bytearray(), None, False
    os.set_blocking(reading, False)
    while True:
        left = end - time.monotonic()
        if left <= 0:
            return "timeout", ""
        ready = not closed and select.select([reading], [], [], min(left, 0.02))[0]
        chunk = os.read(reading, _CHUNK) if ready else b""
        closed = closed or bool(ready and not chunk)
        data += chunk
        if len(data) > spec["output"]:
            return "output", ""
        if status is None:
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
        if status is not None and not chunk:
            # A child of it may hold the pipe, and is not waited for.
            return ("error" if status else "ok"), data.decode("utf-8", "replace")
        if closed:
            time.sleep(0.001)


def _end(pid: int) -> None:
    """Kills what is left of a test; in namespaces of its own, all that it started."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    if os.getpid() == 1:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(OSError):
        while os.waitpid(-1, 0 if os.getpid() == 1 else os.WNOHANG)[0]:
            pass


# ---------------------------------------------------------------- in the process of a test


def _be_the_test(spec: dict[str, Any], test: Any, source: int, writing: int, asking: int) -> None:
    """Runs one test and ends the process."""
    status = 1
    leave = os._exit
    try:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.dup2(source, 0)
        if spec["form"] == "stdin":
            os.dup2(writing, 1)
        # Above all that is open, then to their places, with nothing else left open.
        places = [os.dup2(fd, 60 + i) for i, fd in enumerate((writing, asking))]
        for place, fd in zip((_REPORT, _TOKEN), places, strict=True):
            os.dup2(fd, place, inheritable=False)
        os.closerange(_TOKEN + 1, 64)
        if spec["command"]:
            os.closerange(_REPORT, _TOKEN + 1)
            os.execv(spec["command"][0], spec["command"])
        status = _run_python(spec, test)
    except BaseException:
        status = 1
    finally:
        leave(status)


def _run_python(spec: dict[str, Any], test: Any) -> int:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    # for the life of the process
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    if spec["form"] == "stdin":
        os.closerange(_REPORT, _TOKEN + 1)
    try:
        _load_and_test(spec, test, module.__dict__)
        status = 0
    except SystemExit as error:
        code = error.code
        status = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
    if spec["form"] == "stdin":
        # Solutions of contests run in a thread with a larger stack and do not wait for it.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    return status


def _load_and_test(spec: dict[str, Any], test: Any, names: dict[str, Any]) -> None:
    """Runs the program, and what its test does with it."""
    # Before the program runs, which may put something else in the place of builtins.
    execute, evaluate, report, read = exec, eval, _report, os.read
    setup = compile(spec["setup"], "setup.py", "exec")
    sources = test if spec["form"] == "unit" else ("", "")
    tested = compile(sources[1], "test.py", "eval" if sources[0] == "value" else "exec")
    execute(compile(spec["program"], "main.py", "exec"), names)
    if spec["form"] == "call":
        report(plain(_function(names, spec["function"])(*test)))
    elif spec["form"] == "unit":
        execute(setup, names)
        if sources[0] == "value":
            report(plain(evaluate(tested, names)))
        else:
            execute(tested, names)
            report(read(_TOKEN, 64).decode())


def _function(names: dict[str, Any], name: str) -> Any:
    """A function of the program, or a method of its class Solution."""
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


def _report(text: str) -> None:
    _write(_REPORT, text)


def plain(value: Any) -> str:
    """A value as a literal of Python; what is none of its plain types, as the text of its repr."""
    if value is None or value is True or value is False:
        return repr(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"inf": "1e999", "-inf": "-1e999", "nan": "'nan'"}.get(text, text)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{plain(k)}: {plain(x)}" for k, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(plain, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(plain(x) + ", " for x in value) + ")"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(map(plain, value)) + "}" if value else "set()"
    return str.__repr__(repr(value))
