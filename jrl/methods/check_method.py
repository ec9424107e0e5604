"""Checks of a method's parts before anything compiles: their types and signatures."""

from __future__ import annotations

from typing import Any

from jrl.errors import UserError, unknown_choice
from jrl.methods.base import Method
from jrl.methods.curriculum import Between, Curriculum
from jrl.methods.edit import Edit
from jrl.methods.plan import Plan
from jrl.methods.schedule import Schedule
from jrl.types import Objective, Regularizer, Surrogate, Transform
from jrl.user_code import check_function

_RECORDS: dict[str, type] = {
    "objective": Objective,
    "objective.advantage": Transform,
    "objective.surrogate": Surrogate,
    "schedule": Schedule,
    "plan": Plan,
}
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "objective.advantage.init": (),
    "objective.advantage.apply": ("advantages", "batch", "state"),
    "objective.surrogate.apply": ("stats", "advantages", "mask"),
    "objective.aggregate": ("losses", "mask"),
    "rewards": ("groups", "view"),
    "plan.first": ("asks", "view"),
    "plan.next": ("groups", "view"),
    "plan.members": ("group",),
    "plan.prompts": ("prompts",),
    "network": ("network",),
}
"""Arguments by position; ``plan.next`` may be None."""
_LISTS: dict[str, tuple[type, dict[str, tuple[str, ...]]]] = {
    "objective.regularizers": (Regularizer, {"value": ("stats", "mask"), "coef": ("state",)}),
    "edits": (
        Edit,
        {
            "init": ("shapes", "prompts"),
            "apply": ("state", "groups", "view"),
            "extra": ("prompts",),
        },
    ),
}
_CURRICULUM = {"init": ("table",), "choose": ("state", "query"), "update": ("state", "outcome")}
_BETWEEN = {"run": ("state", "tools"), "counts": ("state",)}
_TOOLS = ("draw", "write", "estimate")


def check_method(method: Method, key: str) -> Method:
    """The method, where every part is of its type and takes its arguments.

    Args:
      method: a method of one's own, or a published one.
      key: that names it, for messages.

    Raises:
      UserError: names the part, and what would do.
    """
    for name, record in _RECORDS.items():
        if not isinstance(value := _part(method, name), record):
            raise UserError(f"{key}: {name} = {value!r:.40}; must be a {_public(record)}")
    for name, arguments in _FUNCTIONS.items():
        value, optional = _part(method, name), name == "plan.next"
        if value is not None or not optional:
            check_function(value, arguments, f"{key}: {name}", optional)
    for name, (record, functions) in _LISTS.items():
        values = _part(method, name)
        if not isinstance(values, tuple) or not all(isinstance(x, record) for x in values):
            raise UserError(f"{key}: {name} = {values!r:.60}; must be a tuple of {_public(record)}")
        for i, value in enumerate(values):
            for function, arguments in functions.items():
                at = f"{key}: {name}[{i}].{function}"
                check_function(getattr(value, function), arguments, at)
    if (curriculum := method.curriculum) is None:
        return method
    if not isinstance(curriculum, Curriculum):
        raise UserError(
            f"{key}: curriculum = {curriculum!r:.40}; must be a {_public(Curriculum)} or None"
        )
    for name, arguments in _CURRICULUM.items():
        check_function(getattr(curriculum, name), arguments, f"{key}: curriculum.{name}")
    if curriculum.between is not None:
        _check_between(curriculum.between, f"{key}: curriculum.between")
    return method


def _check_between(between: Any, key: str) -> None:
    if not isinstance(between, Between):
        raise UserError(f"{key} = {between!r:.40}; must be a {_public(Between)} or None")
    for name, arguments in _BETWEEN.items():
        check_function(getattr(between, name), arguments, f"{key}.{name}")
    every = between.every
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UserError(f"{key}.every = {every!r:.40}; must be a number of steps, at least 1")
    if not isinstance(between.uses, frozenset | set | tuple | list):
        raise UserError(
            f"{key}.uses = {between.uses!r:.40}; must be a frozenset of {', '.join(_TOOLS)}"
        )
    for name in between.uses:
        if name not in _TOOLS:
            raise unknown_choice(f"{key}.uses", name, _TOOLS)


def _part(method: Method, name: str) -> Any:
    value: Any = method
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _public(record: type) -> str:
    """The name under which users import a record."""
    package = "types" if record.__module__.startswith("jrl.types") else "methods"
    return f"jrl.{package}.{record.__name__}"
