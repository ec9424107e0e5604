"""Transformations of a reward part's numbers besides its weight: keys of ``[rewards.NAME]``.

    range = [0, 1]                # another number is an error of the function
    missing = "zero"              # of None, no opinion: 0 points
    where = {data_source = "math"}    # asked for these rows alone

Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from jrl.rewards.base import Points, Sample
from jrl.rewards.call import Failure

Missing = Literal["none", "zero", "drop"]


class Rules(NamedTuple):
    """Rules for the numbers of a reward function.

    Attributes:
      missing: of None: "none" leaves the part out of the sample's sum, "zero" is 0 points, "drop"
        takes the sample out of its group.
      low: the least number, points.
      high: the greatest.
      where: column of the data -> the value, or the values, of the rows that the function is asked
        about; {} for all. Of other rows it has no opinion.
    """

    missing: Missing = "none"
    low: float = -math.inf
    high: float = math.inf
    where: Mapping[str, Any] = MappingProxyType({})

    def asks(self, sample: Sample) -> bool:
        """Whether the function is asked about a sample."""
        meta = sample.prompt.meta
        return all(_fits(meta.get(name), wanted) for name, wanted in self.where.items())

    def check(self, points: list[Points]) -> list[Points] | Failure:
        """The points, or a Failure that names the first one outside of the range."""
        for value in points:
            if value is not None and not self.low <= value <= self.high:
                reason = f"returned {value:g}, outside of its range [{self.low:g}, {self.high:g}]"
                return Failure(reason)
        return points


def _fits(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list | tuple) else value == wanted
