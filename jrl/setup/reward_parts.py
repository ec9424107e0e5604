"""The reward parts of a run: the giver of each, combinations, and weights.

    parts = parts_of(config)              # names, weights, combinations; no weights of models
    pool = reward_pool(config)            # the functions on the host
    source = JudgedParts(source, ...)     # a source whose groups have the points of all parts

The giver of a part is the data (a task, an environment, records), a function on the host, a reward
model, a judge, the policy's likelihood, or a combination of other parts (``rewards.combine``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

from jrl.config import Config
from jrl.config.judge import TOKEN_FORMS, JudgeTable, checked
from jrl.config.likelihood import LIKELIHOOD, LikelihoodTable
from jrl.config.reward_model import (
    MODEL_NAMES,
    PUBLISHED_MODELS,
    RewardModelTable,
)
from jrl.config.secrets import reveal
from jrl.config.tables import RewardTable
from jrl.errors import Mistakes, UserError, nearest, unknown_choice
from jrl.rewards import FUNCTION_NAMES, make_reward
from jrl.rewards.combine import COMBINATORS, Combined, in_order, make_combined
from jrl.rewards.model import JudgeModel, ModelReward
from jrl.rewards.pool import RewardPool
from jrl.rewards.rules import Rules
from jrl.rewards.text_models import TextModel
from jrl.types import NOTHING
from jrl.user_code import FORMS, load

SUCCESS = "success"
"""The reward part that is 1 for an episode that its environment calls a success."""

MOST_PARTS = 31
"""Most reward parts of a run: the label ``SILENT`` has a bit for each."""

JUDGE = "judge"
"""``function`` of a part that is a judge, a language model that scores (``config.judge``)."""

Giver = Literal["data", "function", "model", "judge", "likelihood", "combined"]


class RunRewards(NamedTuple):
    """The reward parts of a run.

    Attributes:
      weights: reward part -> weight, all parts in the order of the rewards' columns.
      givers: reward part -> what computes it.
      combined: the parts computed from others, in an order in which they can be computed.
      accuracy_part: the reward part that defines accuracy; "" if there is none.
      models: reward models that read the policy's tokens, by reward part.
      text_models: reward models that read text with a tokenizer of their own, by reward part.
      judges: language models that score on the run's devices, except the policy, by reward part.
    """

    weights: dict[str, float]
    givers: Mapping[str, Giver] = NOTHING
    combined: tuple[Combined, ...] = ()
    accuracy_part: str = ""
    models: Mapping[str, ModelReward] = NOTHING
    text_models: Mapping[str, TextModel] = NOTHING
    judges: Mapping[str, JudgeModel] = NOTHING

    @property
    def accuracy_column(self) -> int | None:
        """The column of ``accuracy_part``; None if there is none."""
        names = list(self.weights)
        return names.index(self.accuracy_part) if self.accuracy_part in names else None

    def given_by(self, giver: Giver) -> tuple[str, ...]:
        """The names of the parts of a giver."""
        return tuple(name for name in self.weights if self.givers.get(name, "data") == giver)


def parts_of(config: Config) -> RunRewards:
    """The reward parts of a run, before their models are loaded.

    Raises:
      UserError: a part that these data do not have, or a combination that cannot be computed.
    """
    tables = reward_tables(config)
    mistakes = Mistakes()
    givers = {name: mistakes.look(partial(_giver, config, name)) for name in tables}
    combined = [
        mistakes.look(partial(_combined, name, table, tables))
        for name, table in tables.items()
        if table.combine is not None
    ]
    mistakes.check()
    for name in (n for n, table in tables.items() if table.by_token):
        if givers[name] != "function":
            raise UserError(
                f"rewards.{name}.by_token = true: only reward functions give numbers by token, and"
                f" this part is given otherwise ({givers[name]}); remove it"
            )
    read = {name for part in combined for name in part.of}
    weights = {
        name: float(name not in read) if table.weight is None else table.weight
        for name, table in tables.items()
    }
    if len(tables) > MOST_PARTS:
        raise UserError(f"[rewards] has {len(tables)} parts; {MOST_PARTS} are the most")
    return RunRewards(weights, givers, tuple(in_order(combined)))


def reward_tables(config: Config) -> dict[str, RewardTable]:
    """The tables of the reward parts; those of the data's own parts where a run names none."""
    defaults = config.data.default_rewards.items()
    return dict(config.rewards) or {name: RewardTable(weight=w) for name, w in defaults}


def parts_by_token(config: Config) -> dict[str, str]:
    """Parts that may give a number per token -> the key that makes them so."""
    tables = config.rewards.items()
    keys = {name: f"rewards.{name}.by_token" for name, table in tables if table.by_token}
    parts = parts_of(config)
    forms = {name: judge_of(config, name).form for name in parts.given_by("judge")}
    named = {n: f"rewards.{n}.form = {form!r}" for n, form in forms.items() if form in TOKEN_FORMS}
    gains = parts_of(config).given_by("likelihood")
    by_turn = [n for n in gains if likelihood_of(config, n).by == "turn"]
    turns = {n: f'rewards.{n}.by = "turn"' for n in by_turn}
    return keys | named | turns | parts_by_step(config)


def parts_by_step(config: Config) -> dict[str, str]:
    """Parts of reward models that score steps -> the key that makes them so."""
    models = parts_of(config).given_by("model")
    by = {name: model_of_part(config, name).by for name in models}
    return {n: f"rewards.{n}.by = {x!r}" for n, x in by.items() if x in ("step", "progress")}


def function_of(name: str, table: RewardTable) -> str:
    """The name of a part's reward function."""
    return name if table.function is None else table.function


def _giver(config: Config, name: str) -> Giver:
    data, table = config.data, reward_tables(config)[name]
    function = function_of(name, table)
    _check_keys(name, table)
    if table.combine is not None:
        return "combined"
    if (scorer := _SCORERS.get(function)) is not None:
        _check_scorer(name, config, scorer)
        return scorer
    known = ":" in function or function in FUNCTION_NAMES
    if (giver := data.giver(name, function, known=known)) is None:
        error = unknown_choice("rewards", function, data.reward_names)
        raise UserError(f"{error}, {FORMS}") if data.own_rewards else error
    if name in data.reward_names and function != name:
        raise UserError(
            f"rewards.{name}: {data.kind} gives {name!r} itself; name the part of function ="
            f" {function!r} otherwise"
        )
    if name in data.reward_names and (options := table.options):
        option, value = next(iter(options.items()))
        raise UserError(
            f"rewards.{name}.{option} = {value!r}: there is no such option;"
            f" {nearest(option, RewardTable.model_fields)}"
        )
    return giver


def _check_keys(name: str, table: RewardTable) -> None:
    """Raises UserError for keys of a part that say nothing beside one another."""
    key = f"rewards.{name}"
    if table.over is not None and ":" not in function_of(name, table):
        raise UserError(
            f"{key}.over = {table.over!r}: functions of the library know what they are called with"
            "; remove it"
        )
    if table.with_prompt and ":" not in function_of(name, table):
        raise UserError(
            f"{key}.with_prompt = true: only functions of your own read the prompt there; remove it"
        )
    if table.combine is None and table.of:
        choices = ", ".join(COMBINATORS)
        raise UserError(f"{key}.of = {table.of} without {key}.combine; set it to one of {choices}")
    if table.combine is not None:
        for other in ("function", "range", "where"):
            if value := getattr(table, other):
                raise UserError(
                    f"{key}.{other} = {value!r} with {key}.combine; set it in the parts that are"
                    " combined"
                )
    if table.range is not None and not table.range[0] < table.range[1]:
        raise UserError(f"{key}.range = {table.range}; give the least number, then the greatest")


def judge_of(config: Config, name: str) -> JudgeTable:
    """The keys of a part that a judge gives.

    Raises:
      UserError: a line for each mistake, which names the key.
    """
    key = f"rewards.{name}"
    return checked(JudgeTable, key, reveal(reward_tables(config)[name].options, key))


def likelihood_of(config: Config, name: str) -> LikelihoodTable:
    """The keys of a part that is the policy's probability of the answer.

    Raises:
      UserError: a line for each mistake, which names the key.
    """
    key = f"rewards.{name}"
    return checked(LikelihoodTable, key, reveal(reward_tables(config)[name].options, key))


def model_of_part(config: Config, name: str) -> RewardModelTable:
    """The keys of a part that a reward model gives.

    Raises:
      UserError: a line for each mistake, which names the key.
    """
    key, part = f"rewards.{name}", reward_tables(config)[name]
    spec = PUBLISHED_MODELS.get(function_of(name, part))
    keys = {} if spec is None else load(spec, key)()
    return checked(RewardModelTable, key, keys | reveal(part.options, key))


_SCORERS: Mapping[str, Giver] = {
    **dict.fromkeys(MODEL_NAMES, "model"),
    JUDGE: "judge",
    LIKELIHOOD: "likelihood",
}
"""Function of a part that a model scores -> who gives it."""
_UNBOUNDED: Mapping[Giver, str] = {
    "model": "a reward model's numbers have no limits; remove it, or bound them by a part with"
    ' combine = "clip"',
    "judge": "a judge's points are within [0, 1]; remove it",
    "likelihood": "probabilities are within [0, 1]; remove it",
}
"""Giver -> the reason that its numbers take no range."""


def _check_scorer(name: str, config: Config, giver: Giver) -> None:
    """Raises UserError for keys of a part that a model scores which nothing reads."""
    tables, key = reward_tables(config), f"rewards.{name}"
    part, only = tables[name], ""
    if giver == "model":
        model_of_part(config, name)
    elif giver == "judge":
        only = judge_of(config, name).only
    else:
        likelihood_of(config, name)
        if part.missing == "drop":
            raise UserError(f'{key}.missing = "drop": a sample stays in its group; set "zero"')
    if part.range is not None:
        raise UserError(f"{key}.range = {part.range}: {_UNBOUNDED[giver]}")
    later = (JUDGE, LIKELIHOOD)
    earlier = [n for n, t in tables.items() if function_of(n, t) not in later and not t.combine]
    if only and only not in earlier:
        raise unknown_choice(f"{key}.only", only, earlier)


def _combined(name: str, table: RewardTable, tables: Mapping[str, RewardTable]) -> Combined:
    for other in table.of:
        if other not in tables or other == name:
            others = [n for n in tables if n != name]
            raise unknown_choice(f"rewards.{name}.of", other, others)
    options = reveal(table.options, f"rewards.{name}")
    return make_combined(name, table.combine or "", table.of, options)


def accuracy_part(config: Config, eval_parts: Mapping[str, float]) -> str:
    """The reward part that accuracy is measured by.

    That with ``judge = true``; else the one that compares answers; else the first.

    Args:
      config: of the run.
      eval_parts: of its kind of data: reward parts of an evaluation; empty for the run's own.

    Raises:
      UserError: one was chosen that cannot, or there is none.
    """
    tables, parts = reward_tables(config), parts_of(config)
    chosen = next((name for name, part in tables.items() if part.judge), None)
    # A reward model says which of two is better, not what is right.
    unsure = ("model", "likelihood")
    names = [*eval_parts][:1] or [n for n in parts.weights if parts.givers[n] not in unsure]
    if chosen is not None:
        if chosen not in names:
            raise UserError(
                f"rewards.{chosen}.judge = true: accuracy is measured by {' or '.join(names)} here;"
                " remove it"
            )
        return chosen
    if not names:
        if getattr(config.data, "eval", None) is not None:
            raise UserError(
                "a reward model alone does not say what is right; add [rewards.math] with "
                "weight = 0 to measure accuracy, or remove data.eval"
            )
        return next(iter(parts.weights))
    checkers = [n for n in names if n in tables and function_of(n, tables[n]) in ("math", "exact")]
    return checkers[0] if len(checkers) == 1 else names[0]


def reward_pool(config: Config) -> RewardPool:
    """The reward functions on the host, and how their numbers are read."""
    pool, mistakes, parts = config.reward_pool, Mistakes(), parts_of(config)
    functions, rules = {}, {}
    tables = reward_tables(config)
    for name in parts.given_by("function"):
        table, options = tables[name], reveal(tables[name].options, f"rewards.{name}")
        make = partial(make_reward, function_of(name, table), f"rewards.{name}", **options)
        functions[name] = mistakes.look(make)
        if table.over is not None and functions[name] is not None:
            functions[name].over = table.over
        low, high = table.range or (-math.inf, math.inf)
        paid = parts.weights[name] if table.by_token else None
        rules[name] = Rules(table.missing, low, high, table.where, paid, table.with_prompt)
    mistakes.check()
    return RewardPool(
        functions,
        workers=pool.workers if functions else 0,
        timeout_seconds=pool.timeout_seconds,
        memory_gib=pool.memory_gib,
        on_timeout=pool.on_timeout,
        on_error=pool.on_error,
        rules=rules,
    )
