"""Demonstrations beside own samples against float64 references, and what papers state."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    as_batch,
    check,
    clipped_loss,
    loss_and_gradient,
    mean_over,
    members_of,
    numbers,
    ragged,
    ratio,
    rewritten,
    run,
    sequences,
    standard_score,
    tokens_of,
)

from jrl.methods import get_method
from jrl.methods.base import normalised
from jrl.objectives import ratios
from jrl.zoo.methods.demonstrations import (
    Balance,
    balanced,
    beside,
    expert_weights,
    imitate_unsolved,
    imitated,
)

SHAPE = {"g": 4, "demonstrations": 1}
DEMONSTRATION = 3  # the demonstration's place in a group of four


def own_members(d, n):
    return [i for i in range(DEMONSTRATION) if d.members[n, i]]


def mean(rows):
    return sum(rows) / max(len(rows), 1)


def grpo_rows(d):
    alone = types.SimpleNamespace(**vars(d))
    alone.members = d.members & (np.arange(4) != DEMONSTRATION)
    a = standard_score(alone)

    def row(n, i, tokens):
        return np.mean([clipped_loss(ratio(d, (n, i, t)), a[n, i]) for t in tokens])

    return [row(*sequence) for sequence in sequences(d) if sequence[1] != DEMONSTRATION]


def nll_rows(d, prompts=None):
    demonstrations = [row for row in sequences(d) if row[1] == DEMONSTRATION]
    return [
        -np.mean([d.logprobs[n, i, t] for t in tokens])
        for n, i, tokens in demonstrations
        if prompts is None or n in prompts
    ]


def write_steps(d, rng):
    """A demonstration has a token, if perhaps none that is trained on."""
    d.lengths[:, DEMONSTRATION] = np.maximum(d.lengths[:, DEMONSTRATION], 1)


def binary(d, rng):
    write_steps(d, rng)
    d.rewards = (rng.random(d.rewards.shape) < 0.4).astype(np.float64)
    d.rewards[0, :DEMONSTRATION] = 0  # an unsolved prompt
    d.members[0] = True


# ---------------------------------------------------------------- ReLIFT


def unsolved(d):
    members = {n: own_members(d, n) for n in range(len(d.rewards))}
    return {n for n in members if members[n] and max(d.rewards[n, i] for i in members[n]) <= 0}


def test_relift_is_grpo_and_sft_where_nothing_was_right():
    def reference(d, frozen):
        return mean(grpo_rows(d)) + 0.7 * mean(nll_rows(d, unsolved(d)))

    check(get_method("relift", sft_coef=0.7), reference, prepare=binary, n=4, **SHAPE)


def test_relift_with_every_prompt_solved_is_grpo_on_the_own_samples():
    d = ragged(3, **SHAPE)
    write_steps(d, None)
    d.rewards = np.abs(d.rewards) + 0.5
    d.members[:, :DEMONSTRATION] = True
    alone = types.SimpleNamespace(**vars(d))
    alone.members = d.members & (np.arange(4) != DEMONSTRATION)
    alone.live = d.mask & alone.members[..., None]
    (one, a), (other, b) = run(get_method("relift"), d), run(get_method("grpo"), alone)
    assert one == pytest.approx(other, rel=1e-5)
    np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-6)
    assert not a["logprobs"][:, DEMONSTRATION].any()


def test_relift_with_no_prompt_solved_is_sft_on_the_demonstrations():
    d = ragged(4, **SHAPE)
    write_steps(d, None)
    d.rewards[:] = 0
    d.members[:] = True
    d.live = d.mask
    value, gradients = run(get_method("relift"), d)
    assert value == pytest.approx(mean(nll_rows(d)), rel=1e-5)
    assert not gradients["logprobs"][:, :DEMONSTRATION].any()


# ---------------------------------------------------------------- AMFT


def test_amft_is_a_balance_of_grpo_and_sft():
    def reference(d, frozen):
        return 0.7 * mean(grpo_rows(d)) + 0.3 * mean(nll_rows(d))

    check(get_method("amft", initial=0.3), reference, prepare=write_steps, **SHAPE)


def test_amft_leans_to_imitation_when_entropy_is_below_its_target():
    d = ragged(5, **SHAPE)
    write_steps(d, None)
    d.rollout_entropy[:] = 0.5
    method = get_method("amft", initial=0.3, entropy_rate=0.2, target_entropy=1.5)
    stats = {"logprobs": d.logprobs.astype(np.float32)}
    value, _ = loss_and_gradient(method, as_batch(d), stats)
    assert value == pytest.approx(0.5 * mean(grpo_rows(d)) + 0.5 * mean(nll_rows(d)), rel=1e-5)


# ---------------------------------------------------------------- Auto-CEI


def test_auto_cei_is_sft_on_all_samples_and_a_resampled_group_less_the_wrong_ones():
    def reference(d, frozen):
        rows, weights = [], []
        for n, i, tokens in sequences(d):
            live = [j for j in range(4) if d.members[n, j] and tokens_of(d, n, j)]
            odds = {j: np.exp(d.rewards[n, j] / 0.5) for j in live}
            weights.append((len(live) * odds[i] / sum(odds.values()) + 1) * (d.rewards[n, i] > -1))
            rows.append(-weights[-1] * np.mean([d.logprobs[n, i, t] for t in tokens]))
        return sum(rows) / sum(weights)

    def some_wrong(d, rng):
        d.rewards = np.where(rng.random(d.rewards.shape) < 0.3, -1.0, np.tanh(d.rewards))
        d.rewards = d.rewards.astype(np.float32).astype(np.float64)

    check(get_method("auto_cei", temperature=0.5), reference, prepare=some_wrong)


def test_auto_cei_with_equal_rewards_is_sft():
    d = ragged(6)
    d.rewards[:] = 0.3
    methods = get_method("auto_cei"), get_method("sft", weigh="sequences")
    (one, a), (other, b) = (run(method, d) for method in methods)
    assert one == pytest.approx(other, rel=1e-6)
    np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-7)


def test_auto_cei_rewards_a_refusal_by_the_reasoning_before_it():
    rewards = partial(rewritten, get_method("auto_cei", depth=4.0, slope=0.5))
    rollout = types.SimpleNamespace(mask=np.arange(8) < np.array([[[4], [8], [2], [3]]]))
    right = np.array([[1.0, 0.0, 0.0, np.nan]])
    refusals, steps = np.array([[0.0, 1.0, 0.0, 0.0]]), np.array([[9.0, 2.0, 9.0, 9.0]])
    only = rewards(right[..., None], rollout)
    np.testing.assert_array_equal(only[..., 0], [[1, -1, -1, np.nan]])
    refusal = lambda d: 2 / (1 + np.exp(-0.5 * (d - 4.0))) - 1  # noqa: E731
    by_tokens = rewards(np.stack([right, refusals], -1), rollout)
    np.testing.assert_allclose(by_tokens[..., 0], [[1, refusal(8), -1, np.nan]])
    assert not by_tokens[..., 1:].any()
    by_steps = rewards(np.stack([right, refusals, steps], -1), rollout)
    np.testing.assert_allclose(by_steps[..., 0], [[1, refusal(2), -1, np.nan]])


# ---------------------------------------------------------------- pairs


def pair_of(d, n, scores):
    """(chosen, rejected) of a group, or None; ties fall to the larger tie-breaker."""
    live = [i for i in range(d.members.shape[1]) if d.members[n, i] and tokens_of(d, n, i)]
    if not live or max(scores[n, i] for i in live) == min(scores[n, i] for i in live):
        return None
    tie_breaker = d.ids["tie_breaker"][n]
    best = max(live, key=lambda i: (scores[n, i], tie_breaker[i]))
    return best, max(live, key=lambda i: (-scores[n, i], tie_breaker[i]))


def pair_mean(d, scores, loss):
    """The mean over groups that are trained on, those with a pair."""
    pairs = [(n, pair_of(d, n, scores)) for n in range(len(scores))]
    return mean([loss(n, *pair) for n, pair in pairs if pair])


def dpo(d, beta):
    def h(n, i):
        return sum(d.logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in tokens_of(d, n, i))

    return lambda n, w, l: np.log1p(np.exp(-beta * (h(n, w) - h(n, l))))


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_redi_pushes_the_rejected_trace_down_less_than_the_chosen_one_up(gamma):
    def reference(d, frozen):
        def m(d, n, i):
            return np.mean([d.logprobs[n, i, t] for t in tokens_of(d, n, i)])

        def loss(n, w, l):
            weight = 0.6 * np.exp(gamma * min(m(frozen, n, l), 0))
            return -m(d, n, w) + weight * m(d, n, l)

        return pair_mean(d, d.rewards, loss)

    check(get_method("redi", alpha=0.6, gamma=gamma), reference)


def test_redi_without_rejected_traces_is_sft_on_the_chosen_ones():
    d = ragged(7, g=2)
    d.members[:], d.mask[..., 0] = True, True
    d.live = d.mask
    d.rewards[:] = [1, 0]
    value, gradients = run(get_method("redi", alpha=0.0), d)
    chosen = types.SimpleNamespace(**vars(d))
    chosen.members = d.members & (np.arange(2) == 0)
    chosen.live = d.mask & chosen.members[..., None]
    other, slopes = run(get_method("sft", weigh="sequences"), chosen)
    assert value == pytest.approx(other, rel=1e-6)
    np.testing.assert_allclose(gradients["logprobs"], slopes["logprobs"], atol=1e-7)


def test_spin_is_dpo_on_the_demonstration_and_an_own_sample():
    def reference(d, frozen):
        demonstrated = np.broadcast_to(np.arange(4) == DEMONSTRATION, d.rewards.shape) * 1.0
        return pair_mean(d, demonstrated, dpo(d, 0.2))

    check(get_method("spin", beta=0.2), reference, **SHAPE)
    d = ragged(8, g=2, demonstrations=1)
    d.rewards[:] = [0, 1]
    (one, a), (other, b) = run(get_method("spin"), d), run(get_method("dpo", beta=0.1), d)
    assert one == pytest.approx(other, rel=1e-6)
    np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-7)


def test_spin_renews_its_reference():
    schedule = get_method("spin", iteration=7).schedule
    assert [each.frozen for each in schedule.after] == [{"ref"}, frozenset()]
    assert all([s for s in range(15) if each.due(s)] == [7, 14] for each in schedule.after)
    assert get_method("spin").objective.frozen == {"ref"}


@pytest.mark.parametrize("filtered", [True, False])
def test_self_reinforcement_prefers_the_own_answer(filtered):
    def reference(d, frozen):
        without = types.SimpleNamespace(**vars(d))
        without.members = d.members.copy()
        for n, i in np.ndindex(d.members.shape):
            beats = not d.members[n, DEMONSTRATION] or d.rewards[n, i] > d.rewards[n, DEMONSTRATION]
            if filtered and i != DEMONSTRATION and not beats:
                without.members[n, i] = False
        sampled = np.broadcast_to(np.arange(4) != DEMONSTRATION, d.rewards.shape) * 1.0
        return pair_mean(without, sampled, dpo(d, 0.3))

    method = get_method("self_reinforcement", beta=0.3, filtered=filtered)
    check(method, reference, prepare=write_steps, **SHAPE)


def test_unfiltered_self_reinforcement_is_spin_with_the_sides_exchanged():
    """softplus(x) - softplus(-x) is x: the two losses differ by the margin itself."""
    d = ragged(9, g=2, demonstrations=1)
    d.members[:], d.mask[..., 0] = True, True
    d.live = d.mask
    one, a = run(get_method("self_reinforcement", filtered=False), d)
    other, b = run(get_method("spin"), d)
    gaps = ((d.logprobs - d.ref_logprobs) * d.live).sum(2)
    assert one - other == pytest.approx(0.1 * (gaps[:, 1] - gaps[:, 0]).mean(), rel=1e-4)
    sign = np.where(np.arange(2) == 1, 0.1, -0.1)[:, None] / len(gaps)
    np.testing.assert_allclose(
        (a["logprobs"] - b["logprobs"])[d.live], (sign * d.live)[d.live], atol=1e-6
    )


# ---------------------------------------------------------------- RL-PLUS


def with_uniform(d, rng):
    d.uniform_probability = np.full(d.mask.shape, 1 / 64)
    d.logprobs = np.minimum(d.logprobs, -0.01).astype(np.float32).astype(np.float64)


def centred(d, n, i, pool_members, normalise):
    """The advantage of member i when the members ``pool_members`` make the statistics."""
    if len(pool_members) < 2:
        return 0.0
    group = [d.rewards[n, j] for j in pool_members]
    a = d.rewards[n, i] - np.mean(group)
    return a / ((np.std(group, ddof=1) or 1.0) + 1e-6) if normalise else a


def rl_plus_loss(d, frozen, pool="group", gamma=0.5, normalise=False, clip=False, coef=0.001):
    total, entropy = 0.0, []
    for n, i, tokens in sequences(d):
        entropy += [d.entropy[n, i, t] for t in tokens]
        external = d.external[n].max(axis=-1) > 0
        pool_members = [j for j in members_of(d, n) if pool == "group" or not external[j]]
        a = centred(d, n, i, pool_members, normalise)
        for t in tokens:
            at = (n, i, t)
            if d.external[at]:
                now, old = np.exp(d.logprobs[at]), np.exp(d.proximal_logprobs[at])
                omega = old / 2 + d.uniform_probability[at] / 2
                total -= 2 * now / (omega + old) * a * (1 - np.exp(frozen.logprobs[at])) ** gamma
            else:
                total += clipped_loss(ratio(d, at), a) if clip else -ratio(d, at) * a
    total /= 7 * max(len(sequences(d)), 1)
    return total - coef * sum(entropy) / max(len(entropy), 1)


RL_PLUS = get_method("rl_plus", max_tokens=7)
THREE = ((0, 0.3), (1, 0.05), (2, 2.0))


def test_rl_plus_is_the_released_codes():
    wrt = ("logprobs", "entropy")
    check(RL_PLUS, rl_plus_loss, wrt=wrt, prepare=with_uniform, demonstrations=1, batches=THREE)


@pytest.mark.parametrize("pool", ["group", "own"])
def test_rl_plus_clipped_and_normalised(pool):
    def loss(d, frozen):
        return rl_plus_loss(d, frozen, pool, 1.0, True, True, 0.0)

    coefficients = {"focus": 1.0, "normalise": True, "clipped": True, "entropy_coef": 0.0}
    method = get_method("rl_plus", max_tokens=7, pool=pool, **coefficients)
    check(method, loss, prepare=with_uniform, demonstrations=1, g=5, batches=THREE)


def test_rl_plus_without_demonstrations_is_dr_grpo():
    d = ragged(1)
    with_uniform(d, np.random.default_rng(0))
    method = get_method("rl_plus", max_tokens=7, clipped=True, entropy_coef=0.0)
    ours, theirs = run(method, d), run(get_method("dr_grpo", max_tokens=7), d)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"], atol=1e-7)


def test_the_uniform_probability_is_one_over_the_vocabulary():
    (statistic,) = RL_PLUS.objective.statistics
    distributions = {"policy": numbers(np.random.default_rng(0), 50)}
    assert float(statistic.apply(distributions, 3)) == pytest.approx(1 / 50)
    (statistic,) = get_method("rl_plus", max_tokens=7, outside="one").objective.statistics
    assert float(statistic.apply(distributions, 3)) == 1


# ---------------------------------------------------------------- Critique-GRPO


PLAIN = {"max_tokens": 7, "entropy_coef": 0.0}


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
    method = get_method("critique_grpo", gamma=0.3, refinements=1, **PLAIN)
    assert method.draw.demonstrations == 1
    check(method, critique_loss, demonstrations=1)

    def with_bonus(d, frozen):
        return critique_loss(d, frozen) - 0.001 * mean_over(d, lambda *at: d.entropy[at], "tokens")

    method = get_method("critique_grpo", max_tokens=7, gamma=0.3, refinements=1)
    check(method, with_bonus, wrt=("logprobs", "entropy"), demonstrations=1)


def test_without_refinements_it_is_dr_grpo_without_clipping():
    d = ragged(2)
    d.external[:] = 0
    value, _ = run(get_method("critique_grpo", **PLAIN), d)
    assert value == pytest.approx(critique_loss(d, d), rel=1e-5)


def test_on_policy_critique_grpo_is_reinforce_against_the_groups_mean():
    d = ragged(3)
    d.logprobs = d.sampler_logprobs.copy()
    gradient = run(get_method("critique_grpo", **PLAIN), d)[1]["logprobs"]
    for n, i, ts in sequences(d):
        a = d.rewards[n, i] - np.mean([d.rewards[n, j] for j in members_of(d, n)])
        expected = -a / 7 / len(sequences(d))
        np.testing.assert_allclose(gradient[n, i, ts], expected, atol=1e-6)


# ---------------------------------------------------------------- weights


GRPOS = normalised(1e-6, 1)


def small(rewards, members, mask=None):
    """Groups of three with two tokens each, the numbers and the record."""
    d = ragged(0, 3, 3, 2)
    d.lengths[:], d.rewards, d.members = 2, np.array(rewards), np.array(members, bool)
    d.mask = np.ones((3, 3, 2), bool) if mask is None else mask
    return d


@pytest.fixture(scope="module")
def batch():
    """Three prompts of two own samples and a demonstration; the second demonstration is absent."""
    d = small([[0, 0, 1.0], [0, 0, 1], [1, 0, 1]], [[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    d.mask[0, 0, 1] = False
    d.external[:, 2] = 1
    d.rollout_entropy = np.where(d.external > 0, 9.0, 0.5)
    return as_batch(d)


def test_only_demonstrations_of_unsolved_prompts_are_imitated(batch):
    values, after, _ = imitate_unsolved(GRPOS, coef=0.5).apply(batch.score(), batch, ())
    assert after.members.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    # Seven sequences take part, one of them a demonstration: 1/7 of the mean times 0.5 * 7.
    assert values[0, 2] == pytest.approx(0.5 * 7)
    deviation = 0.5**0.5
    expected = np.array([0.5, -0.5]) / (deviation + 1e-6) * 7 / 6
    np.testing.assert_allclose(values[:, :2], [[0, 0], [0, 0], expected], rtol=1e-5)


def test_a_score_up_to_the_bar_does_not_solve_a_prompt(batch):
    apply = jax.jit(imitate_unsolved(GRPOS, right=1.0).apply)
    _, after, _ = apply(batch.score(), batch, ())
    assert np.asarray(after.members)[2, 2]


def test_the_balance_weighs_both_kinds_by_their_own_means(batch):
    transform = balanced(GRPOS, Balance(initial=0.25, rate=0.0, entropy_rate=0.0))
    values, after, _ = transform.apply(batch.score(), batch, transform.init())
    assert after.members.tolist() == batch.members.tolist()
    assert values[0, 2] == values[2, 2] == pytest.approx(0.25 * 8 / 2)
    assert values[2, 0] == pytest.approx(0.75 * 8 / 6 * 0.5 / (0.5**0.5 + 1e-6))


def test_the_balance_follows_utility_and_entropy(batch):
    """Three steps of the written rule; the demonstrations' entropy and scores are not looked at."""
    control = Balance(initial=0.4, rate=0.01, entropy_rate=0.1, target_entropy=0.9)
    transform = balanced(GRPOS, control)
    state, mu, change, before = transform.init(), 0.4, 0.0, None
    for rewards in ([0, 0, 0.0], [0, 1, 0], [1, 1, 0]):
        scores = jnp.asarray([[r, r, 7.0] for r in rewards], jnp.float32)
        _, _, state = transform.apply(scores, batch, state)
        utility = np.mean(rewards)
        gain = 0 if before is None else utility - before
        step = 0.01 * gain * change / (change**2 + 1e-4) + 0.1 * (0.9 - 0.5)
        new = min(max(mu + step, 0.05), 0.95)
        mu, change, before = new, new - mu, utility
        assert state.mu == pytest.approx(mu, rel=1e-5)
    assert state.steps == 3


def test_the_first_step_s_entropy_is_the_target(batch):
    transform = balanced(GRPOS, Balance(initial=0.5, entropy_rate=1.0))
    _, _, state = transform.apply(batch.score(), batch, transform.init())
    assert (state.target, state.mu) == (0.5, 0.5)
    lower = batch.replace(
        stats=batch.stats | {"rollout_entropy": 0 * batch.stats["external"] + 0.4}
    )
    _, _, state = transform.apply(batch.score(), lower, state)
    assert state.mu == pytest.approx(0.6)


def test_the_balance_stays_within_its_bounds(batch):
    transform = balanced(GRPOS, Balance(entropy_rate=100.0, target_entropy=1e4))
    _, _, state = transform.apply(batch.score(), batch, transform.init())
    assert state.mu == pytest.approx(0.95)


def test_expert_weights_are_expected_counts_of_a_resampled_group():
    rewards = [[1.0, 0, 5], [1, 1, -1], [1, 1, 1]]
    d = small(rewards, [[1, 1, 1], [0, 1, 1], [0, 0, 0]])
    d.mask[0, 2] = False
    batch = as_batch(d)
    values, _, _ = expert_weights(0.5).apply(batch.score(), batch, ())
    far, near = np.exp(2 / 0.5), np.exp(1 / 0.5)
    counts = np.array([[2 * near, 2, 0], [0, 0, 0], [0, 0, 0]]) / (near + 1)
    counts[1, 1] = 2 * far / (far + 1)
    expected = counts + np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    np.testing.assert_allclose(values, expected * 4 / expected.sum(), rtol=1e-5)


def test_demonstrations_have_no_ratio():
    """Neither loss nor metrics read the sampler's log-probability there."""
    inner = ratios.clipped_ratio()
    stats = {
        "logprobs": jnp.array([-1.0, -2.0, -0.5]),
        "sampler_logprobs": jnp.array([-1.5, 0.0, 0.0]),
        "external": jnp.array([0.0, 1.0, 1.0]),
    }
    advantages, mask = jnp.array([1.0, 3.0, 0.0]), jnp.ones(3, bool)
    losses, metrics = beside(inner, imitated).apply(stats, advantages, mask)
    np.testing.assert_allclose(losses, [-1.2, 6.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"], [np.exp(0.5), 1, 1], rtol=1e-6)
