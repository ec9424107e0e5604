"""Processes that take the place of others: copies, and calls that hang beside those that do not."""

import io
import os
import pathlib
import pickle
import random
import sys
import textwrap
import time
import types

import numpy as np
import pytest

from jrl.rewards import Sample, make_reward, priority
from jrl.rewards.pool import RewardPool
from jrl.rewards.starting import Processes
from jrl.rewards.worker import pickled_call
from jrl.rewards.workers import Workers
from jrl.types import Prompt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies need Linux")

JUDGES = pathlib.Path(__file__).parent / "judges.py"
LOADED = """
    import os, random, threading, time

    def answers(samples):
        if samples[0].completion == "die":
            os._exit(7)
        return [float(os.getppid()) if samples[0].completion == "parent" else random.random()]

    def prepare():
        with open(NOTES, "a") as notes:
            notes.write("loaded\\n")
        if LEAVES == "thread":
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        if LEAVES == "file":
            answers.file = open(NOTES)
        if LEAVES == "seed":
            random.seed(3)

    answers.prepare = prepare
"""


def samples_of(*completions):
    return [
        Sample(Prompt(i, "?", np.zeros(1, np.int32), "", {}), text, np.arange(2), "length")
        for i, text in enumerate(completions)
    ]


@pytest.fixture
def processes(tmp_path):
    """Makes processes of a function whose loading leaves something behind."""
    pools = []

    def make(leaves=""):
        names = {"NOTES": str(tmp_path / "notes"), "LEAVES": leaves}
        lines = [f"{name} = {value!r}" for name, value in names.items()]
        (tmp_path / "loaded.py").write_text("\n".join(lines) + textwrap.dedent(LOADED))
        function = make_reward(f"{tmp_path}/loaded.py:answers")
        pools.append(Processes(pickle.dumps({"f": function})))
        pools[-1].expect_losses()
        until(lambda: pools[-1]._template.look() is not None)
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


def answer(worker, text):
    """A worker's answer to a call, or its exit code if it ends."""
    if not worker.ready:
        until(lambda: worker.receive() == [])
        worker.ready = True
    worker.send("call", pickled_call("f", samples_of(text)))
    until(lambda: worker.connection.poll())
    if text == "die":
        return until(lambda: worker.exit_code())
    (value,) = worker.receive()
    worker.call = None
    return value


def test_workers_are_copies_of_one_process_that_has_loaded_the_functions(processes, tmp_path):
    started = processes()
    assert started.copies
    workers = [started.start() for _ in range(3)]
    values = [answer(worker, "any") for worker in workers]
    assert len(set(values)) == 3  # the copies' generators are not copies
    assert {answer(worker, "parent") for worker in workers} == {float(started._template.pid)}
    assert answer(workers[0], "die") == 7
    assert (tmp_path / "notes").read_text().split() == ["loaded"]
    for worker in workers:
        started.end(worker)
    until(lambda: started.tidy() or not started._ending)


def test_a_generator_that_loading_seeds_continues_in_each_copy(processes):
    started = processes("seed")
    workers = [started.start() for _ in range(2)]
    assert {answer(worker, "any") for worker in workers} == {random.Random(3).random()}
    for worker in workers:
        started.end(worker)


@pytest.mark.parametrize("what", ["thread", "file"])
def test_what_cannot_be_copied_is_loaded_again(processes, tmp_path, what):
    started = processes(what)
    assert not started.copies
    worker = started.start()
    assert 0 <= answer(worker, "any") < 1
    assert (tmp_path / "notes").read_text().split() == ["loaded", "loaded"]
    started.end(worker)


def test_a_template_that_is_killed_is_done_without(processes):
    started = processes()
    started._template._process.kill()
    worker = started.start()
    assert 0 <= answer(worker, "any") < 1
    started.end(worker)


@pytest.mark.parametrize("later", [["meet"], ["look", *["rest"] * 12]], ids=["meet", "look"])
def test_a_call_that_hangs_ends_when_a_later_one_is_done(tmp_path, later):
    """With one process at a time; "look" waits until the one that hangs has the lowest priority.

    It has that while there are calls that no process has taken; "rest" are those.
    """
    limits = {"workers": 1, "timeout_seconds": 120.0, "on_timeout": "stop"}
    with RewardPool({"met": make_reward(f"{JUDGES}:met", place=str(tmp_path))}, **limits) as pool:
        pool.scores(samples_of(*"abcdefgh"))  # what calls usually take
        points = pool.scores(samples_of("wait", *later)).points
    assert points[:, 0].tolist() == [4.0] * (1 + len(later))  # late, and in time


def test_calls_that_hang_are_held_to_a_number():
    limits = types.SimpleNamespace(timeout_seconds=1.0, memory_gib=1.0)
    workers = Workers({}, 1, limits)
    workers._busy = lambda: [types.SimpleNamespace(seconds=lambda: 2.0)] * 20
    workers._processes = types.SimpleNamespace(copies=False, expect_losses=lambda: None)
    assert workers._slow() == 8
    workers._beside = 12
    assert workers._slow() == 12


def test_time_that_a_call_waited_behind_others_does_not_count(processes, monkeypatch):
    worker = processes().start()
    answer(worker, "any")
    waits = iter([5.0, 7.0, 30.0])
    monkeypatch.setattr("jrl.rewards.worker.waited_seconds", lambda pid: next(waits))
    monkeypatch.setattr(worker, "seconds", lambda: 11.0)
    assert worker.charged_seconds(10.0) == 11.0
    worker.put_behind(True)
    assert worker.behind
    assert worker.charged_seconds(10.0) == 9.0
    assert worker.charged_seconds(10.0) == 1.0  # 10 s of 25: at most the limit again
    assert worker.charged_seconds(20.0) == 11.0
    worker.kill()
    assert worker.ended(10.0)


@pytest.mark.parametrize(
    ("times", "known"), [("5000 0 1", True), ("5000 70 2", True), ("0 0 0", False)]
)
def test_a_process_that_never_waited_can_be_put_behind(monkeypatch, times, known):
    """Only where the system says nothing of it is its priority left as it is."""

    def opened(name, *args, **options):
        if str(name).endswith("schedstat"):
            return io.StringIO(times)
        return open(name, *args, **options)

    set_levels = []
    monkeypatch.setattr(priority, "open", opened, raising=False)
    monkeypatch.setattr(os, "setpriority", lambda *call: set_levels.append(call))
    monkeypatch.setattr(os, "listdir", lambda place: ["1"])
    assert priority.set_priority(99999999, priority.LOWEST) == known
    assert len(set_levels) == known
