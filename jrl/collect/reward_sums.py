"""A source whose members' weighted rewards fit into float32.

Each reward is finite there (``rewards.call``, ``episodes.host``), but their weighted sum, which
advantages are computed from, need not be, and would end a run as a gradient that is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jrl.collect.sources import Around, Groups, Source
from jrl.errors import UserError
from jrl.judging.host import without_dropped
from jrl.system.float32 import sum_overflows
from jrl.types import Prompt, Rollout, StopReason
from jrl.types.asks import DrawRequest


class FiniteSums(Around):
    """A source in which a weighted sum beyond float32 is an error of its completion's rewards.

    Args:
      source: of groups with all reward parts.
      weights: reward part -> weight, in the order of the columns.
      on_error: what such a completion gets, ``reward_pool.on_error``.
    """

    def __init__(self, source: Source, weights: Mapping[str, float], on_error: str) -> None:
        super().__init__(source)
        self._weights, self._on_error = dict(weights), on_error

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``."""
        return self._checked(self.source.draw(request))

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout) -> Groups:
        """As ``Source.judge``."""
        return self._checked(self.source.judge(subject, prompts, rollout))

    def _checked(self, groups: Groups) -> Groups:
        """The groups, and ``reward_errors`` counted; UserError where an error stops the run."""
        rewards, stop = map(np.asarray, jax.device_get((groups.rewards, groups.rollout.stop)))
        counted = (stop < StopReason.FAILED) & (stop != StopReason.ABORTED)
        over = counted & sum_overflows(rewards, list(self._weights.values()))
        if not over.any():
            return groups
        if self._on_error == "stop":
            row, member = np.argwhere(over)[0]
            prompt = int(np.asarray(jax.device_get(groups.ids["prompt"]))[row])
            raise UserError(f"{self._text(rewards[row, member])} (prompt {prompt}); {_REMEDY}")
        counts = dict(groups.counts)
        counts["reward_errors"] = counts.get("reward_errors", 0.0) + float(over.sum())
        groups = groups._replace(counts=counts)
        if self._on_error == "drop":
            rollout, _ = without_dropped(jax.device_get(groups.rollout), over)
            return groups._replace(rollout=rollout)
        stats: dict[str, Any] = dict(groups.stats or {})
        if "paid" in stats:
            paid = np.asarray(jax.device_get(stats["paid"]))
            stats["paid"] = np.where(over[..., None], np.float32(0), paid)
        rewards = np.where(over[..., None], np.float32(0), rewards)
        return groups._replace(rewards=rewards, stats=stats)

    def _text(self, rewards: np.ndarray) -> str:
        """The sum in words, the parts that it is made of named."""
        terms = [
            f"{weight:g} * {value:g} of rewards.{name}"
            for (name, weight), value in zip(self._weights.items(), rewards.tolist(), strict=True)
            if weight and value
        ]
        return f"the sum of {' and '.join(terms)} is infinite in float32"


_REMEDY = 'lower a weight or a reward, or set reward_pool.on_error = "zero" or "drop"'
