"""Reward functions that do what none should; each says in its completion what to do."""

import mmap
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time

import numpy as np


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text either")


class Nameless(type):
    @property
    def __name__(cls):
        raise ValueError("no name either")


class Unnamed(Exception, metaclass=Nameless):
    pass


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


def unnamed(place):
    raise Unnamed("but a text")


def surrogate(place):
    raise ValueError("\ud800 and more")


def breaks(place):
    global statistics
    statistics = None
    return [1.0]


def needs_modules(place):
    return [float(statistics.mean([1.0]))]


def gone(place):
    os._exit(0)


def eats(place):
    blocks = []
    while True:
        blocks.append(b"x" * (1 << 24))


def child_eats(place):
    code = "kept = []\nwhile True: kept.append(b'x' * (1 << 24))"
    return [float(subprocess.run([sys.executable, "-c", code], check=False).returncode)]


def writes_shared_memory(place):
    """Into a file that it closes; 0.7 GiB is more than the limit and less than hurts."""
    with open(f"/dev/shm/jrl-test-{os.getpid()}", "wb") as file:
        for _ in range(44):
            file.write(b"x" * (1 << 24))
            time.sleep(0.01)
    time.sleep(600)


def writes_a_memfd(place):
    number = os.memfd_create("jrl-test")
    for _ in range(44):
        os.write(number, b"x" * (1 << 24))
    time.sleep(600)


def maps_shared_memory(place):
    """Little enough: mapped and open, it is counted once."""
    number = os.memfd_create("jrl-test")
    os.ftruncate(number, 300 << 20)
    with mmap.mmap(number, 300 << 20) as mapped:
        for _ in range(300):
            mapped.write(b"x" * (1 << 20))
        time.sleep(0.5)
    os.close(number)
    return [1.0]


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


def leaves_a_writer(place):
    threading.Timer(0.2, writes_to_every_pipe, [place]).start()
    return [1.0]


def stops_itself(place):
    os.kill(os.getpid(), 19)


VALUES = {
    "complex": lambda: [np.complex64(1 + 2j)],
    "time": lambda: [np.timedelta64(1, "s")],
    "unnamed_value": lambda: [Unnamed()],
    "huge": lambda: [1e308],
    "digits": lambda: [10**400],
    "sly": lambda: [Sly(1.0)],
    "liar": lambda: Liar([1.0, 2.0]),
}
ACTS = {name: f for name, f in list(globals().items()) if isinstance(f, type(does))}
