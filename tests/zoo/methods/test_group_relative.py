"""Relatives of GRPO with other advantages and rewards, against loops from their papers."""

import math
from functools import partial

import numpy as np
import pytest
from harness import (
    advantages_of,
    assert_matches,
    check,
    clipped_loss,
    members_of,
    numbers,
    ragged,
    ratio,
    rewritten,
    sequences,
    standard_score,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.errors import UserError
from jrl.methods import get_method
from jrl.objectives import (
    aggregates,
)

# ---------------------------------------------------------------- references


def token_mean_loss(d, high=0.2, kl_coef=0.0, entropy_coef=0.0):
    a, total, count = standard_score(d), 0.0, 0
    for n, i, tokens in sequences(d):
        for t in tokens:
            total += clipped_loss(ratio(d, (n, i, t)), a[n, i], high=high)
            delta = d.ref_logprobs[n, i, t] - d.logprobs[n, i, t]
            total += kl_coef * (np.exp(delta) - delta - 1) - entropy_coef * d.entropy[n, i, t]
            count += 1
    return total / max(count, 1)


def bnpo_loss(d, frozen):
    p = {n: np.mean([d.rewards[n, i] for i in members_of(d, n)]) for n in range(len(d.rewards))}
    p = {n: mean for n, mean in p.items() if members_of(d, n)}
    means = list(p.values())
    mean, variance = np.mean(means), np.var(means, ddof=1) if len(means) > 1 else 0.0
    alpha = beta = 1.0
    if variance > 0:
        both = min(mean * (1 - mean) / variance - 1, 300)
        alpha, beta = 1 + mean * both / 3, 1 + (1 - mean) * both / 3
    log_b = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    total, count = 0.0, 0
    for n, i, tokens in sequences(d):
        q = min(max(p[n], 1e-6), 1 - 1e-6)
        density = np.exp((alpha - 1) * np.log(q) + (beta - 1) * np.log(1 - q) - log_b)
        a = (d.rewards[n, i] - p[n]) / np.clip(density, np.exp(-20), np.exp(20))
        total += sum(clipped_loss(ratio(d, (n, i, t)), a) for t in tokens)
        count += len(tokens)
    return total / max(count, 1)


def two_parts(d, rng):
    """Two reward parts, of weight 1 each; one of them the same for a whole group."""
    parts = numbers(rng, *d.rewards.shape, 2)
    parts[0, :, 1] = parts[0, 0, 1]
    d.rewards = parts


def gdpo_loss(d, frozen):
    score = sum(standard_score(d, d.rewards[..., k]) for k in range(d.rewards.shape[2]))
    live = [score[at] for at in zip(*np.nonzero(d.members), strict=True)]
    mean = np.mean(live)
    deviation = np.sqrt(np.sum((live - mean) ** 2) / max(len(live) - 1, 1) + 1e-8)
    total = 0.0
    for n, i, tokens in sequences(d):
        a = (score[n, i] - mean) / deviation
        losses = [clipped_loss(ratio(d, (n, i, t)), a) for t in tokens]
        total += sum(losses) / len(tokens)
    return total / max(len(sequences(d)), 1)


def zeros_and_ones(d, rng):
    d.rewards = (rng.random(d.rewards.shape) < [[0.3], [0.6], [0.5]][: len(d.rewards)]) * 1.0


CASES = {
    "bnpo": (bnpo_loss, "bnpo", {}),
    "gdpo": (gdpo_loss, "gdpo", {}),
    "zerosearch": (lambda d, frozen: token_mean_loss(d, kl_coef=0.001), "zerosearch", {}),
    "doctoragent_rl": (
        lambda d, frozen: token_mean_loss(d, high=0.28, entropy_coef=0.1),
        "doctoragent_rl",
        {"entropy_coef": 0.1},
    ),
}


# ---------------------------------------------------------------- identities


def test_bnpo_with_group_normalisation_is_token_mean_grpo(
    make_ragged, make_batch, loss_and_gradients
):
    d = make_ragged(7)
    grpo = get_method("grpo").with_(aggregate=aggregates.token_mean)
    one, _ = loss_and_gradients(get_method("bnpo", normalise="group"), make_batch(d), d)
    two, _ = loss_and_gradients(grpo, make_batch(d), d)
    assert one == pytest.approx(two, abs=1e-6)


def test_where_the_groups_means_do_not_vary_bnpo_has_the_advantage_of_dr_grpo(make_ragged):
    d = make_ragged(7)
    d.members[:] = True
    d.rewards = np.array([[1.0, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]])
    advantages = [
        advantages_of(get_method(name, **more), d)
        for name, more in (("bnpo", {}), ("dr_grpo", {"max_tokens": 5}))
    ]
    assert np.abs(advantages[0]).max() == pytest.approx(0.5)
    np.testing.assert_allclose(*advantages, atol=1e-6)


def test_with_one_reward_part_gdpo_is_grpo_normalised_over_the_batch(make_ragged):
    d = make_ragged(8)
    ours = advantages_of(get_method("gdpo"), d)
    plain = advantages_of(get_method("grpo"), d)
    rows = d.members[..., None] & d.live
    scale = ours[rows] / np.where(plain[rows] == 0, 1, plain[rows])
    some = plain[rows] != 0
    # Over the batch the mean is 0 already, so that only one scale is left.
    assert some.any()
    np.testing.assert_allclose(scale[some], scale[some][0], rtol=1e-4)


# ---------------------------------------------------------------- rewards of agents


def test_car_pays_for_being_right_and_for_knowing_it():
    quadratic, edit = (partial(rewritten, get_method("car", separation=m)) for m in (0.0, 1.0))
    parts = np.array([[[1, 1.0], [1, 0.5], [0, 0.0], [0, 1.0], [np.nan, 1.0]]], np.float32)
    np.testing.assert_allclose(quadratic(parts)[0, :, 0], [1.0, 0.75, 0.0, -1.0, np.nan])
    paid = edit(parts)
    np.testing.assert_allclose(paid[0, :, 0], [2.0, 1.75, 0.0, -1.0, np.nan])
    assert not paid[..., 1].any()
    # The expected reward of an answer that is right with chance q is greatest at p = q.
    p = np.linspace(0, 1, 101)
    right, wrong = (np.stack([0 * p + c, p], -1)[None] for c in (1.0, 0.0))
    for q in (0.2, 0.7):
        expected = q * edit(right)[0, :, 0] + (1 - q) * edit(wrong)[0, :, 0]
        assert p[np.argmax(expected)] == pytest.approx(q)
    # The ranges of right and wrong answers are apart; without a separation they touch.
    for method, gap in ((edit, 1.0), (quadratic, 0.0)):
        lowest, highest = method(right)[0, :, 0].min(), method(wrong)[0, :, 0].max()
        assert lowest - highest == pytest.approx(gap)
    default = rewritten(get_method("car"), parts)
    np.testing.assert_array_equal(default, paid)


def test_tool_star_pays_in_order():
    parts = [[0, 1, 1], [1, 0, 1], [1, 0.5, 0], [1, 0.5, 1], [1, 1, 1], [1, np.nan, 0]]
    paid = rewritten(get_method("tool_star"), np.array([parts], np.float32))[0]
    np.testing.assert_allclose(paid[:, 0], [-1, 0, 0.5, 0.6, 1.1, np.nan], rtol=1e-6)
    assert not paid[:, 1:].any()


@pytest.mark.parametrize(("name", "parts"), [("car", 1), ("tool_star", 2)])
def test_methods_of_several_reward_parts_name_what_is_missing(name, parts):
    with pytest.raises(UserError, match=rf"{name} with {parts} reward parts; give [23]: "):
        rewritten(get_method(name), np.zeros((1, 1, parts), np.float32))


PREPARE = {"gdpo": two_parts, "bnpo": zeros_and_ones}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_paper(case):
    reference, name, coefficients = CASES[case]
    check(get_method(name, **coefficients), reference, prepare=PREPARE.get(name))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6)),
    seed=st.integers(0, 10**6),
    case=st.sampled_from(sorted(CASES)),
)
def test_any_shape_equals_the_paper(shape, seed, case):
    reference, name, coefficients = CASES[case]
    d = ragged(seed, *shape)
    if name in PREPARE:
        PREPARE[name](d, np.random.default_rng(seed))
    assert_matches(get_method(name, **coefficients), reference, d)
