"""A run from start or resumption to its end, with its records.

summary = train(load_config("configs/tiny.toml"))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from jrl.config import Config, flatten
from jrl.errors import Overdue, UserError
from jrl.judging.judges import check_judges, probe_judges
from jrl.models.file_tokenizer import FileTokenizer
from jrl.report.page import write_report
from jrl.rewards.pool import RewardPool
from jrl.run.compiles_sooner import compiles_sooner
from jrl.run.diagnostics import with_others
from jrl.run.loops import Training, train_compiled, train_on_host
from jrl.run.metric_names import check_metric_names
from jrl.run.out_of_memory import memory_of
from jrl.run.own_parts import check_own_parts
from jrl.run.progress import above_live_line
from jrl.run.records import RunMoved, RunRecords
from jrl.run.reference_check import check_references, check_verifiers
from jrl.run.revisions import pinned
from jrl.run.reward_probe import check_reward_columns, missing_math, probe_rewards, reward_text
from jrl.run.sampler_difference import difference_text
from jrl.setup.adapters import has_base, policy_of, with_kept_base
from jrl.setup.objective import sampler_differs
from jrl.setup.reward_parts import reward_pool
from jrl.setup.run import Run
from jrl.storage.step_files import what_is_saved
from jrl.system.compile_cache import enable_compile_cache, return_compiler_memory
from jrl.system.compile_reports import CompileNotes
from jrl.system.devices import find_devices
from jrl.system.processes import check_same, stop_requested
from jrl.system.signals import Stopping
from jrl.system.wait_reports import Waits, io_progress, waiting
from jrl.train import build, programs
from jrl.train.ahead import StepAhead
from jrl.train.compiled import warm_start, with_policy
from jrl.train.remat import settled
from jrl.train.reward_model import check_text_models
from jrl.train.trainable import check_trainable
from jrl.types import TrainState
from jrl.user_code import forget_changed_files


class Trained(NamedTuple):
    """Result of a finished run.

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
    echo = ignore_echo_errors(echo)
    forget_changed_files()
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
                with waiting("model and the data", io_progress):
                    config = pinned(config)
                    check_same("configuration", flatten(config))
                    run, pool = _set_up(config, stack, echo)
            except UserError as error:
                if type(error) is not UserError:
                    raise
                raise with_others(error, config) from error
            notes = stack.enter_context(CompileNotes(echo, sooner=compiles_sooner(run)))
            run = settled(run, echo)
            records = stack.enter_context(
                RunRecords(run._replace(params=None), pool, stopping, on_record)
            )
            stopping.at_rest = lambda: notes.compiling and records.at_rest()
            step = stack.enter_context(StepAhead(run))
            with memory_of("initial state", run):
                state, shardings = programs.new_state(run)
            run = records.run  # without the checkpoint's weights on the host, which are done with
            if warning := records.check_space(state):
                echo(warning)
        try:
            return _run(Training(run, shardings, records, stopping, pool, echo, step), state)
        except UserError as error:
            saved = what_is_saved(records.dir)
            # One that names what is wrong with a checkpoint: the same command meets it again.
            if records.unread or saved in str(error) or isinstance(error, RunMoved):
                raise
            first, *more = str(error).split("\n")
            raise type(error)("\n".join([f"{first}; {saved}", *more])) from error
        except Exception as error:
            error.add_note(what_is_saved(records.dir))
            raise


def _overdue(stopping: Stopping, message: str) -> None:
    stopping.overdue(f"{message}; train.wait_seconds is the limit")


def ignore_echo_errors(echo: Callable[[str], object]) -> Callable[[str], object]:
    """``echo`` above the live line, which ignores a closed terminal or a full disk."""

    def say(line: str) -> None:
        with contextlib.suppress(OSError), above_live_line():
            echo(line)

    return say


def _set_up(
    config: Config, stack: contextlib.ExitStack, echo: Callable[[str], object]
) -> tuple[Run, RewardPool]:
    """The run to train, and its reward processes."""
    run = build.setup(config)
    check_trainable(run)
    check_own_parts(run)
    check_reward_columns(run.config, run.kind, run.data)
    data = run.data.prompts
    for note in check_verifiers(run.config, data) + check_references(run.config, data):
        echo(note)
    prompts = [p for listed in run.data.prompts.values() for p in listed]
    check_judges(run.config, prompts)
    check_text_models(run.config, prompts)
    check_metric_names(run)
    if run.method.lacks:
        echo(f"{config.method}: the objective alone is trained; {run.method.lacks}")
    for note in run.tokenizer.notes if isinstance(run.tokenizer, FileTokenizer) else ():
        echo(note)
    for split, counts in run.data.counts.items():
        echo(f"data.{split}: {counts}{run.kind.counts_note}")
    if note := reward_text(run):
        echo(note)
    if note := missing_math(config):
        echo(note)
    # Before the run directory, so that a typo in [rewards] does not leave one behind.
    pool = stack.enter_context(reward_pool(config))
    probe_rewards(run, pool)
    probe_judges(run.config)
    stack.enter_context(jax.set_mesh(run.mesh))
    return run, pool


def _run(training: Training, state: TrainState) -> Trained:
    """Begins or resumes, trains to the last step, and finishes."""
    run, records, stopping = training.run, training.records, training.stopping
    with stopping.interruptible():
        state, notes = _begin(training, state)
    if sampler_differs(run.config) and run.method.draw.samples:
        training.echo(difference_text(run, state))
    if run.config.train.mode == "compiled":
        state = train_compiled(training, state, notes)
    else:
        state = train_on_host(training, state, notes)
    records.save(state)
    records.checkpoints.wait()
    # Asked of all: one alone that heard a signal after the last step would leave the others waiting
    # for it in the evaluation.
    if stop_requested(stopping):
        if stopping.late and not stopping.is_set():
            raise Overdue(stopping.late)
        raise KeyboardInterrupt(
            f"stopped after step {int(state.step)}; saved in {records.checkpoints.directory}; "
            "run the same command again to resume"
        )
    with contextlib.ExitStack() as stack:
        if jax.process_count() == 1:
            stack.enter_context(stopping.at_once())  # all is saved; the same command finishes later
        summary = records.finish(state)
        first = jax.process_index() == 0
        summary["report"] = _report(records.dir, training.echo) if first else None
        records.check_any_succeeded()
    return Trained(run, state, summary)


def _begin(training: Training, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """The newest checkpoint with its notes, or the warm start and the first evaluation."""
    run, records = training.run, training.records
    if (resumed := records.restore(state)) is not None:
        training.echo(f"resuming from step {int(resumed[0].step)} of {records.dir}")
        return resumed
    if records.unread:
        training.echo(f"no checkpoint is in {records.dir}: it begins again at step 1, logs too")
    if run.network.extras.split is not None and has_base(run.config):
        state = with_kept_base(run.config, run.network, state)  # was stopped before a checkpoint
    elif run.config.warmup.steps:
        state = _warmed_up(run, state, training.echo)
    records.begin(state)
    return state, {}


def _warmed_up(run: Run, state: TrainState, echo: Callable[[str], object]) -> TrainState:
    """The state after supervised training on the task's solutions."""
    task: Any = run.kind.task  # the configuration makes sure that a warm start has one
    warmup, policy = run.config.warmup, policy_of(state, run.network)
    warm = jax.jit(
        partial(
            warm_start,
            task=task,
            network=run.network,
            steps=warmup.steps,
            batch=warmup.batch,
            learning_rate=warmup.learning_rate,
        ),
        out_shardings=(jax.tree.map(lambda x: x.sharding, policy), None),
    )
    policy, losses = warm(state.key, policy)
    echo(f"warm start: {warmup.steps} supervised steps, loss {float(losses[-1]):.3f}")
    return with_policy(
        state, policy, run.optimizer, network=run.network, unchanged_policies=run.networks
    )


def _report(directory: str, echo: Callable[[str], object]) -> str | None:
    """The page of the run; a run that is done does not fail for want of it."""
    try:
        return str(write_report(directory))
    except UserError as error:
        echo(f"no report: {error}")
        return None
