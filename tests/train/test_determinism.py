"""The same configuration, seed and machine: the same bits, in one process and in two."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jrl.config import load_config
from jrl.run import run as running
from jrl.run.run import train
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import CLOCKS, read_jsonl

RUN = (
    *("data.task=sequence", "data.difficulty=1", "sampling.group=4", "train.prompts=4"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("rewards={partial={}}", "optimizer.learning_rate=1e-2", "objective={kl_coef=0.01}"),
    "warmup={steps=60, batch=32, learning_rate=1e-2}",  # groups whose rewards differ
    *("eval.problems=4", "train.steps=6", "checkpoint.every=3", "log.samples_every=2"),
)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)


def settings(directory, *changes):
    return [*RUN, *changes, f"run.dir={json.dumps(str(directory))}"]


def arrays(directory):
    """Every array of the newest checkpoint by name, as stored."""
    import orbax.checkpoint as ocp

    step = Checkpoints(directory / "checkpoints", 2).latest_step()
    state = directory / "checkpoints" / f"{step:08d}" / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(state).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return reader.restore(state, restore_args=kinds)


def logged(directory):
    """Output of a run, without clocks."""
    steps = [
        {name: value for name, value in record.items() if name not in CLOCKS}
        for record in read_jsonl(directory / "metrics.jsonl")
        if "step" in record
    ]
    return steps, read_jsonl(directory / "samples.jsonl")


def assert_same_bits(one, other):
    first, second = arrays(one), arrays(other)
    assert first.keys() == second.keys()
    assert len(first) > 20
    for name, array in first.items():
        assert array.dtype == second[name].dtype
        assert array.tobytes() == second[name].tobytes(), name
    (steps, samples), again = logged(one), logged(other)
    assert (steps, samples) == again
    assert max(step["grad_norm"] for step in steps) > 0
    assert len(samples) > 4


def test_a_seed_gives_the_same_bits_again(tmp_path):
    for name in ("one", "two"):
        train(load_config(None, settings(tmp_path / name, "seed=3")), echo=lambda line: None)
    assert_same_bits(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [(), ("train.mode=compiled",), ("train.mode=packed",), ("mesh.data=2", "mesh.tensor=2")],
    ids=str,
)
def test_two_processes_give_the_same_bits(changes, tmp_path):
    root = str(pathlib.Path(__file__).parents[2])
    for name in ("one", "two"):
        command = [sys.executable, "-m", "jrl", "train", *settings(tmp_path / name, *changes)]
        # Without the cache of programs, so that each process compiles its own.
        env = os.environ | {"PYTHONPATH": root, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert_same_bits(tmp_path / "one", tmp_path / "two")
