"""Health checks of a run's curves, one line each."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SHORT = 20
"""Minimum points of a curve to estimate its noise from its own spread."""

SOLVED = 0.9
"""Held-out accuracy above which equal groups and low entropy are expected."""


class Finding(NamedTuple):
    """Change of a metric from the first tenth of a run to the last.

    Attributes:
      name: the metric.
      title: of its panel.
      first: mean of the first tenth of its points.
      last: mean of the last tenth.
      note: a remark; "" for none.
      level: "good", "look" if it needs attention, or "".
    """

    name: str
    title: str
    first: float
    last: float
    note: str
    level: str


def findings(
    curves: Sequence[Any], quiet: frozenset[str] = frozenset(), *, fixed_length: bool = False
) -> list[Finding]:
    """A check for each curve with a note, in the order of the curves.

    Args:
      curves: ``report.Curve`` of a run.
      quiet: names of those that show only rounding noise.
      fixed_length: whether a task or an environment sets the length limit, so that no key can
        raise it.
    """
    ends = {curve.name: _Ends.of(curve) for curve in curves if curve.values}
    solved = "eval/accuracy" in ends and ends["eval/accuracy"].last > SOLVED
    results = []
    for curve in curves:
        name = curve.name
        judge = NOTES.get("reward" if name.startswith("reward/") else name)
        if judge is None or name not in ends:
            continue
        title, note = curve.title, judge(ends[name]) or ""
        level = "good" if note in _GOOD else "look" if note and note != _UNCLEAR else ""
        if name in quiet:
            title, _, note = title.partition(": ")
        elif solved and level == "look" and name in ("zero_std_groups", "entropy"):
            note, level = "expected once nearly everything is solved", ""
        elif fixed_length and name == "truncated" and note:
            note = "many are truncated: they do not stop after the answer"
        results.append(Finding(name, title, ends[name].first, ends[name].last, note, level))
    return results


class _Ends(NamedTuple):
    """Both ends of a curve: their means, and whether they differ by more than their spread."""

    first: float
    last: float
    differs: bool

    @classmethod
    def of(cls, curve: Any) -> _Ends:
        values = curve.values
        if curve.low:  # its own intervals, which do not overlap
            separated = curve.low[-1] > curve.high[0] or curve.high[-1] < curve.low[0]
            return cls(values[0], values[-1], separated)
        size = max(1, len(values) // 10)
        head, tail = values[:size], values[-size:]
        first, last = statistics.fmean(head), statistics.fmean(tail)
        if len(values) < SHORT:
            return cls(first, last, False)
        around = [y - x for x, y in itertools.pairwise(values)]
        noise = statistics.pstdev(around) / 2**0.5  # of one point, without the trend
        return cls(first, last, abs(last - first) > 3 * noise * (2 / size) ** 0.5)


_BETTER = "better than at the start"
_RISES = "rises"
_GOOD = (_BETTER, _RISES)
_UNCLEAR = "no clear change"


def _reward(ends: _Ends) -> str | None:
    if not ends.differs:
        return None
    return _RISES if ends.last > ends.first else "falls: compare samples of the first and last step"


def _accuracy(ends: _Ends) -> str:
    if not ends.differs:
        return _UNCLEAR
    return _BETTER if ends.last > ends.first else "fell below its start"


def _above(limit: float, note: str) -> Callable[[_Ends], str | None]:
    return lambda ends: note if ends.last > limit else None


def _entropy(ends: _Ends) -> str | None:
    if ends.differs and ends.last < 0.1 * ends.first:
        return "nearly 0: the policy is deterministic; try a larger entropy or KL coefficient"
    if ends.differs and ends.last > 2 * ends.first:
        return "doubled: the policy drifts to noise; lower optimizer.learning_rate"
    return None


def _length(ends: _Ends) -> str | None:
    if ends.differs and ends.last > 2 * ends.first:
        return "doubled"
    return "halved" if ends.differs and ends.last < 0.5 * ends.first else None


NOTES: Mapping[str, Callable[[_Ends], str | None]] = {
    "reward": _reward,
    "eval/accuracy": _accuracy,
    "zero_std_groups": _above(
        0.5, "most groups give no gradient: harder or easier prompts, or a larger sampling.group"
    ),
    "truncated": _above(0.1, "many are truncated: raise sampling.max_new_tokens"),
    "clip_fraction_high": _above(
        0.2, "many tokens are clipped: lower optimizer.learning_rate, or fewer epochs"
    ),
    "clip_fraction_low": _above(
        0.2, "many tokens are clipped: lower optimizer.learning_rate, or fewer epochs"
    ),
    "logprob_diff": _above(0.02, "sampler and trainer disagree: check sampling.int8 and dtypes"),
    "entropy": _entropy,
    "length": _length,
    "skipped_updates": _above(0.0, "updates were skipped: gradients were not finite"),
    "reward_failures": _above(0.01, "reward functions fail or time out"),
}
"""Metric -> its check, which returns a remark."""
