"""The reward ``reasoning_gym``: a row's entry scored by its data set. Imports no JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.rewards.matching import stated_answer
from jrl.system.extras import need


def reasoning_gym(samples: list[Sample], dataset: str = "", column: str = "entry") -> list[float]:
    r"""The score, 0 to 1, that reasoning-gym's data set of the row gives the stated answer.

    The row has the entry that the data set made, {"question", "answer", "metadata"}, as an object
    or JSON text, or has these as its columns. Its ``metadata.source_dataset`` names the data set.
    The answer is the last <answer>...</answer>, a mark such as \\boxed, or all of the completion.

    Args:
      samples: what to judge.
      dataset: the data set of rows that name none, such as "leg_counting".
      column: with the entry.

    Raises:
      UserError: the row names no data set, or one that reasoning-gym does not have.
    """
    gym = need("reasoning_gym", "reasoning-gym", "rewards.reasoning_gym")
    points = []
    for sample in samples:
        entry = _entry(sample, column)
        name = entry["metadata"].get("source_dataset") or dataset
        if not name:
            raise UserError(
                f"rewards.reasoning_gym: row {sample.prompt.id + 1} names no data set in"
                " metadata.source_dataset; give rewards.reasoning_gym.dataset"
            )
        try:
            score = gym.get_score_answer_fn(name)
        except ValueError as error:
            raise UserError(f"rewards.reasoning_gym: row {sample.prompt.id + 1}: {error}") from None
        points.append(float(score(answer=stated_answer(sample.completion), entry=entry)))
    return points


def _entry(sample: Sample, column: str) -> dict[str, Any]:
    meta = sample.prompt.meta
    entry = meta.get(column)
    if entry is None:
        entry = {
            "question": sample.prompt.text,
            "answer": sample.prompt.answer,
            "metadata": meta.get("metadata"),
        }
    entry = json.loads(entry) if isinstance(entry, str) else dict(entry)
    metadata = entry.get("metadata") or {}
    entry["metadata"] = json.loads(metadata) if isinstance(metadata, str) else metadata
    if not isinstance(entry["metadata"], Mapping):
        raise UserError(
            f"rewards.reasoning_gym: row {sample.prompt.id + 1} has metadata of the type"
            f" {type(metadata).__name__}; it is an object"
        )
    return entry
