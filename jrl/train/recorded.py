"""Training on sessions that ``jrl serve --record`` wrote: groups without a sampler.

The twin of ``collect.TextSource``: what was drawn comes from disk, with the log-probabilities and
versions that the server recorded, and the points that clients gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.config import Config
from jrl.config.unions import RECORDED_KIND, RecordedData
from jrl.envs.recorded import REWARDED, Recorded, RecordedCounts, read
from jrl.envs.recorded_files import Distribution
from jrl.envs.transcript import RowShape, Transcript, common_opening, to_rollout
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.models.tokenizer import Tokenizer
from jrl.train.collect import Groups, source_rows
from jrl.types import Prompt

RECORDED_REWARD = "reward"
"""The one reward part: the points that clients gave to an episode."""


class KeptCounts(NamedTuple):
    """What became of recorded sessions.

    Attributes:
      read: what was read.
      groups: to train on.
      rows: in them.
      alone: groups of one row.
      unrewarded: rows left out because nobody rewarded their episode.
      dropped: rows left out because they are too long.
    """

    read: RecordedCounts
    groups: int
    rows: int
    alone: int
    unrewarded: int
    dropped: int

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.groups} groups of {self.rows} rows, {self.alone} of one row; left out: "
            f"{self.unrewarded} without a reward, {self.dropped} too long; {self.read}"
        )


def recorded_groups(
    config: Config, data: RecordedData, tokenizer: Tokenizer, method: Method
) -> tuple[list[list[Transcript]], list[Prompt], KeptCounts]:
    """The groups of a run on recorded sessions, each with its prompt.

    Episodes without a reward are left out, since nothing is known of how good they were; a method
    that reads no reward takes all. A group of more than ``sampling.group`` rows becomes several.

    Raises:
      UserError: nothing is left, or a row is too long and ``data.overlong`` is "error".
    """
    sampling = config.sampling
    wanted = Distribution(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    found = read(data.directory, wanted)
    if not found.counts.rows:
        raise UserError(_nothing_drawn(data, wanted, found))
    groups: list[list[Transcript]] = []
    prompts: list[Prompt] = []
    unrewarded = dropped = 0
    for group in found.groups:
        known = [row for row in group if row.metrics[REWARDED] or not method.draw.own]
        unrewarded += len(group) - len(known)
        parts = np.array_split(np.arange(len(known)), -(-len(known) // sampling.group) or 1)
        for part in parts:
            rows = [known[i] for i in part]
            kept = [row for row in rows if _fits(row, rows, sampling.max_new_tokens, data)]
            dropped += len(rows) - len(kept)
            if kept:
                opening = common_opening([row.opening for row in kept])
                text = tokenizer.decode(opening.tolist(), skip_special=False)
                prompts.append(Prompt(kept[0].prompt.id, text, opening, ""))
                groups.append(kept)
    if not groups:
        raise UserError(
            f"data.train = {data.train!r}: no row is left of {found.counts.rows}: "
            f"{unrewarded} have no reward, which clients send to /v1/sessions/NAME/reward, and "
            f"{dropped} are longer than sampling.max_new_tokens"
        )
    sizes = [len(group) for group in groups]
    counts = KeptCounts(found.counts, len(groups), sum(sizes), sizes.count(1), unrewarded, dropped)
    return groups, prompts, counts


def _nothing_drawn(data: RecordedData, wanted: Distribution, found: Recorded) -> str:
    """Why there is nothing to train on, and which keys would do."""
    if not found.counts.completions:
        return f"data.train = {data.train!r}: no completion is on record"
    said = "; ".join(f"{count} with {each}" for each, count in found.drawn_from.items())
    return (
        f"data.train = {data.train!r}: no completion was drawn with the {wanted} of "
        f"[sampling]; on record are {said}; set [sampling] to what is to be trained"
    )


def _fits(row: Transcript, rows: Sequence[Transcript], most: int, data: RecordedData) -> bool:
    """Whether a row of a group is short enough.

    Raises:
      UserError: it is not, and ``data.overlong`` is "error".
    """
    prompt = len(common_opening([each.opening for each in rows]))
    length = len(row.opening) - prompt + sum(len(part.tokens) for part in row.segments)
    if length > most and data.overlong == "error":
        raise UserError(
            f"data.train = {data.train!r}: a row has {length} tokens behind its prompt, and "
            f"sampling.max_new_tokens is {most}; raise it, or set data.overlong to drop"
        )
    return length <= most


class RecordedSource(NamedTuple):
    """Groups of recorded sessions; ``draw`` is a ``collect.GroupSource``.

    Attributes:
      groups: all of them.
      prompts: one for each.
      shape: of the arrays.
      seed: of the order, or None for that of the files.
      weight: of the points in the statistic "paid".
    """

    groups: Sequence[Sequence[Transcript]]
    prompts: Sequence[Prompt]
    shape: RowShape
    seed: int | None
    weight: float

    def draw(self, key: Any, params: Any, step: Any, positions: Any, version: Any = None) -> Groups:
        """See ``GroupSource``; which groups come depends on the seed and the positions alone."""
        del key, params, step, version
        chosen = source_rows(self.seed, np.asarray(positions), len(self.groups))
        rows = to_rollout([self.groups[i] for i in chosen], self.shape, [self.weight])
        turns = np.where(rows.rollout.mask, rows.ids["turn"] + 1, 0).max(axis=2)
        prompts = [self.prompts[i] for i in chosen]
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


def check_recorded(method: Method, name: str) -> None:
    """Raises UserError for a method whose groups have members that no server records."""
    draw = method.draw
    if draw.baseline_members or (draw.own and draw.demonstrations):
        raise UserError(
            f"{RECORDED_KIND}: method = {name!r} trains on greedy members, or "
            "demonstrations beside what the policy drew, which no server records; choose another"
            " method"
        )
