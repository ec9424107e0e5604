"""A reward for answers that differ from the others of their group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jrl.errors import UserError
from jrl.rewards.agreement import components
from jrl.rewards.base import Sample, whole_group
from jrl.rewards.math import math_reward
from jrl.user_code import load

_SHORT = 5
"""Words up to which the released code compares words in the place of asking."""


@whole_group
def darling(
    samples: list[Sample], equivalent: str, right_only: bool = False, floor: float = 0.1
) -> list[float]:
    """Share of the group's other members that are not of a completion's class.

    The diversity of "Jointly Reinforcing Diversity and Quality in Language Model Generations"
    (DARLING, arXiv:2509.02534), as its released code has it: a classifier gives the probability
    that two texts are equivalent, above 1/2 they are neighbours, and chains of neighbours are a
    class. Among n members

        d_i = max(floor, (n - |class of i|) / (n - 1))

    and the reward is the product with a quality, ``combine = "product"``, in GRPO without the
    deviation. Of two texts of at most five words the code compares the words. A member alone has
    ``floor``.

    Args:
      samples: of a group.
      equivalent: "FILE.py:function", (texts, texts) -> the probability of each pair.
      right_only: for answers that can be checked: classes are made among the members that ``math``
        calls right, and the others have ``floor``.
      floor: the least.

    Raises:
      UserError: no such function, or it returned another number of probabilities.
    """
    ask = load(equivalent, "rewards.darling.equivalent")
    points = [floor] * len(samples)
    right = math_reward(samples) if right_only else [1.0] * len(samples)
    places = [i for i, verdict in enumerate(right) if verdict]
    if len(places) < 2:
        return points
    texts = [samples[i].completion for i in places]
    classes = components(_neighbours(texts, ask))
    for place, number in zip(places, classes, strict=True):
        share = (len(places) - classes.count(number)) / (len(places) - 1)
        points[place] = max(floor, share)
    return points


def _neighbours(texts: Sequence[str], ask: Callable[..., Sequence[float]]) -> np.ndarray:
    """[n, n] bool: which texts are equivalent."""
    near = np.zeros((len(texts), len(texts)), bool)
    pairs = []
    for i, j in itertools.combinations(range(len(texts)), 2):
        words = [texts[k].lower().split() for k in (i, j)]
        longest = max(map(len, words))
        if longest <= _SHORT:
            near[i, j] = near[j, i] = len({*words[0]} & {*words[1]}) * 2 >= longest
        else:
            pairs.append((i, j))
    if not pairs:
        return near
    likely = list(ask([texts[i] for i, _ in pairs], [texts[j] for _, j in pairs]))
    if len(likely) != len(pairs):
        raise UserError(
            f"rewards.darling.equivalent returned {len(likely)} probabilities for {len(pairs)}"
            " pairs"
        )
    for (i, j), probability in zip(pairs, likely, strict=True):
        near[i, j] = near[j, i] = probability > 0.5
    return near
