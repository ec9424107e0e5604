"""The methods of asynchronous.py against loops written from their papers, and their identities."""

import numpy as np
import pytest
from harness import check, members_of, ragged, run, sequences

from jrl.methods import get_method


def advantages(d, n, i, scaled):
    group = [d.rewards[n, j] for j in members_of(d, n)]
    if len(group) < 2 or np.ptp(group) == 0:
        return 0.0
    deviation = np.std(group, ddof=1) + 1e-6 if scaled else 1.0
    return (d.rewards[n, i] - np.mean(group)) / deviation


def over_tokens(d, scaled, of_token):
    rows = [((n, i, t), n, i) for n, i, tokens in sequences(d) for t in tokens]
    total = sum(of_token(at, advantages(d, n, i, scaled)) for at, n, i in rows)
    return total / max(len(rows), 1)


def decoupled_loss(d, frozen, cap=np.inf, low=0.2, high=0.2):
    """Behaviour, proximal and current policy, each in its place."""

    def of_token(at, a):
        weight = np.exp(d.proximal_logprobs[at] - d.sampler_logprobs[at])
        u = np.exp(d.logprobs[at] - d.proximal_logprobs[at])
        kept = weight if weight <= cap else 0.0
        return -kept * min(u * a, np.clip(u, 1 - low, 1 + high) * a)

    return over_tokens(d, True, of_token)


def aipo_loss(d, frozen, cap=4.0):
    def of_token(at, a):
        weight = min(np.exp(frozen.logprobs[at] - d.sampler_logprobs[at]), cap)
        return -weight * a * d.logprobs[at]

    return over_tokens(d, False, of_token)


CASES = {
    "decoupled_ppo": (decoupled_loss, {}),
    "decoupled_ppo capped": (lambda d, f: decoupled_loss(d, f, 1.2), {"weight_cap": 1.2}),
    "aipo": (aipo_loss, {}),
    "aipo at a low bound": (lambda d, f: aipo_loss(d, f, 1.1), {"max_weight": 1.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_paper(case):
    reference, coefficients = CASES[case]
    check(get_method(case.partition(" ")[0], **coefficients), reference)


def test_with_the_sampler_as_proximal_policy_nothing_is_decoupled():
    d = ragged(4)
    d.proximal_logprobs = d.sampler_logprobs
    dapo = get_method("dapo", max_tokens=9, overlong_scale=0.0, clip_high=0.2)
    loss, slopes = run(get_method("decoupled_ppo"), d)
    clipped, clipped_slopes = run(dapo, d)
    np.testing.assert_allclose(loss, clipped, rtol=1e-5)
    np.testing.assert_allclose(slopes["logprobs"], clipped_slopes["logprobs"], rtol=1e-5, atol=1e-7)


def test_a_stale_token_may_move_as_far_as_a_fresh_one():
    """A token that went far already has no gradient in PPO's clip; decoupled it has."""
    d = ragged(3)
    d.proximal_logprobs = d.logprobs.copy()
    for n, i, tokens in sequences(d):
        for t in tokens:
            gone = 0.5 * np.sign(advantages(d, n, i, False))
            d.sampler_logprobs[n, i, t] = d.logprobs[n, i, t] - gone
    assert not np.any(run(get_method("grpo"), d)[1]["logprobs"])
    assert np.any(run(get_method("decoupled_ppo"), d)[1]["logprobs"])
