"""Pairs, groups and identities as the tests of preference methods see them.

A reference sees the pairs of a batch as the paper does: ``pairs_of`` reads them off the rewards, a
``side`` is the sums over a completion's tokens.
"""

import types

import numpy as np
import pytest
from harness import members_of, ragged, run, tokens_of

from jrl.objectives import transforms


def softplus(x):
    return np.logaddexp(0, x)


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def eligible(d, n, members=None):
    members = members_of(d, n) if members is None else members
    return [i for i in members if tokens_of(d, n, i)]


def side(d, n, i):
    tokens = tokens_of(d, n, i)
    lp, ref, start = (
        sum(getattr(d, name)[n, i, t] for t in tokens)
        for name in ("logprobs", "ref_logprobs", "proximal_logprobs")
    )
    return types.SimpleNamespace(
        n=n, i=i, tokens=tokens, lp=lp, ref=ref, h=lp - ref, start=start, mean=lp / len(tokens)
    )


def best_and_worst(d, n, scores, members=None):
    """(best, worst) member, ties by the tie-breaker; None without a gap."""
    members_left = eligible(d, n, members)
    if not members_left:
        return None
    tie_breaker = d.ids["tie_breaker"][n]
    best = max(members_left, key=lambda i: (scores[i], tie_breaker[i]))
    worst = max(members_left, key=lambda i: (-scores[i], tie_breaker[i]))
    return (best, worst) if scores[best] > scores[worst] else None


def pairs_of(d, rewards=None, min_gap=0.0):
    """(chosen side, rejected side) of every group that has a gap above ``min_gap``."""
    rewards, out = d.rewards if rewards is None else rewards, []
    for n in range(len(rewards)):
        pair = best_and_worst(d, n, rewards[n])
        if pair and rewards[n, pair[0]] - rewards[n, pair[1]] > min_gap:
            out.append((side(d, n, pair[0]), side(d, n, pair[1])))
    return out


def mean_of_pairs(loss, min_gap=0.0):
    """The mean over a batch's pairs of ``loss(chosen, rejected)``."""

    def reference(d, frozen):
        pairs = pairs_of(d, min_gap=min_gap)
        return sum(loss(w, l) for w, l in pairs) / max(len(pairs), 1)

    return reference


def dpo(w, l, beta=0.1):
    return softplus(beta * (l.h - w.h))


def mean_over_groups(d, loss):
    """The mean of ``loss(n, members)`` over groups with a gap."""
    total, count = 0.0, 0
    for n in range(len(d.rewards)):
        if best_and_worst(d, n, d.rewards[n]):
            total += loss(n, eligible(d, n))
            count += 1
    return total / max(count, 1)


def log_odds(mean):
    mean = min(mean, -1e-6)
    return mean - np.log(-np.expm1(mean))


def orpo(w, l, lam=0.3):
    return -w.mean + lam * softplus(log_odds(l.mean) - log_odds(w.mean))


def win_rate(d, n, i, others_only, model):
    others = eligible(d, n)
    opponents = [j for j in others if j != i] if others_only else others
    gaps = [d.rewards[n, i] - d.rewards[n, j] for j in opponents]
    wins = [sigmoid(x) if model == "bradley_terry" else (np.sign(x) + 1) / 2 for x in gaps]
    return np.mean(wins) if wins else 0.5


def replaced(method, **parts):
    return method._replace(objective=method.objective._replace(**parts))


def before(method, *steps):
    chain = transforms.chain(*steps, method.objective.advantage)
    return replaced(method, advantage=chain)


def two(seed, t=5, **changes):
    """Whole pairs, the first member chosen."""
    d = ragged(seed, g=2, t=t, **changes)
    d.members[:] = True
    d.mask[..., 0] = True
    d.rewards[:] = [1.0, 0.0]
    d.live = d.mask.copy()
    return d


def assert_same(one, other, d, atol=1e-6):
    (a, grad_a), (b, grad_b) = run(one, d), run(other, d)
    assert np.abs(grad_b["logprobs"]).max() > 1e-4
    assert a == pytest.approx(b, abs=atol)
    np.testing.assert_allclose(grad_a["logprobs"], grad_b["logprobs"], atol=atol)


def of_rewards(loss, beta=0.1):
    return mean_of_pairs(lambda w, l: loss(beta * w.h, beta * l.h))


def logistic(a, b):
    return softplus(b - a)
