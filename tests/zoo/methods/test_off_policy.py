"""REC, OPMD, AsymRE, RED, ReMix, TOPR and A-LoL against float64 loops from their papers."""

import numpy as np
import pytest
from harness import advantages_of, check, members_of, ragged, ratio, run, sequences, standard_score

from jrl.methods import get_method
from jrl.objectives import ratios
from jrl.zoo.methods.off_policy import RATIOS, convex_kl


def centred(d, n, i):
    live = members_of(d, n)
    return d.rewards[n, i] - sum(d.rewards[n, j] for j in live) / len(live)


def token_mean(d, term):
    """The mean of ``term(n, i, t, tokens)`` over the live tokens."""
    terms = [term(n, i, t, tokens) for n, i, tokens in sequences(d) for t in tokens]
    return sum(terms) / max(len(terms), 1)


def keeps(rule, a, rho, low=0.2, high=0.2, ring_low=0.6, ring_high=2.0):
    inside = bool(1 - low <= rho <= 1 + high)
    if rule == "two_side":
        return inside
    if rule == "one_side":
        return bool((a >= 0 and rho <= 1 + high) or (a <= 0 and rho >= 1 - low))
    if rule == "ring":
        far = (a >= 0 and rho <= 1 - ring_low) or (a <= 0 and rho >= 1 + ring_high)
        return inside or bool(far)
    return True


@pytest.mark.parametrize("rule", ["none", "one_side", "two_side", "ring"])
def test_rec_is_the_papers(rule):
    def loss(d, frozen):
        def term(n, i, t, tokens):
            a, rho = centred(d, n, i), ratio(frozen, (n, i, t))
            return -keeps(rule, a, rho) * a * rho * d.logprobs[n, i, t]

        return token_mean(d, term)

    check(get_method("rec", mask=rule), loss, batches=((0, 0.3), (2, 1.0)))


def test_rec_with_the_ratio_of_the_sequence_is_a_mean_over_sequences():
    def loss(d, frozen):
        total = 0.0
        for n, i, tokens in sequences(d):
            gaps = [frozen.logprobs[n, i, k] - d.sampler_logprobs[n, i, k] for k in tokens]
            a, rho = centred(d, n, i), np.exp(sum(gaps) / len(gaps))
            in_bounds = keeps("one_side", a, rho, 0.1, 0.1)
            total -= in_bounds * a * sum(d.logprobs[n, i, t] for t in tokens) / len(tokens)
        return total / max(len(sequences(d)), 1)

    method = get_method("rec", level="geometric", importance=False, low=0.1, high=0.1)
    check(method, loss)


@pytest.mark.parametrize(("level", "low", "high"), [("geometric", 3e-4, 4e-4), ("token", 0.2, 0.2)])
def test_the_bounds_of_rec_are_the_released_codes_for_its_level(level, low, high):
    d = ragged(3, spread=3e-3 if level == "geometric" else 0.3)
    one = run(get_method("rec", level=level), d)[1]["logprobs"]
    other = run(get_method("rec", level=level, low=low, high=high), d)[1]["logprobs"]
    free = run(get_method("rec", level=level, mask="none"), d)[1]["logprobs"]
    np.testing.assert_array_equal(one, other)
    assert np.abs(one - free).max() > 1e-3, "nothing was out of bounds"


def with_surrogate(method, surrogate):
    return method._replace(objective=method.objective._replace(surrogate=surrogate))


def test_rec_without_a_mask_has_the_importance_weighted_gradient():
    rec, d = get_method("rec", mask="none"), ragged(1)
    _, slope = run(rec, d)
    count = d.live.sum()
    for n, i, tokens in sequences(d):
        for t in tokens:
            expected = -ratio(d, (n, i, t)) * centred(d, n, i) / count
            assert slope["logprobs"][n, i, t] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_rec_with_the_one_sided_mask_has_ppos_gradient():
    rec, d = get_method("rec"), ragged(1)
    ppo = with_surrogate(rec, ratios.clipped_ratio(0.2, 0.2))
    ours, theirs = run(rec, d)[1]["logprobs"], run(ppo, d)[1]["logprobs"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)
    assert ours.any()
    assert (ours[d.live] == 0).any()  # some token is masked


def reinforce_with_mean():
    rec = get_method("rec", mask="none", importance=False)
    return with_surrogate(rec, ratios.reinforce())


def test_opmd_is_the_papers():
    def loss(d, frozen):
        def term(n, i, t, tokens):
            gap = d.logprobs[n, i, t] - d.sampler_logprobs[n, i, t]
            return -centred(d, n, i) * d.logprobs[n, i, t] + 0.7 * gap**2

        return token_mean(d, term)

    opmd = get_method("opmd", tau=0.7)
    check(opmd, loss)
    d = ragged(1)
    d.logprobs = d.sampler_logprobs.copy()
    ours, theirs = run(opmd, d), run(reinforce_with_mean(), d)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"], atol=1e-7)


def test_asymre_is_reinforce_with_a_lower_baseline():
    def loss(d, frozen):
        return token_mean(d, lambda n, i, t, _: -(centred(d, n, i) + 0.3) * d.logprobs[n, i, t])

    check(get_method("asymre", tau=0.3), loss)


def test_red_weight_is_the_papers():
    def loss(d, frozen):
        def term(n, i, t, tokens):
            a = centred(d, n, i)
            return -np.exp(np.clip(a / 2, -20, 20)) * a * d.logprobs[n, i, t]

        return token_mean(d, term)

    check(get_method("red", temperature=2.0), loss)
    d = ragged(1)
    hot, plain = get_method("red", temperature=1e9), reinforce_with_mean()
    np.testing.assert_allclose(run(hot, d)[1]["logprobs"], run(plain, d)[1]["logprobs"], atol=1e-7)


def balanced(d, n):
    """The members kept: of those below the mean at most as many as there are others."""
    live = members_of(d, n)
    bad = [i for i in live if centred(d, n, i) < -1e-12]
    bad.sort(key=lambda i: d.ids["tie_breaker"][n, i])
    return {*live} - {*bad[len(live) - len(bad) :]}


def test_red_drop_balances_a_group_and_then_takes_its_mean():
    def loss(d, frozen):
        def term(n, i, t, tokens):
            members = balanced(d, n)
            a = d.rewards[n, i] - sum(d.rewards[n, j] for j in members) / len(members)
            return -(i in members) * a * d.logprobs[n, i, t]

        return token_mean(d, term)

    red = get_method("red", variant="drop")
    check(red, loss, g=6)
    check(red, loss, g=6, binary=True)


def test_red_drop_of_one_success_keeps_one_failure():
    d = ragged(1, g=4)
    d.members[:], d.mask[:] = True, True
    d.rewards[:] = [1, 0, 0, 0]
    advantages = np.sort(advantages_of(get_method("red", variant="drop"), d)[..., 0], axis=1)
    np.testing.assert_allclose(advantages, [[-0.5, 0, 0, 0.5]] * 3, atol=1e-6)
    d.rewards[:] = [1, 1, 1, 0]  # nobody is dropped
    advantages = advantages_of(get_method("red", variant="drop"), d)[..., 0]
    np.testing.assert_allclose(advantages, [[0.25, 0.25, 0.25, -0.75]] * 3, atol=1e-6)


# ---------------------------------------------------------------- replay


def remix_loss(d, frozen, low=0.2, high=0.3, beta=0.1):
    total = 0.0
    for n, i, tokens in sequences(d):
        a = standard_score(d)[n, i]
        for t in tokens:
            at = (n, i, t)
            centre = np.exp(d.proximal_logprobs[at] - d.sampler_logprobs[at])
            r = ratio(d, at)
            gain = min(r * a, min(max(r, centre - low), centre + high) * a)
            gap = d.ref_logprobs[at] - d.logprobs[at]
            # In the first fifty steps the base policy has the whole divergence.
            total += (-gain + beta * (np.exp(gap) - gap - 1)) / len(tokens)
    return total / max(len(sequences(d)), 1)


def test_remix_is_the_papers():
    check(get_method("remix", clip_high=0.3, kl_coef=0.1), remix_loss)


def test_remix_on_fresh_samples_is_grpo():
    d = ragged(4)
    d.proximal_logprobs = d.sampler_logprobs
    one, g_one = run(get_method("remix", kl_coef=0.0), d)
    two, g_two = run(get_method("grpo"), d)
    assert one == pytest.approx(two, abs=1e-6)
    np.testing.assert_allclose(g_one["logprobs"], g_two["logprobs"], atol=1e-6)


def test_remix_moves_the_divergence_from_the_base_to_the_previous_policy():
    base, previous = convex_kl("k2", 0.5)
    state, coefs = base.init(), []
    for _ in range(101):
        coefs.append((float(base.coef(state)), float(previous.coef(state))))
        state = base.update(state, {})
    np.testing.assert_allclose([x + y for x, y in coefs], 0.5, rtol=1e-6)
    assert [coefs[s][0] for s in (0, 50)] == [0.5, 0.5]
    np.testing.assert_allclose([coefs[s][0] for s in (51, 60, 61, 100)], [0.45, 0.45, 0.4, 0.25])
    schedule = get_method("remix").schedule
    (copy,) = schedule.after
    assert (schedule.epochs, copy.frozen) == (2, {"ref"})
    assert [step for step in range(101) if copy.due(step)] == [50, 100]


def topr_loss(d, frozen, c=0.25):
    total = 0.0
    for n, i, tokens in sequences(d):
        gap = sum(frozen.logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in tokens)
        r = d.rewards[n, i] - c
        w = 1.0 if r >= 0 else min(np.exp(gap), 1.0)
        total -= w * r * sum(d.logprobs[n, i, t] for t in tokens)
    return total / max(len(sequences(d)), 1)


def test_topr_is_the_papers():
    check(get_method("topr", baseline=0.25), topr_loss)


def test_topr_learns_right_completions_as_maximum_likelihood_does():
    near, far = ragged(5, spread=0.05), ragged(5, spread=3.0)
    near.rewards = far.rewards = np.ones_like(near.rewards)
    count = len(sequences(near))
    for d in (near, far):
        _, gradients = run(get_method("topr"), d)
        np.testing.assert_allclose(gradients["logprobs"], -1.0 * d.live / count, atol=1e-6)


def test_topr_on_policy_is_reinforce():
    d = ragged(6)
    d.logprobs = d.sampler_logprobs
    one, g_one = run(get_method("topr"), d)
    two, g_two = run(get_method("reinforce"), d)
    assert one == pytest.approx(two, rel=1e-5)
    np.testing.assert_allclose(g_one["logprobs"], g_two["logprobs"], atol=1e-6)


# ---------------------------------------------------------------- A-LoL


def alol_loss(kind, priority=True, c=0.6, beta=0.2, clip=0.5):
    def reference(d, frozen):
        rows, out = [], 0.0
        for n, i, ts in sequences(d):
            gain = d.rewards[n, i] - d.rollout_values[n, i, ts[0]]
            out += c * (d.values[n, i, ts[0]] - d.rewards[n, i]) ** 2
            if gain > 0:
                rows.append((n, i, ts, gain))
        out /= max(len(sequences(d)), 1)
        share = sum(gain if priority else 1 for *_, gain in rows)
        for n, i, ts, gain in rows:
            weight = (gain if priority else 1) / share
            # Of the data that is drawn, those with A > 0: the others are never seen.
            out += weight * beta * sum(d.logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in ts)
            gaps = [frozen.logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in ts]
            if kind == "sequence":
                gaps = [sum(gaps)] * len(ts)
            rs = [1.0 if kind == "none" else np.exp(np.clip(g, -20, 20)) for g in gaps]
            for t, r in zip(ts, rs, strict=True):
                r = min(max(r, 1 - clip), 1 + clip)
                out -= weight * gain * r * d.logprobs[n, i, t]
        return out

    return reference


@pytest.mark.parametrize(
    ("kind", "priority"), [("sequence", True), ("token", False), ("none", True)]
)
def test_a_lol_is_the_papers(kind, priority):
    coefficients = {"value_coef": 0.6, "kl_coef": 0.2, "clip": 0.5}
    method = get_method("a_lol", ratio=kind, priority=priority, **coefficients)
    check(method, alol_loss(kind, priority), wrt=("logprobs", "values"))


def test_at_the_reference_all_three_ratios_have_one_gradient():
    d = ragged(1)
    d.logprobs = d.ref_logprobs.copy()
    methods = [get_method("a_lol", ratio=kind) for kind in RATIOS]
    gradients = [run(method, d)[1]["logprobs"] for method in methods]
    assert np.abs(gradients[0]).max() > 1e-3
    for other in gradients[1:]:
        np.testing.assert_allclose(gradients[0], other, rtol=1e-5)


def test_a_lol_trains_on_the_datas_completions_and_reads_no_reference_without_a_ratio():
    method = get_method("a_lol", ratio="none")
    assert (method.draw.demonstrations, method.draw.samples) == (1, False)
    assert "ref_logprobs" not in method.objective.needs
    assert method.value
