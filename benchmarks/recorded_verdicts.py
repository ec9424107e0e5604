"""Agreement of ``rewards.math`` with the verdicts that published evaluations recorded.

    python -m benchmarks.recorded_verdicts FOLDER              # a line for each file, and the sum
    python -m benchmarks.recorded_verdicts FOLDER --show 20    # and where the two differ
    python -m benchmarks.recorded_verdicts DATA --of solutions # a data set's solutions, right

FOLDER has JSONL files, or JSON files with a list, as evaluations of Qwen2.5-Math, ToRA, Rho-1, Abel
and MR-GSM8K publish them. A row has the reference (``gt``, ``gold``, ``ground_truth_answer``), the
verdict (``score``, ``result``, ``model_output_answer_correctness``), and what the model answered:
``pred``, the answer that the evaluation extracted, or the completion (``code``, ``response``,
``model_output_steps``). Rows with lists have several of each. With ``--of solutions`` rows have a
worked solution: it is right for its own answer, and wrong for that answer plus one. The data are
not part of this repository; docs/verifiers.md names where they are.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.rewards import Sample, math_reward
from jrl.rewards.exact import marked_answer, to_number
from jrl.types import Prompt

REFERENCES = ("gt", "gold", "ground_truth_answer")
VERDICTS = ("score", "result", "model_output_answer_correctness")
ANSWERS = {"answers": ("pred",), "completions": ("code", "response", "model_output_steps")}


class Recorded(NamedTuple):
    """One answer and its verdict.

    Attributes:
      text: the answer, or the completion that gives it.
      reference: the right answer.
      right: what the evaluation recorded.
    """

    text: str
    reference: str
    right: bool


def first_of(row: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first key that the row has; None for none."""
    return next((row[key] for key in keys if key in row), None)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, or of a JSON file with a list of them."""
    text = path.read_text("utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    listed = json.loads(text)
    return listed if isinstance(listed, list) else []


def recorded(row: dict[str, Any], of: str) -> Iterator[Recorded]:
    """Yields the records of a row; none if it lacks text, reference or verdict."""
    reference, verdicts = first_of(row, REFERENCES), first_of(row, VERDICTS)
    texts = first_of(row, ANSWERS[of])
    if reference is None or verdicts is None or texts is None:
        return
    if "model_output_steps" in row and of == "completions":
        texts = "\n".join(texts)
    if not isinstance(texts, list):
        texts, verdicts = [texts], [verdicts]
    for text, verdict in zip(texts, verdicts, strict=True):
        if of == "answers":  # as a completion would mark it
            text = f"\\boxed{{{text}}}"
        yield Recorded(str(text), str(reference), verdict in (True, "correct"))


def of_solution(row: dict[str, Any]) -> Iterator[Recorded]:
    """A data set's worked solution, for its own answer and for another number."""
    solution, answer = row.get("solution") or row.get("answer"), row.get("answer")
    if not isinstance(solution, str) or marked_answer(solution) is None:
        return
    answer = marked_answer(str(answer)) or str(answer)
    yield Recorded(solution, answer, True)
    if (number := to_number(answer)) is not None:
        yield Recorded(solution, str(number + 1), False)


def is_right(each: Recorded) -> bool:
    """The verdict of ``rewards.math``."""
    prompt = Prompt(0, "", np.zeros(1, np.int32), each.reference)
    return math_reward([Sample(prompt, each.text, np.zeros(1, np.int32), "stop_token")]) == [1.0]


def main() -> None:
    """Prints agreement by file and in all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", choices=(*ANSWERS, "solutions"), default="answers")
    parser.add_argument("--show", type=int, default=0, help="how many disagreements to print")
    args = parser.parse_args()
    total, agreed = 0, 0
    differ: collections.Counter[Recorded] = collections.Counter()
    for path in sorted(p for p in args.folder.rglob("*") if p.suffix in (".json", ".jsonl")):
        read = of_solution if args.of == "solutions" else partial(recorded, of=args.of)
        pairs = [each for row in rows_of(path) for each in read(row)]
        if not pairs:
            continue
        wrong = [each for each in pairs if is_right(each) != each.right]
        differ.update(wrong)
        total, agreed = total + len(pairs), agreed + len(pairs) - len(wrong)
        name = path.relative_to(args.folder)
        print(f"{name}: {len(pairs) - len(wrong)} of {len(pairs)}", flush=True)
    print(f"all: {agreed} of {total}, {100 * agreed / max(total, 1):.3f} %")
    for each, times in differ.most_common(args.show):
        print(f"{times} x recorded {each.right}: {each.text[-200:]!r} beside {each.reference!r}")


if __name__ == "__main__":
    main()
