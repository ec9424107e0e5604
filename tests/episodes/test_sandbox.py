"""The sandbox: code of every bad intention ends in time, and leaves nothing behind."""

import asyncio
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

from jrl.episodes import sandbox as module
from jrl.episodes.sandbox import Sandbox, SandboxLimits, python_tool
from jrl.errors import UserError

LIMITS = SandboxLimits(seconds=1.5, memory_bytes=256 << 20, output_bytes=4000, file_bytes=1 << 20)
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
CASES = {
    "a value": ("x = 6\nx * 7", "ok", "42\n"),
    "output": ("print('a'); print('b')", "ok", "a\nb\n"),
    "an error": ("1 / 0", "error", "ZeroDivisionError"),
    "no Python": ("1 +", "error", "SyntaxError"),
    "a status": ("import sys; sys.exit(3)", "error", ""),
    "for ever": ("while True: pass", "timeout", ""),
    "asleep": ("import time; print(1); time.sleep(99)", "timeout", "1"),
    "endless output": ("while True: print('x' * 99)", "output", "xxx"),
    "much memory": ("x = ' ' * (10 << 30)", "error", "MemoryError"),
    "a large file": ("open('a', 'w').write('x' * (4 << 20))", "error", "OSError"),
    "a fork bomb": (BOMB, "timeout", ""),
    "a crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV); os.abort()", "", ""),
    "silence": ("import os, time; os.close(1); os.close(2); time.sleep(99)", "", ""),
    "secrets": ("import os; 'JRL_SECRET' in os.environ, os.getuid() == 0", "ok", "(False, "),
}


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(LIMITS, network=True)


MARK = f"of-sandbox-test-{os.getpid()}"


@pytest.fixture(autouse=True)
def marked(monkeypatch):
    """Sandboxes of this process say so in their environment: those of others run beside them."""
    monkeypatch.setattr(module, "_ENVIRONMENT", {**module._ENVIRONMENT, "JRL_CASE": MARK})


def processes():
    """Processes of this process's sandboxes."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if MARK.encode() in text:
            pids.append(path)
    return pids


@pytest.mark.parametrize("name", CASES)
def test_code_ends_in_time(sandbox, name, monkeypatch):
    monkeypatch.setenv("JRL_SECRET", "1")
    code, status, message = CASES[name]
    files, handles = set(os.listdir(tempfile.gettempdir())), len(os.listdir("/proc/self/fd"))
    begin = time.monotonic()
    result = asyncio.run(sandbox.run(code))
    assert time.monotonic() - begin < LIMITS.seconds + 1
    assert result.status == status or not status
    assert message in result.output
    assert len(result.output) <= LIMITS.output_bytes
    time.sleep(0.05)
    assert not processes()
    left = set(os.listdir(tempfile.gettempdir())) - files
    assert not {name for name in left if name.startswith("jrl")}
    assert len(os.listdir("/proc/self/fd")) == handles


@pytest.mark.parametrize(("more", "status"), [(0, "ok"), (1, "output")])
def test_a_byte_of_output_beyond_the_limit_ends_a_run(sandbox, more, status):
    code = f"print('x' * {LIMITS.output_bytes - 1 + more})"  # and the end of the line
    assert asyncio.run(sandbox.run(code)).status == status


def test_there_is_no_network_and_no_one_else(sandbox):
    if not sandbox.apart:
        pytest.skip("unshare cannot be used here")
    code = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)"
    assert "OSError" in asyncio.run(sandbox.run(code)).output.replace("ConnectionRefused", "OS")
    assert asyncio.run(sandbox.run("import os; len(os.listdir('/tmp'))")).output == "0\n"
    assert asyncio.run(sandbox.run("import os; os.getpid()")).output == "1\n"


@pytest.fixture(scope="module", params=["with unshare", "without unshare"])
def either(request, sandbox):
    """The sandbox, and the one of machines that forbid ``unshare``."""
    if request.param == "with unshare":
        return sandbox
    way = module._way_in()._replace(prefix=(), filtered=True, fenced=True)
    if not module._runs(way):
        pytest.skip("this kernel has no Landlock or no seccomp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_way_in", lambda: way)
        return Sandbox(LIMITS)


def test_other_processes_are_out_of_sight(either):
    secret = "api_key=CANARY"
    command = [sys.executable, "-c", "import time; time.sleep(60)", secret]
    with subprocess.Popen(command) as other:
        code = (
            "import os\n"
            "for p in os.listdir('/proc'):\n"
            "    if p.isdigit(): print(open(f'/proc/{p}/cmdline').read())\n"
        )
        output = asyncio.run(either.run(code)).output
        direct = asyncio.run(either.run(f"open('/proc/{other.pid}/cmdline').read()"))
        signal = asyncio.run(either.run(f"import os; os.kill({other.pid}, 9)"))
        assert other.poll() is None
        other.kill()
    assert secret not in output + direct.output
    assert (direct.status, signal.status) == ("error", "error")


WRITABLE = ("/tmp", "/var/tmp", "/dev/shm", "/dev", "/run", "/run/lock", "/var/lock", "/mnt", ".")


def test_what_is_written_vanishes(either):
    open_to_all = pathlib.Path(tempfile.mkdtemp(prefix="for-everybody-", dir="/var/tmp"))
    open_to_all.chmod(0o777)
    try:
        for place in (*WRITABLE, str(open_to_all)):
            path = f"{place}/jrl_case_note"
            asyncio.run(either.run(f"open({path!r}, 'w').write('from an episode')"))
            assert not os.path.exists(path), path
            again = asyncio.run(either.run(f"print(open({path!r}).read())"))
            assert again.output != "from an episode\n", path
        assert os.listdir(open_to_all) == []
    finally:
        open_to_all.rmdir()


CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
calls = {
    "unshare": (272 if x86 else 97, 0x10000000),
    "clone": (56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
    "memfd_create": (319 if x86 else 279, b"x", 0),
    "shmget": (29 if x86 else 194, 0, 4096, 0o1600),
    "mq_open": (240 if x86 else 180, b"x", 0o102, 0o600, 0),
    "add_key": (248 if x86 else 217, b"user", b"jrl", b"x", 1, -4),
}
for name, arguments in calls.items():
    if libc.syscall(*arguments) >= 0:
        print("allowed:", name)
    elif ctypes.get_errno() not in (1, 38):
        print("tried:", name, os.strerror(ctypes.get_errno()))
"""


def test_nothing_nests_and_no_memory_is_beyond_the_limits(either):
    """No namespaces inside, whose root could mount memory; none that outlives who made it."""
    assert asyncio.run(either.run(CALLS))[:2] == ("", "ok")


def test_sockets_that_no_namespace_holds_are_refused(either):
    """Those to the host of a virtual machine; its own loopback is nobody else's."""
    code = "import socket\nsocket.socket({}, {})"
    vsock = asyncio.run(either.run(code.format(40, "socket.SOCK_STREAM")))
    packets = asyncio.run(either.run(code.format("socket.AF_PACKET", "socket.SOCK_RAW")))
    assert "PermissionError" in vsock.output
    assert "PermissionError" in packets.output
    result = asyncio.run(either.run(code.format("socket.AF_INET", "socket.SOCK_STREAM")))
    assert result.status == ("ok" if either.apart else "error")


def test_temporary_directories_share_their_limit(sandbox):
    if not sandbox.apart:
        pytest.skip("unshare cannot be used here")
    code = (
        "for i, place in enumerate(('/tmp', '/var/tmp', '/dev/shm', '/tmp', '/run')):\n"
        "    open(f'{place}/{i}', 'w').write('x' * (1 << 18))\n"
    )
    assert "No space left" in asyncio.run(sandbox.run(code)).output
    assert asyncio.run(sandbox.run(code.replace("<< 18", "<< 16"))).status == "ok"


DAEMON = """
import os, time
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        for handle in range(3):
            os.close(handle)
        while True:
            time.sleep(1)
    os._exit(0)
time.sleep(0.2)
print("ends")
"""


def test_daemons_end_with_the_run(either):
    assert asyncio.run(either.run(DAEMON))[:2] == ("ends\n", "ok")
    assert not processes()


@pytest.mark.slow
def test_without_unshare_the_limits_hold(monkeypatch, caplog):
    monkeypatch.setattr(
        module.shutil, "which", lambda name, path=None: None if path is None else "/usr/bin/python3"
    )
    module._way_in.cache_clear()
    try:
        weaker = Sandbox(LIMITS)
    finally:
        monkeypatch.undo()
        module._way_in.cache_clear()
    assert not weaker.apart
    assert weaker.offline
    assert "code has no network and writes to a directory of its own alone" in caplog.text
    for family in ("AF_INET", "AF_INET6", "AF_UNIX"):
        result = asyncio.run(weaker.run(f"import socket\nsocket.socket(socket.{family})"))
        assert "PermissionError" in result.output
    loop = "import asyncio\nasync def f(): return 6\nasyncio.run(f())"  # which has a socketpair
    assert asyncio.run(weaker.run(loop)).output == "6\n"
    for code, status in (("6 * 7", "ok"), ("while True: pass", "timeout"), (BOMB, "timeout")):
        assert asyncio.run(weaker.run(code)).status == status
    time.sleep(0.2)
    assert not processes()


def test_code_that_would_have_the_network_is_refused(monkeypatch):
    monkeypatch.setattr(module, "_way_in", lambda: module._Way("python3", (), False, False))
    with pytest.raises(UserError, match="seccomp=unconfined, or set network = true"):
        Sandbox()
    weaker = Sandbox(network=True)
    assert (weaker.apart, weaker.offline) == (False, False)


def test_runs_wait_for_each_other_and_their_waiting_is_free():
    narrow = Sandbox(LIMITS._replace(seconds=1.0), at_once=1, network=True)

    async def several():
        runs = [narrow.run("import time; time.sleep(0.4); 1") for _ in range(4)]
        return await asyncio.gather(*runs)

    assert [r.status for r in asyncio.run(several())] == ["ok"] * 4
    assert asyncio.run(narrow.run("7")).output == "7\n"  # in another event loop


def test_the_tool_says_how_it_ended(sandbox):
    tool = python_tool(sandbox)
    assert asyncio.run(tool.call(code="print(3)")) == "3"
    assert asyncio.run(tool.call(code="x = 1")) == "[no output]"
    output = asyncio.run(tool.call(code="print(5)\nwhile True: pass"))
    assert output == "5\n[ended after 1.5 seconds]"
