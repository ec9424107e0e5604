"""Limits on the metrics of a run: what is said, and when the run ends, where one is broken.

    [watch.entropy]
    below = 0.05
    steps = 10
    action = "stop"

ends a run whose policy has collapsed. Two limits hold without being asked for (``LIMITS``).
"""

from __future__ import annotations

import collections
import resource
from collections.abc import Mapping
from typing import Any

from jrl.config import WatchTable
from jrl.errors import choose

NONFINITE = "skipped_updates"
"""The metric that says that a gradient was not finite."""

MEMORY = "host_memory_bytes"
"""Resident memory of the process; measured where a limit names it."""

LIMITS = {
    NONFINITE: WatchTable(above=0, steps=1, action="stop"),
    "reward_failures": WatchTable(above=0.99, steps=3, action="stop"),
}


class Watch:
    """Compares each step's record with the limits.

    Args:
      limits: by metric, those of the configuration; they replace ``LIMITS`` of the same metric.
    """

    def __init__(self, limits: Mapping[str, WatchTable]) -> None:
        self._asked = dict(limits)
        self._limits = LIMITS | self._asked
        self._broken: collections.Counter[str] = collections.Counter()
        self._known: set[str] = set()

    @property
    def wants_memory(self) -> bool:
        """Whether a limit is on the memory of the process."""
        return MEMORY in self._asked

    def __call__(
        self, step: int, record: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """What to say of a step: (warnings, reasons to stop), a line for each broken limit.

        A limit warns once, when it has been broken for its number of steps in a row.

        Raises:
          UserError: the run has no such metric.
        """
        self._check_names(record)
        found: dict[str, dict[str, str]] = {"warn": {}, "stop": {}}
        for name, limit in self._limits.items():
            if limit.action == "none" or name not in record:
                continue
            value = record[name]
            fault = _fault(value, limit)
            self._broken[name] = self._broken[name] + 1 if fault else 0
            if fault and self._broken[name] == limit.steps:
                times = f" for {limit.steps} steps in a row" if limit.steps > 1 else ""
                found[limit.action][name] = f"step {step}: {name} = {_text(value)}, {fault}{times}"
        return found["warn"], found["stop"]

    def _check_names(self, record: Mapping[str, Any]) -> None:
        """Raises at the first step; evaluations come later and are not checked."""
        if self._known:
            return
        self._known = set(record)
        for name in self._asked:
            if name not in record and not name.startswith("eval/"):
                raise choose("watch", name, self._known - {"step"})


def _fault(value: float | None, limit: WatchTable) -> str:
    if value is None:  # what a record holds for NaN and infinity
        return "not finite"
    if limit.above is not None and value > limit.above:
        return f"above {limit.above:g}"
    if limit.below is not None and value < limit.below:
        return f"below {limit.below:g}"
    return ""


def _text(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4g}"


def memory_bytes() -> int:
    """Resident memory of this process, bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
