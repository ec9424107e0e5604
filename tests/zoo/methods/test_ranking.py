"""Neural PG-RANK and Rank-GRPO against float64 loops from their papers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import as_batch, check, clipped_loss, members_of, numbers, ragged, run, sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.methods import get_method
from jrl.zoo.methods import ranking

# ---------------------------------------------------------------- the Plackett-Luce distribution


def order_logprob(scores, order):
    """The log-probability of one order, from the definition."""
    left, total = list(order), 0.0
    while left:
        total += scores[left[0]] - np.log(sum(np.exp(scores[j]) for j in left))
        left.pop(0)
    return total


@functools.cache
def sampling_params(size):
    return jax.jit(jax.vmap(ranking.plackett_luce))


@given(st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
def test_orders_have_the_probabilities_of_the_distribution(live, seed):
    scores = numbers(np.random.default_rng(seed), 4, scale=2.0)
    orders = list(itertools.permutations(range(live)))
    padded = np.array([[*order, *range(live, 4)] for order in orders])
    in_order = np.broadcast_to(np.arange(4) < live, padded.shape)
    got = sampling_params(4)(jnp.asarray(scores[padded], jnp.float32), jnp.asarray(in_order)).sum(1)
    expected = [order_logprob(scores, order) for order in orders]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert np.exp(np.asarray(got)).sum() == pytest.approx(1, rel=1e-5)


def test_gumbel_noise_and_a_sort_draw_from_the_distribution():
    scores = jnp.array([1.0, 0.0, -0.5, 9.0])
    live = jnp.array([True, True, True, False])
    noise = jax.random.gumbel(jax.random.key(0), (20_000, 4))
    orders = np.asarray(jax.jit(jax.vmap(lambda n: ranking.ranked(scores + n, live)))(noise))
    assert (orders[:, 3] == 3).all()
    for order in itertools.permutations(range(3)):
        share = (orders[:, :3] == order).all(1).mean()
        assert share == pytest.approx(np.exp(order_logprob(np.asarray(scores), order)), abs=0.015)


# ---------------------------------------------------------------- utilities


def utility_of(kind, relevance, cutoff):
    """The utility of a ranking from its members' relevance in order, from the definitions."""
    relevance = [max(x, 0.0) for x in relevance]

    def dcg(values):
        return sum(x / np.log2(k + 2) for k, x in enumerate(values[:cutoff]))

    if kind == "mrr":
        return next((1 / (k + 1) for k, x in enumerate(relevance[:cutoff]) if x > 0), 0.0)
    best = dcg(sorted(relevance, reverse=True))
    return dcg(relevance) if kind == "dcg" else dcg(relevance) / best if best else 0.0


@pytest.mark.parametrize("kind", ranking.UTILITIES)
def test_utilities_are_their_definitions(kind):
    rng = np.random.default_rng(0)
    gains = jax.jit(lambda relevance, live: ranking.utility_gains(kind, relevance, live, 3))
    for case in range(6):
        relevance = numbers(rng, 5, shift=0.5) * (case > 0)
        got = gains(jnp.asarray(relevance, jnp.float32), jnp.arange(5) < 4)
        expected = utility_of(kind, list(relevance[:4]), 3)
        assert float(got.sum()) == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---------------------------------------------------------------- Neural PG-RANK


def groups(d):
    members = {}
    for n, i, _ in sequences(d):
        members.setdefault(n, []).append(i)
    return members


@functools.cache
def noise_of(tie_breaker, count):
    return np.asarray(jax.random.gumbel(jax.random.key(tie_breaker & 0xFFFFFF), (count,)))


def ndcg_gains(relevance, cutoff):
    """Contribution of each rank to the utility."""
    gains = [max(x, 0.0) / np.log2(k + 2) * (k < cutoff) for k, x in enumerate(relevance)]
    best = utility_of("dcg", sorted(relevance, reverse=True), cutoff)
    return [gain / best if best else 0.0 for gain in gains]


def pg_rank_loss(d, frozen, count=4, scale=1.0, tail=False, values=False):
    total = 0.0
    for n, live in groups(d).items():

        def score(x, i, n=n):
            at = np.nonzero(x.mask[n, i])[0]
            return scale * (x.values[n, i, at[-1]] if values else x.logprobs[n, i, at].mean())

        scores = {i: score(d, i) for i in live}
        noisy = {
            i: score(frozen, i) + noise_of(int(d.ids["tie_breaker"][n, i]), count) for i in live
        }
        credits, logs = [], []
        for draw in range(count):
            order = sorted(live, key=lambda i: -noisy[i][draw])
            gains = ndcg_gains([d.rewards[n, i] for i in order], 3)
            places = range(len(order))
            credits.append([sum(gains[k:]) if tail else sum(gains) for k in places])
            left = [np.log(sum(np.exp(scores[j]) for j in order[k:])) for k in places]
            logs.append([scores[i] - rest for i, rest in zip(order, left, strict=True)])
        credits, logs = np.array(credits), np.array(logs)
        others = (credits.sum(0, keepdims=True) - credits) / (count - 1)
        total -= ((credits - others) * logs).sum() / count
    return total / max(len(groups(d)), 1)


PG_RANK = get_method("pg_rank", rankings=4, cutoff=3)


def test_pg_rank_is_the_papers():
    check(PG_RANK, pg_rank_loss, g=5)


def test_pg_rank_by_values_and_from_each_rank_on():
    method = get_method(
        "pg_rank", rankings=4, cutoff=3, score="values", per_rank=True, temperature=0.5
    )

    def loss(d, frozen):
        return pg_rank_loss(d, frozen, scale=2.0, tail=True, values=True)

    check(method, loss, wrt=("values",), g=5)


def test_pg_rank_on_average_climbs_the_expected_utility():
    scores, relevance = np.array([0.5, 0.0, -0.3]), np.array([0.0, 1.0, 0.3])
    orders = list(itertools.permutations(range(3)))

    def expected(s):
        chances = [np.exp(order_logprob(s, order)) for order in orders]
        return sum(
            p * utility_of("ndcg", list(relevance[list(order)]), 10)
            for p, order in zip(chances, orders, strict=True)
        )

    slope = [(expected(scores + h) - expected(scores - h)) / 2e-5 for h in 1e-5 * np.eye(3)]
    apply = get_method("pg_rank", rankings=2).objective.surrogate.apply

    def loss(s, tie_breakers):
        stats = {"logprobs": s[:, None], "tie_breaker": tie_breakers[:, None]}
        return apply(stats, jnp.asarray(relevance, jnp.float32)[:, None], jnp.ones((3, 1), bool))[
            0
        ].sum()

    tie_breakers = np.random.default_rng(0).integers(0, 2**24, (4000, 3)).astype(np.float32)
    mean = jax.jit(
        lambda s, tie_breakers: jax.vmap(jax.grad(loss), (None, 0))(s, tie_breakers).mean(0)
    )
    got = mean(jnp.asarray(scores, jnp.float32), jnp.asarray(tie_breakers))
    np.testing.assert_allclose(-np.asarray(got), slope, atol=0.01)
    assert np.abs(slope).max() > 0.05


def test_pg_rank_leaves_equal_members_alone():
    d = ragged(1, g=5)
    _, slope = run(PG_RANK, d)
    assert np.ptp(d.rewards[1]) == 0
    assert np.abs(slope["logprobs"][1]).max() < 1e-6
    assert np.abs(slope["logprobs"]).max() > 1e-3


# ---------------------------------------------------------------- Rank-GRPO


def lists(d, rng):
    """Three wanted items; tokens of items 0..4, some of none, in order."""
    n, g, t = d.mask.shape
    d.rewards = numbers(rng, n, g, 3)
    d.rewards[0] = d.rewards[0, :1]
    d.ids["item"] = np.sort(rng.integers(0, 5, (n, g, t)), axis=2)
    d.ids["item"][rng.random((n, g, t)) < 0.2] = -1


def standardised(values, i, eps=1e-4):
    if len(values) < 2:
        return 0.0
    mean = sum(values.values()) / len(values)
    std = (sum((x - mean) ** 2 for x in values.values()) / (len(values) - 1)) ** 0.5
    return (values[i] - mean) / (std + eps)


def rank_grpo_loss(
    d, frozen, gain="own", average="ranks", shaping=0.1, places=3, clips=(0.06, 0.08), beta=0.001
):
    rows, every = [], []
    for n, i, tokens in sequences(d):
        item = {t: min(d.ids["item"][n, i, t], places) for t in tokens}
        stop = tokens[-1] if not d.truncated[n, i] else None
        tokens = [t for t in tokens if item[t] >= 0 or t == stop]
        if not tokens:
            continue
        emitted = max(max(item[t] for t in tokens), -1) + 1
        ranks = {}
        for t in tokens:
            ranks.setdefault(item[t], []).append(t)
        losses = {}
        for k, rank_tokens in ranks.items():
            gaps = [d.logprobs[n, i, t] - d.sampler_logprobs[n, i, t] for t in rank_tokens]
            s = np.exp(np.clip(sum(gaps) / len(gaps), -20, 20))
            for t in rank_tokens:
                a = 0.0
                if 0 <= k < places and not (shaping and t == stop):
                    a = standardised(
                        {j: credit(d.rewards[n, j], k, gain) for j in members_of(d, n)}, i
                    )
                a -= shaping * (k >= places)
                if t == stop:
                    a += shaping * ((emitted == places) - float(emitted < places))
                losses[t] = clipped_loss(s, a, *clips)
        kl = [d.ref_logprobs[n, i, t] - d.logprobs[n, i, t] for t in tokens]
        kl = [beta * (np.exp(gap) - gap - 1) for gap in kl]
        if average == "ranks":
            means = [np.mean([losses[t] for t in rank_tokens]) for rank_tokens in ranks.values()]
            rows.append(np.mean(means) + np.mean(kl))
        else:
            every += [loss + term for loss, term in zip(losses.values(), kl, strict=True)]
            rows.append(np.mean(list(losses.values())) + np.mean(kl))
    if average == "batch":
        return sum(every) / max(len(every), 1)
    return sum(rows) / max(len(rows), 1)


def credit(relevance, k, gain):
    if gain == "own":
        return relevance[k]
    return sum(relevance[j] / np.log2(j + 2) for j in range(k, len(relevance)))


def test_rank_grpo_is_the_papers():
    check(get_method("rank_grpo"), rank_grpo_loss, prepare=lists, t=7)


@pytest.mark.parametrize(("gain", "average"), [("own", "tokens"), ("tail", "batch")])
def test_rank_grpo_by_tokens_and_by_tail(gain, average):
    options = {"gain": gain, "average": average}
    shaping = 0.0 if average == "tokens" else 0.2
    method = get_method("rank_grpo", **options, length_shaping=shaping, clip_low=0.2, kl_coef=0.1)

    def loss(d, frozen):
        return rank_grpo_loss(d, frozen, **options, shaping=shaping, clips=(0.2, 0.08), beta=0.1)

    check(method, loss, prepare=lists, t=7)


def test_rank_grpo_of_one_item_is_grpo_with_the_ratio_of_the_sequence():
    d = ragged(1)
    gspo = get_method("gspo", clip_low=0.06, clip_high=0.08, eps=1e-4, kl_coef=0.001)
    ours, theirs = run(get_method("rank_grpo"), d), run(gspo, d)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"], atol=1e-6)
    assert "item" not in as_batch(d).ids
