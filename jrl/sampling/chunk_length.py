"""The number of decode steps between two returns to the host, tuned by measurement.

Returning to the host costs the same after a short chunk as after a long one, so short chunks pay
more often. In a long chunk a slot whose completion has ended stays idle until the chunk ends, and
so does the request queued for it.
"""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Iterable

from jrl.models import gpu

LENGTHS = (1, 2, 4, 8, 16, 32)
"""Decode steps of a chunk, the choices."""
GPU_LENGTHS = (1, 4, 16, 32)
"""Those on GPUs, where each up to ``gpu.STEPS`` is a program of its own."""
MAX_SECONDS = 0.1
"""The longest chunk, unless one step takes longer: it bounds the delay of streamed tokens."""
_PROBES = (1, 1, 1, 4, 4, 4)
"""Steps of the chunks that are timed; the medians ignore one that was delayed or compiled."""
_INTERVAL = 512
"""Chunks between two measurements: steps slow down as completions grow and slots fill."""
_REMEMBERED, _REFRESH = 256, 16
"""Completions whose lengths are kept, and new ones after which the choice is made again."""


class ChunkLength:
    """Chooses the length of the next chunk; the sampled tokens do not depend on it.

    Attributes:
      host_seconds, step_seconds: what a return to the host and a decode step cost, as last
        measured.
    """

    def __init__(self) -> None:
        self.host_seconds = self.step_seconds = 0.0
        self._times: list[tuple[int, float]] = []
        self._since = 0
        self._lengths: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._ended = 0
        self._chosen: dict[bool, int] = {}

    @property
    def measuring(self) -> bool:
        """Whether the next chunk is timed."""
        return self._since < len(_PROBES)

    def steps(self, *, queued: bool) -> int:
        """Decode steps of the next chunk; ``queued`` says whether a completion waits for a slot."""
        if self.measuring:
            return _PROBES[self._since]
        if queued not in self._chosen:
            lengths = self._lengths if queued else ()
            # Where nobody waits, an idle slot costs nothing, and the longest chunk within
            # MAX_SECONDS is best.
            self._chosen[queued] = best(self.host_seconds, self.step_seconds, lengths, choices())
        return self._chosen[queued]

    def record_chunk(self, steps: int, seconds: float) -> None:
        """Records the cost of a chunk of ``steps`` steps."""
        if self.measuring:
            self._times.append((steps, seconds))
            short = self._since + 1 == _PROBES.count(1)
            if short and statistics.median(t for _, t in self._times) > MAX_SECONDS:
                self._since = len(_PROBES) - 1  # no chunk may be longer than one step
        self._since += 1
        if self._since == len(_PROBES):
            # The choice is forgotten, not recomputed: it is needed only when the next chunk begins.
            self.host_seconds, self.step_seconds = costs(self._times)
            self._chosen.clear()
        elif self._since == _INTERVAL:
            self._times, self._since = [], 0

    def record_completion(self, tokens: int) -> None:
        """Records the length of a completion."""
        if tokens:
            self._lengths.append(tokens)
            self._ended += 1
        if self._ended % _REFRESH == 0:
            self._chosen.clear()


def choices() -> tuple[int, ...]:
    """The lengths to choose from, under the mesh in use."""
    return LENGTHS if gpu.steps_at_once() == 1 else GPU_LENGTHS


def costs(times: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Seconds per return to the host and per step, fitted to (steps, seconds) of chunks.

    The Theil-Sen line: its slope is the median slope of all pairs of points, so that a few delayed
    chunks do not move it.

    >>> costs([(1, 3.0), (1, 90.0), (1, 3.0), (4, 6.0), (4, 6.0), (4, 6.0)])
    (2.0, 1.0)
    """
    times = list(times)
    pairs = itertools.combinations(times, 2)
    slopes = [(t - s) / (n - m) for (m, s), (n, t) in pairs if n != m]
    # With chunks of one length only, all of the time counts as steps.
    step = statistics.median(slopes or [t / n for n, t in times])
    step = max(step, 0.0)
    return max(statistics.median(t - step * n for n, t in times), 0.0), step


def best(
    host_seconds: float, step_seconds: float, lengths: Iterable[int], choices: Iterable[int]
) -> int:
    """The chunk length with the least expected seconds for each sampled token.

    Args:
      host_seconds: of a return to the host.
      step_seconds: of a decode step.
      lengths: tokens of recent completions; each occupies its slot until a chunk ends. Empty where
        no completion waits for the slot.
      choices: chunk lengths, ascending; only the first may take longer than ``MAX_SECONDS``.

    >>> best(1e-3, 1e-2, [3, 40], LENGTHS), best(1e-3, 1e-3, [], LENGTHS)
    (4, 32)
    """
    lengths = list(lengths)

    def seconds(chunk: int) -> float:
        occupied = sum(-(-n // chunk) * chunk for n in lengths) / sum(lengths) if lengths else 1.0
        return occupied * (step_seconds + host_seconds / chunk)

    first, *others = choices
    short = [c for c in others if host_seconds + c * step_seconds <= MAX_SECONDS]
    return min([first, *short], key=seconds)
