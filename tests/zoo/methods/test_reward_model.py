"""Published losses of reward models against float64 loops, and what each adds to its relatives."""

import numpy as np
import pytest
from harness import check, members_of, ragged, run, tokens_of

from jrl.methods import get_method
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


def whole(seed):
    """A batch in which every member has a token."""
    d = ragged(seed)
    d.members[:] = True
    d.mask[..., 0] = True
    d.lengths[:] = np.maximum(d.lengths, 1)
    return d


def test_without_its_sign_a_cost_is_a_preference():
    d = whole(0)
    plain = run(get_method("bradley_terry"), d, WRT)
    without, both = (run(get_method("safe_rlhf_cost", sign_coef=c), d, WRT) for c in (0.0, 1.0))
    assert without[0] == pytest.approx(plain[0], abs=1e-6)
    assert abs(both[0] - plain[0]) > 0.1


def test_a_strong_preference_is_a_hard_label_and_a_weak_one_is_none():
    """With mu of 0 for all, the best is no difference at all; far above 0 it is Bradley-Terry."""
    d, method = whole(0), get_method("preference_strength")
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
