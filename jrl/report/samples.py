"""Samples of a report: complete groups, thinned evenly over the run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SAMPLES = 2000
"""About the most samples in the page."""

MAX_TOKENS = 200_000
"""The most tokens in the page that are shown one by one; other samples are shown as text."""

Sample = Mapping[str, Any]


def thin_samples(samples: Sequence[Sample], most: int = MAX_SAMPLES) -> list[dict[str, Any]]:
    """Samples of complete groups, thinned evenly to about ``most``.

    Args:
      samples: in the order in which they were logged.
      most: that are kept; a single group that is larger is kept nevertheless.

    Returns:
      The samples kept, in their order. "group" numbers the groups of one step and split anew where
      the record has none.

    >>> [s["group"] for s in thin_samples([{"step": 1, "prompt": p} for p in "aab"])]
    [0, 0, 1]
    """
    groups = _groups(samples)
    count = len(groups)
    while len(samples) > most and count > 1:
        picked = [groups[i] for i in spread(len(groups), count)]
        over = sum(map(len, picked)) - most
        if over <= 0:
            break
        count -= max(1, over * count // sum(map(len, picked)))
    groups_shown = [groups[i] for i in spread(len(groups), count)]
    return [sample for group in _lighter(groups_shown) for sample in group]


def spread(total: int, count: int) -> list[int]:
    """``count`` indices of ``total``, evenly, with the first and the last.

    >>> spread(10, 4)
    [0, 3, 6, 9]
    """
    if count >= total:
        return list(range(total))
    return [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]


def _groups(samples: Sequence[Sample]) -> list[list[dict[str, Any]]]:
    """The samples by group, each with its group's number."""

    def place(sample: Sample) -> tuple[Any, ...]:
        return sample.get("step"), sample.get("split"), sample.get("group", sample.get("prompt"))

    groups: list[list[dict[str, Any]]] = []
    before, number = None, 0
    for key, members in itertools.groupby(samples, place):
        number = number + 1 if before == key[:2] else 0
        before = key[:2]
        groups.append([{"group": number, **sample} for sample in members])
    return groups


def _lighter(groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The groups, tokens one by one only in some, evenly, where there are too many."""
    sizes = [sum(len(s["tokens"]["text"]) for s in group if "tokens" in s) for group in groups]
    heavy = [i for i, size in enumerate(sizes) if size]
    total = sum(sizes)
    if total <= MAX_TOKENS:
        return groups
    keep, room = set(), MAX_TOKENS
    for place in spread(len(heavy), max(1, len(heavy) * MAX_TOKENS // total)):
        if sizes[heavy[place]] <= room:
            keep.add(heavy[place])
            room -= sizes[heavy[place]]
    return [
        group if i in keep else [{k: v for k, v in s.items() if k != "tokens"} for s in group]
        for i, group in enumerate(groups)
    ]
