"""Waits on the host: each is said by its name, and one without progress ends the run."""

import threading
import time

import numpy as np
import pytest

from jrl.errors import Overdue
from jrl.rewards.base import Sample
from jrl.rewards.pool import RewardPool
from jrl.system import signals
from jrl.system import wait_reports as waits
from jrl.system.signals import Stopping
from jrl.system.wait_reports import Waits, io_progress, waiting
from jrl.types import Prompt


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(waits, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(waits, "LOOK_SECONDS", 0.02)


def test_a_wait_is_said_each_time_it_has_doubled_with_what_is_left():
    lines, left = [], [64]
    with (
        Waits(60, lines.append, lines.append),
        waiting("rollout", of="step 12"),
        waiting("rewards", lambda: f"{left[0]} of 64 calls left"),
    ):
        time.sleep(0.15)
        left[0] = 3
        time.sleep(0.35)
    assert len(lines) == 2 + (len(lines) == 3)  # 0.1 s, 0.2 s and perhaps 0.4 s
    assert lines[0] == "waiting for the rewards of step 12: 0 s, 64 of 64 calls left"
    assert lines[1] == "waiting for the rewards of step 12: 0 s, 3 of 64 calls left"


def test_what_always_takes_long_is_said_once():
    lines = []
    with Waits(60, lines.append, lines.append):
        for _ in range(3):
            with waiting("rollout"):
                time.sleep(0.15)
    assert lines == ["waiting for the rollout: 0 s"]


def test_a_wait_without_progress_is_ended_and_one_with_progress_is_not():
    overdue = threading.Event()
    lines = []

    def end(line):
        lines.append(line)
        overdue.set()

    with Waits(0.3, lambda line: None, end):
        count = iter(range(10**9))
        with waiting("outer"), waiting("rewards", lambda: str(next(count))):
            time.sleep(0.6)
        with waiting("judge", seconds=60):
            time.sleep(0.5)
        assert not lines
        with waiting("saving", of="step 3"):
            assert overdue.wait(5)
    assert lines == ["waited too long for the saving of step 3: 0 s"]


def test_a_detail_that_fails_and_a_terminal_that_is_gone_change_nothing():
    def closed_terminal(line):
        raise OSError("no terminal")

    overdue = threading.Event()
    with (
        Waits(0.2, closed_terminal, lambda line: overdue.set()),
        waiting("rewards", lambda: str(1 / 0)),
    ):
        assert overdue.wait(5)


def test_where_nobody_listens_a_wait_is_noted_and_forgotten():
    with waiting("rewards"), waiting("rewards"):
        pass
    assert not waits._waits


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_wait_beyond_its_limit_ends_what_may_be_interrupted(stubborn):
    start = time.monotonic()

    def judge():
        with waiting("rewards", of="step 2"), stopping.interruptible():
            try:
                time.sleep(30)
            except KeyboardInterrupt:
                if stubborn:  # as code of users may be
                    time.sleep(30)
                raise

    with Stopping() as stopping, Waits(0.2, lambda line: None, stopping.overdue):
        with pytest.raises(Overdue, match="waited too long for the rewards of step 2"):
            judge()
        assert not stopping.is_set()
    assert time.monotonic() - start < 10


def test_a_process_that_cannot_be_interrupted_is_ended(tmp_path):
    import subprocess
    import sys

    script = (
        "import time\n"
        "from jrl.system import signals\nfrom jrl.system import wait_reports as waits\n"
        "signals.END_SECONDS, waits.LOOK_SECONDS = 0.3, 0.05\n"
        "with signals.Stopping() as s, waits.Waits(0.2, print, s.overdue):\n"
        "    s.saved = lambda: 'step 2 is saved'\n"
        "    with waits.waiting('saving', of='step 3'):\n"
        "        time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == Overdue.exit_code == 3
    message = "waited too long for the saving of step 3: 0 s"
    assert done.stderr == f"jrl: error: {message}; step 2 is saved\n"


def test_a_second_thread_of_a_program_is_only_told(monkeypatch):
    monkeypatch.setattr(signals, "END_SECONDS", 0.1)
    lines = []

    def run():
        with (
            Stopping() as stopping,
            Waits(0.1, lines.append, stopping.overdue),
            waiting("rewards"),
            stopping.interruptible(),
        ):
            time.sleep(0.5)
        lines.append("alive")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert lines[-1] == "alive"


def test_what_is_read_and_written_is_progress(tmp_path):
    with Waits(60, lambda line: None, lambda line: None), waiting("checkpoint", io_progress):
        before = io_progress()
        (tmp_path / "file").write_bytes(bytes(3_000_000))
        assert io_progress() != before or not before  # where the system does not say


def sleepy(samples):
    time.sleep(0.4 if samples[0].prompt.id else 0)
    return [1.0] * len(samples)


@pytest.mark.parametrize("workers", [0, 1])
def test_rewards_say_how_many_calls_are_left(workers):
    samples = [
        Sample(Prompt(i, "", np.zeros(1, np.int32), None, {}), "", np.zeros(1, np.int32), "stop")
        for i in range(3)
    ]
    lines = []
    with (
        RewardPool({"sleepy": sleepy}, workers=workers, timeout_seconds=9) as pool,
        Waits(60, lines.append, lines.append),
        waiting("rollout", of="step 7"),
    ):
        pool.scores(samples, group=1)
    calls = [line for line in lines if "of 3 calls left" in line]
    assert calls
    assert all(line.startswith("waiting for the rewards of step 7: ") for line in calls)
    if workers:
        # The first look may come before the worker is started.
        assert any("1 of 1 workers loading" in line for line in calls)
