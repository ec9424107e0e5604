"""Rewards that would hurt the run: each is contained, counted and named, and the others go on."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, kill, make_reward
from jrl.rewards.call import call
from jrl.rewards.pool import RewardPool
from jrl.rewards.shared_memory import WrittenFiles
from jrl.types import Prompt

HOSTILE = pathlib.Path(__file__).parent / "hostile.py"
PROC = pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="reads /proc")


def hostile(place="."):
    return make_reward(f"{HOSTILE}:does", place=str(place))


def samples_of(*completions):
    prompts = [
        Prompt(i, f"{i}?", np.arange(3, dtype=np.int32), i, {}) for i in range(len(completions))
    ]
    return [
        Sample(p, text, np.arange(2), "length")
        for p, text in zip(prompts, completions, strict=True)
    ]


def is_gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def all_end(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(map(is_gone, pids)):
        time.sleep(0.05)
    return all(map(is_gone, pids))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def pool(place):
    limits = {"workers": 2, "timeout_seconds": 2.0, "memory_gib": 0.5}
    with RewardPool({"r": hostile(place)}, **limits, on_error="zero") as pool:
        pool.scores(samples_of("fine", "fine"))
        yield pool


ERRORS = {
    "speechless": "raised Unspeakable: (and its text raises ValueError)",
    "unnamed": "raised Unnamed: but a text",
    "surrogate": "raised ValueError: \\ud800 and more",
    "gone": "its process died (exit code 0)",
    "huge": "returned 1e+308, infinite in float32",
    "digits": "returned an integer beyond float32",
    "complex": "returned complex64 np.complex64(1+2j) instead of a number",
    "time": "returned timedelta64 np.timedelta64(1,'s') instead of a number",
    "unnamed_value": "returned Unnamed Unnamed() instead of a number",
    "sly": "returned inf; rewards must be finite",
    "liar": "returned 2 numbers for 1 sample",
    "closes_everything": "its process",
}


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_is_counted_and_named_and_the_others_are_judged(pool, what, monkeypatch):
    points, (_, counts, _) = pool.scores(samples_of("fine", what, "fine"))
    assert points[:, 0].tolist() == [1.0, 0.0, 1.0]
    assert (counts["reward_timeouts"], counts["reward_errors"]) == (0.0, 1.0)
    monkeypatch.setattr(pool, "on_error", "stop")
    with pytest.raises(UserError) as raised:
        pool.scores(samples_of("fine", what))
    assert ERRORS[what] in str(raised.value)
    assert 'set reward_pool.on_error = "zero" or "drop"' in str(raised.value)


@PROC
@pytest.mark.parametrize("what", ["eats", "child_eats"])
def test_memory_beyond_the_limit_ends_the_call_and_names_the_limit(pool, what, monkeypatch):
    monkeypatch.setattr(pool, "timeout_seconds", 60.0)  # a busy machine takes its time to eat
    points, (_, counts, _) = pool.scores(samples_of("fine", what, "fine"))
    assert points[:, 0].tolist() == [1.0, 0.0, 1.0]
    assert counts["reward_errors"] == 1.0
    monkeypatch.setattr(pool, "on_error", "stop")
    with pytest.raises(UserError, match="GiB of memory, more than reward_pool.memory_gib = 0.5"):
        pool.scores(samples_of(what))


def test_a_worker_that_a_reward_has_broken_is_replaced(place, monkeypatch):
    monkeypatch.setattr("jrl.rewards.workers._FAILURES_IN_A_ROW", 3)
    limits = {"workers": 1, "timeout_seconds": 20.0, "on_error": "zero"}
    with RewardPool({"r": hostile(place)}, **limits) as pool:
        points, (_, counts, _) = pool.scores(samples_of("breaks", *["needs_modules"] * 6))
    assert points[:, 0].tolist() == [1, 0, 0, 0, 1, 1, 1]
    assert counts["reward_errors"] == 3


@PROC
@pytest.mark.parametrize("what", ["writes_shared_memory", "writes_a_memfd"])
def test_memory_in_files_counts_and_goes(pool, what, monkeypatch):
    monkeypatch.setattr(pool, "timeout_seconds", 60.0)
    monkeypatch.setattr(pool, "on_error", "stop")
    with pytest.raises(UserError, match="GiB of memory, more than reward_pool.memory_gib = 0.5"):
        pool.scores(samples_of(what))
    assert not list(pathlib.Path("/dev/shm").glob("jrl-test-*"))


@PROC
def test_memory_that_is_mapped_and_open_counts_once(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout_seconds", 60.0)
    points, (_, counts, _) = pool.scores(samples_of("maps_shared_memory"))
    assert (points[0, 0], counts["reward_errors"]) == (1.0, 0.0)


@PROC
def test_memory_that_cannot_be_read_in_detail_counts_in_full(monkeypatch):
    """A process may make itself unreadable to a trainer that is not root."""

    def refuse(path, **how):
        if "smaps" in path:
            raise PermissionError
        return open(path, **how)

    monkeypatch.setattr(kill, "open", refuse, raising=False)
    assert kill.TreeMemory().bytes([os.getpid(), os.getppid()], above=1) > 10 << 20


def test_pages_that_forks_share_are_asked_for_again_when_they_may_matter(monkeypatch):
    """Not at every look, but at once where the tree may have grown beyond the limit."""
    resident, calls = {1: 60, 2: 60}, []
    monkeypatch.setattr(kill, "_resident", lambda pid: resident.get(pid, 60))
    monkeypatch.setattr(kill, "_proportional", lambda pid: (calls.append(pid) or 35, 0))
    monkeypatch.setattr(kill.time, "thread_time", iter(range(100)).__next__)  # a second each
    memory = kill.TreeMemory()
    assert memory.bytes([1, 2], above=100) == 70  # 120 resident, 50 of them counted twice
    assert memory.bytes([1, 2], above=100) == 70
    resident[1] = 80
    assert memory.bytes([1, 2], above=100) == 90  # 20 more at most
    assert calls == [1, 2]
    resident[1] = 100
    assert memory.bytes([1, 2], above=100) == 70
    assert calls == [1, 2, 1, 2]


@PROC
def test_shared_memory_of_others_does_not_count(tmp_path):
    """Earlier files, files that are only read, and files of other processes."""
    mine = pathlib.Path(f"/dev/shm/jrl-test-mine-{os.getpid()}")
    mine.write_bytes(b"x" * (1 << 20))
    later = mine.with_name(f"{mine.name}-later")
    try:
        with mine.open("ab"):
            files = WrittenFiles()
            later.write_bytes(b"x" * (1 << 20))
            with later.open("rb"):
                assert files.bytes([os.getpid()]) == 0
            with later.open("ab"):
                assert files.bytes([os.getpid()]) == 1 << 20
            assert files.bytes([]) == 1 << 20  # closed, and still there
            files.remove()
            assert mine.exists()
            assert not later.exists()
            assert files.bytes([os.getpid()]) == 0
    finally:
        mine.unlink(missing_ok=True)
        later.unlink(missing_ok=True)


@PROC
def test_what_a_reward_forks_dies_with_its_time_limit(pool, place):
    points, (_, counts, _) = pool.scores(samples_of("fine", "forks"))
    assert points[:, 0].tolist() == [1.0, 0.0]
    assert counts["reward_timeouts"] == 1.0
    pids = [int(pid) for pid in (place / "pids").read_text().split()]
    assert len(pids) == 4
    assert all_end(pids, 2.0)


TRAINER = """
    import types
    import numpy as np
    from jrl.rewards import Sample, kill, make_reward
    from jrl.rewards.pool import RewardPool

    if __name__ == "__main__":
        prompt = types.SimpleNamespace(id=0, text="", tokens=np.zeros(1), answer=1, meta={})
        reward = make_reward(HOSTILE + ":does", place=PLACE)
        with RewardPool({"r": reward}, workers=2, timeout_seconds=600) as pool:
            pool.scores([Sample(prompt, w, np.zeros(1), "length") for w in ("forks", WITH)])
"""


@PROC
def test_what_a_reward_forks_dies_with_a_killed_trainer(tmp_path, checkout):
    """Also beside a call that holds the interpreter's lock, which no thread could interrupt."""
    script = tmp_path / "trainer.py"
    names = {"HOSTILE": str(HOSTILE), "PLACE": str(tmp_path), "WITH": "holds_the_lock"}
    lines = [f"{name} = {value!r}" for name, value in names.items()]
    script.write_text("\n".join(lines) + textwrap.dedent(TRAINER))
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    trainer = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        wait_until = time.monotonic() + 60
        while not (tmp_path / "pids").exists() and time.monotonic() < wait_until:
            time.sleep(0.1)
        time.sleep(0.5)
        task = pathlib.Path(f"/proc/{trainer.pid}/task")
        children = [int(c) for t in task.glob("*/children") for c in t.read_text().split()]
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert set(pids) & set(children)
    finally:
        trainer.kill()
        trainer.wait()
    assert all_end(pids + children)


def test_calls_that_hold_the_interpreter_lock_cost_their_own_time_only():
    """8 of 1 s on 2 workers: 4 s, and little for the processes that take the places of the dead."""
    with RewardPool({"r": hostile()}, workers=2, timeout_seconds=1.0) as pool:
        pool.scores(samples_of("fine", "fine"))
        begin = time.monotonic()
        points, (_, counts, _) = pool.scores(samples_of(*["holds_the_lock"] * 8, *["fine"] * 4))
        spent = time.monotonic() - begin
    assert counts["reward_timeouts"] == 8.0
    assert points[8:, 0].tolist() == [1.0] * 4
    assert spent < 12


def test_a_thread_left_behind_with_the_lock_delays_and_hurts_nobody(pool):
    """The worker that it holds takes no further call in time; that call fails or is moved."""
    pool.scores(samples_of("leaves_a_thread"))
    points, (_, counts, _) = pool.scores(samples_of(*["fine"] * 6))
    assert points.sum() >= 5
    assert counts["reward_errors"] + counts["reward_timeouts"] <= 1


def test_a_process_that_is_stopped_is_ended_at_its_time_limit(pool):
    points, (_, counts, _) = pool.scores(samples_of("stops_itself", "fine"))
    assert points[:, 0].tolist() == [0.0, 1.0]
    assert counts["reward_timeouts"] == 1.0


def test_what_a_call_leaves_behind_in_the_pipe_is_no_failure_of_the_next_one(pool):
    pool.scores(samples_of("leaves_a_writer", "leaves_a_writer"))
    time.sleep(0.5)
    points, (_, counts, _) = pool.scores(samples_of("fine", "fine"))
    assert points[:, 0].tolist() == [1.0, 1.0]
    assert counts["reward_errors"] == 0.0


def test_garbage_in_the_pipes_runs_nothing_in_the_trainer(pool):
    counts = pool.scores(samples_of("writes_to_every_pipe")).outcome.counts
    assert counts["reward_timeouts"] == 0.0
    assert pool.scores(samples_of("fine", "fine"))[0][:, 0].tolist() == [1.0, 1.0]


def test_a_flood_of_output_is_cut(pool, capsys):
    points, _ = pool.scores(samples_of("prints"))
    assert points[0, 0] == 1.0
    stderr = capsys.readouterr().err
    assert stderr.startswith("spam ")
    assert len(stderr) < 17_000
    assert "[rewards printed more than 16384 bytes; the rest is dropped]" in stderr


@pytest.mark.parametrize(
    ("failure", "name"),
    [("timeout", "reward_pool.on_timeout"), ("error", "reward_pool.on_error")],
)
def test_the_choices_after_a_failure(failure, name):
    key = name.removeprefix("reward_pool.")
    samples = samples_of("fine", "stops_itself" if failure == "timeout" else "gone")
    with RewardPool({"r": hostile()}, workers=1, timeout_seconds=1.0, on_error="zero") as pool:
        setattr(pool, key, "drop")
        points, (_, counts, _) = pool.scores(samples)
        assert points[0, 0] == 1.0
        assert math.isnan(points[1, 0])
        assert counts[f"reward_{failure}s"] == 1.0
        setattr(pool, key, "stop")
        with pytest.raises(UserError, match=rf"\(prompt 1\); .* set {name} = "):
            pool.scores(samples)


def test_without_processes_the_same_values_are_refused():
    for what in ("huge", "digits", "sly", "liar", "speechless", "unnamed", "complex", "time"):
        assert ERRORS[what] in call(hostile(), samples_of(what)).reason


def test_an_alarm_that_a_call_leaves_does_not_go_off_in_another():
    def leaves(samples):
        signal.setitimer(signal.ITIMER_PROF, 60)
        return [1.0]

    signal.setitimer(signal.ITIMER_VIRTUAL, 60)  # the caller's, which stays
    try:
        assert call(leaves, samples_of("a")) == [1.0]
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    finally:
        for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)


def test_what_a_call_does_to_its_row_no_other_call_reads():
    """In this process, too: the second member of a prompt has the same row."""

    def eats(samples):
        row = samples[0].prompt
        return [float(row.meta["tests"].pop() + row.answer.pop("bonus"))]

    prompt = Prompt(0, "?", np.arange(3, dtype=np.int32), {"bonus": 1}, {"tests": [1, 2]})
    samples = [Sample(prompt, "a", np.arange(2), "length")] * 2
    with RewardPool({"r": eats}, workers=0, timeout_seconds=2.0, on_error="stop") as pool:
        points = pool.scores(samples).points
    assert points[:, 0].tolist() == [3.0, 3.0]
    assert (prompt.meta, prompt.answer) == ({"tests": [1, 2]}, {"bonus": 1})
