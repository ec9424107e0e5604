"""Programs that mean no good, for the sandbox. Each prints BREACH if it gets what it wants.

Some names stand for what the test has made for them: PARENT is the process id of the trainer, TCP4,
TCP6 and UDP are ports that it listens on, SOCKET is the path of a socket of its own, ABSTRACT the
name of one that has no path, CANARY a directory with a file in it, SECRET what must not be read.
"""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """A program, and how its run must end.

    Attributes:
      code: in Python.
      status: of the result; several are separated by spaces, "" is any.
      fast: whether it is tried in the quick suite.
    """

    code: str
    status: str = "ok error"
    fast: bool = False


CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
def refused(name, numbers, *arguments):
    if libc.syscall(numbers[0 if x86 else 1], *arguments) >= 0:
        print("BREACH", name)
"""
PROGRAMS: dict[str, Program] = {}


def _add(name: str, code: str, status: str = "ok error", *, fast: bool = False) -> None:
    PROGRAMS[name] = Program(code, status, fast)


# ---------------------------------------------------------------- memory

_add(
    "many processes, each below the bound",
    """
import os, time
pipe = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(os.urandom(4096)) * (120 << 8)
        os.write(pipe[1], b".")
        time.sleep(9)
        os._exit(0)
got = b""
while len(got) < 8:
    got += os.read(pipe[0], 8)
time.sleep(0.5)
print("BREACH: 960 MB in 8 processes")
""",
    "memory timeout error",
    fast=True,
)
_add(
    "memory that processes share without a file",
    """
import mmap, os, time
maps = []
for _ in range(7):
    if os.fork() == 0:
        block = mmap.mmap(-1, 100 << 20)
        for at in range(0, len(block), 4096):
            block[at] = 1
        time.sleep(0.4)
        print("got")
        time.sleep(9)
        os._exit(0)
time.sleep(1.2)
print("BREACH: 700 MB in shared maps")
""",
    "memory timeout error",
)
_add("one process far beyond it", "x = bytearray(1 << 30)\nprint('BREACH')", "error", fast=True)
_add(
    "memory that waits in sockets",
    """
import socket
one, other = socket.socketpair()
usual = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
    try:
        one.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        print("BREACH", option)
    except PermissionError:
        pass
one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
one.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
if one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > usual:
    print("BREACH: a larger socket")
""",
    "ok",
    fast=True,
)
_add(
    "addresses without memory",
    "import mmap\nx = mmap.mmap(-1, 1 << 40)\nprint('BREACH')",
    "error",
)
_add(
    "a memfd",
    CALL + "refused('memfd_create', (319, 279), b'x', 0)\nrefused('memfd_secret', (447, 447), 0)",
    "ok",
)
_add(
    "files in memory",
    """
import os
total = 0
for place in ("/tmp", "/var/tmp", "/dev/shm", "/run", "."):
    for i in range(100):
        try:
            with open(f"{place}/{i}", "wb") as file:
                total += file.write(bytes(500_000))
        except OSError:
            break
if total > 16e6 and os.getpid() == 1:
    print("BREACH", total)
""",
    "ok error files",
    fast=True,
)
_add(
    "very many empty files",
    """
import os
for i in range(200_000):
    try:
        os.close(os.open(f"file{i}", os.O_CREAT | os.O_WRONLY))
    except OSError:
        break
else:
    print("BREACH")
""",
    "ok files",
)
_add(
    "a file with a hole",
    "f = open('hole', 'wb')\nf.truncate(1 << 40)\nprint('BREACH')",
    "error",
)
_add(
    "pipes that are full",
    """
import fcntl, os
total = 0
try:
    while True:
        reader, writer = os.pipe()
        size = fcntl.fcntl(writer, 1031, 1 << 20)
        os.set_blocking(writer, False)
        total += os.write(writer, bytes(size))
except OSError:
    pass
if total > 100 << 20:
    print("BREACH", total)
""",
    "ok",
)
_add(
    "messages that nobody reads",
    """
import socket
total = 0
try:
    pairs = []
    while True:
        pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        pairs[-1][0].setblocking(False)
        while True:
            try:
                total += pairs[-1][0].send(bytes(60_000))
            except BlockingIOError:
                break
except OSError:
    pass
if total > 100 << 20:
    print("BREACH", total)
""",
    "ok",
)
_add("a number without end", "x = 10 ** 10 ** 10", "timeout error memory killed")
_add("a text of a width without end", "x = '%01000000000d' % 1\nprint('BREACH')", "error")
_add(
    "a bomb of zlib",
    """
import zlib
data = zlib.compress(bytes(1 << 20))
big = zlib.compressobj()
packed = b"".join(big.compress(bytes(1 << 20)) for _ in range(1000)) + big.flush()
zlib.decompress(packed)
print("BREACH")
""",
    "error timeout killed",
)
_add(
    "deep recursion",
    "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()",
    "error killed timeout memory",
)
_add(
    "very many threads",
    """
import threading, time
for i in range(500):
    try:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    except RuntimeError:
        break
else:
    print("BREACH")
""",
    "ok",
)
_add(
    "very many open files",
    """
import os
opened = []
try:
    while len(opened) < 5000:
        opened.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
if len(opened) > 100:
    print("BREACH", len(opened))
""",
    "ok",
    fast=True,
)

# ---------------------------------------------------------------- processes

_add(
    "a fork bomb",
    "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "timeout memory",
    fast=True,
)
_add(
    "a fork bomb that leaves its session",
    """
import os
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
""",
    "timeout memory error",
)
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
        time.sleep(99)
        os._exit(0)
    os._exit(0)
"""
_add("a daemon", DAEMON + "time.sleep(0.2)\nprint('ends')", "ok", fast=True)
_add("a daemon of a shell", "import os\nos.system('(nohup sleep 99 >/dev/null 2>&1 &)')", "ok")
_add(
    "a daemon that forgets whose child it is",
    """
import ctypes
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
"""
    + DAEMON,
    "ok",
)
_add(
    "a daemon that forks faster than it is found",
    """
import os, time
if os.fork() == 0:
    for handle in range(3):
        os.close(handle)
    while True:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            pass
""",
    "ok",
)
_add(
    "deaf to signals",
    """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
""",
    "timeout killed",
)
_add("stopped", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout ok error")
_add(
    "signals to its parent",
    """
import os, signal
for pid in (os.getppid(), PARENT, -PARENT):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        try:
            if pid not in (0, 1):
                os.kill(pid, number)
                print("BREACH", pid)
        except OSError:
            pass
""",
    "ok",
    fast=True,
)
_add("signals to everybody", "import os\nos.kill(-1, 9)", "ok error killed")
_add(
    "a handle of its parent",
    """
import os, signal
try:
    handle = os.pidfd_open(PARENT)
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    print("BREACH")
except OSError:
    pass
""",
    "ok",
)
_add(
    "the memory of its parent",
    CALL
    + """
refused("ptrace", (101, 117), 16, PARENT, 0, 0)
buffer = ctypes.create_string_buffer(64)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
mine = Vector(ctypes.addressof(buffer), 64)
refused("process_vm_readv", (310, 270), PARENT, ctypes.byref(mine), 1, ctypes.byref(mine), 1, 0)
for name in ("mem", "environ", "cmdline", "maps", "fd/0", "cwd", "root/etc/passwd"):
    try:
        open(f"/proc/{PARENT}/{name}", "rb").read(1)
        print("BREACH", name)
    except OSError:
        pass
""",
    "ok",
    fast=True,
)
_add(
    "the environment of everybody",
    """
import glob
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        if b"SECRET" in open(path, "rb").read():
            print("BREACH", path)
    except OSError:
        pass
""",
    "ok",
)
_add(
    "more rights by a program with them",
    """
import subprocess
for command in (["su", "-c", "id"], ["sudo", "-n", "id"], ["unshare", "-r", "id"], ["newgrp"]):
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=2)
        if b"uid=0" in done.stdout:
            print("BREACH", command)
    except (OSError, subprocess.TimeoutExpired):
        pass
""",
    "ok",
)
_add(
    "root again",
    """
import os
for take in (os.setuid, os.seteuid, os.setgid, os.setegid):
    try:
        take(0)
        if os.getuid() == 0 and os.access("/etc/shadow", os.R_OK):
            print("BREACH", take)
    except OSError:
        pass
""",
    "ok",
)
_add(
    "its limits raised",
    """
import resource
for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):
    try:
        resource.setrlimit(getattr(resource, name), (1 << 40, 1 << 40))
        print("BREACH", name)
    except (OSError, ValueError):
        pass
""",
    "ok",
    fast=True,
)
_add(
    "its share of the processor raised",
    """
import os
for take in (lambda: os.nice(-5), lambda: os.sched_setscheduler(0, 1, os.sched_param(1))):
    try:
        take()
        print("BREACH")
    except OSError:
        pass
""",
    "ok",
)

# ---------------------------------------------------------------- the machine

_add(
    "namespaces of its own",
    CALL
    + """
refused("unshare", (272, 97), 0x10000000)
refused("setns", (308, 268), 0, 0)
refused("clone", (56, 220), 0x10000000 | 17, 0, 0, 0, 0)
refused("clone3", (435, 435), 0, 0)
""",
    "ok",
    fast=True,
)
_add(
    "file systems",
    CALL
    + """
refused("mount", (165, 40), b"x", b"/tmp", b"tmpfs", 0, 0)
refused("umount", (166, 39), b"/tmp", 2)
refused("pivot_root", (155, 41), b"/tmp", b"/tmp")
refused("chroot", (161, 51), b"/tmp")
refused("fsopen", (430, 430), b"tmpfs", 0)
refused("open_tree", (428, 428), -100, b"/", 1)
refused("mount_setattr", (442, 442), -100, b"/", 0, 0, 0)
refused("swapon", (167, 224), b"/tmp/x", 0)
""",
    "ok",
)
_add(
    "the kernel",
    CALL
    + """
refused("init_module", (175, 105), b"x", 1, b"")
refused("delete_module", (176, 106), b"x", 0)
refused("kexec_load", (246, 104), 0, 0, 0, 0)
refused("reboot", (169, 142), 0xFEE1DEAD, 672274793, 0, 0)
refused("bpf", (321, 280), 0, 0, 0)
refused("sethostname", (170, 161), b"x", 1)
refused("io_uring_setup", (425, 425), 1, ctypes.create_string_buffer(120))
refused("add_key", (248, 217), b"user", b"jrl", b"x", 1, -4)
refused("keyctl", (250, 219), 0, -3, 1)
""",
    "ok",
)
_add(
    "the clock",
    CALL
    + """
import time
refused("clock_settime", (227, 112), 0, ctypes.create_string_buffer(16))
refused("settimeofday", (164, 170), ctypes.create_string_buffer(16), 0)
before = time.time()
try:
    time.clock_settime(time.CLOCK_REALTIME, 0)
    print("BREACH")
except OSError:
    pass
""",
    "ok",
)
_add(
    "a clock that stands still",
    """
import signal, time
time.monotonic = time.time = time.perf_counter = lambda: 0.0
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
while True:
    pass
""",
    "timeout killed",
)
_add(
    "settings of the machine",
    """
for path in ("/proc/sysrq-trigger", "/proc/sys/vm/drop_caches", "/proc/self/oom_score_adj",
             "/proc/sys/kernel/core_pattern", "/sys/kernel/mm/transparent_hugepage/enabled",
             "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/tasks", "/etc/passwd",
             "/etc/hosts", "/dev/kmsg", "/dev/mem", "/dev/sda", "/dev/vda"):
    try:
        with open(path, "r+b", buffering=0) as file:
            file.write(b"-1" if "oom" in path else b"")
        print("BREACH", path)
    except OSError:
        pass
""",
    "ok",
    fast=True,
)
_add(
    "the library that the next run imports",
    """
import json, os, sys
places = [os.path.dirname(json.__file__), os.path.dirname(sys.argv[0]) or "/", *sys.path]
places += [sys.prefix, sys.exec_prefix]
for place in places:
    for name in ("json.py", "usercustomize.py", "sandbox_child.py"):
        try:
            open(f"{place}/{name}", "a").close()
            if not os.path.realpath(place).startswith(("/tmp", os.getcwd())):
                print("BREACH", place)
        except OSError:
            pass
""",
    "ok",
)
_add(
    "accelerators and terminals",
    """
import glob, os
paths = ["/dev/tty", "/dev/ptmx", "/dev/kvm"]
for pattern in ("/dev/nvidia*", "/dev/accel*", "/dev/vfio/*"):
    paths += glob.glob(pattern)
for path in paths:
    try:
        os.close(os.open(path, os.O_RDWR))
        print("BREACH", path)
    except OSError:
        pass
try:
    print("BREACH", os.openpty())
except OSError:
    pass
""",
    "ok",
)
_add(
    "files that the trainer has open",
    """
import os
for handle in range(3, 300):
    try:
        os.fstat(handle)
        if not os.path.realpath(f"/proc/self/fd/{handle}").startswith(("/dev/null", "/proc")):
            print("BREACH", handle)
    except OSError:
        pass
""",
    "ok",
)

# ---------------------------------------------------------------- what stays behind

_add(
    "notes wherever anybody may write",
    """
import os, stat
places = ["."]
for root in "/tmp /var /dev /run /mnt /srv /opt /home /usr /etc CANARY".split():
    for place, names, _ in os.walk(root):
        if place.count("/") > 4:
            names[:] = []
        places.append(place)
for place in places[:3000]:
    try:
        with open(f"{place}/jrl_case_note", "w") as file:
            file.write("x")
    except OSError:
        pass
print(len(places))
""",
    "ok timeout",
    fast=True,
)
_add(
    "a directory that cannot be emptied",
    """
import os
os.makedirs("locked/in/it")
open("locked/in/it/file", "w").close()
os.chmod("locked/in", 0)
os.chmod("locked", 0)
""",
    "ok",
    fast=True,
)
_add(
    "a very deep directory",
    """
import os
try:
    for _ in range(3000):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    open("end", "w").close()
except OSError:
    pass
""",
    "ok timeout",
    fast=True,
)
_add(
    "names that nobody can read",
    """
import os
for name in (b"\\n\\x1b[2J", b"\\xff\\xfe", b"x" * 255, b"-rf", b" "):
    os.close(os.open(name, os.O_CREAT))
""",
    "ok",
)
_add(
    "links to what is not its own",
    """
import os
for way in (os.symlink, os.link):
    for target in ("CANARY", "CANARY/file", "/etc/passwd", "/"):
        try:
            way(target, f"{way.__name__}{target.count('/')}{len(target)}")
        except OSError:
            pass
for name in os.listdir("."):
    for change, *values in ((os.chmod, 0o777), (os.truncate, 0), (os.utime, (0, 0))):
        try:
            change(name, *values)
        except OSError:
            pass
""",
    "ok",
    fast=True,
)
_add(
    "its directory moved away, and a link in its place",
    """
import os
here = os.getcwd()
try:
    os.rename(here, here + "-moved")
    os.symlink("CANARY", here)
except OSError:
    pass
""",
    "ok",
    fast=True,
)
_add(
    "POSIX memory and semaphores",
    """
import ctypes
libc = ctypes.CDLL(None)
libc.shm_open(b"/jrl_case_note", 0o102, 0o666)
try:
    ctypes.CDLL("libpthread.so.0").sem_open(b"/jrl_case_note", 0o100, 0o666, 1)
except OSError:
    libc.sem_open(b"/jrl_case_note", 0o100, 0o666, 1)
open("/dev/shm/jrl_case_note", "w").write("x")
""",
    "ok error killed",
)
_add(
    "System V memory, semaphores and queues",
    CALL
    + """
refused("shmget", (29, 194), 0x4A524C, 4096, 0o1666)
refused("semget", (64, 190), 0x4A524C, 1, 0o1666)
refused("msgget", (68, 186), 0x4A524C, 0o1666)
refused("mq_open", (240, 180), b"jrl_case_note", 0o102, 0o600, 0)
""",
    "ok",
    fast=True,
)
_add("locks", "import fcntl\nf = open('/etc/passwd')\nfcntl.flock(f, fcntl.LOCK_EX)", "ok")
_add("a core file", "import os, signal\nos.kill(os.getpid(), signal.SIGQUIT)", "")

# ---------------------------------------------------------------- the network

TRY = """
import socket
def tried(family, kind, address):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(0.5)
            s.connect(address)
            s.send(b"x")
            if kind == socket.SOCK_DGRAM:
                s.recv(1)
        print("BREACH", address)
    except OSError:
        pass
"""
_add(
    "ports of the machine",
    TRY
    + """
tried(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", TCP4))
tried(socket.AF_INET6, socket.SOCK_STREAM, ("::1", TCP6))
tried(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", UDP))
""",
    "ok",
    fast=True,
)
_add(
    "the network",
    TRY
    + """
tried(socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53))
tried(socket.AF_INET6, socket.SOCK_STREAM, ("2606:4700:4700::1111", 53))
tried(socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80))
try:
    print("BREACH", socket.getaddrinfo("example.org", 80))
except OSError:
    pass
""",
    "ok",
)
_add(
    "sockets of services",
    TRY
    + """
import glob, os
tried(socket.AF_UNIX, socket.SOCK_STREAM, "SOCKET")
tried(socket.AF_UNIX, socket.SOCK_STREAM, "\\0ABSTRACT")
paths = glob.glob("/run/**/*.sock", recursive=True)
paths += ["/var/run/docker.sock", "/run/dbus/system_bus_socket"]
for path in [*paths, os.environ.get("SSH_AUTH_SOCK", "/none")]:
    tried(socket.AF_UNIX, socket.SOCK_STREAM, path)
""",
    "ok",
    fast=True,
)
_add(
    "sockets of other kinds",
    """
import socket
for family, kind in ((40, 1), (17, 3), (38, 5), (31, 3), (30, 1), (44, 3), (2, 3), (29, 3), (9, 5)):
    try:
        socket.socket(family, kind).close()
        print("BREACH", family)
    except OSError:
        pass
""",
    "ok",
)
_add(
    "a name that others may listen to",
    """
import socket, time
try:
    s = socket.socket(socket.AF_UNIX)
    s.bind("\\0jrl_case_note")
    s.listen()
except OSError:
    pass
""",
    "ok",
)
_add(
    "keys of the caller",
    """
import os
text = repr(dict(os.environ))
for path in ("/root/.ssh/id_rsa", "/root/.netrc", os.path.expanduser("~/.netrc")):
    try:
        text += open(path).read()
    except OSError:
        pass
if "SECRET" in text:
    print("BREACH")
""",
    "ok",
)

# ---------------------------------------------------------------- output

_add(
    "gigabytes of output",
    "import os\nblock = bytes(1 << 16)\nwhile True:\n    os.write(1, block)",
    "output",
    fast=True,
)
_add(
    "output of many processes",
    """
import os
for _ in range(7):
    if os.fork() == 0:
        break
while True:
    os.write(2, b"x" * 60000)
""",
    "output",
)
_add(
    "output after its end",
    """
import os, time
if os.fork() == 0:
    time.sleep(0.3)
    while True:
        os.write(1, b"late ")
        time.sleep(0.01)
print("first")
""",
    "ok output timeout killed",
)
_add(
    "silence, and a child that holds the pipe",
    "import os, time\nif os.fork():\n    os._exit(0)\ntime.sleep(99)",
    "timeout ok",
)
_add("a closed output", "import os, time\nos.close(1); os.close(2); time.sleep(99)", "")
_add("bytes that are no text", "import os\nos.write(1, bytes(range(256)) * 3)", "ok")

# ---------------------------------------------------------------- Python

_add(
    "an exception whose text raises",
    """
class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")
    __repr__ = __str__
raise Speechless
""",
    "error",
    fast=True,
)
_add(
    "a value whose text never ends",
    "class V:\n    def __repr__(self):\n        while True: pass\nV()",
    "timeout",
)
_add(
    "a value whose text ends the process",
    "class V:\n    def __repr__(self):\n        import os; os._exit(0)\nV()",
    "ok",
)
_add("an output that is no stream", "import sys\nsys.stdout = sys.stderr = None", "ok", fast=True)
_add(
    "an output that raises",
    """
import sys
class Bad:
    def __getattr__(self, name):
        raise RuntimeError("no")
sys.stdout = sys.stderr = Bad()
1
""",
    "error",
)
_add("no modules", "import sys\nsys.modules.clear()\n1 / 0", "error killed")
_add("no builtins", "import builtins\nbuiltins.__dict__.clear()", "")
_add("an exit with a very long reason", "import sys\nsys.exit('x' * 10**8)", "")
_add("an exit code of another size", "import sys\nsys.exit(10**30)", "error")
_add("an exit of a class", "raise SystemExit(type('X', (), {'__str__': None})())", "")
_add("a crash", "import ctypes\nctypes.string_at(0)", "killed error")
_add("brackets without end", "(" * 5000 + ")" * 5000, "error output")
_add("very many terms", "x = " + "+".join(["1"] * 200_000), "error ok killed")
_add("a null character", "print(1)\0", "error")
_add(
    "work at exit",
    "import atexit, time\natexit.register(time.sleep, 99)\nprint(1)",
    "ok",
)
_add(
    "a thread that goes on",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
    "ok",
)
_add("a pattern without end", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", "timeout killed")
_add(
    "hands on the collector",
    "import gc\nfor o in gc.get_objects():\n    if type(o) is dict: o.clear()",
    "",
)
