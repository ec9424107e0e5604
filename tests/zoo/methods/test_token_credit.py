"""Forking tokens, EMPG, DeGRPO and preplan-and-anchor against loops from their papers."""

import copy
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import (
    advantages_of,
    as_batch,
    check,
    clipped_loss,
    members_of,
    numbers,
    ragged,
    ratio,
    rewritten,
    run,
    sequences,
    standard_score,
)

from jrl.errors import UserError
from jrl.methods.group_relative import dapo, grpo
from jrl.methods.policy_gradient import rloo
from jrl.sampling.params import make_sampling_params
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.types import Network
from jrl.zoo.methods.token_credit import (
    RULES,
    capo,
    degrpo,
    empg,
    forking_tokens,
    pav,
    preplan_anchor,
    rhythm_factors,
)

# ---------------------------------------------------------------- forking tokens


def forking_loss(d, frozen, rho=0.4):
    places = [(n, i, t) for n, i, ts in sequences(d) for t in ts]
    entropies = sorted(d.rollout_entropy[at] for at in places)
    where = (1 - rho) * (len(entropies) - 1)
    low = int(np.floor(where))
    high = min(low + 1, len(entropies) - 1)
    tau = entropies[low] * (1 - (where - low)) + entropies[high] * (where - low)
    total = 0.0
    for n, i, t in places:
        if d.rollout_entropy[n, i, t] >= tau:
            total += clipped_loss(ratio(d, (n, i, t)), standard_score(d)[n, i], 0.2, 0.28)
    return total / max(len(places), 1)


def test_forking_tokens_is_the_papers():
    check(forking_tokens(max_tokens=9, rho=0.4, overlong_scale=0.0), forking_loss)


def test_with_all_tokens_kept_it_is_dapo():
    d = ragged(3)
    one, two = run(forking_tokens(max_tokens=4, rho=1.0), d), run(dapo(max_tokens=4), d)
    assert one[0] == two[0]
    np.testing.assert_array_equal(one[1]["logprobs"], two[1]["logprobs"])
    assert forking_tokens(max_tokens=4).plan.rounds > 0


def test_a_nan_entropy_is_not_taken_for_a_small_one():
    d = ragged(4)
    n, i, ts = next(s for s in sequences(d) if standard_score(d)[s[:2]])
    at = n, i, ts[0]
    d.rollout_entropy[at] = np.nan
    assert np.isnan(run(forking_tokens(max_tokens=4), d)[0])


# ---------------------------------------------------------------- CAPO


def write_verdicts(d, rng):
    """Half of the tokens are in wrong steps, of which each costs three eighths of a point."""
    d.paid = -0.375 * ((rng.random(d.mask.shape) < 0.5) & d.mask)
    d.rewards = np.float32(d.rewards + d.paid.sum(axis=2)).astype(float)


def capo_loss(d, frozen):
    rows = list(sequences(d))
    credit = {}
    for n in range(len(d.rewards)):
        places = [(n, i, t) for m, i, ts in rows if m == n for t in ts]
        outcome = {
            i: d.rewards[n, i] - sum(d.paid[n, i, t] for t in ts) for m, i, ts in rows if m == n
        }
        points = {at: outcome[at[1]] + d.paid[at] for at in places}
        if len(points) < 2:
            continue
        values = np.array(list(points.values()), np.float64)
        spread = values.std(ddof=1) + 1e-6
        credit |= {at: (x - values.mean()) / spread for at, x in points.items()}
    total = sum(
        clipped_loss(ratio(d, (n, i, t)), credit.get((n, i, t), 0.0)) / len(ts)
        for n, i, ts in rows
        for t in ts
    )
    return total / max(len(rows), 1)


def test_capo_is_the_papers():
    check(capo(), capo_loss, prepare=write_verdicts)


def test_a_wrong_step_costs_its_tokens_alone():
    d = ragged(3)
    write_verdicts(d, np.random.default_rng(3))
    (n, i, ts) = next(s for s in sequences(d) if len(s[2]) > 2)
    d.rewards[n, i] -= d.paid[n, i, list(ts)].sum()
    d.paid[n, i] = 0
    before = advantages_of(capo(), d)[n, i]
    d.paid[n, i, ts[1]], d.rewards[n, i] = -1.0, d.rewards[n, i] - 1.0
    after = advantages_of(capo(), d)[n, i]
    assert after[ts[1]] < before[ts[1]]
    assert after[ts[0]] == after[ts[2]] > after[ts[1]]


# ---------------------------------------------------------------- PAV


def paid_by_step(d, rng):
    d.paid = numbers(rng, *d.mask.shape) * (rng.random(d.mask.shape) < 0.5)
    d.rewards = d.rewards + (d.paid * d.mask).sum(2)


def pav_loss(d, frozen):
    total, rows = 0.0, list(sequences(d))
    outcome = {(n, i): d.rewards[n, i] - sum(d.paid[n, i, t] for t in ts) for n, i, ts in rows}
    outcome |= {
        (n, i): d.rewards[n, i] for n in range(len(d.rewards)) for i in members_of(d, n)
        if (n, i) not in outcome
    }  # fmt: skip
    for n, i, ts in rows:
        others = [outcome[n, j] for j in members_of(d, n) if j != i]
        advantage = outcome[n, i] - sum(others) / len(others) if others else 0.0
        steps = d.ids["step"][n, i]
        for t in ts:
            progress = sum(d.paid[n, i, s] for s in ts if steps[s] == steps[t])
            total -= (advantage + progress) * d.logprobs[n, i, t]
    return total / max(len(rows), 1)


def test_pav_pays_progress_to_the_step_that_made_it():
    check(pav(), pav_loss, prepare=paid_by_step, ids=("step",))


def test_without_progress_pav_is_rloo_and_asks_for_lines():
    d = ragged(3, ids=("step",))
    one, two = run(pav(), d), run(rloo(), d)
    np.testing.assert_allclose(one[1]["logprobs"], two[1]["logprobs"], atol=1e-6)
    assert "lines" in pav().needs.reads


# ---------------------------------------------------------------- EMPG


def empg_advantages(d, k=2.0, k2=0.5, zeta=0.3):
    steps = {}
    for n, i, ts in sequences(d):
        for t in ts:
            steps.setdefault((n, i, d.ids["step"][n, i, t]), []).append(t)
    if not steps:
        return {}
    h = {s: np.mean([d.rollout_entropy[s[0], s[1], t] for t in ts]) for s, ts in steps.items()}
    low, high = min(h.values()), max(h.values())
    h = {s: (x - low) / (high - low) if high > low else 0.0 for s, x in h.items()}
    mean = np.mean([np.exp(-k * x) for x in h.values()])
    credit = {}
    for s in steps:
        later = [q for q in steps if q[:2] == s[:2] and q[2] > s[2]]
        clear = np.exp(-k2 * h[min(later, key=lambda q: q[2])]) if later else 0.0
        credit[s] = standard_score(d)[s[:2]] * np.exp(-k * h[s]) / mean + zeta * clear
    middle = np.mean(list(credit.values()))
    return {(*s[:2], t): credit[s] - middle for s, ts in steps.items() for t in ts}


def empg_loss(d, frozen):
    a, total = empg_advantages(d), 0.0
    for n, i, ts in sequences(d):
        total += sum(clipped_loss(ratio(d, (n, i, t)), a[n, i, t]) for t in ts) / len(ts)
    return total / max(len(sequences(d)), 1)


def test_empg_is_the_papers():
    check(empg(sharpness=2.0, clarity=0.5, bonus=0.3), empg_loss, ids=("step",))


def test_without_sharpness_and_bonus_empg_is_grpo_centred_over_steps():
    d = ragged(4, ids=("step",))
    got = advantages_of(empg(sharpness=0.0, bonus=0.0), d)
    steps = {(n, i, d.ids["step"][n, i, t]) for n, i, ts in sequences(d) for t in ts}
    middle = np.mean([standard_score(d)[n, i] for n, i, _ in steps])
    for n, i, ts in sequences(d):
        np.testing.assert_allclose(got[n, i, ts], standard_score(d)[n, i] - middle, atol=1e-5)


def test_modulated_advantages_of_the_steps_sum_to_zero():
    d = ragged(5, ids=("step",))
    got = advantages_of(empg(), d)
    steps = {(n, i, d.ids["step"][n, i, t]): t for n, i, ts in sequences(d) for t in ts}
    total = sum(got[n, i, t] for (n, i, _), t in steps.items())
    assert len(steps) > 4
    assert abs(total) < 1e-5


def test_without_steps_a_completion_is_one_step():
    d = ragged(5)
    one = copy.deepcopy(d)
    one.ids["step"] = np.full(d.mask.shape, 7)
    np.testing.assert_array_equal(advantages_of(empg(), d), advantages_of(empg(), one))


# ---------------------------------------------------------------- DeGRPO


def centred(d, n, i):
    return d.rewards[n, i] - np.mean([d.rewards[n, j] for j in members_of(d, n)])


def degrpo_loss(d, frozen, alpha=0.05, beta=0.1):
    total = 0.0
    for n, i, ts in sequences(d):
        losses = [clipped_loss(ratio(d, (n, i, t)), centred(d, n, i)) for t in ts]
        total += alpha * losses[0] + sum(losses[1:]) / max(len(ts) - 1, 1)
        gaps = [np.clip(d.logprobs[n, i, t] - d.ref_logprobs[n, i, t], -20, 20) for t in ts]
        total += beta * sum(np.expm1(-g) + g for g in gaps) / len(ts)
    return total / max(len(sequences(d)), 1)


def test_degrpo_is_the_papers():
    check(degrpo(alpha=0.05, kl_coef=0.1), degrpo_loss)


def test_at_one_length_degrpo_is_grpos_mean_scaled():
    d = ragged(6)
    d.mask[:] = True  # five tokens each: T is 4
    d.live = d.mask & d.members[..., None]
    total = 0.0
    for n, i, ts in sequences(d):
        total += np.mean([clipped_loss(ratio(d, (n, i, t)), centred(d, n, i)) for t in ts])
    expected = 5 / 4 * total / len(sequences(d))
    assert run(degrpo(alpha=0.25), d)[0] == pytest.approx(expected, rel=1e-5)


def test_rewards_by_mode():
    rollout = types.SimpleNamespace(tokens=np.array([[[7, 1], [3, 7], [7, 2], [3, 3], [3, 3]]]))
    rewards = np.array([[[1, 5], [1, 6], [0, 7], [0, 8], [np.nan, 9]]], np.float32)
    got = rewritten(degrpo(think_token=7, gamma=0.25), rewards, rollout)
    np.testing.assert_array_equal(got[0, :, 0], [0.75, 1.0, -1.0, -1.0, np.nan])
    np.testing.assert_array_equal(got[..., 1], rewards[..., 1])
    assert got.dtype == np.float32
    assert degrpo().rewards is grpo().rewards


# ---------------------------------------------------------------- preplan and anchor


def with_attention(d, rng):
    d.attention_distance = np.abs(numbers(rng, *d.mask.shape, scale=4.0))
    d.attention_influence = np.abs(numbers(rng, *d.mask.shape))


def top(values, fraction):
    """Places of the greatest values, their number rounded up."""
    count = max(int(np.ceil(fraction * len(values) - 1e-4)), 1)
    return {k for k, x in enumerate(values) if x >= sorted(values, reverse=True)[count - 1]}


def factors(waad, fai, rule, g=1.5, fraction=0.4, reach=2, alpha=0.25):
    """Equations 13 to 18, of the live tokens of one sequence side by side."""
    size = len(waad)
    delta = [abs(waad[k] - waad[k + 1]) for k in range(size - 1)] + [0.0]
    planning, anchors = top(delta, fraction), top(fai, fraction)
    if rule != "coupled":
        chosen = planning if rule == "local" else anchors
        return np.array([1 + (g - 1) * (k in chosen) for k in range(size)])
    low, high = np.median(waad), min(delta[k] for k in planning)
    dominated, intro = set(), set()
    for k in anchors:
        before = range(max(k - reach, 0), k)
        if before and waad[k] <= low and max(delta[u] for u in before) >= high:
            dominated.add(k)
            intro.add(max(before, key=lambda u: (delta[u], u)))
    gamma = np.ones(size)
    for k in range(size):
        gamma[k] += (g - 1) * (k in anchors - dominated)
        gamma[k] += (1 - alpha) * (g - 1) * (k in dominated) + alpha * (g - 1) * (k in intro)
    return gamma


def anchored_loss(d, rule, positive_only=False):
    total, scores = 0.0, standard_score(d)
    for n, i, tokens in sequences(d):
        read = d.attention_distance[n, i, tokens], d.attention_influence[n, i, tokens]
        for t, factor in zip(tokens, factors(*read, rule), strict=True):
            a = scores[n, i]
            a *= factor if a > 0 or not positive_only else 1
            total += clipped_loss(ratio(d, (n, i, t)), a) / len(tokens)
    return total / max(len(sequences(d)), 1)


PREPLAN = {
    rule: preplan_anchor(rule=rule, reach=2, shared=0.25, positive_only=rule == "local")
    for rule in RULES
}


@pytest.mark.parametrize("rule", RULES)
def test_preplan_anchor_is_the_papers(rule):
    def loss(d, frozen):
        return anchored_loss(d, rule, rule == "local")

    check(PREPLAN[rule], loss, prepare=with_attention, t=9, batches=((0, 0.3), (1, 0.05)))


def test_planning_tokens_are_those_where_the_attention_distance_changes_most():
    waad = np.array([1, 1.2, 9, 8.9, 8.8, 8.7, 2, 2.1, 1])
    mask = np.ones(12, bool)
    mask[[1, 4, 11]] = False  # stepped over
    spread = np.zeros(12)
    spread[mask] = waad
    arguments = (jnp.asarray(x) for x in (spread, spread, mask))
    got = np.asarray(rhythm_factors(*arguments, "local"))
    assert set(np.flatnonzero(got[mask] > 1)) == {0, 1, 5, 7}
    np.testing.assert_array_equal(got[~mask], 1)


def test_dominated_anchors_share_with_the_token_that_introduces_them():
    """Both ways of being one are needed, and a token may be anchor and introduction at once."""
    rng, factor_values = np.random.default_rng(0), set()
    apply = jax.jit(lambda *x: rhythm_factors(*x, jnp.ones(12, bool), reach=3, shared=0.25))
    for _ in range(20):
        waad, fai = np.abs(numbers(rng, 12, scale=4.0)), np.abs(numbers(rng, 12))
        expected = factors(waad, fai, "coupled", reach=3)
        got = apply(jnp.asarray(waad, jnp.float32), jnp.asarray(fai, jnp.float32))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        factor_values |= set(np.round(expected, 4))
    # Nothing, introduction, dominated, plain anchor; dominated or plain and introduction too.
    assert factor_values >= {1.0, 1.125, 1.375, 1.5, 1.625}


def test_preplan_anchor_with_factor_1_is_grpo():
    d = ragged(1)
    with_attention(d, np.random.default_rng(0))
    ours, theirs = run(preplan_anchor(factor=1.0), d), run(grpo(), d)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"], atol=1e-7)


def test_a_nan_in_the_attention_is_not_passed_over():
    d = ragged(1, t=9)
    with_attention(d, np.random.default_rng(0))
    n, i, tokens = sequences(d)[0]
    d.attention_influence[n, i, tokens[0]] = np.nan
    assert np.isnan(run(PREPLAN["coupled"], d)[0])


HEADS, PROMPT, T = 4, 3, 5


def attention(rng):
    """Causal weights [H, T, L] of completion tokens, their lags, and a mask with a hole."""
    length = PROMPT + T
    lags = np.arange(PROMPT, length)[:, None] - np.arange(length)[None]
    weights = rng.random((HEADS, T, length)) ** np.array([1, 2, 4, 8])[:, None, None]
    weights = np.where(lags >= 0, weights, 0)
    weights /= weights.sum(2, keepdims=True)
    return weights.astype(np.float32).astype(np.float64), lags, np.array([1, 1, 0, 1, 1], bool)


def chosen(weights, lags, mask, fraction, sign):
    spans = [
        sum(weights[h, t, s] * lags[t, s] for t in np.nonzero(mask)[0] for s in range(PROMPT + t))
        for h in range(HEADS)
    ]
    return sorted(range(HEADS), key=lambda h: sign * spans[h])[: max(1, round(fraction * HEADS))]


def test_distance_and_influence_are_their_definitions():
    weights, lags, mask = attention(np.random.default_rng(0))
    distance, influence = preplan_anchor(
        window=2, nearest=2, farthest=3, heads=0.5
    ).objective.statistics
    local, broad = (chosen(weights, lags, mask, 0.5, sign) for sign in (1, -1))
    expected = np.zeros((2, T))
    for t in np.nonzero(mask)[0]:
        visible = range(PROMPT + t + 1)
        expected[0, t] = np.mean(
            [sum(weights[h, t, s] * min(lags[t, s], 2) for s in visible) for h in local]
        )
        later = [k for k in np.nonzero(mask)[0] if 2 <= k - t <= 3]
        paid = [weights[h, k, PROMPT + t] for k in later for h in broad]
        expected[1, t] = np.mean(paid) if paid else 0.0
    arguments = jnp.asarray(weights, jnp.float32), jnp.asarray(lags), jnp.asarray(mask)
    got = jax.jit(lambda *x: (distance.apply(*x), influence.apply(*x)))(*arguments)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert (distance.over, distance.start) == ("attention", True)


def test_a_run_without_attention_weights_is_refused():
    """Rather than trained with the plain credit of GRPO."""
    method = PREPLAN["coupled"]
    network = Network(
        vocab_size=4,
        embed_dim=4,
        max_length=9,
        init=lambda key: {"table": jnp.zeros((4, 4))},
        axes=lambda: {"table": (None, None)},
        hidden=lambda params, tokens, positions, segments: (params["table"][tokens], {}),
        logits=lambda params, hidden: hidden,
        prepare=None,
        init_cache=None,
        extend=None,
    )
    common = {"network": network, "objective": method.objective, "optimizer": optax.sgd(0.1)}
    state = init_state(jax.random.key(0), network.init(None), **common)
    with pytest.raises(UserError, match="attention_distance is read from the network's attention"):
        jax.eval_shape(make_step(**common), state, as_batch(ragged(1)), make_sampling_params())
