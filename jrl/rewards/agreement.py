"""Rewards by how the members of a group agree: majority, shares of answers, what is new.

None of them reads an answer of the data. Answers are equal when their final answers are, by the
grammar of ``jrl.rewards.answers``; with ``embed``, when their embeddings are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jrl.errors import UserError
from jrl.rewards.base import Sample, whole_group
from jrl.rewards.exact import final_answer, same_answer
from jrl.rewards.matching import stated_answer
from jrl.user_code import load


def answer_classes(
    samples: Sequence[Sample], key: str = "rewards", embed: str = "", alike: float = 0.9
) -> list[int | None]:
    """The number of each sample's class of equal answers; None for a text without one.

    Args:
      samples: of a group.
      key: of the reward, for messages.
      embed: "" for equal final answers. "FILE.py:function", (texts) -> [n, D] numbers, for answers
        in words: stated answers (``matching.stated_answer``) are of one class where a chain of
        neighbours joins them.
      alike: the least cosine of the embeddings of two neighbours, in (0, 1].

    Raises:
      UserError: no such function, or its embeddings are not one for each text.
    """
    if not 0 < alike <= 1:
        raise UserError(f"{key}.alike = {alike}; the least cosine of neighbours is in (0, 1]")
    if embed:
        texts = [stated_answer(sample.completion) for sample in samples]
        return _alike(texts, f"{key}.embed", embed, alike)
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


def _alike(texts: Sequence[str], key: str, embed: str, alike: float) -> list[int | None]:
    """Classes of texts: connected components of the pairs whose cosine is at least ``alike``."""
    function = load(embed, key)
    places = [i for i, text in enumerate(texts) if text]
    classes: list[int | None] = [None] * len(texts)
    if not places:
        return classes
    vectors = np.asarray(function([texts[i] for i in places]), np.float64)
    if vectors.ndim != 2 or len(vectors) != len(places):
        raise UserError(
            f"{key} returned shape {vectors.shape} for {len(places)} texts; return [n, D]"
        )
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    numbers = components(vectors @ vectors.T >= alike - 1e-9)
    for place, number in zip(places, numbers, strict=True):
        classes[place] = number
    return classes


def components(near: np.ndarray) -> list[int]:
    """The first member of each one's class, where chains of neighbours are a class.

    Args:
      near: [n, n] bool, symmetric; the diagonal counts as true.

    >>> components(np.array([[0, 0, 1], [0, 0, 0], [1, 0, 0]], bool))
    [0, 1, 0]
    """
    n = len(near)
    first = np.arange(n)
    joined = near | np.eye(n, dtype=bool)
    for _ in range(n):
        first = np.where(joined, first, n).min(axis=1, initial=n)
    return first.tolist()


@whole_group
def majority(samples: list[Sample], embed: str = "", alike: float = 0.9) -> list[float]:
    """1 for the answer that most members give, else 0; of several the one that came first.

    The pseudo-label of "TTRL: Test-Time Reinforcement Learning" (arXiv:2504.16084).

    Args:
      samples: of a group.
      embed: classes of answers by their embeddings; see ``answer_classes``.
      alike: the least cosine of two neighbours in a class.
    """
    classes = answer_classes(samples, "rewards.majority", embed, alike)
    present = [c for c in classes if c is not None]
    if not present:
        return [0.0] * len(samples)
    best = max(dict.fromkeys(present), key=present.count)
    return [float(c == best) for c in classes]


@whole_group
def answer_share(
    samples: list[Sample],
    low: float = 0.0,
    high: float | None = None,
    embed: str = "",
    alike: float = 0.9,
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
      embed: classes of answers in words by their embeddings; see ``answer_classes``. The paper
        asks a small model of entailment about pairs there.
      alike: the least cosine of two neighbours in a class.
    """
    classes, n = answer_classes(samples, "rewards.answer_share", embed, alike), len(samples)
    if not samples:
        return []
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
def semantic_entropy(
    samples: list[Sample], share: bool = False, embed: str = "", alike: float = 0.9
) -> list[float]:
    """Minus the entropy of the group's classes of answers, nats: 0 where all members agree.

    The semantic entropy of "Semantic Uncertainty: Linguistic Invariances for Uncertainty Estimation
    in Natural Language Generation" (arXiv:2302.09664) with classes of equal final answers, or of
    like embeddings, in the place of entailment, -sum_c p_c log p_c with p_c the share of members in
    class c; a text without an answer is a class of its own. All members have the same points: for a
    ``gate``, a metric, or a baseline over the batch. ``answer_share`` tells members apart.

    Args:
      samples: of a group.
      share: whether it is divided by log n, the greatest entropy, so that points are -1 to 0.
      embed: classes of answers by their embeddings; see ``answer_classes``.
      alike: the least cosine of two neighbours in a class.
    """
    n = len(samples)
    classes = answer_classes(samples, "rewards.semantic_entropy", embed, alike)
    numbers = [-1 - i if c is None else c for i, c in enumerate(classes)]
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
def new_answer(
    samples: list[Sample], floor: float = 0.0, embed: str = "", alike: float = 0.9
) -> list[float]:
    """(n - |class|) / (n - 1), at least ``floor``: 1 for an answer that no other member gives.

    DARLING's diversity (arXiv:2509.02534) over classes of final answers; the product with a quality
    is its reward: ``combine = "product"``. Its learned classifier says of two texts whether they
    are equivalent, and classes are what chains of such pairs join, as here with ``embed``.

    Args:
      samples: of a group.
      floor: the least; 0.1 in the paper where answers can be checked.
      embed: classes of answers by their embeddings; see ``answer_classes``.
      alike: the least cosine of two neighbours in a class.
    """
    n = len(samples)
    classes = answer_classes(samples, "rewards.new_answer", embed, alike)
    numbers = [-1 if c is None else c for c in classes]
    return [max(floor, (n - numbers.count(c)) / max(n - 1, 1)) for c in numbers]
