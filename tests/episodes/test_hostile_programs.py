"""Programs that mean no good: none gets what it wants, ends late, or leaves anything behind."""

import asyncio
import fcntl
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest
from hostile_programs import PROGRAMS

from jrl.episodes import sandbox as module
from jrl.episodes.sandbox import Sandbox, SandboxLimits

LIMITS = SandboxLimits(seconds=2.0, memory_bytes=256 << 20, output_bytes=4000, file_bytes=1 << 20)
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock", "/run", "/var/lib", "/")
QUEUES = ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg", "/proc/keys")
ENTRIES = [
    pytest.param(name, marks=() if program.fast else pytest.mark.slow)
    for name, program in PROGRAMS.items()
]


@pytest.fixture(scope="module")
def world():
    """Targets of hostile programs: sockets, a file and a secret of the caller's."""
    # Not below the working directories of a run, which are its own there.
    root = pathlib.Path(tempfile.mkdtemp(prefix="canary-", dir="/var/lib" if _is_root() else None))
    root.chmod(0o777)
    (root / "file").write_text("mine")
    (root / "file").chmod(0o644)
    values = {"PARENT": str(os.getpid()), "CANARY": str(root), "SECRET": "hunter2-of-the-caller"}
    listening = []
    for name, family, kind, address in (
        ("TCP4", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        ("TCP6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
        ("UDP", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        ("SOCKET", socket.AF_UNIX, socket.SOCK_STREAM, str(root / "agent")),
        ("ABSTRACT", socket.AF_UNIX, socket.SOCK_STREAM, f"\0jrl-canary-{os.getpid()}"),
    ):
        with_it = socket.socket(family, kind)
        listening.append(with_it)
        try:
            with_it.bind(address)
        except OSError:  # no IPv6 here
            values[name] = "9"
            continue
        if kind == socket.SOCK_STREAM:
            with_it.listen(100)
        is_path = isinstance(address, str)
        values[name] = address.removeprefix("\0") if is_path else str(with_it.getsockname()[1])
    (root / "agent").chmod(0o777)
    secret = {"API_KEY": values["SECRET"], "SSH_AUTH_SOCK": values["SOCKET"]}
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", f"token={values['SECRET']}"]
    other = subprocess.Popen(sleep, env=os.environ | secret)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in secret.items():
            patch.setenv(name, value)
        yield values
    assert other.poll() is None
    other.kill()
    other.wait()
    for each in listening:
        each.close()
    assert sorted(path.name for path in root.iterdir()) == ["agent", "file"]
    assert (root / "file").read_text() == "mine"
    shutil.rmtree(root)


def _is_root():
    return os.geteuid() == 0


@pytest.fixture(scope="module", params=["with unshare", "without unshare"])
def sandbox(request):
    """The sandbox, and the one of machines that forbid ``unshare``."""
    way = module._way_in()
    if request.param == "without unshare":
        way = way._replace(prefix=(), filtered=True, fenced=True)
    elif not way.prefix:
        pytest.skip("unshare cannot be used here")
    if not module._runs(way):
        pytest.skip("this kernel has no Landlock or no seccomp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_way_in", lambda: way)
        return Sandbox(LIMITS)


@pytest.fixture
def alone(tmp_path_factory):
    """One of these programs at a time, in all processes of the tests: each looks at the machine."""
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (shared / "hostile.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def left_behind():
    """Things on the machine, by name, that a program could leave behind."""
    remains = {}
    for place in PLACES:
        if os.path.isdir(place):
            names = (name for name in os.listdir(place) if re.search("jrl|case|note", name))
            # the library's own, for sandboxes and checkpoints of other tests, come and go
            remains[place] = sorted(name for name in names if not name.startswith("jrl-"))
    for path in QUEUES:
        if os.access(path, os.R_OK):
            text = pathlib.Path(path).read_text()
            remains[path] = [
                line for line in text.splitlines() if re.search("4a524c|jrl|13[0-9]{5}", line)
            ]
    if os.path.exists("/proc/net/unix"):
        lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
        remains["sockets"] = [line.split()[-1] for line in lines if "jrl_case" in line]
    remains["handles"] = len(os.listdir("/proc/self/fd"))
    return remains


MARK = f"of-test-{os.getpid()}"


def processes():
    """Processes that run with this process's mark in their environment."""
    names = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if MARK.encode() in (path / "environ").read_bytes() and state not in "ZX":
                names.append(path.name)
        except OSError:
            continue
    return names


def test_a_mark_finds_its_processes():
    marked = os.environ | {"JRL_CASE": MARK}
    sleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=marked)
    while str(sleep.pid) not in processes():
        time.sleep(0.01)
    sleep.kill()
    sleep.wait()
    assert not processes()


@pytest.mark.parametrize("name", ENTRIES)
def test_a_hostile_program_gets_nothing_and_leaves_nothing(
    name, sandbox, world, alone, monkeypatch
):
    directories, make = [], tempfile.mkdtemp
    marked = {**module._ENVIRONMENT, "JRL_CASE": MARK}
    monkeypatch.setattr(module, "_ENVIRONMENT", marked)
    monkeypatch.setattr(
        module.tempfile, "mkdtemp", lambda **k: directories.append(make(**k)) or directories[-1]
    )
    code, status, _ = PROGRAMS[name]
    for word, value in world.items():
        code = re.sub(rf"\b{word}\b", value, code)
    before = left_behind()
    result = asyncio.run(sandbox.run(code))
    assert result.seconds < LIMITS.seconds + 1.5
    assert "BREACH" not in result.output, result
    assert result.status in status.split() or not status, result
    assert len(result.output) <= LIMITS.output_bytes
    for _ in range(20):
        if not processes():
            break
        time.sleep(0.05)
    assert not processes()
    assert left_behind() == before
    assert not [directory for directory in directories if os.path.exists(directory)]
