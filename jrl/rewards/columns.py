"""The two forms of reward functions, distinguished by their argument names.

    def reward(samples, ...)                 # a list of ``Sample`` -> as many numbers
    def reward(completions, answer, ...)     # columns, the form of TRL's reward functions

A function is of columns when it takes ``completions``, ``completion_ids`` or ``prompts`` by name,
or nothing but ``**columns``. Columns are lists of one length: ``prompts``, ``completions`` (texts),
``completion_ids`` (lists of token ids), ``answer`` (the reference answer) and the further columns
of the data by their names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from jrl.errors import UserError
from jrl.rewards.base import Sample

SIGNATURE = "reward(samples) -> list of numbers, or reward(completions, **columns) as in TRL"
"""Call convention of a reward function, for messages and help."""

OWN_COLUMNS = ("prompts", "completions", "completion_ids")
_ONE_AT_A_TIME = ("answer", "completion", "prompt", "response", "sample", "text")

Form = Literal["samples", "columns"]


def form_of(function: Callable[..., Any], key: str) -> Form:
    """The form of a reward function.

    Args:
      function: the reward function.
      key: what names it in the configuration, for messages.

    Raises:
      UserError: it has neither form.

    >>> form_of(lambda samples: [0.0], "reward"), form_of(lambda completions, **kw: [0.0], "reward")
    ('samples', 'columns')
    """
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "is async" if inspect.iscoroutinefunction(function) else "yields"
        raise UserError(f"{key}: the function {kind}; return a list of numbers from a plain def")
    parameters = _parameters(function)
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if names.intersection(OWN_COLUMNS) or (takes_all and not names):
        return "columns"
    first = next((p for p in parameters if p.kind is not p.KEYWORD_ONLY), None)
    if first is None or first.name in _ONE_AT_A_TIME:
        signature = f"({', '.join(str(p) for p in parameters)})"
        raise UserError(f"{key}: the function takes {signature}; write {SIGNATURE}")
    return "samples"


def adapted(function: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """A function of samples that calls one of either form."""
    if form_of(function, "reward") == "samples":
        return function
    return functools.wraps(function)(functools.partial(_on_columns, function))


def check_columns(function: Callable[..., Any], columns: Iterable[str], key: str) -> None:
    """Raises UserError for an argument of a function on columns that the data has no column for.

    Args:
      function: of either form; one of samples is not looked at.
      columns: of the data, beside ``OWN_COLUMNS`` and "answer".
      key: what names the function in the configuration, for messages.
    """
    if form_of(function, key) == "samples":
        return
    names = [*OWN_COLUMNS, "answer", *columns]
    absent = [
        p.name
        for p in _parameters(function)
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in names
    ]
    if absent:
        raise UserError(
            f"{key}: the function takes {', '.join(absent)}, and the data has no such column;"
            f" there are {', '.join(dict.fromkeys(names))}"
        )


def _on_columns(
    function: Callable[..., list[float]], samples: list[Sample], **options: Any
) -> list[float]:
    """Calls a function on columns with those of the samples that it takes."""
    columns = _columns(samples) | options
    parameters = _parameters(function)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = {p.name for p in parameters}
        columns = {name: column for name, column in columns.items() if name in named}
    return function(**columns)


def _columns(samples: list[Sample]) -> dict[str, Any]:
    names = dict.fromkeys(name for sample in samples for name in sample.prompt.meta)
    metas: list[Mapping[str, Any]] = [sample.prompt.meta for sample in samples]
    return {name: [meta.get(name) for meta in metas] for name in names} | {
        "answer": [sample.prompt.answer for sample in samples],
        "prompts": [sample.prompt.text for sample in samples],
        "completions": [sample.completion for sample in samples],
        "completion_ids": [list(map(int, sample.tokens)) for sample in samples],
    }


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments of a function; those of a function that says nothing are any."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("samples", inspect.Parameter.POSITIONAL_ONLY)]
