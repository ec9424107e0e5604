"""Kripke's models of intuitionistic logic, of three worlds each.

A formula that is forced at a world is forced at all worlds above it. What is provable is forced at
every world of every model.
"""

import functools
import itertools

ABOVE = {"chain": ((0, 1, 2), (1, 2), (2,)), "fork": ((0, 1, 2), (1,), (2,))}


def upwards(above):
    """Sets of worlds that hold whatever is above a member."""
    every = itertools.product((False, True), repeat=len(above))
    return [up for up in every if all(up[v] for w in range(len(up)) if up[w] for v in above[w])]


MODELS = [
    (above, dict(zip("abc", values, strict=True)))
    for above in ABOVE.values()
    for values in itertools.product(upwards(above), repeat=3)
]


def forced(model, formula, world):
    above, values = model
    at = functools.partial(forced, model)
    if not formula.parts:
        return {"True": True, "False": False}.get(formula.name) or (
            formula.name in values and values[formula.name][world]
        )
    left, right = formula.parts
    if formula.name == "/\\":
        return at(left, world) and at(right, world)
    if formula.name == "\\/":
        return at(left, world) or at(right, world)
    if formula.name == "->":
        return all(at(right, v) for v in above[world] if at(left, v))
    return all(at(left, v) == at(right, v) for v in above[world])


def follows(model, hypotheses, target):
    """Whether the target is forced at every world at which all hypotheses are."""
    return all(
        forced(model, target, world)
        for world in range(3)
        if all(forced(model, formula, world) for formula in hypotheses)
    )
