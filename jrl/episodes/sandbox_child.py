"""Runs the Python on its standard input under limits: the program that ``sandbox`` starts.

Free of everything but the standard library, because it runs by its path in an interpreter without
site packages. Its argument is JSON: see ``sandbox.Sandbox``.
"""

import ast
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import traceback

_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MS_NOSUID, _MS_NODEV = 0x2, 0x4
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES = 0x20080522


_FILTERED = {
    # socket, ptrace, process_vm_readv and _writev, io_uring_setup, pidfd_getfd; by AUDIT_ARCH
    "x86_64": (0xC000003E, (41, 101, 310, 311, 425, 438)),
    "aarch64": (0xC00000B7, (198, 117, 270, 271, 425, 438)),
}
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06  # of classic BPF
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # 1: EPERM
_OTHER_ABI = 0x40000000  # x32 has numbers of its own for the same calls


def without_sockets(libc: ctypes.CDLL) -> None:
    """Refuses this process and all its children sockets and others' memory, for good.

    socketpair stays, which asyncio and multiprocessing use. New privileges must be refused before.
    """
    arch, numbers = _FILTERED[os.uname().machine]
    last = len(numbers)
    program = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_JUMP_ABOVE, last + 1, 0, _OTHER_ABI),
        *((_JUMP_EQUAL, last - i, 0, number) for i, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    lines = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(lines, len(lines))
    filters = struct.pack("HP", len(program), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(filters), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def confine(spec: dict) -> None:
    """Gives up rights, and lowers the limits of this process and all its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if spec["mounts"]:
        # Own mounts: /tmp and shared memory are empty, of limited size, and go with the process.
        if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
            raise OSError(ctypes.get_errno(), "mount")
        size = f"size={spec['file_bytes']},mode=1777".encode()
        for place in (b"/tmp", b"/var/tmp", b"/dev/shm"):
            if os.path.isdir(place):
                flags = _MS_NOSUID | _MS_NODEV
                if libc.mount(b"tmpfs", place, b"tmpfs", flags, size):
                    raise OSError(ctypes.get_errno(), "mount")
        os.chdir("/tmp")
    if spec["uid"] is not None:
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    # No rights of a user namespace's root either; new user ids have forgotten the death signal.
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if spec["filtered"]:
        without_sockets(libc)
    seconds = int(spec["seconds"]) + 1
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_FSIZE: spec["file_bytes"],
        resource.RLIMIT_NPROC: spec["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (value, value))


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
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace is not None else None  # not this file's line
        traceback.print_exception(error)
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
    status = execute(code)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
