"""Episodes as references see them: the steps of a row in order, and what was paid for each."""

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
