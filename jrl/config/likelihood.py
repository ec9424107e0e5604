"""The keys of a reward part that is the policy's probability of the reference answer."""

from __future__ import annotations

from typing import Literal

from jrl.config.base import Table, key

LIKELIHOOD = "likelihood"
"""The function of such a part."""


class LikelihoodTable(Table):
    """``[rewards.NAME] function = "likelihood"``: how probable the row's answer is, and where."""

    by: Literal["completion", "turn"] = key(
        "completion",
        "completion: the probability after the completion; turn: in episodes its change by each"
        " turn but the last, paid at the turn's last token",
    )
    before: str = key("\nAnswer: ", "text between the completion and the answer")
    max_answer_tokens: int = key(
        32, "longest answer; a longer one, or one that the model cannot read, has no opinion", ge=1
    )
    rows: int = key(8, "texts that go through the policy at a time", ge=1, le=4096)
