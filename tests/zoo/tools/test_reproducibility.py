"""Dependence of results on batch, mesh and dtype: the measures by hand, and a run."""

import itertools
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.config import load_config
from jrl.errors import UserError
from jrl.zoo.tools.reproducibility import (
    Sampled,
    Setting,
    compare,
    first_difference,
    measure_drift,
    movement,
)

RUN = (
    "data.task=sorting",
    "model.config={layers=2, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    "seed=5",
)


@pytest.mark.parametrize(
    ("rows", "index"),
    [
        ([[1, 2, 3], [1, 2, 3]], None),
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2, 3], [1, 2, 3], [7, 2, 3]], 0),
        ([[1, 2], [1, 2, 3]], 2),
        ([[1, 2], [1, 2], [1]], 1),
        ([[], []], None),
        ([[], [4]], 0),
    ],
    ids=str,
)
def test_divergence(rows, index):
    assert first_difference([np.array(row, np.int32) for row in rows]) == index


def sample(tokens, logprobs, points):
    return Sampled(np.array(tokens), np.array(logprobs), points)


def test_movement_by_hand():
    """Two problems under three settings; the second diverges at its second token."""
    runs = [
        [sample([4, 1], [-0.1, -0.2], 1), sample([5, 6, 1], [-1.0, -2.0, -0.5], 1)],
        [sample([4, 1], [-0.3, -0.2], 1), sample([5, 7, 8, 1], [-1.5, -2.0, -0.5, -0.1], 0)],
        [sample([4, 1], [-0.2, -0.2], 1), sample([5, 6, 1], [-1.1, -2.0, -0.5], 1)],
    ]
    measured = movement(runs)
    deviation = lambda *x: np.std(x, ddof=1)  # noqa: E731
    expected = {
        "accuracy": (1 + 0.5 + 1) / 3,
        "accuracy_std": deviation(1, 0.5, 1),
        "length_std": (0 + deviation(3, 4, 3)) / 2,
        "diverged": 0.5,
        "divergence_index": 1,
        "probability_std": (
            deviation(*np.exp([-0.1, -0.3, -0.2])) / 2 + deviation(*np.exp([-1.0, -1.5, -1.1]))
        )
        / 2,
        "logprob_std": (deviation(-0.1, -0.3, -0.2) / 2 + deviation(-1.0, -1.5, -1.1)) / 2,
        "logprob_most": 0.5,
    }
    assert measured == pytest.approx(expected)
    same = movement([runs[0], runs[0]])
    assert same["divergence_index"] is None
    assert {k: v for k, v in same.items() if k.endswith("std")} == pytest.approx(
        dict.fromkeys(("accuracy_std", "length_std", "probability_std", "logprob_std"), 0)
    )
    diverged = movement([[sample([4], [-1.0], 0)], [sample([5], [-1.0], 0)]])
    assert (diverged["diverged"], diverged["probability_std"], diverged["logprob_most"]) == (
        1,
        None,
        None,
    )


def test_each_part_of_a_setting_is_compared_alone_and_together():
    """The completion tells its setting, so that what was compared can be read from the result."""
    lengths = {1: 1, 8: 2, "data=1": 0, "tensor=2": 10, "float32": 100, "bfloat16": 400}
    results = {
        Setting(*each): [sample([0] * sum(lengths[x] for x in each), [0.0], 0)]
        for each in itertools.product((1, 8), ("data=1", "tensor=2"), ("bfloat16", "float32"))
    }
    for setting, run in results.items():
        size = len(run[0].tokens)
        results[setting] = [sample(run[0].tokens, np.zeros(size), 0)]
    rows_by_setting = {(row["varies"], row["dtype"]): row for row in compare(results)}
    std = lambda *x: pytest.approx(np.std(x, ddof=1))  # noqa: E731
    for dtype in ("bfloat16", "float32"):
        assert rows_by_setting["batch", dtype]["length_std"] == std(1, 2)
        assert rows_by_setting["mesh", dtype]["length_std"] == std(1, 11)
        assert rows_by_setting["batch, mesh", dtype]["length_std"] == std(1, 2, 11, 12)
        assert rows_by_setting["batch, mesh", dtype]["settings"] == 4
    assert rows_by_setting["dtype", None]["length_std"] == std(401, 101)
    assert len(rows_by_setting) == 7


def check_movement(measured, varies, settings):
    for kind in ("greedy", "sampled"):
        rows_by_setting = {(row["varies"], row["dtype"]): row for row in measured[kind]}
        exact, rough = (rows_by_setting[varies, dtype] for dtype in ("float32", "bfloat16"))
        assert exact["logprob_most"] < 1e-5
        assert exact["diverged"] == 0
        if "mesh" in varies:  # parts of a sum that are rounded before they are added
            assert rough["logprob_std"] > 20 * exact["logprob_std"]
        assert rows_by_setting["dtype", None]["logprob_std"] > 1e-4
        assert all(0 <= row["accuracy"] <= 1 for row in rows_by_setting.values())
    assert len(measured["settings"]) == settings


SMALL = (*RUN, "model.param_dtype=bfloat16", "model.dtype=bfloat16")
"""Of this run the command's defaults are batches of 1 and 8, in bfloat16 and float32."""


def test_a_run_moves_with_dtype_and_not_with_batch():
    result = CliRunner().invoke(app, ["drift", *SMALL, "--problems", "3", "--json"])
    assert result.exit_code == 0, result.output
    measured = json.loads(result.output)
    assert measured["problems"] == 3
    assert [(e["batch"], e["dtype"]) for e in measured["settings"]] == [
        *((1, "bfloat16"), (8, "bfloat16"), (1, "float32"), (8, "float32"))
    ]
    check_movement(measured, "batch", 4)


@pytest.mark.slow
def test_float32_moves_far_less_with_the_mesh_too():
    meshes = ("data=1", "tensor=2")
    settings = {
        "batches": (1, 3),
        "meshes": meshes,
        "dtypes": ("bfloat16", "float32"),
        "problems": 5,
    }
    check_movement(measure_drift(load_config(None, SMALL), **settings), "batch, mesh", 8)


def test_the_command_prints_a_table(monkeypatch):
    row = {"varies": "batch", "dtype": None, "settings": 2, "accuracy": 0.5, "diverged": None}
    result = {"step": 7, "problems": 3, "greedy": [row], "sampled": [row, row], "settings": []}
    calls = []
    monkeypatch.setattr(
        "jrl.zoo.tools.reproducibility.measure_drift",
        lambda config, **options: calls.append(options) or result,
    )
    more = ["--batch", "2", "--mesh", "tensor=2", "--dtype", "bfloat16", "--checkpoint", "4"]
    printed = CliRunner().invoke(app, ["drift", *RUN, *more])
    assert printed.exit_code == 0, printed.output
    assert printed.output.splitlines() == [
        "greedy completions of 3 problems, step 7",
        "  varies  dtype  settings  accuracy  diverged",
        "  batch   -      2         0.5       -",
        "sampled completions of 3 problems, step 7",
        "  varies  dtype  settings  accuracy  diverged",
        "  batch   -      2         0.5       -",
        "  batch   -      2         0.5       -",
    ]
    assert calls == [
        {
            "batches": [2],
            "meshes": ["tensor=2"],
            "dtypes": ["bfloat16"],
            "problems": 32,
            "checkpoint": 4,
        }
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": (4,)}, "one setting has nothing to be compared with"),
        ({"dtypes": ("float8",)}, "--dtype = 'float8'"),
        ({"meshes": ("tensr=2",)}, "--mesh 'tensr=2': 'tensr=2' must be AXIS=DEVICES"),
        ({"meshes": ("tensor=0",)}, "'tensor=0' must be AXIS=DEVICES"),
        ({"meshes": ("tensor=9",)}, "tensor = 9 needs 9 devices"),
        ({"meshes": ("",)}, "must be AXIS=DEVICES"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(changes, message):
    settings = {"batches": (1, 2), "meshes": (), "dtypes": ("float32",), "problems": 2}
    with pytest.raises(UserError, match=message):
        measure_drift(load_config(None, RUN), **settings | changes)


def test_episodes_are_refused():
    config = load_config(None, ["data.env=nim", *RUN[1:]])
    with pytest.raises(UserError, match="episodes are not measured"):
        measure_drift(config, batches=(1, 2), meshes=(), dtypes=("float32",), problems=2)
