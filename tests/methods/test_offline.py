"""Imitation of the best and values of tokens, against float64 references in loops."""

import numpy as np
from harness import check, members_of, numbers, sequences

from jrl.methods import get_method


def filtered_loss(d, frozen, keep=0.4):
    scores = [d.rewards[n, i] for n in range(len(d.rewards)) for i in members_of(d, n)]
    bound = np.quantile(scores, 1 - keep)
    every = [
        -d.logprobs[n, i, t]
        for n, i, tokens in sequences(d)
        if d.rewards[n, i] >= bound - 1e-9
        for t in tokens
    ]
    return sum(every) / max(len(every), 1)


def test_filtered_bc_clones_the_best_of_the_batch():
    check(get_method("filtered_bc", keep=0.4), filtered_loss)


def with_heads(d, rng):
    """What the heads say of each token, and points for some turns."""
    for name in ("q_0", "q_1", "q_target", "state_value", "q_unlikely", "base_surprise"):
        setattr(d, name, numbers(rng, *d.mask.shape))
    d.paid = numbers(rng, *d.mask.shape) * (rng.random(d.mask.shape) < 0.3) * d.mask


def rewards_of(d, n, i, tokens):
    """Points at each live token: what was paid there, and the rest of the score at the last."""
    points = {t: d.paid[n, i, t] for t in tokens}
    points[tokens[-1]] += d.rewards[n, i] - sum(points.values())
    return points


def rows_of(d):
    for n, i in np.argwhere(d.live.any(axis=2)):
        yield n, i, np.flatnonzero(d.live[n, i]).tolist()


def ilql_loss(d, frozen, tau=0.7, gamma=0.9, alpha=0.05, clone=0.5):
    total = count = 0.0
    for n, i, tokens in rows_of(d):
        points = rewards_of(d, n, i, tokens)
        for now, later in zip(tokens, [*tokens[1:], None], strict=True):
            at = n, i, now
            after = 0.0 if later is None else frozen.state_value[n, i, later]
            aim = points[now] + gamma * after
            for name in ("q_0", "q_1"):
                total += (getattr(d, name)[at] - aim) ** 2 / 2
            below = d.q_target[at] < d.state_value[at]
            total += abs(tau - below) * (d.q_target[at] - d.state_value[at]) ** 2 / 2
            total += alpha * d.q_unlikely[at] + clone * d.base_surprise[at]
            count += 1
    return total / max(count, 1)


def test_ilql_is_the_papers():
    method = get_method("ilql", discount=0.9, cql_coef=0.05, sft_coef=0.5)
    moved = ("q_0", "q_1", "state_value", "q_unlikely", "base_surprise")
    check(method, ilql_loss, wrt=moved, prepare=with_heads)


def mc_loss(d, frozen, gamma=0.9, alpha=0.05):
    total = count = 0.0
    for n, i, tokens in rows_of(d):
        points, later = rewards_of(d, n, i, tokens), 0.0
        for t in reversed(tokens):
            later = points[t] + gamma * later
            total += (d.q_0[n, i, t] - later) ** 2 / 2
            total += alpha * d.q_unlikely[n, i, t] + d.base_surprise[n, i, t]
            count += 1
    return total / max(count, 1)


def test_mc_returns_is_the_papers():
    method = get_method("mc_returns", discount=0.9, cql_coef=0.05)
    check(method, mc_loss, wrt=("q_0", "q_unlikely", "base_surprise"), prepare=with_heads)
