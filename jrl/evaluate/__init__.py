"""Evaluation: accuracy, pass@k and majority vote on held-out prompts, with confidence intervals.

- ``evaluate_run``, ``sample_run``: of a run's policy, as ``jrl eval`` and ``jrl sample``
- ``search_run``, ``budget_run``, ``searching``: with a search
- ``Evaluator``: beside training
- ``samples_of``: completions as records for people
"""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.evaluate.budget": ("budget_run",),
    "jrl.evaluate.evaluator": (
        *("Evaluation", "Evaluator", "evaluate_run", "evaluation_names", "load_policy"),
        *("sample_run",),
    ),
    "jrl.evaluate.samples": ("samples_of",),
    "jrl.evaluate.search": ("search_run",),
    "jrl.evaluate.searcher": ("searching",),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.evaluate.budget import budget_run as budget_run
    from jrl.evaluate.evaluator import Evaluation as Evaluation
    from jrl.evaluate.evaluator import Evaluator as Evaluator
    from jrl.evaluate.evaluator import evaluate_run as evaluate_run
    from jrl.evaluate.evaluator import evaluation_names as evaluation_names
    from jrl.evaluate.evaluator import load_policy as load_policy
    from jrl.evaluate.evaluator import sample_run as sample_run
    from jrl.evaluate.samples import samples_of as samples_of
    from jrl.evaluate.search import search_run as search_run
    from jrl.evaluate.searcher import searching as searching
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
