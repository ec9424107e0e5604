"""Procedural tasks: problems generated and judged on the device, without files."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jrl.data.tasks.base import SPLITS, Problem, Task
from jrl.data.tasks.countdown import countdown
from jrl.data.tasks.numbers import arithmetic, chain, sequence, sorting
from jrl.errors import UserError, unknown_choice
from jrl.user_code import FORMS, check_options, load, made_by

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": arithmetic,
    "chain": chain,
    "countdown": countdown,
    "sequence": sequence,
    "sorting": sorting,
}
"""Task constructors by name; each takes ``difficulty`` and options of its own."""


def get_task(name: str, /, **options: Any) -> Task:
    """The task of that name.

    Args:
      name: a key of ``TASKS``, or a function of one's own as ``FILE.py:function`` or
        ``module:function``.
      **options: arguments of its constructor, such as ``difficulty``.

    Returns:
      The Task; the same one for the same options of a task of ``TASKS``.

    Raises:
      UserError: no task has that name, an option is unknown or out of range, or a function of one's
        own returns something else.
    """
    if ":" not in name and name not in TASKS:
        raise UserError(f"{unknown_choice('data.task', name, TASKS)}, {FORMS}")
    make = load(name, "data.task") if ":" in name else TASKS[name]
    check_options(make, options, "data")
    if name in TASKS and all(isinstance(value, (int, str)) for value in options.values()):
        return _shipped(name, **options)
    task = made_by(make, f"data.task = {name!r}", **options)
    if not isinstance(task, Task):
        raise UserError(f"data.task = {name!r} returned {task!r:.40}; return a jrl.data.Task")
    return task


@functools.lru_cache(maxsize=32, typed=True)
def _shipped(name: str, /, **options: int | str) -> Task:
    """One of ``TASKS``, made once in a process: to find a problem of each split takes a program."""
    return made_by(TASKS[name], f"data.task = {name!r}", **options)


__all__ = [
    "SPLITS",
    "TASKS",
    "Problem",
    "Task",
    "arithmetic",
    "chain",
    "countdown",
    "get_task",
    "sequence",
    "sorting",
]
