"""Patterns over reference answers: the last match, and none that takes longer than its limit."""

import re
import time

import pytest

from jrl.data.answers import find_answer
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
    expected = (matches[-1].group(1) or "") if matches else None
    assert find_answer(pattern, text, "x") == expected


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(.*)*\1b", "(a*)*(a*)*b"])
def test_a_catastrophic_pattern_is_ended_and_named(pattern, monkeypatch):
    monkeypatch.setattr("jrl.data.answers.MOST_SECONDS", 0.5)
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"d\.jsonl, line 7: data\.answer_pattern = .*longer than"):
        find_answer(pattern, "a" * 50 + "!", "d.jsonl, line 7")
    assert time.monotonic() - begin < 5
