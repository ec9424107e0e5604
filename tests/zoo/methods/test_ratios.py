"""Relatives of GRPO that hold the policy back in other ways, against loops from their papers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    advantages_of,
    as_batch,
    assert_cut,
    assert_matches,
    assert_reinforce_on_policy,
    check,
    clipped_loss,
    log_ratio,
    lower,
    mean_over,
    members_of,
    numbers,
    over_sequences,
    ragged,
    ratio,
    rewritten,
    run,
    sequences,
    standard_score,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.errors import UserError
from jrl.methods import get_method
from jrl.objectives import aggregates, compute_advantages, ratios, transforms
from jrl.types import Objective
from jrl.zoo.methods.ratios import (
    consistent_rewards,
    drop_covariant,
    dynamic_bounds,
    mark_covariant,
    stable_reinforce,
)

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))
few = settings(max_examples=5, deadline=None, derandomize=True)


def luspo_loss(d, frozen):
    def of_sequence(a, places):
        s = np.exp(np.mean([log_ratio(d, at) for at in places]))
        return clipped_loss(s, a, 0.1, 0.2)

    return over_sequences(d, of_sequence, lengths=True)


def sapo_loss(d, frozen, up=1.0, down=1.05):
    def of_sequence(a, places):
        tau = up if a > 0 else down
        gates = [4 / tau / (1 + np.exp(-tau * (ratio(d, at) - 1))) for at in places]
        return -a * sum(gates) / len(gates)

    return over_sequences(d, of_sequence)


def vespo_loss(d, frozen):
    def of_sequence(a, places):
        w = np.clip(sum(log_ratio(frozen, at) for at in places), np.log(1e-8), 20)
        k, rate = (2, 3) if a >= 0 else (3, 2)
        return np.exp(w) ** k * np.exp(rate * (1 - np.exp(w)))

    a = standard_score(d)
    phi = {(n, i): of_sequence(a[n, i], [(n, i, t) for t in ts]) for n, i, ts in sequences(d)}
    return mean_over(d, lambda n, i, t: -phi[n, i] * a[n, i] * d.logprobs[n, i, t], "tokens")


def dppo_loss(kind, limit, cap=2.0):
    def loss(d, frozen):
        a = standard_score(d)

        def of_token(*at):
            p, q = (min(np.exp(x[at]), 1.0) for x in (frozen.logprobs, d.sampler_logprobs))
            divergence = abs(p - q)
            if kind == "kl":
                divergence = q * -log_ratio(frozen, at)
                divergence += (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
            if divergence > limit and (p > q if a[at[:2]] > 0 else p < q):
                return 0.0
            return -min(ratio(frozen, at), cap) * a[at[:2]] * d.logprobs[at]

        return mean_over(d, of_token, "tokens")

    return loss


def covariances(d):
    """{place: C} over the live tokens, by the policy at the start of the step."""
    a = standard_score(d)
    places = [(n, i, t) for n, i, tokens in sequences(d) for t in tokens]
    if not places:
        return {}
    mean_a = np.mean([a[at[:2]] for at in places])
    mean_lp = np.mean([d.proximal_logprobs[at] for at in places])
    return {at: (a[at[:2]] - mean_a) * (d.proximal_logprobs[at] - mean_lp) for at in places}


def clip_cov_loss(d, frozen, low=0.05, high=0.6):
    clipped = {at for at, c in covariances(d).items() if low < c < high}
    a = standard_score(d)

    def of_token(*at):
        return 0.0 if at in clipped else clipped_loss(ratio(d, at), a[at[:2]])

    return mean_over(d, of_token, "tokens")


def kl_cov_loss(d, frozen, fraction=0.3, penalty=0.7):
    c = covariances(d)
    marked = sorted(c, key=c.get, reverse=True)[: max(int(fraction * len(c)), 1)]
    a = standard_score(d)

    def of_token(*at):
        penalised = penalty * abs(log_ratio(d, at)) if at in marked else 0.0
        return -ratio(d, at) * a[at[:2]] + penalised

    return mean_over(d, of_token, "tokens")


def decoupled_loss(cap=np.inf):
    """Behaviour, proximal and current policy, each in its place."""

    def loss(d, frozen):
        a = standard_score(d)

        def of_token(*at):
            weight = np.exp(d.proximal_logprobs[at] - d.sampler_logprobs[at])
            u = np.exp(d.logprobs[at] - d.proximal_logprobs[at])
            return (weight if weight <= cap else 0.0) * clipped_loss(u, a[at[:2]])

        return mean_over(d, of_token, "tokens")

    return loss


def aipo_loss(cap=4.0):
    def loss(d, frozen):
        def of_token(*at):
            a = d.rewards[at[:2]] - np.mean(d.rewards[at[0]][d.members[at[0]]])
            return -min(ratio(frozen, at), cap) * a * d.logprobs[at]

        return mean_over(d, of_token, "tokens")

    return loss


def bounds(q, low=0.16, high=0.2):
    """DCPO's, of a token of old probability q."""
    return 0.5 + 0.5 * np.sqrt(max(1 - 4 * low / q, 0)), 0.5 + 0.5 * np.sqrt(1 + 4 * high / q)


def dcpo_loss(most=10.0):
    """On a prompt's first visit; a ratio of more than ``most`` has no gradient on either side."""

    def loss(d, frozen):
        a = standard_score(d)

        def of_token(*at):
            low, high = bounds(np.exp(np.clip(d.sampler_logprobs[at], -20, 0)))
            return clipped_loss(ratio(d, at), a[at[:2]], 1 - low, min(high, most) - 1, most)

        prompts = len({n for n, *_ in sequences(d)})
        return mean_over(d, of_token) * len(sequences(d)) / max(prompts, 1)

    return loss


def whitened(d):
    """Rewards over the batch's live members, with the population's deviation."""
    live = d.rewards[d.members]
    return (d.rewards - live.mean()) / np.sqrt(live.var() + 1e-8)


def stable_loss(d, frozen, sigmas=1.0, limit=2.0):
    a = whitened(d)
    a = np.where(np.abs(a) <= sigmas, a, 0.0)

    def of_token(*at):
        return clipped_loss(np.clip(ratio(d, at), 1 / limit, limit), a[at[:2]])

    return mean_over(d, of_token)


def gspo_token_loss(d, frozen, low=0.05, high=0.1):
    a, total = standard_score(d), 0.0
    for n, i, tokens in sequences(d):
        gaps = [frozen.logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens]
        s = np.exp(sum(gaps) / len(tokens))
        for t in tokens:
            s_t = s * np.exp(d.logprobs[n, i, t]) / np.exp(frozen.logprobs[n, i, t])
            total += clipped_loss(s_t, a[n, i], low, high) / len(tokens)
    return total / max(len(sequences(d)), 1)


def lower_and_unequal(d, rng):
    lower(d, rng)
    d.rewards = numbers(rng, *d.rewards.shape)


def rare(d, rng):
    """Some tokens that the sampler found unlikely, of which some have become likely."""
    shift = rng.choice([0.0, -3.0], d.mask.shape)
    d.sampler_logprobs += shift
    d.logprobs += shift + rng.choice([0.0, 3.0], d.mask.shape)


CASES = {
    "gspo-token": (
        gspo_token_loss,
        "gspo_token",
        {"clip_low": 0.05, "clip_high": 0.1},
    ),
    "sapo_soft": (sapo_loss, "sapo_soft", {}),
    "vespo": (vespo_loss, "vespo", {}),
    "dppo_tv": (
        dppo_loss("tv", 0.1),
        "dppo_tv",
        {"limit_low": 0.1, "limit_high": 0.1, "weight_cap": 2.0},
    ),
    "dppo_kl": (
        dppo_loss("kl", 0.02),
        "dppo_kl",
        {"limit_low": 0.02, "limit_high": 0.02, "weight_cap": 2.0},
    ),
    "clip_cov": (
        clip_cov_loss,
        "clip_cov",
        {"fraction": 1.0, "covariance_low": 0.05, "covariance_high": 0.6}
        | {"clip_low": 0.2, "clip_high": 0.2},
    ),
    "kl_cov": (kl_cov_loss, "kl_cov", {"fraction": 0.3, "penalty": 0.7}),
    "luspo": (luspo_loss, "luspo", {"clip_low": 0.1, "clip_high": 0.2}),
    "decoupled_ppo": (decoupled_loss(), "decoupled_ppo", {}),
    "decoupled_ppo capped": (decoupled_loss(1.2), "decoupled_ppo", {"weight_cap": 1.2}),
    "aipo": (aipo_loss(), "aipo", {}),
    "aipo at a low bound": (aipo_loss(1.1), "aipo", {"max_weight": 1.1}),
    "dcpo": (dcpo_loss(), "dcpo", {"slots": 4}),
    "dcpo at a low bound": (dcpo_loss(1.5), "dcpo", {"slots": 4, "most": 1.5}),
    "stable_reinforce": (stable_loss, "stable_reinforce", {"sigmas": 1.0, "ratio_limit": 2.0}),
}


# ---------------------------------------------------------------- identities


def test_gspo_token_has_the_gradient_of_gspo():
    d = ragged(6)
    bounds = {"clip_low": 0.05, "clip_high": 0.1}
    _, sequence = run(get_method("gspo", **bounds), d)
    token = get_method("gspo_token", **bounds)
    _, single = run(token, d)
    np.testing.assert_allclose(sequence["logprobs"], single["logprobs"], atol=1e-6)


def test_without_a_covariance_between_the_bounds_clip_cov_is_token_mean_grpo():
    d = ragged(7)
    grpo = get_method("grpo").with_(aggregate=aggregates.token_mean)
    none = {"covariance_low": 1e6, "covariance_high": 2e6, "clip_low": 0.2, "clip_high": 0.2}
    one, g_one = run(get_method("clip_cov", **none), d)
    two, g_two = run(grpo, d)
    assert one == pytest.approx(two, abs=1e-6)
    np.testing.assert_allclose(g_one["logprobs"], g_two["logprobs"], atol=1e-6)


# ---------------------------------------------------------------- the choice of tokens


def chosen(transform, d, name=None):
    batch = as_batch(d)
    values = np.asarray(standard_score(d) + 10, np.float32)  # a constant leaves covariances alone
    out, edited, _ = jax.jit(transform.apply)(jnp.asarray(values), batch, transform.init())
    if name:
        return np.asarray(edited.stats[name]) > 0
    return (np.asarray(out) == 0) & d.live


def test_a_fraction_of_the_open_tokens_is_drawn_and_the_draw_follows_the_tie_breakers():
    d = ragged(2, 3, 4, 6)
    c = covariances(d)
    open_to = {at for at, value in c.items() if value > 0.0}
    draws = []
    for seed in range(3):
        d.ids["tie_breaker"] = np.random.default_rng(seed).integers(0, 2**31 - 1, (3, 4))
        draw = chosen(drop_covariant(0.1, 0.0, 50.0), d)
        assert draw.sum() == max(int(0.1 * d.live.sum()), 1)
        assert {tuple(at) for at in np.argwhere(draw)} <= open_to
        draws.append(draw)
    assert any((draw != draws[0]).any() for draw in draws)


def test_ties_are_broken_without_marking_more_than_asked():
    d = ragged(2)
    d.proximal_logprobs[:] = -1.0
    marks = chosen(mark_covariant(0.2), d, "marked")
    assert marks.sum() == max(int(0.2 * d.live.sum()), 1)
    assert not marks[~d.live].any()


def test_a_nan_reward_comes_through_the_choice():
    for name in ("clip_cov", "kl_cov"):
        d = ragged(1)
        n, i, _ = sequences(d)[0]
        d.rewards[n, i] = np.nan
        method = get_method(name)
        assert np.isnan(advantages_of(method, d)).any()
        assert np.isnan(run(method, d)[0])


def test_tie_breakers_are_read_per_member():
    rng = np.random.default_rng(0)
    d = ragged(5)
    d.rewards = numbers(rng, 3, 4)
    before = chosen(drop_covariant(0.2, 0.0, 50.0), d)
    d.ids["tie_breaker"] = d.ids["tie_breaker"] + 1
    assert (chosen(drop_covariant(0.2, 0.0, 50.0), d) != before).any()


# ---------------------------------------------------------------- LUSPO and the three policies


def test_luspo_is_gspo_with_every_loss_times_the_length():
    luspo = get_method("luspo", clip_low=0.1, clip_high=0.2)
    d = ragged(1, spread=0.05)
    d.mask[:] = np.arange(5) < 4
    d.live = d.mask & d.members[..., None]
    long, long_slope = run(luspo, d)
    mean, mean_slope = run(luspo.with_(aggregate=aggregates.sequence_mean), d)
    assert long == pytest.approx(4 * mean, rel=1e-5)
    np.testing.assert_allclose(long_slope["logprobs"], 4 * mean_slope["logprobs"], atol=1e-6)
    assert np.abs(mean_slope["logprobs"]).max() > 1e-3


def test_luspo_on_policy_is_reinforce_on_whole_completions():
    d = ragged(1)
    d.logprobs = d.sampler_logprobs.copy()
    _, slope = run(get_method("luspo"), d)
    expected = -standard_score(d)[..., None] * d.live / len(sequences(d))
    np.testing.assert_allclose(slope["logprobs"], expected, atol=1e-6)


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
    d.sampler_logprobs = d.logprobs - 0.5 * np.sign(standard_score(d))[..., None]
    assert not np.any(run(get_method("grpo"), d)[1]["logprobs"])
    assert np.any(run(get_method("decoupled_ppo"), d)[1]["logprobs"])


# ---------------------------------------------------------------- DCPO


def test_the_papers_bounds():
    low, high = dynamic_bounds(jnp.log(jnp.array([0.01, 0.9])), 0.16, 0.2)
    np.testing.assert_allclose(low, [0.5, 0.769], atol=5e-4)
    np.testing.assert_allclose(high, [5.0, 1.187], atol=5e-4)


@pytest.mark.parametrize(
    ("q", "a", "r", "loss", "slope"),
    [(1e-4, 1, 40, -10, 0), (0.5, -1, 100, 10, 0), (0.5, -1, 5, 5, 5), (0.5, 1, 1.2, -1.2, -1.2)],
)
def test_no_ratio_of_dcpo_counts_above_ten(q, a, r, loss, slope):
    rule = get_method("dcpo").objective.surrogate.apply
    below = jnp.log(jnp.full((1, 1), q, jnp.float32))
    stats = {"sampler_logprobs": below, "logprobs": below + np.log(r)}
    ones = jnp.ones((1, 1))

    def total(logprobs):
        return rule({**stats, "logprobs": logprobs}, a * ones, ones > 0)[0].sum()

    value, gradient = jax.value_and_grad(total)(stats["logprobs"])
    assert float(value) == pytest.approx(loss, rel=1e-4)
    assert float(gradient[0, 0]) == pytest.approx(slope, rel=1e-4)


def test_dcpos_advantages_remember_the_prompt():
    method = get_method("dcpo", slots=1024)
    apply = jax.jit(partial(compute_advantages, method.objective))
    state, rewards_by_prompt, visits = method.objective.init(), {}, {}
    rng = np.random.default_rng(0)
    for visit in range(4):
        d = ragged(visit, binary=True, n=4)
        d.ids["prompt"] = np.array([5, 1029 + 1, 9, 5]) if visit % 2 else np.array([5, 7, 9, 11])
        d.rewards[2] = 1.0
        d.members[:3] = rng.random((3, 4)) < 0.9
        d.mask[..., 0] = True
        advantages, _, state, _ = apply(as_batch(d), state)
        ids, now = d.ids["prompt"].tolist(), standard_score(d)
        for n, key in enumerate(ids):
            rewards_by_prompt[key] = [*rewards_by_prompt.get(key, []), *d.rewards[n][d.members[n]]]
        for key in {key for n, key in enumerate(ids) if members_of(d, n)}:
            visits[key] = visits.get(key, 0) + 1
        for n, key in enumerate(ids):
            live, i, ever = members_of(d, n), visits.get(key), np.array(rewards_by_prompt[key])
            if not live:
                continue
            spread = ever.std(ddof=1) if len(ever) > 1 else 0.0
            overall = (d.rewards[n, live] - ever.mean()) / (spread + 1e-6)
            one, two = (
                ((i - 1) * now[n, live] + overall) / i,
                (now[n, live] + (i - 1) * overall) / i,
            )
            expected = np.where(abs(one) < abs(two), one, two)
            np.testing.assert_allclose(advantages[n, live, 0], expected, rtol=1e-4, atol=1e-4)
    assert max(visits.values()) > 2


# ---------------------------------------------------------------- StableReinforce


def test_stable_reinforce_without_outliers_is_the_clipped_loss_on_whitened_rewards():
    d = ragged(3)
    method = stable_reinforce()
    plain = Objective(
        transforms.whiten("sequences"), ratios.clipped_ratio(), aggregates.sequence_mean
    )
    (one, g_one), (two, g_two) = run(method, d), run(method._replace(objective=plain), d)
    assert one == pytest.approx(two, abs=1e-6)
    np.testing.assert_allclose(g_one["logprobs"], g_two["logprobs"], atol=1e-6)


def test_the_composed_reward_counts_consistency_only_where_the_result_is_right():
    parts = np.array([[[1, 1, 1], [1, 0, 0], [0, 1, 1]]], np.float32)
    assert rewritten(stable_reinforce(composed=True), parts)[..., 0].tolist() == [[2, 1, 0.5]]
    with pytest.raises(UserError, match="composed with 1 reward parts"):
        consistent_rewards(parts[..., :1], None)


PREPARE = {
    "kl_cov": lower_and_unequal,  # equal rewards would leave its choice to the tie-breakers
    "dcpo": rare,
    "stable_reinforce": None,
    "gspo_token": None,
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_paper(case):
    reference, name, coefficients = CASES[case]
    check(get_method(name, **coefficients), reference, prepare=PREPARE.get(name, lower))


@few
@given(shape=shapes, seed=st.integers(0, 10**6))
def test_gspo_token_of_any_shape_equals_the_paper(shape, seed):
    reference, name, coefficients = CASES["gspo-token"]
    assert_matches(get_method(name, **coefficients), reference, ragged(seed, *shape))


def test_token_mean_of_an_off_policy_batch_is_cut():
    """The masks of dppo are both open and shut on the batches above."""
    assert_cut("dppo_tv", CASES["dppo_tv"][2])


ON_POLICY = ("gspo_token", "sapo_soft", "vespo", "dppo_tv", "dppo_kl", "kl_cov", "aipo")


@pytest.mark.parametrize("name", [*ON_POLICY, "decoupled_ppo"])
def test_on_policy_gradient_is_reinforce_with_the_same_advantages(name):
    d = ragged(3)
    lower(d, None)
    d.logprobs = d.proximal_logprobs = d.sampler_logprobs.copy()
    assert_reinforce_on_policy(get_method(name), d)


# ---------------------------------------------------------------- the choice of tokens
