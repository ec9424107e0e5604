"""The loop: collect, step, log.

for i in range(steps):
    batch = collect(...)                                # hops 1 to 4
    state, metrics = step(state, batch, distribution)   # hop 5

``jrl.run`` starts it, records its steps and ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from jrl.collect.collector import Collects
from jrl.collect.sources import Groups
from jrl.train.step import TrainStep
from jrl.train.step_metrics import Metrics
from jrl.types import Params, TrainState


def policy_weights(state: TrainState) -> dict[str, Params]:
    """The weights that a source samples with, by name: the policy only."""
    return {"policy": state.params["policy"]}


def train_steps(
    state: TrainState,
    batches: Collects,
    step: TrainStep,
    sampling_params: Any,
    steps: int,
    *,
    cursor: int = 0,
    weights: Callable[[TrainState], Mapping[str, Params]] = policy_weights,
    on_step: Callable[[int, TrainState, Metrics, Groups, int], bool],
) -> TrainState:
    """Trains until ``steps`` steps are done in all, or ``on_step`` returns True.

    Args:
      state: where to start; donated.
      batches: hops 1 to 4, such as a ``Collector``.
      step: hop 5, compiled.
      sampling_params: of the sampling distribution.
      steps: training steps at the end, those before this call included.
      cursor: tickets issued before this call.
      weights: (state) -> the trees to sample with, by name.
      on_step: called after each step with (steps done, state, metrics, groups, cursor). To the
        step's metrics "rollout_seconds" are added, the time of hops 1 to 4.

    Returns:
      The state after the last step.
    """
    for i in range(int(state.step), steps):
        begin = time.perf_counter()
        batch, groups, cursor = batches.collect(state.key, weights(state), step=i, cursor=cursor)
        spent: Any = {"rollout_seconds": time.perf_counter() - begin}
        state, metrics = step(state, batch, sampling_params)
        if on_step(i + 1, state, metrics | spent, groups, cursor):
            break
    return state
