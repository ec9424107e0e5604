"""Objectives as values: advantage, surrogate, aggregate and regularizers, and their two readers.

Read ``policy.py`` first: it shows where each part is applied. Nothing here sees parameters or
tokens' text.
"""

from jrl.objectives.policy import (
    combine_terms,
    compute_advantages,
    policy_loss,
    term_counts,
    update_state,
)

__all__ = [
    "combine_terms",
    "compute_advantages",
    "policy_loss",
    "term_counts",
    "update_state",
]
