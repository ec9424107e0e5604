"""Policy gradients that single papers published, against loops from their papers."""

from functools import partial

import numpy as np
import pytest
from harness import (
    advantages_of,
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
)
from steps import earned, episodes, paid

from jrl.methods import get_method
from jrl.objectives import aggregates
from jrl.zoo.methods.policy_gradient import COLLISION


def gpg_loss(d, frozen):
    group = {n: [d.rewards[n, j] for j in members_of(d, n)] for n in range(len(d.rewards))}
    everybody = sum(len(g) for g in group.values())
    silent = sum(len(g) for g in group.values() if g and np.ptp(g) == 0)
    alpha = everybody / max(everybody - silent, 1)
    return sum_of_scores(d, lambda n, i, t: alpha * (d.rewards[n, i] - np.mean(group[n])), "tokens")


def opo_loss(d, frozen):
    def advantage(n, i, t):
        live = members_of(d, n)
        lengths = [d.mask[n, j].sum() for j in live]
        b = sum(w * d.rewards[n, j] for w, j in zip(lengths, live, strict=True)) / sum(lengths)
        return d.rewards[n, i] - b if len(live) > 1 else 0.0

    return sum_of_scores(d, advantage, "sequences")


def otb_loss(lone_tail):
    def loss(d, frozen):
        def spent(n, j, t):
            w = 1 - 2 * np.minimum(np.exp(d.proximal_logprobs[n, j]), 1) + d.collision[n, j]
            return sum(max(w[s], 0) for s in range(t + 1) if d.mask[n, j, s])

        def advantage(n, i, t):
            here = [j for j in members_of(d, n) if d.mask[n, j, t]]
            if len(here) == 1:
                return d.rewards[n, i] if lone_tail else 0.0
            weights = [spent(n, j, t) for j in here]
            both = sum(w * d.rewards[n, j] for w, j in zip(weights, here, strict=True))
            return d.rewards[n, i] - both / sum(weights)

        return sum_of_scores(d, advantage, "sequences")

    return loss


def plus_plus_loss(d, frozen, beta=0.1):
    a = {
        (n, i, t): d.rewards[n, i] - np.mean([d.rewards[n, j] for j in members_of(d, n)])
        for n, i, tokens in sequences(d)
        for t in tokens
    }
    mean, variance = np.mean(list(a.values())), np.var(list(a.values()))
    total = 0.0
    for at, value in a.items():
        value = (value - mean) / np.sqrt(variance + 1e-8)
        r = np.exp(np.clip(d.logprobs[at] - d.sampler_logprobs[at], -20, 20))
        total -= min(r * value, min(max(r, 0.8), 1.2) * value)
        total += beta * 0.5 * (d.logprobs[at] - d.ref_logprobs[at]) ** 2
    return total / max(len(a), 1)


def with_collision(d, rng):
    d.proximal_logprobs = -np.abs(d.proximal_logprobs)
    d.collision = rng.random(d.mask.shape).astype(np.float32).astype(np.float64) + 0.5


CASES = {
    "gpg": (gpg_loss, "gpg", {}, {}),
    "opo": (opo_loss, "opo", {}, {}),
    "otb": (otb_loss(False), "otb", {}, {"prepare": with_collision}),
    "otb as verl": (otb_loss(True), "otb", {"lone_tail": True}, {"prepare": with_collision}),
    "reinforce_plus_plus_baseline": (
        plus_plus_loss,
        "reinforce_plus_plus_baseline",
        {"kl_coef": 0.1},
        {},
    ),
}


# ---------------------------------------------------------------- identities


def centred_reinforce(divide):
    """Plain REINFORCE against the group's mean, as a reference."""

    def loss(d, frozen):
        return sum_of_scores(
            d,
            lambda n, i, t: d.rewards[n, i] - np.mean([d.rewards[n, j] for j in members_of(d, n)]),
            divide,
        )

    return loss


def test_at_equal_lengths_the_baseline_of_opo_is_the_groups_mean():
    d = full(1)
    one, _ = run(get_method("opo"), d)
    assert one == pytest.approx(centred_reinforce("sequences")(d, d), abs=1e-5)


def test_equal_energies_at_equal_lengths_give_otb_the_groups_mean():
    d = full(2)
    d.proximal_logprobs[:] = -1.0
    d.collision = np.full(d.mask.shape, 0.25)
    one, _ = run(get_method("otb"), d)
    assert one == pytest.approx(centred_reinforce("sequences")(d, d), abs=1e-5)


def test_where_every_group_has_an_advantage_the_gradient_of_gpg_is_token_mean_dr_grpo():
    d = full(3)
    d.logprobs = d.sampler_logprobs.copy()
    dr_grpo = get_method("dr_grpo", max_tokens=5)
    objective = dr_grpo.objective._replace(aggregate=aggregates.token_mean)
    _, one = run(get_method("gpg"), d)
    _, two = run(dr_grpo._replace(objective=objective), d)
    np.testing.assert_allclose(one["logprobs"], two["logprobs"], atol=1e-6)


def test_collision_is_the_sum_of_squared_probabilities():
    logprobs = np.log(np.array([0.5, 0.25, 0.25, 1e-30], np.float32))
    logprobs[3] = -np.inf
    assert float(COLLISION.apply({"policy": logprobs}, 0)) == pytest.approx(0.375)
    assert get_method("otb").objective.statistics == (COLLISION,)


# ---------------------------------------------------------------- agents


def loop_loss(d, frozen, least=0.01, eps=0.1):
    """Equation 10: each episode's mean over its tokens, over the episodes with |A| >= least."""
    losses = []
    for n, i, tokens in sequences(d):
        others = [d.rewards[n, j] for j in members_of(d, n) if j != i]
        a = d.rewards[n, i] - np.mean(others) if others else 0.0
        if abs(a) >= least:
            each = [clipped_loss(ratio(d, (n, i, t)), a, 1 - 1 / (1 + eps), eps) for t in tokens]
            losses.append(np.mean(each))
    return sum(losses) / max(len(losses), 1)


def test_loop_is_the_released_codes():
    check(get_method("loop"), loop_loss)
    assert get_method("loop").schedule.epochs == 2


def test_loop_leaves_episodes_without_an_advantage_out_of_the_mean():
    check(get_method("loop", least=0.5), partial(loop_loss, least=0.5))


def comas_loss(d, frozen):
    gains = {}
    for n, i, steps in episodes(d):
        for points, (_, tokens) in zip(earned(d, n, i), steps, strict=True):
            gains |= {(n, i, t): points for t in tokens}
    every = np.array(list(gains.values()))
    scale = np.sqrt(every.var() + 1e-8)
    losses = [clipped_loss(ratio(d, at), (a - every.mean()) / scale) for at, a in gains.items()]
    return sum(losses) / len(losses)


def test_comas_is_the_papers():
    check(get_method("comas"), comas_loss, ids=("step",), prepare=paid)


def test_a_message_gets_nothing_of_what_others_earned():
    d = ragged(0, 1, 2, 6, ids=("step",))
    d.members[:], d.mask[:], d.lengths[:] = True, True, 6
    d.live = d.mask
    d.ids["step"][:] = [0, 0, 1, 1, 2, 2]
    d.rewards = np.array([[1.0, 1.0]])
    d.paid = np.zeros(d.mask.shape)
    d.paid[0, 0, 1], d.paid[0, 1, 3] = 1.0, 1.0  # the solution, and the evaluation, to a score
    first, second = advantages_of(get_method("comas"), d)[0] > 0
    assert first.tolist() == [True, True, False, False, False, False]
    assert second.tolist() == [False, False, True, True, False, False]


# ---------------------------------------------------------------- weighted REINFORCE


def weighted_loss(d, positive, negative):
    total = 0.0
    for n, i, tokens in sequences(d):
        weight = positive if d.rewards[n, i] > 0.5 else -negative
        total -= weight * sum(d.logprobs[n, i, t] for t in tokens)
    return total / max(len(sequences(d)), 1)


W_REINFORCE, NSR, PSR = get_method("w_reinforce"), get_method("nsr"), get_method("psr")


@pytest.mark.parametrize(
    ("method", "positive", "negative"), [(W_REINFORCE, 0.1, 1), (NSR, 0, 1), (PSR, 1, 0)]
)
def test_weighted_reinforce_is_the_papers(method, positive, negative):
    check(method, lambda d, frozen: weighted_loss(d, positive, negative))


def test_weight_1_is_reinforce_with_rewards_of_1_and_minus_1():
    d = ragged(1)
    ours = run(get_method("w_reinforce", positive_weight=1.0), d)
    d.rewards = np.where(d.rewards > 0.5, 1.0, -1.0)
    theirs = run(get_method("reinforce"), d)
    assert ours[0] == pytest.approx(theirs[0])
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"])


def test_the_halves_add_up():
    d = ragged(0, binary=True, g=5)
    total, wrong, right = (run(m, d)[1]["logprobs"] for m in (W_REINFORCE, NSR, PSR))
    np.testing.assert_allclose(total, wrong + 0.1 * right, atol=1e-7)
    assert not wrong[d.rewards > 0.5].any()
    assert not right[d.rewards <= 0.5].any()
    assert wrong.any()
    assert right.any()


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_paper(case):
    reference, name, coefficients, more = CASES[case]
    check(get_method(name, **coefficients), reference, **more)


def test_equal_rewards_give_no_gradient():
    d = ragged(5)
    d.rewards[:] = 0.7
    d.collision = np.full(d.mask.shape, 0.25)
    for name in ("gpg", "opo", "otb", "reinforce_plus_plus_baseline"):
        _, gradients = run(get_method(name), d)
        assert not gradients["logprobs"].any(), name


def test_on_policy_gradient_is_reinforce_with_the_same_advantages():
    d = ragged(3)
    d.logprobs = d.sampler_logprobs
    assert_reinforce_on_policy(get_method("reinforce_plus_plus_baseline"), d)
