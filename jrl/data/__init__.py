"""Data: prompts and judged completions from files and TFDS, and procedural tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.data.tasks": ("SPLITS", "TASKS", "Problem", "Task", "get_task"),
    "jrl.data.tasks.base": ("make_task",),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.data.tasks import SPLITS as SPLITS
    from jrl.data.tasks import TASKS as TASKS
    from jrl.data.tasks import Problem as Problem
    from jrl.data.tasks import Task as Task
    from jrl.data.tasks import get_task as get_task
    from jrl.data.tasks.base import make_task as make_task
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
