"""Preference learning on own completions against float64 loops, and identities."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import as_batch, check, numbers, ragged, run, sequences, tokens_of
from preferences import (
    assert_same,
    before,
    best_and_worst,
    dpo,
    eligible,
    mean_of_pairs,
    pairs_of,
    side,
    sigmoid,
    softplus,
    two,
    win_rate,
)

from jrl.methods import get_method
from jrl.objectives import compute_advantages
from jrl.types import SILENT
from jrl.zoo.methods.preference_online import self_feedback, win_rates


def test_sppo_regresses_the_extremes_on_their_win_rates():
    def reference(d, frozen):
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            rates = {i: win_rate(d, n, i, False, "bradley_terry") for i in eligible(d, n)}
            for i in best_and_worst(d, n, rates) or ():
                total += (side(d, n, i).h - 7.0 * (rates[i] - 0.5)) ** 2
                count += 1
        return total / max(count, 1)

    check(get_method("sppo", eta=7.0), reference)


def test_sppo_may_use_every_completion():
    def reference(d, frozen):
        losses = [
            (side(d, n, i).h - 7.0 * (win_rate(d, n, i, True, "comparison") - 0.5)) ** 2
            for n, i, _ in sequences(d)
        ]
        return sum(losses) / max(len(losses), 1)

    method = get_method("sppo", eta=7.0, model="comparison", against="others", use="all")
    check(method, reference)


def test_nash_md_is_reinforce_on_win_rates_less_the_divergence():
    def reference(d, frozen):
        total = 0.0
        for n, i, tokens in sequences(d):
            kl = sum(d.sampler_logprobs[n, i, t] - d.ref_logprobs[n, i, t] for t in tokens)
            a = win_rate(d, n, i, True, "bradley_terry") - 0.5 - 0.2 * kl
            total -= a * side(d, n, i).lp
        return total / max(len(sequences(d)), 1)

    check(get_method("nash_md", tau=0.2), reference)


def test_matryoshka_smooths_the_label_as_the_released_script_does():
    def loss(w, l):
        z = 0.1 * (w.h - l.h)
        return 0.9 * softplus(-z) + 0.1 * softplus(z)

    method = get_method("matryoshka")
    check(method, mean_of_pairs(loss))
    assert [each.frozen for each in method.schedule.after] == [{"ref"}]


def test_xpo_adds_the_likelihood_of_the_references_completion():
    def reference(d, frozen):
        def loss(w, l):
            optimism = sum(s.lp for s in (w, l) if d.external[s.n, s.i].any())
            return softplus(0.1 * (l.h - w.h)) + 0.3 * optimism

        return mean_of_pairs(loss)(d, frozen)

    check(get_method("xpo", alpha=0.3), reference, g=2, n=5, demonstrations=1)


def summed(d, name, n, i):
    return sum(getattr(d, name)[n, i, t] for t in tokens_of(d, n, i))


def preferred_by(d, n, i, j, beta=0.05):
    """P3O's advantage of one completion over another, under the policy as it is now."""
    a, b = (d.rewards[n, k] - beta * side(d, n, k).h for k in (i, j))
    return a - b


def within(x, low, high):
    return min(max(x, low), high)


def p3o(pair):
    """The mean over groups of the mean of ``pair(d, frozen, n, i, j)`` over their pairs."""

    def reference(d, frozen):
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            pool = eligible(d, n)
            losses = [pair(d, frozen, n, i, j) for k, i in enumerate(pool) for j in pool[k + 1 :]]
            total += np.mean(losses) if losses else 0.0
            count += bool(pool)
        return total / max(count, 1)

    return reference


def log_rho(d, n, i):
    return summed(d, "logprobs", n, i) - summed(d, "sampler_logprobs", n, i)


def joint(d, frozen, n, i, j):
    g = log_rho(d, n, i) - log_rho(d, n, j)
    w = within(np.exp(within(log_rho(frozen, n, i) + log_rho(frozen, n, j), -20, 20)), 0.1, 10)
    push = -preferred_by(frozen, n, i, j) * w
    return max(push * g, push * within(g, -0.2, 0.2)) / 2


def separate(d, frozen, n, i, j):
    gap, total = preferred_by(frozen, n, i, j), 0.0
    for one, other, sign in ((i, j, -1), (j, i, 1)):
        rho = np.exp(within(log_rho(d, n, one), -20, 20))
        w = within(np.exp(within(log_rho(frozen, n, other), -20, 20)), 0.1, 10)
        push = sign * gap * w
        total += max(push * rho, push * within(rho, 0.8, 1.2)) / 2
    return total


@pytest.mark.parametrize("pair", [joint, separate])
def test_p3o_is_its_authors(pair):
    check(get_method("p3o", clipping=pair.__name__), p3o(pair))


@pytest.mark.parametrize("ranking", ["implicit", "likelihood"])
def test_cream_trusts_the_policys_ranking_as_far_as_the_reference_agrees(ranking):
    def with_initial(d, rng):
        d.initial_logprobs = d.sampler_logprobs + numbers(rng, *d.mask.shape, scale=0.3)

    def reference(d, frozen):
        tau, losses, ranked = 0.0, [], 0
        for n in range(len(d.rewards)):
            sides = [side(frozen, n, i) for i in eligible(d, n)]
            now = [s.start / len(s.tokens) for s in sides]
            if ranking == "implicit":
                now = [s.start - summed(frozen, "initial_logprobs", n, s.i) for s in sides]
            before = [s.ref / len(s.tokens) for s in sides]
            size = len(sides)
            if size < 2:
                continue
            ranked += 1
            signs = [
                np.sign(now[i] - now[j]) * np.sign(before[i] - before[j])
                for i in range(size)
                for j in range(i)
            ]
            tau += (np.mean(signs) + 1) / 2
            w, l = (side(d, n, sides[k].i) for k in (np.argmax(now), np.argmin(now)))
            losses.append((0.1 * w.h, 0.1 * l.h))
        c = tau / max(ranked, 1)
        total = sum(c * softplus(b - a) + (1 - c) * softplus(a - b) for a, b in losses)
        return total / max(len(losses), 1)

    check(get_method("cream", ranking=ranking), reference, prepare=with_initial)


def test_online_iterative_dpo_charges_length():
    def reference(d, frozen):
        charged = d.rewards - 0.2 * d.mask.sum(2)
        pairs = pairs_of(d, charged)
        return sum(dpo(w, l) for w, l in pairs) / max(len(pairs), 1)

    check(get_method("online_iterative_dpo", length_penalty=0.2), reference)


def entropy(p):
    return -p * np.log(p) - (1 - p) * np.log(1 - p)


def passes(d, rng):
    d.rewards = d.rewards[..., None] / 3 + numbers(rng, *d.rewards.shape, 3) ** 3


def certainties(d):
    """(pair, 1 - BALD in nats) of the pairs whose order most passes agree with."""
    for w, l in pairs_of(d, d.rewards.sum(2)):
        p = sigmoid(d.rewards[w.n, w.i] - d.rewards[l.n, l.i])
        if (p < 0.5).mean() <= 0.5:
            yield (w, l), 1 - (entropy(p.mean()) - entropy(p).mean())


def test_upo_trains_on_pairs_that_most_passes_order_alike():
    left_out = 0

    def reference(d, frozen):
        nonlocal left_out
        losses = [dpo(w, l) for (w, l), _ in certainties(d)]
        left_out += len(pairs_of(d, d.rewards.sum(2))) - len(losses)
        return sum(losses) / max(len(losses), 1)

    check(get_method("upo", share=1.0), reference, prepare=passes, n=6)
    assert left_out


def test_upo_s_passes_are_the_parts_without_weight_where_one_ranks():
    """Two passes that agree beside a reward model, and one that contradicts it."""
    d, objective = two(0, n=3), get_method("upo", share=1.0).objective
    ranks = np.array([[1.0, 0.0]] * 3)
    passes = np.array([[[2.0, 1.0], [0, 0]], [[-2.0, -1.0], [0, 0]], [[3.0, -1.0], [0, 0]]])
    parts = np.concatenate([ranks[..., None], passes], axis=2).astype(np.float32)

    both_parts = as_batch(d).replace(rewards=jnp.asarray(parts))

    @jax.jit
    def left(weights, silent):
        batch = both_parts.replace(
            reward_weights=weights, ids={**both_parts.ids, SILENT: jnp.asarray(silent)}
        )
        return compute_advantages(objective, batch, objective.init())[1].members.any(axis=1)

    all_say, one = np.zeros((3, 2), np.int32), jnp.array([1.0, 0.0, 0.0])
    assert left(one, all_say).tolist() == [True, False, True]
    # where all have a weight, all are passes: the second pair is ranked by the sum
    assert left(jnp.ones(3), all_say).tolist() == [True, True, True]
    # the last pass has not read a member of the first pair, and the first part is no pass
    unread = np.array([[4, 0], [0, 0], [1, 1]], np.int32)
    assert left(one, unread).tolist() == [False, False, True]


def test_upo_may_leave_out_uncertain_pairs():
    def reference(d, frozen):
        sure = [(w, l) for (w, l), c in certainties(d) if 1 - (1 - c) / np.log(2) >= 0.97]
        return sum(dpo(w, l) for w, l in sure) / max(len(sure), 1)

    check(get_method("upo", share=1.0, min_certainty=0.97), reference, prepare=passes, n=6)


def test_upo_draws_in_proportion_to_certainty():
    """Of two pairs one is drawn, the sure one more often, by the ratio of 1 - BALD."""
    d, objective = two(0, n=2), get_method("upo").objective
    d.rewards = np.array([[[1.0, 1.0], [0.0, 0.0]], [[9.0, 0.1], [0.0, 9.0]]])

    @jax.jit
    @jax.vmap
    def choose(tie_breakers):
        ids = {"prompt": jnp.arange(2), "tie_breaker": tie_breakers}
        batch = as_batch(d, ids=ids)
        return compute_advantages(objective, batch, objective.init())[1].members.any(axis=1)

    rng = np.random.default_rng(0)
    tie_breakers = rng.integers(0, 2**31 - 1, (4000, 2, 2)).astype(np.int32)
    chosen = np.asarray(choose(tie_breakers))
    assert (chosen.sum(axis=1) == 1).all()
    (_, a), (_, b) = list(certainties(d))
    assert chosen[:, 0].mean() == pytest.approx(a / (a + b), abs=0.03)
    assert a / (a + b) > 0.6


def test_self_feedback_is_the_implicit_reward_over_length():
    d = ragged(0)
    for n, i, tokens in sequences(d):
        got = self_feedback(*(jnp.asarray(x[n, i]) for x in (d.logprobs, d.ref_logprobs, d.live)))
        assert float(got) == pytest.approx(side(d, n, i).h / len(tokens), abs=1e-6)


def test_joint_and_separate_clipping_agree_on_policy():
    d = ragged(1, g=2)
    d.logprobs = d.sampler_logprobs.copy()
    d.members[:] = True
    d.mask[..., 0] = True
    d.live = d.mask.copy()
    gradients = [
        run(get_method("p3o", clipping=c), d)[1]["logprobs"] for c in ("joint", "separate")
    ]
    np.testing.assert_allclose(*gradients, atol=1e-6)
    expected = np.zeros_like(d.logprobs)
    for n in range(3):
        gap = preferred_by(d, n, 0, 1)
        expected[n, 0][d.live[n, 0]] = -gap / 2 / 3
        expected[n, 1][d.live[n, 1]] = gap / 2 / 3
    np.testing.assert_allclose(gradients[0], expected, atol=1e-6)


# ---------------------------------------------------------------- identities


def test_an_even_game_gives_exactly_nothing():
    d = ragged(0)
    d.rewards[:] = 0.3
    for model in ("bradley_terry", "comparison"):
        rates, _, _ = win_rates(model, less=0.5).apply(jnp.asarray(d.rewards), as_batch(d), ())
        assert not np.asarray(rates).any()


def test_nash_md_without_a_divergence_is_reinforce_on_the_win_rate():
    d = ragged(1)
    plain = get_method("reinforce")
    assert_same(get_method("nash_md", tau=0.0), before(plain, win_rates(less=0.5)), d)


def test_the_optimum_of_sppo_is_the_exponential_of_the_win_rate():
    d = two(0, t=1)
    d.logprobs = d.ref_logprobs.copy()
    d.logprobs[:, 0, 0] += 2.0
    d.logprobs[:, 1, 0] -= 2.0
    method = get_method("sppo", eta=4.0, model="comparison", against="others")
    value, gradients = run(method, d)
    assert value == pytest.approx(0, abs=1e-9)
    assert np.abs(gradients["logprobs"]).max() < 1e-5


def test_without_optimism_xpo_is_online_dpo():
    d = two(2, demonstrations=1)
    assert_same(get_method("xpo", alpha=0.0), get_method("online_dpo"), d)


def test_cream_is_dpo_on_the_policys_ranking_where_both_rank_alike():
    d = two(2)
    d.proximal_logprobs[:, 0], d.ref_logprobs[:, 0] = -0.5, -0.6
    d.proximal_logprobs[:, 1], d.ref_logprobs[:, 1] = -3.0, -2.0
    d.rewards = d.rewards[:, ::-1].copy()  # not read
    reversed_data = types.SimpleNamespace(**vars(d))
    reversed_data.rewards = d.rewards[:, ::-1].copy()
    value, gradients = run(get_method("cream", ranking="likelihood"), d)
    expected, slopes = run(get_method("dpo"), reversed_data)
    assert value == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(gradients["logprobs"], slopes["logprobs"], atol=1e-6)


def test_a_constant_in_a_prompts_rewards_changes_nothing_for_p3o():
    d = ragged(1)
    for clipping in ("joint", "separate"):
        method = get_method("p3o", clipping=clipping)
        value = run(method, d)[0]
        d.rewards = d.rewards + np.arange(3.0)[:, None]
        assert run(method, d)[0] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("clipping", ["joint", "separate"])
def test_p3o_on_policy_has_rloo_s_gradient(clipping):
    d = two(1)
    d.logprobs = d.sampler_logprobs.copy()
    _, ours = run(get_method("p3o", clipping=clipping, kl_coef=0.0), d)
    _, theirs = run(get_method("rloo"), d)
    assert np.abs(theirs["logprobs"]).max() > 1e-2
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-6)
