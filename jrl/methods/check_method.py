"""Checks of a method's parts before anything compiles: their types and signatures."""

from __future__ import annotations

from typing import Any

import numpy as np

from jrl.errors import UserError, unknown_choice
from jrl.methods.base import Method, Needs
from jrl.methods.curriculum import Between, Curriculum
from jrl.methods.edit import Edit
from jrl.methods.plan import Plan, dry_view
from jrl.methods.schedule import Schedule
from jrl.types import Objective, Regularizer, Surrogate, Transform
from jrl.types.asks import Ask, new_ask
from jrl.user_code import check_function, made_by

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
    _check_statistics(method.objective, key)
    _check_needs(method.needs, key)
    _check_plan(method.plan, key)
    _check_number(method.schedule.epochs, f"{key}: schedule.epochs", 1)
    if (curriculum := method.curriculum) is None:
        return method
    if not isinstance(curriculum, Curriculum):
        raise UserError(
            f"{key}: curriculum = {curriculum!r:.40}; must be a {_public(Curriculum)} or None"
        )
    _check_number(curriculum.pool, f"{key}: curriculum.pool", 1)
    for name, arguments in _CURRICULUM.items():
        check_function(getattr(curriculum, name), arguments, f"{key}: curriculum.{name}")
    if curriculum.between is not None:
        _check_between(curriculum.between, f"{key}: curriculum.between")
    return method


def _check_number(value: Any, key: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{key} = {value!r:.40}; must be a whole number, at least {least}")


def _check_needs(needs: Any, key: str) -> None:
    """Raises UserError for what no run can have."""
    if not isinstance(needs, Needs):
        raise UserError(f"{key}: needs = {needs!r:.40}; write with_(group=2) or with_(parts=...)")
    _check_number(needs.group, f"{key}: needs.group", 1)
    if not isinstance(needs.parts, tuple) or not all(isinstance(x, str) for x in needs.parts):
        raise UserError(
            f"{key}: needs.parts = {needs.parts!r:.60}; must be a tuple of reward parts, such as"
            ' ("format", "answer")'
        )


def _check_statistics(objective: Objective, key: str) -> None:
    """Raises UserError for ``needs`` that are no sets of names, such as one name alone."""
    if (over := objective.surrogate.over) not in ("group", "sequence"):
        raise unknown_choice(f"{key}: objective.surrogate.over", over, ("group", "sequence"))
    parts: dict[str, Any] = {"advantage": objective.advantage, "surrogate": objective.surrogate}
    parts |= {f"regularizers[{i}]": part for i, part in enumerate(objective.regularizers)}
    for name, part in parts.items():
        needs = part.needs
        if not isinstance(needs, frozenset | set) or not all(isinstance(x, str) for x in needs):
            raise UserError(
                f"{key}: objective.{name}.needs = {needs!r:.60}; must be a frozenset of names, such"
                ' as frozenset({"ref_logprobs"})'
            )


def _check_plan(plan: Plan, key: str) -> None:
    """Raises UserError for bounds that are no numbers, and for further rounds of which none is."""
    _check_number(plan.rounds, f"{key}: plan.rounds", 0)
    _check_number(plan.tokens, f"{key}: plan.tokens", 0)
    for name in ("members", "prompts"):
        _check_number(made_by(getattr(plan, name), key, 8), f"{key}: plan.{name}(8)", 0)
    one = np.zeros(1, np.int32)
    asks = made_by(plan.first, key, (new_ask(one, one, 1, tree=plan.tree),), dry_view())
    if not isinstance(asks, tuple) or not all(isinstance(ask, Ask) for ask in asks):
        raise UserError(
            f"{key}: plan.first returned {asks!r:.60}; return a tuple of asks, such as"
            " (*asks, also(asks, 1))"
        )
    if plan.next is not None and not plan.rounds:
        raise UserError(
            f"{key}: plan.next is never called, as plan.rounds = 0; set the most rounds"
        )


def _check_between(between: Any, key: str) -> None:
    if not isinstance(between, Between):
        raise UserError(f"{key} = {between!r:.40}; must be a {_public(Between)} or None")
    for name, arguments in _BETWEEN.items():
        check_function(getattr(between, name), arguments, f"{key}.{name}")
    _check_number(between.every, f"{key}.every", 1)
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
