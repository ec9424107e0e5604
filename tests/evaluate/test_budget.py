"""The search that suits a problem's difficulty: the choice, budgets, and a whole evaluation."""

import numpy as np
import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.evaluate.budget import COMPARED, budget_run, chosen_searches, plan_within

TINY = [
    "data.difficulty=3",
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=1, head_dim=8, mlp_dim=16}",
    "eval.problems=6",
    "warmup.steps=0",
    "mesh.fsdp=1",
]


def test_the_choice_by_difficulty_by_hand():
    """Search 0 is good at the easy problems, search 1 at the hard ones, at twice the cost."""
    bins = np.array([2, 0, 2, 0, 2, 0, 1])
    right = np.array([bins == 2, bins == 0])
    costs = np.array([[10.0] * 7, [20.0] * 7])
    chosen = chosen_searches(right, costs, bins)
    assert chosen[:6].tolist() == [0, 1, 0, 1, 0, 1]
    assert chosen[6] == 0  # alone in its bin: all others have 3 of 6 either way, and 0 is cheaper
    assert right[chosen, np.arange(7)].tolist() == [True] * 6 + [False]
    assert right.mean(axis=1).max() < right[chosen, np.arange(7)].mean()


def test_a_problem_does_not_choose_its_own_search():
    """Luck that only one half of a bin has is not what that half is measured by."""
    right = np.array([[1, 0, 1, 0], [0, 1, 0, 1]], bool)
    chosen = chosen_searches(right, np.ones((2, 4)), np.zeros(4, int))
    assert chosen.tolist() == [1, 0, 1, 0]
    assert not right[chosen, np.arange(4)].any()
    assert chosen_searches(right[:, :1], np.ones((2, 1)), np.zeros(1, int)).tolist() == [0]


@pytest.mark.parametrize(("name", "width"), [("best_of_n", 16), ("beam", 4), ("puct", 4)])
def test_plans_of_one_budget(name, width):
    plan = plan_within(name, 16, 10)
    assert (plan.width, plan.tokens) == (width, 0 if name == "best_of_n" else 160)


def test_a_policy_is_evaluated_under_a_budget(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    config = load_config("configs/tiny.toml", TINY)
    summary = budget_run(config, completions=4, step_tokens=1, first=4)
    assert summary["problems"] == 6
    assert 0 <= summary["accuracy_low"] <= summary["accuracy"] <= summary["accuracy_high"] <= 1
    assert 4 <= summary["first_tokens"] <= 16
    token_counts = [summary[f"{name}/drawn_tokens"] for name in COMPARED]
    assert min(token_counts) <= summary["drawn_tokens"] <= max(token_counts)
    assert all(tokens <= 4 * 4 + 3 for tokens in token_counts)  # a round may end above the budget
    bins = {
        name: n for name in ("hard", "medium", "easy") if (n := summary.get(f"{name}/problems"))
    }
    assert sum(bins.values()) == 6
    for search in COMPARED:
        share = sum(n * summary[f"{name}/{search}"] for name, n in bins.items()) / 6
        assert share == pytest.approx(summary[f"{search}/accuracy"])
    with pytest.raises(UserError, match="--width 3: --search compute_optimal needs a budget of at"):
        budget_run(config, completions=3)
