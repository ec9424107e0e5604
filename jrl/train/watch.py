"""Limits on the metrics of a run: warnings, rollbacks, and stops.

    [watch.entropy]
    below = 0.05
    steps = 10
    action = "stop"

ends a run whose policy has collapsed. ``LIMITS`` hold without being asked for.
"""

from __future__ import annotations

import collections
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrl.config.tables import WatchTable
from jrl.errors import unknown_choice
from jrl.types import Array

NONFINITE = "skipped_updates"
"""The metric that says that a gradient was not finite."""

MEMORY = "host_memory_bytes"
"""Resident memory of the process, of the first one where there are several."""

COMPILED = "new_compiles"
"""Programs made ready since the record before."""

SKIPPED = "skipped_steps"
"""1 where a limit left the step's update out."""

LIMITS = {
    NONFINITE: WatchTable(above=0, steps=1, action="stop"),
    "reward_failures": WatchTable(above=0.99, steps=3, action="stop"),
    "env_failures": WatchTable(above=0.99, steps=3, action="stop"),
    SKIPPED: WatchTable(above=0, steps=10, action="stop"),  # or nothing would be trained for ever
    "logprob_diff": WatchTable(above=0.2, steps=3),
    "entropy": WatchTable(below=0.005, steps=20),
    "reward": WatchTable(falls=0.5, steps=10),
    "ratio": WatchTable(above=5, below=0.2, steps=3),
    "zero_std_groups": WatchTable(above=0.95, steps=20),
    "length": WatchTable(grows=4, steps=10),
    COMPILED: WatchTable(above=0, steps=10),
    MEMORY: WatchTable(grows=2, steps=10),
}

ROLLBACKS = 3
"""Maximum rollbacks of a run before it stops."""

_WINDOW = 10
"""Steps whose mean a relative limit compares with."""


class Broken(NamedTuple):
    """Limits violated for long enough at a step, one line per metric.

    Attributes:
      warn: to be said; a step that was skipped is among them.
      rollback: why the run should go back.
      stop: why it should end.
      since: the first of the steps that are to be gone back for.
      suspects: whether a limit that rolls back is being broken, if not for long enough yet.
    """

    warn: dict[str, str]
    rollback: dict[str, str]
    stop: dict[str, str]
    since: int = 0
    suspects: bool = False


class Watch:
    """Compares each step's record with the limits.

    Args:
      limits: by metric, those of the configuration; they replace ``LIMITS`` of the same metric.
    """

    def __init__(self, limits: Mapping[str, WatchTable]) -> None:
        self._configured = dict(limits)
        self._limits = LIMITS | self._configured
        self._names: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Restarts the statistics, as after a rollback."""
        self._broken: collections.Counter[str] = collections.Counter()
        self._past = {
            name: _Past()
            for name, limit in self._limits.items()
            if limit.grows is not None or limit.falls is not None
        }

    def notes(self) -> dict[str, Any]:
        """The statistics for a checkpoint, JSON values."""
        # Memory is compared with that of the same process.
        past = {name: each.notes() for name, each in self._past.items() if name != MEMORY}
        limits = {n: self._limits[n].model_dump(mode="json") for n in self._broken}
        return {"broken": dict(self._broken), "past": past, "limits": limits}

    def resume(self, notes: Mapping[str, Any]) -> None:
        """Continues with what ``notes`` returned; {} for none."""
        limits = notes.get("limits", {})
        for name, count in notes.get("broken", {}).items():
            limit = self._limits.get(name)
            # A limit acts at its number of steps, which another one's count may be beyond.
            if limit is not None and limits.get(name) == limit.model_dump(mode="json"):
                self._broken[name] = count
        for name, past in notes.get("past", {}).items():
            if name in self._past:  # the limits may be others now
                self._past[name] = _Past(**past)

    @property
    def can_roll_back(self) -> bool:
        """Whether a limit says so."""
        return any(limit.action == "rollback" for limit in self._limits.values())

    @property
    def acts(self) -> bool:
        """Whether a limit that was asked for ends the run or returns it to a checkpoint."""
        return any(limit.action in ("rollback", "stop") for limit in self._configured.values())

    def __call__(self, step: int, record: Mapping[str, Any]) -> Broken:
        """Actions after a step.

        A limit is named once, when it has been broken for its number of steps in a row; a skipped
        step each time.

        Raises:
          UserError: the run has no such metric.
        """
        self._check_names(record)
        lines: dict[str, dict[str, str]] = {"warn": {}, "rollback": {}, "stop": {}}
        since = step
        for name, limit in self._limits.items():
            if limit.action == "none" or name not in record:
                continue
            value = record[name]
            fault = _fault(value, limit)
            if name in self._past:
                fault = self._past[name].fault(value, limit) or fault
            self._broken[name] = self._broken[name] + 1 if fault else 0
            if fault and (self._broken[name] == limit.steps or limit.action == "skip"):
                times = f" for {limit.steps} steps in a row" if limit.steps > 1 else ""
                times += "; its update was left out" if limit.action == "skip" else ""
                line = f"step {step}: {name} = {_text(value)}, {fault}{times}"
                lines["warn" if limit.action == "skip" else limit.action][name] = line
                if limit.action == "rollback":
                    since = min(since, step - limit.steps + 1)
                if limit.action == "stop":
                    self._broken[name] = 0  # a run that is resumed after it stops again
        back = [name for name, limit in self._limits.items() if limit.action == "rollback"]
        suspects = any(self._broken[name] for name in back)
        return Broken(**lines, since=since, suspects=suspects)

    def _check_names(self, record: Mapping[str, Any]) -> None:
        """Raises at the first step; those of evaluations are checked before it."""
        if self._names:
            return
        self._names = set(record)
        for name in self._configured:
            if name not in record and not name.startswith("eval/"):
                raise unknown_choice("watch", name, self._names - {"step"})


def skip_rule(
    limits: Mapping[str, WatchTable],
) -> Callable[[Mapping[str, Array]], Array] | None:
    """The in-step rule that skips updates; None without such a limit.

    Args:
      limits: by metric.

    Returns:
      (metrics of the step, [] each) -> [] bool, whether one of them is beyond its limit or not
      finite. It raises UserError for a metric that the training step does not compute itself.
    """
    rules = {name: limit for name, limit in limits.items() if limit.action == "skip"}
    if not rules:
        return None

    def broken(metrics: Mapping[str, Array]) -> Array:
        violated = jnp.zeros((), bool)
        for name, limit in rules.items():
            if name not in metrics or metrics[name].ndim:
                scalars = (n for n, x in metrics.items() if x.ndim == 0)
                raise unknown_choice(
                    'action = "skip" needs a metric of the step: watch', name, scalars
                )
            value = metrics[name]
            violated |= ~jnp.isfinite(value)
            if limit.above is not None:
                violated |= value > limit.above
            if limit.below is not None:
                violated |= value < limit.below
        return violated

    return broken


class _Past:
    """The reference value of a relative limit.

    Args:
      first: values of the first steps, at most ``_WINDOW``.
      last: those of the last steps, at most ``_WINDOW``.
      best: the best mean of ``_WINDOW`` steps; None before there is one.
    """

    def __init__(
        self, first: Sequence[float] = (), last: Sequence[float] = (), best: float | None = None
    ) -> None:
        self._first = list(first)
        self._last = collections.deque(last, maxlen=_WINDOW)
        self._best = best

    def notes(self) -> dict[str, Any]:
        """The arguments of one that continues as this one."""
        return {"first": list(self._first), "last": list(self._last), "best": self._best}

    def fault(self, value: float | None, limit: WatchTable) -> str:
        """The violation of a value, if any; the value is remembered."""
        if value is None:
            return ""
        if len(self._first) < _WINDOW:
            self._first.append(value)
            self._last.append(value)
            return ""
        start = sum(self._first) / _WINDOW
        self._last.append(value)
        mean = sum(self._last) / _WINDOW
        self._best = best = max(start if self._best is None else self._best, mean)
        if limit.grows is not None and start > 0 and value > limit.grows * start:
            return f"more than {limit.grows:g} times the {_text(start)} of the first steps"
        if limit.falls is not None and value < best - limit.falls * abs(best):
            return f"{limit.falls:.0%} and more below its best, {_text(best)}"
        return ""


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


def resident_bytes() -> int:
    """Resident memory of this process, bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
