"""The methods of batch_statistics.py against loops written from their papers."""

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
    mean_over,
    members_of,
    ragged,
    ratio,
    run,
    sequences,
    standard_score,
)

from jrl.errors import UserError
from jrl.methods.group_relative import grpo
from jrl.objectives import aggregates, compute_advantages, ratios, transforms
from jrl.types import Objective
from jrl.zoo.methods.batch_statistics import (
    Quantiles,
    brpo,
    bundled_risk,
    by_prompt,
    centre_in_group_scale_by_batch,
    concise_r,
    leave_out_solved,
    riskpo,
    scale_rl,
    spo,
    track_quantiles,
    tracked_baseline,
)

# ---------------------------------------------------------------- SPO


def spo_loss(d, frozen):
    gaps = d.rewards - 0.5
    live = gaps[d.members]
    deviation = np.sqrt(np.square(live - live.mean()).sum() / max(len(live) - 1, 1) + 1e-8)
    a = (gaps - live.mean()) / deviation

    def of_token(*at):
        return clipped_loss(ratio(d, at), a[at[:2]], 0.2, 0.28, 10.0)

    return mean_over(d, of_token, "tokens")


def test_spo_is_the_papers():
    check(spo(slots=8), spo_loss, binary=True)


def test_the_baseline_is_that_of_a_beta_distribution_before_the_batch():
    d = ragged(0, 4, 3, 1, binary=True)
    d.members[:] = True
    d.members[3] = False
    d.ids["prompt"] = np.array([5, 9, 5, 7])  # one prompt twice, and one nobody answered
    transform = tracked_baseline(slots=16, keep=0.9)
    state = transform.init()
    apply = jax.jit(transform.apply)
    alpha, beta = dict.fromkeys((5, 9), 0.5), dict.fromkeys((5, 9), 0.5)
    for step in range(4):
        d.rewards = np.random.default_rng(step).integers(0, 2, (4, 3)).astype(float)
        got, _, state = apply(jnp.asarray(d.rewards, jnp.float32), as_batch(d), state)
        value = {p: alpha[p] / (alpha[p] + beta[p]) for p in alpha}
        expected = d.rewards - np.array([value[5], value[9], value[5], 0])[:, None]
        expected[3] = 0
        np.testing.assert_allclose(got, expected, atol=1e-6)
        for p, rows in ((5, [0, 2]), (9, [1])):
            r = d.rewards[rows].ravel()
            alpha[p], beta[p] = 0.9 * alpha[p] + r.sum(), 0.9 * beta[p] + (1 - r).sum()
    assert set(np.asarray(state.ids).tolist()) >= {5, 9}
    assert 7 not in np.asarray(state.ids)


def test_without_forgetting_the_baseline_is_the_mean_of_earlier_rewards_and_the_prior():
    d = ragged(1, 1, 1, 1)
    d.members[:] = True
    transform = tracked_baseline(slots=1, keep=1.0, prior=0.25)
    apply, state, rewards_so_far = jax.jit(transform.apply), transform.init(), [0.25]
    for r in (1.0, 0.0, 3.0, -2.0):
        got, _, state = apply(jnp.full((1, 1), r), as_batch(d), state)
        assert float(got[0, 0]) == pytest.approx(r - np.mean(rewards_so_far), abs=1e-6)
        rewards_so_far.append(r)


# ---------------------------------------------------------------- ScaleRL


def scale_rl_loss(d, frozen, cap=1.2):
    prompts = []
    for n in range(len(d.rewards)):
        group = [d.rewards[n, i] for i in members_of(d, n)]
        if len(group) > 1 and np.ptp(group) > 0 and d.live[n].any():
            prompts.append(n)
    means = {n: np.mean([d.rewards[n, i] for i in members_of(d, n)]) for n in prompts}
    used = [d.rewards[n, i] - means[n] for n in prompts for i in members_of(d, n)]
    total = 0.0
    for n in prompts:
        tokens = [(n, i, t) for m, i, places in sequences(d) if m == n for t in places]
        for at in tokens:
            a = (d.rewards[at[:2]] - means[n]) / (np.std(used, ddof=1) + 1e-6)
            weight = min(ratio(frozen, at), cap)
            total -= weight * a * d.logprobs[at] / len(tokens)
    return total / max(len(prompts), 1)


def test_scale_rl_is_the_papers():
    check(scale_rl(cap=1.2, slots=8), scale_rl_loss, n=4)


def test_the_deviation_is_that_of_the_advantages():
    """Section 4 of the paper: A over the standard deviation of all A of the batch."""
    d = ragged(0, 2, 4, 1)
    d.members[:], d.mask[:] = True, True
    d.rewards = np.array([[1.0, 1, 1, 0], [0, 0, 0, 1]])
    scale = centre_in_group_scale_by_batch(eps=0.0)
    got, *_ = scale.apply(jnp.asarray(d.rewards, jnp.float32), as_batch(d), ())
    few, much = 0.54006, 1.62019
    expected = [[few, few, few, -much], [-few, -few, -few, much]]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_a_prompt_that_is_nearly_always_solved_leaves_the_loss_for_good():
    d = ragged(2, 2, 4, 1)
    d.members[:], d.mask[:] = True, True
    d.ids["prompt"] = np.array([3, 4])
    transform = leave_out_solved(slots=8, rate=0.75)
    apply, state, left = jax.jit(transform.apply), transform.init(), []
    for right in ([4, 3], [2, 3], [0, 4], [0, 0]):
        d.rewards = (np.arange(4) < np.array(right)[:, None]).astype(float)
        _, batch, state = apply(jnp.asarray(d.rewards, jnp.float32), as_batch(d), state)
        left.append(np.asarray(batch.mask).any(axis=(1, 2)).tolist())
    # In the second step both are above three quarters on what came before, and so they stay out.
    assert left == [[True, True], [False, False], [False, False], [False, False]]


def test_a_prompt_with_longer_completions_weighs_no_more():
    d = ragged(7)
    method = scale_rl()._replace(
        objective=Objective(
            transforms.identity(), by_prompt(ratios.nll()), aggregates.sequence_mean
        )
    )
    _, gradients = run(method, d)
    tokens = d.live.sum(axis=(1, 2), keepdims=True)
    each = -1.0 * d.live / np.maximum(tokens, 1) / (tokens > 0).sum()
    np.testing.assert_allclose(gradients["logprobs"], each, atol=1e-6)
    assert len(set(tokens.ravel().tolist())) > 1


# ---------------------------------------------------------------- BRPO


def wins(d):
    """{(n, i): 1 or -1} of the members that are trained on."""
    out = {}
    for n in range(len(d.rewards)):
        live = members_of(d, n)
        if not live:
            continue
        j = min(live, key=lambda i: d.ids["tie_breaker"][n, i])
        outcomes = {(n, i): 1 if d.rewards[n, i] > d.rewards[n, j] else -1 for i in live if i != j}
        if abs(sum(outcomes.values())) / len(live) <= 0.6:
            out |= outcomes
    return out


def brpo_loss(d, frozen):
    a = wins(d)
    rows = [(n, i, ts) for n, i, ts in sequences(d) if (n, i) in a]
    total = sum(
        clipped_loss(ratio(d, (n, i, t)), a[n, i]) / len(ts) for n, i, ts in rows for t in ts
    )
    return total / max(len(rows), 1)


BRPO = brpo()


def test_brpo_is_the_papers():
    check(BRPO, brpo_loss, g=6)
    assert BRPO.plan.rounds > 0


def test_an_increasing_function_of_the_scores_changes_nothing():
    d = ragged(1, g=6)
    other = copy.deepcopy(d)
    other.rewards = np.float32(np.exp(2 * d.rewards)).astype(float)
    one, two = run(BRPO, d), run(BRPO, other)
    assert one[0] == two[0]
    assert np.abs(one[1]["logprobs"]).max() > 0
    np.testing.assert_array_equal(one[1]["logprobs"], two[1]["logprobs"])


def test_a_judge_may_have_chosen_the_reference():
    """Whom the judge has no opinion of is not trained on, and scores above 0 are wins."""
    d = ragged(2, n=1, g=5)
    d.members[:] = True
    d.mask[:] = True
    d.rewards[:] = [[1.0, 0.0, -1.0, 1.0, -1.0]]
    d.ids["silent"] = np.array([[0, 1, 0, 0, 0]], np.int32)
    by_judge = brpo(reference="judge")
    apply = jax.jit(partial(compute_advantages, by_judge.objective))
    advantages, batch, *_ = apply(as_batch(d), by_judge.objective.init())
    np.testing.assert_array_equal(advantages[0, :, 0], [1, 0, -1, 1, -1])
    assert batch.members[0].tolist() == [True, False, True, True, True]
    assert (by_judge.lacks, bool(BRPO.lacks)) == ("", True)


def test_another_tie_breaker_draws_another_reference():
    d = ragged(2, n=1, g=4)
    d.members[:] = True
    d.mask[:] = True
    d.rewards[:] = [[3.0, 1.0, 2.0, 2.0]]
    apply = jax.jit(partial(compute_advantages, BRPO.objective))
    # A tie with the reference is no win; all losing to the best are 3 of 4, too skewed.
    for chosen, expected in ((2, [1, -1, 0, -1]), (0, [0, 0, 0, 0])):
        d.ids["tie_breaker"] = np.arange(4)[None] + 9 * (np.arange(4) != chosen)
        advantages, batch, *_ = apply(as_batch(d), BRPO.objective.init())
        np.testing.assert_array_equal(advantages[0, :, 0], expected)
        assert not batch.members[0, chosen]
        assert batch.members.any() == (chosen == 2)


# ---------------------------------------------------------------- ConciseR


def concise_loss(d, frozen, limit=8, scale=0.5, c=0.01):
    rewards = d.rewards.copy()
    for n, row in enumerate(d.members):
        if (d.rewards[n][row] >= 0.5).all():
            rewards[n] += scale * (1 - d.mask[n].sum(-1) / limit)
    a = standard_score(d, rewards)

    def of_token(*at):
        return clipped_loss(ratio(d, at), a[at[:2]], 0.2, 0.28) - c * d.entropy[at]

    return mean_over(d, of_token)


def one_group_right(d, rng):
    d.rewards[:] = rng.integers(0, 2, d.rewards.shape)
    d.rewards[0] = 1.0
    d.members[0] = True


KNOBS = {"max_tokens": 8, "length_scale": 0.5, "entropy_coef": 0.01}


def test_the_concise_stage_is_as_described():
    method = concise_r(stage="concise", **KNOBS)
    check(method, concise_loss, wrt=("logprobs", "entropy"), prepare=one_group_right)
    assert method.plan.rounds == 0


def test_the_reasoning_stage_is_grpo_and_the_concise_one_differs_in_groups_all_right():
    d = ragged(3)
    one_group_right(d, np.random.default_rng(0))
    d.rewards[1:] = [0.0, 1.0, 0.0, 1.0]
    gradients = {
        "grpo": run(grpo(clip_high=0.28), d)[1]["logprobs"],
        "reasoning": run(concise_r(max_tokens=8, entropy_coef=0.0), d)[1]["logprobs"],
        "concise": run(concise_r(max_tokens=8, entropy_coef=0.0, stage="concise"), d)[1][
            "logprobs"
        ],
    }
    np.testing.assert_array_equal(gradients["reasoning"], gradients["grpo"])
    np.testing.assert_array_equal(gradients["concise"][1:], gradients["grpo"][1:])
    assert not gradients["grpo"][0].any()
    assert gradients["concise"][0].any()
    assert concise_r(max_tokens=8).plan.rounds > 0


# ---------------------------------------------------------------- RiskPO


def papers(d, size):
    """[(bundle, [(question, completion), ...])] in the order of the tie-breakers."""
    prompts = [n for n in range(len(d.rewards)) if members_of(d, n)]
    tie_breakers = {
        n: sorted(members_of(d, n), key=lambda i: d.ids["tie_breaker"][n, i]) for n in prompts
    }
    prompts.sort(key=lambda n: d.ids["tie_breaker"][n, tie_breakers[n][0]])
    out = []
    for start in range(0, len(prompts), size):
        questions = prompts[start : start + size]
        for k in range(min(len(tie_breakers[n]) for n in questions)):
            out.append((start, [(n, tie_breakers[n][k]) for n in questions]))
    return out


def risk_advantages(d, size, credit="uniform", tracked=None, a=0.2, b=0.8, w=1.5, shifted=True):
    scores = {}
    for bundle, completions in papers(d, size):
        scores.setdefault(bundle, []).append(sum(d.rewards[at] for at in completions))
    advantages = np.zeros_like(d.rewards)
    for bundle, completions in papers(d, size):
        s, bundle_scores = sum(d.rewards[at] for at in completions), scores[bundle]
        low, high = np.quantile(bundle_scores, a), np.quantile(bundle_scores, b)
        if tracked is not None:
            low, high = (low + tracked[0]) / 2, (high + tracked[1]) / 2
        inside = (max(s - low, 0) - max(s - high, 0) + shifted * (low - high)) / (b - a)
        value = (w * -max(low - s, 0) / a + inside) / (1 + w)
        deviation = np.std(bundle_scores, ddof=1) if len(bundle_scores) > 1 else 0.0
        value /= deviation + 1e-6 if deviation > 0 else 1.0
        groups = {n: [d.rewards[n, j] for j in members_of(d, n)] for n, _ in completions}
        gaps = [d.rewards[at] - np.mean(groups[at[0]]) for at in completions]
        for at, gap in zip(completions, gaps, strict=True):
            part = 1.0
            if credit == "share":
                part = gap / sum(gaps) if abs(sum(gaps)) > 1e-6 else 1 / len(gaps)
            elif credit == "spread":
                spread = np.std(groups[at[0]], ddof=1) if len(groups[at[0]]) > 1 else 0.0
                part = 1 / ((spread if spread > 1e-3 else 1.0) + 1e-6)
            advantages[at] = value * part
    return advantages


def riskpo_loss(credit, shifted):
    """In the first step, in which the tracked quantiles are the bundle's own."""

    def loss(d, frozen):
        a = risk_advantages(d, 2, credit, shifted=shifted)
        of_token = lambda *at: clipped_loss(ratio(d, at), a[at[:2]], dual=3.0)  # noqa: E731
        return mean_over(d, of_token, "tokens")

    return loss


def test_riskpo_is_the_papers():
    check(riskpo(bundle=2), riskpo_loss("share", False), n=5, g=4)
    other = riskpo(bundle=2, credit="uniform", shifted=True, quantiles="mix")
    check(other, riskpo_loss("uniform", True), n=5, g=4, batches=((0, 0.3),))


@pytest.mark.parametrize("credit", ["share", "spread"])
def test_credit_and_the_tracked_quantiles_are_the_papers(credit):
    d = ragged(3, 6, 4)
    transform = bundled_risk(size=2, credit=credit)
    state = Quantiles(jnp.float32(-0.5), jnp.float32(1.0), jnp.int32(3))
    got, _, after = jax.jit(transform.apply)(
        jnp.asarray(d.rewards, jnp.float32), as_batch(d), state
    )
    expected = risk_advantages(d, 2, credit, (-0.5, 1.0))
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-4)
    scores = np.array([sum(d.rewards[at] for at in completions) for _, completions in papers(d, 2)])
    quantiles = [q + 0.1 * (p - (scores < q).mean()) for q, p in ((-0.5, 0.2), (1.0, 0.8))]
    np.testing.assert_allclose([after.low, after.high], quantiles, rtol=1e-5)
    assert int(after.steps) == 4


def test_a_bundle_of_one_question_compares_a_groups_members_alone():
    d = ragged(4, 3, 5)
    d.members[:] = True
    transform = bundled_risk(size=1, quantiles="batch")
    got, *_ = jax.jit(transform.apply)(
        jnp.asarray(d.rewards, jnp.float32), as_batch(d), transform.init()
    )
    for n in range(3):
        r = d.rewards[n]
        low, high = np.quantile(r, [0.2, 0.8])
        inside = (np.maximum(r - low, 0) - np.maximum(r - high, 0) + low - high) / 0.6
        value = (1.5 * -np.maximum(low - r, 0) / 0.2 + inside) / 2.5
        scale = np.std(r, ddof=1) + 1e-6 if np.ptp(r) > 0 else 1.0
        np.testing.assert_allclose(got[n], value / scale, rtol=1e-4, atol=1e-5)


def test_the_tracked_quantiles_settle_on_those_of_the_scores():
    levels, live = (0.2, 0.8), jnp.ones(50, bool)

    def step(state, key):
        scores = 2 + 3 * jax.random.normal(key, (50,))
        return track_quantiles(state, scores, live, levels, 0.1), None

    zero = jnp.float32(0)
    start = Quantiles(zero + 30, zero - 30, jnp.int32(1))
    keys = jax.random.split(jax.random.key(0), 6000)
    end, _ = jax.jit(lambda s: jax.lax.scan(step, s, keys))(start)
    assert float(end.low) == pytest.approx(2 - 3 * 0.8416, abs=0.25)
    assert float(end.high) == pytest.approx(2 + 3 * 0.8416, abs=0.25)


def test_levels_in_the_wrong_order_are_refused():
    with pytest.raises(UserError, match=r"level_low = 0\.9; give a number below objective"):
        riskpo(level_low=0.9)


def test_levels_can_be_swept():
    """Under vmap their order is not known; tracing alone would ask for it."""
    d = ragged(5, 2, 3, 1)
    state = Quantiles(jnp.float32(0.0), jnp.float32(0.4), jnp.int32(3))
    batch, scores = as_batch(d), jnp.asarray(d.rewards, jnp.float32)

    def advantages(low, high):
        method = riskpo(bundle=1, level_low=low, level_high=high, quantiles="batch")
        return method.objective.advantage.apply(scores, batch, state)[0]

    swept = jax.eval_shape(jax.vmap(advantages), jnp.array([0.1, 0.3]), jnp.array([0.8, 0.9]))
    assert swept.shape == (2, *scores.shape)


def test_tracked_quantiles_alone_see_a_bundle_whose_papers_are_all_alike():
    d = ragged(5, 2, 3, 1)
    d.members[:] = True
    d.rewards[:] = 0.25
    state = Quantiles(jnp.float32(0.0), jnp.float32(0.4), jnp.int32(3))
    cases = (("batch", True), ("track", True), ("track", False))
    transforms = [bundled_risk(size=1, quantiles=q, shifted=shifted) for q, shifted in cases]
    scores = jnp.asarray(d.rewards, jnp.float32)
    got = jax.jit(lambda b: [x.apply(scores, b, state)[0] for x in transforms])(as_batch(d))
    for values, expected in zip(got, (0.0, -0.15 / 0.6 / 2.5, 0.25 / 0.6 / 2.5), strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-6)
