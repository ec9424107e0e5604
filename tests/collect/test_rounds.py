"""Rounds whose completions an expert draws: who drew what, in every mode, and what is refused."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.collect.collector import Collector
from jrl.collect.plan import Setting
from jrl.collect.tree_search import drawn_weights
from jrl.config import load_config
from jrl.config.features import check_features
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.run import run as running
from jrl.run.run import run_config, train
from jrl.setup.run import run_features
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train import programs
from jrl.train.batches import run_source
from jrl.train.build import setup
from jrl.train.state import frozen_names
from jrl.train.trainable import check_trainable

SIZES = "{layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
ROUNDS = "objective={round_steps=2, restart_rounds=2, success=0.1}"
STEPS = 6


def settings(directory, *more):
    return load_config(
        None,
        [
            *(f"model.config={SIZES}", "data.task=sequence", "data.difficulty=1", "mesh.fsdp=1"),
            *(
                "method=bfs_prover",
                ROUNDS,
                "tree.kind=none",
                "rewards={partial={}}",
                "sampling.group=4",
            ),
            *("train.prompts=4", f"train.steps={STEPS}", "optimizer.learning_rate=0.03"),
            *("warmup={steps=40, batch=32, learning_rate=0.02}", "checkpoint.every=3"),
            f"run.dir={json.dumps(str(directory))}",
            *more,
        ],
    )


def records_of(directory):
    return [
        {k: v for k, v in r.items() if k not in CLOCKS}
        for r in read_jsonl(directory / "metrics.jsonl")
        if "loss" in r
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("rounds")


@pytest.fixture(scope="module")
def on_host(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "write_report", lambda directory: directory)
        return run_config(settings(place / "host"), echo=lambda line: None)


def test_every_mode_trains_the_same(place, on_host):
    train(settings(place / "compiled", "train.mode=compiled"), echo=lambda line: None)
    ours, theirs = records_of(place / "host"), records_of(place / "compiled")
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "reward", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(other[name], abs=1e-4), name
    assert len({r["loss"] for r in ours}) == STEPS


@pytest.mark.slow
def test_a_resumed_run_has_its_expert(place, on_host):
    train(settings(place / "parts", "train.steps=3"), echo=lambda line: None)
    train(settings(place / "parts"), echo=lambda line: None)
    assert records_of(place / "parts") == records_of(place / "host")


def test_completions_are_the_experts(place, on_host):
    """Their log-probabilities are those of the expert, their versions when it was made."""
    run, state = on_host.run, on_host.state
    state = state.replace(step=jnp.int32(STEPS - 1))  # in the midst of a round
    state = state.replace(
        frozen=state.frozen | {"expert": jax.tree.map(lambda x: 1.3 * x, state.frozen["expert"])}
    )
    source = run_source(run, None)
    setting = Setting(run.method, 4, run.config.sampling.group, np.ones(1))
    collector = Collector(source, setting, run.mesh)
    weights = drawn_weights(run)(state)
    batch, groups, _ = collector.collect(state.key, weights, step=STEPS - 1, cursor=0)
    rollout = jax.device_get(groups.rollout)
    assert set(rollout.versions[rollout.mask]) == {STEPS - 2}
    step = programs.make_train_step(run)
    for name, params in {
        "expert": state.frozen["expert"],
        "policy": state.params["policy"],
    }.items():
        scored = state.replace(params=state.params | {"policy": params})
        _, metrics = jax.jit(step)(scored, batch, run.sampling_params)
        assert (float(metrics["logprob_diff"]) < 1e-4) == (name == "expert")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("lora.rank=2",),
            r"does not go with \[lora\]: .*; remove \[lora\], or set objective.round_steps to 0",
        ),
        (("objective.round_steps=0",), "restart_rounds = 2: rounds have no steps"),
    ],
)
def test_what_does_not_go_together_is_named(tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        check_trainable(setup(settings(tmp_path / "run", *more)))


def test_an_expert_cannot_draw_ahead(tmp_path):
    features = run_features(setup(settings(tmp_path / "run")))
    check_features(features)
    with pytest.raises(
        UserError, match=r"draws, does not go with \[placement\]: .* set objective.round_steps to 0"
    ):
        check_features(features | {"placement": "[placement]"})


def test_only_what_a_schedule_uses_is_kept():
    assert get_method("bfs_prover").schedule.frozen == frozenset()
    once = get_method("bfs_prover", round_steps=3)
    assert frozen_names(once.objective, once.schedule) == once.schedule.frozen == {"expert"}
    (expert,) = once.plan.policies
    assert [expert.version(step) for step in (0, 2, 3, 7)] == [0, 0, 3, 6]
    assert expert.params(SimpleNamespace(frozen={"expert": "weights"})) == "weights"
    both = get_method("bfs_prover", round_steps=3, restart_rounds=2)
    assert both.schedule.frozen == {"expert", "first"}
    assert "schedule" in both.seams
    assert both.plan.policies
    assert get_method("bfs_prover", replayed=0.7).edits
    assert not get_method("bfs_prover").edits
