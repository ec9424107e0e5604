"""The methods of policy_gradient.py against loops written from their papers."""

import numpy as np
import pytest
from harness import (
    advantages_of,
    assert_matches,
    assert_reinforce_on_policy,
    check,
    clipped_loss,
    full,
    members_of,
    ragged,
    ratio,
    run,
    sequences,
    sum_of_scores,
    tokens_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.methods import get_method

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))


few = settings(max_examples=5, deadline=None, derandomize=True)


def reinforce_loss(d, frozen):
    total = sum(-d.rewards[n, i] * d.logprobs[n, i, t] for n, i, ts in sequences(d) for t in ts)
    return total / max(len(sequences(d)), 1)


def reinforce_batch_loss(d, frozen):
    live = [d.rewards[n, i] for n, i in np.ndindex(d.rewards.shape) if d.members[n, i]]
    b = sum(live) / max(len(live), 1)
    total = sum(
        -(d.rewards[n, i] - b) * d.logprobs[n, i, t] for n, i, ts in sequences(d) for t in ts
    )
    return total / max(len(sequences(d)), 1)


def remax_loss(d, frozen):
    total = 0.0
    for n, i, tokens in sequences(d):
        total -= (d.rewards[n, i] - d.rewards[n, 0]) * sum(d.logprobs[n, i, t] for t in tokens)
    return total / max(len(sequences(d)), 1)


def rloo_loss(d, frozen, beta=0.1):
    returns = d.rewards.copy()
    for n, i in np.ndindex(returns.shape):
        for t in tokens_of(d, n, i):
            returns[n, i] -= beta * (d.sampler_logprobs[n, i, t] - d.ref_logprobs[n, i, t])
    total = 0.0
    for n, i, tokens in sequences(d):
        others = [returns[n, j] for j in members_of(d, n) if j != i]
        a = returns[n, i] - sum(others) / len(others) if others else 0.0
        total -= a * sum(d.logprobs[n, i, t] for t in tokens)
    return total / max(len(sequences(d)), 1)


def reinforce_plus_plus_loss(d, frozen, beta=0.1):
    to_go = {}
    for n, i, tokens in sequences(d):
        for t in tokens:
            later = [s for s in tokens if s >= t]
            gaps = [d.sampler_logprobs[n, i, s] - d.ref_logprobs[n, i, s] for s in later]
            to_go[n, i, t] = d.rewards[n, i] - beta * sum(gaps)
    if not to_go:
        return 0.0
    mean = sum(to_go.values()) / len(to_go)
    variance = sum((a - mean) ** 2 for a in to_go.values()) / len(to_go)
    total = 0.0
    for at, a in to_go.items():
        total += clipped_loss(ratio(d, at), (a - mean) / (variance + 1e-8) ** 0.5)
    return total / len(to_go)


def maxrl_loss(d, frozen):
    def advantage(n, i, t):
        mean = np.mean([d.rewards[n, j] for j in members_of(d, n)])
        return (d.rewards[n, i] - mean) / mean if mean > 0 else 0.0

    return sum_of_scores(d, advantage, "sequences")


CASES = {
    "reinforce": (reinforce_loss, "reinforce", {}, {}),
    "reinforce with a baseline": (reinforce_batch_loss, "reinforce", {"baseline": "batch"}, {}),
    "remax": (remax_loss, "remax", {}, {"baseline": True}),
    "rloo": (rloo_loss, "rloo", {"kl_coef": 0.1}, {}),
    "reinforce_plus_plus": (reinforce_plus_plus_loss, "reinforce_plus_plus", {"kl_coef": 0.1}, {}),
    "maxrl": (maxrl_loss, "maxrl", {}, {"binary": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_paper(case):
    reference, name, coefficients, more = CASES[case]
    check(get_method(name, **coefficients), reference, **more)


@few
@given(shape=shapes, seed=st.integers(0, 10**6), case=st.sampled_from([*CASES][:5]))
def test_any_shape_equals_the_paper(shape, seed, case):
    reference, name, coefficients, more = CASES[case]
    assert_matches(get_method(name, **coefficients), reference, ragged(seed, *shape, **more))


# ---------------------------------------------------------------- identities


def test_maxrl_is_the_mean_score_of_the_right_completions_less_that_of_all():
    d = full(4)
    d.rewards = np.array([[1.0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    _, gradients = run(get_method("maxrl"), d)
    for n in range(3):
        right = d.rewards[n] > 0
        for i in range(4):
            weight = (right[i] / right.sum() if right.any() else 0) - right.any() / 4
            np.testing.assert_allclose(gradients["logprobs"][n, i], -weight / 3, atol=1e-6)


def test_equal_rewards_give_no_gradient():
    d = ragged(5)
    d.rewards[:] = 0.7
    _, gradients = run(get_method("maxrl"), d)
    assert not gradients["logprobs"].any()


def test_on_policy_gradient_is_reinforce_with_the_same_advantages():
    d = ragged(3)
    d.logprobs = d.sampler_logprobs
    assert_reinforce_on_policy(get_method("reinforce_plus_plus"), d)


def test_rloo_is_the_group_mean_baseline_times_g_over_g_less_one():
    d = ragged(9)
    ours = advantages_of(get_method("rloo"), d)
    centred = advantages_of(get_method("dr_grpo", max_tokens=5), d)
    size = d.members.sum(axis=1)[:, None, None]
    np.testing.assert_allclose(ours, centred * size / np.maximum(size - 1, 1), atol=1e-6)
