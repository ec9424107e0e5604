"""Published losses of reward models against float64 loops, and what each adds to its relatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import as_batch, check, members_of, numbers, ragged, run, tokens_of

from jrl.errors import UserError
from jrl.methods import get_method
from jrl.methods.base import Method
from jrl.methods.reward_model import prm

WRT = ("values",)


def softplus(x):
    return np.logaddexp(0.0, x)


def over_pairs(loss):
    """The mean over groups with a pair of the mean over their ordered pairs."""

    def reference(d, frozen):
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            live = [i for i in members_of(d, n) if len(tokens_of(d, n, i))]
            value = {i: d.values[n, i, tokens_of(d, n, i)[-1]] for i in live}
            score = d.rewards[n]
            pairs = [(i, j) for i in live for j in live if score[i] > score[j]]
            if pairs:
                each = [loss(value[i], value[j], score[i], score[j]) for i, j in pairs]
                total, count = total + sum(each) / len(each), count + 1
        return total / max(count, 1)

    return reference


def cost(w, l, s_w, s_l):
    signs = sum(softplus(-np.sign(s) * v) for s, v in ((s_w, w), (s_l, l)) if s != 0)
    return softplus(l - w) + 0.7 * signs


def soft(w, l, s_w, s_l):
    p = 1 / (1 + np.exp(s_l - s_w))
    return p * softplus(l - w) + (1 - p) * softplus(w - l)


def margin(w, l, s_w, s_l):
    return softplus(s_w - s_l - (w - l))


def irl(w, l, s_w, s_l):
    return (l - w) / 0.5 + 0.1 * (w**2 + l**2)


CASES = {
    "ml_irl": ({"beta": 0.5, "square_coef": 0.1}, irl),
    "safe_rlhf_cost": ({"sign_coef": 0.7}, cost),
    "preference_strength": ({}, soft),
    "preference_strength margin": ({"form": "margin"}, margin),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_the_papers(case):
    coefficients, loss = CASES[case]
    check(get_method(case.split()[0], **coefficients), over_pairs(loss), wrt=WRT)


def numbers_of(seed):
    """A batch in which every member has a token."""
    d = ragged(seed)
    d.members[:] = True
    d.mask[..., 0] = True
    d.lengths[:] = np.maximum(d.lengths, 1)
    return d


def test_without_its_sign_a_cost_is_a_preference():
    d = numbers_of(0)
    plain = run(get_method("bradley_terry"), d, WRT)
    without, both = (run(get_method("safe_rlhf_cost", sign_coef=c), d, WRT) for c in (0.0, 1.0))
    assert without[0] == pytest.approx(plain[0], abs=1e-6)
    assert abs(both[0] - plain[0]) > 0.1


def test_a_strong_preference_is_a_hard_label_and_a_weak_one_is_none():
    """With mu of 0 for all, the best is no difference at all; far above 0 it is Bradley-Terry."""
    d, method = numbers_of(0), get_method("preference_strength")
    d.rewards *= 1e3
    strong = run(method, d, WRT)[0]
    assert strong == pytest.approx(run(get_method("bradley_terry"), d, WRT)[0], abs=1e-4)
    d.rewards /= 1e7
    d.values[:] = 0.0
    value, gradients = run(method, d, WRT)
    assert value == pytest.approx(np.log(2), abs=1e-4)
    np.testing.assert_allclose(gradients["values"], 0, atol=1e-4)


def by_step(label):
    """The cross-entropy at the ends of steps, with labels made of those of a completion's steps."""

    def reference(d, frozen):
        losses = []
        for n in range(len(d.rewards)):
            for i in members_of(d, n):
                tokens, steps = tokens_of(d, n, i), d.ids["step"][n, i]
                later = [*tokens[1:], None]
                ends = [
                    a
                    for a, b in zip(tokens, later, strict=False)
                    if b is None or steps[b] != steps[a]
                ]
                z = [d.step_labels[n, i, a] for a in ends]
                for k, a in enumerate(ends):
                    y, v = label(z, k), d.values[n, i, a]
                    losses.append(y * softplus(-v) + (1 - y) * softplus(v))
        return sum(losses) / max(len(losses), 1)

    return reference


def shares(d, rng):
    d.step_labels = rng.choice([0.0, 0.25, 0.5, 1.0], d.mask.shape)


def test_a_step_is_right_if_any_completion_from_it_or_from_a_later_one_is():
    any_right = by_step(lambda z, k: float(max(z[k:]) > 0))
    check(get_method("sorm"), any_right, wrt=WRT, ids=("step",), prepare=shares)


def test_the_prover_is_right_if_any_of_its_draws_is():
    """PAV: 1 - (1 - z)^K by multiplication."""

    def best_of_three(z, k):
        return 1 - (1 - z[k]) * (1 - z[k]) * (1 - z[k])

    method = get_method("pav_verifier", best_of=3)
    check(method, by_step(best_of_three), wrt=WRT, ids=("step",), prepare=shares)


def test_with_one_draw_the_prover_is_the_policy():
    d = ragged(2, ids=("step",))
    shares(d, np.random.default_rng(0))
    one, plain = (run(m, d, WRT)[0] for m in (get_method("pav_verifier", best_of=1), prm()))
    assert one == plain
    assert abs(run(get_method("pav_verifier"), d, WRT)[0] - plain) > 1e-2


def progress(d, frozen):
    """SPA's return decomposition in float64, the mean over completions."""
    losses = []
    for n in range(len(d.rewards)):
        for i in members_of(d, n):
            tokens, steps = tokens_of(d, n, i), d.ids["step"][n, i]
            later = [*tokens[1:], None]
            ends = [
                a for a, b in zip(tokens, later, strict=False) if b is None or steps[a] != steps[b]
            ]
            if len(tokens):
                losses.append((sum(d.values[n, i, a] for a in ends) - d.rewards[n, i]) ** 2)
    return sum(losses) / max(len(losses), 1)


def test_contributions_of_steps_add_up_to_the_outcome():
    check(get_method("spa_progress"), progress, wrt=WRT, ids=("step",))


# ---------------------------------------------------------------- HelpSteer2


def labelled(d, rng):
    for k in (1, 2):
        setattr(d, f"values_{k}", numbers(rng, *d.mask.shape))
    for k in range(3):
        label = rng.integers(0, 5, d.rewards.shape) * 1.0
        label[rng.random(label.shape) < 0.3] = np.nan
        setattr(d, f"attribute_{k}", np.repeat(label[..., None], d.mask.shape[2], axis=2))


def errors_of_attributes(d, frozen):
    total, count = 0.0, 0
    for n in range(len(d.rewards)):
        for i in members_of(d, n):
            if tokens := tokens_of(d, n, i):
                end, each = tokens[-1], []
                for k, values in enumerate((d.values, d.values_1, d.values_2)):
                    label = getattr(d, f"attribute_{k}")[n, i, end]
                    if not np.isnan(label):
                        each.append((values[n, i, end] - label) ** 2)
                total, count = total + (np.mean(each) if each else 0.0), count + 1
    return total / max(count, 1)


def test_attributes_are_learned_where_they_are_labelled():
    method = get_method("helpsteer2_regression", attributes=3)
    wrt = ("values", "values_1", "values_2")
    check(method, errors_of_attributes, wrt=wrt, prepare=labelled)
    assert method.objective.value_outputs == 3
    with pytest.raises(UserError, match="objective.attributes = 9; give 1 to 8"):
        get_method("helpsteer2_regression", attributes=9)


def test_without_attributes_the_score_is_the_first():
    d = numbers_of(1)
    d.values_1 = d.values + 1.0
    value, gradients = run(
        get_method("helpsteer2_regression", attributes=2), d, ("values", "values_1")
    )
    ends = np.array([[tokens_of(d, n, i)[-1] for i in range(4)] for n in range(3)])
    last = np.take_along_axis(d.values, ends[..., None], axis=2)[..., 0]
    assert value == pytest.approx(np.mean((last - d.rewards) ** 2), abs=1e-5)
    assert not gradients["values_1"].any()


# ---------------------------------------------------------------- CRM


def two_models(d, rng):
    for name in ("values_1", "rollout_values_1"):
        setattr(d, name, numbers(rng, *d.mask.shape))


def reviewed(share):
    """CRM's loss in float64: each model's pairs of the greatest margins by the other."""

    def reference(d, frozen):
        pairs = {}
        for n in range(len(d.rewards)):
            live = [i for i in members_of(d, n) if tokens_of(d, n, i)]
            order = sorted(live, key=lambda i: d.rewards[n, i])
            if len(live) > 1 and d.rewards[n, order[-1]] > d.rewards[n, order[0]]:
                pairs[n] = order[-1], order[0]

        def margin(values, n):
            (w, l), end = pairs[n], lambda i: tokens_of(d, n, i)[-1]
            return values[n, w, end(w)] - values[n, l, end(l)]

        losses = []
        for model, (values, reviewer) in enumerate(
            ((d.values, frozen.rollout_values_1), (d.values_1, frozen.rollout_values))
        ):
            mine = [
                n for n, (w, _) in pairs.items() if (d.ids["tie_breaker"][n, w] >> 3) % 2 == model
            ]
            mine.sort(key=lambda n: -margin(reviewer, n))
            for n in mine[: int(np.ceil(share * len(mine)))]:
                losses.append(softplus(-margin(values, n)))
        return sum(losses) / max(len(losses), 1)

    return reference


def test_each_model_learns_what_the_other_finds_clear():
    method = get_method("crm", noise=0.0, first_share=0.5, curriculum_steps=4)
    shape = {"n": 8, "g": 3, "t": 4}
    check(method, reviewed(0.5), wrt=("values", "values_1"), prepare=two_models, **shape)
    assert method.objective.value_outputs == 2


def test_the_share_rises_with_the_steps():
    method = get_method("crm", noise=0.25, first_share=0.25, curriculum_steps=4)
    d = ragged(1, n=8, g=2, t=3)
    two_models(d, np.random.default_rng(0))
    d.members[:], d.mask[..., 0] = True, True
    d.lengths[:] = np.maximum(d.lengths, 1)
    batch, step = as_batch(d), method.objective.advantage
    left = []
    for done in (0.0, 2.0, 9.0):
        _, edited, after = step.apply(batch.score(), batch, jnp.float32(done))
        assert float(after) == done + 1
        left.append(int((edited.stats["pair_share"] > 0).any(axis=(1, 2)).sum()))
    coins = (d.ids["tie_breaker"][np.arange(8), d.rewards.argmax(1)] >> 3) & 1
    usable = d.rewards[:, 0] != d.rewards[:, 1]
    sizes = [np.sum(usable & (coins == m)) for m in (0, 1)]
    assert left == [sum(int(np.ceil(s * n)) for n in sizes) for s in (0.25, 0.5, 0.75)]
    assert len(set(left)) == 3


# ---------------------------------------------------------------- contrast


def three_features(d, rng):
    for k in range(3):
        setattr(d, f"feature_{k}", numbers(rng, *d.mask.shape))


def views_of(d, n, live, dropout):
    """{member: two views [2, 3]} of a group's features, by masks that follow from its place."""
    views = {}
    for i in live:
        first = tokens_of(d, n, i)[0]
        h = np.array([getattr(d, f"feature_{k}")[n, i, first] for k in range(3)])
        key = jax.random.fold_in(jax.random.key(0), int(d.ids["tie_breaker"][n, i]))
        stays = np.asarray(jax.random.bernoulli(key, 1 - dropout, (2, 3)))
        views[i] = np.array([[h[k] / (1 - dropout) * s[k] for k in range(3)] for s in stays])
    return views


def simcse(one, other, tau):
    """The mean over rows of -log of the share that the own other view has."""

    def cosine(a, b):
        return a @ b / np.sqrt(max(a @ a, 1e-12) * max(b @ b, 1e-12))

    each = []
    for i, a in enumerate(one):
        shares = np.exp([cosine(a, b) / tau for b in other])
        each.append(-np.log(shares[i] / shares.sum()))
    return sum(each) / len(each)


def contrasted(of, coef, tau, dropout):
    ranked = over_pairs(lambda w, l, s_w, s_l: softplus(l - w))

    def reference(d, frozen):
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            live = [i for i in members_of(d, n) if tokens_of(d, n, i)]
            score = d.rewards[n]
            pairs = [(i, j) for i in live for j in live if score[i] != score[j]]
            if not pairs:
                continue
            views = views_of(d, n, live, dropout)
            sets = [views[i] for i in live]
            if of == "differences":
                sets = [views[i] - views[j] for i, j in pairs]
            total += simcse([x[0] for x in sets], [x[1] for x in sets], tau)
            count += 1
        return ranked(d, frozen) + coef * total / max(count, 1)

    return reference


@pytest.mark.parametrize("of", ["responses", "differences"])
def test_representations_are_contrasted_under_dropout(of):
    numbers_of = {"contrast_coef": 0.6, "temperature": 0.5, "dropout": 0.3}
    method = get_method("simcse_reward", of=of, width=3, **numbers_of)
    wrt = ("values", "feature_0", "feature_1", "feature_2")
    check(method, contrasted(of, *numbers_of.values()), wrt=wrt, prepare=three_features)


def test_a_feature_is_a_fixed_direction_of_the_last_state():
    hidden = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    mask = jnp.array([True, True, False, True, False])
    each = get_method("simcse_reward", width=2).objective.statistics
    features = [statistic.apply(jnp.asarray(hidden), mask) for statistic in each]
    for number, values in enumerate(features):
        direction = np.random.default_rng(number).standard_normal(40) / 40**0.5
        np.testing.assert_allclose(values, [hidden[3] @ direction] * 5, rtol=1e-4)


# ---------------------------------------------------------------- MetaRM


def reference(d, frozen):
    """J in loops, the mean over groups whose scores are all equal."""
    total, count = 0.0, 0
    for n in range(len(d.rewards)):
        live = [i for i in members_of(d, n) if tokens_of(d, n, i)]
        if not live or len({d.rewards[n, i] for i in live}) > 1:
            continue
        value = [d.values[n, i, tokens_of(d, n, i)[-1]] for i in live]
        each = [1 / (1 + np.exp(-abs(a - b))) for k, a in enumerate(value) for b in value[k + 1 :]]
        total, count = total + 2 / len(value) ** 2 * sum(each), count + 1
    return total / max(count, 1)


def test_how_far_apart_unranked_responses_are_is_the_paper_s():
    ahead = get_method("meta_rm", ascent=0.5).schedule.ahead
    assert ahead.size == 0.5
    check(Method(ahead.objective), reference, wrt=WRT, n=4)
