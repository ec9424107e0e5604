"""Evaluation: accuracy, pass@k and majority vote on held-out prompts, with confidence intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.evaluate.budget": ("budget_run",),
    "jrl.evaluate.evaluator": (
        *("Evaluation", "Evaluator", "environment_metrics", "episode_metrics", "evaluate_run"),
        *("evaluation_names", "load_policy", "sample_run"),
    ),
    "jrl.evaluate.samples": ("samples_of",),
    "jrl.evaluate.search": ("search_run",),
    "jrl.evaluate.searcher": ("searching",),
    "jrl.evaluate.statistics": ("evaluation_metrics", "majority_vote", "pass_at_k", "wilson"),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.evaluate.budget import budget_run as budget_run
    from jrl.evaluate.evaluator import Evaluation as Evaluation
    from jrl.evaluate.evaluator import Evaluator as Evaluator
    from jrl.evaluate.evaluator import environment_metrics as environment_metrics
    from jrl.evaluate.evaluator import episode_metrics as episode_metrics
    from jrl.evaluate.evaluator import evaluate_run as evaluate_run
    from jrl.evaluate.evaluator import evaluation_names as evaluation_names
    from jrl.evaluate.evaluator import load_policy as load_policy
    from jrl.evaluate.evaluator import sample_run as sample_run
    from jrl.evaluate.samples import samples_of as samples_of
    from jrl.evaluate.search import search_run as search_run
    from jrl.evaluate.searcher import searching as searching
    from jrl.evaluate.statistics import evaluation_metrics as evaluation_metrics
    from jrl.evaluate.statistics import majority_vote as majority_vote
    from jrl.evaluate.statistics import pass_at_k as pass_at_k
    from jrl.evaluate.statistics import wilson as wilson
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
