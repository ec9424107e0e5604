"""Comparisons: the statistics against known numbers, and one small comparison from end to end."""

import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.config import load_config
from jrl.errors import UserError
from jrl.run import compare as module
from jrl.run.compare import (
    coefficient_readers,
    compare,
    interquartile_mean,
    stratified_interval,
    write_comparison,
)
from jrl.storage.metrics import read_jsonl

TINY = (
    *("data.task=sequence", "data.difficulty=1", "rewards={verify={}, partial={weight=0.5}}"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("sampling.group=4", "train.prompts=4", "train.steps=2", "eval.problems=16"),
    "warmup={steps=20, batch=16, learning_rate=1e-2}",
    "optimizer={name='sgd', learning_rate=2.0}",
)


def test_runs_have_the_frozen_policies_and_the_value_network_that_are_named(monkeypatch):
    """Before anything compiles: the state that a run would begin with."""

    class Begun(Exception):
        pass

    class State(SimpleNamespace):
        def replace(self, **changes):
            return State(**{**vars(self), **changes})

    def begin(state):
        states.append(state)
        raise Begun

    def make(key, policy, frozen):
        return State(params={"policy": policy, "value": 0}, frozen=frozen)

    states, ref = [], {"w": np.arange(2.0, dtype=np.float32)}
    monkeypatch.setattr(module.programs, "state_layout", lambda run: (make, None))
    iteration = SimpleNamespace(begin=begin)
    monkeypatch.setattr(module.programs, "make_train_iteration", lambda run: iteration)
    monkeypatch.setattr(module, "frozen_params", lambda config, name: {"ref": ref}[name])
    monkeypatch.setattr(module, "value_start", lambda config, mesh: {"head": np.ones(3)})
    run = SimpleNamespace(networks={"ref": None}, value="one", mesh=None)
    run.config = SimpleNamespace(value=SimpleNamespace(path="DIR"))
    with pytest.raises(Begun):
        module._train(
            run, jax.random.split(jax.random.key(0)), SimpleNamespace(policies=jnp.ones(2))
        )
    (state,) = states
    assert state.frozen["ref"]["w"].shape == (2,)
    assert state.params["value"]["head"].shape == (3,)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 10, 50])
def test_the_interquartile_mean_is_the_trimmed_mean(size):
    import scipy.stats

    scores = np.random.default_rng(size).normal(size=size)
    assert interquartile_mean(scores) == pytest.approx(scipy.stats.trim_mean(scores, 0.25))


def test_an_outlier_does_not_move_it():
    assert interquartile_mean(np.array([0.4, 0.5, 0.6, 0.5, 99.0])) == pytest.approx(1.6 / 3)


@pytest.mark.parametrize(
    ("scores", "value", "low", "high"),
    [
        # What rliable 1.2.0 gives for the same scores, 50,000 resamples, 95 %.
        ([[0.1, 0.5], [0.2, 0.9], [0.4, 0.4], [0.3, 0.8], [0.9, 0.6]], 0.5, 0.35, 0.7333),
        ([[0.1], [0.2], [0.4], [0.3], [0.9], [0.35], [0.41]], 0.332, 0.21, 0.582),
    ],
)
def test_the_interval_is_that_of_rliable(scores, value, low, high):
    interval = stratified_interval(np.array(scores), seed=0, resamples=50_000)
    assert interval == pytest.approx((value, low, high), abs=0.02)  # the ends are on a grid


def test_runs_are_resampled_within_their_task():
    """Tasks that every run scores alike leave nothing uncertain, however far apart they are."""
    scores = np.array([[0.0, 1.0, 0.4]] * 4)
    assert stratified_interval(scores, seed=0).low == stratified_interval(scores, seed=0).high
    narrow = stratified_interval(np.array([[0.2], [0.4], [0.6], [0.8]]), seed=0, confidence=0.5)
    wide = stratified_interval(np.array([[0.2], [0.4], [0.6], [0.8]]), seed=0)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    lines = []
    # Methods without a value network compare with those that have one.
    config = load_config(None, [*TINY, "seed=3", "value.kind=network"])
    table = compare(
        config,
        methods=["rloo", "reinforce"],
        tasks=["sequence"],
        seeds=2,
        out=out,
        echo=lines.append,
    )
    return config, out, table, lines


def test_a_comparison_leaves_results_table_and_plot(small):
    _, out, table, lines = small
    rows = read_jsonl(out / "results.jsonl")
    assert [(r["task"], r["method"], r["seed"]) for r in rows] == [
        ("sequence", method, seed) for method in ("rloo", "reinforce") for seed in (3, 4)
    ]
    assert all(len(r["reward"]) == 2 and r["skipped_updates"] == 0 for r in rows)
    assert json.loads((out / "comparison.json").read_text()) == table
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "comparison.md").read_text()
    for name in ("rloo", "reinforce"):
        scores = [r["accuracy_after"] for r in rows if r["method"] == name]
        assert table["methods"][name]["sequence"]["value"] == pytest.approx(np.mean(scores))
        assert f"| {name} | {np.mean(scores):.3f} [" in text
    assert any("rloo" in line for line in lines)


def test_all_methods_begin_at_one_warm_start_and_see_the_same_problems(small):
    rows = read_jsonl(small[1] / "results.jsonl")
    by_method = {
        method: [(r["accuracy_before"], r["reward"][0]) for r in rows if r["method"] == method]
        for method in ("rloo", "reinforce")
    }
    assert (
        by_method["rloo"] == by_method["reinforce"]
    )  # the first rewards are those of the warm start
    assert by_method["rloo"][0] != by_method["rloo"][1]
    assert rows[0]["reward"][1] != rows[2]["reward"][1]


@pytest.mark.slow
def test_environments_are_compared_with_their_turns(tmp_path):
    changes = ["data={env='guess_number', numbers=4, turns=3}", "rewards={}", "warmup.steps=0"]
    compare(
        load_config(None, [*TINY, *changes]),
        methods=["gigpo", "ppo"],
        tasks=["guess_number", "bandit"],
        seeds=2,
        out=tmp_path / "out",
        echo=lambda line: None,
    )
    rows = read_jsonl(tmp_path / "out" / "results.jsonl")
    assert len(rows) == 8
    for row in rows:
        most = 3 if row["task"] == "guess_number" else 10  # options are those of the configuration
        assert 1 <= row["turns_after"] <= most
        assert 0 <= row["accuracy_after"] <= 1
    table = json.loads((tmp_path / "out" / "comparison.json").read_text())["methods"]
    for name, intervals in table.items():
        assert intervals["bandit, turns"] == {"value": 10, "low": 10, "high": 10}
        turns = [
            r["turns_after"] for r in rows if (r["task"], r["method"]) == ("guess_number", name)
        ]
        assert intervals["guess_number, turns"]["value"] == pytest.approx(np.mean(turns))
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "| method | all | guess_number | bandit | guess_number, turns | bandit, turns |" in text


def test_the_table_is_sorted_with_the_best_first(small, tmp_path):
    config = small[0]
    rows = [
        {"task": t, "method": m, "seed": s, "accuracy_before": 0.1, "accuracy_after": a + s / 100}
        | {"reward": [0.0, a]}
        for t in ("x", "y")
        for m, a in (("worse", 0.2), ("better", 0.6))
        for s in range(3)
    ]
    table = write_comparison(tmp_path, rows, config)
    assert list(table["methods"]) == ["better", "worse"]
    result = table["methods"]["better"]["all"]
    assert result["value"] == pytest.approx(0.61)
    assert result["low"] <= result["value"] <= result["high"]


def error_of(tmp_path, *changes, methods=("grpo",), tasks=("sequence",), seeds=2):
    with pytest.raises(UserError) as caught:
        compare(
            load_config(None, [*TINY, *changes]),
            methods=list(methods),
            tasks=list(tasks),
            seeds=seeds,
            out=tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_what_cannot_be_compared_is_refused_by_name_before_anything_runs(tmp_path):
    message = error_of(tmp_path, methods=("grpo", "deepsearch", "grbo"))
    assert "deepsearch: train.mode = 'compiled' does not go with" in message
    assert "grbo: " in message
    assert "grpo: " not in message
    assert "--methods grpo,grpo: name one or more, without repetition" in error_of(
        tmp_path, methods=("grpo", "grpo")
    )
    assert "--task sequence:hard; write NAME" in error_of(tmp_path, tasks=("sequence:hard",))
    assert "--seeds 1: an interval needs at least 2" in error_of(tmp_path, seeds=1)
    message = error_of(tmp_path, "objective.kl_ceof=0.1", methods=("grpo", "filtered_bc"))
    assert "filtered_bc: " in message
    assert "grpo: objective.kl_ceof = 0.1: grpo has no such coefficient" in message


def test_a_coefficient_is_for_the_methods_that_have_it():
    lines = ["objective.kl_coef=0.1", "objective.epochs=2", "objective.whiten=false"]
    config = load_config("configs/tiny.toml", lines)
    readers = coefficient_readers(config, ["grpo", "filtered_bc", "ppo"])
    assert readers == {
        "kl_coef": ["grpo", "ppo"],
        "epochs": ["grpo", "filtered_bc", "ppo"],
        "whiten": ["ppo"],
    }


def test_the_command_says_what_is_missing_and_keeps_what_is_there(small):
    config, out, *_ = small
    run = CliRunner().invoke(app, ["compare", str(config.run.dir), "--out", str(out)])
    assert run.exit_code == 2
    run = CliRunner().invoke(
        app, ["compare", "configs/tiny.toml", "--out", str(out), "data.task=", "data.difficulty="]
    )
    assert "data.task is missing; name tasks or environments with --task" in run.output
    run = CliRunner().invoke(app, ["compare", "configs/tiny.toml", "--out", str(out)])
    assert "already holds a comparison; name a new directory" in run.output


@pytest.mark.extra("plot")
def test_the_plot_of_many_methods_can_be_read(tmp_path, monkeypatch):
    """27 names that do not overlap, and rewards as rows: no legend of 27 colours."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    rng, names = np.random.default_rng(0), [f"a_rather_long_method_name_{i}" for i in range(27)]
    results = [
        {"task": task, "method": name, "seed": seed, "accuracy_before": 0.3}
        | {"accuracy_after": i / 30, "reward": rng.random(20).tolist(), "skipped_updates": 0}
        for task in ("sorting", "chain")
        for i, name in enumerate(names)
        for seed in range(2)
    ]
    config = load_config(None, TINY)
    write_comparison(tmp_path, results, config)
    write_comparison(tmp_path, [r for r in results if r["method"] in names[:5]], config)
    many, few = figures
    many.canvas.draw()
    labels = many.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == names[::-1]  # the best on top
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(a.y1 <= b.y0 + 1 for a, b in itertools.pairwise(boxes))
    assert not any(axis.get_legend() for axis in many.axes)
    pictures = [axis.images[0].get_array().shape for axis in many.axes if axis.images]
    assert pictures == [(27, 20), (27, 20)]
    # a legend for few, and lines
    assert [len(axis.lines) for axis in few.axes[1:]] == [5, 5]
    assert len(few.axes[-1].get_legend().get_texts()) == 5
