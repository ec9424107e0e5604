"""Several runs on one page: means with intervals over seeds, and what differs between them."""

import json
import math
import re

import numpy as np
import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.report.overlay import mean_curve, write_overlay
from jrl.report.page import Curve
from jrl.storage.metrics import RunWriter


def make_run(directory, rewards, *overrides):
    config = load_config(None, [f'run.dir="{directory}"', *overrides])
    writer = RunWriter(config)
    for step, reward in enumerate(rewards, 1):
        writer.write(step, {"reward": reward, "loss": 1.0, "extra": 3.0})
    writer.close()
    return directory


def read(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def test_runs_that_differ_by_their_seed_are_one_curve_with_an_interval(tmp_path):
    rewards = [[1.0, 2.0, 4.0], [3.0, 2.0, 8.0], [2.0, 5.0, 6.0]]
    runs = [make_run(tmp_path / f"a{i}", r, f"seed={i}") for i, r in enumerate(rewards)]
    other = make_run(tmp_path / "b", [0.0, 0.5], "method=rloo", "optimizer.learning_rate=1e-3")
    page = write_overlay([*runs, other])
    assert page == runs[0] / "report" / "overlay.html"
    data = read(page)
    assert [run["runs"] for run in data["runs"]] == [["a0", "a1", "a2"], ["b"]]
    assert data["runs"][1]["label"] == "method rloo, learning_rate 0.001"
    rates = ["optimizer.learning_rate", 1e-6, 0.001]
    assert data["differences"] == [["method", "grpo", "rloo"], rates]
    mean, single = (c for c in data["curves"] if c["name"] == "reward")
    assert (mean["run"], single["run"]) == (0, 1)
    values = np.array(rewards)
    assert mean["values"] == pytest.approx(values.mean(0).tolist())
    half = 4.302652729911275 * values.std(0, ddof=1) / math.sqrt(3)  # t of 2 degrees, 0.975
    assert mean["high"] == pytest.approx((values.mean(0) + half).tolist())
    assert mean["low"] == pytest.approx((values.mean(0) - half).tolist())
    assert (single["values"], single["low"]) == ([0.0, 0.5], [])
    assert [c["name"] for c in data["others"]] == ["extra", "extra"]


def test_seeds_alone_and_where_to_write(tmp_path):
    runs = [make_run(tmp_path / f"r{i}", [1.0, 2.0], f"seed={i}") for i in range(2)]
    page = write_overlay(runs, tmp_path / "new" / "both.html")
    data = read(page)
    assert data["differences"] == []
    assert [run["label"] for run in data["runs"]] == ["2 seeds"]


def test_runs_of_other_steps_meet_where_they_can():
    one = Curve("a", "A", [1, 2, 3], [1.0, 2.0, 3.0], [], [])
    two = Curve("a", "A", [2, 3, 4], [4.0, 5.0, 6.0], [0.0] * 3, [9.0] * 3)
    mean = mean_curve([one, two])
    assert (mean.steps, mean.values, mean.title) == ([2, 3], [3.0, 4.0], "A")
    ends = zip(mean.low, mean.values, mean.high, strict=True)
    assert all(low < value < high for low, value, high in ends)


def test_bad_input(tmp_path):
    run = make_run(tmp_path / "run", [1.0])
    with pytest.raises(UserError, match="name two or more different runs"):
        write_overlay([run])
    with pytest.raises(UserError, match="name two or more different runs"):
        write_overlay([run, tmp_path / "x" / ".." / "run"])
    with pytest.raises(UserError, match="is not a run directory"):
        write_overlay([run, tmp_path / "none"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the page cannot be written"):
        write_overlay([run, make_run(tmp_path / "b", [1.0])], tmp_path / "file" / "page.html")
