"""Rewards by how the members of a group agree: majority, shares of answers, what is new.

None of them reads an answer of the data. Answers are equal when their final answers are, by the
grammar of ``jrl.rewards.answers``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jrl.rewards.base import Sample, whole_group
from jrl.rewards.exact import final_answer, same_answer


def answer_classes(samples: Sequence[Sample]) -> list[int | None]:
    """The number of each sample's class of equal final answers; None for a text without one."""
    answers = [final_answer(sample.completion) for sample in samples]
    firsts: list[str] = []
    classes: list[int | None] = []
    for answer in answers:
        if answer is None:
            classes.append(None)
            continue
        same = (i for i, first in enumerate(firsts) if same_answer(answer, first))
        number = next(same, len(firsts))
        if number == len(firsts):
            firsts.append(answer)
        classes.append(number)
    return classes


@whole_group
def majority(samples: list[Sample]) -> list[float]:
    """1 for the answer that most members give, else 0; of several the one that came first.

    The pseudo-label of "TTRL: Test-Time Reinforcement Learning" (arXiv:2504.16084).
    """
    classes = answer_classes(samples)
    present = [c for c in classes if c is not None]
    if not present:
        return [0.0] * len(samples)
    best = max(dict.fromkeys(present), key=present.count)
    return [float(c == best) for c in classes]


@whole_group
def answer_share(
    samples: list[Sample], low: float = 0.0, high: float | None = None
) -> list[float | None]:
    """The share of members that give the same answer; 0 without an answer.

    EMPO, "Right Question is Already Half the Answer: Fully Unsupervised LLM Reasoning
    Incentivization" (arXiv:2504.05812): minimises the entropy of the classes of answers. Groups
    outside of a band of that entropy say nothing; the released code leaves out those in which all
    answers differ.

    Args:
      samples: of a group.
      low: nats, the entropy of the classes that a group must reach to count.
      high: nats that it must stay below; None for all groups but those in which all answers
        differ, whose members get 0 points as in the released code.
    """
    if not samples:
        return []
    classes, n = answer_classes(samples), len(samples)
    # a text without an answer is a class of its own
    numbers = [-1 - i if c is None else c for i, c in enumerate(classes)]
    shares = {c: numbers.count(c) / n for c in numbers}
    entropy = -sum(p * math.log(p) for p in shares.values())
    if high is None and len(shares) == n > 1:
        return [0.0] * n
    if not low <= entropy < (math.inf if high is None else high):
        return [None] * n
    return [0.0 if c is None else shares[c] for c in classes]


@whole_group
def semantic_entropy(samples: list[Sample], share: bool = False) -> list[float]:
    """Minus the entropy of the group's classes of answers, nats: 0 where all members agree.

    The semantic entropy of "Semantic Uncertainty: Linguistic Invariances for Uncertainty Estimation
    in Natural Language Generation" (arXiv:2302.09664) with classes of equal final answers in the
    place of entailment, -sum_c p_c log p_c with p_c the share of members in class c; a text without
    an answer is a class of its own. All members have the same points: for a ``gate``, a metric, or
    a baseline over the batch. ``answer_share`` tells members apart.

    Args:
      samples: of a group.
      share: whether it is divided by log n, the greatest entropy, so that points are -1 to 0.
    """
    n = len(samples)
    numbers = [-1 - i if c is None else c for i, c in enumerate(answer_classes(samples))]
    entropy = -sum(k / n * math.log(k / n) for k in map(numbers.count, set(numbers)))
    return [-entropy / (math.log(n) if share and n > 1 else 1.0)] * n


@whole_group
def new_ngrams(samples: list[Sample], size: int = 4) -> list[float]:
    """The share of a text's n-grams of words that no other member of the group has.

    The cheap form of diversity in the code of "Jointly Reinforcing Diversity and Quality in
    Language Model Generations" (arXiv:2509.02534).
    """
    words = [sample.completion.split() for sample in samples]
    grams = [{tuple(w[i : i + size]) for i in range(len(w) - size + 1)} for w in words]
    points = []
    for i, ngrams in enumerate(grams):
        others = set().union(*(g for j, g in enumerate(grams) if j != i))
        points.append(len(ngrams - others) / max(1, len(words[i]) - size + 1))
    return points


@whole_group
def new_answer(samples: list[Sample], floor: float = 0.0) -> list[float]:
    """(n - |class|) / (n - 1), at least ``floor``: 1 for an answer that no other member gives.

    DARLING's diversity (arXiv:2509.02534) over classes of final answers; the product with a quality
    is its reward: ``combine = "product"``. Its learned classifier of free texts is a function of
    one's own.
    """
    n = len(samples)
    classes = answer_classes(samples)
    numbers = [-1 if c is None else c for c in classes]
    return [max(floor, (n - numbers.count(c)) / max(n - 1, 1)) for c in numbers]
