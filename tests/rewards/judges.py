"""Reward functions for the tests of the pool; good ones and bad ones."""

import os
import pathlib
import sys
import time

from jrl.rewards import whole_group


def length(samples, scale=1.0):
    return [len(s.completion) * scale for s in samples]


def write_note(samples, file):
    """The length of each text; each call leaves a line in a file."""
    with open(file, "a") as notes:
        notes.write(f"{samples[0].completion}\n")
    return [float(len(s.completion)) for s in samples]


@whole_group
def noted_group(samples, file):
    return write_note(samples, file)


def knows_no_jax(samples):
    return [float("jax" not in sys.modules)] * len(samples)


def pid(samples):
    return [float(os.getpid())] * len(samples)


def slow_when_asked(samples):
    """Waits when the completion says so; else gives the prompt's answer."""
    for s in samples:
        if s.completion == "hang":
            time.sleep(3600)
        if s.completion == "spin":
            while True:
                pass
    return [float(s.prompt.answer) for s in samples]


def dies(samples):
    if samples[0].completion == "die":
        os._exit(7)
    return [1.0] * len(samples)


def bad(samples):
    kind = samples[0].completion
    if kind == "raise":
        raise RuntimeError("no idea")
    if kind == "exit":
        sys.exit(3)
    return {
        "nan": [float("nan")],
        "inf": [float("inf")],
        "two": [1.0, 2.0],
        "none": None,
        "number": 1.0,
        "text": ["1"],
        "unpicklable": lambda: 1,
    }.get(kind, [0.5])


@whole_group
def rank(samples):
    """Each sample's place in its group, by length."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].completion))
    return [float(order.index(i)) for i in range(len(samples))]


def forks(samples):
    """The number in the text; where it says so a child is left behind that returns or raises."""
    text = samples[0].completion
    if text in ("fork", "fork and raise"):
        if os.fork() == 0:
            if text == "fork":
                return [5.0]
            raise ValueError("in the child")
        return [1.0]
    if text == "answer twice":
        for number in range(3, 100):  # whatever file the pipe is
            try:
                body = b'{"call": 1, "rewards": [9.0]}'
                os.write(number, len(body).to_bytes(4, "big") + body)
            except OSError:
                continue
    return [float(text) if text.isdigit() else 0.0]


def digits_by_token(samples):
    """1 for each token that is a digit of the built-in tokenizer; one number for "zz"."""
    return [
        [float(2 <= t < 12) for t in s.tokens] if s.completion != "zz" else 0.0 for s in samples
    ]


def two_by_token(samples):
    """Always two numbers."""
    return [[0.5, 0.25] for _ in samples]


def last_piece(samples):
    """1 for the first character of the text."""
    return [s.by_token([(0, 1, 1.0)]) for s in samples]


def met(samples, place):
    """A call that waits for what a later one does; only then has each its points."""
    place = pathlib.Path(place)
    what = samples[0].completion
    if what == "wait":
        (place / "pid").write_text(str(os.getpid()))
    while what == "look" and priority(int((place / "pid").read_text())) != 19:
        time.sleep(0.01)
    if what in ("meet", "look"):
        (place / "met").touch()
    while what in ("wait", "rest") and not (place / "met").exists():
        time.sleep(0.01 * (what == "rest"))
    return [float(len(what))]


def priority(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])
