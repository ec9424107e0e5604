"""Kimi k1.5, CoPG, FoR, OREO and ROVER against loops from their papers."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import as_batch, check, members_of, numbers, ragged, run, sequences, tokens_of

from jrl.methods import get_method
from jrl.methods.policy_gradient import rloo
from jrl.objectives import compute_advantages
from jrl.zoo.methods.mirror_descent import LEVELS, PAPERS_ALPHA, copg, for_flow, kimi_k1_5


def total(d, name, n, i, ts):
    return sum(getattr(d, name)[n, i, t] for t in ts)


def groups(d):
    """{prompt: [(member, tokens)]} of those with a live token."""
    out = {}
    for n, i, ts in sequences(d):
        out.setdefault(n, []).append((i, ts))
    return out


def full(seed, **shape):
    """A batch in which every group has all its members and every member a token."""
    d = ragged(seed, **shape)
    d.members[:] = True
    d.mask[..., 0] = True
    d.live = d.mask & d.members[..., None]
    return d


# ---------------------------------------------------------------- Kimi k1.5


def shaped(d, scale):
    out = d.rewards.copy()
    for n in range(len(out)):
        lengths = [len(tokens_of(d, n, i)) for i in members_of(d, n)]
        if len(set(lengths)) < 2:
            continue
        for i in members_of(d, n):
            span = max(lengths) - min(lengths)
            lam = 0.5 - (len(tokens_of(d, n, i)) - min(lengths)) / span
            out[n, i] += scale * (lam if d.rewards[n, i] >= 0.5 else min(0, lam))
    return out


def kimi_loss(d, frozen, tau=0.3, scale=0.7):
    r, out = shaped(d, scale), 0.0
    for n, i, ts in sequences(d):
        a = r[n, i] - np.mean([r[n, j] for j in members_of(d, n)])
        gap = total(d, "logprobs", n, i, ts) - total(d, "ref_logprobs", n, i, ts)
        out += -a * total(d, "logprobs", n, i, ts) + tau / 2 * gap**2
    return out / max(len(sequences(d)), 1)


def test_kimi_is_the_papers():
    check(kimi_k1_5(tau=0.3, length_scale=0.7), kimi_loss)


def test_kimis_gradient_is_that_of_the_squared_loss():
    d, tau = full(3), 0.3

    def squared(d, frozen):
        out = 0.0
        for n, i, ts in sequences(d):
            a = d.rewards[n, i] - np.mean([d.rewards[n, j] for j in members_of(d, n)])
            gap = total(d, "logprobs", n, i, ts) - total(d, "ref_logprobs", n, i, ts)
            out += (a - tau * gap) ** 2 / (2 * tau)
        return out / len(sequences(d))

    gradient = run(kimi_k1_5(tau=tau, length_scale=0.0), d)[1]["logprobs"]
    for at in np.argwhere(d.live)[::7]:
        up, down = full(3), full(3)
        up.logprobs[tuple(at)] += 1e-5
        down.logprobs[tuple(at)] -= 1e-5
        slope = (squared(up, d) - squared(down, d)) / 2e-5
        assert gradient[tuple(at)] == pytest.approx(slope, abs=1e-5)


def test_at_the_reference_kimi_is_reinforce_against_the_groups_mean():
    d = full(4)
    d.logprobs = d.ref_logprobs.copy()
    gradient = run(kimi_k1_5(length_scale=0.0), d)[1]["logprobs"]
    a = d.rewards - d.rewards.mean(axis=1, keepdims=True)
    expected = np.where(d.live, -a[..., None], 0) / len(sequences(d))
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_kimis_length_reward_starts_when_it_is_told_and_the_reference_is_renewed():
    d = full(5)
    objective = kimi_k1_5(length_start=1).objective
    apply = jax.jit(partial(compute_advantages, objective))
    first, _, state, _ = apply(as_batch(d), objective.init())
    later, *_ = apply(as_batch(d), state)
    for got, r in ((first, d.rewards), (later, shaped(d, 1.0))):
        centred = r - r.mean(axis=1, keepdims=True)
        expected = np.where(d.live, centred[..., None], 0)
        np.testing.assert_allclose(got, expected, atol=1e-5)
    copy, moments = kimi_k1_5(iteration_steps=3).schedule.after
    assert copy.frozen == {"ref"}
    assert moments.frozen == frozenset()
    for each in (copy, moments):
        assert [step for step in range(10) if each.due(step)] == [3, 6, 9]


def test_an_iteration_of_kimi_has_several_steps_by_default():
    """In one of a single update l is 0: tau would be read by nothing, and Adam always be fresh."""
    for each in kimi_k1_5().schedule.after:
        assert not any(bool(each.due(step)) for step in range(1, 5))


# ---------------------------------------------------------------- CoPG


def copg_loss(d, frozen, beta=0.2):
    out = 0.0
    for n, group in groups(d).items():
        pairs = list(itertools.combinations(group, 2))
        for (i, here), (j, other_tokens) in pairs:
            gap = total(d, "logprobs", n, i, here) - total(d, "ref_logprobs", n, i, here)
            gap -= total(d, "logprobs", n, j, other_tokens) - total(
                d, "ref_logprobs", n, j, other_tokens
            )
            out -= (d.rewards[n, i] - d.rewards[n, j] - beta / 2 * gap) * gap / len(pairs)
    return out / max(len(groups(d)), 1)


def test_copg_is_the_papers():
    check(copg(beta=0.2), copg_loss)


def test_copg_on_pairs_is_the_papers():
    check(copg(beta=0.2), copg_loss, g=2, n=5)


def test_on_policy_copg_is_twice_rloo():
    d = full(6)
    d.logprobs = d.sampler_logprobs.copy()
    one = run(copg(beta=0.2), d)[1]["logprobs"]
    two = run(rloo(kl_coef=0.2), d)[1]["logprobs"]
    # rloo is a mean over completions, copg over groups
    assert np.abs(one).max() > 1e-3
    np.testing.assert_allclose(one, 2 * two, atol=1e-5)


def test_on_preferences_copg_is_ipo():
    d, beta = full(7, g=2), 0.4
    d.rewards[:] = [1.0, 0.0]
    ipo = 0.0
    for n, ((i, here), (j, other_tokens)) in groups(d).items():
        gap = total(d, "logprobs", n, i, here) - total(d, "ref_logprobs", n, i, here)
        gap -= total(d, "logprobs", n, j, other_tokens) - total(
            d, "ref_logprobs", n, j, other_tokens
        )
        ipo += (gap - 1 / beta) ** 2 / len(groups(d))
    assert run(copg(beta=beta), d)[0] == pytest.approx(beta / 2 * ipo - 1 / (2 * beta), rel=1e-4)


# ---------------------------------------------------------------- FoR


def for_loss(d, frozen, beta=1.5, floor=0.01):
    out = 0.0
    for n, group in groups(d).items():
        scores = [
            total(d, "logprobs", n, i, ts) - beta * np.log(max(d.rewards[n, i], floor))
            for i, ts in group
        ]
        out += np.mean((np.array(scores) - np.mean(scores)) ** 2)
    return out / max(len(groups(d)), 1)


def test_for_is_the_papers():
    check(for_flow(beta=1.5, floor=0.01), for_loss)


def test_the_loss_is_nothing_where_the_policy_is_proportional_to_the_reward():
    d = full(8)
    d.rewards = np.abs(d.rewards) + 0.5
    for n, i, ts in sequences(d):
        d.logprobs[n, i, ts[0]] += 2 * np.log(d.rewards[n, i]) - total(d, "logprobs", n, i, ts) - 3
    value, gradients = run(for_flow(beta=2.0), d)
    assert abs(value) < 1e-9
    assert np.abs(gradients["logprobs"]).max() < 1e-5


def test_the_gradient_of_for_is_reinforce_on_log_reward_less_log_probability():
    d = full(9)
    d.rewards = np.abs(d.rewards) + 0.5
    gradient = run(for_flow(), d)[1]["logprobs"]
    gain = np.log(d.rewards) - np.where(d.live, d.logprobs, 0).sum(axis=2)
    a = gain - gain.mean(axis=1, keepdims=True)
    expected = np.where(d.live, -2 * a[..., None], 0) / len(sequences(d))
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_a_nan_reward_is_not_raised_to_the_floor():
    d = full(9)
    d.rewards[0, 0] = np.nan
    assert np.isnan(run(for_flow(), d)[0])


# ---------------------------------------------------------------- OREO

BETA = 0.3
OREOS = {level: get_method("oreo", beta=BETA, level=level, kl_coef=0.0) for level in LEVELS}
OREO = OREOS["token"]
ROVER = get_method("rover", scale=0.7)


def oreo_loss(d, frozen, actions=lambda d, n, i, tokens: [[t] for t in tokens]):
    total = 0.0
    for n, i, tokens in sequences(d):
        reward = d.rewards[n, i]
        gap = {t: d.logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in tokens}
        still = {t: frozen.logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in tokens}
        value = [
            (d.values[n, i, t] - reward + BETA * sum(still[k] for k in tokens if k >= t)) ** 2
            for t in tokens
        ]
        policy = []
        for step_tokens in actions(d, n, i, tokens):
            after = sum(still[k] for k in tokens if k > step_tokens[-1])
            error = (
                frozen.values[n, i, step_tokens[0]]
                - reward
                + BETA * (sum(map(gap.get, step_tokens)) + after)
            )
            policy.append(error**2)
        total += np.mean(policy) + np.mean(value)
    return total / max(len(sequences(d)), 1)


def test_oreo_is_the_papers():
    check(OREO, oreo_loss, wrt=("logprobs", "values"))


def test_oreo_takes_a_response_for_an_action():
    def loss(d, frozen):
        return oreo_loss(d, frozen, lambda d, n, i, tokens: [tokens])

    check(OREOS["response"], loss, wrt=("logprobs", "values"), batches=((0, 0.3), (1, 3.0)))


def test_oreo_takes_a_step_for_an_action():
    def steps(d, n, i, tokens):
        labels = d.ids["step"][n, i]
        return [[t for t in tokens if labels[t] == k] for k in sorted({labels[t] for t in tokens})]

    def loss(d, frozen):
        return oreo_loss(d, frozen, steps)

    check(OREOS["step"], loss, wrt=("logprobs", "values"), ids=("step",), batches=((1, 0.3),))


def soft_optimum(d, rng):
    """Values and log-probabilities of the soft-optimal policy along random paths of a tree.

    Backwards from the end: V(s) = beta log sum_a pi_ref(a) exp(Q(s, a) / beta), and the optimal
    policy is pi_ref exp((Q - V) / beta). Q of the action taken is the value after it; the other
    actions lead to leaves of random reward.
    """
    for n, i, tokens in sequences(d):
        after = d.rewards[n, i]
        for t in reversed(tokens):
            chances = rng.dirichlet(np.ones(3))
            q = np.array([after, *rng.normal(size=2)])
            value = BETA * np.log((chances * np.exp(q / BETA)).sum())
            d.ref_logprobs[n, i, t] = np.log(chances[0])
            d.logprobs[n, i, t] = np.log(chances[0]) + (after - value) / BETA
            d.values[n, i, t] = after = value


@pytest.mark.parametrize("level", LEVELS)
def test_oreo_is_zero_at_the_soft_optimum(level):
    d = ragged(1, ids=("step",))
    soft_optimum(d, np.random.default_rng(0))
    loss, slopes = run(OREOS[level], d, ("logprobs", "values"))
    assert loss == pytest.approx(0, abs=1e-9)
    assert max(np.abs(slope).max() for slope in slopes.values()) < 1e-5


def test_oreo_of_one_token_is_the_same_at_every_level():
    d = ragged(1, ids=("step",))
    d.mask[:, :, 1:] = False
    losses = [run(method, d, ("logprobs", "values"))[0] for method in OREOS.values()]
    assert losses[0] > 0
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_the_divergence_from_the_reference_is_the_distributions():
    def with_divergence(d, rng):
        d.reference_divergence = np.abs(numbers(rng, *d.mask.shape))

    def loss(d, frozen):
        rows = [d.reference_divergence[n, i, tokens].mean() for n, i, tokens in sequences(d)]
        return oreo_loss(d, frozen) + 0.2 * sum(rows) / max(len(rows), 1)

    method = get_method("oreo", beta=BETA, kl_coef=0.2)
    wrt = ("logprobs", "reference_divergence")
    check(method, loss, wrt=wrt, prepare=with_divergence, batches=((1, 0.3),))
    (statistic,) = method.objective.statistics
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
    with np.errstate(divide="ignore"):
        distributions = {name: jnp.log(jnp.asarray(x)) for name, x in (("policy", p), ("ref", q))}
    assert float(statistic.apply(distributions, 0)) == pytest.approx(np.log(2), rel=1e-5)
    assert method.objective.frozen == {"ref"}


def test_oreo_holds_the_policy_with_the_papers_coefficient_of_its_level():
    for level, alpha in PAPERS_ALPHA.items():
        method = get_method("oreo", level=level)
        assert method.objective.regularizers[-1].coef(()) == alpha
        assert not method.lacks


# ---------------------------------------------------------------- ROVER


def with_means(d, rng):
    d.distribution_mean = numbers(rng, *d.mask.shape, shift=-3.0)
    d.rollout_distribution_mean = numbers(rng, *d.mask.shape, shift=-3.0)


def centred(d, n, i):
    live = members_of(d, n)
    return d.rewards[n, i] - sum(d.rewards[n, j] for j in live) / len(live)


def rover_loss(d, frozen):
    terms = []
    for n, i, tokens in sequences(d):
        for t, later in zip(tokens, [*tokens[1:], None], strict=True):
            q = 0.7 * (d.logprobs[n, i, t] - d.proximal_logprobs[n, i, t])
            target = centred(d, n, i)
            if later is not None:
                target += 0.7 * (
                    d.distribution_mean[n, i, later] - d.rollout_distribution_mean[n, i, later]
                )
            terms.append((q - target) ** 2)
    return sum(terms) / max(len(terms), 1)


def test_rover_is_the_papers():
    check(ROVER, rover_loss, prepare=with_means)


def test_rover_at_the_start_of_a_step_is_reinforce():
    d = ragged(1)
    with_means(d, np.random.default_rng(0))
    d.logprobs, d.distribution_mean = d.proximal_logprobs.copy(), d.rollout_distribution_mean.copy()
    _, slope = run(ROVER, d)
    for n, i, tokens in sequences(d):
        expected = -2 * 0.7 * centred(d, n, i) / d.live.sum()
        np.testing.assert_allclose(slope["logprobs"][n, i, tokens], expected, atol=1e-6)


def test_rover_is_zero_where_q_meets_its_equation():
    d = ragged(1)
    with_means(d, np.random.default_rng(0))
    for n, i, tokens in sequences(d):
        for t, later in zip(tokens, [*tokens[1:], None], strict=True):
            following = 0.0
            if later is not None:
                following = (
                    d.distribution_mean[n, i, later] - d.rollout_distribution_mean[n, i, later]
                )
            q = centred(d, n, i) / 0.7 + following
            d.logprobs[n, i, t] = d.proximal_logprobs[n, i, t] + q
    loss, slope = run(ROVER, d)
    assert loss == pytest.approx(0, abs=1e-10)
    assert np.abs(slope["logprobs"]).max() < 1e-5


def test_the_mean_over_the_vocabulary_leaves_truncated_tokens_out():
    mean, _ = ROVER.objective.statistics
    logs = jnp.array([-1.0, -jnp.inf, -3.0])
    assert float(mean.apply({"policy": logs}, 0)) == -2.0
