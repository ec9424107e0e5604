"""GLoRe: rows that train a stepwise reward model and two refiners, and the choice among drafts.

Of "GLoRe: When, Where, and How to Improve LLM Reasoning via Global and Local Refinements"
(arXiv:2402.10963), from the rollouts of one search:

    solutions = [Solution(question, ("step 1", "step 2"), (True, False), right=False), ...]
    rows = sorm_rows(solutions, key)                   # for method = "sorm"
    pairs = global_rows(solutions), local_rows(solutions)          # for method = "sft"
    best = best_draft([draft, refined_globally, refined_locally], points)

Read from an account of the paper, whose code is not published; the wording of prompts is ours.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError

GLOBAL = "{question}\n\nA draft of a solution:\n{draft}\n\nWrite a correct solution."
"""Prompt of a global refiner."""
LOCAL = (
    "{question}\n\nA draft of a solution:\n{draft}\n\nThe first wrong step begins at [BAD]. Write a"
    " correct solution."
)
"""Prompt of a local refiner; the draft contains the mark."""


class Solution(NamedTuple):
    """A solution that a policy wrote, with what its rollouts say of it.

    Attributes:
      question: what was asked.
      steps: texts, which make the solution as they stand.
      reaches: of each step, whether any of the K completions drawn behind it was right.
      right: whether the solution itself is.
    """

    question: str
    steps: tuple[str, ...]
    reaches: tuple[bool, ...]
    right: bool

    @property
    def text(self) -> str:
        """The whole."""
        return "".join(self.steps)

    @property
    def first_wrong(self) -> int | None:
        """The number of the first step from which nothing was right; None for no such step."""
        labels = step_labels(self)
        return labels.index(False) if False in labels else None


def step_labels(solution: Solution, *, consistent: bool = False) -> list[bool]:
    """Whether each step is right.

    A step is right if any completion from it was, or from a later one. With ``consistent`` it also
    has to leave a result, the last number in it, that is used in what follows it in the solution,
    which takes out steps that a lucky completion passed over.

    >>> solution = Solution("?", ("2+2=4", " 4*3=13", " so 12"), (False, True, False), False)
    >>> step_labels(solution), step_labels(solution, consistent=True)
    ([True, True, False], [True, False, False])
    """
    if len(solution.steps) != len(solution.reaches):
        raise UserError(
            f"a solution has {len(solution.steps)} steps and {len(solution.reaches)} labels; give"
            " one each"
        )
    labels = [any(solution.reaches[i:]) for i in range(len(solution.steps))]
    if not consistent:
        return labels
    last = len(labels) - 1
    return [
        label and (i == last or _is_used(solution.steps[i], solution.steps[i + 1 :]))
        for i, label in enumerate(labels)
    ]


def _is_used(step: str, later: Sequence[str]) -> bool:
    numbers = re.findall(r"\d+(?:\.\d+)?", step)
    return not numbers or numbers[-1] in re.findall(r"\d+(?:\.\d+)?", "".join(later))


def sorm_rows(
    solutions: Sequence[Solution], seed: int, *, consistent: bool = True, balanced: bool = True
) -> list[dict[str, Any]]:
    """Prefixes of solutions with their labels, as lists of one response for ``data.pairs``.

    Args:
      solutions: of any number of questions.
      seed: of the draw that balances.
      consistent: see ``step_labels``.
      balanced: whether, of the prefixes with one number of steps, as many are right as wrong: of
        the more frequent label a random part stays. Without it early steps would be right and late
        ones wrong, whatever they say.

    Returns:
      Rows with "prompt", "responses" and "scores", in the order of the solutions.
    """
    rows: list[dict[str, Any]] = []
    kinds: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for solution in solutions:
        for i, label in enumerate(step_labels(solution, consistent=consistent)):
            prefix = "".join(solution.steps[: i + 1])
            kinds[i, label].append(len(rows))
            rows.append(
                {"prompt": solution.question, "responses": [prefix], "scores": [float(label)]}
            )
    if not balanced:
        return rows
    random = np.random.default_rng(seed)
    stays: list[int] = []
    for number in sorted({number for number, _ in kinds}):
        both = [kinds[number, label] for label in (False, True)]
        size = min(map(len, both))
        stays += [int(row) for some in both for row in random.permutation(some)[:size]]
    return [rows[i] for i in sorted(stays)]


def global_rows(solutions: Sequence[Solution], wording: str = GLOBAL) -> list[dict[str, str]]:
    """For each wrong solution, one that is right: "prompt" and "solution".

    Args:
      solutions: of any number of questions; the right ones of a question are dealt in turn.
      wording: with {question} and {draft}.
    """
    return [
        {
            "prompt": wording.format(question=wrong.question, draft=wrong.text),
            "solution": right.text,
        }
        for wrong, right in _paired(solutions)
    ]


def local_rows(solutions: Sequence[Solution], wording: str = LOCAL) -> list[dict[str, str]]:
    """For each wrong solution with a wrong step, marked in the draft, one that is right.

    The right one has the same steps before the wrong one where any has, else none is written.
    """
    rows = []
    for wrong in solutions:
        at = wrong.first_wrong
        if wrong.right or at is None:
            continue
        shared = wrong.steps[:at]
        right = [
            s
            for s in solutions
            if s.right and s.question == wrong.question and s.steps[:at] == shared
        ]
        if right:
            draft = "".join([*shared, "[BAD] ", *wrong.steps[at:]])
            prompt = wording.format(question=wrong.question, draft=draft)
            rows.append({"prompt": prompt, "solution": right[0].text})
    return rows


def _paired(solutions: Sequence[Solution]) -> Iterator[tuple[Solution, Solution]]:
    right: dict[str, list[Solution]] = defaultdict(list)
    for solution in solutions:
        if solution.right:
            right[solution.question].append(solution)
    dealt: dict[str, int] = defaultdict(int)
    for wrong in solutions:
        if not wrong.right and (some := right[wrong.question]):
            yield wrong, some[dealt[wrong.question] % len(some)]
            dealt[wrong.question] += 1


def best_draft(drafts: Sequence[str], points: Sequence[float | None]) -> str:
    """The draft, its global or its local refinement: which an outcome reward model ranks first.

    Args:
      drafts: the first is the policy's own, which stands where no other has more points.
      points: of each; None for no opinion.

    >>> best_draft(["draft", "global", "local"], [0.2, None, 0.7])
    'local'
    >>> best_draft(["draft", "global"], [0.2, 0.2])
    'draft'
    """
    scores = [-np.inf if value is None else value for value in points]
    return drafts[int(np.argmax(scores))]
