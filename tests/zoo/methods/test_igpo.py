"""The methods of turns.py against loops written from their papers."""

import numpy as np
from harness import check, clipped_loss, mean_over, members_of, ratio
from steps import earned, paid, steps_of

from jrl.zoo.methods.structure import igpo


def normalised(values, eps=1e-6):
    gap = np.array(values) - np.mean(values)
    return gap / (np.std(values, ddof=1) + eps) if len(values) > 1 else gap * 0


def igpo_loss(d, frozen, discount=0.7):
    advantages = {}
    for n in range(len(d.rewards)):
        turns = [
            (i, k, tokens, points)
            for i in members_of(d, n)
            if steps_of(d, n, i)
            for k, ((_, tokens), points) in enumerate(
                zip(steps_of(d, n, i), earned(d, n, i), strict=True)
            )
        ]
        each = normalised([points for *_, points in turns]) if turns else []
        for i, k, tokens, _ in turns:
            later = [(l, a) for (j, l, *_), a in zip(turns, each, strict=True) if j == i and l >= k]
            for t in tokens:
                advantages[n, i, t] = sum(discount ** (l - k) * a for l, a in later)
    return mean_over(d, lambda n, i, t: clipped_loss(ratio(d, (n, i, t)), advantages[n, i, t]))


def test_igpo_is_the_papers():
    check(igpo(discount=0.7), igpo_loss, ids=("step",), prepare=paid)
