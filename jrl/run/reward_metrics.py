"""Means of rewards by the values of a column of the data: ``log.by = "data_source"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jrl.collect.groups import counted
from jrl.collect.sources import Groups
from jrl.types import opinions

MOST_VALUES = 64
"""Values of the column that have metrics of their own; the others are counted together."""


def rewards_by(groups: Groups, weights: Mapping[str, float], column: str) -> dict[str, float]:
    """Mean reward and mean parts over the members of each value of a column.

    Args:
      groups: of a step, of prompts in text.
      weights: reward part -> weight, in the order of the rewards.
      column: of the data.

    Returns:
      reward_by/VALUE, points, and with several parts reward_by/VALUE/PART, the mean over the
      members that the part has an opinion of.
    """
    rewards, ids = jax.device_get((groups.rewards, groups.ids))
    rewards, members = np.asarray(rewards), np.asarray(counted(jax.device_get(groups.rollout)))
    valid = opinions(rewards, ids) & members[:, :, None]
    names = [_name(prompt.meta.get(column)) for prompt in groups.subject]
    values = list(dict.fromkeys(names))[:MOST_VALUES]
    names = [name if name in values else "others" for name in names]
    score = rewards @ np.array(list(weights.values()), np.float32)
    metrics: dict[str, float] = {}
    for value in dict.fromkeys(names):
        rows = np.array([name == value for name in names])
        if not members[rows].any():
            continue
        metrics[f"reward_by/{value}"] = float(score[rows][members[rows]].mean())
        for r, part in enumerate(weights if len(weights) > 1 else ()):
            mask = valid[rows][:, :, r]
            if mask.any():
                metrics[f"reward_by/{value}/{part}"] = float(rewards[rows][:, :, r][mask].mean())
    return metrics


def _name(value: Any) -> str:
    """A value as a part of a metric's name."""
    return "none" if value is None else str(value).replace("/", "_")[:64]
