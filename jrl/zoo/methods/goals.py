"""Pairs whose prompt names the score to reach: two from each pair with scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jrl.data.tables import Dataset
from jrl.errors import UserError
from jrl.system.float32 import fits_float32

GOAL = (
    "You are an assistant that generates responses for the instruction while implicitly achieving "
    "the following target scores (on a scale of 1-10, where 1 is lowest and 10 is highest):\n"
    "Overall score: {score}.\n\n{prompt}"
)
"""The prompt of the released code for models without a system role."""

_SCORES = (("chosen_score", "score_chosen"), ("rejected_score", "score_rejected"))
"""Columns of each answer's score; the second are those of UltraFeedback's binarised sets."""


def goal_conditioned(
    pair: Mapping[str, Any], template: str = GOAL
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two pairs from one with scores: one that aims at each score.

    Args:
      pair: with "prompt", "chosen", "rejected", "chosen_score" and "rejected_score".
      template: how a prompt names the score to reach; whole scores are printed without a point.

    >>> given = {"prompt": "p", "chosen": "a", "rejected": "b"}
    >>> scored = {**given, "chosen_score": 9.0, "rejected_score": 4.5}
    >>> two = goal_conditioned(scored, "{prompt} {score}")
    >>> [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in two]
    [('p 9', 'a', 'b'), ('p 4.5', 'b', 'a')]
    """

    def aiming(score: Any, chosen: str, rejected: str) -> dict[str, Any]:
        score = int(score) if score == int(score) else score
        prompt = template.format(prompt=pair["prompt"], score=score)
        return {"prompt": prompt, "chosen": pair[chosen], "rejected": pair[rejected]}

    return (
        aiming(pair["chosen_score"], "chosen", "rejected"),
        aiming(pair["rejected_score"], "rejected", "chosen"),
    )


class GoalRows:
    """Rows of pairs with scores, each read as two that aim at one of its scores; a ``Dataset``.

    Args:
      rows: with a prompt in text, "chosen", "rejected", and a score of each.
    """

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        """Twice the rows."""
        return 2 * len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row ``index // 2`` as a pair that aims at the chosen answer's score, or the other's.

        Raises:
          UserError: it has no prompt in text, or no scores.
        """
        row, where = self._rows[index // 2], self.where(index)
        scores = {}
        for names in _SCORES:
            score = next((row[name] for name in names if row.get(name) is not None), None)
            if isinstance(score, bool) or not isinstance(score, int | float):
                raise UserError(
                    f"{where}: {names[0]} = {score!r:.40}; a prompt that names the score to reach"
                    f" needs a number in {' or '.join(names)}"
                )
            if not fits_float32(score) or score != score:
                raise UserError(f"{where}: {names[0]} = {score!r:.40}; write a finite number")
            scores[names[0]] = score
        for field in ("prompt", "chosen", "rejected"):
            if row.get(field) is None:
                raise UserError(f"{where}: there is no {field}, which a pair with scores needs")
        if not isinstance(row["prompt"], str):
            raise UserError(
                f"{where}: prompt = {str(row['prompt'])[:40]}; the score to reach is written into"
                " a prompt that is a text"
            )
        return {**row, **goal_conditioned({**row, **scores})[index % 2]}

    def where(self, index: int) -> str:
        """Location of the row that pair ``index`` was made from."""
        return self._rows.where(index // 2)
