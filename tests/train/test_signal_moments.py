"""Every signal at every moment of a run: its exit code, its time, and that what it says is true."""

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

from jrl.checkpoint import Checkpoints
from jrl.metrics import read_jsonl
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer

pytestmark = pytest.mark.slow
SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}

REWARDS = '''
import pathlib
import time

here, calls = pathlib.Path(__file__).parent, []
if (here / "import").exists():
    (here / "now").touch()
    time.sleep(1000)


def reward(samples):
    """1 point; while a file is there it takes for ever."""
    calls.append(1)
    if (here / "reward").exists() and len(calls) > 1:  # the first one tries whether it works
        (here / "now").touch()
        time.sleep(1000)
    return [1.0] * len(samples)
'''

COMMAND = """
import pathlib
import sys
import time

place = pathlib.Path({place!r})

def now(seconds):
    (place / "now").touch()
    time.sleep(seconds)

if (place / "boot").exists():
    class Boot:  # as long as JAX takes to be imported on a slow disk
        def find_spec(self, name, *about):
            if name == "jax":
                now(1000)
    sys.meta_path.insert(0, Boot())

elif any((place / name).exists() for name in ("step", "save", "report", "evaluation")):
    from jrl.checkpoint import Checkpoints
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
    from jrl.compile_notes import CompileNotes

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


def begin(place, run, workers, moment):
    return subprocess.Popen(
        command(place, run, workers, moment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
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


def said_to_be_saved(err):
    """The newest step that the last line says is on disk; None where it says that none is."""
    last = err.splitlines()[-1]
    found = re.search(r"stopped after step (\d+); saved in|step (\d+) is saved", last)
    if found:
        return int(found[1] or found[2])
    assert last == "jrl: stopped" or "no checkpoint is in" in last or "does not exist" in last, last
    return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment(place, tmp_path, moment, way):
    workers, most, steps = MOMENTS[moment]
    run, now, flag = tmp_path / "run", place / "now", place / moment.partition(" ")[0]
    now.unlink(missing_ok=True)
    flag.touch()
    try:
        with begin(place, run, workers, moment) as child:
            give_up = time.monotonic() + 120
            while not now.exists():
                assert child.poll() is None, child.stderr.read()
                assert time.monotonic() < give_up
                time.sleep(0.02)
            sent = time.monotonic()
            for i, number in enumerate(WAYS[way]):
                time.sleep(0.5 * i)
                if child.poll() is None:
                    child.send_signal(number)
            _, err = child.communicate(timeout=60)
            took = time.monotonic() - sent
    finally:
        flag.unlink()
    print(f"{moment}, {way}: {child.returncode}, {took:.1f} s, {err!r}")
    assert child.returncode == 130
    assert took < most
    assert "Traceback" not in err
    there = Checkpoints(run / "checkpoints", 2).steps() if run.exists() else []
    assert max(there, default=None) == said_to_be_saved(err)
    if len(WAYS[way]) == 1:
        assert there == steps
    again = subprocess.run(
        command(place, run, workers, moment),
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert again.returncode == 0, again.stderr
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records if "step" in record] == [1, 2, 3]
