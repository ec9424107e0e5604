"""Reward functions of one's own on the completions of a procedural task, called on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jrl.data.tasks import Task
from jrl.rewards.pool import RewardPool
from jrl.train.sources import Around, Groups, Source, entries
from jrl.train.sources_text import TextSource
from jrl.types import Prompt
from jrl.types.asks import DrawRequest


def is_own(name: str) -> bool:
    """Whether a reward part is a function of one's own, by its name."""
    return ":" in name


def device_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Those reward parts that a task judges on the device; at least one, because it judges there.

    Args:
      names: of reward parts, without that of a reward model.
    """
    return tuple(name for name in names if not is_own(name)) or ("verify",)


class OwnRewards(Around):
    """A source on a task whose groups have the points of reward functions on the host too.

    A sample's prompt has the text that the task renders, and a correct completion as its answer.

    Args:
      source: gives ``device_parts(names)``.
      task: the problems are of.
      pool: the reward functions.
      names: reward parts in the order wanted, those of the device and of the pool.
    """

    def __init__(self, source: Source, task: Task, pool: RewardPool, names: Sequence[str]) -> None:
        super().__init__(source)
        self._task, self._pool, self._names = task, pool, names
        self._judge = TextSource((), 0, None, None, None, pool, task.tokenizer)

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``."""
        groups = self.source.draw(request)
        rollout, problems, points = jax.device_get((groups.rollout, groups.subject, groups.rewards))
        _, rows = entries(request)
        prompts = []
        for i, row in enumerate(np.asarray(rows).tolist()):
            problem = jax.tree.map(lambda x, i=i: x[i], problems)
            text, answer = self._task.render(problem)
            tokens = np.asarray(problem.tokens)[: int(problem.length)]
            prompts.append(Prompt(row, text, tokens, answer))
        judged = self._judge.judge(prompts, prompts, rollout)
        device = device_parts(self._names)
        columns = dict(zip(device, np.moveaxis(points, -1, 0), strict=True))
        columns |= zip(self._pool.functions, np.moveaxis(judged.rewards, -1, 0), strict=True)
        rewards = np.stack([columns[name] for name in self._names], axis=-1).astype(np.float32)
        return groups._replace(rewards=rewards, counts={**groups.counts, **judged.counts})
