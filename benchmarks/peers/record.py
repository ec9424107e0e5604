"""Measurements of a peer's script during its run, and their summary."""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.flags import WARMUP, progress


class Record:
    """Times of phases and steps; figures under the same names as this library's own programs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.now: dict[str, float] = defaultdict(float)
        self.compiles = 0
        self.first_step_cpu_s = 0.0

    def compiled(self, is_compile: bool) -> None:
        """Counts a program that was compiled."""
        self.compiles += is_compile

    def spent(self, phase: str, seconds: float) -> None:
        """Adds to a phase of the step that is running."""
        self.now[f"{phase}_s"] += seconds

    def drew(self, lengths: Sequence[int]) -> None:
        """Counts the tokens of a rollout and the slot-steps that it took."""
        self.now["tokens"] += sum(lengths)
        self.now["slot_steps"] += len(lengths) * max(lengths, default=0)

    def step(self, wait: Callable[[], Any]) -> Callable[[Callable], Callable]:
        """A wrapper of the function that does one step."""

        def around(function: Callable) -> Callable:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.begin()
                out = function(*args, **kwargs)
                wait()
                self.end()
                return out

            return run

        return around

    def begin(self) -> None:
        """A step begins."""
        self.now.clear()
        self._began, self._compiles = time.perf_counter(), self.compiles

    def end(self) -> None:
        """The step is done."""
        row = dict(self.now) | {"step_s": time.perf_counter() - self._began}
        row["compiles"] = self.compiles - self._compiles
        if row.get("rollout_s") and row.get("tokens"):
            row["rollout_tok_s"] = row["tokens"] / row["rollout_s"]
            row["slot_use"] = row["tokens"] / row.pop("slot_steps")
        self.rows.append(row)
        if len(self.rows) == 1:
            used = resource.getrusage(resource.RUSAGE_SELF)
            self.first_step_cpu_s = used.ru_utime + used.ru_stime
        progress(f"step {len(self.rows)}", row)

    def summary(self) -> dict[str, Any]:
        """Medians over the steady steps."""
        steady = self.rows[WARMUP:] or self.rows
        names = {name for row in self.rows for name in row} - {"compiles", "slot_steps"}
        figures: dict[str, Any] = {
            name: statistics.median(row.get(name, 0.0) for row in steady) for name in sorted(names)
        }
        return figures | {
            "first_step_s": self.rows[0]["step_s"],
            "first_step_cpu_s": self.first_step_cpu_s,
            "compiles": self.compiles,
            "late_compiles": sum(row["compiles"] for row in self.rows[WARMUP:]),
            "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
