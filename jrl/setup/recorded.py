"""Sessions that ``jrl serve --record`` wrote, or dialogues, read for training in groups.

Of recorded sessions the server wrote log-probabilities and versions, too, and clients gave the
points; dialogues have neither log-probabilities nor versions, because no policy drew them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jrl.config import Config
from jrl.config.data import DialogueData, RecordedData
from jrl.data.datasets import open_dataset
from jrl.data.tables import Dataset
from jrl.episodes.recorded import REWARDED, Recorded, RecordedCounts, read_recorded
from jrl.episodes.recorded_files import Distribution
from jrl.episodes.transcript import Transcript, common_opening
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.models.tokenizer import Tokenizer
from jrl.types import Prompt

if TYPE_CHECKING:
    from jrl.episodes.dialogues import DialogueCounts, Dialogues

RECORDED_REWARD = "reward"
"""The one reward part: the points that clients, or the rows of a file, gave to an episode."""


class KeptCounts(NamedTuple):
    """Counts of recorded sessions, or of dialogues.

    Attributes:
      read: what was read.
      groups: to train on.
      rows: in them.
      alone: groups of one row.
      unrewarded: rows left out because nobody rewarded their episode.
      dropped: rows left out because they are too long.
    """

    read: RecordedCounts | DialogueCounts
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


class Read(NamedTuple):
    """Recorded sessions or dialogues, as they were read.

    Attributes:
      recorded: in groups.
      where: names a row's origin, for messages.
      pays: says where a reward would be, for messages.
    """

    recorded: Recorded | Dialogues
    where: Callable[[Transcript], str]
    pays: str


def recorded_groups(
    config: Config,
    data: RecordedData,
    tokenizer: Tokenizer,
    method: Method,
    read: Read,
) -> tuple[list[list[Transcript]], list[Prompt], KeptCounts]:
    """The groups of a run on recorded sessions or dialogues, each with its prompt.

    Episodes without a reward are left out, since nothing is known of how good they were; a method
    that reads no reward takes all. A group of more than ``sampling.group`` rows becomes several.

    Args:
      config: of the run.
      data: its table.
      tokenizer: the policy's.
      method: what to train with.
      read: what was recorded.

    Raises:
      UserError: nothing is left, or a row is too long and ``data.overlong`` is "error".
    """
    sampling = config.sampling
    recorded, where = read.recorded, read.where
    rewarded = method.draw.samples or method.value  # others read no points
    groups: list[list[Transcript]] = []
    prompts: list[Prompt] = []
    unrewarded = dropped = 0
    for group in recorded.groups:
        usable = [row for row in group if row.metrics[REWARDED] or not rewarded]
        unrewarded += len(group) - len(usable)
        parts = np.array_split(np.arange(len(usable)), -(-len(usable) // sampling.group) or 1)
        for part in parts:
            rows = [usable[i] for i in part]
            most = sampling.max_new_tokens
            fitting = [row for row in rows if _fits(row, rows, most, data, where)]
            dropped += len(rows) - len(fitting)
            if fitting:
                opening = common_opening([row.opening for row in fitting])
                text = tokenizer.decode(opening.tolist(), skip_special=False)
                prompts.append(Prompt(fitting[0].prompt.id, text, opening, ""))
                groups.append(fitting)
    if not groups:
        raise UserError(
            f"data.train = {data.train!r}: no row is left of {recorded.counts.rows}: "
            f"{unrewarded} have no reward, which {read.pays}, and "
            f"{dropped} are longer than sampling.max_new_tokens"
        )
    sizes = [len(group) for group in groups]
    alone = sizes.count(1)
    counts = KeptCounts(recorded.counts, len(groups), sum(sizes), alone, unrewarded, dropped)
    return groups, prompts, counts


def read_sessions(config: Config, data: RecordedData) -> Read:
    """Sessions that a server recorded.

    Raises:
      UserError: there is nothing to train on.
    """
    if not data.place.strip() or not Path(data.place).expanduser().is_dir():
        raise UserError(
            f"data.train = {data.train!r}: there is no directory {data.place!r}; name one that"
            " jrl serve --record wrote to"
        )
    sampling = config.sampling
    distribution = Distribution(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )
    recorded = read_recorded(data.place, distribution)
    if not recorded.counts.rows:
        raise UserError(_nothing_drawn(data, distribution, recorded))
    pays = "clients send to /v1/sessions/NAME/reward"
    return Read(recorded, lambda row: f"data.train = {data.train!r}", pays)


def read_dialogue_file(
    data: DialogueData, tokenizer: Tokenizer, opened: Callable[..., Dataset] = open_dataset
) -> Read:
    """Conversations of a file.

    Raises:
      UserError: there is no such file, or a row is none.
    """
    from jrl.data.messages import Wording
    from jrl.episodes.dialogues import read_dialogues  # not on the way of other runs

    if not data.place.strip():
        raise UserError(f"data.train = {data.train!r}: names no file; write dialogues:FILE.jsonl")
    source = opened(data.place, key="data.train")
    wording = Wording(tokenizer, **data.wording)
    dialogues = read_dialogues(source, wording, invalid=data.invalid)
    return Read(dialogues, dialogues.where, "a row gives as reward or rewards")


def _nothing_drawn(data: RecordedData, distribution: Distribution, recorded: Recorded) -> str:
    """Why there is nothing to train on, and which keys would do."""
    if not recorded.counts.completions:
        return f"data.train = {data.train!r}: no completion is on record"
    settings = "; ".join(f"{count} with {each}" for each, count in recorded.drawn_from.items())
    return (
        f"data.train = {data.train!r}: no completion was drawn with the {distribution} of "
        f"[sampling]; on record are {settings}; set [sampling] to what is to be trained"
    )


def _fits(
    row: Transcript,
    rows: Sequence[Transcript],
    most: int,
    data: RecordedData,
    where: Callable[[Transcript], str],
) -> bool:
    """Whether a row of a group is short enough.

    Raises:
      UserError: it is not, and ``data.overlong`` is "error".
    """
    prompt = len(common_opening([each.opening for each in rows]))
    length = len(row.opening) - prompt + sum(len(part.tokens) for part in row.segments)
    if length > most and data.overlong == "error":
        raise UserError(
            f"{where(row)}: a row has {length} tokens after its prompt, and "
            f"sampling.max_new_tokens is {most}; raise it, or set data.overlong to drop"
        )
    return length <= most
