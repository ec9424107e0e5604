"""Labels, lists, weighed tokens, rationales and levels against float64 loops, and identities."""

import difflib
import types

import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    as_batch,
    check,
    live_statistics,
    loss_and_gradient,
    members_of,
    ragged,
    run,
    sequences,
    tokens_of,
)
from preferences import (
    assert_same,
    best_and_worst,
    dpo,
    mean_of_pairs,
    mean_over_groups,
    orpo,
    pairs_of,
    side,
    sigmoid,
    softplus,
    two,
)

from jrl.methods import get_method
from jrl.objectives import compute_advantages
from jrl.zoo.methods.preference_lists import common_tokens, trpa


def kto(d, frozen, beta=0.1, up=1.0, down=1.5):
    rows = sequences(d)
    gaps = [side(frozen, n, i).start - side(frozen, n, i).ref for n, i, _ in rows]
    z0, total = max(0.0, sum(gaps) / max(len(gaps), 1)), 0.0
    for n, i, _ in rows:
        x = beta * (side(d, n, i).h - z0)
        total += up * (1 - sigmoid(x)) if d.rewards[n, i] > 0.5 else down * (1 - sigmoid(-x))
    return total / max(len(rows), 1)


def test_kto_is_the_papers():
    check(get_method("kto", undesirable=1.5), kto, binary=True)


def bco(d, frozen, beta=0.1):
    kinds = [[], []]
    for n, i, _ in sequences(d):
        kinds[int(d.rewards[n, i] > 0.5)].append((n, i))
    starts = [[side(frozen, *at).start - side(frozen, *at).ref for at in kind] for kind in kinds]
    delta = beta * np.mean([np.mean(kind) for kind in starts if kind])
    total = 0.0
    for sign, kind in zip((-1, 1), kinds, strict=True):
        losses = [softplus(-sign * (beta * side(d, *at).h - delta)) for at in kind]
        total += np.mean(losses) if losses else 0.0
    return total


def test_bco_is_the_papers():
    check(get_method("bco"), bco, binary=True)


def test_ddpo_weighs_changed_tokens():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 4, (3, 2, 5))
    method = get_method("ddpo", gamma=3.0)
    assert method.lacks == "", "the mechanism is one of text"

    def weights(w, l):
        """gamma off the tokens that Python's own matcher finds in both, where it is optimal."""
        a, b = ([int(words[s.n, s.i, t]) for t in s.tokens] for s in (w, l))
        same = [set(), set()]
        for x, y, size in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
            same[0] |= set(range(x, x + size))
            same[1] |= set(range(y, y + size))
        return [[1.0 if k in same[m] else 3.0 for k in range(len(s))] for m, s in enumerate((a, b))]

    def mean(d, s, weight):
        h = [d.logprobs[s.n, s.i, t] - d.ref_logprobs[s.n, s.i, t] for t in s.tokens]
        return sum(w * x for w, x in zip(weight, h, strict=True)) / sum(weight)

    def reference(d, frozen):
        def loss(w, l):
            of_w, of_l = weights(w, l)
            return softplus(0.5 * (mean(d, l, of_l) - mean(d, w, of_w)))

        return mean_of_pairs(loss)(d, frozen)

    d = ragged(3, g=2)
    d.members[:] = True
    # A corrected copy: the second completion is the first with one token replaced.
    d.mask[:, 1] = d.mask[:, 0]
    words[:, 1] = words[:, 0]
    words[:, 1, 1] = 9
    d.live = d.mask.copy()
    batch = as_batch(d, tokens=jnp.asarray(words, jnp.int32))
    value, gradients = loss_and_gradient(method, batch, live_statistics(method, d))
    assert value == pytest.approx(reference(d, d), rel=1e-5)
    assert pairs_of(d)
    perturbed = d.logprobs + 1e-3 * (step := np.random.default_rng(1).normal(size=d.logprobs.shape))
    here, d.logprobs = reference(d, d), perturbed
    assert (gradients["logprobs"] * step).sum() == pytest.approx(
        (reference(d, d) - here) / 1e-3, rel=2e-3
    )


@pytest.mark.parametrize("seed", range(4))
def test_common_tokens_are_a_longest_common_subsequence(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 3, (2, 8))
    live_a, live_b = rng.random((2, 8)) < 0.8
    in_a, in_b = (
        np.asarray(x) for x in common_tokens(*(jnp.asarray(x) for x in (a, live_a, b, live_b)))
    )
    assert a[in_a].tolist() == b[in_b].tolist()
    assert not (in_a & ~live_a).any()
    assert not (in_b & ~live_b).any()
    x, y = a[live_a], b[live_b]
    table = np.zeros((len(x) + 1, len(y) + 1), int)
    for i, j in np.ndindex(len(x), len(y)):
        match = table[i, j] + 1 if x[i] == y[j] else 0
        table[i + 1, j + 1] = max(match, table[i, j + 1], table[i + 1, j])
    assert in_a.sum() == table[-1, -1]


def imitated(d, n, pool, value):
    top = max(d.rewards[n, i] for i in pool)
    best = [value(side(d, n, i)) for i in pool if d.rewards[n, i] == top]
    return sum(best) / len(best)


@pytest.mark.parametrize("gaps", [True, False])
def test_pro_ranks_the_whole_list(gaps):
    def reference(d, frozen):
        def loss(n, pool):
            p = {i: side(d, n, i).mean for i in pool}
            r, total = d.rewards[n], 0.0
            for k in pool:
                below = [i for i in pool if r[i] < r[k]]
                if below:
                    inverse = {i: r[k] - r[i] if gaps else 1.0 for i in below}
                    score = p[k] * max(inverse.values())
                    total += (
                        np.logaddexp.reduce([score, *(p[i] * inverse[i] for i in below)]) - score
                    )
            return total - 0.05 * (len(pool) - 1) ** 2 * imitated(d, n, pool, lambda s: s.lp)

        return mean_over_groups(d, loss)

    check(get_method("pro", gap_temperature=gaps), reference, binary=not gaps)


def test_rrhf_ranks_by_a_hinge_and_imitates_the_best():
    def reference(d, frozen):
        def loss(n, pool):
            p, r = {i: side(d, n, i).mean for i in pool}, d.rewards[n]
            rank = sum(max(0, p[i] - p[j]) for i in pool for j in pool if r[i] < r[j])
            return rank - imitated(d, n, pool, lambda s: s.lp)

        return mean_over_groups(d, loss)

    check(get_method("rrhf"), reference)


def with_rationale(d, rng):
    d.ids["stratum"] = np.tile([0, 0, 0, 1], (len(d.rewards), 1))
    d.members[:, 3] = True
    d.mask[:, 3, :2] = [False, True]


@pytest.mark.parametrize("form", ["nll", "log_sigmoid"])
@pytest.mark.parametrize("name", ["rdpo", "rorpo"])
def test_rationales_add_their_likelihood(name, form):
    def reference(d, frozen):
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            answers = [i for i in members_of(d, n) if i != 3]
            pair = best_and_worst(d, n, d.rewards[n], answers)
            if not pair:
                continue
            w, l = (side(d, n, i) for i in pair)
            lp = 0.05 * side(d, n, 3).lp
            extra = -lp if form == "nll" else softplus(-lp)
            total += (dpo(w, l) if name == "rdpo" else orpo(w, l, 0.1)) + extra
            count += 1
        return total / max(count, 1)

    check(get_method(name, gamma=0.05, form=form), reference, prepare=with_rationale)


def test_tp_llama_compares_the_right_step_with_every_failed_sibling():
    def reference(d, frozen):
        def loss(n, pool):
            s, r = {i: side(d, n, i) for i in pool}, d.rewards[n]
            each = [dpo(s[i], s[j]) for i in pool for j in pool if r[i] > r[j]]
            return sum(each) / len(each)

        return mean_over_groups(d, loss)

    check(get_method("tp_llama"), reference, binary=True)


# ---------------------------------------------------------------- TRPA


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def trpa_loss(d, frozen, beta=0.1, c=2.5, anchor="ref_logprobs"):
    drift = [
        d.sampler_logprobs[n, i, t] - d.logprobs[n, i, t]
        for n, i, tokens in sequences(d)
        for t in tokens
    ]
    trust = 0.001 * sum(np.exp(x) - x - 1 for x in drift) / max(len(drift), 1)
    gap = {}
    for n, i, tokens in sequences(d):
        ref = getattr(d, anchor)
        gap[n, i] = sum(d.logprobs[n, i, t] - ref[n, i, t] for t in tokens) / len(tokens)
    pairs = []
    for n, i in gap:
        for m, j in gap:
            if n == m and d.rewards[n, i] > d.rewards[n, j]:
                scale = beta * (c if d.rewards[n, i] >= 1 else 1)
                pairs.append(-log_sigmoid(scale * (gap[n, i] - gap[n, j])))
    if pairs:
        return sum(pairs) / len(pairs) + trust
    groups = {n: [k for k in gap if k[0] == n] for n, _ in gap}
    means = [
        np.mean([-log_sigmoid(gap[k] if d.rewards[k] >= 1 else -gap[k]) for k in keys])
        for keys in groups.values()
    ]
    return (float(np.mean(means)) if means else 0.0) + trust


def on_levels(d, rng):
    d.rewards = rng.choice([-1.0, 0.0, 1.0], d.rewards.shape)


def test_trpa_is_the_papers():
    check(trpa(), trpa_loss, prepare=on_levels, n=4)


def test_trpa_may_compare_with_the_sampler():
    def reference(d, frozen):
        return trpa_loss(d, frozen, beta=0.5, anchor="sampler_logprobs")

    check(trpa(beta=0.5, anchor="sampler"), reference, prepare=on_levels, n=4)


def one_level_a_prompt(d, rng):
    d.rewards = np.repeat(rng.choice([0.0, 1.0], (len(d.rewards), 1)), d.rewards.shape[1], axis=1)


def test_trpa_in_a_batch_without_pairs_pushes_by_level():
    check(trpa(), trpa_loss, prepare=one_level_a_prompt, n=4)
    d = ragged(0)
    d.rewards = np.arange(3.0)[:, None] + np.zeros_like(d.rewards)
    _, gradients = run(trpa(trust_coef=0.0), d)
    best = d.rewards >= 1
    assert (gradients["logprobs"][d.live & best[..., None]] < 0).all()
    assert (gradients["logprobs"][d.live & ~best[..., None]] > 0).all()


def test_trpa_on_two_completions_is_dpo_with_averaged_log_ratios():
    def averaged(d, frozen):
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            both = sorted(members_of(d, n), key=lambda i: -d.rewards[n, i])
            if len(both) < 2 or not all(d.live[n, i].any() for i in both):
                continue
            if d.rewards[n, both[0]] == d.rewards[n, both[1]]:
                continue
            won, rejected = ((d.logprobs - d.ref_logprobs)[n, i][d.live[n, i]].mean() for i in both)
            total -= log_sigmoid(0.5 * (won - rejected))
            count += 1
        return total / count

    def low_scores(d, rng):
        d.rewards = -np.abs(d.rewards)
        d.members[:-1] = True

    check(trpa(beta=0.5, trust_coef=0.0), averaged, g=2, n=5, prepare=low_scores)


# ---------------------------------------------------------------- identities


def test_kto_saturates_on_both_sides():
    d = two(0)
    d.proximal_logprobs = d.ref_logprobs.copy()
    slopes = []
    for shift in (-900.0, 0.0, 900.0):
        shifted = types.SimpleNamespace(**vars(d))
        shifted.logprobs = d.ref_logprobs.copy()
        shifted.logprobs[..., 0] += shift
        slopes.append(np.abs(run(get_method("kto"), shifted)[1]["logprobs"]).max())
    assert slopes[1] > 1e-3
    assert max(slopes[0], slopes[2]) < 1e-6


def test_a_constant_in_every_log_ratio_does_not_move_bco_on_its_first_step():
    d, method = two(0), get_method("bco")
    d.proximal_logprobs = d.logprobs.copy()
    value = run(method, d)[0]
    d.logprobs[..., 0] += 3.0
    d.proximal_logprobs[..., 0] += 3.0
    assert run(method, d)[0] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(("decay", "share"), [(0.75, 0.25), (None, 0.5)])
def test_bco_keeps_a_running_mean(decay, share):
    method = get_method("bco", decay=decay)
    d = two(0)
    batch, objective = as_batch(d), method.objective
    _, first, state, _ = compute_advantages(objective, batch, objective.init())
    d.proximal_logprobs[..., 0] += 4.0
    _, second, _, _ = compute_advantages(objective, as_batch(d), state)
    shift = float(second.stats["shift"][0, 0, 0] - first.stats["shift"][0, 0, 0])
    assert shift == pytest.approx(share * 4.0, abs=1e-5)


def test_bco_weighs_each_step_by_its_completions():
    objective = get_method("bco").objective
    state, total, mean = objective.init(), 0, 0.0
    for seed, n in enumerate((2, 5, 3)):
        d = ragged(seed, n=n, binary=True)
        kinds = [[], []]
        for m, i, _ in sequences(d):
            s = side(d, m, i)
            kinds[int(d.rewards[m, i] > 0.5)].append(s.start - s.ref)
        count = sum(map(len, kinds))
        now = np.mean([np.mean(kind) for kind in kinds if kind])
        total, mean = total + count, mean + count / (total + count) * (now - mean)
        _, batch, state, _ = compute_advantages(objective, as_batch(d), state)
        assert float(batch.stats["shift"][0, 0, 0]) == pytest.approx(mean, abs=1e-5)


def test_rorpo_without_a_rationale_is_orpo():
    assert_same(get_method("rorpo"), get_method("orpo"), two(2))


def test_ddpo_weighs_a_changed_token_gamma_times_an_unchanged_one():
    """A log-ratio counts gamma / (2 + gamma) at the changed token, 1 / (2 + gamma) at another one.

    With every weight 1 both losses would be the same.
    """
    losses = {}
    for place in (0, 1):
        d = two(2)
        d.mask[:] = np.arange(d.mask.shape[2]) < 3
        d.members[:], d.live = True, d.mask.copy()
        d.ref_logprobs[:], d.logprobs[:] = 0.0, 0.0
        d.logprobs[:, 0, place] = 2.0
        tokens = np.tile([[5, 6, 7, 0, 0], [5, 9, 7, 0, 0]], (len(d.rewards), 1, 1))
        batch = as_batch(d, tokens=jnp.asarray(tokens[..., : d.mask.shape[2]], jnp.int32))
        method = get_method("ddpo", beta=1.0, gamma=4.0)
        losses[place], _ = loss_and_gradient(method, batch, live_statistics(method, d))
    assert losses[0] == pytest.approx(softplus(-2.0 * 1 / 6), rel=1e-5)
    assert losses[1] == pytest.approx(softplus(-2.0 * 4 / 6), rel=1e-5)


def test_with_gamma_one_ddpo_is_dpo_on_means():
    d = two(2)
    d.mask[:] = True
    d.live = d.mask.copy()
    assert_same(get_method("ddpo", beta=0.5, gamma=1.0), get_method("dpo", beta=0.1), d)


def test_pro_of_two_is_logistic_in_the_means_times_the_gap():
    d = two(2)
    d.rewards[:] = [2.5, 0.5]
    means = np.where(d.live, d.logprobs, 0).sum(2) / d.live.sum(2)
    expected = np.logaddexp(0, -2.0 * (means[:, 0] - means[:, 1])).mean()
    assert run(get_method("pro", sft_coef=0.0), d)[0] == pytest.approx(expected, abs=1e-6)


def test_rrhf_of_one_gap_is_a_hinge_and_a_likelihood():
    d = two(2)
    means = np.where(d.live, d.logprobs, 0).sum(2) / d.live.sum(2)
    best = np.where(d.live, d.logprobs, 0).sum(2)[:, 0]
    expected = (np.maximum(0, means[:, 1] - means[:, 0]) - best).mean()
    assert run(get_method("rrhf"), d)[0] == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------- SteerLM 2.0


def steerlm2(d, frozen):
    """The loss whose gradient is the paper's, with weights w and b held still."""
    total, count = 0.0, 0
    for n in range(len(d.rewards)):
        pool = [i for i in members_of(d, n) if tokens_of(d, n, i)]
        count += bool(pool)
        if not pool:
            continue
        log_q = {i: sum(d.logprobs[n, i, t] for t in tokens_of(d, n, i)) for i in pool}
        log_0 = {i: sum(d.ref_logprobs[n, i, t] for t in tokens_of(d, n, i)) for i in pool}
        target = np.array([d.rewards[n, i] - log_0[i] for i in pool])
        now = np.array([log_q[i] - log_0[i] for i in pool])
        w, b = (np.exp(x - np.logaddexp.reduce(x)) for x in (target, now))
        total += (w * (np.log(w) - np.log(b))).sum()
    return total / max(count, 1)


def test_steerlm2_is_the_divergence_of_the_wanted_answers():
    check(get_method("steerlm2"), steerlm2)


def test_steerlm2_has_the_gradient_of_the_released_code():
    """-(w - b) grad log Q, with numbers by hand for a group of two."""
    d = ragged(4, n=1, g=2)
    d.members[:], d.mask[:], d.lengths[:] = True, True, d.mask.shape[2]
    d.live = d.mask.copy()
    _, gradients = run(get_method("steerlm2"), d)
    log_q, log_0 = d.logprobs[0].sum(1), d.ref_logprobs[0].sum(1)
    w, b = (np.exp(x) / np.exp(x).sum() for x in (d.rewards[0] - log_0, log_q - log_0))
    expected = np.repeat(-(w - b)[:, None], d.mask.shape[2], axis=1)
    np.testing.assert_allclose(gradients["logprobs"][0], expected, atol=1e-5)
