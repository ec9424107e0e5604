"""Evaluation by search: what it finds, what it costs, and what it refuses."""

import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.evaluate_search import search_run
from jrl.metrics import read_jsonl
from jrl.train import loop
from jrl.train.frozen import run_task
from jrl.train.loop import train

TINY = [
    "data.difficulty=3",
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=1, head_dim=8, mlp_dim=16}",
    "eval.problems=6",
    "warmup.steps=0",
    "mesh.fsdp=1",
]


def tiny(*more):
    return load_config("configs/tiny.toml", [*TINY, *more])


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize(("name", "expansions"), [("best_of_n", 1.0), ("dvts", None)])
def test_a_policy_is_evaluated_with_a_search(name, expansions):
    found = search_run(tiny(), name, width=2, step_tokens=1)
    assert found["problems"] == 6
    assert 0 <= found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"] <= 1
    assert found["steps"] == 2 * found["expansions"]
    assert found["drawn_tokens"] >= found["steps"]
    assert found["read_tokens"] > 0
    if expansions:
        assert found["expansions"] == expansions
    assert search_run(tiny(), name, width=2, step_tokens=1) == found


def test_a_search_leaves_rows_to_train_on(tmp_path):
    rows = search_run(tiny(), "mcts", width=2, step_tokens=1, rounds=9, out=str(tmp_path / "rows"))
    files = {
        name: read_jsonl(tmp_path / "rows" / f"{name}.jsonl") for name in ("siblings", "paths")
    }
    assert {name: len(listed) for name, listed in files.items()} == {n: rows[n] for n in files}
    assert files["paths"]
    task = run_task(tiny())
    for row in files["paths"]:
        for response, score, values in zip(
            row["responses"], row["scores"], row["step_values"], strict=True
        ):
            digits = sorted(row["prompt"][:3])  # sorting: digits, then a separator
            assert (response == [*digits, task.stop_id]) == (score == 1)
            assert values[-1] == score


def test_a_run_trains_on_the_rows_of_a_search(tmp_path, monkeypatch):
    """Rows of a policy that is right now and then: preferences of siblings, values of steps."""
    monkeypatch.setattr(loop, "write_report", lambda directory: directory)
    more = ("warmup={steps=40, learning_rate=1e-2}", "train.steps=0", "eval.problems=16")
    run = tiny(*more, f"run.dir={tmp_path / 'run'}")
    train(run, echo=lambda line: None)
    rows = search_run(run, "mcts", width=3, step_tokens=1, rounds=40, out=str(tmp_path))
    assert rows["siblings"] > 2
    for name, method in (("siblings", "mcts_dpo"), ("paths", "prm"), ("paths", "alphamath")):
        pairs = load_config(
            None,
            [
                *("data.task=sorting", TINY[0], TINY[1], f"data.pairs={tmp_path}/{name}.jsonl"),
                *(f"method={method}", "train.steps=3", "train.prompts=2", "checkpoint.every=0"),
                f"run.dir={tmp_path / method}",
            ],
        )
        said = []
        train(pairs, echo=said.append)
        assert not [line for line in said if "the objective alone" in line] or method == "alphamath"
        records = read_jsonl(tmp_path / method / "metrics.jsonl")[1:]
        assert [r["step"] for r in records] == [1, 2, 3]
        assert all(r["grad_norm"] > 0 for r in records)


def test_what_cannot_be_searched_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out .*file: File exists; name a directory"):
        search_run(tiny(), "beam", out=str(tmp_path / "file"))
    with pytest.raises(UserError, match="search = 'bream'; did you mean 'beam'"):
        search_run(tiny(), "bream")
    env = load_config("configs/gridworld.toml", ["mesh.fsdp=1"])
    with pytest.raises(UserError, match="--search: episodes in an environment are not searched"):
        search_run(env, "beam")
