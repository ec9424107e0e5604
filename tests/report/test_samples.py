"""Samples of a page: complete groups, evenly over the run."""

import collections
import itertools

from jrl.report import samples as report_samples
from jrl.report.samples import MAX_SAMPLES, spread, thin_samples


def group_of(step, group, size=8, **more):
    return [{"step": step, "group": group, "member": i, **more} for i in range(size)]


def test_fifty_thousand_samples_stay_whole_groups():
    samples = [s for step in range(1, 626) for g in range(10) for s in group_of(step, g)]
    assert len(samples) == 50_000
    samples_left = thin_samples(samples)
    assert MAX_SAMPLES - 8 <= len(samples_left) <= MAX_SAMPLES
    sizes = collections.Counter((s["step"], s["group"]) for s in samples_left)
    assert set(sizes.values()) == {8}
    steps = sorted({s["step"] for s in samples_left})
    assert (steps[0], steps[-1]) == (1, 625)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 5  # evenly


def test_groups_of_all_sizes_stay_whole_and_one_is_kept_however_large():
    samples = [s for step in range(400) for s in group_of(step, 0, size=2 + step % 30)]
    group_sizes = collections.Counter(s["step"] for s in thin_samples(samples, 500))
    assert sum(group_sizes.values()) <= 500
    assert len(group_sizes) > 20
    assert all(size == 2 + step % 30 for step, size in group_sizes.items())
    assert len(thin_samples(group_of(1, 0, size=50), 10)) == 50


def test_samples_that_say_no_group_are_grouped_by_their_prompt():
    rows = [("a", None), ("a", None), ("b", None), ("a", "eval")]
    samples = [{"step": 1, "prompt": p, **({"split": s} if s else {})} for p, s in rows]
    assert [s["group"] for s in thin_samples(samples)] == [0, 0, 1, 0]
    assert "group" not in samples[0]


def test_only_so_many_are_shown_token_by_token(monkeypatch):
    monkeypatch.setattr(report_samples, "MAX_TOKENS", 100)
    tokens = {"text": ["a"] * 5, "logprobs": [0.0] * 5, "advantages": 1.0}
    samples = [s for step in range(10) for s in group_of(step, 0, size=4, tokens=tokens)]
    samples_left = thin_samples(samples)
    assert len(samples_left) == 40
    heavy = {s["step"] for s in samples_left if "tokens" in s}
    assert heavy == {0, 2, 4, 7, 9}  # whole groups, from the first to the last
    assert sum("tokens" in s for s in samples_left) == 20
    assert all("tokens" in s for s in samples)  # those given are not changed


def test_spread_has_both_ends_and_no_index_twice():
    for total in (1, 2, 7, 100):
        for count in range(1, total + 1):
            indices = spread(total, count)
            assert len(set(indices)) == count
            assert indices[0] == 0
            assert count == 1 or indices[-1] == total - 1
