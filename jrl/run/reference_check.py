"""The rows' own solutions, judged before a run by the verifiers that will judge the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jrl.config import Config
from jrl.config.secrets import reveal
from jrl.errors import UserError
from jrl.rewards.rules import Rules
from jrl.setup.reward_parts import function_of, parts_of, reward_tables
from jrl.system.processes import all_say
from jrl.system.wait_reports import waiting
from jrl.types import Prompt
from jrl.verifiers import code, sql
from jrl.verifiers.references import Reference, broken_rows, message_of

_REFERENCES: Mapping[str, Callable[[Prompt, str, Mapping[str, Any]], Reference | None]] = {
    "code": code.reference,
    "sql": sql.reference,
}
"""Reward functions that can judge what a row gives as its solution."""
_ROWS = 64


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
        make = _REFERENCES.get(function_of(name, table))
        options = reveal(table.options, f"rewards.{name}")
        limit = options.get("check_rows", _ROWS)
        if make is None or not limit:
            continue
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
