"""Several processes as one run: the same numbers as one process, and a clean end when one is gone.

Two processes of four CPU devices each against one process of eight.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from jrl.config import load_config
from jrl.run import run as running

HALVES = """
import sys
from jrl.system.processes import start
path, folder, port, process, *changes = sys.argv[1:]
start(f"127.0.0.1:{port}", 2, int(process))
from jrl.config import load_config
from jrl.run import run as running
running.write_report = lambda directory: directory
for steps in (2, 4):
    running.train(load_config(path, [f"run.dir={folder}", f"train.steps={steps}", *changes]))
"""
CONFIG = """
method = "grpo"
[data]
task = "sorting"
difficulty = 3
[model.config]
layers = 1
embed_dim = 16
heads = 2
kv_heads = 2
head_dim = 8
mlp_dim = 32
[sampling]
group = 4
[optimizer]
learning_rate = 1e-2
[train]
steps = 4
prompts = 8
[eval]
problems = 16
[checkpoint]
every = 2
keep = 4
[mesh]
data = 4
fsdp = 2
[log]
samples_every = 2
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(command, devices):
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"]),
    }
    return subprocess.Popen(
        [sys.executable, *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def results_of(running):
    """Result of each process: (exit code, output)."""
    outputs = [process.communicate(timeout=240)[0] for process in running]
    return [(p.returncode, output) for p, output in zip(running, outputs, strict=True)]


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def samples_of(folder):
    """The kept samples of training; those of evaluations depend on where a run was broken."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r.get("split") != "eval"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes") / "config.toml"
    path.write_text(CONFIG)
    return path


STALE = ("placement.staleness=1", "sampling.mesh.fsdp=2")


@pytest.mark.parametrize(
    "changes",
    [(), pytest.param((*STALE, "mesh.data=2"), marks=pytest.mark.slow)],
    ids=["shared", "disjoint"],
)
def test_two_processes_train_sample_save_and_resume_as_one_does(
    changes, config, tmp_path, monkeypatch
):
    """The second half of the run of two resumes from the checkpoint of its first half."""
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    overrides = [f"run.dir={json.dumps(str(one))}", *changes]
    running.train(load_config(config, overrides), echo=lambda line: None)
    port = free_port()
    arguments = [[config, two, port, i, *changes] for i in range(2)]
    for code, output in results_of([start(["-c", HALVES, *map(str, a)], 4) for a in arguments]):
        assert code == 0, output
    header, *alone = records(one)
    assert header["device"]["processes"] == 1
    header, *together = records(two)
    assert header["device"] | {"processes": 2, "count": 8} == header["device"]
    assert [entry["step"] for entry in header["resumed"]] == [2]
    assert [r["step"] for r in together] == [r["step"] for r in alone] == [1, 2, 3, 4]
    for mine, theirs in zip(together, alone, strict=True):
        for name in ("reward", "loss", "grad_norm", "length", "completion_tokens"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    ends = [json.loads((d / "summary.json").read_text())["accuracy_after"] for d in (one, two)]
    assert ends[0] == ends[1]
    assert samples_of(one) == samples_of(two) != []


HALF = """
import sys
from jrl.system.processes import start
path, folder, port, count, process, steps, *changes = sys.argv[1:]
if int(count) > 1:
    start(f"127.0.0.1:{port}", int(count), int(process))
from jrl.config import load_config
from jrl.run import run as running
running.write_report = lambda directory: directory
running.train(load_config(path, [f"run.dir={folder}", f"train.steps={steps}", *changes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (4, 2)], ids=str)
def test_a_run_resumes_with_another_number_of_processes(counts, config, tmp_path, monkeypatch):
    """Eight devices throughout, and in the second half of one process a single one."""
    one, run = tmp_path / "one", tmp_path / "run"
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    running.train(load_config(config, [f"run.dir={json.dumps(str(one))}"]), echo=lambda line: None)
    for count, steps in zip(counts, (2, 4), strict=True):
        alone = steps == 4 and count == 1
        changes = ("mesh.data=1", "mesh.fsdp=1") if alone else ()
        port, devices = free_port(), 1 if alone else 8 // count
        arguments = [[config, run, port, count, i, steps, *changes] for i in range(count)]
        both = [start(["-c", HALF, *map(str, a)], devices) for a in arguments]
        for code, output in results_of(both):
            assert code == 0, output
    header, *resumed = records(run)
    assert [entry["step"] for entry in header["resumed"]] == [2]
    assert header["resumed"][0]["device"]["processes"] == counts[1]
    for mine, theirs in zip(resumed, records(one)[1:], strict=True):
        for name in ("reward", "loss", "grad_norm", "length", "completion_tokens"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    assert samples_of(run) == samples_of(one) != []


def test_processes_that_disagree_all_stop_with_one_message(config):
    folder = config.parent / "differ"
    command = ["-m", "jrl", "train", str(config), f"run.dir={folder}"]
    flags = f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"
    both = [
        start([*command, f"train.prompts={n}", *flags, f"--process={i}"], 4)
        for i, n in enumerate((8, 16))
    ]
    results = results_of(both)
    errors = [output[output.index("jrl: error:") :].splitlines()[:2] for _, output in results]
    assert [code for code, _ in results] == [2, 2]
    assert errors[0] == errors[1]
    assert "the processes of this run disagree on their configuration" in errors[0][0]
    assert errors[0][1].strip() == "train.prompts = 8 in process 0, 16 in process 1"
    assert not folder.exists()


PEER = """
import sys, time
import jax
import numpy as np
from jrl.system import wait_reports as waits
from jrl.errors import UserError
from jrl.system.processes import any_says, check_same, deal, first_says, start
start(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]), silence_seconds=5)
me = jax.process_index()
assert first_says({"who": jax.process_index()}) == {"who": 0}
assert any_says(jax.process_index() == 1)
check_same("names", {"a": 1})

def work(items):
    assert (items % 2 == me).all()
    thirds = np.stack([items, items + me / 3], axis=1).astype(np.float32)
    return (thirds, 2**30 + items.astype(np.int32)), {"items": len(items)}

for count in (5, 1, 5):
    (points, numbers), counts = deal("work", count, work)
    items = np.arange(count)
    assert np.array_equal(points, np.stack([items, items + items % 2 / 3], 1).astype(np.float32))
    assert counts == {"items": count}
    assert numbers.dtype == np.int32
    assert np.array_equal(numbers, 2**30 + items)  # float32 would not hold them

def refuse(items):
    if me == 1:
        raise UserError("prompt 7 is too hard")
    return work(items)

try:
    deal("work", 4, refuse)
except UserError as error:
    assert str(error) == "prompt 7 is too hard"
else:
    raise AssertionError("nobody was told")
assert deal("work", 2, work)[1] == {"items": 2}

def late(items):
    time.sleep(1.5 * me)
    return work(items)

waits.SAY_SECONDS, waits.LOOK_SECONDS, printed = 0.2, 0.1, []
with waits.Waits(60, printed.append, printed.append):
    deal("late", 2, late)
expected = "waiting for the other processes (late): 0 s, not here: 1"
assert me or printed[0] == expected, printed
print("joined", flush=True)
while True:
    any_says(False)
    time.sleep(0.1)
"""


def test_processes_share_work_and_a_lost_one_ends_the_other_within_a_bounded_time():
    """Whichever of the two it is; both cases at once, since most of the time is silence."""
    pairs = []
    for _ in range(2):
        port = free_port()
        pairs.append([start(["-c", PEER, str(port), str(i)], 1) for i in range(2)])
    try:
        for peer in [*pairs[0], *pairs[1]]:
            assert peer.stdout is not None
            if not any(line.startswith("joined") for line in peer.stdout):
                pytest.fail("a process ended before it had joined")
        begin = time.monotonic()
        for number, pair in enumerate(pairs):
            pair[number].send_signal(signal.SIGKILL)
        for number, pair in enumerate(pairs):
            assert pair[1 - number].wait(timeout=40) != 0
        assert time.monotonic() - begin < 30
    finally:
        for peer in [*pairs[0], *pairs[1]]:
            peer.kill()
            peer.communicate()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID missing"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES = 'two'; must be a whole number"),
        ({"JRL_DISTRIBUTED": "Auto"}, "JRL_DISTRIBUTED = 'Auto'; must be auto, or not set"),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
                "JAX_NUM_PROCESSES": "0",
                "JAX_PROCESS_ID": "0",
            },
            "processes = 0; must be at least 1",
        ),
    ],
)
def test_half_an_address_is_refused(env, message, monkeypatch):
    from jrl.errors import UserError
    from jrl.system.processes import start as join

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        join()


def test_one_process_alone_agrees_with_itself(monkeypatch):
    from jrl.system import processes

    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)

    def no_start(*args, **kwargs):
        pytest.fail("one process alone has nobody to join")

    monkeypatch.setattr(processes.jax.distributed, "initialize", no_start)
    processes.start()
    assert processes.first_says([1, "a"]) == [1, "a"]
    assert processes.any_says(True) is True
    assert processes.any_says(False) is False
    processes.check_same("configuration", {"a": 1})
