"""Patterns over reference answers: the last match, and none that takes longer than its limit."""

import re
import time

import pytest

from jrl.data.answers import AnswerFinder
from jrl.errors import UserError


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
    with AnswerFinder(pattern) as answers:
        assert answers.find(text, "x") == ((matches[-1].group(1) or "") if matches else None)


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(.*)*\1b", "(a*)*(a*)*b"])
def test_a_catastrophic_pattern_is_ended_and_named(pattern, monkeypatch):
    monkeypatch.setattr("jrl.data.answers.MOST_SECONDS", 0.5)
    begin = time.monotonic()
    with AnswerFinder(pattern) as answers:
        with pytest.raises(
            UserError, match=r"d\.jsonl, line 7: data\.answer_pattern = .*longer than"
        ):
            answers.find("a" * 50 + "!", "d.jsonl, line 7")
        process = answers._process
    assert time.monotonic() - begin < 5
    assert process.poll() is not None


def test_without_a_pattern_nothing_is_started():
    with AnswerFinder(None) as answers:
        assert answers.find("all of it", "x") == "all of it"
        assert answers._process is None
