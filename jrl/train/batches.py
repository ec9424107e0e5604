"""Where the batches of a run come from: its source, everything around it, and who collects.

A reader finds here, in one list, what stands between the training loop and the sampler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from jrl.data.tasks import Task
from jrl.methods.curriculum import Curriculum, Table
from jrl.rewards.pool import RewardPool
from jrl.signals import Stopping
from jrl.train import programs
from jrl.train.build import Run
from jrl.train.collect import Batches, Collector
from jrl.train.curriculum import rounds_of
from jrl.train.disjoint import draw_ahead, restored
from jrl.train.plan_tools import Hinter, TaskTools, TextTools
from jrl.train.reward_model import NAME, ModelRewards
from jrl.train.sources import Source
from jrl.train.task_rewards import OwnRewards


def run_source(
    run: Run, pool: RewardPool | None, notes: Mapping[str, Any], split: str = "train"
) -> Source:
    """What draws the groups of a run, and what wraps it, from the inside out.

    Args:
      run: from ``build.setup``.
      pool: the reward functions on the host; None where nothing on the host judges.
      notes: of a checkpoint; {} for a new run.
      split: "train" or "eval"; an evaluation has neither rounds nor a replay.
    """
    trains, rewards = split == "train", run.rewards
    if trains and run.method.curriculum is not None:
        source: Source = rounds_of(run, pool, notes.get("curriculum"))
    else:
        source = programs.drawn_source(run, pool, split)
    names = [name for name in rewards.weights if name != NAME]
    if trains and pool is not None and pool.functions and isinstance(run.task, Task):
        source = OwnRewards(source, run.task, pool, names)
    if rewards.model is not None and (trains or (pool is not None and run.task is None)):
        source = ModelRewards(source, rewards.model, list(rewards.weights).index(NAME))
    return source


def table_of(run: Run, curriculum: Curriculum) -> Table:
    """The problems that a run's curriculum chooses from."""
    rows = curriculum.pool if run.task is not None else len(run.data.prompts["train"])
    return Table(rows, 1, np.zeros(rows, np.int32))


def tools_of(run: Run) -> Callable[[Any], Any] | None:
    """What the data of a run offers to plans."""
    if isinstance(run.task, Task):
        return partial(TaskTools, run.task)
    if run.task is not None or run.data.judged or run.config.recorded is not None:
        return None
    sizes = run.data.prompts["train"], run.config.sampling.max_new_tokens
    tools = TextTools(*sizes, hinted=Hinter(run) if run.config.text is not None else None)
    return lambda key: tools


@contextlib.contextmanager
def training_batches(
    run: Run, pool: RewardPool | None, cursor: int, notes: Mapping[str, Any], stopping: Stopping
) -> Iterator[Batches]:
    """The batches of a run: collected when asked for, or drawn ahead on devices of their own.

    Args:
      run: from ``build.setup``.
      pool: the reward functions of a run on text.
      cursor: tickets issued so far.
      notes: of the source and the packing that an earlier call of the run had; {} for a new run.
      stopping: when set, a rollout that is ahead has as long to end as any other.
    """
    packer = programs.packer(run)
    if packer is not None and "packing" in notes:
        packer.resume(notes["packing"])
    curriculum = run.method.curriculum
    collector = Collector(
        source=run_source(run, pool, notes),
        prompts=run.config.train.prompts,
        reward_weights=np.array(list(run.rewards.weights.values()), np.float32),
        method=run.method,
        mesh=run.mesh,
        pack=packer,
        sampled=not run.data.judged,
        group=run.config.sampling.group,
        judge=run.rewards.judged,
        tools=tools_of(run),
        table=table_of(run, curriculum) if isinstance(curriculum, Curriculum) else None,
        contexts=run.task is None,
        notes=notes,
    )
    if run.rollout_mesh is None:
        yield collector
        return
    carried = [restored(groups, run) for groups in notes.get("carried", [])]
    with draw_ahead(run, collector, cursor, carried, stopping) as ahead:
        yield ahead
