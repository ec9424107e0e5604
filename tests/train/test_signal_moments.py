"""Every signal at every moment of a run: its exit code, its time, and that what it says is true.

The ways to stop a run are tried side by side, since most of a case is waiting: for a start, for the
seconds that a rollout is given, for an end. A state that a stopped run leaves is resumed once,
however many ways lead to it.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import read_jsonl

pytestmark = pytest.mark.slow
SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}

REWARDS = '''
import os
import pathlib
import time

here, now, calls = pathlib.Path(__file__).parent, pathlib.Path(os.environ["NOW"]), []
if (here / "import").exists():
    now.touch()
    time.sleep(1000)


def reward(samples):
    """1 point; while a file is there it takes for ever."""
    calls.append(1)
    if (here / "reward").exists() and len(calls) > 1:  # the first one tries whether it works
        now.touch()
        time.sleep(1000)
    return [1.0] * len(samples)
'''

COMMAND = """
import os
import pathlib
import sys
import time

place = pathlib.Path({place!r})

def now(seconds):
    pathlib.Path(os.environ["NOW"]).touch()
    time.sleep(seconds)

if (place / "boot").exists():
    class Boot:  # as long as JAX takes to be imported on a slow disk
        def find_spec(self, name, *about):
            if name == "jax":
                now(1000)
    sys.meta_path.insert(0, Boot())

elif any((place / name).exists() for name in ("step", "save", "report", "evaluation")):
    from jrl.storage.checkpoints import Checkpoints
    from jrl.run import run as running
    from jrl.run.records import RunRecords

    save, after_step = Checkpoints.save, RunRecords.after_step

    def slow_save(self, step, *state, **extra):
        save(self, step, *state, **extra)
        if step == 3 and (place / "save").exists():
            now(3)

    def slow_step(self, done, *made):
        if done == 2 and (place / "step").exists():
            now(3)
        return after_step(self, done, *made)

    def for_ever(*given):
        now(1000)

    Checkpoints.save, RunRecords.after_step = slow_save, slow_step
    if (place / "report").exists():
        running.write_report = for_ever
    if (place / "evaluation").exists():
        RunRecords._evaluate = for_ever

elif (place / "compiling").exists():
    import hashlib
    import jax
    from jrl.system.compile_reports import CompileNotes

    enter = CompileNotes.__enter__

    def slow(event, seconds, **about):
        # A compiler of minutes, in which Python calls no handler.
        lowered = event.endswith("jaxpr_to_mlir_module_duration")
        if lowered and about.get("fun_name") in ("jit(step)", "jit(iterate)", "step", "iterate"):
            now(0)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

    def listening(self):
        jax.monitoring.register_event_duration_secs_listener(slow)
        return self

    CompileNotes.__enter__ = lambda self: listening(enter(self))

if __name__ == "__main__":  # workers import this file
    from jrl.__main__ import main
    main()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Questions, a reward and a checkpoint."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    root = tmp_path_factory.mktemp("moments")
    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyz? "]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = ModelConfig(vocab_size=32, max_length=64, **SIZES)
    hf.save(root / "model", model, transformer(model).init(jax.random.key(0)))
    backend.save(str(root / "model" / "tokenizer.json"))
    (root / "model" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    rows = [{"question": f"how many {what}?", "answer": "5"} for what in ("eels", "whales")]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARDS)
    (root / "command.py").write_text(COMMAND.format(place=str(root)))
    return root


def command(place, run, workers, moment):
    if moment == "compiling one program":
        sizes = ", ".join(f"{name}={value}" for name, value in SIZES.items())
        overrides = [
            *("data.task=sequence", "data.difficulty=1", "train.mode=compiled"),
            *(f"model.config={{{sizes}}}", "rewards={partial={}}", "eval.problems=2"),
            *("sampling.group=2", "train.prompts=2", "train.steps=3", "checkpoint.every=1"),
            f"run.dir={json.dumps(str(run))}",
        ]
        return [sys.executable, str(place / "command.py"), "train", *overrides]
    overrides = [
        f"model.path={json.dumps(str(place / 'model'))}",
        f"data.train={json.dumps(str(place / 'data.jsonl'))}",
        *("data.template=plain", "sampling.group=2", "sampling.max_new_tokens=4"),
        *("train.prompts=2", "train.steps=3", "checkpoint.every=1", "log.samples_every=0"),
        "rewards={" + json.dumps(f"{place / 'rewards.py'}:reward") + "={}}",
        *(f"reward_pool.workers={workers}", "reward_pool.timeout_seconds=900"),
        f"run.dir={json.dumps(str(run))}",
    ]
    return [sys.executable, str(place / "command.py"), "train", *overrides]


def environment(run):
    """Of a run that says by a file beside its directory that the moment is there."""
    checkout = str(pathlib.Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": checkout, "NOW": f"{run}.now"}


def begin(place, run, workers, moment):
    return subprocess.Popen(
        command(place, run, workers, moment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(run),
    )


MOMENTS = {
    # workers, seconds it may take at most, the steps that are then on disk
    "boot": (0, 5, []),
    "import": (0, 5, []),
    "compiling": (0, 5, []),
    "compiling one program": (0, 5, []),
    "evaluation": (0, 15, []),
    "reward": (0, 16, [0]),
    "reward of a worker": (1, 16, [0]),
    "step": (0, 15, [1, 2]),
    "save": (0, 15, [2, 3]),
    "report": (0, 5, [2, 3]),
}
WAYS = {
    "SIGTERM": [signal.SIGTERM],
    "SIGINT": [signal.SIGINT],
    "SIGHUP": [signal.SIGHUP],
    "SIGINT twice": [signal.SIGINT, signal.SIGINT],
}


def reported_step(err):
    """The newest step that the last line says is on disk; None where it says that none is."""
    last = err.splitlines()[-1]
    match = re.search(r"stopped after step (\d+); saved in|step (\d+) is saved", last)
    if match:
        return int(match[1] or match[2])
    assert last == "jrl: stopped" or "no checkpoint is in" in last or "does not exist" in last, last
    return None


def wait_for_the_moment(child, run):
    give_up = time.monotonic() + 240
    while not pathlib.Path(f"{run}.now").exists():
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < give_up
        time.sleep(0.02)


def stop(child, numbers):
    """Sends signals half a second apart; (seconds until the end, standard error)."""
    signalled_at = time.monotonic()
    for i, number in enumerate(numbers):
        time.sleep(0.5 * i)
        if child.poll() is None:
            child.send_signal(number)
    _, err = child.communicate(timeout=60)
    return time.monotonic() - signalled_at, err


def state_left(run):
    """State from which a run resumes: names of files, random parts left out, and logged steps."""
    names = {re.sub(r"[0-9a-f]{16,}", "#", str(p.relative_to(run))) for p in run.rglob("*")}
    log = run / "metrics.jsonl"
    steps = [record.get("step") for record in read_jsonl(log)] if log.exists() else None
    return json.dumps([sorted(names), steps])


def check_resume(place, run, workers, moment):
    again = subprocess.run(
        command(place, run, workers, moment),
        env=environment(run),
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert again.returncode == 0, again.stderr
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records if "step" in record] == [1, 2, 3]


@pytest.mark.parametrize("moment", MOMENTS)
def test_signals_at_any_moment(place, tmp_path, moment):
    workers, most, steps = MOMENTS[moment]
    runs, flag = {way: tmp_path / way for way in WAYS}, place / moment.partition(" ")[0]
    flag.touch()
    with concurrent.futures.ThreadPoolExecutor(len(WAYS)) as threads:
        children = {way: begin(place, run, workers, moment) for way, run in runs.items()}
        try:
            # All are there before the first is stopped, so that no start slows an end down.
            list(threads.map(wait_for_the_moment, children.values(), runs.values()))
            ends = dict(zip(WAYS, threads.map(stop, children.values(), WAYS.values()), strict=True))
        finally:
            flag.unlink()
            for child in children.values():
                child.kill()
                child.communicate()
        states = {}
        for way, (took, err) in ends.items():
            case = f"{moment}, {way}: {children[way].returncode}, {took:.1f} s, {err!r}"
            assert children[way].returncode == 130, case
            assert took < most, case
            assert "Traceback" not in err, case
            run = runs[way]
            saved_steps = Checkpoints(run / "checkpoints", 2).steps() if run.exists() else []
            assert max(saved_steps, default=None) == reported_step(err), case
            if len(WAYS[way]) == 1:
                assert saved_steps == steps, case
            states[state_left(run)] = run
        list(threads.map(lambda run: check_resume(place, run, workers, moment), states.values()))
        print(f"{moment}: {len(states)} states resumed")
