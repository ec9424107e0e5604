"""One writer for a run directory."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from jrl.errors import StorageError, UserError
from jrl.storage.lock import NAME, is_replaced, moved_to, run_lock

HOLD = """
import sys, time
from jrl.storage.lock import run_lock
with run_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_writer_is_refused_with_the_first_one_named(tmp_path):
    with run_lock(tmp_path / "run"):
        where = f"process {os.getpid()} on {socket.gethostname()} since 20"
        with pytest.raises(UserError, match=where), run_lock(tmp_path / "run"):
            pytest.fail("two writers")
    with run_lock(tmp_path / "run"):
        pass


def test_the_lock_ends_with_a_killed_process(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {child.pid} on"), run_lock(tmp_path):
            pytest.fail("two writers")
        child.send_signal(signal.SIGKILL)
    with run_lock(tmp_path):
        assert (tmp_path / NAME).exists()


def test_without_locks_one_line_says_so(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.warns(UserWarning, match="cannot be locked .*No locks available"),
        run_lock(tmp_path),
    ):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match="cannot be written"),
        run_lock(tmp_path / "file" / "run"),
    ):
        pytest.fail("inside a file")


def test_a_directory_that_is_renamed_or_replaced_is_not_the_locked_one(tmp_path):
    run = tmp_path / "run"
    assert not is_replaced(run)
    with run_lock(run):
        assert not is_replaced(run)
        assert moved_to(run) == run
        run.rename(tmp_path / "elsewhere")
        assert is_replaced(run)
        assert moved_to(run) == tmp_path / "elsewhere"
        run.mkdir()
        assert is_replaced(run)
        (run / NAME).touch()
        assert is_replaced(run)
    assert not is_replaced(run)
