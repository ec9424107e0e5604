"""Remedies for reward models that do not notice what an instruction asks: ConvexDA, RewardFusion.

Of "The Trickle-down Impact of Reward (In-)consistency on RLHF" (arXiv:2309.16155), as the authors'
code has them; ``reward_checks.contrast_consistency`` measures what they improve.

    more = convex_da(rows, perturb, encode)                    # before training
    model = reward_fusion(model, encode, examples)             # when it scores

``encode`` makes vectors of texts: texts -> [n, D] float, such as a SimCSE encoder's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.rewards.base import Points, Sample
from jrl.zoo.tools.reward_checks import Model

Encode = Callable[[Sequence[str]], Any]
"""Texts -> [n, D] float."""


def convex_da(
    rows: Sequence[Mapping[str, Any]],
    perturb: Callable[[str, int], Sequence[str]],
    encode: Encode,
    *,
    copies: int = 5,
) -> list[dict[str, Any]]:
    """Pairs whose chosen response is one of the perturbed copies that span all of them.

    The copies of a response are embedded and projected on their two principal components; those at
    the corners of the convex hull stay, each against the same rejected response. The others lie
    between them and add nothing that an extrapolation would not.

    Args:
      rows: with "chosen" and "rejected"; other fields are copied.
      perturb: (text, n) -> n copies; the authors misspell up to 5 % of the words.
      encode: embeds texts.
      copies: of each response; 5 in the authors' code.

    Returns:
      The new rows, in the order of the given ones, which are not among them.
    """
    out = []
    for row in rows:
        texts = list(dict.fromkeys(perturb(row["chosen"], copies)))
        vertices = hull_vertices(encode(texts))
        out += [{**row, "chosen": texts[i]} for i in vertices]
    return out


def hull_vertices(vectors: Any) -> list[int]:
    """Indices of the corners of n points' convex hull on their two principal components.

    Args:
      vectors: [n, D] float.

    Returns:
      Ascending indices; where the points lie on a line, its two ends, and of equal points the
      first.

    >>> hull_vertices([[0.0, 0, 0], [2, 0, 0], [0, 2, 0], [2, 2, 0], [1, 0.9, 0]])
    [0, 1, 2, 3]
    >>> hull_vertices([[0.0], [1.0], [2.0]]), hull_vertices([[1.0], [1.0]])
    ([0, 2], [0])
    """
    from scipy.spatial import ConvexHull, QhullError

    centred = np.asarray(vectors, np.float64)
    centred = centred - centred.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    flat = centred @ axes[:2].T
    try:
        return sorted(ConvexHull(flat).vertices.tolist())
    except (QhullError, ValueError):  # fewer than three corners
        return sorted({int(np.argmin(flat[:, 0])), int(np.argmax(flat[:, 0]))})


def reward_fusion(
    model: Model,
    encode: Encode,
    examples: Sequence[Sample],
    *,
    neighbours: int = 5,
    least: float = 0.9,
) -> Model:
    """The model whose points are fused with those of the training examples most like a sample.

    With s_i the cosine similarity of a sample and the i-th of its nearest examples, those of at
    least ``least``,

        r'(x, y) = ( r(x, y) + sum_i s_i r(x_i, y_i) ) / ( 1 + sum_i s_i )

    Args:
      model: what scores.
      encode: embeds a sample's question and completion.
      examples: preferred responses that the model was trained on, scored once, here.
      neighbours: how many count at most; 5 in the authors' code.
      least: the least similarity; 0.9 there.

    Returns:
      A model; a sample without an opinion keeps none, an example without one does not count.
    """
    scored = [(s, p) for s, p in zip(examples, model(examples)[0], strict=True) if p is not None]
    corpus = _unit(encode([_text(sample) for sample, _ in scored])) if scored else np.zeros((0, 1))
    values = np.array([points for _, points in scored])

    def fused(samples: Sequence[Sample]) -> tuple[list[Points], Mapping[str, float]]:
        points, counts = model(samples)
        if not scored or not samples:
            return points, counts
        alike = _unit(encode([_text(sample) for sample in samples])) @ corpus.T
        return [
            None if score is None else _fused(score, row, values, neighbours, least)
            for score, row in zip(points, alike, strict=True)
        ], counts

    return fused


def _fused(score: float, alike: np.ndarray, values: np.ndarray, most: int, least: float) -> float:
    nearest = np.argsort(-alike, kind="stable")[:most]
    nearest = nearest[alike[nearest] >= least]
    weights = alike[nearest]
    return float((score + weights @ values[nearest]) / (1 + weights.sum()))


def _text(sample: Sample) -> str:
    return f"{sample.prompt.question or sample.prompt.text}\n\n{sample.completion}"


def _unit(vectors: Any) -> np.ndarray:
    """[n, D] of length 1; a vector of zeros is like nothing."""
    vectors = np.asarray(vectors, np.float64)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length > 0, length, 1)
