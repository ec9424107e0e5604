"""Evaluation by the search that suits a problem's difficulty, under a budget of compute.

    jrl eval RUN --search compute_optimal --width 16

The compute-optimal scaling of "Can 1B LLM Surpass 405B LLM? Rethinking Compute-Optimal Test-Time
Scaling" (arXiv:2502.06703), with a search theta of ``COMPARED`` for the problem x:

    theta(x, N) = argmax over theta of the accuracy with a budget N on problems as difficult as x

Difficulty is the policy's accuracy in a first pass, in bins with absolute edges: hard, medium,
easy. All searches are played on all problems, and a problem's own is chosen by the others: two
halves of each bin choose for each other, the cross-validation of "Scaling LLM Test-Time Compute
Optimally can be More Effective than Scaling Model Parameters" (arXiv:2408.03314).

Searches go by a process reward model with ``by="model"``, as in the papers, and else by the
policy's likelihood. Departures: the first pass reads the answers, as both papers' does, so the
number says what a choice by difficulty is worth, not what a policy reaches that has to guess it.
The edges, a tenth and a half, are from memory.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jrl.config import Config
from jrl.episodes.search import Searched
from jrl.episodes.tree import SearchPlan, search_plan
from jrl.errors import UserError
from jrl.evaluate.evaluator import load_policy
from jrl.evaluate.search import problems_of, right_answers
from jrl.evaluate.searcher import search_once, searched_run
from jrl.evaluate.statistics import wilson
from jrl.evaluate.verifiers import LIKELIHOOD, verifier_of

COMPUTE_OPTIMAL = "compute_optimal"
"""Name of this evaluation in ``jrl eval --search``."""

COMPARED = ("best_of_n", "beam", "dvts", "puct")
"""The searches that are played; of ``episodes.tree.SEARCHES``."""
BINS = ("hard", "medium", "easy")
EDGES = (0.1, 0.5)
"""Accuracies from which on a problem is medium and easy."""
_FIRST = 8
"""Completions of a problem in the first pass."""


def difficulties(accuracy: np.ndarray) -> np.ndarray:
    """[N] int, the number of each problem's bin in ``BINS``.

    Args:
      accuracy: [N] float, the share of a problem's completions that are right.

    >>> difficulties(np.array([0.0, 0.1, 0.49, 0.5, 1.0])).tolist()
    [0, 1, 1, 2, 2]
    """
    return np.digitize(accuracy, EDGES)


def chosen_searches(right: np.ndarray, costs: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """[N] int: the search of each problem, chosen by the other half of its bin.

    A half has every second problem of the bin. The search that finds most answers of the other half
    is chosen, of equals the cheapest there; a problem alone in its bin is left to all others.

    Args:
      right: [S, N] bool, whether search s finds the answer of problem n.
      costs: [S, N] float, of each, in any unit.
      bins: [N] int.

    >>> right = np.array([[1, 1, 0, 0], [1, 0, 0, 1]], bool)
    >>> costs = np.array([[2.0] * 4, [1.0] * 4])
    >>> chosen_searches(right, costs, np.array([0, 0, 1, 1])).tolist()
    [0, 1, 1, 1]
    """
    half = np.zeros(len(bins), int)
    for each in np.unique(bins):
        half[bins == each] = np.arange((bins == each).sum()) % 2
    chosen = np.zeros(len(bins), int)
    for n in range(len(bins)):
        others = (bins == bins[n]) & (half != half[n])
        others = others if others.any() else np.arange(len(bins)) != n
        if not others.any():
            continue  # one problem: nobody chooses, and the first search is as good as any
        accuracy, spent = right[:, others].mean(axis=1), costs[:, others].mean(axis=1)
        chosen[n] = np.lexsort((spent, -accuracy))[0]
    return chosen


def plan_within(name: str, completions: int, longest: int) -> SearchPlan:
    """A search that draws about as many tokens as so many completions of the greatest length.

    "best_of_n" draws as many; the others have the square root of it as their width, as a level of
    theirs draws its square, and stop where the tokens are drawn.

    Args:
      name: of ``COMPARED``.
      completions: N, the budget.
      longest: the most tokens of a completion.
    """
    if name == "best_of_n":
        return search_plan(name, completions)
    plan = search_plan(name, max(math.isqrt(completions), 2), rounds=completions * longest)
    return plan._replace(tokens=completions * longest)


def budget_run(
    config: Config,
    *,
    completions: int = 16,
    step_tokens: int = 64,
    checkpoint: int | None = None,
    first: int = _FIRST,
    by: str = LIKELIHOOD,
    reduce: str = "last",
) -> dict[str, Any]:
    """Evaluates each search on a run's held-out problems, and the choice among them by difficulty.

    Args:
      config: a run's configuration.
      completions: N, the budget of a problem, completions of the greatest length.
      step_tokens: the most tokens of a step.
      checkpoint: a training step; None for the newest.
      first: completions of a problem in the first pass.
      by: as in ``evaluate.search.search_run``.
      reduce: as there.

    Returns:
      ``step``, ``problems``, the accuracy of the choice with its 95 % interval, "drawn_tokens" that
      it takes of a problem on average, without "first_tokens" of the first pass; for each search
      "NAME/accuracy" and "NAME/drawn_tokens"; and for each bin that has problems "BIN/problems" and
      "BIN/SEARCH", each search's accuracy there.

    Raises:
      UserError: episodes of environments, nothing to evaluate on, or a budget below 4.
    """
    if completions < 4:
        raise UserError(
            f"--width {completions}: --search {COMPUTE_OPTIMAL} needs a budget of at least 4 "
            "completions, for searches of width 2; raise it"
        )
    verifier = verifier_of(config, by, reduce)
    run = searched_run(config, max(completions, first), f"choice {COMPUTE_OPTIMAL}")
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        problems, prompts = problems_of(run, key, "eval")
        params, scorer = verifier(run, params, checkpoint)

        def play(plan: SearchPlan, attempt: int = 0) -> Searched:
            how = run, key, params, step, prompts, plan, scorer
            return search_once(*how, step_tokens=step_tokens, attempt=attempt)

        # Other tokens than those of best_of_n, whose luck would else choose its own bin.
        tried = play(search_plan("best_of_n", first), attempt=1)
        leaves = [(i, leaf) for i, tree in enumerate(tried.trees) for leaf in tree.leaves()]
        whose = np.array([i for i, _ in leaves])
        solved = right_answers(run, problems, prompts, tried, leaves)
        counts, hits = (np.bincount(whose, x, minlength=len(prompts)) for x in (None, solved))
        most = run.kind.new_tokens
        searches = [play(plan_within(name, completions, most)) for name in COMPARED]
        finds = [right_answers(run, problems, prompts, each) for each in searches]
    costs = [[cost.tokens for cost in each.costs] for each in searches]
    bins = difficulties(hits / np.maximum(counts, 1))
    first_tokens = float(np.mean([cost.tokens for cost in tried.costs]))
    summary = _summary(np.array(finds), np.array(costs, float), bins)
    return {"step": step, "first_tokens": first_tokens} | summary


def _summary(right: np.ndarray, costs: np.ndarray, bins: np.ndarray) -> dict[str, Any]:
    """Summary of ``budget_run`` from [S, N] hits and costs."""
    chosen = chosen_searches(right, costs, bins)
    mine = np.arange(len(bins))
    hits = right[chosen, mine]
    low, high = wilson(float(hits.sum()), len(hits))
    summary = {
        "problems": float(len(bins)),
        "accuracy": float(hits.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "drawn_tokens": float(costs[chosen, mine].mean()),
    }
    for s, name in enumerate(COMPARED):
        summary[f"{name}/accuracy"] = float(right[s].mean())
        summary[f"{name}/drawn_tokens"] = float(costs[s].mean())
    for b, name in enumerate(BINS):
        if (bins == b).any():
            summary[f"{name}/problems"] = float((bins == b).sum())
            for s, search in enumerate(COMPARED):
                summary[f"{name}/{search}"] = float(right[s, bins == b].mean())
    return summary
