"""The methods of structure.py against loops written from their papers."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    advantages_of,
    as_batch,
    check,
    clipped_loss,
    mean_over,
    members_of,
    ragged,
    ratio,
    run,
    standard_score,
    with_advantages,
)
from steps import earned, episodes, paid, steps_of

from jrl.methods.group_relative import grpo
from jrl.objectives import compute_advantages
from jrl.objectives.transforms import token_rewards
from jrl.zoo.methods.structure import (
    epo_strategy,
    gigpo,
    step_returns,
    stratified_grpo,
    supo,
    ui_s1,
)


def stratified_loss(d, frozen, blend=0.7):
    overall, local = standard_score(d), np.zeros(d.members.shape)
    for k in range(3):
        stratum = copy.copy(d)
        stratum.members = d.members & (d.ids["stratum"] == k)
        local += standard_score(stratum)
    a = blend * local + (1 - blend) * overall
    return with_advantages(d, lambda n, i, t: a[n, i])


def test_stratified_grpo_is_the_papers():
    check(stratified_grpo(blend=0.7), stratified_loss, g=6, ids=("stratum",))


def test_stratified_grpo_with_one_stratum_or_no_blend_is_grpo():
    d = ragged(3, ids=("stratum",))
    expected, g_expected = run(grpo(), d)
    no_blend = run(stratified_grpo(blend=0.0), d)
    del d.ids["stratum"]
    for value, gradients in (no_blend, run(stratified_grpo(blend=1.0), d)):
        np.testing.assert_allclose(value, expected, atol=1e-6)
        np.testing.assert_allclose(gradients["logprobs"], g_expected["logprobs"], atol=1e-6)


def test_stratified_advantages_have_mean_0_and_deviation_1_in_each_stratum():
    d = ragged(0, 2, 8)
    d.members[:], d.mask[:] = True, True
    d.rewards = np.random.default_rng(0).normal(size=(2, 8))
    d.ids["stratum"] = np.arange(16).reshape(2, 8) % 2
    objective = stratified_grpo(blend=1.0).objective
    advantages = jax.jit(lambda b: compute_advantages(objective, b, objective.init())[0])
    first = np.asarray(advantages(as_batch(d)))[:, :, 0]
    for half in (first[:, ::2], first[:, 1::2]):
        np.testing.assert_allclose(half.mean(1), 0, atol=1e-6)
        np.testing.assert_allclose(half.std(1, ddof=1), 1, atol=1e-4)


# ---------------------------------------------------------------- states seen twice


def normalised(values, eps=1e-6, std=True):
    values = np.array(values)
    gap = values - values.mean()
    if len(values) < 2:
        return gap * 0
    return gap / (values.std(ddof=1) + eps) if std else gap


def gigpo_advantages(d, omega, discount, std):
    out = {}
    for n in range(len(d.rewards)):
        live = members_of(d, n)
        episode = dict(zip(live, normalised([d.rewards[n, i] for i in live], std=std), strict=True))
        anchors, steps_of = {}, {}
        for i in live:
            ts = [t for t in range(d.mask.shape[2]) if d.mask[n, i, t]]
            order = list(dict.fromkeys(d.ids["step"][n, i, t] for t in ts))
            for k, step in enumerate(order):
                tokens = [t for t in ts if d.ids["step"][n, i, t] == step]
                steps_of[i, k] = tokens
                gain = discount ** (len(order) - 1 - k) * d.rewards[n, i]
                anchors.setdefault(d.ids["state"][n, i, tokens[0]], []).append((i, k, gain))
        for same in anchors.values():
            gains = normalised([gain for *_, gain in same], std=std)
            for (i, k, _), gain in zip(same, gains, strict=True):
                for t in steps_of[i, k]:
                    out[n, i, t] = episode[i] + omega * gain
    return out


def loss_of(omega=0.7, discount=0.8, std=True, beta=0.0):
    def reference(d, frozen):
        a = gigpo_advantages(d, omega, discount, std)

        def of_token(n, i, t):
            gap = np.clip(d.logprobs[n, i, t] - d.ref_logprobs[n, i, t], -20, 20)
            loss = clipped_loss(ratio(d, (n, i, t)), a[n, i, t])
            return loss + beta * (np.expm1(-gap) + gap)

        return mean_over(d, of_token)

    return reference


def test_gigpo_is_the_papers():
    method = gigpo(omega=0.7, discount=0.8, kl_coef=0.1)
    check(method, loss_of(beta=0.1), ids=("step", "state"))


def test_gigpo_without_deviations_is_the_papers():
    method = gigpo(omega=0.7, discount=0.8, normalise=False)
    check(method, loss_of(std=False), ids=("step", "state"))


def by_step_rows(scores, groups, std, eps=1e-6):
    """The authors' normalisation of rows, one for each step; 0 for a row alone in its group."""
    out = np.zeros(len(scores))
    for group in set(groups):
        rows = [k for k, other in enumerate(groups) if other == group]
        gap = scores[rows] - scores[rows].mean()
        deviation = scores[rows].std(ddof=1) if len(rows) > 1 else 1.0
        out[rows] = gap / (deviation + eps) if std else gap
    return out


def released_gigpo_loss(std, omega=0.7, discount=0.8):
    """The released code: a row is a step, and its episode's score stands in each of its rows."""

    def reference(d, frozen):
        rows = [
            (n, i, tokens, discount ** (len(steps) - 1 - k) * d.rewards[n, i])
            for n, i, steps in episodes(d)
            for k, (_, tokens) in enumerate(steps)
        ]
        scores = np.array([d.rewards[n, i] for n, i, *_ in rows])
        states = [(n, d.ids["state"][n, i, tokens[0]]) for n, i, tokens, _ in rows]
        episode = by_step_rows(scores, [n for n, *_ in rows], std)
        step = by_step_rows(np.array([gain for *_, gain in rows]), states, std)
        a = {
            (n, i, t): episode_gain + omega * step_gain
            for (n, i, tokens, _), episode_gain, step_gain in zip(rows, episode, step, strict=True)
            for t in tokens
        }
        return with_advantages(d, lambda *at: a[at])

    return reference


@pytest.mark.parametrize("std", [True, False])
def test_gigpo_across_steps_is_the_released_codes(std):
    method = gigpo(omega=0.7, discount=0.8, normalise=std, cross_steps=True)
    check(method, released_gigpo_loss(std), ids=("step", "state"))


def test_across_steps_an_episode_counts_once_for_each_of_its_steps():
    d = ragged(0, 1, 2, 4, ids=("step", "state"))
    d.members[:], d.mask[:], d.lengths[:] = True, True, 4
    d.live, d.rewards = d.mask, np.array([[1.0, 0.0]])
    d.ids["step"][:] = [[0, 1, 2, 2], [0, 0, 0, 0]]
    d.ids["state"][:] = np.arange(8).reshape(1, 2, 4)  # no state is seen twice
    plain, crossed = (
        advantages_of(gigpo(normalise=False, cross_steps=x), d)[0, :, 0] for x in (False, True)
    )
    np.testing.assert_allclose(plain, [0.5, -0.5])
    np.testing.assert_allclose(crossed, [0.25, -0.75])  # the mean of 1, 1, 1 and 0


def test_where_no_state_is_seen_twice_it_is_grpo():
    d = ragged(1, ids=("step",))
    other = copy.deepcopy(d)
    n, g = d.rewards.shape
    # every step in a state of its own
    other.ids["state"] = np.arange(n * g).reshape(n, g, 1) * 10 + d.ids["step"]
    expected = run(grpo(), d)
    for numbers in (d, other):
        value, gradients = run(gigpo(), numbers)
        np.testing.assert_allclose(value, expected[0], rtol=1e-6)
        np.testing.assert_allclose(gradients["logprobs"], expected[1]["logprobs"], atol=1e-6)


def test_equal_scores_at_one_depth_give_exactly_nothing():
    d = ragged(2, ids=("step", "state"))
    d.rewards[:] = 0.3
    d.ids["step"][:] = 0
    objective = gigpo().objective
    apply = jax.jit(partial(compute_advantages, objective))
    advantages, *_ = apply(as_batch(d), objective.init())
    assert not np.asarray(advantages).any()


def test_rewards_given_step_by_step_are_read_where_they_stand():
    d = ragged(1, ids=("step", "state"))
    batch = as_batch(d)
    advantage = gigpo().objective.advantage

    @jax.jit
    def both(batch):
        ways = batch.score(), token_rewards(batch.score(), batch)
        return [advantage.apply(values, batch, ())[0] for values in ways]

    at_steps, given_by_step = (np.asarray(x) for x in both(batch))
    lively = d.live.any(axis=2) | ~d.members  # a score without a token is not given
    same = lively.all(axis=1)
    np.testing.assert_allclose(given_by_step[same], at_steps[same], atol=1e-5)
    assert same.any()
    assert at_steps[same].any()


# ---------------------------------------------------------------- steps of episodes


def ui_s1_loss(d, frozen, omega=0.7, discount=0.5, matched=0.2, std=True):
    out = {}
    for n in range(len(d.rewards)):
        live = members_of(d, n)
        # points without a token that they could stand at are not paid
        scores = [d.rewards[n, i] if steps_of(d, n, i) else 0.0 for i in live]
        episode = dict(zip(live, normalised(scores, std=std), strict=True))
        same = {}
        for i in live:
            if not (steps := steps_of(d, n, i)):
                continue
            points, gains, after = earned(d, n, i), {}, 0.0
            for k in reversed(range(len(steps))):
                after = points[k] + discount * after if points[k] >= matched else 0.0
                gains[k] = after if points[k] >= matched else points[k]
            for k, (label, tokens) in enumerate(steps):
                same.setdefault(label, []).append((gains[k], i, tokens))
        for entries in same.values():
            gains = normalised([gain for gain, *_ in entries], std=std)
            for gain, (_, i, tokens) in zip(gains, entries, strict=True):
                for t in tokens:
                    out[n, i, t] = episode[i] + omega * gain
    return with_advantages(d, lambda n, i, t: out[n, i, t])


def test_ui_s1_is_the_papers():
    check(ui_s1(omega=0.7, matched=0.2), ui_s1_loss, ids=("step",), prepare=paid)


def test_ui_s1_without_deviations_is_the_papers():
    method = ui_s1(omega=0.7, matched=0.2, normalise=False)
    check(method, partial(ui_s1_loss, std=False), ids=("step",), prepare=paid)


def test_ui_s1_stops_counting_at_an_action_that_was_not_the_experts():
    rewards, steps = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.arange(4)
    joined, mask = rewards >= 1, jnp.ones(4, bool)
    assert step_returns(rewards, steps, mask, 0.5, joined).tolist() == [1.0, 0.0, 1.5, 1.0]
    assert step_returns(rewards, steps, mask, 0.5).tolist() == [1.375, 0.75, 1.5, 1.0]


def epo_loss(d, frozen, discount=0.99, normalise=True):
    total = 0.0
    for n, i, steps in episodes(d):
        points, size = earned(d, n, i), range(len(steps))
        gains = [sum(discount ** (j - k) * points[j] for j in size if j >= k) for k in size]
        most = max(map(abs, gains)) if normalise else 1.0
        for gain, (_, tokens) in zip(gains, steps, strict=True):
            total -= gain / most * np.mean([d.logprobs[n, i, t] for t in tokens])
    return total / max(len(episodes(d)), 1)


def test_epo_strategy_is_the_released_codes():
    check(epo_strategy(), epo_loss, ids=("step",), prepare=paid)


def test_epo_strategy_without_normalisation_is_the_papers():
    reference = partial(epo_loss, discount=0.8, normalise=False)
    method = epo_strategy(discount=0.8, normalise=False)
    check(method, reference, ids=("step",), prepare=paid)


def in_rows(d, rng):
    """Members 0 and 1 of each group are rows of one episode, and so are 2 and 3."""
    d.ids["episode"] = np.broadcast_to(np.arange(d.rewards.shape[1]) // 2, d.rewards.shape)


def supo_loss(d, frozen):
    total = count = 0.0
    for n in range(len(d.rewards)):
        rows = {}
        for i in members_of(d, n):
            rows.setdefault(d.ids["episode"][n, i], []).append(i)
        a = normalised([sum(d.rewards[n, i] for i in row) for row in rows.values()])
        for gain, row in zip(a, rows.values(), strict=True):
            if any(d.truncated[n, i] for i in row):
                continue
            for i in row:
                for t in np.flatnonzero(d.live[n, i]):
                    total += clipped_loss(ratio(d, (n, i, t)), gain)
                    count += 1
    return total / max(count, 1)


def test_supo_is_the_papers():
    check(supo(), supo_loss, g=6, prepare=in_rows)


def test_the_rows_of_an_episode_share_what_any_of_them_earned():
    d = ragged(0, 1, 4)
    d.members[:], d.mask[:], d.truncated[:] = True, True, False
    d.rewards = np.array([[0.0, 1.0, 0.0, 0.0]])
    in_rows(d, None)
    a = advantages_of(supo(), d)[0, :, 0]
    np.testing.assert_allclose(a, [a[0], a[0], -a[0], -a[0]])
    assert a[0] > 0
    d.truncated[0, 3] = True  # its whole episode was never finished
    assert not advantages_of(supo(), d)[0, 2:].any()
