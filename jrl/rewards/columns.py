"""The forms of reward functions, distinguished by their argument names.

    def reward(samples, ...)                 # a list of ``Sample`` -> as many numbers
    def reward(completions, answer, ...)     # columns, the form of TRL's reward functions
    def compute_score(data_source, solution_str, ground_truth, extra_info=None)    # verl's
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos)     # its batches'
    def reward(completion, answer, ...)      # one completion -> a number, as in verifiers' rubrics

A function is of columns when it takes ``completions``, ``completion_ids`` or ``prompts`` by name,
or ``**columns`` and no ``samples``; verl's when it takes ``solution_str`` (or ``predict_str``,
``model_output``, ``response`` beside ``ground_truth``) or ``solution_strs``, the latter called once
for all samples of a step; verifiers' when it takes ``completion``, and is then called for
each sample with those of ``prompt``, ``completion``, ``answer``, ``task``, ``info`` (of columns of
these names), ``state`` (a dict of all these) and further columns that it
takes. Columns are lists of one length: ``prompts``,
``completions``, ``completion_ids`` (lists of token ids), ``answer`` (the reference answer),
``question`` where it is a text, and the further columns of the data by their names. Completions
are texts; where the data gives prompts as messages, or in episodes, they and the prompts are lists
of messages. A function of columns may take ``trainer_state``, whose ``global_step`` and
``max_steps`` say how far training is, and ``log_extra`` and ``log_metric``, which log nothing; in
``**columns`` these are where its code names them. Any function may be async, and any number may be
None: no opinion of that sample.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jrl.errors import UserError
from jrl.rewards.base import Points, Sample
from jrl.system.event_loop import run_coroutine

SIGNATURE = (
    "reward(samples) -> list of numbers, reward(completions, **columns) as in TRL, or"
    " compute_score(data_source, solution_str, ground_truth) as in verl, or reward(completion,"
    " answer) as in verifiers"
)
"""Call convention of a reward function, for messages and help."""

OWN_COLUMNS = ("prompts", "completions", "completion_ids")
_STATE = "trainer_state"
_TRAINERS = (_STATE, "log_extra", "log_metric")
"""Arguments that TRL's trainer passes besides columns."""
_VERL, _BATCH = "solution_str", "solution_strs"
_TEXTS = ("predict_str", "model_output", "response")
"""Other names of verl's solution, of NeMo RL's, too, where there is a ``ground_truth``."""
_ROLLOUT = "completion"
_ASSISTANT = "assistant"
_SAMPLES = "samples"
_ONE_AT_A_TIME = ("prompt", "response", "sample", "text")

Form = Literal["samples", "columns", "solution", "solutions", "rollout"]


def form_of(function: Callable[..., Any], key: str) -> Form:
    """The form of a reward function.

    Args:
      function: the reward function.
      key: what names it in the configuration, for messages.

    Raises:
      UserError: it has none of the forms.

    >>> form_of(lambda samples: [0.0], "reward"), form_of(lambda completions, **kw: [0.0], "reward")
    ('samples', 'columns')
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"{key}: the function yields; return a list of numbers")
    if isinstance(function, type):
        raise UserError(
            f"{key}: {function.__name__} is a class; name an object of it, such as"
            f" reward = {function.__name__}(), whose method __call__ takes the samples"
        )
    parameters = _parameters(function)
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if _VERL in names or ("ground_truth" in names and names.intersection(_TEXTS)):
        return "solution"
    if _BATCH in names:
        return "solutions"
    if names.intersection(OWN_COLUMNS):
        return "columns"
    if _ROLLOUT in names:
        return "rollout"
    if "environments" in names:
        raise UserError(
            f"{key}: the function takes environments, TRL's objects of its own rollouts; name the"
            " environment in data.env, which pays points itself, and read completions here"
        )
    # Columns of the data alone, as (level, **kwargs): given samples it would pay wrong points.
    if takes_all and not names.intersection((_SAMPLES, *_ONE_AT_A_TIME)):
        return "columns"
    first = next((p for p in parameters if p.kind is not p.KEYWORD_ONLY), None)
    if first is None or first.name in ("answer", *_ONE_AT_A_TIME):
        signature = f"({', '.join(str(p) for p in parameters)})"
        raise UserError(f"{key}: the function takes {signature}; write {SIGNATURE}")
    return "samples"


def reads_answer(function: Callable[..., Any], key: str) -> bool:
    """Whether a function needs the reference answer; one of samples may, whatever it does.

    Args:
      function: the reward function.
      key: what names it in the configuration, for messages.

    >>> reads_answer(lambda completions, **kw: [0.0], "reward"), reads_answer(len, "reward")
    (False, True)
    """
    if form_of(function, key) not in ("columns", "rollout"):
        return True
    required = {p.name for p in _parameters(function) if p.default is p.empty}
    return "answer" in required or "answer" in _constants(function)


def adapted(function: Callable[..., Any]) -> Callable[..., list[Points]]:
    """A function of samples that calls one of any form, async or not."""
    form = form_of(function, "reward")
    called = getattr(function, "__call__", None)  # noqa: B004, an object that is called may be async
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        function = functools.wraps(function)(functools.partial(_awaited, function))
    if form == "samples":
        return function
    on = {
        "columns": _on_columns,
        "solution": _on_solutions,
        "solutions": _on_batch,
        "rollout": _on_rollouts,
    }[form]
    adapted = functools.wraps(function)(functools.partial(on, function))
    if form == "solutions":
        adapted.over = getattr(function, "over", "batch")  # type: ignore[attr-defined]
    return adapted


def check_column(key: str, column: str, prompts: Sequence[Any]) -> None:
    """Raises UserError for a column that the prompts do not have, by the key that names it."""
    if column and not (prompts and any(column in prompt.meta for prompt in prompts)):
        columns = ", ".join(dict.fromkeys(n for prompt in prompts[:100] for n in prompt.meta))
        columns_note = f"there are {columns}" if columns else "there are none"
        raise UserError(f"{key} = {column!r}: the data has no such column; {columns_note}")


def check_columns(function: Callable[..., Any], columns: Iterable[str], key: str) -> None:
    """Raises UserError for an argument of a function on columns that the data has no column for.

    Args:
      function: of any form; one of samples is not looked at.
      columns: of the data, beside ``OWN_COLUMNS`` and "answer".
      key: what names the function in the configuration, for messages.
    """
    form = form_of(function, key)
    if form == "samples":
        return
    reserved = {
        "columns": (*OWN_COLUMNS, "answer"),
        "solution": tuple(_SOLUTION),
        "solutions": tuple(_SOLUTIONS),
        "rollout": (*_rollout(None), "state"),
    }[form]
    names = [*reserved, *columns]
    absent = [
        p.name
        for p in _parameters(function)
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in (*names, *_TRAINERS)
    ]
    if absent:
        raise UserError(
            f"{key}: the function takes {', '.join(absent)}, and the data has no such column;"
            f" there are {', '.join(dict.fromkeys(names))}{_of_samples(function, form)}"
        )


def _of_samples(function: Callable[..., Any], form: Form) -> str:
    """What to write in a function that may have been meant to take samples."""
    if form != "columns" or {p.name for p in _parameters(function)}.intersection(OWN_COLUMNS):
        return ""
    return f"; a function of samples names its first argument {_SAMPLES}"


def _awaited(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    return run_coroutine(function(*arguments, **keywords))


def _on_columns(
    function: Callable[..., list[Points]], samples: list[Sample], /, **options: Any
) -> list[Points]:
    """Calls a function on columns with those of the samples that it takes."""
    columns = _columns(samples) | options
    parameters = _parameters(function)
    names = {p.name for p in parameters}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        columns = {name: column for name, column in columns.items() if name in names}
    # only where they are read: older functions take all of **columns for lists
    read = [name for name in _TRAINERS if name in names or name in _constants(function)]
    return function(**columns | {name: _from_trainer(name, samples) for name in read})


def _from_trainer(name: str, samples: list[Sample]) -> Any:
    """Argument that TRL's trainer passes under a name."""
    if name != _STATE:
        return _logs_nothing
    first = samples[0] if samples else None
    steps = (first.step, first.steps) if first else (0, 0)
    return types.SimpleNamespace(global_step=steps[0], max_steps=steps[1])


def _logs_nothing(*values: Any, **named: Any) -> None:
    """Replacement for functions that log."""


def _constants(function: Any) -> tuple[Any, ...]:
    """The constants of a function's code, where it takes ``**columns``; () of others."""
    if not any(p.kind is p.VAR_KEYWORD for p in _parameters(function)):
        return ()
    while isinstance(function, functools.partial):
        function = function.args[0] if function.func is _awaited else function.func
    function = inspect.unwrap(function)  # a decorator's own code names nothing
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    return tuple(_constants_of(code))


def _constants_of(code: Any) -> Iterator[Any]:
    """The constants of code and of the functions and comprehensions in it."""
    for constant in getattr(code, "co_consts", ()):
        yield constant
        yield from _constants_of(constant)


def _columns(samples: list[Sample]) -> dict[str, Any]:
    names = dict.fromkeys(name for sample in samples for name in sample.prompt.meta)
    metas: list[Mapping[str, Any]] = [sample.prompt.meta for sample in samples]
    questions = [getattr(sample.prompt, "question", "") for sample in samples]
    question_column = {"question": questions} if any(questions) else {}
    return (
        question_column
        | {name: [meta.get(name) for meta in metas] for name in names}
        | {
            "answer": [sample.prompt.answer for sample in samples],
            "prompts": [_prompt(sample) for sample in samples],
            "completions": [_completion(sample) for sample in samples],
            "completion_ids": [list(map(int, sample.tokens)) for sample in samples],
        }
    )


def _prompt(sample: Sample) -> Any:
    if sample.prompt.messages:
        return list(map(dict, sample.prompt.messages))
    if sample.messages:
        return [{"role": "user", "content": sample.prompt.text}]
    return sample.prompt.text


def _completion(sample: Sample) -> Any:
    if sample.messages:
        return list(map(dict, sample.messages))
    if sample.prompt.messages:
        return [{"role": _ASSISTANT, "content": sample.completion}]
    return sample.completion


def _rollout(sample: Sample | None) -> dict[str, Any]:
    """Arguments of verifiers' reward functions from a sample, all but ``state``."""
    meta = sample.prompt.meta if sample else {}
    return {
        **meta,
        "prompt": _prompt(sample) if sample else None,
        _ROLLOUT: _completion(sample) if sample else None,
        "answer": sample.prompt.answer if sample else None,
        "task": meta.get("task", "default"),
        "info": meta.get("info") or {},
    }


def _on_rollouts(
    function: Callable[..., Points], samples: list[Sample], /, **options: Any
) -> list[Points]:
    """Calls verifiers' form once for each sample."""
    parameters = _parameters(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    points = []
    for sample in samples:
        fields = _rollout(sample)
        fields = {**fields, "state": dict(fields), **options}
        points.append(function(**{n: x for n, x in fields.items() if takes_all or n in names}))
    return points


_SOLUTION: dict[str, Callable[[Sample], Any]] = {
    "data_source": lambda sample: sample.prompt.meta.get("data_source"),
    **dict.fromkeys((_VERL, *_TEXTS), lambda sample: _response(sample)),
    "ground_truth": lambda sample: sample.prompt.answer,
    "extra_info": lambda sample: _extra_info(sample),
}
"""Arguments of verl's reward functions, from a sample."""


def _response(sample: Sample) -> str:
    """The completion; of an episode all that was said after the prompt, as verl decodes it."""
    if not sample.messages:
        return sample.completion
    return "\n".join(str(message["content"]) for message in sample.messages)


def _extra_info(sample: Sample) -> Any:
    """The row's ``extra_info`` and what verl's reward managers add to it.

    ``num_turns`` counts the prompt, the policy's turns and what came between them.
    """
    extra_info = sample.prompt.meta.get("extra_info") or {}
    if not isinstance(extra_info, Mapping):
        return extra_info
    roles = [message["role"] == _ASSISTANT for message in sample.messages] or [True]
    turns = 1 + sum(roles) + sum(not mine for mine, _ in itertools.groupby(roles))
    return {**extra_info, "num_turns": turns, "rollout_reward_scores": {}}


def _on_solutions(
    function: Callable[..., Any], samples: list[Sample], /, **options: Any
) -> list[Points]:
    """Calls verl's form once for each sample; see ``_score``."""
    parameters = _parameters(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    points = []
    for sample in samples:
        arguments = {**sample.prompt.meta, **{n: of(sample) for n, of in _SOLUTION.items()}}
        names = {p.name for p in parameters} | (set(_SOLUTION) - {*_TEXTS} if takes_all else set())
        arguments = {n: x for n, x in arguments.items() if n in names} | options
        points.append(_score(function(**arguments)))
    return points


_SOLUTIONS = {f"{name}s": of for name, of in _SOLUTION.items() if name not in _TEXTS}
"""Arguments of verl's functions of a batch, each a list."""


def _on_batch(
    function: Callable[..., Any], samples: list[Sample], /, **options: Any
) -> list[Points]:
    """Calls verl's form for a batch; see ``_score``."""
    if not samples:
        return []
    parameters = _parameters(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    lists = {n: [of(sample) for sample in samples] for n, of in _SOLUTIONS.items()}
    names = {p.name for p in parameters}
    values = function(**{n: x for n, x in lists.items() if takes_all or n in names} | options)
    return list(map(_score, values))


def _score(value: Any) -> Any:
    """The score in a value returned to verl: "score" of a dict, the first of several."""
    if isinstance(value, dict):
        return value["score"]
    return value[0] if isinstance(value, tuple | list) and value else value


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments of a function; those of a function that says nothing are any."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("samples", inspect.Parameter.POSITIONAL_ONLY)]
