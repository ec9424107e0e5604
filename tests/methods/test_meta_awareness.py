"""MASA against float64 loops from its paper and released code."""

import jax
import numpy as np
import pytest
from harness import as_batch, check, members_of, ragged, ratio, run, sequences

from jrl.methods import get_method
from jrl.objectives.meta_awareness import prediction_rewards

MASA = get_method("masa", passes=4)
EFFICIENT = get_method("masa", efficient=True, passes=4, cutoff=0.8)


def ask_twice(d, rng):
    """Groups 0 and 1 solve problems 7 and 8; groups 2 and 3 foretell them."""
    d.members[:] = rng.random(d.members.shape) < 0.9
    d.rewards = (rng.random(d.rewards.shape) < 0.5).astype(np.float64)
    d.ids |= {
        "prompt": np.array([7, 8, 7, 8]),
        "meta": np.array([0, 0, 1, 1]),
        "predicted_tokens": rng.integers(-1, 6, d.members.shape),
        "predicted_passes": rng.integers(-1, 5, d.members.shape),
    }


def solutions(d, n):
    """(groups, members) that solve the problem of group n, demonstrations left out."""
    same = [m for m in range(4) if d.ids["prompt"][m] == d.ids["prompt"][n]]
    given = (d.external.astype(bool) & d.mask).any(2)
    return [
        (m, j) for m in same if not d.ids["meta"][m] for j in members_of(d, m) if not given[m, j]
    ]


def foretold(d):
    """The scores after predictions were judged."""
    scores = d.rewards.copy()
    for n, i in np.ndindex(scores.shape):
        if not d.ids["meta"][n]:
            continue
        told = solutions(d, n)
        right = [d.lengths[at] for at in told if d.rewards[at] > 0.5]
        guess, said = d.ids["predicted_tokens"][n, i], d.ids["predicted_passes"][n, i]
        length = float(bool(right) and min(right) < guess < max(right))
        rate = len(right) / max(len(told), 1)
        difficulty = 0.01 ** abs(said / 4 - rate) if said >= 0 and told else 0.0
        scores[n, i] = (scores[n, i] + length + difficulty) / 3
    return scores


def standardised(d, scores, n, i, pool):
    if len(pool) < 2:
        return 0.0
    group = [scores[n, j] for j in pool]
    mean = sum(group) / len(group)
    std = (sum((x - mean) ** 2 for x in group) / (len(group) - 1)) ** 0.5
    return (scores[n, i] - mean) / ((std or 1.0) + 1e-6)


def masa_loss(d, frozen):
    scores, total = foretold(d), 0.0
    for n, i, tokens in sequences(d):
        a = standardised(d, scores, n, i, members_of(d, n))
        for t in tokens:
            rho = ratio(d, (n, i, t))
            total -= min(rho * a, np.clip(rho, 0.8, 1.2) * a) / len(tokens)
    return total / max(len(sequences(d)), 1)


def predictions(d, n, name):
    """Valid predictions about the problem of group n."""
    same = [m for m in range(4) if d.ids["prompt"][m] == d.ids["prompt"][n] and d.ids["meta"][m]]
    found = [d.ids[name][m, j] for m in same for j in members_of(d, m)]
    return [x for x in found if x >= 0]


def efficient_loss(d, frozen):
    scores, given = foretold(d), (d.external.astype(bool) & d.mask).any(2)
    rows = []
    for n, i, tokens in sequences(d):
        solving = not d.ids["meta"][n]
        said = predictions(d, n, "predicted_passes")
        if solving and said and np.mean(said) in (0.0, 4.0):
            continue
        guesses = predictions(d, n, "predicted_tokens")
        limit = 0.8 * np.mean(guesses) if solving and guesses else np.inf
        tokens = [t for t in tokens if t < limit]
        if not tokens:
            continue
        pool = [j for j in members_of(d, n) if not given[n, j]]
        a = 0.0 if given[n, i] else standardised(d, scores, n, i, pool)
        inner = 0.0
        for t in tokens:
            rho = ratio(d, (n, i, t))
            inner -= min(rho * a, np.clip(rho, 0.8, 1.2) * a)
            inner -= 0.1 * d.external[n, i, t] * d.logprobs[n, i, t]
        rows.append(inner / len(tokens))
    return sum(rows) / max(len(rows), 1)


def test_masa_is_the_papers():
    check(MASA, masa_loss, prepare=ask_twice, n=4)


def test_efficient_masa_gates_cuts_and_imitates():
    def gate_one(d, rng):
        ask_twice(d, rng)
        d.ids["predicted_passes"][3] = 4  # problem 8 is called trivial

    check(EFFICIENT, efficient_loss, prepare=gate_one, n=4, demonstrations=1)
    check(EFFICIENT, efficient_loss, prepare=ask_twice, n=4, demonstrations=1, batches=((5, 0.3),))


def test_masa_without_predictions_is_grpo():
    d = ragged(1)
    ours, theirs = run(MASA, d), run(get_method("grpo"), d)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1]["logprobs"], theirs[1]["logprobs"], atol=1e-7)


def test_a_perfect_prediction_is_worth_a_point():
    d = ragged(1, n=4)
    ask_twice(d, np.random.default_rng(0))
    d.members[:] = True
    d.rewards[:] = 1.0
    d.rewards[0, 0] = 0.0
    d.lengths[0] = [1, 2, 4, 5]
    d.ids["predicted_tokens"][2] = [3, 2, 5, -1]
    d.ids["predicted_passes"][2] = [3, 3, 3, 3]
    batch = as_batch(d)
    judge = jax.jit(lambda batch: prediction_rewards(4, 0.5).apply(batch.score(), batch, ())[0])
    scored = judge(batch)
    np.testing.assert_allclose(scored[2], [1, 2 / 3, 2 / 3, 2 / 3], rtol=1e-5)
