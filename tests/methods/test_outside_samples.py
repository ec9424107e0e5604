"""A-LoL and Critique-GRPO against loops from their papers, and what they reduce to."""

import numpy as np
import pytest
from harness import check, members_of, ragged, ratio, run, sequences

from jrl.methods.outside_samples import a_lol, critique_grpo

# ---------------------------------------------------------------- A-LoL


def alol_loss(kind, priority=True, c=0.6, beta=0.2, clip=0.5):
    def reference(d, frozen):
        kept, out = [], 0.0
        for n, i, ts in sequences(d):
            gain = d.rewards[n, i] - d.rollout_values[n, i, ts[0]]
            out += c * (d.values[n, i, ts[0]] - d.rewards[n, i]) ** 2
            gaps = [d.logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in ts]
            out += beta * sum(gaps)
            if gain > 0:
                kept.append((n, i, ts, gain))
        out /= max(len(sequences(d)), 1)
        share = sum(gain if priority else 1 for *_, gain in kept)
        for n, i, ts, gain in kept:
            weight = (gain if priority else 1) / share
            gaps = [frozen.logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in ts]
            if kind == "sequence":
                gaps = [sum(gaps)] * len(ts)
            rs = [1.0 if kind == "none" else np.exp(np.clip(g, -20, 20)) for g in gaps]
            for t, r in zip(ts, rs, strict=True):
                r = min(max(r, 1 - clip), 1 + clip)
                out -= weight * gain * r * d.logprobs[n, i, t]
        return out

    return reference


@pytest.mark.parametrize(
    ("kind", "priority"), [("sequence", True), ("token", False), ("none", True)]
)
def test_a_lol_is_the_papers(kind, priority):
    method = a_lol(ratio=kind, priority=priority, value_coef=0.6, kl_coef=0.2, clip=0.5)
    check(method, alol_loss(kind, priority), wrt=("logprobs", "values"))


def test_at_the_reference_all_three_ratios_have_one_gradient():
    d = ragged(1)
    d.logprobs = d.ref_logprobs.copy()
    found = [run(a_lol(ratio=kind), d)[1]["logprobs"] for kind in ("sequence", "token", "none")]
    assert np.abs(found[0]).max() > 1e-3
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-5)


def test_a_lol_trains_on_the_datas_completions_and_reads_no_reference_without_a_ratio():
    method = a_lol(ratio="none")
    assert (method.draw.demonstrations, method.draw.own) == (1, False)
    assert "ref_logprobs" not in method.objective.needs
    assert method.value


# ---------------------------------------------------------------- Critique-GRPO


def critique_loss(d, frozen, gamma=0.3, limit=7):
    out = 0.0
    for n, i, ts in sequences(d):
        a = d.rewards[n, i] - np.mean([d.rewards[n, j] for j in members_of(d, n)])
        for t in ts:
            p = np.exp(d.logprobs[n, i, t])
            w = p / (p + gamma) if d.external[n, i, t] else ratio(d, (n, i, t))
            out -= a * w / limit
    return out / max(len(sequences(d)), 1)


def test_critique_grpo_is_the_papers():
    method = critique_grpo(max_tokens=7, gamma=0.3, refinements=1)
    assert method.draw.demonstrations == 1
    check(method, critique_loss, demonstrations=1)


def test_without_refinements_it_is_dr_grpo_without_clipping():
    d = ragged(2)
    d.external[:] = 0
    value, gradients = run(critique_grpo(max_tokens=7), d)
    assert value == pytest.approx(critique_loss(d, d), rel=1e-5)
    del d.external  # a run without demonstrations has no such statistic
    again = run(critique_grpo(max_tokens=7), d)
    assert again[0] == value
    np.testing.assert_array_equal(again[1]["logprobs"], gradients["logprobs"])


def test_on_policy_critique_grpo_is_reinforce_against_the_groups_mean():
    d = ragged(3)
    d.logprobs = d.sampler_logprobs.copy()
    gradient = run(critique_grpo(max_tokens=7), d)[1]["logprobs"]
    for n, i, ts in sequences(d):
        a = d.rewards[n, i] - np.mean([d.rewards[n, j] for j in members_of(d, n)])
        expected = -a / 7 / len(sequences(d))
        np.testing.assert_allclose(gradient[n, i, ts], expected, atol=1e-6)
