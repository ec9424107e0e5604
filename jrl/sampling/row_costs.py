"""Measured costs of the work around episode rows, and the decision for a waiting row.

All costs of a choice are in slot-seconds: a slot that stands idle for a second costs one, and a
device that does something else than decode costs one for every slot.
"""

from __future__ import annotations

import bisect
import collections
import enum
import itertools
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

from jrl.sampling.chunk_length import costs

_TIMINGS, _INTERVAL = 12, 16
"""Keep the last 12 timings; after 6, time one call in 16."""
_WAITS = 256
"""Number of recent environment latencies kept."""


class WaitingPlace(enum.Enum):
    """Place of a row that waits for its environment."""

    HELD = "held"
    """It stays in its slot, which idles."""
    PARKED = "parked"
    """Its cache and state are copied out, and back into a slot later."""
    DROPPED = "dropped"
    """Nothing is kept on the device; its tokens are read again when a slot takes it."""


class WaitCosts(NamedTuple):
    """Costs, in slot-seconds, of the places where a row can wait.

    Attributes:
      held: expected.
      parked: inf where there is no room to park one more.
      dropped: inf where reading has not been timed yet.
    """

    held: float
    parked: float
    dropped: float


def cheapest(wait: WaitCosts) -> WaitingPlace:
    """The place that costs least, but a row is dropped only where no more can be parked.

    A parked row resumes with the same bits; one that is read again does so up to rounding, and a
    run whose rounding depends on the clock cannot be repeated bit for bit.

    >>> cheapest(WaitCosts(held=0.5, parked=0.2, dropped=0.1)).value
    'parked'
    """
    away = WaitingPlace.PARKED if math.isfinite(wait.parked) else WaitingPlace.DROPPED
    cost = wait.parked if away == WaitingPlace.PARKED else wait.dropped
    return WaitingPlace.HELD if wait.held <= cost else away


ChoosePlace = Callable[[WaitCosts], WaitingPlace]


class Timings:
    """Seconds of one kind of work, as a line over its size."""

    def __init__(self) -> None:
        self._times: collections.deque[tuple[int, float]] = collections.deque(maxlen=_TIMINGS)
        self._timed: set[Hashable] = set()
        self._count = 0
        self._line: tuple[float, float] | None = None

    def due(self, shape: Hashable = None) -> bool:
        """Whether the work that is about to begin should be timed.

        The first of each shape is not: it may be compiled.
        """
        if shape not in self._timed:
            self._timed.add(shape)
            return False
        self._count += 1
        # Timing waits for the device, which decoding does not otherwise do; so it stays rare once
        # the line is known.
        return len(self._times) < _TIMINGS // 2 or self._count % _INTERVAL == 0

    def record(self, size: int, seconds: float) -> None:
        """Records the seconds of work of a size."""
        self._times.append((size, seconds))
        self._line = None

    @property
    def measured(self) -> bool:
        """Whether anything was timed."""
        return bool(self._times)

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of each call, and of each unit of size; 0 as long as nothing was timed."""
        if self._line is None:
            self._line = costs(self._times) if self._times else (0.0, 0.0)
        return self._line

    @property
    def least(self) -> float:
        """Seconds of the quickest; 0 as long as nothing was timed.

        For short work, whose delays are those of being waited for, which it is only when timed.
        """
        return min((seconds for _, seconds in self._times), default=0.0)

    def seconds(self, size: int) -> float:
        """Expected seconds of work of a size."""
        call, each = self.line
        return call + each * size


class RowCosts:
    """The costs of S rows.

    Attributes:
      steps: of decoding, one each.
      returns: of a return to the host: calls that decode nothing.
      leaving, returning: of copying a row out and back.
      reading: of prefill, by tokens with their padding.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.steps, self.returns, self.reading = Timings(), Timings(), Timings()
        self.leaving, self.returning = Timings(), Timings()
        self._waits: collections.deque[float] = collections.deque(maxlen=_WAITS)
        self._longest_first: list[float] = []
        self._sums: list[float] = []

    def record_wait(self, seconds: float) -> None:
        """Takes how long an environment took to answer."""
        self._waits.append(seconds)
        # Sorted at every answer, not at every question: each waiting row asks at each return to the
        # host.
        self._longest_first = sorted(self._waits, reverse=True)
        self._sums = list(itertools.accumulate(self._longest_first))

    def wait_left(self, waited: float) -> float:
        """Seconds that an answer is expected to take yet, after ``waited`` seconds.

        The mean of what those recent answers took longer that were not there by then. After more
        seconds than any of them, as long again: such waits have no typical length.
        """
        # The latencies above `waited` come first; their sum is a prefix sum.
        longer = bisect.bisect_left(self._longest_first, -waited, key=lambda x: -x)
        return self._sums[longer - 1] / longer - waited if longer else waited

    def wait(self, waited: float, *, tokens: int) -> WaitCosts:
        """Costs of letting a row wait on, after ``waited`` seconds.

        Args:
          waited: seconds.
          tokens: of the row, prompt included.
        """
        reads = self.reading.seconds(tokens) if self.reading.measured else math.inf
        return WaitCosts(
            # One slot idles; moving a row stops the device for all of them.
            held=self.wait_left(waited),
            parked=self.slots * (self.leaving.least + self.returning.least),
            dropped=self.slots * reads,
        )

    def idle_steps(self) -> int:
        """Slot-steps that may pass idly before decoding returns to the host.

        Those that cost half as much as the return does. As much would cost least in sum where turns
        end at random; half of it costs 6 % more, and a third fewer slots are idle.
        """
        # 0 before anything was timed: decoding then returns to the host with the first idle slot.
        step = self.steps.seconds(1)
        return round(self.slots * self.returns.seconds(1) / step / 2) if step else 0
