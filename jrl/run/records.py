"""Records of a run: metrics, samples, evaluations, checkpoints and a summary."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax

from jrl.collect.sources import Groups
from jrl.collect.sources_given import sizes_of
from jrl.config.data import EnvData, EpisodeData
from jrl.config.stored import stored_config
from jrl.errors import Overdue, RunStopped, StorageError, UserError, unknown_choice
from jrl.evaluate import Evaluator
from jrl.evaluate.pairs import JudgedEvaluator
from jrl.evaluate.samples import samples_of
from jrl.rewards.pool import RewardPool
from jrl.run.contents import check_contents, contents_of
from jrl.run.metric_names import asked_of_evaluations
from jrl.run.out_of_memory import OutOfMemory, memory_of
from jrl.run.reward_metrics import rewards_by
from jrl.setup.adapters import (
    check_base,
    keep_base,
    policy_of,
    with_base,
    with_kept_base,
    without_base,
)
from jrl.setup.objective import check_total_steps
from jrl.setup.run import Run
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.integrity import first_nonfinite
from jrl.storage.lock import is_replaced, moved_to, run_lock
from jrl.storage.metrics import RunWriter, check_run_dir
from jrl.storage.step_files import what_is_saved
from jrl.system.compile_cache import CompileCounter
from jrl.system.processes import check_same, first_says
from jrl.system.signals import Stopping
from jrl.system.wait_reports import waiting
from jrl.train.reward_model import trains_reward
from jrl.train.state import free_memory, rolled_back
from jrl.train.step_metrics import with_slot_use
from jrl.train.utilisation import utilisation
from jrl.train.watch import COMPILED, MEMORY, NONFINITE, ROLLBACKS, Broken, Watch, resident_bytes
from jrl.types import TrainState


class Position(NamedTuple):
    """Position of a run besides its state; saved in every checkpoint.

    Attributes:
      cursor: prompts used so far.
      seconds: time spent in training steps.
      tokens: completion tokens trained on.
      before: the evaluation before the first step.
      base: the checksum of the frozen base, where adapters are trained.
      best: the step whose checkpoint is best by ``checkpoint.best``, its value (the more the
        better), and ``checkpoint.best``.
      rollbacks: how often the run returned to an earlier checkpoint.
      episodes: with environments on the host, played so far.
      failed: those of them that failed.
    """

    cursor: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    before: dict[str, float] | None = None
    base: int | None = None
    best: tuple[int, float, str] | None = None
    rollbacks: int = 0
    episodes: float = 0.0
    failed: float = 0.0


class RunMoved(StorageError):
    """The run directory is elsewhere now, or nowhere; tells what is saved there."""


class NonFinite(RunStopped):
    """A gradient or a weight was not finite; nothing was saved after it, and the run stopped."""


class RunRecords:
    """The files of one run, and when each is due; a context manager that closes them.

    Args:
      run: what is trained; use this under its mesh.
      pool: the reward functions, for evaluations of a run on text.
      stopping: asked whether an evaluation may continue.
      on_record: called with the record of each step, when it has been written.

    Attributes:
      position: where the run is.
      batch_notes: what a checkpoint must hold beside state and position for the next batch to be
        the same; the loop sets it.
    """

    def __init__(
        self,
        run: Run,
        pool: RewardPool | None,
        stopping: Stopping,
        on_record: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self.run, self.config = run, run.config
        self._on_record = on_record
        self.position = Position()
        self.batch_notes: Callable[[], dict[str, Any]] = dict
        self._stopping = stopping
        self._watch = Watch(run.config.watch)
        self._reasons: list[str] = []
        self._fault: Exception | None = None  # of an evaluation, or of what is called back
        self._full = ""  # why the logs cannot be written
        self._moved_text = ""  # that the run directory is not where it was
        self._failure = ""  # why episodes failed
        self._done: int | None = None  # steps; None before the run begins or resumes
        self._rollback: Broken | None = None
        self._suspects = False
        self._unsaved = False  # whether a save has failed in the background
        self._good: int | None = None  # the last step that was saved while no limit was broken
        self._compiled = 0  # programs at the last record
        self._record: dict[str, Any] = {}  # of the step done last
        with contextlib.ExitStack() as stack:
            self._open(stack, pool)
            self._stack = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, pool: RewardPool | None) -> None:
        run = self.run
        resuming = first_says(check_run_dir(run.config))  # refuses before anything is written
        contents = contents_of(run)
        check_same("files", contents)
        if resuming and (stored := stored_config(Path(run.config.run.dir or ""))) is not None:
            check_total_steps(stored[0], run.config)
            check_contents(run.config.run.dir or "", contents)
        stack.enter_context(run_lock(run.config.run.dir or ""))
        self._writer = RunWriter(run.config, mesh=dict(run.mesh.shape), contents=contents)
        stack.callback(self._writer.close)
        self.checkpoints = stack.enter_context(
            Checkpoints(
                Path(self.dir) / "checkpoints",
                run.config.checkpoint.keep,
                keep_every=run.config.checkpoint.keep_every,
            )
        )
        self.checkpoints.check_writable()
        self._compiles = stack.enter_context(CompileCounter())
        self._evaluator = Evaluator(run, pool)
        self._judged: JudgedEvaluator | None = None
        if "eval" in run.data.judged:
            self._judged = JudgedEvaluator(run, sizes_of(*run.data.judged.values()))
        self._clock = time.perf_counter()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Closes every file."""
        self._stack.__exit__(kind, error, tb)

    @property
    def dir(self) -> str:
        """The run directory."""
        return str(self._writer.dir)

    @property
    def unread(self) -> bool:
        """Whether the run has files of an earlier call, and has not resumed from them."""
        return self._writer.resuming and self._done is None

    # ------------------------------------------------------------ where a run begins

    def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest checkpoint and its ``batch_notes``; None where there is none yet.

        Args:
          state: a state of the run, whose layout the restored one takes.
        """
        if not self._writer.resuming:
            return None
        if self.checkpoints.latest_step() is None:  # stopped before its first checkpoint
            self._writer.truncate_after(-1)
            return None
        if self.run.network.extras.split is None:
            state, extra = self.checkpoints.restore(state)
        else:
            restored, extra = self.checkpoints.restore(without_base(state))
            state = with_base(restored, state.frozen["base"])
            state = with_kept_base(self.config, self.run.network, state)
            check_base(self.config, state.frozen["base"], extra["base"])
        self._compiled = self._compiles.count
        notes: dict[str, Any] = {}
        for name in ("carried", "packing", "collect", "source"):
            if name in extra:
                notes[name] = extra.pop(name)
        unwritten, self._good = extra.pop("unwritten", {}), extra.pop("good", None)
        self._watch.resume(extra.pop("watch", {}))
        if (extra.get("best") or [])[2:] != [self.config.checkpoint.best]:
            extra["best"] = None  # by another metric
        self.position = Position(**extra)
        self._note_best(self._writer.last_evaluation(int(state.step)))
        self._check_asked()
        self._done = int(state.step)
        self._writer.truncate_after(self._done, unwritten)
        self._make_up_evaluation(state)
        return state, notes

    def _make_up_evaluation(self, state: TrainState) -> None:
        """Makes the evaluation of the step that is resumed from, where it was not made.

        A signal cut it off, or the step was the last one of a run that is longer now.
        """
        step = int(state.step)
        if self._due(self.config.eval.every, step) and self._writer.lacks_evaluation(step):
            metrics = self._evaluated(state)
            self._note_best({"step": step, **metrics})
            self._writer.add_to_record(step, metrics)

    def begin(self, state: TrainState) -> None:
        """Notes the base of adapters and the evaluation before the first step.

        A warm start is saved, so that it is not made again.
        """
        self._done = 0
        if self.run.network.extras.split is not None:
            base = keep_base(self.config, state.frozen["base"])
            self.position = self.position._replace(base=base)
        self.position = self.position._replace(before=self.evaluate(state))
        self._check_asked()
        if self._watch.can_roll_back or (self.config.warmup.steps and self.config.checkpoint.every):
            self.save(state)

    def _check_asked(self) -> None:
        """Raises UserError for a metric of evaluations that the first one has not."""
        before = self.position.before or {}
        for key, name in asked_of_evaluations(self.config):
            if before and name not in before:
                raise unknown_choice(key, f"eval/{name}", (f"eval/{each}" for each in before))

    def check_space(self, state: TrainState) -> str:
        """A line on the space that checkpoints need and the disk has; "" on other processes.

        Raises:
          StorageError: there is no room for the first.
        """
        keep, steps = self.config.checkpoint, self.config.train.steps
        each = sum(leaf.nbytes for leaf in jax.tree.leaves(without_base(state)))
        count_saved = steps // keep.every + 1 if keep.every else 1
        count_saved += bool(self.config.warmup.steps and keep.every)
        count = min(keep.keep + 1, count_saved)  # the newest is written before the oldest goes
        count += (steps // keep.keep_every if keep.keep_every else 0) + bool(keep.best)
        free = None
        if jax.process_index() == 0:
            free = shutil.disk_usage(self.dir).free
        free, needed = first_says(free), each * count
        text = (
            f"checkpoints: {_size(each)} each, {_size(needed)} for {count} at a time;"
            f" {_size(free)} free"
        )
        if each > free and steps:
            raise StorageError(f"{text} in {self.dir}, too little for one; free disk space, or set"
                               " another run.dir")  # fmt: skip
        if needed > free:
            text += ", too little for all; lower checkpoint.keep or free disk space"
        return text if jax.process_index() == 0 else ""

    def start_clock(self) -> None:
        """Training time counts from here, and from the end of one step to that of the next."""
        self._clock = time.perf_counter()

    # ------------------------------------------------------------ after a step

    def after_step(
        self,
        done: int,
        state: TrainState,
        metrics: dict[str, Any],
        cursor: int,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Writes a step's record, with an evaluation when one is due, and returns it.

        Args:
          done: steps done.
          state: that of the step, or, in a compiled run, of the last step before the record is
            written; evaluations fall due at such a step only.
          metrics: of the step and its groups.
          cursor: prompts used so far.
          seconds: what the step took; None for the time since the last one.
        """
        metrics = with_slot_use(jax.device_get(metrics))
        self._done = done
        if seconds is None:
            seconds = self.lap()
        tokens = float(metrics["completion_tokens"])
        parts = metrics.pop("reward_parts")
        names = self.run.rewards.weights
        metrics |= {f"reward/{n}": p for n, p in zip(names, parts, strict=True)}
        each = metrics.pop("policy_rewards", ())  # where several policies are trained
        metrics |= {f"reward/policy_{i}": points for i, points in enumerate(each)}
        for name in self.run.kind.dropped_metrics:
            metrics.pop(name, None)
        if "approx_kl" in metrics:  # not in supervised training, which draws nothing
            metrics.setdefault("kl", metrics["approx_kl"])
        metrics |= {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "compiles": self._compiles.count,
            COMPILED: self._compiles.count - self._compiled,
            MEMORY: resident_bytes(),
            "prompts": cursor,
        }
        self._compiled = self._compiles.count
        if (used := utilisation(self.run, metrics, seconds)) is not None:
            metrics["mfu"] = used
        if self.position.rollbacks:
            metrics["rollbacks"] = self.position.rollbacks
        if calls := metrics.pop("reward_calls", 0):
            failed = metrics["reward_timeouts"] + metrics["reward_errors"]
            metrics["reward_failures"] = failed / calls
        if episodes := metrics.get("episodes", 0):  # with environments on the host
            failed = metrics["env_timeouts"] + metrics["env_errors"]
            metrics["env_failures"] = failed / episodes
            self.position = self.position._replace(
                episodes=self.position.episodes + float(episodes),
                failed=self.position.failed + float(failed),
            )
        if self._due(self.config.eval.every, done):
            metrics |= self._evaluated(state)
            self._compiled = self._compiles.count
        record = self._writer.write(done, metrics)
        self.position = self.position._replace(
            cursor=cursor,
            seconds=self.position.seconds + seconds,
            tokens=self.position.tokens + tokens,
        )
        if self._on_record is not None and self._fault is None:
            try:
                self._on_record(record)
            except Exception as error:  # of somebody else's code; ends the run once that is saved
                self._fault = error
        return record

    def _evaluated(self, state: TrainState) -> dict[str, float]:
        """Metrics of an evaluation; none if it fails or is given up.

        The step itself is whole, and saved before what was raised ends the run.

        Raises:
          Exception: what one of several processes raised; the others wait for it in vain.
        """
        try:
            with contextlib.suppress(KeyboardInterrupt, Overdue), self._stopping.interruptible():
                return {f"eval/{name}": x for name, x in self.evaluate(state).items()}
        except Exception as error:
            if not seen_by_all_processes(error):
                raise
            self._fault = self._fault or error
        return {}

    def at_rest(self) -> bool:
        """Whether no step that is done is missing on disk; called by other threads too."""
        if self._done is None:
            return True
        newest = self.checkpoints.latest_step()
        return self._done == newest or (self._done == 0 and not self.config.warmup.steps)

    def lap(self) -> float:
        """Seconds since the clock was last read."""
        before, self._clock = self._clock, time.perf_counter()
        return self._clock - before

    def check(self, done: int, record: dict[str, Any]) -> list[str]:
        """Compares a step's record with the limits of [watch]; the warnings to be shown.

        Args:
          done: steps done.
          record: of the step.

        Raises:
          NonFinite: the step's gradient was not finite and the limit on that says stop.
          StorageError: the run directory is gone.
        """
        if jax.process_index() == 0 and (not Path(self.dir).is_dir() or is_replaced(self.dir)):
            self._moved_text = (
                f"step {done}: run.dir = {self.dir!r} is not there any more: it was renamed,"
                f" removed or replaced"
            )
            if jax.process_count() > 1:  # the others do not know, and save together only
                raise RunMoved(
                    f"{self._moved_text}; what was saved before is in the directory that it was"
                )
            return []
        messages = self._check_saving()
        # The first process speaks for all, as what it measures by itself differs from the others'.
        verdicts, self._full = first_says([self._watch(done, record), self._writer.fault()])
        broken = Broken(*verdicts)
        self._suspects = broken.suspects
        if NONFINITE in broken.stop:
            raise NonFinite(
                f"step {done}: the gradient is not finite ({self._why_not_finite(record)}); its "
                f"update was left out, and nothing was saved after it; {self._saved_text()}. The "
                "same command meets the same step: look for NaN rewards in samples.jsonl, lower "
                "optimizer.learning_rate or optimizer.clip_norm in another run.dir, or let a few "
                'pass with watch.skipped_updates={above=0, steps=5, action="stop"}'
            )
        self._reasons += broken.stop.values()
        if broken.rollback:
            self._rollback = self._rollback or broken
        best = (self.config.checkpoint.best or "").removeprefix("-")
        if best and best not in record and not best.startswith("eval/"):
            raise unknown_choice("checkpoint.best", best, record)
        self._record = record
        return [*messages, *broken.warn.values()]

    def _why_not_finite(self, record: Mapping[str, Any]) -> str:
        """What a step whose gradient is not finite shows of the cause."""
        if record.get("nonfinite_rewards"):
            data = self.config.data
            payer = "a reward"
            if isinstance(data, EnvData | EpisodeData):
                payer = f"data.env = {data.env!r}"
            return f"{payer} paid NaN, infinity or more than float32 holds"
        return f"reward {record.get('reward')}, loss {record['loss']}"

    def _check_saving(self) -> list[str]:
        """A warning where the save in the background has failed; this step is saved in its place.

        Of several processes one alone may know it by now, and the next save tells all.
        """
        if jax.process_count() > 1:
            return []
        try:
            self.checkpoints.check()
        except StorageError as error:
            self._unsaved = True
            return [f"{error}; this step is saved in its place"]
        return []

    @property
    def acts(self) -> bool:
        """Whether a limit that was asked for ends the run or returns it to a checkpoint."""
        return self._watch.acts

    @property
    def rolls_back(self) -> bool:
        """Whether a step since the last call of ``roll_back`` broke a limit that says so."""
        return self._rollback is not None

    def roll_back(self, state: TrainState, say: Callable[[str], object]) -> TrainState:
        """The weights of the newest checkpoint from before a limit was broken.

        Step, prompts and the learning rate's schedule stand where they are, so that what follows
        are the next prompts; that is saved at once.

        Args:
          state: after the last step; its memory is given back.
          say: where a line about it goes.

        Raises:
          RunStopped: there is no such checkpoint, or the run has gone back often enough.
        """
        assert self._rollback is not None
        broken, self._rollback = self._rollback, None
        reason = next(iter(broken.rollback.values()))
        self.checkpoints.wait()
        steps = [step for step in self.checkpoints.steps() if step < broken.since]
        if self.position.rollbacks == ROLLBACKS or not steps:
            why = f"after {ROLLBACKS} rollbacks" if steps else "and no checkpoint is from before"
            raise RunStopped(f"{reason}, {why}; nothing was saved since; {self._saved_text()}")
        trained = without_base(state)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trained
        )
        free_memory(trained)
        good = self._restore_one_of(steps, shapes)
        self.position = self.position._replace(rollbacks=self.position.rollbacks + 1)
        say(
            f"warning: {reason}; back to the weights of step {int(good.step)}, "
            f"{self.position.rollbacks} of {ROLLBACKS} times"
        )
        state = rolled_back(good, state).replace(frozen=state.frozen | good.frozen)
        self._watch.forget()
        self._suspects = False
        self._record = {}  # of weights that are gone, and that must not be the best
        self.save(state)
        self.start_clock()
        return state

    def _restore_one_of(self, steps: list[int], shapes: TrainState) -> TrainState:
        """The newest of these steps that is whole."""
        for step in reversed(steps):
            with contextlib.suppress(UserError):
                return self.checkpoints.restore(shapes, step)[0]
        raise RunStopped(
            f"every checkpoint up to step {steps[-1]} is damaged; {self._saved_text()}"
        )

    def end_if_broken(self, state: TrainState) -> None:
        """Saves, and raises the error that ends the run, if a step has met one.

        Args:
          state: after the last step of which the record is written.

        Raises:
          RunStopped: a limit that says stop was broken.
          StorageError: the logs cannot be written, or the run directory is not there any more.
          Exception: whatever an evaluation or ``on_record`` raised.
        """
        if self._moved_text:
            raise RunMoved(f"{self._moved_text}; {self._saved_elsewhere(state)}")
        if self._fault is not None:
            fault, self._fault = self._fault, None
            if seen_by_all_processes(fault) and not self._suspects:
                self.save_if_whole(state)
            raise fault
        if not self._reasons and not self._full:
            return
        self.save(state)
        self.checkpoints.wait()
        if self._full:
            raise StorageError(f"step {int(state.step)}: {self._full}; free disk space")
        raise RunStopped(
            f"{self._reasons[0]}; stopped by the limit of [watch], and {self._saved_text()}"
        )

    def rewards_by(self, groups: Groups) -> dict[str, float]:
        """Means of rewards by the column ``log.by``; {} where none is named."""
        column = self.config.log.by
        if not column or not isinstance(groups.subject, list):  # arrays have no columns
            return {}
        return rewards_by(groups, self.run.rewards.weights, column)

    def _saved_elsewhere(self, state: TrainState) -> str:
        """Saves the state where the run directory was moved to; says what is saved and where."""
        place, step = moved_to(self.dir), int(state.step)
        if place is None:
            return what_is_saved(self.dir)
        keep = self.config.checkpoint
        try:
            with Checkpoints(
                place / "checkpoints", keep.keep, keep_every=keep.keep_every
            ) as checkpoints:
                self._save_in(checkpoints, state)
                checkpoints.wait()
        except Exception as error:
            return f"it is {str(place)!r} now, where step {step} cannot be saved: {error}"
        return (
            f"it is {str(place)!r} now, and step {step} is saved there;"
            f" run.dir={place} resumes from it"
        )

    def write_samples_if_due(self, done: int, groups: Groups, advantages: Any = None) -> None:
        """Some of a step's completions, for people to read.

        Args:
          done: steps done.
          groups: of the step.
          advantages: [groups, G, T] float32 of the first groups, if they are known.
        """
        run, log = self.run, self.config.log
        if log.samples_every and (done == 1 or done % log.samples_every == 0):
            names = run.rewards.weights
            host_advantages = None if advantages is None else jax.device_get(advantages)
            records = samples_of(
                groups, run.tokenizer, run.kind.task, names, log.MIN_MEMBERS, host_advantages
            )
            self._writer.write_samples(done, records)

    def save_if_due(self, done: int, state: TrainState) -> None:
        """A checkpoint every ``checkpoint.every`` steps, and where an evaluation is the best yet.

        The last step's is written by the end.

        No checkpoint while a rollback limit is violated, so the newest one is good.
        """
        if self._moved_text:
            return
        best = (self.config.checkpoint.best or "").removeprefix("-")
        improved = best.startswith("eval/") and self._better(self._record) is not None
        due = improved or self._unsaved or self._due(self.config.checkpoint.every, done)
        if due and not self._suspects:
            self.save(state)
            if self._unsaved:  # a second failure in a row ends the run here
                self.checkpoints.wait()
                self._unsaved = False
        self.start_clock()  # evaluating and saving is not training time

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint, unless the state is broken.

        Raises:
          NonFinite: a weight is NaN or infinite, or a moment of the optimizer NaN.
          StorageError: this save or the one before it failed.
        """
        self._save_in(self.checkpoints, state)

    def _save_in(self, checkpoints: Checkpoints, state: TrainState) -> None:
        fault = first_nonfinite(state.params) or first_nonfinite(state.opt_state, nan_only=True)
        if fault is not None:
            raise NonFinite(
                f"step {int(state.step)}: {fault} is not finite, so the state was not saved; "
                f"{self._saved_text()}. Lower optimizer.learning_rate or optimizer.clip_norm "
                "in another run.dir"
            )
        if self._record.get("step") == int(state.step):
            self._note_best(self._record)
        saved = state if self.run.network.extras.split is None else without_base(state)
        extra = self.position._asdict() | self.batch_notes() | {"watch": self._watch.notes()}
        self._writer.sync()  # or a power cut could keep the step and lose its records
        if unwritten := self._writer.unwritten:
            extra["unwritten"] = unwritten
        best, step = self.position.best, int(state.step)
        # Where a rollback limit is broken already, it may have to go back to before.
        self._good = self._good if self._suspects else step
        extra["good"] = self._good
        checkpoints.save(step, saved, extra=extra, best=best and best[0], good=self._good)

    def _note_best(self, record: Mapping[str, Any]) -> None:
        """Notes the step of a record, which is or will be saved, where it is the best yet."""
        self.position = self.position._replace(best=self._better(record) or self.position.best)

    def _better(self, record: Mapping[str, Any]) -> tuple[int, float, str] | None:
        """``Position.best`` by a record; None where that is not better by ``checkpoint.best``."""
        metric = self.config.checkpoint.best or ""
        value = record.get(metric.removeprefix("-"))
        if value is None:
            return None
        value = -value if metric.startswith("-") else value
        if self.position.best is not None and value <= self.position.best[1]:
            return None
        return int(record["step"]), float(value), metric

    def _saved_text(self) -> str:
        """A phrase naming the last saved step, after the background save."""
        with contextlib.suppress(StorageError):
            self.checkpoints.wait()
        return what_is_saved(self.dir)

    def save_if_whole(self, state: TrainState) -> None:
        """Saves the state of the last whole step, when the one after it could not be made.

        Does nothing where the step has taken the state's memory already, or where saving fails:
        the error that ends the run is another one.
        """
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return
        with contextlib.suppress(Exception):
            self.save(state)
            self.checkpoints.wait()

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Metrics of the policy on held-out prompts or pairs; {} without any."""
        with (
            waiting("evaluation", lambda: self._evaluator.progress, of=f"step {int(state.step)}"),
            memory_of("evaluation", self.run),
        ):
            return self._evaluate(state)

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._evaluator.available and not trains_reward(self.config):
            evaluation = self._evaluator(state.key, policy_of(state, self.run.network))
            groups = -(-self.config.log.MIN_MEMBERS // self.config.eval.samples)  # whole ones
            samples = evaluation.samples[: groups * self.config.eval.samples]
            self._writer.write_samples(int(state.step), samples)
            metrics |= evaluation.metrics
        return metrics if self._judged is None else metrics | self._judged(state)

    def _due(self, every: int, done: int) -> bool:
        """Whether something is due every ``every`` steps; the end of the run does the last."""
        return bool(every) and done % every == 0 and done != self.config.train.steps

    # ------------------------------------------------------------ the end

    def finish(self, state: TrainState) -> dict[str, Any]:
        """The last evaluation and the summary."""
        after = self.evaluate(state)
        self._note_best({"step": int(state.step)} | {f"eval/{n}": x for n, x in after.items()})
        position, before = self.position, self.position.before or {}
        # of held-out problems; of held-out pairs in a run on pairs
        name = "accuracy" if self._judged is None else "pair_accuracy"
        summary = {
            "accuracy_before": before.get(name),
            "accuracy_after": after.get(name),
            "steps": int(state.step),
            "train_seconds": position.seconds,
            "tokens_per_second": position.tokens / max(position.seconds, 1e-9),
            "eval_before": before,
            "eval_after": after,
            "method": self.config.method,
            **({} if position.best is None else {"best_step": position.best[0]}),
            "compiles": self._compiles.count,
            "compile_seconds": self._compiles.seconds,
        }
        self._writer.retry()
        summary = self._writer.write_summary(summary)
        self._writer.close()
        return summary

    def note_failure(self, reason: str | None) -> None:
        """Notes why episodes of a step failed, if any did."""
        self._failure = reason or self._failure

    def check_any_succeeded(self) -> None:
        """Raises RunStopped where every episode of the run failed: nothing was trained on."""
        position = self.position
        if position.episodes and position.failed >= position.episodes:
            why = self._failure or "the warnings of its steps say why"
            raise RunStopped(
                f"all {position.episodes:,.0f} episodes of the run failed, so that nothing was"
                f" trained on: {why}; mend the environment, and train in another run.dir"
            )


def seen_by_all_processes(error: BaseException) -> bool:
    """Whether all processes saw the error; a collective save by one would deadlock."""
    # The memory of one device may be full, and of no other.
    of_all = isinstance(error, UserError) and not isinstance(error, OutOfMemory)
    return jax.process_count() == 1 or of_all


def _size(count: float) -> str:
    """Bytes in text."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
