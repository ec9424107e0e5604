"""Puzzles with a verifier as rows of data: any of reasoning-gym's, mixed, of any difficulty.

    python -m jrl.zoo.tools.puzzles puzzles.toml --rows 2000 --seed 0 > puzzles.jsonl

    # puzzles.toml: a table for each task; its keys are those of reasoning-gym's data set
    guidance = "tree"             # "" for the questions as they are
    [tasks.mini_sudoku]
    weight = 2.0
    [tasks.countdown]
    min_numbers = 3

``[rewards.reasoning_gym]`` judges the rows, and ``log.by = "data_source"`` reports each task.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jrl.config.read import read_toml
from jrl.errors import UserError, unknown_choice
from jrl.system.extras import need
from jrl.zoo.adapters.reasoning_gym import ASK

TREE = (
    "Think in a tree: write down several ways to go on, try each of them a few steps, say how"
    " promising each one is, drop those that cannot work, and go back to an earlier branch where"
    " all that follow from it fail."
)
GUIDANCE = ("", "tree")


def puzzle_rows(
    tasks: Mapping[str, Mapping[str, Any]], rows: int, seed: int, guidance: str = ""
) -> Iterator[dict[str, Any]]:
    """Rows of a mixture of puzzles, each with what its rule-based verifier needs.

    "Enigmata: Scaling Logical Reasoning in Large Language Models with Synthetic Verifiable Puzzles"
    (arXiv:2505.19914): each task is a generator of any number of instances with a difficulty, and a
    verifier; a run mixes tasks by weights, and puzzles with maths (``[data.train]`` with two files
    and their weights). Departure: the tasks are reasoning-gym's, not Enigmata's 36.

    With ``guidance = "tree"`` the rows are those of "ToTRL: Unlock LLM Tree-of-Thoughts Reasoning
    Potential through Puzzles Solving" (arXiv:2505.12717): each question asks for a tree of
    thoughts, and is there twice, for a model whose thinking is off (``stage`` 0) and on (1), which
    the chat template is told (``chat_template_kwargs``). Departure: the words are ours.

    Args:
      tasks: reasoning-gym's name of a task -> "weight" (1 where it is left out) and the keys of its
        data set, such as sizes and numbers that make it harder.
      rows: how many puzzles.
      seed: of the mixture and of each task.
      guidance: "" or "tree".

    Raises:
      UserError: no such task, a key that it does not have, or a weight that is not above 0.
    """
    if guidance not in GUIDANCE:
        raise unknown_choice("guidance", guidance, GUIDANCE)
    if not isinstance(tasks, Mapping):
        raise UserError(f"tasks = {tasks!r:.40}; write a table for each task, [tasks.NAME]")
    gym = need("reasoning_gym", "reasoning-gym", "puzzle_rows")
    sources, weights = {}, []
    for name, keys in tasks.items():
        if not isinstance(keys, Mapping):
            raise UserError(f"tasks.{name} = {keys!r:.40}; write a table, [tasks.{name}]")
        config = {key: value for key, value in keys.items() if key != "weight"}
        weight = keys.get("weight", 1.0)
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise UserError(f"tasks.{name}.weight = {weight!r:.40}; must be a number above 0")
        weights.append(float(weight))
        try:
            sources[name] = gym.create_dataset(name, size=rows, seed=seed, **config)
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"tasks.{name}: {error}") from None
    if not sources:
        raise UserError("tasks is empty; name one of reasoning-gym, such as tasks.mini_sudoku")
    rng = random.Random(seed)
    for index in range(rows):
        (name,) = rng.choices(list(sources), weights)
        entry = sources[name][index]
        row = {
            "question": f"{entry['question']}\n{ASK}",
            "answer": str(entry["answer"]),
            "data_source": name,
            "entry": json.dumps(entry, default=str),
        }
        if not guidance:
            yield row
            continue
        row["question"] = f"{entry['question']}\n{TREE}\n{ASK}"
        for stage, thinks in enumerate((False, True)):
            yield row | {"stage": stage, "chat_template_kwargs": {"enable_thinking": thinks}}


def main(arguments: list[str] | None = None) -> None:
    """Writes rows as JSON lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", type=Path, help="TOML file with a table for each task")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        chosen = read_toml(args.tasks)
        tasks, guidance = chosen.get("tasks", {}), chosen.get("guidance", "")
        for row in puzzle_rows(tasks, args.rows, args.seed, guidance):
            sys.stdout.write(json.dumps(row) + "\n")
    except UserError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
