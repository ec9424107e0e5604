"""Groups of recorded sessions or dialogues: nothing is sampled.

The twin of ``TextSource``: what was drawn comes from disk, and ``setup/recorded.py`` has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.collect.sources import Groups, all_entries, epoch_order
from jrl.episodes.transcript import RowShape, Transcript, to_rollout
from jrl.errors import UserError
from jrl.types import Prompt, Rollout
from jrl.types.asks import DrawRequest


class RecordedSource(NamedTuple):
    """Groups of recorded sessions, or of dialogues; a ``Source``.

    Attributes:
      groups: all of them.
      all_prompts: one for each.
      shape: of the arrays.
      seed: of the order, or None for that of the files.
      weight: of the points in the statistic "paid".
    """

    groups: Sequence[Sequence[Transcript]]
    all_prompts: Sequence[Prompt]
    shape: RowShape
    seed: int | None
    weight: float

    def order(self, tickets: np.ndarray) -> np.ndarray:
        """As ``Source.order``: epoch after epoch."""
        return epoch_order(self.seed, tickets, len(self.groups))

    def prompts(self, key: Any, rows: np.ndarray) -> tuple[list[Prompt], list[Prompt]]:
        """As ``Source.prompts``; a prompt is its own subject."""
        chosen = [self.all_prompts[i] for i in np.asarray(rows).tolist()]
        return chosen, chosen

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``; only the rows are read, since nothing is drawn."""
        _, indices = all_entries(request)
        chosen = np.asarray(indices).tolist()
        rows = to_rollout([self.groups[i] for i in chosen], self.shape, [self.weight])
        turns = np.where(rows.rollout.mask, rows.ids["turn"] + 1, 0).max(axis=2)
        prompts = [self.all_prompts[i] for i in chosen]
        return Groups(
            rollout=rows.rollout,
            rewards=rows.rewards,
            subject=prompts,
            counts={},
            ids={
                "prompt": np.array([prompt.id for prompt in prompts], np.int32),
                "stratum": turns.astype(np.int32),
                **rows.ids,
            },
            stats={"paid": rows.paid},
        )

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout) -> Groups:
        """Nothing judges other completions than the recorded ones.

        Raises:
          UserError: always.
        """
        raise UserError("recorded sessions and dialogues hold the rewards of their own rows alone")

    def finish(self, complete: bool) -> None:
        """Nothing is held."""

    def notes(self) -> dict[str, Any]:
        """Nothing: the next groups follow from their rows."""
        return {}
