"""Runs the Python on its standard input under limits: the program that ``sandbox`` starts.

Free of everything but the standard library, because it runs by its path in an interpreter without
site packages. Its argument is JSON: see ``sandbox.Sandbox``.
"""

import ast
import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import signal
import struct
import sys
import traceback
from typing import Any

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_OPTIONS = {
    "nosuid": _MS_NOSUID,
    "nodev": _MS_NODEV,
    "noexec": _MS_NOEXEC,
    "noatime": 0x400,
    "nodiratime": 0x800,
    "relatime": 0x200000,
}
"""Flags that a remount must repeat: a namespace may not clear those of its parent."""
_FILES = 4096
"""In all temporary directories together: each takes memory of the kernel's."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_CAPABILITIES = 0x20080522

# ---------------------------------------------------------------- its own view of the machine


def _mount(
    libc: ctypes.CDLL, source: str, place: str, kind: str = "", flags: int = 0, data: str = ""
) -> None:
    """The system call, with its failure as an exception."""
    texts = [text.encode() if text else None for text in (source, place, kind)]
    if libc.mount(*texts, ctypes.c_ulong(flags), data.encode() if data else None):
        raise OSError(ctypes.get_errno(), "mount", place)


def set_apart(libc: ctypes.CDLL, file_bytes: int) -> None:
    """Leaves this mount namespace nothing to write but temporary directories of its own.

    Whatever directories the machine lets everybody write, the code cannot: all that was mounted
    before is read-only. /tmp and its like are one file system in memory, which goes with the
    process. /proc is of the own process namespace, and /dev holds no hardware.
    """
    _mount(libc, "none", "/", flags=_MS_REC | _MS_PRIVATE)
    _make_read_only(libc)
    limits = f"size={file_bytes},nr_inodes={_FILES},mode=755"
    _mount(libc, "tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, limits)
    devices = _make_devices(libc)
    # /run has no temporary files only, but sockets of services, which no network namespace hides.
    for i, place in enumerate(("/run", "/var/run", "/var/lock", "/var/tmp", "/tmp")):
        if os.path.isdir(place) and (place == "/tmp" or os.path.realpath(place) == place):
            os.mkdir(f"/tmp/{i}")
            os.chmod(f"/tmp/{i}", 0o1777)
            if place == "/tmp":  # the last: it hides what the others were made of
                _mount(libc, devices, "/dev", flags=_MS_BIND | _MS_REC)
            _mount(libc, f"/tmp/{i}", place, flags=_MS_BIND)
    quiet = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        _mount(libc, "proc", "/proc", "proc", quiet)
    except OSError:  # a container that hides parts of /proc lets nobody mount another
        _mount(libc, "tmpfs", "/proc", "tmpfs", quiet)
    os.chdir("/tmp")


def _make_read_only(libc: ctypes.CDLL) -> None:
    """All that is mounted; further views of /proc, which show other processes, are emptied."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        mounts = [line.split() for line in lines]
    for fields in mounts:
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        kind = fields[fields.index("-") + 1]
        flags = sum(_OPTIONS.get(option, 0) for option in fields[5].split(","))
        try:
            if kind == "proc" and not f"{place}/".startswith("/proc/"):
                _mount(libc, "tmpfs", place, "tmpfs", _MS_RDONLY)
            _mount(libc, "", place, flags=flags | _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
        except OSError as error:
            # Another mount hides it, or a directory above is closed to everybody here.
            if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                raise


def _make_devices(libc: ctypes.CDLL) -> str:
    """A directory for /dev: without accelerators, disks, terminals and kvm."""
    directory = "/tmp/dev"
    os.mkdir(directory)
    for name in _DEVICES:
        open(f"{directory}/{name}", "w").close()
        _mount(libc, f"/dev/{name}", f"{directory}/{name}", flags=_MS_BIND)
    os.mkdir(f"{directory}/shm")
    os.chmod(f"{directory}/shm", 0o1777)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{directory}/{name}")
    return directory


# ---------------------------------------------------------------- system calls that are refused

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the index of its numbers of system calls, and its AUDIT_ARCH."""
_REFUSED = {
    # namespaces, in which code would have rights, and could mount file systems in memory
    "unshare": (272, 97),
    "setns": (308, 268),
    # memory that no limit counts, or that outlives all who use it
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # other processes, and a way around this list
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
}
_SOCKET, _FAMILIES = (41, 198), (2, 10, 16)
"""IPv4, IPv6, netlink: a network namespace holds them. It does not hold sockets to the host of a
virtual machine (vsock), nor those with a path, by which services listen (unix); pairs stay."""
_OPTION, _OF_SOCKETS, _SIZES = (54, 208), 1, (7, 8)
"""setsockopt, SOL_SOCKET, and its SO_SNDBUF and SO_RCVBUF: the contents of a socket are memory of
the kernel's, which no sum counts, and megabytes each where code may enlarge it."""
_REFUSED_BESIDE_OTHERS = {
    "socket": _SOCKET,  # socketpair stays, which asyncio and multiprocessing use
    # A process that leaves the group outlives the signal that ends the group.
    "setsid": (112, 157),
    "setpgid": (109, 154),
}
"""Refused in addition if namespaces do not isolate the code."""
_CLONE, _CLONE3, _NAMESPACES = (56, 220), 435, 0x7E020000
_MODE_FILTER = 2
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_OTHER_ABI = 0x40000000  # x32 has numbers of its own for the same calls
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in what a filter reads
_FIRST_ARGUMENT, _SECOND, _THIRD = 16, 24, 32


def filter_calls(libc: ctypes.CDLL, in_namespaces: bool) -> None:
    """Refuses this process and all its children what ``_REFUSED`` lists, for good.

    New privileges must be refused before.
    """
    which, architecture = _ARCHITECTURES[os.uname().machine]
    refused = _REFUSED if in_namespaces else _REFUSED | _REFUSED_BESIDE_OTHERS
    deny = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_ABOVE, 0, 1, _OTHER_ABI),
        deny,
    ]
    for numbers in refused.values():
        program += [(_JUMP_EQUAL, 0, 1, numbers[which]), deny]
    program += [
        # Its flags are in memory, which no filter reads; without it, libraries use clone.
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_JUMP_EQUAL, 0, 3, _CLONE[which]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_BITS, 0, 1, _NAMESPACES),
        deny,
        (_JUMP_EQUAL, 0, 7, _OPTION[which]),
        (_LOAD, 0, 0, _SECOND),
        (_JUMP_EQUAL, 0, 4, _OF_SOCKETS),
        (_LOAD, 0, 0, _THIRD),
        (_JUMP_EQUAL, 1, 0, _SIZES[0]),
        (_JUMP_EQUAL, 0, 1, _SIZES[1]),
        deny,
        (_RETURN, 0, 0, _ALLOW),
        (_JUMP_EQUAL, 0, len(_FAMILIES) + 2, _SOCKET[which]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_JUMP_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)),
        deny,
        (_RETURN, 0, 0, _ALLOW),
    ]
    lines = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(lines, len(lines))
    filters = struct.pack("HP", len(program), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(filters), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


# ---------------------------------------------------------------- files, without namespaces

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock, on every architecture
_READS, _WRITES_FILE = 0b1101, 0b10  # to execute, to read files and directories; to write files
_ALL_ACCESS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}  # by the version that knows them
_SCOPES, _KNOWS_SCOPES = 0b11, 6  # no signals to others, nor their abstract sockets
_CLOSED = ("proc", "tmp", "run", "dev", "sys")


def fence_files(libc: ctypes.CDLL) -> None:
    """Refuses, for good, to write anything outside the working directory, and to read /proc.

    So nothing stays behind where the working directory is removed. New privileges must be
    refused before.
    """
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise OSError(ctypes.get_errno(), "landlock")
    access = _ALL_ACCESS[max(v for v in _ALL_ACCESS if v <= version)]
    scopes = _SCOPES if version >= _KNOWS_SCOPES else 0
    rules = struct.pack("QQQ", access, 0, scopes)[: 24 if scopes else 8]
    ruleset = libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    allowed = {os.getcwd(): access}
    allowed |= {f"/dev/{name}": _READS & 0b101 | _WRITES_FILE for name in _DEVICES}
    allowed |= {entry.path: _READS for entry in os.scandir("/") if entry.name not in _CLOSED}
    for path, rights in allowed.items():
        with contextlib.suppress(OSError):  # not there, or not ours to look at
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            listing = 0 if os.path.isdir(path) else 0b1000  # a file has nothing to list
            rule = struct.pack("=Qi", rights & ~listing, place)
            if libc.syscall(_ADD_RULE, ruleset, 1, rule, 0):
                raise PermissionError(ctypes.get_errno(), "landlock", path)
            os.close(place)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock")
    os.close(ruleset)


# ---------------------------------------------------------------- the program


def confine(spec: dict[str, Any]) -> None:
    """Gives up rights, and lowers the limits of this process and all its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if spec["apart"]:
        set_apart(libc, spec["file_bytes"])
    if spec["uid"] is not None:
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    # No rights of a user namespace's root either; new user ids have forgotten the death signal.
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Where others have this user id too, the kernel counts what they run.
    beside = 0 if spec["apart"] or spec["uid"] is not None else _running(os.getuid())
    if spec["fenced"]:
        fence_files(libc)
    if spec["filtered"]:
        filter_calls(libc, spec["apart"])
    seconds = int(spec["seconds"]) + 1
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: spec["address_bytes"] or spec["memory_bytes"],
        resource.RLIMIT_FSIZE: spec["file_bytes"],
        resource.RLIMIT_NPROC: spec["processes"] + beside,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (value, value))


def _running(uid: int) -> int:
    """Processes and threads of a user."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def execute(code: str) -> int:
    """Runs the code and prints the value of its last line, as a notebook does; the exit status."""
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(code, "<python>")
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, "<python>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<python>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        if isinstance(error.code, int):
            return error.code & 0xFF if abs(error.code) < 2**31 else 1
        return int(error.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace is not None else None  # not this file's line
        try:
            traceback.print_exception(error)
        except BaseException:  # the code has taken away what it takes
            os.write(2, f"{type(error).__name__}\n".encode())
        return 1
    return 0


def main() -> None:
    """Reads the code, confines this process, and runs it."""
    spec = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    confine(spec)
    sys.argv = ["<python>"]
    leave = os._exit
    status = execute(code)
    try:
        sys.stdout.flush()
    finally:  # the code may have put something else in its place
        leave(status)


if __name__ == "__main__":
    main()
