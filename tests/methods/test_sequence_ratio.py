"""LUSPO against a float64 loop from its paper, and against GSPO."""

import numpy as np
import pytest
from harness import check, members_of, ragged, run, sequences

from jrl.methods import get_method
from jrl.objectives import aggregates

WIDE = {"clip_low": 0.1, "clip_high": 0.2}
LUSPO = get_method("luspo", **WIDE)


def normalised(d, n, i):
    group = [d.rewards[n, j] for j in members_of(d, n)]
    if len(group) < 2:
        return 0.0
    mean = sum(group) / len(group)
    std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
    return (d.rewards[n, i] - mean) / (std + 1e-6)


def luspo_loss(d, frozen):
    total = 0.0
    for n, i, tokens in sequences(d):
        a = normalised(d, n, i)
        gaps = [d.logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens]
        s = np.exp(np.clip(sum(gaps) / len(gaps), -20, 20))
        total -= len(tokens) * min(s * a, np.clip(s, 0.9, 1.2) * a)
    return total / max(len(sequences(d)), 1)


def test_luspo_is_the_papers():
    check(LUSPO, luspo_loss)


def test_luspo_is_gspo_with_every_loss_times_the_length():
    gspo = LUSPO._replace(objective=LUSPO.objective._replace(aggregate=aggregates.sequence_mean))
    d = ragged(1, spread=0.05)
    d.mask[:] = np.arange(5) < 4
    d.live = d.mask & d.members[..., None]
    (long, long_slope), (mean, mean_slope) = run(LUSPO, d), run(gspo, d)
    assert long == pytest.approx(4 * mean, rel=1e-5)
    np.testing.assert_allclose(long_slope["logprobs"], 4 * mean_slope["logprobs"], atol=1e-6)
    assert np.abs(mean_slope["logprobs"]).max() > 1e-3


def test_luspo_on_policy_is_reinforce_on_whole_completions():
    d = ragged(1)
    d.logprobs = d.sampler_logprobs.copy()
    _, slope = run(LUSPO, d)
    expected = np.zeros_like(d.logprobs)
    for n, i, tokens in sequences(d):
        expected[n, i, tokens] = -normalised(d, n, i) / len(sequences(d))
    np.testing.assert_allclose(slope["logprobs"], expected, atol=1e-6)
