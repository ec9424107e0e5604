"""Groups of completions that the data hold: judged ones, recorded sessions and dialogues.

Nothing is sampled, and no reward is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.collect.sources import FromPrompts, Groups, all_entries, epoch_order
from jrl.data.pairs import Judged, judged_batch
from jrl.episodes.transcript import RowShape, Transcript, to_rollout
from jrl.errors import UserError
from jrl.types import Prompt, Rollout, StopReason
from jrl.types.asks import DrawRequest


class BatchSizes(NamedTuple):
    """The shape of every batch of a run.

    Attributes:
      prompt_tokens: P.
      group: G.
      completion_tokens: T.
    """

    prompt_tokens: int
    group: int
    completion_tokens: int


def sizes_of(*judged: Sequence[Judged]) -> BatchSizes:
    """Room for all groups, tokens rounded up to 8 so that a few more rows change no program."""
    listed = [one for some in judged for one in some]
    p = max(len(one.prompt) for one in listed)
    t = max(len(completion) for one in listed for completion in one.completions)
    group = max(len(one.completions) for one in listed)
    return BatchSizes(-(-p // 8) * 8, group, -(-t // 8) * 8)


@dataclasses.dataclass(frozen=True, eq=False)
class JudgedSource(FromPrompts):
    """Groups of judged completions from a file; a ``Source``.

    Attributes:
      judged: all of them, in the file's order.
      sizes: of a batch.
      seed: of the order, or None for the file's own order.
    """

    judged: Sequence[Judged]
    sizes: BatchSizes
    seed: int | None

    def order(self, tickets: np.ndarray) -> np.ndarray:
        """As ``Source.order``: epoch after epoch."""
        return epoch_order(self.seed, tickets, len(self.judged))

    def prompts(self, key: Any, rows: np.ndarray) -> tuple[list[Prompt], list[Prompt]]:
        """As ``Source.prompts``: those of the completions."""
        chosen = [self.judged[i] for i in np.asarray(rows).tolist()]
        prompts = [_prompt_of(one) for one in chosen]
        return prompts, prompts

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``; only the rows are read, since nothing is drawn."""
        _, rows = all_entries(request)
        chosen = [self.judged[i] for i in np.asarray(rows).tolist()]
        return judged_groups(chosen, self.sizes)

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """Nothing judges other completions than those of the file.

        Raises:
          UserError: always.
        """
        raise UserError("data.pairs holds the scores of its own completions alone")


def _prompt_of(one: Judged) -> Prompt:
    return Prompt(one.id, one.text, one.prompt, "")


def judged_groups(chosen: Sequence[Judged], sizes: BatchSizes) -> Groups:
    """Judged completions as the groups of a draw: no policy drew them, so versions are -1."""
    batch = judged_batch(chosen, **sizes._asdict())
    stop = np.where(np.asarray(batch.truncated), StopReason.LENGTH, StopReason.STOP_TOKEN)
    # Smaller groups are padded with members that do not count.
    stop = np.where(np.asarray(batch.members), stop, StopReason.ABORTED).astype(np.int32)
    rollout: Any = Rollout(
        prompt_tokens=batch.prompt_tokens,
        prompt_lengths=batch.prompt_lengths,
        tokens=batch.tokens,
        lengths=batch.lengths,
        mask=batch.mask,
        sampler_logprobs=np.zeros(batch.tokens.shape, np.float32),  # type: ignore[arg-type]
        versions=np.full(batch.tokens.shape, -1, np.int32),  # type: ignore[arg-type]
        stop=stop,  # type: ignore[arg-type]
        baseline=batch.baseline,
    )
    prompts = [_prompt_of(one) for one in chosen]
    return Groups(rollout, batch.rewards, prompts, {}, batch.ids, batch.stats)


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedSource(FromPrompts):
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

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """Nothing judges other completions than the recorded ones.

        Raises:
          UserError: always.
        """
        raise UserError("recorded sessions and dialogues hold the rewards of their own rows alone")
