"""Data: prompts and judged completions from files and TFDS, and procedural tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.data.pairs": ("pairs_of_samples",),
    "jrl.data.tasks": ("Problem", "SPLITS", "TASKS", "Task", "get_task"),
    "jrl.data.tasks.base": ("DIGIT_0", "ARROW", "check_range", "integers", "make_task"),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.data.pairs import pairs_of_samples as pairs_of_samples
    from jrl.data.tasks import SPLITS as SPLITS
    from jrl.data.tasks import TASKS as TASKS
    from jrl.data.tasks import Problem as Problem
    from jrl.data.tasks import Task as Task
    from jrl.data.tasks import get_task as get_task
    from jrl.data.tasks.base import ARROW as ARROW
    from jrl.data.tasks.base import DIGIT_0 as DIGIT_0
    from jrl.data.tasks.base import check_range as check_range
    from jrl.data.tasks.base import integers as integers
    from jrl.data.tasks.base import make_task as make_task
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
