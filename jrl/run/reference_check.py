"""Checks of rows against verifiers before a run: solutions are judged, tasks are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl.config import Config
from jrl.config.secrets import reveal
from jrl.config.tables import RewardTable
from jrl.errors import UserError
from jrl.rewards import make_reward
from jrl.rewards.base import Sample
from jrl.rewards.columns import check_column
from jrl.rewards.combine import row_numbers
from jrl.rewards.rules import Rules
from jrl.setup.reward_parts import function_of, parts_of, reward_tables
from jrl.system.processes import all_say
from jrl.system.wait_reports import waiting
from jrl.types import Prompt
from jrl.user_code import load
from jrl.verifiers.references import broken_rows, message_of, with_rows

_CODE = "jrl.verifiers.code:reference"
_REFERENCES = {
    "code": _CODE,
    "code_speed": "jrl.zoo.rewards.speed:reference",
    "default_compute_score": "jrl.zoo.rewards.verl:source_reference",
    "prime_code": _CODE,
    "sandbox_fusion": "jrl.zoo.rewards.verl:fusion_reference",
    "sql": "jrl.verifiers.sql:reference",
}
"""Reward functions that can judge what a row gives as its solution; (prompt, where, options)."""
_ROWS = 64
_READ = ("instructions", "json_schema", "reasoning_gym", "default_compute_score")
"""Reward functions that read in each row what is asked for, in less than a millisecond."""
_MOST_READ = 2_000
"""Rows of a split: checking as many different schemas takes a second or two."""


def check_references(config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """Judges the solutions that the first rows bring, ``check_rows`` of each file.

    Each process judges a share, and all hear of every row.

    Args:
      config: of the run.
      prompts: by split, in the order of the data.

    Returns:
      What to say of the rows whose solution is judged wrong, a text for each part with such rows.

    Raises:
      UserError: that, where a failure of a reward ends the run (``reward_pool.on_error``).
    """
    tables, notes = reward_tables(config), []
    for name in parts_of(config).given_by("function"):
        table = tables[name]
        spec = _REFERENCES.get(function_of(name, table))
        options = reveal(table.options, f"rewards.{name}")
        limit = options.get("check_rows", _ROWS)
        if spec is None or not limit:
            continue
        make = load(spec, f"rewards.{name}")
        rules = Rules(where=table.where)
        references = [
            reference
            for split, listed in prompts.items()
            for prompt in [p for p in listed if rules.asks_row(p.meta)][:limit]
            if (reference := make(prompt, f"data.{split}, row {prompt.id + 1}", options))
        ]
        share = references[jax.process_index() :: jax.process_count()]
        left = [len(share)]

        def done(left: list[int] = left) -> None:
            left[0] -= 1

        say = lambda left=left: f"{left[0]} solutions of the data to run"  # noqa: E731
        with waiting("rewards", say, seconds=0):
            by_process = all_say(broken_rows(share, config.reward_pool.workers, done))
        at = {reference.row: i for i, reference in enumerate(references)}
        broken = sorted(
            (tuple(each) for part in by_process for each in part), key=lambda x: at[x[0]]
        )
        if broken:
            notes.append(message_of(name, broken, len(references)))
    if notes and config.reward_pool.on_error == "stop":
        raise UserError("\n".join(notes))
    return notes


def check_verifiers(config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """Looks for rows that ask for what no reward part can judge.

    Args:
      config: of the run.
      prompts: by split, in the order of the data; the first 2,000 of each are read.

    Returns:
      What to say of rows whose schema, constraints or data set are none.

    Raises:
      UserError: that, where a failure of a reward ends the run (``reward_pool.on_error``); or a
        row's value is in no ``cases`` of ``by_kind``, or is no number where ``row_weight`` or
        ``bounded`` reads one; or a ``where`` fits no row, or those of all parts leave a row out.
    """
    tables, notes = reward_tables(config), []
    rows = {
        f"data.{split}, row {prompt.id + 1}": prompt
        for split, listed in prompts.items()
        for prompt in listed[:_MOST_READ]
    }
    for name, table in tables.items():
        _check_where(name, table.where, prompts)
        if table.combine == "by_kind":
            _check_kinds(name, table.options, rows)
        elif table.combine == "row_weight" or (
            table.combine == "bounded" and table.options.get("column")
        ):
            _check_numbers(name, table, prompts, rows)
        elif function_of(name, table) in _READ:
            broken = _unreadable(name, function_of(name, table), table, rows)
            head = f"rewards.{name}: {len(broken)} of {len(rows)} rows ask for what it cannot judge"
            if broken:
                notes.append(with_rows(f"{head}; repair them or leave them out", broken))
    if notes and config.reward_pool.on_error == "stop":
        raise UserError("\n".join(notes))
    rules = [Rules(where=t.where) for t in tables.values() if t.combine is None]
    judged = lambda prompt: any(rule.asks_row(prompt.meta) for rule in rules)  # noqa: E731
    columns = sorted({column for rule in rules for column in rule.where})
    unjudged = [(at, _values(prompt, columns)) for at, prompt in rows.items() if not judged(prompt)]
    if rules and unjudged and not parts_of(config).given_by("data"):
        head = (
            f"rewards: {len(unjudged)} of {len(rows)} rows are in the where of no part, so nothing"
            " judges them; add a part for them, or leave them out"
        )
        raise UserError(with_rows(head, unjudged))
    return notes


def _values(prompt: Prompt, columns: Sequence[str]) -> str:
    return ", ".join(f"{column} = {prompt.meta.get(column)!r}"[:80] for column in columns)


def _check_where(
    name: str, where: Mapping[str, Any], prompts: Mapping[str, Sequence[Prompt]]
) -> None:
    """Raises UserError for a part that is asked about no row of the data."""
    rule = Rules(where=where)
    if not where or any(rule.asks_row(p.meta) for listed in prompts.values() for p in listed):
        return
    first = [prompt for listed in prompts.values() for prompt in listed[:_MOST_READ]]
    if not first:
        return
    for column in where:
        check_column(f"rewards.{name}.where", column, first)
    values = dict.fromkeys(_values(prompt, sorted(where)) for prompt in first)
    raise UserError(
        f"rewards.{name}.where = {dict(where)} fits no row of the data; rows have"
        f" {'; '.join(list(values)[:5])}"
    )


def _check_numbers(
    name: str,
    table: RewardTable,
    prompts: Mapping[str, Sequence[Prompt]],
    rows: Mapping[str, Prompt],
) -> None:
    """Raises UserError for rows without a number where a combination reads one."""
    column = str(table.options.get("column"))
    if rows:
        check_column(f"rewards.{name}.column", column, prompts.get("train", ()))
    several = table.combine == "bounded"
    if broken := _complaints(rows, lambda p: row_numbers(p.meta, column, several=several)):
        head = f"rewards.{name}: {len(broken)} of {len(rows)} rows have no number that it can read"
        raise UserError(with_rows(f"{head}; repair them", broken))


def _check_kinds(name: str, options: Mapping[str, Any], rows: Mapping[str, Prompt]) -> None:
    column, cases = str(options.get("column")), options.get("cases")
    if not isinstance(cases, Mapping) or options.get("others"):
        return
    strange = [
        (at, _values(prompt, [column]))
        for at, prompt in rows.items()
        if str(prompt.meta.get(column)) not in cases
    ]
    if strange:
        head = (
            f"rewards.{name}.cases names no part for {len(strange)} of {len(rows)} rows (it has"
            f" {', '.join(map(str, cases))}); add their values, or give rewards.{name}.others, a"
            ' part or "none"'
        )
        raise UserError(with_rows(head, strange))


def _unreadable(
    name: str, function: str, table: RewardTable, rows: Mapping[str, Prompt]
) -> list[tuple[str, str]]:
    """(row, complaint) where a row asks for what is none: an empty completion of it is judged."""
    reward = make_reward(function, **reveal(table.options, f"rewards.{name}"))
    rules = Rules(where=table.where)
    judged_rows = {at: prompt for at, prompt in rows.items() if rules.asks_row(prompt.meta)}
    empty = np.zeros(0, np.int32)
    return _complaints(judged_rows, lambda p: reward([Sample(p, "", empty, "length")]))


def _complaints(
    rows: Mapping[str, Prompt], read: Callable[[Prompt], object]
) -> list[tuple[str, str]]:
    """(row, complaint) of the rows that a function cannot read."""
    complaints = []
    for at, prompt in rows.items():
        try:
            read(prompt)
        except UserError as error:
            complaints.append((at, str(error)))
    return complaints
