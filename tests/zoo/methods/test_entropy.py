"""AEPO, EPO, Confucius3, STEER and VERL against loops from their papers, and their states."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    as_batch,
    check,
    clipped_loss,
    live_statistics,
    loss_and_gradient,
    mean_over,
    members_of,
    numbers,
    ragged,
    ratio,
    run,
    sequences,
    standard_score,
    tokens_of,
)

from jrl.methods.group_relative import grpo
from jrl.objectives import aggregates, compute_advantages
from jrl.zoo.methods.entropy import (
    RankState,
    TurnHistory,
    aepo,
    confucius3_math,
    entropy_history,
    epo_entropy,
    rank_bonus,
    running_ranks,
    steer_entropy,
    verl_effective_rank,
    weigh_by_entropy_change,
)


def grpo_loss(d):
    a = standard_score(d)
    return mean_over(d, lambda n, i, t: clipped_loss(ratio(d, (n, i, t)), a[n, i]))


# ---------------------------------------------------------------- AEPO


def substituted(d, rows, threshold=0.05):
    """{(n, i): advantage} of the members that are trained on."""
    live = [(n, i) for n in range(len(d.rewards)) for i in members_of(d, n)]
    gains = []
    for number in (0, 1):
        one_pass = copy.copy(d)
        one_pass.members = d.members & ((d.ids["pass"] > 0) == number)
        gains.append(standard_score(one_pass))
    second = [at for at in live if d.ids["pass"][at] > 0]
    first = [at for at in live if d.ids["pass"][at] == 0]
    good = [at for at in second if gains[1][at] > threshold]
    used = sorted(good, key=lambda at: d.ids["tie_breaker"][at])[: min(rows, len(good))]
    rest = sorted(first, key=lambda at: d.ids["tie_breaker"][at])[len(used) :]
    return {at: gains[0][at] for at in rest} | dict.fromkeys(used, 1.0)


def aepo_loss(d, frozen):
    """The mean over tokens, ratios against the policy at the start of the step."""
    a = substituted(d, rows=2)
    total, count = 0.0, 0
    for n, i in a:
        for t in tokens_of(d, n, i):
            r = ratio(d, (n, i, t), "proximal_logprobs")
            total += clipped_loss(r, a[n, i], dual=3.0)
            count += 1
    return total / max(count, 1)


def two_passes(d, rng):
    d.members[:] = rng.random(d.members.shape) < 0.9
    d.ids["pass"] = (np.arange(d.members.shape[1]) % 2) * np.ones((len(d.rewards), 1), int)


AEPO = aepo(rows=2)


def test_aepo_is_the_papers():
    check(AEPO, aepo_loss, prepare=two_passes, g=6)


def test_a_heated_token_pulls_by_its_log_probability_whatever_temperature_drew_it():
    d = ragged(1, g=6)
    two_passes(d, np.random.default_rng(0))
    d.logprobs = d.proximal_logprobs.copy()
    d.sampler_logprobs -= 2.0
    a = substituted(d, rows=2)
    used = [at for at in a if d.ids["pass"][at] > 0]
    count = sum(len(tokens_of(d, n, i)) for n, i in a)
    _, gradients = run(AEPO, d)
    assert used
    for n, i in used:
        at = tokens_of(d, n, i)
        np.testing.assert_allclose(gradients["logprobs"][n, i, at], -1 / count, rtol=1e-5)


def test_without_a_second_pass_aepo_is_grpo_with_a_token_mean():
    d = ragged(1)
    plain = grpo(dual_clip=3.0, correction="proximal").with_(aggregate=aggregates.token_mean)
    one, two = run(AEPO, d), run(plain, d)
    assert one[0] == two[0]
    np.testing.assert_array_equal(one[1]["logprobs"], two[1]["logprobs"])


def test_aepo_is_hot_below_its_target_and_uses_half_as_many_rows_while_cold():
    d = ragged(2, g=6)
    two_passes(d, np.random.default_rng(0))
    method = aepo(rows=3)
    apply = jax.jit(partial(compute_advantages, method.objective))

    def after(entropy, state):
        d.rollout_entropy[:] = entropy
        _, batch, state, _ = apply(as_batch(d), state)
        used = np.asarray(batch.members) & (d.ids["pass"] > 0)
        return int(used.sum()), state

    most = sum(d.ids["pass"][at] for at in substituted(d, 3))
    rows, state = after(0.4, method.objective.init())
    assert (rows, float(state["advantage"])) == (most, pytest.approx(1.2))
    rows, state = after(0.6, state)
    assert (rows, float(state["advantage"])) == (most, pytest.approx(0.8))
    rows, state = after(0.5, state)
    assert (rows, float(state["advantage"])) == (most // 2, pytest.approx(1.2))
    assert most > 1


# ---------------------------------------------------------------- EPO


def released_weight(step, total):
    """The released code's weight: each half of the run has a progress of its own, from 0 to 1."""
    half = total // 2
    if step <= half:
        return 1 - 0.2 * (1 - np.exp(-2 * step / half))
    return 0.8 * np.exp(-3 * (step - half) / (total - half))


def test_the_weight_of_epo_s_penalty_is_the_released_code_s_at_every_step():
    d = ragged(3, ids=("turn",))
    transform = entropy_history(2, 11, 0.5, 1.5)
    apply = jax.jit(transform.apply)
    batch, weights = as_batch(d), []
    for step in range(12):
        past = TurnHistory(jnp.ones(2), jnp.ones(2), jnp.float32(step))
        _, after, _ = apply(jnp.zeros(d.members.shape), batch, past)
        weight = np.asarray(after.stats["entropy_smoothing"])[d.live & (d.ids["turn"] >= 1)]
        assert np.ptp(weight) == 0
        weights.append(float(weight[0]))
    np.testing.assert_allclose(weights, [released_weight(s, 11) for s in range(12)], rtol=1e-5)
    assert 0.82 < weights[5] < 0.83
    assert weights[11] < 0.04


def epo_loss(hinge, history=None, step=0, turns=2, total=10, c=0.3, penalty=0.4):
    def reference(d, frozen):
        loss = grpo_loss(d)
        beta = released_weight(step, total)
        extra, count = 0.0, 0
        for n, i, ts in sequences(d):
            for t in ts:
                h, turn = d.entropy[n, i, t], min(d.ids["turn"][n, i, t], turns - 1)
                extra, count = extra - h, count + 1
                if history is None or turn < turns // 2 or history[turn] is None:
                    continue
                over = max(h - 1.5 * history[turn], 0.5 * history[turn] - h, 0)
                extra += beta * penalty * (over if hinge else float(over > 0))
        return loss + c * extra / max(count, 1)

    return reference


def epo(**changes):
    knobs = {"turns": 2, "entropy_coef": 0.3, "penalty": 0.4, "low": 0.5, "high": 1.5}
    return epo_entropy(total_steps=10, **{**knobs, **changes})


EPO = epo()


def test_before_a_turn_has_a_history_epo_is_the_plain_bonus():
    check(EPO, epo_loss(True), wrt=("logprobs", "entropy"), ids=("turn",))


@pytest.mark.parametrize(("step", "hinge"), [(2.0, True), (7.0, True), (2.0, False)])
def test_epo_with_a_history_is_the_papers(step, hinge):
    d = ragged(3, ids=("turn",))
    method = EPO if hinge else epo(hinge=False)
    past = TurnHistory(np.array([1.0, 0.3]), np.array([1.0, 4.0]), np.array(step))
    past = jax.tree.map(lambda x: np.asarray(x, np.float32), past)
    plain = method.objective.init()
    state = {**plain, "advantage": (plain["advantage"][0], past)}
    wrt = ("entropy", "logprobs")
    live = live_statistics(method, d, wrt)
    value, gradients = loss_and_gradient(method, as_batch(d), live, state)
    reference = epo_loss(hinge, [1.0, 0.3], step)
    assert value == pytest.approx(reference(d, d), rel=1e-5)
    differing = 0
    bonus = -0.3 / d.live.sum()
    for at in map(tuple, np.argwhere(d.live)):
        up, down = copy.deepcopy(d), copy.deepcopy(d)
        up.entropy[at] += 1e-5
        down.entropy[at] -= 1e-5
        slope = (reference(up, d) - reference(down, d)) / 2e-5
        assert gradients["entropy"][at] == pytest.approx(slope, abs=1e-5)
        differing += abs(slope - bonus) > 1e-6
    assert (differing > 0) == hinge, "the constant penalty has no gradient, the hinge has one"


def test_the_history_is_the_mean_over_steps_of_each_turns_entropy():
    d = ragged(4, ids=("turn",))
    d.ids["turn"][:] = np.minimum(d.ids["turn"], 1)
    apply = jax.jit(partial(compute_advantages, EPO.objective))
    state, entropies = EPO.objective.init(), []
    for scale in (1.0, 3.0):
        d.rollout_entropy = np.float32(d.rollout_entropy * scale).astype(float)
        entropies.append(
            [d.rollout_entropy[d.live & (d.ids["turn"] == k)].mean() for k in range(2)]
        )
        _, _, state, _ = apply(as_batch(d), state)
    past = state["advantage"][1]
    np.testing.assert_allclose(past.mean, np.mean(entropies, axis=0), rtol=1e-5)
    assert (past.times.tolist(), float(past.steps)) == ([2.0, 2.0], 2.0)


# ---------------------------------------------------------------- Confucius3


def confucius_loss(d, frozen):
    """Equations 1 to 3: R of 1 and -1, D = 1.256 - 0.256 mu, a sum over tokens."""
    a = np.zeros(d.members.shape)
    for n in range(len(d.rewards)):
        signs = {i: 1.0 if d.rewards[n, i] >= 0.5 else -1.0 for i in members_of(d, n)}
        mean = np.mean(list(signs.values())) if signs else 0.0
        for i, sign in signs.items():
            a[n, i] = (sign - mean) * (1.256 - 0.256 * mean)
    return mean_over(
        d, lambda n, i, t: clipped_loss(ratio(d, (n, i, t)), a[n, i], high=0.28), "sums"
    )


def test_confucius_weighs_by_hardness_as_the_paper_does():
    method = confucius3_math()
    check(method, confucius_loss)
    assert method.plan.rounds > 0
    assert not method.objective.regularizers


@pytest.mark.parametrize(
    ("right", "expected"),
    [(1, [2.076, -0.692, -0.692, -0.692]), (3, [0.564, 0.564, 0.564, -1.692])],
)
def test_the_papers_advantages_of_four_completions(right, expected):
    rewards = jnp.float32(np.arange(4) < right)[None]
    batch = as_batch(ragged(0, 1, 4)).replace(members=jnp.ones((1, 4), bool))
    got, _, _ = confucius3_math().objective.advantage.apply(rewards, batch, ())
    np.testing.assert_allclose(got[0], expected, rtol=1e-6)


CONFUCIUS = confucius3_math(stage="entropy", target=0.8, entropy_coef=0.5, clip_high=0.2)


@pytest.mark.parametrize(("before", "sign"), [(1.1, 1), (0.3, -1), (0.8, 0)])
def test_the_entropy_term_pulls_with_a_constant_force(before, sign):
    d = ragged(5)
    objective = CONFUCIUS.objective
    before = objective.regularizers[0].update(None, {"entropy": np.float32(before)})
    state = {**objective.init(), "regularizers": (before,)}
    stats = live_statistics(CONFUCIUS, d, ("logprobs", "entropy"))
    value, gradients = loss_and_gradient(CONFUCIUS, as_batch(d), stats, state)
    expected = grpo_loss(d) + 0.5 * sign * d.entropy[d.live].mean()
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradients["entropy"][d.live], 0.5 * sign / d.live.sum(), rtol=1e-5)


def test_before_the_first_entropy_is_known_the_first_stage_is_grpo():
    check(CONFUCIUS, lambda d, frozen: grpo_loss(d))


# ---------------------------------------------------------------- STEER


def steer_loss(d, frozen, falloff="exponential", low=0.7, high=1.2):
    a, size = standard_score(d), np.zeros(d.mask.shape)
    for n, i, ts in sequences(d):
        for t in ts:
            at = n, i, t
            pi, mu = np.exp(d.proximal_logprobs[at]), np.exp(d.sampler_logprobs[at])
            change = a[n, i] / mu * pi * (1 - pi) * (np.log(pi) + d.rollout_entropy[at])
            size[at] = abs(change)
    if falloff == "exponential":
        weight = np.exp(np.log(low) / max(size[d.live].max(), 0.02) * size)
    else:
        least, most = size[d.live].min(), size[d.live].max()
        part = (size - least) / (most - least) if most > least else np.full(size.shape, 0.5)
        weight = high - part * (high - low)

    def of_token(n, i, t):
        r = ratio(d, (n, i, t))
        return weight[n, i, t] * clipped_loss(r, a[n, i], high=0.28, dual=10.0)

    return mean_over(d, of_token, "tokens")


def with_probabilities(d, rng):
    d.proximal_logprobs = np.minimum(d.proximal_logprobs, -1e-3)


@pytest.mark.parametrize("falloff", ["exponential", "linear"])
def test_steer_is_the_papers(falloff):
    method = steer_entropy(least_weight=0.7, falloff=falloff)
    check(method, partial(steer_loss, falloff=falloff), prepare=with_probabilities)


def test_steer_at_k_0_is_grpo_with_clip_higher_a_dual_clip_and_a_token_mean():
    d = ragged(3, spread=1.0)
    plain = grpo(clip_high=0.28, dual_clip=10.0).with_(aggregate=aggregates.token_mean)
    expected, g_expected = run(plain, d)
    value, gradients = run(steer_entropy(least_weight=1.0), d)
    assert value == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(gradients["logprobs"], g_expected["logprobs"], atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [((0, 1, 2, 4), (1.2, 1.1, 1.0, 0.8)), ((2, 2, 2, 2), (1.0, 1.0, 1.0, 1.0))],
)
def test_linear_weights_are_those_of_the_released_code(sizes, weights):
    d = ragged(4, n=1, g=4, t=1)
    d.members[:], d.mask[:] = True, True
    d.proximal_logprobs[:] = d.sampler_logprobs[:] = np.log(0.5)
    d.rollout_entropy[0, :, 0] = np.array(sizes) / 0.5 + np.log(2)
    advantage = weigh_by_entropy_change(0.8, 1.2, 0.02, "linear")
    got, _, _ = advantage.apply(jnp.ones((1, 4)), as_batch(d), ())
    np.testing.assert_allclose(got[0, :, 0], weights, rtol=1e-5)


# ---------------------------------------------------------------- VERL


def rank_of(states):
    if len(states) < 2:
        return 0.0
    values = np.linalg.svd(states - states.mean(0), compute_uv=False)
    shares = values / (values.sum() + 1e-8)
    return np.exp(-(shares * np.log(shares + 1e-8)).sum())


@pytest.mark.parametrize(("length", "width"), [(11, 4), (6, 9)])
def test_running_ranks_are_those_of_the_states_drawn_so_far(length, width):
    rng = np.random.default_rng(length)
    hidden = rng.normal(size=(length, width)).astype(np.float32)
    mask = rng.random(length) < 0.8
    got = jax.jit(lambda h, m: running_ranks(h, m, 2))(jnp.asarray(hidden), jnp.asarray(mask))
    live = hidden[mask].astype(np.float64)
    expected = np.zeros(length)
    for k, t in enumerate(np.flatnonzero(mask), start=1):
        first = 2 * ((k - 1) // 2) + 1 if k > 2 else 0
        expected[t] = rank_of(live if k == len(live) else live[:first])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def changes(ranks, stride):
    """(rank, mean velocity, mean acceleration) of one completion's live tokens."""
    m = ranks[stride::stride]
    v = [m[j] - np.mean(m[:j]) for j in range(1, len(m))]
    a = np.diff(v)
    return np.array([ranks[-1], np.mean(v) if v else 0.0, np.mean(a) if len(a) else 0.0])


@pytest.mark.parametrize("fading", [False, True])
def test_the_bonus_is_the_papers(fading):
    d = ragged(2, 3, 4, 9)
    d.running_rank = 3 + numbers(np.random.default_rng(0), *d.mask.shape)
    advantages = numbers(np.random.default_rng(1), 3, 4)
    means = np.array([2.5, 0.3, -0.2])
    state = RankState(jnp.asarray(means, jnp.float32), jnp.float32(0.4), jnp.int32(7))
    transform = rank_bonus(2, gain=1.5, kappa=2.0, rate=0.3, fading=fading)
    got, _, after = jax.jit(transform.apply)(
        jnp.asarray(advantages, jnp.float32), as_batch(d), state
    )
    changes_so_far = []
    for n, i, places in sequences(d):
        rank_changes = changes(d.running_rank[n, i, places], 2)
        changes_so_far.append(rank_changes)
        rank, velocity, acceleration = np.clip(
            (rank_changes - means) / (np.abs(means) + 1e-8), -5, 5
        )
        beta = 1 / (1 + np.exp(-1.5 * acceleration))
        aux = beta * np.tanh(rank) + (1 - beta) * np.tanh(velocity)
        aux *= 1 - 1.4 / 2 if fading else 1
        a = advantages[n, i]
        assert float(got[n, i]) == pytest.approx(a + min(max(aux, 0), abs(a) / 2), abs=1e-4)
    np.testing.assert_allclose(
        after.means, means + 0.3 * (np.mean(changes_so_far, 0) - means), rtol=1e-4
    )
    score = np.mean([d.rewards[n, i] for n, i, _ in sequences(d)])
    assert float(after.score) == pytest.approx(0.4 + 0.3 * (score - 0.4), rel=1e-4)
    # The bonus never exceeds its part of the advantage.
    assert (np.abs(np.asarray(got) - advantages) <= np.abs(advantages) / 2 + 1e-6).all()


def test_the_first_step_of_verl_is_grpo():
    def loss(d, frozen):
        a = standard_score(d)

        def of_token(n, i, t):
            gap = d.ref_logprobs[n, i, t] - d.logprobs[n, i, t]
            return clipped_loss(ratio(d, (n, i, t)), a[n, i]) + 0.1 * (np.exp(gap) - gap - 1)

        return mean_over(d, of_token)

    def with_ranks(d, rng):
        d.running_rank = np.abs(numbers(rng, *d.mask.shape))

    check(verl_effective_rank(stride=2, kl_coef=0.1), loss, prepare=with_ranks)
