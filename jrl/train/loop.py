"""The loop: collect, step, log; with evaluation, checkpoints, and a clean end whatever happens.

for i in range(steps):
    batch = collect(...)                                # hops 1 to 4
    state, metrics = step(state, batch, distribution)   # hop 5
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.config import Config, flatten
from jrl.errors import Overdue, UserError
from jrl.mesh import replicated
from jrl.report.page import write_report
from jrl.rewards.pool import RewardPool
from jrl.run.diagnostics import with_others
from jrl.run.progress import Progress
from jrl.run.revisions import pinned
from jrl.run.reward_probe import check_reward_columns, missing_math, probe_rewards, reward_text
from jrl.storage.step_files import what_is_saved
from jrl.system.compile_cache import (
    enable_compile_cache,
    return_compiler_memory,
)
from jrl.system.compile_reports import CompileNotes
from jrl.system.devices import find_devices
from jrl.system.processes import check_same, stop_requested
from jrl.system.signals import STEP_SECONDS, Stopping
from jrl.system.wait_reports import Waits, moved, waiting
from jrl.train import build, programs
from jrl.train.adapters import has_base, with_kept_base
from jrl.train.build import Run
from jrl.train.collect import Groups, GroupSource, collect
from jrl.train.compiled import iterate, warm_start, with_policy
from jrl.train.curriculum import rounds_of
from jrl.train.disjoint import draw_ahead, restored, stored
from jrl.train.objective import sampler_differs
from jrl.train.packing import Packer
from jrl.train.pairs import judged_source
from jrl.train.records import RunRecords, all_heard
from jrl.train.replay import recall_of
from jrl.train.resharding import freed_after
from jrl.train.sampler_difference import difference_text
from jrl.train.score import policy_of
from jrl.train.shapes import check_metric_names
from jrl.train.step import Metrics, Step
from jrl.train.tree_search import sampled_params
from jrl.types import Batch, Params, TrainState

Collect = Callable[..., tuple[Batch, Groups, int]]
"""(root key, policy params, *, step, cursor) -> (batch, the groups in it, new cursor)."""


SEGMENT = 100
"""Steps that a compiled run makes at most before it looks whether a signal asks it to stop."""

WATCHED_SEGMENT = 10
"""The same where a limit of [watch] can end the run or roll it back, which it does between two."""


def train_steps(
    state: TrainState,
    collect: Collect,
    step: Step,
    sampling_params: Any,
    steps: int,
    *,
    cursor: int = 0,
    policy: Callable[[TrainState], Params] = lambda state: state.params["policy"],
    on_step: Callable[[int, TrainState, Metrics, Groups, int], bool],
) -> TrainState:
    """Trains until ``steps`` steps are done in all, or ``on_step`` returns True.

    Args:
      state: where to start; donated.
      collect: hops 1 to 4.
      step: hop 5, compiled.
      sampling_params: the distribution drawn from.
      steps: training steps at the end, those before this call included.
      cursor: prompts used before this call.
      policy: the tree that is sampled from.
      on_step: called after each step with (steps done, state, metrics, groups, cursor). To the
        metrics of the step come "rollout_seconds", what hops 1 to 4 took.

    Returns:
      The state after the last step.
    """
    for i in range(int(state.step), steps):
        begin = time.perf_counter()
        batch, groups, cursor = collect(state.key, policy(state), step=i, cursor=cursor)
        spent: Any = {"rollout_seconds": time.perf_counter() - begin}
        state, metrics = step(state, batch, sampling_params)
        if on_step(i + 1, state, metrics | spent, groups, cursor):
            break
    return state


class Trained(NamedTuple):
    """What a finished run is.

    Attributes:
      run: its parts, without the weights that it started from.
      state: after the last step.
      summary: what ``summary.json`` holds.
    """

    run: Run
    state: TrainState
    summary: dict[str, Any]


def train(config: Config, *, echo: Callable[[str], object] = print) -> dict[str, Any]:
    """Runs a configuration from beginning to end, or resumes where an earlier call stopped.

    Args:
      config: with ``run.dir`` set.
      echo: where lines for a person go.

    Returns:
      What ``summary.json`` holds: accuracy_before, accuracy_after, steps, train_seconds,
      tokens_per_second, and more.

    Raises:
      UserError: bad input, named.
      RunStopped: the run ended itself; NonFinite when a gradient was not finite.
      StorageError: what is written cannot be written any more.
      KeyboardInterrupt: after SIGINT, SIGTERM or SIGHUP, when the state has been saved.
    """
    return run_config(config, echo=echo).summary


def run_config(
    config: Config,
    *,
    echo: Callable[[str], object] = print,
    on_record: Callable[[dict[str, Any]], object] | None = None,
) -> Trained:
    """``train``, with all that is left when it has finished.

    Args:
      config: with ``run.dir`` set.
      echo: where lines for a person go.
      on_record: called with the record of each step.
    """
    echo = _unfailing(echo)
    return_compiler_memory()
    enable_compile_cache()
    find_devices(echo)
    with contextlib.ExitStack() as stack:
        # Processes stop together: none may leave a rollout that the others are in.
        stopping = stack.enter_context(Stopping(patient=jax.process_count() > 1))
        stopping.saved = partial(what_is_saved, config.run.dir or "")
        stack.enter_context(Waits(config.train.wait_seconds, echo, partial(_overdue, stopping)))
        with stopping.at_once():
            try:
                with waiting("model and the data", moved):
                    config = pinned(config)
                    check_same("configuration", flatten(config))
                    run, pool = _set_up(config, stack, echo)
            except UserError as error:
                if type(error) is not UserError:
                    raise
                raise with_others(error, config) from error
            notes = stack.enter_context(CompileNotes(echo))
            records = stack.enter_context(
                RunRecords(run._replace(params=None), pool, stopping, on_record)
            )
            stopping.at_rest = lambda: notes.compiling and records.at_rest()
            state, shardings = programs.new_state(run)
            run = records.run  # without the checkpoint's weights on the host, which are done with
            if said := records.check_space(state):
                echo(said)
        try:
            return _run(run, state, shardings, records, stopping, pool, echo)
        except UserError as error:
            kept = what_is_saved(records.dir)
            if kept in str(error):
                raise
            first, *more = str(error).split("\n")
            raise type(error)("\n".join([f"{first}; {kept}", *more])) from error
        except Exception as error:
            error.add_note(what_is_saved(records.dir))
            raise


def _overdue(stopping: Stopping, said: str) -> None:
    stopping.overdue(f"{said}; train.wait_seconds is the limit")


def _unfailing(echo: Callable[[str], object]) -> Callable[[str], object]:
    """The same, for a terminal that is gone or a log on a full disk, which end no run."""

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            echo(line)

    return say


def _set_up(
    config: Config, stack: contextlib.ExitStack, echo: Callable[[str], object]
) -> tuple[Run, RewardPool | None]:
    """What is trained, and the processes that judge it."""
    run = build.setup(config)
    programs.check_trainable(run)
    check_reward_columns(run.config, run.data.prompts.get("train") or ())
    check_metric_names(run)
    if run.method.lacks:
        echo(f"{config.method}: the objective alone is trained; {run.method.lacks}")
    for split, counts in run.data.counts.items():
        echo(f"data.{split}: {counts}")
    if said := reward_text(run):
        echo(said)
    if said := missing_math(config):
        echo(said)
    # Before the run directory, so that a typo in [rewards] does not leave one behind.
    pool = None if run.data.judged else stack.enter_context(build.reward_pool(config))
    if pool is not None:
        probe_rewards(run, pool)
    stack.enter_context(jax.set_mesh(run.mesh))
    return run, pool


def _run(
    run: Run,
    state: TrainState,
    shardings: TrainState,
    records: RunRecords,
    stopping: Stopping,
    pool: RewardPool | None,
    echo: Callable[[str], object],
) -> Trained:
    """Begins or resumes, trains to the last step, and finishes."""
    with stopping.interruptible():
        state, notes = _begin(run, state, records, echo)
    if sampler_differs(run.config) and run.method.draw.own:
        echo(difference_text(run, state))
    if run.config.train.mode == "compiled":
        state = _compiled_loop(run, state, shardings, records, stopping)
    else:
        state = _host_loop(run, state, shardings, records, stopping, pool, notes)
    records.save(state)
    records.checkpoints.wait()
    if stopping.late and not stopping.is_set():
        raise Overdue(stopping.late)
    if stopping.is_set():
        raise KeyboardInterrupt(
            f"stopped after step {int(state.step)}; saved in {records.checkpoints.directory}; "
            "run the same command again to resume"
        )
    with contextlib.ExitStack() as stack:
        if jax.process_count() == 1:
            stack.enter_context(stopping.at_once())  # all is saved; the same command finishes later
        summary = records.finish(state)
        summary["report"] = _report(records.dir, echo) if jax.process_index() == 0 else None
    return Trained(run, state, summary)


def _begin(
    run: Run, state: TrainState, records: RunRecords, echo: Callable[[str], object]
) -> tuple[TrainState, dict[str, Any]]:
    """The newest checkpoint with its notes, or the warm start and the first evaluation."""
    if (found := records.restore(state)) is not None:
        echo(f"resuming from step {int(found[0].step)} of {records.dir}")
        return found
    if run.network.extras.split is not None and has_base(run.config):
        state = with_kept_base(run.config, run.network, state)  # was stopped before a checkpoint
    elif run.config.warmup.steps:
        state = _warmed_up(run, state, echo)
    records.begin(state)
    return state, {}


def _warmed_up(run: Run, state: TrainState, echo: Callable[[str], object]) -> TrainState:
    """The state after supervised training on the task's solutions."""
    assert run.task is not None, "the configuration makes sure that a warm start has a task"
    warmup, policy = run.config.warmup, policy_of(state, run.network)
    warm = jax.jit(
        partial(
            warm_start,
            task=run.task,
            network=run.network,
            steps=warmup.steps,
            batch=warmup.batch,
            learning_rate=warmup.learning_rate,
        ),
        out_shardings=(jax.tree.map(lambda x: x.sharding, policy), None),
    )
    policy, losses = warm(state.key, policy)
    echo(f"warm start: {warmup.steps} supervised steps, loss {float(losses[-1]):.3f}")
    return with_policy(state, policy, run.optimizer, network=run.network, given=run.networks)


# ---------------------------------------------------------------- batches made on the host


class BatchSource(NamedTuple):
    """Hops 1 to 4 of a run.

    Attributes:
      collect: as ``train_steps`` calls it.
      notes: what a checkpoint must hold for the next batch to be the same.
      wait: returns when no device is drawing.
      forget: drops what is drawn ahead, called with the prompts used up to the last step.
    """

    collect: Collect
    notes: Callable[[], dict[str, Any]]
    wait: Callable[[], Any] = lambda: None
    forget: Callable[[int], Any] = lambda cursor: None


@contextlib.contextmanager
def _batch_source(
    run: Run,
    pool: RewardPool | None,
    cursor: int,
    notes: Mapping[str, Any],
    stopping: Stopping,
) -> Iterator[BatchSource]:
    """Judged completions from files, groups drawn when asked for, or groups drawn ahead.

    Args:
      run: from ``build.setup``.
      pool: the reward functions of a run on text.
      cursor: prompts used so far.
      notes: of the source that an earlier call of the run had; {} for a new run.
      stopping: when set, a rollout that is ahead has as long to end as any other.
    """
    packer = programs.packer(run)
    if packer is not None and "packing" in notes:
        packer.resume(notes["packing"])

    def packing() -> dict[str, Any]:
        return {} if packer is None else {"packing": packer.notes()}

    if run.data.judged:
        yield BatchSource(judged_source(run, packer).collect, packing)
        return
    program = programs.train_sampler(run)
    kept = packing
    if run.method.curriculum is not None:
        rounds, draw = rounds_of(run, pool, notes.get("curriculum"))
        kept = lambda: packing() | rounds.notes()  # noqa: E731
    else:
        draw = programs.group_source(run, pool, program)
    if run.method.replay is not None:
        recall = recall_of(run, run.method.replay, draw, notes.get("replay"))
        gather = recall.around(_gather(run, recall.draw, packer))
        collect_and_free = freed_after(gather, program)
        yield BatchSource(collect_and_free, lambda: kept() | recall.notes())
        return
    if run.rollout_mesh is None:
        yield BatchSource(freed_after(_gather(run, draw, packer), program), kept)
        return
    carried = [restored(groups, run) for groups in notes.get("carried", [])]
    with draw_ahead(run, draw, cursor, carried, packer) as ahead:

        def drawn_ahead() -> dict[str, Any]:
            hurried = stopping.is_set() and jax.process_count() == 1
            drawn = ahead.drawn(STEP_SECONDS if hurried else None)
            if not drawn:
                return packing()
            # The policies that drew these are gone by the time the run resumes.
            kept = {"carried": [stored(groups) for groups in drawn]}
            before = drawn[0].packing
            return kept | ({"packing": before} if before else packing())

        yield BatchSource(ahead.collect, drawn_ahead, ahead.drawn, ahead.forget)


def _gather(run: Run, draw: GroupSource, packer: Packer | None) -> Collect:
    """``collect`` for a run whose groups are drawn when they are asked for."""
    return partial(
        collect,
        draw=draw,
        prompts=run.config.train.prompts,
        weights=np.array(list(run.rewards.weights.values()), np.float32),
        method=run.method,
        mesh=run.mesh,
        pack=packer,
    )


def _host_loop(
    run: Run,
    state: TrainState,
    shardings: TrainState,
    records: RunRecords,
    stopping: Stopping,
    pool: RewardPool | None,
    notes: Mapping[str, Any],
) -> TrainState:
    """Two programs a step, with reward functions on the host between them."""
    steps, cursor = run.config.train.steps, records.position.cursor
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_batch_source(run, pool, cursor, notes, stopping))
        records.batch_notes = source.notes
        progress = stack.enter_context(Progress("train", total=steps, start=int(state.step)))
        records.start_clock()
        if stop_requested(stopping):
            return state

        last = [state]  # of the last whole step

        def collect(*args: Any, step: int, **kwargs: Any) -> tuple[Batch, Groups, int]:
            rollout = waiting("rollout", of=f"step {step + 1}")
            try:
                with rollout, stopping.interruptible():
                    return source.collect(*args, step=step, **kwargs)
            except (Exception, KeyboardInterrupt) as error:
                if stopping.gave_up if isinstance(error, KeyboardInterrupt) else all_heard(error):
                    records.save_if_whole(last[0])
                raise

        def on_step(done: int, state: TrainState, *made: Any) -> bool:
            last[0] = state
            _after_step(records, progress, done, state, *made)
            if jax.process_count() > 1:
                source.wait()  # what all processes do together wants all devices idle
            return stop_requested(stopping) or records.rolls_back

        train_step = programs.train_program(run, shardings)
        sampling_params = jax.device_put(run.sampling_params, replicated(run.mesh))
        while True:
            state = train_steps(
                state,
                collect,
                train_step,
                sampling_params,
                steps,
                cursor=records.position.cursor,
                policy=sampled_params(run),
                on_step=on_step,
            )
            if not records.rolls_back:
                break
            source.forget(records.position.cursor)
            last[0] = state = records.roll_back(state, progress.note)
        if stopping.is_set() or stopping.late:
            records.save(state)  # before what is drawn ahead is waited for
    return state


def _after_step(
    records: RunRecords,
    progress: Progress,
    done: int,
    state: TrainState,
    metrics: Metrics,
    groups: Groups,
    cursor: int,
) -> None:
    """Writes, says and saves what is due after a step on the host."""
    shown = metrics.pop("advantages", None)
    with waiting("training", of=f"step {done}"):
        record = records.after_step(done, state, metrics | groups.counts, cursor)
    progress.step(done, record)
    for line in records.check(done, record):
        progress.note(f"warning: {line}")
    records.write_samples_if_due(done, groups, shown)
    if not records.rolls_back:
        records.save_if_due(done, state)
    records.end_if_broken(state)


# ---------------------------------------------------------------- all of it in one program


def _compiled_loop(
    run: Run,
    state: TrainState,
    shardings: TrainState,
    records: RunRecords,
    stopping: Stopping,
) -> TrainState:
    """Segments of many steps, each one program; between them records are written."""
    config = run.config
    iteration = programs.make_train_iteration(run)
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
                    out_shardings=(shardings, replicated(run.mesh)),
                    donate_argnums=0,
                )
                # Before the clock runs, so that the steps' time is their own.
                compiled[steps] = segment.lower(state, sampling_params).compile()
                records.start_clock()
                if stop_requested(stopping):  # a signal came meanwhile
                    break
            state, curves = compiled[steps](state, sampling_params)
            with waiting("training", of=f"steps {done + 1} to {done + steps}"):
                curves = jax.device_get(curves)
            seconds = records.lap() / steps
            for i in range(steps):
                metrics = {name: curve[i] for name, curve in curves.items()}
                number = done + i + 1
                cursor = number * config.train.prompts
                record = records.after_step(number, state, metrics, cursor, seconds)
                progress.step(number, record)
                for line in records.check(number, record):
                    progress.note(f"warning: {line}")
            if records.rolls_back:
                state = records.roll_back(state, progress.note)
            records.save_if_due(int(state.step), state)
            records.end_if_broken(state)
    return state


def _segment(left: int, most: int) -> int:
    """Steps of the next segment: at most so many, and a part of what is left that recurs.

    >>> _segment(50, 10), _segment(25, 10), _segment(11, 10), _segment(7, 100)
    (10, 5, 10, 7)
    """
    if left <= most:
        return left
    # Other lengths are other programs, which take long to compile.
    return next((n for n in range(most, most // 2 - 1, -1) if left % n == 0), most)


def _report(directory: str, echo: Callable[[str], object]) -> str | None:
    """The page of the run; a run that is done does not fail for want of it."""
    try:
        return str(write_report(directory))
    except UserError as error:
        echo(f"no report: {error}")
        return None
