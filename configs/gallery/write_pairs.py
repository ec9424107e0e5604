"""Writes the pairs of configs/gallery/dpo.toml: digits in order, and an answer with a mistake.

    python configs/gallery/write_pairs.py

A rejected completion leaves a digit out, exchanges two unequal neighbours, or is the prompt as it
stands, a third of each. The held-out pairs have prompts of their own.
"""

from __future__ import annotations

import json
import pathlib
import random

HERE = pathlib.Path(__file__).parent
COUNTS = {"pairs.jsonl": 1000, "held_out_pairs.jsonl": 200}
DIGITS = 5


def rejected(digits: str, how: random.Random) -> str:
    """The digits in order with one left out or two exchanged, or as they stand in the prompt."""
    right = "".join(sorted(digits))
    kind = how.choice(("left out", "exchanged", "as they stand"))
    if kind == "left out":
        at = how.randrange(len(right))
        return right[:at] + right[at + 1 :]
    if kind == "as they stand" and digits != right:
        return digits
    at = how.choice([i for i in range(len(right) - 1) if right[i] != right[i + 1]])
    return right[:at] + right[at + 1] + right[at] + right[at + 2 :]


def main() -> None:
    """Writes both files."""
    how = random.Random(0)
    prompts = how.sample([f"{n:0{DIGITS}}" for n in range(10**DIGITS)], sum(COUNTS.values()) + 20)
    rows = iter(digits for digits in prompts if len(set(digits)) > 1)
    for name, count in COUNTS.items():
        lines = []
        for _ in range(count):
            digits = next(rows)
            row = {"prompt": f"{digits}>", "chosen": "".join(sorted(digits))}
            lines.append(json.dumps(row | {"rejected": rejected(digits, how)}) + "\n")
        (HERE / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
