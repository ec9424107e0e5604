"""Observe-R1 against a float64 loop from its paper."""

import numpy as np
import pytest
from harness import check, members_of, ragged, ratio, run, sequences

from jrl.methods import get_method

OBSERVE = get_method("observe_r1", min_tokens=2)


def observe_loss(d, frozen, c=1.8, bonus=0.2, shortest_above=2):
    total = 0.0
    for n, i, tokens in sequences(d):
        live = members_of(d, n)
        right = [j for j in live if d.rewards[n, j] > 0.5]
        r = {j: d.rewards[n, j] for j in live}
        least = min((d.lengths[n, j] for j in right), default=0)
        for j in right:
            r[j] += bonus * (d.lengths[n, j] == least > shortest_above)
        p, mean = len(right) / len(live), sum(r.values()) / len(live)
        std = (sum((x - mean) ** 2 for x in r.values()) / max(len(live) - 1, 1)) ** 0.5
        a = 4 * c * p * (1 - p) * (r[i] - mean) / (std + 1e-9) if len(live) > 1 else 0.0
        clipped = [np.clip(ratio(d, (n, i, t)), 0.8, 1.2) for t in tokens]
        gains = [min(ratio(d, (n, i, t)) * a, k * a) for t, k in zip(tokens, clipped, strict=True)]
        total -= sum(gains) / len(tokens)
    return total / max(len(sequences(d)), 1)


def test_observe_r1_is_the_papers():
    check(OBSERVE, observe_loss, binary=True, g=6)


def test_half_right_without_a_bonus_is_grpo():
    d = ragged(1, binary=True)
    d.members[:] = True
    d.rewards[:] = [[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]]
    d.live = d.mask & d.members[..., None]
    plain = get_method("observe_r1", scale=1.0, bonus=0.0)
    ours, theirs = run(plain, d), run(get_method("grpo", eps=1e-9), d)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"], atol=1e-7)


def test_uniform_groups_have_no_gradient():
    d = ragged(1, binary=True)
    d.rewards[0], d.rewards[1] = 1.0, 0.0
    _, slope = run(OBSERVE, d)
    assert not slope["logprobs"][:2].any()
