"""Reward functions of one's own on procedural tasks: beside the task's parts, and alone."""

from types import SimpleNamespace

import numpy as np
import pytest
from judge_server import judge_server

from jrl.collect.reward_stages import JudgedParts
from jrl.collect.sources import Groups
from jrl.config import load_config
from jrl.errors import UserError
from jrl.rewards.combine import make_combined
from jrl.run import run as running
from jrl.run.run import train
from jrl.setup.reward_parts import parts_of
from jrl.storage.metrics import read_jsonl
from jrl.train import build
from jrl.train.trainable import check_trainable
from jrl.types import SILENT, StopReason

REWARDS = """
def right(samples):
    return [float(s.completion == s.prompt.answer) for s in samples]


def length(completions, prompts, completion_ids, **columns):
    assert all(prompt.endswith(">") for prompt in prompts)
    return [float(len(completion)) for completion in completions]


def first(samples):
    return [[float(t)] + [0.0] * (len(s.tokens) - 1) for s in samples for t in s.tokens[:1]]


def last(samples):
    return [first(samples)[0][::-1] for s in samples]
"""
RUN = (
    *("data.task=sorting", "data.difficulty=3", "train.prompts=4", "sampling.group=4"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("train.steps=2", "checkpoint.every=0", "eval.problems=4", "log.samples_every=1"),
    *("warmup={steps=60, batch=64, learning_rate=1e-2}", "reward_pool.workers=0"),
)


def rewards(place, *names, **more):
    tables = {f"{place / 'mine.py'}:{name}": "{weight=0.5}" for name in names}
    tables |= more
    inside = ", ".join(f'"{name}"={table}' for name, table in tables.items())
    return f"rewards={{{inside}}}"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def test_who_gives_a_part(place):
    tables = rewards(
        place, "right", partial="{}", verify="{}", both="{combine='sum', of=['verify']}"
    )
    parts = parts_of(load_config(None, [*RUN, tables]))
    assert parts.given_by("data") == ("partial", "verify")
    assert parts.given_by("function") == (f"{place / 'mine.py'}:right",)
    assert parts.given_by("combined") == ("both",)
    assert parts.weights["verify"] == 0  # it counts within the sum
    alone = parts_of(load_config(None, [*RUN, rewards(place, "right")]))
    assert alone.given_by("data") == ()


def test_own_points_stand_beside_the_task_s(place):
    """The function that compares texts gives the points of the checker on the device."""
    lines = []

    def compares(body, number):
        completion, _, answer = body["messages"][-1]["content"].partition("|")
        return f"Verdict: {'yes' if completion == answer else 'no'}"

    with judge_server(compares) as (url, _):
        judge = "function='judge', model='m', form='yes_no', template='{completion}|{reference}'"
        parts = {
            **{"partial": "{weight=2.0}", "verify": "{}"},
            "judged": f"{{{judge}, url='{url}', weight=0}}",
        }
        config = load_config(None, [*RUN, rewards(place, "right", "length", **parts), run(place)])
        train(config, echo=lines.append)
    records = read_jsonl(place / "run" / "metrics.jsonl")[1:]
    right, length = (f"reward/{place / 'mine.py'}:{name}" for name in ("right", "length"))
    for record in records:
        assert record[right] == record["reward/verify"] == record["reward/judged"]
        assert 0 < record[length] <= 4
        total = 0.5 * record[right] + 0.5 * record[length] + record["reward/verify"]
        assert record["reward"] == pytest.approx(total + 2 * record["reward/partial"])
    samples = [s for s in read_jsonl(place / "run" / "samples.jsonl") if "split" not in s]
    assert any(s["rewards"]["verify"] for s in samples)
    for sample in samples:
        assert sample["rewards"][right[7:]] == sample["rewards"]["verify"]
        assert sample["rewards"][length[7:]] == len(sample["completion"])
    assert any("reward = 0.5 * right + 0.5 * length + 2 * partial + verify" in x for x in lines)


def run(place):
    return f"run.dir={place / 'run'}"


def test_alone_they_are_the_whole_reward(place):
    config = load_config(None, [*RUN, rewards(place, "length"), run(place), "train.steps=1"])
    summary = train(config, echo=lambda line: None)
    (record,) = read_jsonl(place / "run" / "metrics.jsonl")[1:]
    assert record["reward"] == pytest.approx(0.5 * record[f"reward/{place / 'mine.py'}:length"])
    assert "reward/verify" not in record
    assert summary["accuracy_after"] is not None  # by the task's own checker


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_points_by_token_count_where_they_are_paid(place, method):
    """For PPO a number at the first token and at the last are two things; for GRPO they are one."""
    losses = []
    for name in ("first", "last"):
        tables = rewards(place, **{f"{place / 'mine.py'}:{name}": "{by_token=true}"})
        where = [f"run.dir={place / name}", f"method={method}", "train.steps=1", "warmup.steps=0"]
        train(load_config(None, [*RUN, tables, *where]), echo=lambda line: None)
        (record,) = read_jsonl(place / name / "metrics.jsonl")[1:]
        losses.append((record["reward"], record["loss"]))
    (first, loss), (last, other) = losses
    assert first == last != 0
    assert (loss == other) is (method == "grpo")


def test_parts_of_parts_in_one_program_are_those_of_the_host(place):
    tables = rewards(
        place, partial="{}", verify="{}", both="{combine='gate', of=['verify', 'partial']}"
    )
    curves = []
    for mode in ("host", "compiled"):
        where = f"run.dir={place / mode}"
        config = load_config(
            None, [*RUN, tables, where, f"train.mode={mode}", "log.samples_every=0"]
        )
        train(config, echo=lambda line: None)
        curves.append(read_jsonl(place / mode / "metrics.jsonl")[1:])
    for mine, theirs in zip(*curves, strict=True):
        for name in ("reward", "reward/both", "reward/partial", "loss"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6)
        assert mine["reward"] == mine["reward/both"] <= mine["reward/partial"]


def test_what_cannot_be_is_said(place):
    compiled = load_config(None, [*RUN, rewards(place, "right"), "train.mode=compiled"])
    with pytest.raises(
        UserError,
        match=r"go with rewards.*mine.py:right: it judges on the host.*set train.mode to 'host'",
    ):
        check_trainable(build.setup(compiled))
    judge = "rewards={verify={}, good={function='judge', url='http://127.0.0.1:1', model='m'}}"
    compiled = load_config(None, [*RUN, judge, "train.mode=compiled"])
    with pytest.raises(UserError, match=r"\[rewards.good\]: it is asked on the host"):
        check_trainable(build.setup(compiled))
    with pytest.raises(UserError, match=r"rewards = 'verfy'; did you mean 'verify'.*FILE.py"):
        build.setup(load_config(None, [*RUN, "rewards={verfy={}}"]))
    (place / "mine.py").write_text("def level(completions, level):\n    return [0.0]\n")
    config = load_config(None, [*RUN, rewards(place, "level"), run(place)])
    with pytest.raises(UserError, match="takes level, and the data has no such column"):
        train(config, echo=lambda line: None)
    assert not (place / "run").exists()


def test_a_broken_number_of_the_data_does_not_pass_for_silence():
    """NaN of a part that always has an opinion stays NaN, in what is made of it, too."""
    stop = np.full((1, 3), StopReason.STOP_TOKEN, np.int32)
    rollout = SimpleNamespace(stop=stop, baseline=np.zeros((1, 3), bool))
    paid = np.array([[[1.0], [np.nan], [3.0]]], np.float32)
    sampled = Groups(rollout, paid, [], {}, {})
    source = SimpleNamespace(draw=lambda request: sampled)

    def stage(groups, points, step):
        return groups, {"judged": np.array([[0.5, 0.5, np.nan]], np.float32)}

    both = make_combined("both", "sum", ["paid", "judged"], {})
    names = ["paid", "judged", "both"]
    parts = JudgedParts(source, ["paid"], [stage], names, [both], certain=["paid"])
    groups = parts.draw(SimpleNamespace(step=0, weights={}))
    nan = np.nan
    expected = [[[1.0, 0.5, 1.5], [nan, nan, nan], [3.0, 0.0, 3.0]]]
    np.testing.assert_array_equal(groups.rewards, np.array(expected, np.float32))
    assert groups.ids[SILENT].tolist() == [[0, 0, 2]]
