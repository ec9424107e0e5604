"""Reward functions of one's own on the completions of a procedural task, called on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jrl.data.tasks import Task
from jrl.rewards.pool import RewardPool
from jrl.train.collect import Groups, GroupSource, TextSource
from jrl.types import Array, Params, Prompt


def is_own(name: str) -> bool:
    """Whether a reward part is a function of one's own, by its name."""
    return ":" in name


def device_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Those reward parts that a task judges on the device; at least one, because it judges there.

    Args:
      names: of reward parts, without that of a reward model.
    """
    return tuple(name for name in names if not is_own(name)) or ("verify",)


def with_own_points(
    draw: GroupSource, task: Task, pool: RewardPool, names: list[str]
) -> GroupSource:
    """A draw on a task whose groups have the points of reward functions on the host too.

    A sample's prompt has the text that the task renders, and a correct completion as its answer.

    Args:
      draw: gives ``device_parts(names)``.
      task: the problems are of.
      pool: the reward functions.
      names: reward parts in the order wanted, those of the device and of the pool.
    """
    device = device_parts(names)
    judge = TextSource((), 0, None, None, None, pool, task.tokenizer).judge  # type: ignore[arg-type]

    def scored(key: Array, params: Params, step: Any, positions: Any, **version: Any) -> Groups:
        groups = draw(key, params, step, positions, **version)
        rollout, problems, points = jax.device_get((groups.rollout, groups.subject, groups.rewards))
        prompts = []
        for row, number in enumerate(np.asarray(positions).tolist()):
            problem = jax.tree.map(lambda x, row=row: x[row], problems)
            text, answer = task.render(problem)
            tokens = np.asarray(problem.tokens)[: int(problem.length)]
            prompts.append(Prompt(number, text, tokens, answer))
        judged = judge(prompts, rollout)
        of_device = dict(zip(device, np.moveaxis(points, -1, 0), strict=True))
        of_host = dict(zip(pool.functions, np.moveaxis(judged.rewards, -1, 0), strict=True))
        columns = [of_host[name] if is_own(name) else of_device[name] for name in names]
        rewards = np.stack(columns, axis=-1).astype(np.float32)
        return groups._replace(rewards=rewards, counts={**groups.counts, **judged.counts})

    return scored
