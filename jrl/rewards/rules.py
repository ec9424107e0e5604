"""What a reward part's function is asked about, and how its numbers are read.

These are keys of ``[rewards.NAME]``.

    range = [0, 1]                # another number is an error of the function
    missing = "zero"              # of None, no opinion: 0 points
    where = {data_source = "math"}    # asked for these rows alone
    by_token = true               # may be a list of numbers, one for each token
    with_prompt = true            # the function reads the prompt before the completion

Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from jrl.rewards.base import Returned, Sample
from jrl.rewards.call import Failure

Missing = Literal["none", "zero", "drop"]


class Rules(NamedTuple):
    """Rules for the numbers of a reward function.

    Attributes:
      missing: effect of None: "none" leaves the part out of the sample's sum, "zero" is 0 points,
        "drop" removes the sample from its group.
      low: the least number, points.
      high: the greatest.
      where: column of the data -> value, or values, of the rows that the function is called for; {}
        for all. On other rows it has no opinion.
      by_token: the weight of the part, if it may give a number for each token; else None.
      with_prompt: whether the function's completion begins with the text of the prompt.
    """

    missing: Missing = "none"
    low: float = -math.inf
    high: float = math.inf
    where: Mapping[str, Any] = MappingProxyType({})
    by_token: float | None = None
    with_prompt: bool = False

    def asks(self, sample: Sample) -> bool:
        """Whether the function is called for a sample."""
        return self.asks_row(sample.prompt.meta)

    def asks_row(self, meta: Mapping[str, Any]) -> bool:
        """Whether the function is called for the samples of a row with these columns."""
        return all(_fits(meta.get(name), allowed) for name, allowed in self.where.items())

    def shown(self, sample: Sample) -> Sample:
        """The sample as the function is called with it."""
        if not self.with_prompt:
            return sample
        text, messages = sample.prompt.text, sample.messages
        ends = np.asarray(sample.ends) + len(text) if len(sample.ends) else ()
        if messages:  # of an episode, which some forms read in place of the last turn
            first = {**messages[0], "content": f"{text}{messages[0]['content']}"}
            messages = (first, *messages[1:])
        return dataclasses.replace(
            sample, completion=text + sample.completion, ends=ends, messages=messages
        )

    def check(self, points: list[Returned], samples: Sequence[Sample]) -> list[Returned] | Failure:
        """The points, or a Failure that names the first sample whose points cannot be read.

        Args:
          points: of a call.
          samples: that it was called with.
        """
        if len(points) != len(samples):  # a process may answer anything
            return Failure(f"returned {len(points)} numbers for {len(samples)} samples")
        for i, (value, sample) in enumerate(zip(points, samples, strict=True)):
            of = f"sample {i} (prompt {sample.prompt.id})"
            if isinstance(value, list):
                if self.by_token is None:
                    return Failure(
                        f"returned a list of {len(value)} numbers for {of}; return one number, or"
                        " set by_token = true in its table"
                    )
                if len(value) != (n := len(sample.tokens)):
                    return Failure(
                        f"returned {len(value)} numbers for the {n} tokens of {of}; return one for"
                        " each of sample.tokens, or of completion_ids"
                    )
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not self.low <= number <= self.high:
                    limits = f"[{self.low:g}, {self.high:g}]"
                    which = f" for {of}" if len(samples) > 1 else ""
                    return Failure(f"returned {number:g}, outside of its range {limits}{which}")
        return points


def _fits(value: Any, allowed: Any) -> bool:
    return value in allowed if isinstance(allowed, list | tuple) else value == allowed
