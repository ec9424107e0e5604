"""The two training loops: step by step from the host, or many steps in one program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.collect.collector import Batches
from jrl.collect.plan import CollectState, packed, unpacked
from jrl.collect.sources import Groups
from jrl.collect.tree_search import drawn_weights
from jrl.mesh import replicated
from jrl.rewards.pool import RewardPool
from jrl.run.out_of_memory import memory_of
from jrl.run.progress import Progress
from jrl.run.records import RunRecords, seen_by_all_processes
from jrl.setup.run import Run
from jrl.system.processes import stop_requested
from jrl.system.signals import Stopping
from jrl.system.wait_reports import waiting
from jrl.train import programs
from jrl.train.batches import training_batches
from jrl.train.compiled import Iteration, iterate
from jrl.train.loop import train_steps
from jrl.train.step import TrainStep
from jrl.train.step_metrics import Metrics
from jrl.types import Array, Batch, Params, TrainState

SEGMENT = 100
"""Steps that a compiled run makes at most before it looks whether a signal asks it to stop."""

WATCHED_SEGMENT = 10
"""The same where a limit of [watch] can end the run or roll it back, which it does between two."""


class Training(NamedTuple):
    """A run under way.

    Attributes:
      run: its parts.
      shardings: of its state.
      records: what it writes, and where it is.
      stopping: whether it shall stop.
      pool: the reward functions on the host, or None.
      echo: where lines for a person go.
      step: the training step, jitted; not called where one program makes all steps.
    """

    run: Run
    shardings: TrainState
    records: RunRecords
    stopping: Stopping
    pool: RewardPool | None
    echo: Callable[[str], object]
    step: TrainStep


# ---------------------------------------------------------------- batches made on the host


def train_on_host(training: Training, state: TrainState, notes: Mapping[str, Any]) -> TrainState:
    """Two programs a step, with reward functions on the host between them.

    Args:
      training: the run.
      state: after the steps that are done.
      notes: of the checkpoint that it is from; {} for a new run.
    """
    run, records, stopping = training.run, training.records, training.stopping
    with contextlib.ExitStack() as stack:
        cursor = records.position.cursor
        batches = stack.enter_context(training_batches(run, training.pool, cursor, notes, stopping))
        records.batch_notes = batches.notes
        progress = Progress("train", total=run.config.train.steps, start=int(state.step))
        stack.enter_context(progress)
        records.start_clock()
        if stop_requested(stopping):
            return state
        loop = HostLoop(records, stopping, batches, progress, state)
        sampling_params = jax.device_put(run.sampling_params, replicated(run.mesh))
        while True:
            with memory_of("training step", run):
                state = train_steps(
                    state,
                    loop,
                    training.step,
                    sampling_params,
                    run.config.train.steps,
                    cursor=records.position.cursor,
                    weights=drawn_weights(run),
                    on_step=loop.after_step,
                )
            if not records.rolls_back:
                break
            batches.forget(records.position.cursor)
            loop.state = state = records.roll_back(state, progress.note)
        # By what all processes agreed on: a save by one that has heard a signal since would be one
        # more than the others make.
        if loop.stopped:
            records.save(state)  # before what is drawn ahead is waited for
    return state


class HostLoop:
    """The host's work around each step: interrupts, records, saves.

    Args:
      records: of the run.
      stopping: whether it shall stop.
      batches: hops 1 to 4.
      progress: the line on a terminal.
      state: after the steps that are done.

    Attributes:
      state: of the last whole step; saved where the next one cannot be made.
      stopped: whether the last step ended the loop because a process was asked to stop.
    """

    def __init__(
        self,
        records: RunRecords,
        stopping: Stopping,
        batches: Batches,
        progress: Progress,
        state: TrainState,
    ) -> None:
        self._records, self._stopping = records, stopping
        self._batches, self._progress = batches, progress
        self.state, self.stopped = state, False

    def collect(
        self, key: Array, weights: Mapping[str, Params], *, step: int, cursor: int
    ) -> tuple[Batch, Groups, int]:
        """``Batches.collect``; saves the previous step if it is interrupted or fails."""
        stopping = self._stopping
        try:
            with (
                waiting("rollout", of=f"step {step + 1}"),
                stopping.interruptible(),
                memory_of("sampler", self._records.run),
            ):
                return self._batches.collect(key, weights, step=step, cursor=cursor)
        except (Exception, KeyboardInterrupt) as error:
            stopped = isinstance(error, KeyboardInterrupt)
            if stopping.gave_up if stopped else seen_by_all_processes(error):
                self._records.save_if_whole(self.state)
            raise

    def after_step(
        self, done: int, state: TrainState, metrics: Metrics, groups: Groups, cursor: int
    ) -> bool:
        """Writes, prints and saves after a step; returns whether the loop ends."""
        self.state, records = state, self._records
        advantages = metrics.pop("advantages", None)
        self._batches.learn(done - 1, advantages)
        records.note_failure(groups.failure)
        with waiting("training", of=f"step {done}"):
            further = groups.counts | records.rewards_by(groups)
            record = records.after_step(done, state, metrics | further, cursor)
        self._progress.step(done, record)
        if jax.process_count() > 1:
            self._batches.wait()  # what all processes do together wants all devices idle
        for line in records.check(done, record):
            self._progress.note(f"warning: {line}")
        records.write_samples_if_due(done, groups, advantages)
        if not records.rolls_back:
            records.save_if_due(done, state)
        records.end_if_broken(state)
        self.stopped = stop_requested(self._stopping)
        return self.stopped or records.rolls_back


# ---------------------------------------------------------------- all of it in one program


def train_compiled(training: Training, state: TrainState, notes: Mapping[str, Any]) -> TrainState:
    """Segments of many steps, each one program; between them records are written.

    Args:
      training: the run.
      state: after the steps that are done.
      notes: of the checkpoint that it is from; {} for a new run.
    """
    run, shardings = training.run, training.shardings
    records, stopping = training.records, training.stopping
    config = run.config
    iteration = programs.make_train_iteration(run)
    collected = jax.device_put(
        begun(iteration, state, notes, records.position.cursor), replicated(run.mesh)
    )
    records.batch_notes = lambda: {"collect": packed(collected)}
    sampling_params = jax.device_put(run.sampling_params, replicated(run.mesh))
    compiled: dict[int, Any] = {}
    # A segment ends where a checkpoint or an evaluation is due.
    stops = [e for e in (config.checkpoint.every, config.eval.every, config.train.steps) if e]
    with Progress("train", total=config.train.steps, start=int(state.step)) as progress:
        records.start_clock()
        while (done := int(state.step)) < config.train.steps and not stop_requested(stopping):
            until = min(config.train.steps, *(e * (done // e + 1) for e in stops))
            steps = _segment(until - done, WATCHED_SEGMENT if records.acts else SEGMENT)
            if steps not in compiled:
                segment = jax.jit(
                    partial(iterate, iteration, steps=steps),
                    out_shardings=(shardings, replicated(run.mesh), replicated(run.mesh)),
                    donate_argnums=0,  # the training state alone
                )
                # Before the clock runs, so that the steps' time is their own.
                with memory_of("program of all steps", run):
                    compiled[steps] = segment.lower(state, collected, sampling_params).compile()
                records.start_clock()
                if stop_requested(stopping):  # a signal came meanwhile
                    break
            before = int(collected.cursor)
            with memory_of("program of all steps", run):
                state, collected, curves = compiled[steps](state, collected, sampling_params)
                issued = (int(collected.cursor) - before) // steps  # waits for the program
            with waiting("training", of=f"steps {done + 1} to {done + steps}"):
                curves = jax.device_get(curves)
            seconds = records.lap() / steps
            for i in range(steps):
                metrics = {name: curve[i] for name, curve in curves.items()}
                number = done + i + 1
                cursor = before + (i + 1) * issued
                record = records.after_step(number, state, metrics, cursor, seconds)
                progress.step(number, record)
                for line in records.check(number, record):
                    progress.note(f"warning: {line}")
            if records.rolls_back:
                state = records.roll_back(state, progress.note)
            records.save_if_due(int(state.step), state)
            records.end_if_broken(state)
    return state


def begun(
    iteration: Iteration, state: TrainState, notes: Mapping[str, Any], cursor: int
) -> CollectState:
    """The sampling state of a compiled run, from the checkpoint or fresh."""
    collected = iteration.begin(state).replace(cursor=jnp.int32(cursor))
    return unpacked(collected, notes["collect"]) if "collect" in notes else collected


def _segment(left: int, most: int) -> int:
    """Steps of the next segment: at most so many, and a part of what is left that recurs.

    >>> _segment(50, 10), _segment(25, 10), _segment(11, 10), _segment(7, 100)
    (10, 5, 10, 7)
    """
    if left <= most:
        return left
    # Other lengths are other programs, which take long to compile.
    return next((n for n in range(most, most // 2 - 1, -1) if left % n == 0), most)
