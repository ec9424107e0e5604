"""Runs that are stopped, killed or short of room: what is kept, and that going on is exact."""

import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from jrl.config import load_config
from jrl.errors import Overdue, RunStopped, StorageError, UserError
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run import loops
from jrl.run import run as running
from jrl.run.run import train
from jrl.storage import metrics
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import read_jsonl
from jrl.system import signals
from jrl.system import wait_reports as waits

JRL = "from jrl.cli.app import main; main()"
ENDLESS = "train.steps=1000000"
TASK = (
    *("data.task=sequence", "data.difficulty=1", "sampling.group=4", "train.prompts=4"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("rewards={partial={}}", "optimizer.learning_rate=1e-2", "objective={kl_coef=0.01}"),
    "warmup={steps=60, batch=32, learning_rate=1e-2}",  # groups whose rewards differ
    *("eval.problems=4", "checkpoint.every=10", "log.samples_every=5"),
)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)


def settings(directory, *changes):
    return [*TASK, *changes, f"run.dir={json.dumps(str(directory))}"]


def go(directory, *changes):
    """The run in this process: its summary and what it said."""
    lines = []
    summary = train(load_config(None, settings(directory, *changes)), echo=lines.append)
    return summary, lines


def start(overrides, script=JRL):
    """``jrl train`` in a process group of its own, as a terminal has it."""
    return subprocess.Popen(
        [sys.executable, "-c", script, "train", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
    )


def wait_for_step(child, directory, step):
    """Returns when the run has logged a step."""
    give_up = time.monotonic() + 240
    while last_step(directory) < step:
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < give_up
        time.sleep(0.02)


def steps_logged(directory):
    return [r["step"] for r in read_jsonl(directory / "metrics.jsonl") if "step" in r]


def last_step(directory):
    return max(steps_logged(directory), default=-1)


def checkpoints(directory):
    return Checkpoints(directory / "checkpoints", 2)


def leaves(directory):
    """Every array of the newest checkpoint, as stored on disk."""
    import orbax.checkpoint as ocp

    step = checkpoints(directory).latest_step()
    state = directory / "checkpoints" / f"{step:08d}" / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(state).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return step, reader.restore(state, restore_args=kinds)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """steps -> the directory of a run of that many steps that nothing stopped, each made once."""

    @functools.cache
    def of(steps):
        directory = tmp_path_factory.mktemp("unbroken") / "run"
        go(directory, f"train.steps={steps}")
        return directory

    return of


def end_after(step):
    """The step up to which a stopped run is resumed; the same for most, so that they share one."""
    return 25 * (step // 25 + 1)


def assert_ends_as_unbroken(directory, unbroken, steps):
    """The broken run ends bit-equal to an unbroken one, and has logged each step once."""
    full = unbroken(steps)
    (step, resumed), (same_step, unbroken) = leaves(directory), leaves(full)
    assert step == same_step == steps
    assert resumed.keys() == unbroken.keys()
    assert len(resumed) > 20
    for name, leaf in unbroken.items():
        assert np.array_equal(leaf, resumed[name]), name
    assert steps_logged(directory) == list(range(1, steps + 1))
    completions, all_ = (
        [(s["step"], s["completion"]) for s in read_jsonl(d / "samples.jsonl")]
        for d in (directory, full)
    )
    assert completions == all_


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGINT)]
)
def test_a_signal_ends_the_run_with_its_state_saved(tmp_path, number, unbroken):
    run = tmp_path / "run"
    child = start(settings(run, ENDLESS))
    with child:
        wait_for_step(child, run, 13)
        signalled_at = time.monotonic()
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert time.monotonic() - signalled_at < 10
    stopped = checkpoints(run).latest_step()
    assert stopped == last_step(run) >= 13
    assert f"stopped after step {stopped}; saved in {run / 'checkpoints'}" in err
    assert "Traceback" not in err
    assert not (run / "summary.json").exists()
    _, lines = go(run, f"train.steps={end_after(stopped)}")
    assert f"resuming from step {stopped} of {run}" in lines
    assert_ends_as_unbroken(run, unbroken, end_after(stopped))


def test_a_killed_run_resumes_from_its_newest_checkpoint(tmp_path, unbroken):
    run = tmp_path / "run"
    child = start(settings(run, ENDLESS))
    with child:
        wait_for_step(child, run, 16)
        while checkpoints(run).latest_step() is None:
            time.sleep(0.02)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    saved, logged = checkpoints(run).latest_step(), last_step(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99999, "los')  # what a kill in the middle of a write leaves
    _, lines = go(run, f"train.steps={end_after(logged)}")
    assert f"resuming from step {saved} of {run}" in lines
    header = read_jsonl(run / "metrics.jsonl")[0]
    assert [r["step"] for r in header["resumed"]] == [saved]
    assert_ends_as_unbroken(run, unbroken, end_after(logged))


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    run = tmp_path / "run"
    with start(settings(run, ENDLESS, "checkpoint.every=0")) as child:
        wait_for_step(child, run, 2)
        child.kill()
    assert checkpoints(run).latest_step() is None
    go(run, "train.steps=3", "checkpoint.every=0")
    assert steps_logged(run) == [1, 2, 3]
    assert {s["step"] for s in read_jsonl(run / "samples.jsonl")} == {0, 1, 3}


@pytest.mark.slow  # the next but one does the same in this process
def test_a_signal_is_heard_between_the_steps_of_a_compiled_run(tmp_path):
    run = tmp_path / "run"
    overrides = settings(run, ENDLESS, "train.mode=compiled")
    with start(overrides) as child:
        wait_for_step(child, run, 10)
        child.terminate()
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    stopped = checkpoints(run).latest_step()
    assert stopped == last_step(run)
    assert stopped % 10 == 0  # the steps between two checkpoints are one program


def test_a_signal_before_the_first_step_keeps_the_warm_start(tmp_path, unbroken):
    run = tmp_path / "run"

    def echo(line):
        if line.startswith("warm start"):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="stopped after step 0; saved in"):
        train(load_config(None, settings(run, "train.steps=25")), echo=echo)
    _, lines = go(run, "train.steps=25")
    assert not any(line.startswith("warm start") for line in lines)
    assert_ends_as_unbroken(run, unbroken, 25)


def test_a_compiled_run_without_periods_hears_a_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(loops, "SEGMENT", 4)
    monkeypatch.setattr(
        loops.Progress,
        "step",
        lambda self, done, record: signal.raise_signal(signal.SIGINT) if done == 2 else None,
    )
    run, more = tmp_path / "run", ("train.mode=compiled", "checkpoint.every=0", "train.steps=9")
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3; saved in"):
        go(run, *more)
    assert steps_logged(run) == [1, 2, 3]  # of nine, so that all segments are alike
    assert checkpoints(run).latest_step() == 3


# ---------------------------------------------------------------- no room


def test_logs_that_a_full_disk_did_not_take_are_written_later(tmp_path, capsys, monkeypatch):
    """Every write to the logs fails; the last step's checkpoint holds what they lack."""
    monkeypatch.setattr(metrics, "LOG_SECONDS", 1000.0)
    run = tmp_path / "run"
    run.mkdir()
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run / name).symlink_to("/dev/full")
    with pytest.raises(StorageError, match="step 2 is saved; `jrl train .*` resumes") as caught:
        go(run, "train.steps=2")
    assert str(caught.value).count("No space left on device") == 1
    assert not (run / "summary.json").exists()
    assert checkpoints(run).latest_step() == 2
    assert capsys.readouterr().err == ""
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run / name).unlink()
    summary, _ = go(run, "train.steps=2")
    assert summary["steps"] == 2
    assert steps_logged(run) == [1, 2]
    assert {s["step"] for s in read_jsonl(run / "samples.jsonl")} == {0, 1, 2}


DISK = """
set -e
mount -t tmpfs -o size={size} none {place}
{filler}
exec {python} -m jrl train {settings}
"""
FILLER = """
(until grep -q '"step": 3,' {place}/run/metrics.jsonl 2>/dev/null; do sleep 0.1; done
cat /dev/zero > {place}/filled 2>/dev/null || date +%s > {place}.full) &
"""


@pytest.mark.slow
@pytest.mark.parametrize("fills", ["checkpoints", "something else"])
def test_a_disk_that_is_full_ends_the_run_in_one_line_within_a_minute(tmp_path, fills):
    """A real one, of a megabyte, which saving or another program fills."""
    mounts = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {tmp_path}"]
    if not shutil.which("unshare") or subprocess.run(mounts, capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    place = tmp_path / "disk"
    place.mkdir()
    on_checkpoints = fills == "checkpoints"
    changes = (
        ("checkpoint.every=5", "checkpoint.keep=99") if on_checkpoints else ("checkpoint.every=0",)
    )
    script = DISK.format(
        size="1300k" if on_checkpoints else "4m",
        place=place,
        filler="" if on_checkpoints else FILLER.format(place=place),
        python=sys.executable,
        settings=" ".join(map(shlex.quote, settings(place / "run", ENDLESS, *changes))),
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
    )
    end = time.time()
    assert done.returncode == 4, done.stderr
    *before, line = done.stderr.splitlines()
    # A save in the background that failed is made again, which fails too: a line for each.
    written = ("; this step is saved in its place", "jrl: warning: checkpoint step")
    assert all(any(w in each for w in written) for each in before), done.stderr
    assert len(before) <= 2 * on_checkpoints
    assert "earlier steps are unchanged; free disk space" in line
    if on_checkpoints:
        assert re.search(r"; step \d+ is saved; `jrl train .*run` resumes from it$", line)
    else:
        assert line.endswith(f"no checkpoint is in {place / 'run'}")
        assert end - int((tmp_path / "disk.full").read_text()) < 60


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, monkeypatch):
    monkeypatch.undo()
    run = tmp_path / "run"
    run.mkdir()
    (run / "report").write_text("in the way")
    summary, lines = go(run, "train.steps=1")
    assert (summary["steps"], summary["report"]) == (1, None)
    assert any(line.startswith("no report: the report cannot be written") for line in lines)


FULL = """
import resource, signal, time
from jrl.storage.checkpoints import Checkpoints
from jrl.cli.app import main
from jrl.storage.metrics import RunWriter

write = RunWriter.write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def fill(writer, step, metrics):
    if step == 15:  # no file may grow any more, which fails as a full disk does
        while Checkpoints(writer.dir / "checkpoints", 1).latest_step() != 10:
            time.sleep(0.02)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    return write(writer, step, metrics)

RunWriter.write = fill
main()
"""


def test_a_checkpoint_that_cannot_be_saved_is_said_and_costs_no_earlier_step(tmp_path, unbroken):
    """The disk is full from step 15 on; with room again the run resumes."""
    run = tmp_path / "run"
    with start(settings(run, "train.steps=25"), FULL) as child:
        _, err = child.communicate(timeout=120)
    assert child.returncode == 4, err
    assert f"step 10 is saved; `jrl train {run}` resumes from it" in err
    assert len(err.splitlines()) == 1
    assert re.search(rf"checkpoint step 2\d was not written to {run / 'checkpoints'}", err)
    assert "earlier steps are unchanged; free disk space or set another run.dir" in err
    assert "jrl/cli/" not in err  # the writer's own threads may complain; the command does not
    assert checkpoints(run).steps() == [0, 10]
    assert last_step(run) == 14
    go(run, "train.steps=25")
    assert_ends_as_unbroken(run, unbroken, 25)


# ---------------------------------------------------------------- rewards


REWARDS = '''
import os
import pathlib
import time


def hangs(samples):
    """1 point, but for the questions about whales it never answers."""
    while "whale" in samples[0].prompt.text:
        time.sleep(1)
    return [1.0] * len(samples)


def hangs_always(samples):
    time.sleep(1000)


def hangs_when_told(samples):
    while pathlib.Path(__file__).with_name("hang").exists():
        time.sleep(0.05)
    return [1.0] * len(samples)


def raises_in_evaluations(samples):
    """At the third, of two prompts each; the first comes before the first step."""
    seen = pathlib.Path(__file__).with_name("evaluations")
    if "held out" in samples[0].prompt.text:
        seen.write_text(seen.read_text() + "1")
        if len(seen.read_text()) == 5:
            raise RuntimeError("out of luck")
    return [1.0] * len(samples)


def raises_when_told(samples):
    if pathlib.Path(__file__).with_name("raise").exists():
        raise RuntimeError("out of luck")
    return [1.0] * len(samples)


def leaves_its_id(samples):
    pathlib.Path(__file__).with_name(f"pid-{os.getpid()}").touch()
    return [1.0] * len(samples)
'''


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Questions, reward functions and a checkpoint; the overrides of a run on them."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    root = tmp_path_factory.mktemp("text")
    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyz? "]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = ModelConfig(
        vocab_size=32,
        **{"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32},
        max_length=64,
    )
    hf.save(root / "model", model, transformer(model).init(jax.random.key(0)))
    backend.save(str(root / "model" / "tokenizer.json"))
    (root / "model" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    rows = [{"question": f"how many {what}?", "answer": "5"} for what in ("eels", "whales")]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARDS)
    return root


def text_settings(text, run, function, *changes):
    return [
        f"model.path={json.dumps(str(text / 'model'))}",
        f"data.train={json.dumps(str(text / 'data.jsonl'))}",
        *("data.template=plain", "sampling.group=2", "sampling.max_new_tokens=4"),
        *("train.prompts=2", "reward_pool.workers=1", "checkpoint.every=0"),
        "rewards={" + json.dumps(f"{text / 'rewards.py'}:{function}") + "={}}",
        *changes,
        f"run.dir={json.dumps(str(run))}",
    ]


def test_a_reward_that_hangs_scores_0_is_counted_and_holds_nothing_up(text, tmp_path):
    limit = "reward_pool.timeout_seconds=0.5"
    overrides = text_settings(text, tmp_path / "run", "hangs", limit, "train.steps=2")
    start = time.monotonic()
    train(load_config(None, [*overrides, "log.samples_every=1"]), echo=lambda line: None)
    assert time.monotonic() - start < 120
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    assert [r["reward_timeouts"] for r in records] == [2, 2]  # one question, a group of two
    assert [r["reward"] for r in records] == [0.5, 0.5]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {(s["reward"], "whale" in s["prompt"]) for s in samples} == {(1, False), (0, True)}


def test_ctrl_c_in_a_terminal_ends_the_reward_workers_too(text, tmp_path):
    """The signal reaches the whole process group, the workers included."""
    run = tmp_path / "run"
    with start(text_settings(text, run, "leaves_its_id", ENDLESS)) as child:
        wait_for_step(child, run, 2)
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in err
    assert checkpoints(run).latest_step() == last_step(run)
    workers = [int(p.name.partition("-")[2]) for p in text.glob("pid-*")]
    assert workers
    give_up = time.monotonic() + 10
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_rewards_that_all_time_out_end_the_run(text, tmp_path):
    run, limit = tmp_path / "run", "reward_pool.timeout_seconds=0.2"
    overrides = text_settings(text, run, "hangs_always", limit, "train.steps=50")
    with pytest.raises(RunStopped, match="reward_failures = 1, above 0.99 for 3 steps in a row"):
        train(load_config(None, overrides), echo=lambda line: None)
    assert checkpoints(run).steps() == [3]
    assert not (run / "summary.json").exists()


def test_a_reward_that_raises_saves_before_it_ends_the_run(text, tmp_path, monkeypatch):
    """And the steps after it are those of an unbroken run."""
    (text / "raise").unlink(missing_ok=True)
    show = loops.Progress.step

    def step(self, done, record):
        show(self, done, record)
        if done == 2:
            (text / "raise").touch()

    monkeypatch.setattr(loops.Progress, "step", step)
    run = tmp_path / "run"
    config = load_config(None, text_settings(text, run, "raises_when_told", "train.steps=4"))
    with pytest.raises(UserError, match="raised RuntimeError: out of luck"):
        train(config, echo=lambda line: None)
    assert checkpoints(run).steps() == [2]
    monkeypatch.undo()
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    (text / "raise").unlink()
    assert train(config, echo=lambda line: None)["steps"] == 4
    assert steps_logged(run) == [1, 2, 3, 4]


def test_a_reward_that_raises_in_an_evaluation_costs_no_step(text, tmp_path):
    (text / "evaluations").write_text("")
    (text / "eval.jsonl").write_text('{"question": "held out?", "answer": "5"}\n')
    run, changes = tmp_path / "run", (f"data.eval={json.dumps(str(text / 'eval.jsonl'))}",)
    changes += ("eval.every=1", "reward_pool.workers=0", "train.steps=3", "eval.samples=1")
    config = load_config(None, text_settings(text, run, "raises_in_evaluations", *changes))
    with pytest.raises(UserError, match="out of luck.*; step 2 is saved; `jrl .* from it"):
        train(config, echo=lambda line: None)
    assert (checkpoints(run).steps(), steps_logged(run)) == ([2], [1, 2])
    assert train(config, echo=lambda line: None)["steps"] == 3
    assert steps_logged(run) == [1, 2, 3]


def test_a_signal_during_a_reward_that_hangs_saves_the_step_before(text, tmp_path, monkeypatch):
    """The reward runs in the trainer, without a limit of its own."""
    monkeypatch.setattr(signals, "STEP_SECONDS", 0.5)
    (text / "hang").unlink(missing_ok=True)
    show = loops.Progress.step

    def step(self, done, record):
        show(self, done, record)
        if done == 2:
            (text / "hang").touch()
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()

    monkeypatch.setattr(loops.Progress, "step", step)
    run = tmp_path / "run"
    overrides = text_settings(text, run, "hangs_when_told", "reward_pool.workers=0", ENDLESS)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(load_config(None, overrides), echo=lambda line: None)
    finally:
        (text / "hang").unlink()
    assert checkpoints(run).steps() == [2]
    assert steps_logged(run) == [1, 2]


def test_a_signal_while_a_reward_file_is_imported_ends_the_command(text, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import pathlib, time\npathlib.Path(__file__).with_suffix('.here').touch()\n"
                    "time.sleep(1000)\n")  # fmt: skip
    place = "rewards={" + json.dumps(f"{slow}:f") + "={}}"
    with start([*text_settings(text, tmp_path / "run", "hangs", ENDLESS), place]) as child:
        give_up = time.monotonic() + 120
        while not slow.with_suffix(".here").exists():
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < give_up
            time.sleep(0.02)
        signalled_at = time.monotonic()
        child.send_signal(signal.SIGHUP)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert time.monotonic() - signalled_at < 20
    assert err == "jrl: stopped\n"  # before anybody looked for the run


def test_a_reward_that_hangs_beyond_the_limit_saves_and_ends_the_run(text, tmp_path, monkeypatch):
    """In the trainer, where nothing else would end it; and it says what it waits for."""
    monkeypatch.setattr(waits, "SAY_SECONDS", 1.0)
    (text / "hang").unlink(missing_ok=True)
    show = loops.Progress.step

    def step(self, done, record):
        show(self, done, record)
        if done == 2:
            (text / "hang").touch()

    monkeypatch.setattr(loops.Progress, "step", step)
    run, lines = tmp_path / "run", []
    more = ("reward_pool.workers=0", "train.wait_seconds=3", ENDLESS)
    try:
        with pytest.raises(Overdue) as caught:
            train(
                load_config(None, text_settings(text, run, "hangs_when_told", *more)),
                echo=lines.append,
            )
    finally:
        (text / "hang").unlink(missing_ok=True)
    assert re.fullmatch(
        r"waited too long for the rewards of step 3: \d s, 4 of 4 calls left; "
        rf"train.wait_seconds is the limit; step 2 is saved; `jrl train {run}` resumes from it",
        str(caught.value),
    )
    assert any(x.startswith("waiting for the rewards of step 3: ") for x in lines)
    assert checkpoints(run).steps() == [2]
    assert train(
        load_config(None, text_settings(text, run, "hangs_when_told", "train.steps=3")),
        echo=lambda line: None,
    )["steps"] == 3  # fmt: skip
