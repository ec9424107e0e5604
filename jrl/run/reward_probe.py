"""A one-line description of a run's reward, and a check of the columns that rewards read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import numpy as np

from jrl.config import Config
from jrl.config.tables import RewardTable
from jrl.errors import UserError
from jrl.judging.host import with_ends
from jrl.methods.base import Method
from jrl.rewards.base import Sample
from jrl.rewards.columns import check_column, check_columns
from jrl.rewards.combine import BY_GROUP
from jrl.rewards.pool import RewardPool
from jrl.rewards.worker import attribute
from jrl.setup.kind import Kind, RunData
from jrl.setup.reward_parts import function_of, reward_tables
from jrl.setup.run import Run
from jrl.system.extras import install_line, missing
from jrl.user_code import load

_MEANS = {
    "verify": "1 for a right answer, else 0",
    "partial": "the fraction of the answer that is right",
    "math": "1 when the final answer equals the reference, as mathematics",
    "exact": "1 when the final answer equals the reference, as text",
    "format": "1 for an answer in the form that is asked for",
    "model": "a trained reward model",
    "judge": "the verdict of a judge, a model that is asked",
}


def reward_text(run: Run) -> str:
    """The reward as a sum of its parts, in words; "" if the data holds scores.

    Args:
      run: from ``build.setup``.
    """
    weights = run.kind.reported_weights(run.rewards.weights)
    if not weights:
        return ""
    short = {name: name.rpartition(":")[2] for name in weights}
    total = " + ".join(
        short[name] if weight == 1 else f"{weight:g} * {short[name]}"
        for name, weight in weights.items()
    )
    tables = reward_tables(run.config)
    means = {short[name]: _meaning(name, tables[name]) for name in weights}
    parts = "; ".join(f"{name}: {text}" for name, text in means.items() if text)
    several = (
        len(weights) > 1 and run.rewards.accuracy_part and getattr(run.config.data, "eval", None)
    )
    judge = f"; accuracy is measured by rewards.{run.rewards.accuracy_part}" if several else ""
    return f"reward = {total}" + (f" ({parts})" if parts else "") + judge


def missing_math(config: Config) -> str:
    """A line where rewards.math has no math-verify to compare by; "" elsewhere."""
    used = "math" in [function_of(n, table) for n, table in reward_tables(config).items()]
    if not used or not missing(["math-verify"]):
        return ""
    return (
        "rewards.math compares numbers, and anything else as text, because math-verify is not"
        f" installed; install it: {install_line('math')}"
    )


def probe_rewards(run: Run, pool: RewardPool) -> None:
    """Calls the reward functions of a user once, with the first prompt and its answer, if any.

    On a procedural task with one of its problems, and a correct completion as the answer.

    Raises:
      UserError: one of them fails, or returns something else than numbers; see ``RewardPool``. Or a
        part compares members of a group whose members a search judges one by one.
    """
    check_searched_parts(run.config, run.method, run.kind, pool)
    names = [name for name in _own_rewards(run.config) if name in pool.functions]
    prompt = run.kind.first_prompt(run.data) if names else None
    if prompt is None:
        return
    text = "yes" if prompt.answer is None else str(prompt.answer)
    tokens = np.array(run.tokenizer.encode(text), np.int32)
    sample = Sample(prompt=prompt, completion=text, tokens=tokens, stop="stop_token")
    sample = run.kind.as_rewarded(sample)
    if pool.by_token:
        sample = with_ends(sample, run.tokenizer)
    pool.probe(names, sample, run.config.sampling.group)


def check_searched_parts(config: Config, method: Method, kind: Kind, pool: RewardPool) -> None:
    """Raises UserError for parts over groups where a search needs the reward of each leaf."""
    search = method.draw.search
    if search is None or "episodes" in kind.features:  # whose groups are judged when complete
        return
    tables = reward_tables(config)
    by_group = [name for name, table in tables.items() if table.combine in BY_GROUP]
    by_group += [
        name for name in tables if name in pool.functions and _compares(name, tables, pool)
    ]
    if by_group:
        raise UserError(
            f"rewards.{by_group[0]} compares completions, and tree.by = {search.by!r} needs the"
            " reward of each leaf before others are sampled; remove the part, or set tree.kind to"
            " 'none'"
        )


def _compares(name: str, tables: Mapping[str, RewardTable], pool: RewardPool) -> bool:
    """Whether a function is to see several completions, by its own mark or its table.

    What wraps verl's functions is over batches, though they are given one sample after the other.
    """
    function = function_of(name, tables[name])
    marked = load(function, "rewards") if ":" in function else pool.functions[name]
    over = tables[name].over, attribute(marked, "over", "sample")
    return name in pool.by_group or bool({"group", "batch"} & set(over))


def check_reward_columns(config: Config, kind: Kind, data: RunData) -> None:
    """Raises UserError for a column that a key or a reward function names and the data lack.

    And where the library's own would compare texts with an answer that is a table.
    """
    prompts, columns = data.prompts.get("train", ()), kind.columns(data)
    if columns is not None:
        check_column("log.by", config.log.by, prompts)
    kind.check_variants(config, data)
    tables = reward_tables(config)
    checkers = {n for n in config.rewards if function_of(n, tables[n]) in ("exact", "math")}
    for name in sorted(checkers):
        for prompt in prompts:
            several = prompt.answer if isinstance(prompt.answer, list) else [prompt.answer]
            if any(isinstance(answer, list | dict) for answer in several):
                raise UserError(
                    f"data.train, row {prompt.id + 1}: the answer is {str(prompt.answer)[:60]}, and"
                    f" rewards.{name} compares text and numbers; write it as text, or a list"
                    " of texts of which one is enough, or give a reward function of your own"
                )
    if columns is None:
        return
    for name in _own_rewards(config):
        function = load(function_of(name, tables[name]), "rewards")
        check_columns(function, (*columns, *config.rewards[name].options), f"rewards.{name}")


def _own_rewards(config: Config) -> list[str]:
    tables = reward_tables(config)
    return [name for name in config.rewards if ":" in function_of(name, tables[name])]


def _meaning(name: str, table: RewardTable) -> str:
    """One line about a reward part, from the function's docstring."""
    if table.combine is not None:
        return f"{table.combine} of {', '.join(table.of)}"
    function = function_of(name, table)
    if ":" not in function:
        return _MEANS.get(function, "")
    text = inspect.getdoc(load(function, "rewards")) or ""
    return text.partition("\n")[0].rstrip(".")
