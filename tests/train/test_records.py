"""Broken runs, disks and directories: nothing bad is saved as good, and what was good is kept."""

import collections
import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jrl.config import load_config
from jrl.errors import RunStopped, StorageError, UserError
from jrl.run import loops
from jrl.run import run as running
from jrl.run.records import NonFinite, RunRecords
from jrl.run.run import run_config, train
from jrl.storage import metrics
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.lock import run_lock
from jrl.storage.metrics import read_jsonl
from jrl.system import processes
from jrl.system.signals import Stopping
from jrl.train import programs

TASK = (
    *("data.task=sequence", "data.difficulty=1", "sampling.group=2", "train.prompts=2"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("rewards={partial={}}", "eval.problems=2", "log.samples_every=0"),
)
EXPLODES = (
    *("method=sft", "sampling.group=1"),  # a gradient at every step
    "optimizer={name='adam', learning_rate=1e38}",
)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)


def go(directory, *changes, echo=lambda line: None):
    place = f"run.dir={json.dumps(str(directory))}"
    return train(load_config(None, [*TASK, *changes, place]), echo=echo)


def steps_logged(directory):
    return [r["step"] for r in read_jsonl(directory / "metrics.jsonl") if "step" in r]


def saved(directory):
    return Checkpoints(directory / "checkpoints", 1).steps()


def at_step(monkeypatch, step, call):
    """Calls something when a step has been logged."""
    show = loops.Progress.step

    def watched(self, done, record):
        show(self, done, record)
        if done == step:
            call()

    monkeypatch.setattr(loops.Progress, "step", watched)


# ---------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize("mode", ["host", "compiled"])
def test_a_run_that_is_not_finite_stops_each_time_and_keeps_its_last_good_step(tmp_path, mode):
    run, more = tmp_path / "run", ("train.steps=6", "checkpoint.keep=1", *EXPLODES)
    for _ in range(2):
        with pytest.raises(NonFinite, match="step 2: the gradient is not finite") as stopped:
            go(run, f"train.mode={mode}", "checkpoint.every=1", *more)
        assert f"step 1 is saved; `jrl train {run}` resumes from it" in str(stopped.value)
        assert stopped.value.exit_code == 3
        assert saved(run) == [1]
        assert not (run / "summary.json").exists()


GENEROUS = """
import jax.numpy as jnp

from jrl.zoo.envs.games.bandit import bandit


def generous():
    env = bandit(arms=2, turns=1)

    def step(state, reply, count, key):
        state, turn = env.step(state, reply, count, key)
        return state, turn.replace(reward=jnp.full_like(turn.reward, jnp.inf))

    return env._replace(step=step)
"""


def test_an_environment_in_the_program_that_pays_what_is_not_finite_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(GENEROUS)
    env = f"{tmp_path}/mine.py:generous"
    changes = (f"data={{env={json.dumps(env)}}}", "rewards={reward={}}", "train.steps=1")
    with pytest.raises(NonFinite, match="float32 holds") as stopped:
        go(tmp_path / "run", *changes)
    assert f"(data.env = '{env}' paid NaN, infinity or more than" in str(stopped.value)


def test_a_compiled_segment_with_a_bad_step_is_not_saved(tmp_path):
    """The steps after the bad one are in the same program; the second run says where it begins."""
    run = tmp_path / "run"
    changes = ("train.mode=compiled", "checkpoint.every=0", "train.steps=5", *EXPLODES)
    for attempt in range(2):
        lines = []
        with pytest.raises(NonFinite, match=f"no checkpoint is in {run}"):
            go(run, *changes, echo=lines.append)
        assert saved(run) == []
        assert any("begins again at step 1" in line for line in lines) == (attempt == 1)


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    """The last update breaks them, and no gradient comes after it."""
    make = programs.train_program

    def poisoned(run, shardings):
        step = make(run, shardings)

        def poisoned_step(state, batch, sampling_params):
            state, metrics = step(state, batch, sampling_params)
            if int(state.step) == 3:
                bad = jax.tree.map(lambda x: x + jnp.nan, state.params)
                state = state.replace(params=bad)
            return state, metrics

        return poisoned_step

    run, more = tmp_path / "run", ("train.steps=3", "checkpoint.every=2")
    with monkeypatch.context() as patch:
        patch.setattr(programs, "train_program", poisoned)
        with pytest.raises(NonFinite, match=r"step 3: policy\.\S+ is not finite, so the state was"):
            go(run, *more)
    assert saved(run) == [2]
    assert not (run / "summary.json").exists()
    assert go(run, *more)["steps"] == 3
    assert steps_logged(run) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["host", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_limit_of_ones_own_saves_and_stops(tmp_path, mode, monkeypatch):
    """In a compiled run where its segment ends, which is a short one."""
    monkeypatch.setattr(loops, "WATCHED_SEGMENT", 3)
    limit = 'watch.entropy={below=1e9, steps=2, action="stop"}'
    run, more = tmp_path / "run", ("train.steps=9", "checkpoint.every=0", f"train.mode={mode}")
    with pytest.raises(
        RunStopped, match="step 2: entropy = .*, below 1e.09 for 2 steps"
    ) as stopped:
        go(run, limit, *more)
    at = {"host": 2, "compiled": 3}[mode]  # of one program all steps are done
    assert f"step {at} is saved" in str(stopped.value)
    assert saved(run) == [at]
    assert steps_logged(run) == list(range(1, at + 1))
    assert go(run, 'watch.entropy={below=1e9, action="warn"}', *more)["steps"] == 9


def test_a_limit_counts_the_steps_before_a_resumption(tmp_path):
    run, limit = tmp_path / "run", "watch.loss={above=-1e9, steps=3, action='stop'}"
    go(run, limit, "train.steps=2")
    with pytest.raises(RunStopped, match="step 3: loss = .* for 3 steps in a row"):
        go(run, limit, "train.steps=4")


def test_an_error_that_one_process_alone_has_seen_is_not_kept_for_later(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def evaluated(error):
        def evaluate(state):
            raise error

        stopping = SimpleNamespace(interruptible=contextlib.nullcontext)
        records = SimpleNamespace(_stopping=stopping, evaluate=evaluate, _fault=None)
        assert RunRecords._evaluated(records, None) == {}
        return records._fault

    with pytest.raises(OSError, match="no space"):  # the others wait in what they do together
        evaluated(OSError("no space"))
    assert str(evaluated(UserError("a reward failed"))) == "a reward failed"


def test_processes_compare_limits_when_no_device_samples(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(loops, "stop_requested", lambda stopping: False)
    calls = []

    def check(done, record):
        calls.append("check")
        return []

    nothing = dict.fromkeys(
        ("note_failure", "write_samples_if_due", "save_if_due", "end_if_broken"), lambda *args: None
    )
    records = SimpleNamespace(
        check=check,
        rewards_by=lambda groups: {},
        after_step=lambda *args: {},
        rolls_back=False,
        **nothing,
    )
    batches = SimpleNamespace(learn=lambda *args: None, wait=lambda: calls.append("wait"))
    progress = SimpleNamespace(step=lambda *args: None)
    groups = SimpleNamespace(failure=None, counts={})
    loop = loops.HostLoop(records, None, batches, progress, None)
    assert loop.after_step(1, None, {}, groups, 4) is False
    assert calls == ["wait", "check"]


@pytest.mark.slow
def test_the_best_step_outlives_the_newest(tmp_path):
    more = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.best=-prompts", "train.steps=5")
    summary = go(tmp_path / "run", *more, "checkpoint.keep_every=2")
    assert summary["best_step"] == 1  # the fewest prompts used
    assert saved(tmp_path / "run") == [1, 2, 4, 5]
    with pytest.raises(UserError, match=r"checkpoint.best = 'rewart'; did you mean 'reward'"):
        go(tmp_path / "other", *more[:2], "checkpoint.best=rewart", "train.steps=3")


@pytest.mark.parametrize("mode", ["host", pytest.param("compiled", marks=pytest.mark.slow)])
def test_the_best_evaluation_is_saved_and_the_last_one_counts(tmp_path, monkeypatch, mode):
    """Evaluations and checkpoints are due at different steps; the scores are given."""
    scores = {2: 0.1, 3: 0.5, 4: 0.2, 6: 0.3, 7: 0.9}

    def evaluate(self, state):
        return {"accuracy": scores.get(int(state.step), 0.0)}

    monkeypatch.setattr(RunRecords, "_evaluate", evaluate)
    more = ("checkpoint.every=4", "checkpoint.keep=1", "checkpoint.best=eval/accuracy")
    run, changes = tmp_path / "run", (*more, "eval.every=3", "train.steps=7", f"train.mode={mode}")
    assert go(run, *changes)["best_step"] == 7
    assert saved(run) == [3, 7]
    scores[9] = 0.8  # less than that of step 7, with which the run ended before
    assert go(run, *changes, "train.steps=10")["best_step"] == 7
    assert saved(run) == [7, 10]


def test_metrics_of_evaluations_are_checked_before_anything_is_compiled(tmp_path):
    for override, message in {
        "checkpoint.best=eval/acuracy": r"checkpoint.best = 'eval/acuracy'; did you mean 'eval/acc",
        "checkpoint.best=-eval/lenght": r"checkpoint.best = 'eval/lenght'; did you mean 'eval/len",
        'watch={"eval/acuracy"={below=0.1}}': r"watch = 'eval/acuracy'; did you mean 'eval/acc",
    }.items():
        with pytest.raises(UserError, match=message):
            go(tmp_path / "run", override, "eval.every=1", "train.steps=3")
        with pytest.raises(
            UserError, match="needs evaluations between the steps: .*; set eval.every"
        ):
            go(tmp_path / "run", override, "train.steps=3")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- what others' code raises


@pytest.mark.slow  # the next one does the same in an evaluation
@pytest.mark.parametrize("mode", ["host", "compiled"])
def test_what_is_called_back_may_raise_and_costs_no_step(tmp_path, mode):
    def on_record(record):
        if record["step"] == 3:
            raise ZeroDivisionError("mine")

    place = f"run.dir={json.dumps(str(tmp_path / 'run'))}"
    more = ("train.steps=4", "checkpoint.every=0", f"train.mode={mode}")
    config = load_config(None, [*TASK, *more, place])
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        run_config(config, echo=lambda line: None, on_record=on_record)
    at = {"host": 3, "compiled": 4}[mode]  # of one program all steps are done
    assert raised.value.__notes__ == [
        f"step {at} is saved; `jrl train {tmp_path / 'run'}` resumes from it"
    ]
    assert saved(tmp_path / "run") == [at]
    assert go(tmp_path / "run", *more)["steps"] == 4
    assert steps_logged(tmp_path / "run") == [1, 2, 3, 4]


def test_an_evaluation_that_raises_costs_no_step(tmp_path, monkeypatch):
    def evaluate(self, state):
        if int(state.step) == 2:
            raise UserError("the reward raised ValueError: no")
        return {"accuracy": 0.0}

    monkeypatch.setattr(RunRecords, "_evaluate", evaluate)
    run, more = tmp_path / "run", ("train.steps=3", "checkpoint.every=0", "eval.every=2")
    with pytest.raises(UserError, match="no; step 2 is saved; `jrl train .*` resumes") as raised:
        go(run, *more)
    assert raised.value.exit_code == 2
    assert (saved(run), steps_logged(run)) == ([2], [1, 2])
    monkeypatch.undo()
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    assert go(run, *more)["steps"] == 3
    assert steps_logged(run) == [1, 2, 3]
    assert "eval/accuracy" in read_jsonl(run / "metrics.jsonl")[2]  # made up for


def test_the_evaluation_of_what_was_the_last_step_is_made_where_a_run_goes_on(tmp_path):
    run, more = tmp_path / "run", ("checkpoint.every=0", "eval.every=2")
    go(run, *more, "train.steps=2")
    go(run, *more, "train.steps=3")
    go(tmp_path / "whole", *more, "train.steps=3")
    evaluated = [
        [{n: x for n, x in r.items() if n.startswith("eval/")} for r in read_jsonl(file)[1:]]
        for file in (run / "metrics.jsonl", tmp_path / "whole" / "metrics.jsonl")
    ]
    assert evaluated[0] == evaluated[1]
    assert evaluated[0][1]


# ---------------------------------------------------------------- signals at the end


def test_a_signal_during_the_last_save_loses_nothing(tmp_path, monkeypatch):
    save = RunRecords.save

    def signalled(self, state):
        if int(state.step) == 2:
            signal.raise_signal(signal.SIGTERM)
        save(self, state)

    monkeypatch.setattr(RunRecords, "save", signalled)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 2; saved in"):
        go(tmp_path / "run", "train.steps=2")
    assert saved(tmp_path / "run") == [2]
    monkeypatch.undo()
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    assert go(tmp_path / "run", "train.steps=2")["steps"] == 2


def test_a_signal_after_the_last_look_makes_no_save_that_other_processes_do_not_make(monkeypatch):
    def trained(state, *rest, **more):
        stopping.set()  # nobody asks before the loop has ended
        return state

    saves, run = [], SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(steps=1)))
    run.mesh = run.sampling_params = None
    position = SimpleNamespace(cursor=0)
    records = SimpleNamespace(position=position, start_clock=int, rolls_back=False, run=run)
    records.save = saves.append
    batches = contextlib.nullcontext(SimpleNamespace(notes=dict))
    monkeypatch.setattr(loops, "training_batches", lambda *given: batches)
    monkeypatch.setattr(loops, "train_steps", trained)
    for name in ("drawn_weights", "replicated"):
        monkeypatch.setattr(loops, name, lambda run: None)
    stopping, state = Stopping(), SimpleNamespace(step=0)
    training = loops.Training(run, None, records, stopping, None, print, None)
    assert loops.train_on_host(training, state, {}) is state
    assert saves == []  # ``run._run`` saves, in all of them


def test_a_signal_that_another_process_heard_during_the_last_save_ends_this_one(
    tmp_path, monkeypatch
):
    """It would evaluate, and wait there for the other."""
    save, heard = RunRecords.save, []

    def signalled(self, state):
        save(self, state)
        heard.append(int(state.step) == 2)

    monkeypatch.setattr(RunRecords, "save", signalled)
    monkeypatch.setattr(processes, "any_says", lambda value: value or any(heard))
    with pytest.raises(KeyboardInterrupt, match="stopped after step 2; saved in"):
        go(tmp_path / "run", "train.steps=2")
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_during_the_report_ends_at_once_with_all_saved(tmp_path, monkeypatch, number):
    def slow(directory):
        signal.raise_signal(number)
        time.sleep(60)

    monkeypatch.setattr(running, "write_report", slow)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", "train.steps=1")
    assert time.monotonic() - start < 60
    assert saved(tmp_path / "run") == [1]
    assert (tmp_path / "run" / "summary.json").exists()


# ---------------------------------------------------------------- directories


def test_a_run_has_one_writer(tmp_path):
    with run_lock(tmp_path / "run"), pytest.raises(UserError, match="is being written by process"):
        go(tmp_path / "run", "train.steps=1")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_lost_config_toml_does_not_log_steps_twice(tmp_path):
    run = tmp_path / "run"
    go(run, "train.steps=2")
    before = (run / "config.toml").read_text()
    (run / "config.toml").unlink()
    with pytest.raises(UserError, match=r"holds a run with another configuration.*\n  seed = 0"):
        go(run, "train.steps=2", "seed=1")
    go(run, "train.steps=3")
    assert steps_logged(run) == [1, 2, 3]
    assert (run / "config.toml").read_text() == before.replace("steps = 2\n", "steps = 3\n", 1)
    (run / "config.toml").unlink()
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="has steps of a run and no config.toml; put that back"):
        go(run, "train.steps=3")


@pytest.mark.slow  # that it is seen is tested with the run directory's other files
def test_a_config_toml_that_was_edited_is_not_resumed(tmp_path):
    run = tmp_path / "run"
    go(run, "train.steps=1")
    before = (run / "config.toml").read_text()
    changed = before.replace("steps = 1\n", "steps = 2\n").replace("seed = 0\n", "seed = 7\n")
    assert changed.count("seed = 7") == 1
    (run / "config.toml").write_text(changed)
    with pytest.raises(
        UserError,
        match=r"config.toml is not what the run began with: seed = 0 in the header of "
        "metrics.jsonl, 7 there; restore it, or delete",
    ) as caught:
        train(load_config(run / "config.toml", [f"run.dir={json.dumps(str(run))}"]))
    assert "\n" not in str(caught.value)
    (run / "config.toml").write_text(before.replace("steps = 1\n", "steps = 2\n"))
    train(load_config(run / "config.toml"), echo=lambda line: None)  # what may differ
    assert steps_logged(run) == [1, 2]


def test_a_checkpoint_that_cannot_be_resumed_from_is_not_said_to_be(tmp_path):
    run = tmp_path / "run"
    go(run, "train.steps=1")
    folder = run / "checkpoints"
    shutil.copytree(folder / "00000001", folder / "00000002")
    with pytest.raises(UserError, match=r"step 2 in .* holds step 1: .*; .* delete copies$"):
        go(run, "train.steps=3")


def test_logs_that_cannot_be_written_end_the_run_and_lose_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "LOG_SECONDS", 0.0)
    run, files = tmp_path / "run", ("metrics.jsonl", "samples.jsonl")
    more = ("train.steps=3", "checkpoint.every=0", "log.samples_every=1")

    def fill():
        for name in files:
            (run / name).rename(run / f"{name}.kept")
            (run / name).symlink_to("/dev/full")

    at_step(monkeypatch, 1, fill)
    with pytest.raises(StorageError, match="cannot be written .No space left on device") as caught:
        go(run, *more)
    assert f"step 2 is saved; `jrl train {run}` resumes from it" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (saved(run), caught.value.exit_code) == ([2], 4)
    for name in files:
        (run / f"{name}.kept").replace(run / name)
    assert steps_logged(run) == [1]
    monkeypatch.undo()
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    go(run, *more)
    assert steps_logged(run) == [1, 2, 3]
    sampled = [r["step"] for r in read_jsonl(run / "samples.jsonl")]
    assert list(dict.fromkeys(sampled)) == [0, 1, 2, 3]


def test_a_run_directory_that_is_deleted_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    at_step(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(
        StorageError, match="is not there any more: it was re.*run does not exist"
    ) as stopped:
        go(tmp_path / "run", "train.steps=1000", "checkpoint.every=0")
    assert stopped.value.exit_code == 4
    assert "\n" not in str(stopped.value)


def test_a_run_directory_that_is_replaced_is_not_written(tmp_path, monkeypatch):
    def replace():
        (tmp_path / "run").rename(tmp_path / "renamed")
        (tmp_path / "run").mkdir()

    at_step(monkeypatch, 2, replace)
    with pytest.raises(StorageError, match="is not there any more: it was renamed") as stopped:
        go(tmp_path / "run", "train.steps=1000", "checkpoint.every=0")
    assert stopped.value.exit_code == 4
    assert "\n" not in str(stopped.value)
    assert os.listdir(tmp_path / "run") == []
    # No step is lost: the directory that was locked has it, and the run resumes from there.
    renamed = tmp_path / "renamed"
    assert f"{str(renamed)!r} now, and step 2 is saved there" in str(stopped.value)
    assert saved(renamed) == [2]
    monkeypatch.undo()
    go(renamed, "train.steps=3", "checkpoint.every=0")
    assert steps_logged(renamed) == [1, 2, 3]


def read_only(monkeypatch):
    """From now on no file of checkpoints can be made."""
    write = pathlib.Path.write_bytes

    def refuse(self, data):
        if self.parent.name == "checkpoints":
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        return write(self, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", refuse)


def test_checkpoints_that_cannot_be_written_are_said_before_training(tmp_path, monkeypatch):
    read_only(monkeypatch)
    with pytest.raises(StorageError, match="was not written to .*Read-only file system"):
        go(tmp_path / "run", "train.steps=1000")
    assert steps_logged(tmp_path / "run") == []


def test_checkpoints_that_become_read_only_end_the_run_in_one_line(tmp_path, monkeypatch):
    run = tmp_path / "run"
    at_step(monkeypatch, 3, lambda: read_only(monkeypatch))
    with pytest.raises(StorageError, match="checkpoint step 4 was not written") as stopped:
        go(run, "train.steps=1000", "checkpoint.every=2")
    assert f"step 2 is saved; `jrl train {run}` resumes from it" in str(stopped.value)
    assert "\n" not in str(stopped.value)


def test_a_file_in_the_place_of_the_checkpoints_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    with pytest.raises(StorageError, match="checkpoints is a file; move it away"):
        go(tmp_path / "run", "train.steps=1")


def test_what_checkpoints_take_is_said_before_training(tmp_path, monkeypatch):
    """And a run of which not even the first fits does not begin."""
    more, lines = ("train.steps=1", "checkpoint.keep=3", "checkpoint.every=1"), []
    config = load_config(None, [*TASK, *more, f"run.dir={json.dumps(str(tmp_path / 'run'))}"])
    train(config, echo=lines.append)
    (line,) = [line for line in lines if line.startswith("checkpoints: ")]
    (stored,) = [p for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    bytes_written = sum(
        f.stat().st_size for f in (stored / "state").rglob("*") if f.parent.name == "d"
    )
    sizes = re.findall(r"([\d.]+) MB", line.replace(",", ""))  # and what is free, often in GB
    each, needed = (float(x) * 1e6 for x in sizes[:2])
    assert each / 2 - 1e5 < bytes_written < 2 * each + 1e5
    assert needed == pytest.approx(2 * each, abs=1e5)  # the first and the last step's
    assert "MB for 2 at a time" in line

    Room = collections.namedtuple("Room", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Room(10**9, 10**9, 1000))
    with pytest.raises(StorageError, match="too little for one; free disk space") as error:
        go(tmp_path / "full", *more)
    assert error.value.exit_code == 4
    assert steps_logged(tmp_path / "full") == []
