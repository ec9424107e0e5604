"""Evaluation by search: what it finds, what it costs, and what it refuses."""

import pytest

from jrl.config_io import load_config
from jrl.errors import UserError
from jrl.evaluate_search import search_run

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


def test_what_cannot_be_searched_is_named():
    with pytest.raises(UserError, match="search = 'bream'; did you mean 'beam'"):
        search_run(tiny(), "bream")
    env = load_config("configs/gridworld.toml", ["mesh.fsdp=1"])
    with pytest.raises(UserError, match="--search: episodes in an environment are not searched"):
        search_run(env, "beam")
