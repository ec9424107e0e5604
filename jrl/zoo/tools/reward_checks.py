"""Measurements of reward models from single papers: preference strength and consistency.

    scored = with_strengths(rows, models)            # for method = "preference_strength"
    contrast_consistency(points)                     # of Contrast Instructions

A model here is anything that scores samples: ``rewards.text_models.TextModel`` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.rewards.base import Points, Sample
from jrl.types import Prompt

Model = Callable[[Sequence[Sample]], tuple[list[Points], Mapping[str, float]]]
"""Samples -> (their points, counts)."""


class Strengths(NamedTuple):
    """Strength with which reward models prefer the first of two completions.

    Attributes:
      mean: [N] float64, points: the strength mu.
      deviation: [N] float64, points, over the models.
    """

    mean: np.ndarray
    deviation: np.ndarray


def strengths(points: Any) -> Strengths:
    """The strength of each of N preferences.

    "Secrets of RLHF in Large Language Models Part II: Reward Modeling" (arXiv:2401.06080):

        mu = mean over m of r_m(y_w) - r_m(y_l),   sigma its standard deviation over m

    Args:
      points: [M, N, 2] float: of M models, chosen before rejected.

    >>> strengths([[[1.0, 0.0]], [[3.0, 0.0]]]).mean.tolist()
    [2.0]
    """
    points = np.asarray(points, np.float64)
    gaps = points[..., 0] - points[..., 1]
    return Strengths(gaps.mean(axis=0), gaps.std(axis=0))


def with_strengths(
    rows: Sequence[Mapping[str, Any]], models: Sequence[Model]
) -> list[dict[str, Any]]:
    """Pairs as rows for ``data.pairs``, with the mean scores of several reward models.

    Args:
      rows: with "prompt" (text), "chosen" and "rejected".
      models: M of them.

    Returns:
      Rows with "prompt", "responses", "scores" (means over the models), "strength" and
      "deviation" of the given order. Pairs that a model has no opinion of are left out.
    """
    points = _scored(rows, models)
    mean, deviation = strengths(points)
    return [
        {
            "prompt": row["prompt"],
            "responses": [row[k] for k in _SIDES],
            "scores": points[:, i].mean(axis=0).tolist(),
            "strength": float(mean[i]),
            "deviation": float(deviation[i]),
        }
        for i, row in enumerate(rows)
        if not np.isnan(mean[i])
    ]


def flipped(
    rows: Sequence[Mapping[str, Any]], models: Sequence[Model], share: float = 0.1
) -> list[dict[str, Any]]:
    """Pairs with the labels of the least strong ones swapped.

    The label flip of the paper of ``strengths``: of the pairs with the least mu, ``share`` of all,
    10 % in the paper, most are labelled the wrong way round.

    Args:
      rows: with "prompt" (text), "chosen" and "rejected".
      models: M of them.
      share: of the pairs, in [0, 1]; rounded down.

    Returns:
      All rows in their order; pairs that a model has no opinion of stay as they are.
    """
    points = _scored(rows, models)
    mean = strengths(points).mean
    weakest = np.argsort(np.where(np.isnan(mean), np.inf, mean), kind="stable")
    weakest = weakest[: int(share * np.count_nonzero(~np.isnan(mean)))]
    swap = dict(zip(_SIDES, reversed(_SIDES), strict=True))
    return [
        {**row, **{side: row[swap[side]] for side in _SIDES}} if i in weakest else dict(row)
        for i, row in enumerate(rows)
    ]


_SIDES = ("chosen", "rejected")


def _scored(rows: Sequence[Mapping[str, Any]], models: Sequence[Model]) -> np.ndarray:
    """[M, N, 2] float64: the points of both sides of each row; NaN for no opinion."""
    samples = [_sample(i, row["prompt"], row[k]) for i, row in enumerate(rows) for k in _SIDES]
    scored = np.array([[np.nan if x is None else x for x in m(samples)[0]] for m in models])
    return scored.reshape(len(models), len(rows), 2)


def _sample(i: int, question: str, completion: str) -> Sample:
    nothing = np.zeros(0, np.int32)
    return Sample(Prompt(i, question, nothing, None, question=question), completion, nothing, "")


class Consistency(NamedTuple):
    """Shares of comparisons that a reward model decides rightly.

    Attributes:
      response: an instruction's own response is worth more than that of the other instruction.
      instruction: a response is worth more under its own instruction than under the other.
    """

    response: float
    instruction: float


def contrast_consistency(points: Any) -> Consistency:
    """The consistency of a reward model on pairs of similar instructions.

    Contrast Instructions of "The Trickle-down Impact of Reward (In-)consistency on RLHF"
    (arXiv:2309.16155), for instructions I_1, I_2 that look alike, with responses r_1, r_2:

        response      P[ R(I_1, r_1) > R(I_1, r_2) ]
        instruction   P[ R(I_1, r_1) > R(I_2, r_1) ]

    Both orders of a pair count. The paper's remedies, ConvexDA and RewardFusion, are
    ``reward_consistency``.

    Args:
      points: [N, 2, 2] float: R(I_a, r_b) of N pairs of instructions.

    >>> contrast_consistency([[[2.0, 1.0], [0.0, 3.0]]])
    Consistency(response=1.0, instruction=1.0)
    """
    points = np.asarray(points, np.float64)
    own_response = np.diagonal(points, axis1=1, axis2=2)  # [N, 2] R(I_a, r_a)
    other_response = points[:, [0, 1], [1, 0]]  # R(I_a, r_b)
    other_instruction = points[:, [1, 0], [0, 1]]  # R(I_b, r_a)
    return Consistency(
        float((own_response > other_response).mean()),
        float((own_response > other_instruction).mean()),
    )
