"""Rows as references see them: steps in order, what was paid for each, and estimates of value."""

import numpy as np
from harness import numbers


def steps_of(d, n, i):
    """[(label, its live tokens)] of one live member, in order."""
    positions = {}
    for t in range(d.mask.shape[2]):
        if d.live[n, i, t]:
            positions.setdefault(d.ids["step"][n, i, t], []).append(t)
    return list(positions.items())


def episodes(d):
    """(n, i, its steps) of every live member that has a live token."""
    every = [
        (n, i, steps_of(d, n, i)) for n in range(len(d.members)) for i in range(d.members[n].size)
    ]
    return [(n, i, steps) for n, i, steps in every if steps]


def paid(d, rng):
    """Points for some tokens of every row; the rest of the score belongs to the last live one."""
    d.paid = numbers(rng, *d.mask.shape) * (rng.random(d.mask.shape) < 0.5)


def earned(d, n, i):
    """Points of each step: what was paid, and what is left of the score for the last one."""
    steps = steps_of(d, n, i)
    paid = getattr(d, "paid", 0 * d.logprobs)
    points = [sum(paid[n, i, t] for t in tokens) for _, tokens in steps]
    points[-1] += d.rewards[n, i] - sum(points)
    return points


def live_tokens(d):
    """(n, i) of each member with a live token -> the places of those."""
    n, g, t = d.mask.shape
    steps_by_member = {}
    for i, j in np.ndindex(n, g):
        steps = [k for k in range(t) if d.live[i, j, k]]
        if steps:
            steps_by_member[i, j] = steps
    return steps_by_member


def estimates(d, *, beta, discount, decay, whiten):
    """Advantages and returns by at: GAE as a double sum over later temporal differences."""
    advantages, returns = {}, {}
    for (i, j), steps in live_tokens(d).items():
        v = [d.rollout_values[i, j, k] for k in steps] + [0.0]
        r = [-beta * (d.sampler_logprobs[i, j, k] - d.ref_logprobs[i, j, k]) for k in steps]
        r[-1] += d.rewards[i, j]
        delta = [r[k] + discount * v[k + 1] - v[k] for k in range(len(steps))]
        for k, place in enumerate(steps):
            tail = range(k, len(steps))
            a = sum((discount * decay) ** (later - k) * delta[later] for later in tail)
            advantages[i, j, place] = a
            returns[i, j, place] = a + v[k]
    if whiten and advantages:
        mean = sum(advantages.values()) / len(advantages)
        variance = sum((a - mean) ** 2 for a in advantages.values()) / len(advantages)
        advantages = {at: (a - mean) / np.sqrt(variance + 1e-8) for at, a in advantages.items()}
    return advantages, returns


def with_nucleus(d, rng):
    """Statistics that ``nlpo`` brings along."""
    d.in_nucleus = (rng.random(d.mask.shape) < 0.7).astype(np.float64)
    for name in ("nucleus_logprob", "rollout_nucleus_logprob"):
        setattr(d, name, numbers(rng, *d.mask.shape, scale=0.3, shift=-1.0))
