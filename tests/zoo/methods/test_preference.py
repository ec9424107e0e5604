"""Losses of pairs that single papers published, against float64 loops and identities."""

import types

import numpy as np
import pytest
from harness import check, ragged, run
from preferences import (
    assert_same,
    before,
    dpo,
    logistic,
    mean_of_pairs,
    of_rewards,
    pairs_of,
    sigmoid,
    softplus,
    two,
)

from jrl.methods import get_method
from jrl.zoo.methods.demonstrations import demonstrations_first


def exo(a, b, e=0.01):
    p = sigmoid(a - b)
    return p * (-softplus(b - a) - np.log(1 - e)) + sigmoid(b - a) * (-softplus(a - b) - np.log(e))


CASES = {
    "robust_dpo": (
        of_rewards(lambda a, b: (0.8 * softplus(b - a) - 0.2 * softplus(a - b)) / 0.6),
        {"noise": 0.2},
    ),
    "exo": (of_rewards(exo), {"label_smoothing": 0.01}),
    "cpo": (mean_of_pairs(lambda w, l: softplus(0.1 * (l.lp - w.lp)) - w.lp), {}),
    "slic": (mean_of_pairs(lambda w, l: max(0, 1 - w.lp + l.lp) - 0.1 * w.lp), {}),
    "online_dpo": (of_rewards(logistic), {}),
    "online_dpo ipo": (mean_of_pairs(lambda w, l: (w.h - l.h - 5) ** 2), {"loss": "ipo"}),
    "rlaif_v": (
        mean_of_pairs(lambda w, l: softplus(0.1 * (l.h - w.h)), 0.8),
        {"min_gap": 0.8},
    ),
    "mpo": (mean_of_pairs(lambda w, l: softplus(0.1 * (l.h - w.h)), 0.8), {"threshold": 0.8}),
    "cpo hinge": (
        mean_of_pairs(lambda w, l: max(0, 1 + 0.1 * (l.lp - w.lp)) - w.lp),
        {"loss": "hinge"},
    ),
    "xpo hinge": (of_rewards(lambda a, b: max(0, 1 - a + b)), {"loss": "hinge"}),
}


def test_aot_compares_sorted_log_ratios():
    def reference(d, frozen):
        pairs, start = pairs_of(d), pairs_of(frozen)
        order = np.argsort([w.start - l.start for w, l in start])
        refs = sorted(w.ref - l.ref for w, l in start)
        u = [pairs[k][0].lp - pairs[k][1].lp for k in order]
        losses = [softplus(-0.1 * (x - y)) for x, y in zip(u, refs, strict=True)]
        return sum(losses) / max(len(losses), 1)

    check(get_method("aot"), reference, n=5)


def test_unpaired_aot_is_that_of_the_sorted_rewards_at_the_start_of_a_step():
    def start_of_step(d, rng):
        d.proximal_logprobs = d.logprobs.copy()

    def reference(d, frozen):
        pairs = pairs_of(d)
        high, low = (sorted(pair[k].h for pair in pairs) for k in (0, 1))
        losses = [softplus(-0.1 * (x - y)) for x, y in zip(high, low, strict=True)]
        return sum(losses) / max(len(losses), 1)

    check(get_method("aot", pairing="unpaired"), reference, n=5, prepare=start_of_step)


def test_reward_augmented_dpo_prefers_the_score_nearest_to_the_goal():
    def with_goals(d, rng):
        d.ids["goal"] = rng.integers(-1, 2, len(d.rewards))

    def reference(d, frozen):
        pairs = pairs_of(d, -((d.ids["goal"][:, None] - d.rewards) ** 2))
        return sum(dpo(w, l, 0.01) for w, l in pairs) / max(len(pairs), 1)

    check(get_method("reward_augmented_dpo"), reference, prepare=with_goals)


# ---------------------------------------------------------------- TRL


def test_dpo_on_demonstrations_and_own_draws_is_spins_loss():
    d = ragged(2, g=2, demonstrations=1)
    method = before(get_method("dpo"), demonstrations_first())
    value, _ = run(method, d)
    losses = []
    for n in range(3):
        if d.live[n].any(axis=1).all():
            h = np.where(d.live[n], d.logprobs[n] - d.ref_logprobs[n], 0).sum(1)
            losses.append(np.logaddexp(0, -0.1 * (h[1] - h[0])))
    assert losses
    assert value == pytest.approx(np.mean(losses), abs=1e-6)


def test_robust_dpo_without_noise_is_dpo_and_its_mean_over_flips_is_clean():
    d = two(0)
    assert_same(get_method("robust_dpo", noise=0.0), get_method("dpo"), d)
    method = get_method("robust_dpo", noise=0.2)
    right = run(method, d)[0]
    clean = run(get_method("dpo"), d)[0]
    d.rewards = d.rewards[:, ::-1].copy()
    wrong = run(method, d)[0]
    assert 0.8 * right + 0.2 * wrong == pytest.approx(clean, abs=1e-6)


def test_exo_is_least_where_the_policy_agrees_with_the_labels():
    d = two(0, t=1)
    d.logprobs = d.ref_logprobs.copy()
    d.logprobs[:, 0, 0] += np.log(0.9 / 0.1) / 0.5
    value, gradients = run(get_method("exo", beta=0.5, label_smoothing=0.1), d)
    assert value == pytest.approx(0, abs=1e-6)
    assert np.abs(gradients["logprobs"]).max() < 1e-5


def test_past_its_margin_slic_only_imitates():
    d = two(1)
    d.logprobs[:, 1] -= 50.0
    _, gradients = run(get_method("slic", nll_coef=0.5), d)
    np.testing.assert_allclose(gradients["logprobs"][:, 0][d.live[:, 0]], -0.5 / 3, atol=1e-7)
    assert not gradients["logprobs"][:, 1].any()


def test_aot_on_one_pair_is_dpo():
    d = two(0, n=1)
    assert_same(get_method("aot"), get_method("dpo"), d)


SAME_ON_PAIRS = {
    "online_dpo": {},
    "online_iterative_dpo": {},
    "rlaif_v": {},
    "upo": {"share": 1.0},
    "tp_llama": {},
    "rdpo": {},
    "mpo": {"threshold": 0.0},
    "reward_augmented_dpo": {"beta": 0.1},
}


@pytest.mark.parametrize("name", SAME_ON_PAIRS)
def test_on_plain_pairs_it_is_dpo(name):
    assert_same(get_method(name, **SAME_ON_PAIRS[name]), get_method("dpo"), two(2))


def test_the_goal_of_the_lower_score_reverses_the_pair():
    d, method = two(1), get_method("reward_augmented_dpo")
    d.ids["goal"] = np.zeros(3, int)
    aimed = run(method, d)[0]
    flipped = types.SimpleNamespace(**vars(d))
    flipped.rewards = d.rewards[:, ::-1].copy()
    assert aimed == pytest.approx(run(get_method("dpo", beta=0.01), flipped)[0], abs=1e-6)


# ---------------------------------------------------------------- siblings in a search tree


def visited(d, rng):
    often = rng.integers(0, 9, d.rewards.shape).astype(np.float64)
    d.visits = np.broadcast_to(often[..., None], d.mask.shape).copy()


def mcts_loss(d, frozen, beta=0.2):
    def of_pair(w, l):
        n_w, n_l = (d.visits[s.n, s.i, 0] for s in (w, l))
        alpha = min(1 / (max(n_w, 1) / n_l + 1) if n_l else 0.0, 0.5)
        a, b = beta * w.h, beta * l.h
        return (1 - alpha) * softplus(b - a) + alpha * softplus(a - b)

    losses = [of_pair(w, l) for w, l in pairs_of(d)]
    return sum(losses) / max(len(losses), 1)


def test_mcts_dpo_trusts_a_pair_by_its_visits():
    check(get_method("mcts_dpo", beta=0.2), mcts_loss, prepare=visited)


def test_mcts_dpo_without_visits_and_step_q_are_dpo():
    d = two(2)
    expected = run(get_method("dpo"), d)
    for name in ("mcts_dpo", "step_q"):
        value, gradients = run(get_method(name), d)
        assert value == pytest.approx(expected[0], rel=1e-6), name
        np.testing.assert_allclose(gradients["logprobs"], expected[1]["logprobs"], atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_pair_losses_are_the_papers(case):
    reference, coefficients = CASES[case]
    check(get_method(case.split()[0], **coefficients), reference)


def test_cpo_without_imitation_is_dpo_against_a_uniform_reference():
    d = two(3)
    d.ref_logprobs[:] = -2.0
    d.mask[:] = True
    d.live = d.mask.copy()
    assert_same(get_method("cpo", nll_coef=0.0), get_method("dpo"), d)
