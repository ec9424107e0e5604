"""ConvexDA and RewardFusion against the authors' procedure in loops."""

import numpy as np
import pytest

from jrl.rewards.base import Sample
from jrl.types import Prompt
from jrl.zoo.tools.reward_consistency import convex_da, hull_vertices, reward_fusion


def encode(texts):
    return np.array([[t.count(c) + 0.1 * len(t) for c in "abcde"] for t in texts], float)


def in_hull(point, corners):
    """Whether a point of the plane is a mean of corners, by the half-planes of their edges."""
    centre = corners.mean(axis=0)
    for a in corners:
        for b in corners:
            edge, normal = b - a, np.array([a[1] - b[1], b[0] - a[0]])
            sides = [normal @ (c - a) for c in corners]
            if np.linalg.norm(edge) > 1e-9 and min(sides) >= -1e-9 and normal @ (point - a) < -1e-9:
                return False
    return np.isfinite(centre).all()


def test_corners_span_all_points_and_none_is_within_the_others():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(size=(12, 2)), np.zeros((12, 3))], axis=1)
    corners = hull_vertices(points)
    flat = points[:, :2]
    assert 3 <= len(corners) < 12
    assert all(in_hull(point, flat[corners]) for point in flat)
    for corner in corners:
        assert not in_hull(flat[corner], flat[[c for c in corners if c != corner]])


def test_convex_da_keeps_the_copies_at_the_corners():
    copies = {"good": ["a", "b", "ab", "aabb", "ab"], "line": ["c", "cc", "ccc"]}
    rows = [{"prompt": "p", "chosen": c, "rejected": "bad"} for c in copies]
    out = convex_da(rows, lambda text, n: copies[text][:n], encode)
    corners = {
        text: [copies[text].index(t) for t in dict.fromkeys(copies[text])] for text in copies
    }
    expected = []
    for row in rows:
        texts = [copies[row["chosen"]][i] for i in corners[row["chosen"]]]
        expected += [{**row, "chosen": texts[i]} for i in hull_vertices(encode(texts))]
    assert out == expected
    assert [row["chosen"] for row in out if row["chosen"].startswith("c")] == ["c", "ccc"]
    assert {"prompt": "p", "chosen": "ab", "rejected": "bad"} not in out


def sample(question, completion):
    nothing = np.zeros(0, np.int32)
    return Sample(Prompt(0, "", nothing, "", question=question), completion, nothing, "")


def test_points_are_fused_with_those_of_like_examples():
    examples = [sample("q", text) for text in ("aaa", "aab", "ddd", "eee", "abc")]
    points_of = {
        "aaa": 1.0,
        "aab": 2.0,
        "ddd": -5.0,
        "eee": None,
        "abc": 4.0,
        "aaaa": 0.5,
        "x": None,
    }

    def model(samples):
        return [points_of[s.completion] for s in samples], {"seen": float(len(samples))}

    fused = reward_fusion(model, encode, examples, neighbours=2, least=0.9)
    points, counts = fused([sample("q", "aaaa"), sample("q", "x"), sample("q", "ddd")])
    texts = encode([f"q\n\n{t}" for t in ("aaaa", "aaa", "aab", "ddd", "abc")])
    unit = texts / np.linalg.norm(texts, axis=1, keepdims=True)
    alike = sorted(
        ((unit[0] @ u, points_of[t]) for u, t in zip(unit[1:], ("aaa", "aab", "ddd", "abc"))),  # noqa: B905
        reverse=True,
    )[:2]
    near = [(s, r) for s, r in alike if s >= 0.9]
    assert len(near) == 2
    expected = (0.5 + sum(s * r for s, r in near)) / (1 + sum(s for s, _ in near))
    assert points[0] == pytest.approx(expected)
    assert points[1] is None
    assert counts == {"seen": 3.0}
    alone = reward_fusion(model, encode, examples, least=1.1)
    assert alone([sample("q", "aaaa")])[0] == [0.5]
