"""Reward functions of text. Imports no JAX, as the pool's worker processes import it."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jrl.errors import UserError, unknown_choice
from jrl.rewards import agreement, matching, shaping, tool_calls
from jrl.rewards.base import Points, RewardFn, Sample, whole_batch, whole_group
from jrl.rewards.columns import SIGNATURE, adapted, form_of
from jrl.rewards.combine import Columns
from jrl.rewards.exact import exact_reward
from jrl.rewards.format import confidence, format_reward
from jrl.rewards.instructions import instructions
from jrl.rewards.math import math_reward
from jrl.user_code import FORMS, PYTHON_PREFIX, check_options, load, parameters_of

if TYPE_CHECKING:
    from jrl.rewards.verdicts import Form as Form
    from jrl.rewards.verdicts import Question as Question
    from jrl.rewards.verdicts import question as question

_LATER = {"Form": "verdicts", "Question": "verdicts", "question": "verdicts"}
"""Public names of judges, imported on first use: worker processes do not read configurations."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"jrl.rewards.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without those that the module imports."""
    return sorted(__all__)


REWARDS: dict[str, Callable[..., Any]] = {
    # of an answer
    "math": math_reward,
    "exact": exact_reward,
    "accuracy": shaping.accuracy,
    "reasoning_accuracy": shaping.reasoning_accuracy,
    "multiple_choice": matching.multiple_choice,
    "exact_match": matching.exact_match,
    "contains": matching.contains,
    "f1": matching.f1,
    "confidence": confidence,
    # of the form
    "format": format_reward,
    "think_format": shaping.think_format,
    "tag_count": shaping.tag_count,
    "reasoning_steps": shaping.reasoning_steps,
    "reflection": shaping.reflection,
    "instructions": instructions,
    "language": shaping.language,
    # of the length
    "soft_overlong": shaping.soft_overlong,
    "ended": shaping.ended,
    "cosine_length": shaping.cosine_length,
    "length_in_group": shaping.length_in_group,
    "repetition": shaping.repetition,
    # of a group, without an answer
    "majority": agreement.majority,
    "answer_share": agreement.answer_share,
    "semantic_entropy": agreement.semantic_entropy,
    "new_answer": agreement.new_answer,
    "new_ngrams": agreement.new_ngrams,
    "tool_calls": tool_calls.tool_calls,
    "tools_used": tool_calls.tools_used,
}
"""The library's own reward functions by name."""

ANSWERLESS = frozenset({"format", "think_format", "tag_count", "reasoning_steps", "reflection"}) | {
    *("language", "soft_overlong", "ended", "repetition", "majority"),
    *("answer_share", "semantic_entropy", "new_answer", "new_ngrams", "tools_used"),
    *("think_format_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"),
}
"""Those that never read the reference answer, so that rows may lack it."""

_ZOO, _CRITICS = "jrl.zoo.rewards.functions", "jrl.zoo.rewards.critics"
PUBLISHED = {
    "chain_length": f"{_ZOO}:chain_length",
    "code_speed": "jrl.zoo.rewards.speed:code_speed",
    "convsearch": f"{_ZOO}:convsearch",
    "darling": "jrl.zoo.rewards.diversity:darling",
    "demonstration_similarity": f"{_ZOO}:demonstration_similarity",
    "dynamic_iou": f"{_ZOO}:dynamic_iou",
    "fapo_critic": f"{_CRITICS}:fapo_critic",
    "judge_verdict": f"{_CRITICS}:judge_verdict",
    "listwise_agreement": f"{_CRITICS}:listwise_agreement",
    "listed_solution": f"{_ZOO}:listed_solution",
    "r3": f"{_ZOO}:r3",
    "rank_fidelity": f"{_ZOO}:rank_fidelity",
    "srpo": f"{_CRITICS}:srpo",
    "toolrl": f"{_ZOO}:toolrl",
}
"""Reward functions of one paper each, by name."""
_TRL = (
    *("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"),
    *("get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"),
)
_VERL = (
    *("default_compute_score", "geo3k", "gsm8k", "math_batch", "math_dapo", "math_reward"),
    *("math_verify", "prime_code", "prime_math", "sandbox_fusion", "search_r1_like_qa_em"),
)
OTHER_NAMES = {name: f"jrl.zoo.rewards.trl:{name}" for name in _TRL} | {
    name: f"jrl.zoo.rewards.verl:{name}" for name in _VERL
}
"""Reward functions by the names that scripts for TRL and verl use."""
RUNNING = {
    "code": "jrl.verifiers.code:code",
    "sql": "jrl.verifiers.sql:sql",
    "sql_syntax": "jrl.verifiers.sql:sql_syntax",
    "sql_schema": "jrl.verifiers.sql:sql_schema",
    "sql_ngrams": "jrl.verifiers.sql:sql_ngrams",
    "json_schema": "jrl.verifiers.json_schema:json_schema",
    "lean": "jrl.verifiers.lean:lean",
    "reasoning_gym": "jrl.zoo.rewards.reasoning_gym:reasoning_gym",
}
"""Reward functions that run something, by name; they stand above the sandbox of episodes."""
FROM_COLUMNS = frozenset({*RUNNING, "instructions", "code_speed", "prime_code", "sandbox_fusion"})
"""Those that read columns of the data, and say themselves what a row lacks."""
FUNCTION_NAMES = (*REWARDS, *RUNNING, *PUBLISHED, *OTHER_NAMES)
"""The names that ``[rewards]`` knows, functions of one's own aside."""


def _nothing() -> None:
    """Does nothing, for functions without ``prepare``."""


class UserReward:
    """A reward function named "FILE.py:function" or "module:function".

    Each process that calls it loads it by name, so it can be sent to a worker although its file is
    on no import path.

    Args:
      spec: the function's name.
      options: its keyword arguments.
    """

    def __init__(self, spec: str, options: dict[str, Any]) -> None:
        self.spec, self.options = spec, options
        self.over = getattr(self._function(), "over", "sample")

    def _function(self) -> Callable[..., list[Points]]:
        return adapted(load(self.spec, "rewards"))

    def prepare(self) -> None:
        """Loads the function, and calls its own ``prepare``; once in each process that calls it."""
        getattr(self._function(), "prepare", _nothing)()

    def __call__(self, samples: list[Sample]) -> list[Points]:
        """Calls the function."""
        return self._function()(samples, **self.options)


def make_reward(name: str, key: str = "", /, **options: Any) -> RewardFn:
    """A reward function with its options bound.

    Args:
      name: one of ``FUNCTION_NAMES``, "FILE.py:function", or "module:function". A function of one's
        own has one of the forms of ``jrl.rewards.columns``.
      key: the table of the configuration that holds the options, for messages; "" for that of the
        function's name.
      **options: further arguments of the function.

    Returns:
      A function of samples; it can be sent to a worker process.

    Raises:
      UserError: no such function, one of another form, or an option that it does not have.
    """
    if ":" not in name and name not in FUNCTION_NAMES:
        raise UserError(
            f"{unknown_choice('rewards', name, FUNCTION_NAMES)}, {FORMS}, a function {SIGNATURE}"
        )
    key, ours = key or f"rewards.{name}", name in FUNCTION_NAMES
    name = {**RUNNING, **PUBLISHED, **OTHER_NAMES}.get(name, name)
    function = load(name, "rewards") if ":" in name else REWARDS[name]
    samples = form_of(function, key) == "samples"
    _check_no_slip(function, options, key)
    # in the other forms an argument may be a column, which the data has or not
    check_options(function, options, key, first=int(samples), all_given=samples)
    if ours:
        function([], **options)  # says what is wrong with the options
    if ":" not in name:
        return functools.partial(function, **options)
    if name.startswith(PYTHON_PREFIX):  # a worker process could not find it by this name
        return functools.partial(adapted(function), **options)
    return UserReward(name, options)


def _check_no_slip(function: Callable[..., Any], options: dict[str, Any], key: str) -> None:
    """Raises UserError for a misspelt key, which ``**kwargs`` would take in silence."""
    unknown = options.keys() - parameters_of(function, f"[{key}]").keys()
    if not unknown:
        return
    from jrl.config.tables import RewardTable  # with pydantic, which workers do without

    for name in sorted(unknown):
        if near := difflib.get_close_matches(name, RewardTable.model_fields, n=1, cutoff=0.8):
            raise UserError(
                f"{key}.{name} = {options[name]!r}; did you mean {key}.{near[0]}? If it is an"
                " option of the function, write it as an argument"
            )


__all__ = [
    "FUNCTION_NAMES",
    "REWARDS",
    "RUNNING",
    "Columns",
    "Form",
    "Question",
    "RewardFn",
    "Sample",
    "UserReward",
    "confidence",
    "exact_reward",
    "format_reward",
    "make_reward",
    "math_reward",
    "question",
    "whole_batch",
    "whole_group",
]
