"""Runs that are stopped and resumed equal those that are not, bit for bit, of every kind.

Text, preferences, adapters, disjoint devices, host environments and other meshes and processes have
theirs in test_interrupts, test_pairs, test_adapters, test_disjoint, test_host_run, test_loop and
test_multiprocess.
"""

import json
import signal

import jax
import numpy as np
import pytest

from jrl.config import load_config
from jrl.run import loops
from jrl.run import run as running
from jrl.run.run import train
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import CLOCKS, read_jsonl

SHARED = (
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("sampling.group=4", "train.prompts=2", "eval.problems=2", "log.samples_every=1"),
    *("optimizer.learning_rate=1e-2", "objective={kl_coef=0.01}", "checkpoint.every=0"),
)
GUESS = (
    "data={env='guess_number', numbers=4, turns=3, cost=0.25}",
    "rewards={reward={}, success={}}",
)
CHAIN = ("data.task=chain", "data.difficulty=2", "rewards={partial={}}", "train.steps=4")
KINDS = {
    "an environment": (*GUESS, "method=gigpo", "train.steps=4"),
    "an environment in one program": (*GUESS, "train.mode=compiled", "train.steps=4"),
    "packed rows": (
        *("data.task=chain", "data.difficulty=16", "rewards={partial={}}"),
        *("train.mode=packed", "train.steps=6"),
    ),
    "trees in packed rows": (
        *("data.task=chain", "data.difficulty=8", "rewards={partial={}}", "train.mode=packed"),
        *("tree={kind='branch',rounds=2}", "train.steps=4"),
    ),
    "a curriculum": (*CHAIN, "method=mopps", "objective.pool=8"),
    "a curriculum in one program": (
        *(*CHAIN, "method=mopps", "objective.pool=8", "train.mode=compiled"),
    ),
    "stored groups": (*CHAIN, "method=remix"),
    "stored groups in one program": (*CHAIN, "method=remix", "train.mode=compiled"),
    "further members in packed rows": (
        *(*CHAIN, "method=dars", "objective.max_group=6", "train.mode=packed"),
    ),
    "hints in one program": (
        *(*CHAIN, "method=scaf_grpo", "objective.exempt_steps=1", "objective.levels=3"),
        "train.mode=compiled",
    ),
    "the best and the worst": (*CHAIN, "method=pf_ppo"),
    "dynamic sampling in one program": (
        *(*CHAIN, "method=dapo", "objective.max_rounds=3", "train.mode=compiled"),
    ),
}


@pytest.fixture
def go(monkeypatch):
    """Trains, and stops by a signal after a step; what a run leaves."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    step = loops.Progress.step

    def of(directory, changes, stop_at=None):
        def stop(self, done, record):
            step(self, done, record)
            if done == stop_at:
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(loops.Progress, "step", stop)
        place = f"run.dir={json.dumps(str(directory))}"
        train(load_config(None, [*SHARED, *changes, place]), echo=lambda line: None)

    return of


def left(directory):
    """(records but for clocks, samples of training, the final state) of a run."""
    import orbax.checkpoint as ocp

    newest = Checkpoints(directory / "checkpoints", 2).latest_step()
    state = directory / "checkpoints" / f"{newest:08d}" / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(state).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        leaves = reader.restore(state, restore_args=kinds)
    records = read_jsonl(directory / "metrics.jsonl")[1:]
    samples = read_jsonl(directory / "samples.jsonl")
    return (
        [{k: v for k, v in r.items() if k not in CLOCKS} for r in records],
        [s for s in samples if s.get("split") != "eval"],
        leaves,
    )


@pytest.mark.parametrize(
    "kind", ["an environment", *(pytest.param(k, marks=pytest.mark.slow) for k in [*KINDS][1:])]
)
def test_a_stopped_run_resumes_bit_for_bit(kind, go, tmp_path, monkeypatch):
    monkeypatch.setattr(loops, "SEGMENT", 2)  # of a compiled run, which hears signals between them
    changes = KINDS[kind]
    go(tmp_path / "whole", changes)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 2; saved in"):
        go(tmp_path / "broken", changes, stop_at=2)
    go(tmp_path / "broken", changes)
    (records, samples, state), (mine, their_samples, end) = (
        left(tmp_path / n) for n in ("whole", "broken")
    )
    assert mine == records
    assert their_samples == samples
    assert len({r["loss"] for r in records}) > 1
    assert len(state) > 20
    assert end.keys() == state.keys()
    for name, leaf in state.items():
        assert np.array_equal(leaf, end[name]), name
