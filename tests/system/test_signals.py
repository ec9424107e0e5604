"""Signals: what each phase of a run lets them interrupt, and that all of it is bounded."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from jrl.errors import INTERRUPTED
from jrl.system import signals
from jrl.system.signals import SIGNALS, Stopping


@pytest.fixture(autouse=True)
def restored():
    before = [signal.getsignal(s) for s in SIGNALS]
    yield
    assert [signal.getsignal(s) for s in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_interrupts_nothing_by_itself(number):
    with Stopping() as stopping:
        assert not stopping.is_set()
        signal.raise_signal(number)
        assert stopping.is_set()
        signal.raise_signal(signal.SIGTERM)  # again changes nothing
        assert not stopping.gave_up


@pytest.mark.parametrize("number", SIGNALS)
def test_where_nothing_is_to_be_saved_it_interrupts_at_once(number):
    with Stopping() as stopping, pytest.raises(KeyboardInterrupt), stopping.at_once():
        signal.raise_signal(number)


def ends(script, seconds=60):
    """The exit code of a process that sends itself signals, and what it said."""
    lines = (
        f"import hashlib, signal, time\nfrom jrl.system import signals\n{textwrap.dedent(script)}"
    )
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, timeout=seconds
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_has_nothing_to_save_ends_whatever_it_is_in(number):
    """Also in the callback of a garbage collection, where what a handler raises would be lost."""
    code, stderr = ends(f"""
        class Trap:
            def __del__(self):
                signal.raise_signal({int(number)})
                time.sleep(60)

        with signals.end_at_once(lambda: "stopped here"):
            trap = Trap()
            del trap
            time.sleep(60)
    """)
    assert (code, stderr) == (INTERRUPTED, "jrl: stopped here\n")


LONG = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**8)"
"""A call of half a minute that, like a compiler, lets other threads run and no handler."""


@pytest.mark.parametrize("loses_work", [False, True])
def test_a_compiler_is_left_where_nothing_is_lost(loses_work):
    """A compiler of a second and a half, or half a minute."""
    start = time.monotonic()
    code, stderr = ends(f"""
        import os, threading
        with signals.end_at_once(), signals.Stopping() as stopping:
            stopping.at_rest = lambda: not {loses_work}
            stopping.saved = lambda: "step 3 is saved"
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
            {LONG.replace("10**8", "5 * 10**6") if loses_work else LONG}
            raise SystemExit(5)
    """)
    saved = (INTERRUPTED, "jrl: stopped while compiling; step 3 is saved\n")
    assert (code, stderr) == ((5, "") if loses_work else saved)
    assert time.monotonic() - start < 20


def test_a_signal_is_heard_while_the_main_thread_is_in_a_compiler():
    code, stderr = ends(f"""
        import os, threading
        with signals.end_at_once():
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
            {LONG}
            print("went on")
    """)
    assert (code, stderr) == (INTERRUPTED, "jrl: stopped\n")
    code, stderr = ends(f"""
        import os, threading
        signals.END_SECONDS = 0.5
        with signals.Stopping() as stopping:
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
            {LONG}
            print("went on")
    """)
    assert code == INTERRUPTED
    assert stderr == "jrl: still not stopped 0 s after SIGINT; ended without saving\n"


def test_what_was_lost_in_a_callback_is_raised_again():
    def forgetful():
        for _ in range(2):
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGHUP)
        time.sleep(60)

    with Stopping() as stopping, pytest.raises(KeyboardInterrupt), stopping.at_once():
        forgetful()


def test_what_a_callback_lost_is_not_printed(monkeypatch):
    """As one that runs while Python collects garbage, which may raise nothing."""

    class Loses:
        error = KeyboardInterrupt

        def __del__(self):
            raise self.error

    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: lost.append(event.exc_type))
    usual = sys.unraisablehook
    with Stopping() as stopping:
        with stopping.at_once():
            Loses()
            assert not lost
            Loses.error = ValueError
            Loses()
        Loses.error = KeyboardInterrupt
        Loses()  # nothing would raise it again
    assert lost == [ValueError, KeyboardInterrupt]
    assert sys.unraisablehook is usual


def converted(phase):
    """As NumPy does with what interrupts its import."""
    with phase:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ImportError("no numpy") from None


def test_an_import_that_hides_the_interrupt_is_one_nevertheless():
    with Stopping() as stopping, pytest.raises(KeyboardInterrupt):
        converted(stopping.at_once())


def test_one_that_came_before_ends_the_next_phase_that_may_end():
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt), stopping.at_once():
            pytest.fail("still here")


def test_a_wait_is_given_up_after_its_time_even_when_code_of_users_catches(monkeypatch):
    monkeypatch.setattr(signals, "STEP_SECONDS", 0.2)
    start = time.monotonic()
    with Stopping() as stopping:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()

        def stubborn():
            with stopping.interruptible():
                try:
                    time.sleep(60)
                except KeyboardInterrupt:
                    time.sleep(60)

        with pytest.raises(KeyboardInterrupt):
            stubborn()
        assert stopping.gave_up
    assert 0.3 <= time.monotonic() - start < 10


def until_given_up(stopping):
    """A save, say, that goes on until the time of a step is over."""
    end = time.monotonic() + 60
    while not stopping.gave_up:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_may_not_be_interrupted_is_not(monkeypatch):
    monkeypatch.setattr(signals, "STEP_SECONDS", 0.05)
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGTERM)
        until_given_up(stopping)
        with pytest.raises(KeyboardInterrupt), stopping.interruptible():
            pytest.fail("the next wait begins although the time is over")


def test_a_patient_one_waits(monkeypatch):
    monkeypatch.setattr(signals, "STEP_SECONDS", 0.05)
    with Stopping(patient=True) as stopping, stopping.interruptible():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert not stopping.gave_up


def test_a_second_ctrl_c_interrupts_anything_and_is_not_giving_up(monkeypatch):
    monkeypatch.setattr(signals, "STEP_SECONDS", 0.05)
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGINT)
        until_given_up(stopping)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not stopping.gave_up


def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping() as stopping:
            signal.raise_signal(signal.SIGHUP)
            assert not stopping.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_that_hears_nothing_is_ended():
    code, stderr = ends("""
        signals.END_SECONDS = 0.3
        with signals.Stopping():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(60)
    """)
    assert code == INTERRUPTED
    assert stderr == "jrl: still not stopped 0 s after SIGTERM; ended without saving\n"


def test_threads_listen_to_nothing():
    states = []

    def listen():
        with Stopping() as stopping:
            states.append(stopping.is_set())

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert states == [False]
