"""Reward functions that do what none should; each says in its completion what to do."""

import os
import pathlib
import re
import subprocess
import sys
import threading
import time


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text either")


class Sly(float):
    """Finite when looked at, not when used."""

    def __float__(self):
        return float("inf")


class Liar(list):
    def __len__(self):
        return 1


def does(samples, place="."):
    what = samples[0].completion
    if what in VALUES:
        return VALUES[what]()
    return ACTS.get(what, lambda place: [1.0])(pathlib.Path(place))


def speechless(place):
    raise Unspeakable


def surrogate(place):
    raise ValueError("\ud800 and more")


def gone(place):
    os._exit(0)


def eats(place):
    kept = []
    while True:
        kept.append(b"x" * (1 << 24))


def child_eats(place):
    code = "kept = []\nwhile True: kept.append(b'x' * (1 << 24))"
    return [float(subprocess.run([sys.executable, "-c", code], check=False).returncode)]


def forks(place):
    """Starts a process in the group, one in a session of its own, and a daemon; then waits."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with_session = subprocess.Popen(sleep, start_new_session=True)
    pids = [subprocess.Popen(sleep).pid, with_session.pid]
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writer, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    pids.append(int(os.read(reader, 20)))
    (place / "pids").write_text(" ".join(map(str, [*pids, os.getpid()])))
    time.sleep(600)


def holds_the_lock(place):
    re.match(r"(a|a)*b", "a" * 40)


def leaves_a_thread(place):
    threading.Thread(target=holds_the_lock, args=(place,)).start()
    return [1.0]


def prints(place):
    for _ in range(2000):
        print("spam " * 1000)
    os.system("yes | head -c 5000000")
    return [1.0]


def closes_everything(place):
    os.closerange(0, 256)
    return [1.0]


def writes_to_every_pipe(place):
    for number in range(3, 30):
        try:
            os.write(number, b"\x00\x00\x00\x04[9.0" * 3)
        except OSError:
            continue
    return [1.0]


def stops_itself(place):
    os.kill(os.getpid(), 19)


VALUES = {
    "huge": lambda: [1e308],
    "digits": lambda: [10**400],
    "sly": lambda: [Sly(1.0)],
    "liar": lambda: Liar([1.0, 2.0]),
}
ACTS = {f.__name__: f for f in list(globals().values()) if getattr(f, "__module__", 0) == __name__}
