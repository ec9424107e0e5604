"""Loops of reward models and of process reward models that several references share."""

import numpy as np
from harness import members_of, tokens_of
from preferences import best_and_worst, eligible, softplus


def value_of(d, n, i):
    return d.values[n, i, tokens_of(d, n, i)[-1]]


def mean_over_groups(loss):
    def reference(d, frozen):
        total, count = 0.0, 0
        for n in range(len(d.rewards)):
            if best_and_worst(d, n, d.rewards[n]):
                v = {i: value_of(d, n, i) for i in eligible(d, n)}
                total += loss(v, d.rewards[n])
                count += 1
        return total / max(count, 1)

    return reference


def mean_over_pairs(loss):
    def of_group(v, r):
        each = [loss(v[i], v[j], r[i] - r[j]) for i in v for j in v if r[i] > r[j]]
        return sum(each) / len(each)

    return mean_over_groups(of_group)


def step_ends(d, n, i):
    tokens = tokens_of(d, n, i)
    step = d.ids["step"][n, i] if "step" in d.ids else np.zeros(d.mask.shape[2])
    return [
        a
        for a, b in zip(tokens, [*tokens[1:], None], strict=False)
        if b is None or step[b] != step[a]
    ]


def process(d, frozen):
    losses = []
    for n in range(len(d.rewards)):
        for i in members_of(d, n):
            for t in step_ends(d, n, i):
                z = d.step_labels[n, i, t] if hasattr(d, "step_labels") else d.rewards[n, i]
                z = min(max(z, 0.0), 1.0)
                v = d.values[n, i, t]
                losses.append(z * softplus(-v) + (1 - z) * softplus(v))
    return sum(losses) / max(len(losses), 1)


def labelled(d, rng):
    d.step_labels = (rng.random(d.mask.shape) < 0.5).astype(np.float64)
