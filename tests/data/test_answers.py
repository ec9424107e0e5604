"""Patterns over reference answers: the last match, and none that takes longer than its limit."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jrl.data.answers import find_answer
from jrl.data.datasets import MemoryRows
from jrl.data.invalid import SlowPattern, read_rows
from jrl.errors import UserError
from jrl.system.time_limit import time_limit


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"####\s*(.+)", "a\n#### 1\n#### 2,000 \u00e9"),
        (r"(\d+)|x", "1 2 x"),
        (r"(\d+)", "none"),
        (r"(a)", "a" * 100_000),
        ("", "a"),
    ],
)
def test_the_last_match_as_re_finds_it(pattern, text):
    pattern = pattern or "()"
    matches = list(re.finditer(pattern, text))
    expected = (matches[-1].group(1) or "") if matches else None
    assert find_answer(pattern, text, "x") == expected


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(.*)*\1b", "(a*)*(a*)*b"])
def test_a_catastrophic_pattern_is_ended_and_named(pattern, monkeypatch):
    monkeypatch.setattr("jrl.data.answers.MOST_SECONDS", 0.5)
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"d\.jsonl, line 7: data\.answer_pattern = .*longer than"):
        find_answer(pattern, "a" * 50 + "!", "d.jsonl, line 7")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("pattern", [r"(?:(a+))+b", r"(a*)a*a*a*a*a*a*a*a*b", r"(?x) (a|a) *b"])
def test_a_thread_has_the_limit_too(pattern, monkeypatch):
    monkeypatch.setattr("jrl.data.answers.MOST_SECONDS", 0.3)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(find_answer, pattern, "\ud800aab aab", "x").result() == (
            find_answer(pattern, "\ud800aab aab", "x")
        )
        assert pool.submit(find_answer, pattern, "none", "x").result() is None
        slow = pool.submit(find_answer, pattern, "a" * 60 + "!", "d.jsonl, line 7")
        with pytest.raises(SlowPattern, match=r"d\.jsonl, line 7: data\.answer_pattern = .*longer"):
            slow.result()


def test_after_a_slow_row_no_other_is_tried():
    def read(index, row, where):
        tried.append(index)
        raise SlowPattern(f"{where}: slow")

    rows = MemoryRows([{}, {}, {}], "r.jsonl")
    for invalid, count in (("error", 1), ("skip", 3)):
        tried = []
        with pytest.raises(UserError, match="slow"):
            read_rows(rows, read, invalid=invalid)
        assert len(tried) == count


def test_a_handler_that_c_installed_is_no_error_afterwards(monkeypatch):
    install, installed = signal.signal, []

    def unknown(number, handler):
        installed.append(handler)
        install(number, handler)  # and None for what was there

    monkeypatch.setattr(signal, "signal", unknown)
    with time_limit(9.0, KeyError, processor=True):
        pass
    assert installed[-1] == signal.SIG_DFL == signal.getsignal(signal.SIGVTALRM)
