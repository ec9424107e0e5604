"""Strengths of preferences and the consistency of reward models, against loops."""

import numpy as np
import pytest

from jrl.zoo.tools.reward_checks import contrast_consistency, flipped, strengths, with_strengths


def test_strengths_are_means_over_models():
    points = np.random.default_rng(0).normal(size=(3, 4, 2))
    ours = strengths(points)
    for i in range(4):
        gaps = [points[m, i, 0] - points[m, i, 1] for m in range(3)]
        mu = sum(gaps) / 3
        assert ours.mean[i] == pytest.approx(mu)
        assert ours.deviation[i] == pytest.approx((sum((g - mu) ** 2 for g in gaps) / 3) ** 0.5)


def test_rows_hold_the_mean_scores_of_the_models():
    def by(factor):
        def model(samples):
            points = [factor * len(s.completion) + len(s.prompt.question) for s in samples]
            return [None if s.completion == "?" else p for s, p in zip(samples, points)], {}  # noqa: B905

        return model

    rows = [
        {"prompt": "why", "chosen": "because", "rejected": "so"},
        {"prompt": "how", "chosen": "?", "rejected": "thus"},
    ]
    (row,) = with_strengths(rows, [by(1.0), by(3.0)])
    assert row["responses"] == ["because", "so"]
    assert row["scores"] == [2 * 7 + 3, 2 * 2 + 3]
    assert row["strength"] == pytest.approx(2 * 5)
    assert row["deviation"] == pytest.approx(5)


def test_labels_of_the_weakest_preferences_are_flipped():
    rng = np.random.default_rng(2)
    rows = [{"prompt": "p", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(10)]
    points = {row[side]: rng.normal() for row in rows for side in ("chosen", "rejected")}
    points["c3"] = None
    models = [lambda s, k=k: ([w if (w := points[x.completion]) is None else k * w for x in s], {})
              for k in (1.0, 3.0)]  # fmt: skip
    gaps = {i: 2 * (points[f"c{i}"] - points[f"r{i}"]) for i in range(10) if i != 3}
    weakest = sorted(gaps, key=gaps.get)[:2]
    for i, row in enumerate(flipped(rows, models, share=0.25)):  # a quarter of nine is two
        sides = ("rejected", "chosen") if i in weakest else ("chosen", "rejected")
        assert (row["chosen"], row["rejected"]) == (rows[i][sides[0]], rows[i][sides[1]])
    assert flipped(rows, models, share=0.0) == rows


def test_consistency_counts_both_instructions():
    points = np.random.default_rng(1).normal(size=(6, 2, 2))
    response, instruction = 0, 0
    for n in range(6):
        for a, b in ((0, 1), (1, 0)):
            response += points[n, a, a] > points[n, a, b]
            instruction += points[n, a, a] > points[n, b, a]
    ours = contrast_consistency(points)
    assert ours == pytest.approx((response / 12, instruction / 12))
    assert ours.response != ours.instruction
