"""Verl's reward functions, and its choice among them by data source. Imports no JAX.

Each calls the function of this library that computes the same; differences are said where there are
any.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jrl.errors import UserError, unknown_choice
from jrl.rewards.base import Sample, defaults_of, options_of
from jrl.rewards.exact import boxed, same_answer
from jrl.rewards.matching import normalised, references, stated_answer
from jrl.rewards.math import math_reward as math
from jrl.verifiers.code import code, reference, tested, testing_of
from jrl.verifiers.references import Reference
from jrl.zoo.rewards.minerva import last_box, normal_form

if TYPE_CHECKING:
    from jrl.types import Prompt


def gsm8k(
    samples: list[Sample], method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> list[float]:
    """Verl's ``gsm8k``: the last number behind "#### ", letter for letter.

    Args:
      samples: what to judge.
      method: "strict", or "flexible" for the last number of the text's last 300 letters.
      format_score: points of another number.
      score: points of the right one.
    """
    points = []
    for sample in samples:
        tail = sample.completion[-300:]
        if method == "strict":
            numbers = [n.replace(",", "") for n in re.findall(r"#### (\-?[0-9\.\,]+)", tail)]
        else:  # the full stop of a sentence is a form, too
            numbers = re.findall(r"(\-?[0-9\.\,]+)", tail)
            numbers.sort(key=lambda n: n != ".")
        right = bool(numbers) and numbers[-1] == str(sample.prompt.answer)
        points.append(score if right else format_score if numbers else 0.0)
    return points


def math_reward(samples: list[Sample]) -> list[float]:
    r"""Verl's ``math_reward``, of MATH: 1 where the last ``\boxed{...}`` is the answer, else 0.

    Departure: the two are compared as ``math`` does it, not letter for letter after replacements.
    """
    points = []
    for sample in samples:
        answer = boxed(sample.completion)
        alone = dataclasses.replace(sample, completion=f"\\boxed{{{answer}}}")
        points.append(0.0 if answer is None else math([alone])[0])
    return points


def math_batch(samples: list[Sample]) -> list[float]:
    """Verl's ``math_batch``: ``math_reward``, of all samples at once there."""
    return math_reward(samples)


def math_verify(samples: list[Sample]) -> list[float]:
    """Verl's ``math_verify``: ``math``, which asks math-verify where it is installed."""
    return math(samples)


def prime_math(samples: list[Sample]) -> list[float]:
    """Verl's ``prime_math``: 1 for a right answer, boxed or stated, else 0.

    Departure: the answer is found and compared as ``math`` does it.
    """
    return math(samples)


def math_dapo(
    samples: list[Sample], strict_box_verify: bool = False, compare: str = "grammar"
) -> list[float]:
    r"""Verl's ``math_dapo``: 1 where what follows the last "Answer:" is the answer, else -1.

    Of the text's last 300 letters. Departure: the two are compared by the grammar of
    ``jrl.rewards.answers``; ``compare = "minerva"`` has the verdicts of verl, to reproduce DAPO.

    Args:
      samples: what to judge.
      strict_box_verify: the last ``\boxed{...}`` of the last 100 letters, letter for letter.
      compare: "grammar", or "minerva" for Minerva's list of replaced letters.
    """
    if compare not in ("grammar", "minerva"):
        raise unknown_choice("rewards.math_dapo.compare", compare, ("grammar", "minerva"))
    points = []
    for sample in samples:
        answer = str(sample.prompt.answer)
        stated = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", sample.completion[-300:])
        if strict_box_verify:
            right = last_box(sample.completion[-100:]) == answer
        elif compare == "minerva":
            right = normal_form(stated[-1] if stated else "[INVALID]") == normal_form(answer)
        else:
            right = bool(stated) and same_answer(stated[-1], answer)
        points.append(1.0 if right else -1.0)
    return points


def geo3k(samples: list[Sample], format_score: float = 0.1, use_boxed: bool = True) -> list[float]:
    r"""Verl's ``geo3k``: 0.9 for a boxed answer that is right, 0.1 for its form.

    The form is <think>...</think> with a ``\boxed{...}`` behind it. Without ``use_boxed`` the whole
    text is the answer.
    """
    form = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
    points = []
    for sample in samples:
        answer = boxed(sample.completion) if use_boxed else sample.completion.strip()
        right = answer is not None and same_answer(answer, str(sample.prompt.answer))
        is_formed = form.fullmatch(sample.completion) is not None
        points.append((1 - format_score) * right + format_score * is_formed)
    return points


def search_r1_like_qa_em(
    samples: list[Sample], format_score: float = 0.0, score: float = 1.0
) -> list[float]:
    """Verl's for Search-R1: exact match of what stands in the last <answer>...</answer>.

    A quarter of the points where tags are opened or closed more than ten times; 0 without an
    answer.
    """
    points = []
    for sample in samples:
        text = sample.completion
        if not re.search(r"<answer>(.*?)</answer>", text, re.DOTALL):
            points.append(0.0)
            continue
        texts = references(sample.prompt.answer, "rewards.search_r1_like_qa_em")
        right = normalised(stated_answer(text)) in [normalised(each) for each in texts]
        many = max(text.count("<answer>"), text.count("</answer>")) > 10
        points.append((score / 4 if many else score) if right else format_score)
    return points


# ---------------------------------------------------------------- programs

_FIRST = 10
"""Tests whose share is the reward of a program that does not pass all."""


@options_of(code, "partial")
def prime_code(samples: list[Sample], continuous: bool = False, **options: Any) -> list[float]:
    """Verl's ``prime_code``: 1 where a program passes all tests of its row.

    The program is what follows the last "```python", up to the next fence. Departures: tests are
    found as ``code`` finds them, and programs run in the sandbox.

    Args:
      samples: what to judge.
      continuous: pays the share of the first ten tests to other programs; as in verl's
        ``default_compute_score``.
      **options: of ``code``.
    """
    code([], **options)  # says what is wrong
    testing = testing_of(options)
    results = [
        tested(sample, _after_python(sample.completion), testing, stop=not continuous)
        for sample in samples
    ]
    return [
        1.0 if all(passed) else _share(passed[:_FIRST]) if continuous else 0.0 for passed in results
    ]


def sandbox_fusion(
    samples: list[Sample],
    continuous: bool = False,
    timeout: float = 10.0,
    memory_limit_mb: float = 1024.0,
    check_solution: str = "",
    check_rows: int = 64,
) -> list[float]:
    """Verl's ``sandbox_fusion``: the share of its row's tests that a program passes.

    The program is what follows the last "```python", up to the next fence, else the first fenced
    block; 0 without one. Departures: programs run in the sandbox of this machine, not at a
    service, and all tests of a program together have twice ``timeout``.

    Args:
      samples: what to judge.
      continuous: counts the first ten tests alone.
      timeout: seconds of one test; twice that must be below ``reward_pool.timeout_seconds``.
      memory_limit_mb: of all processes of a program together, MiB.
      check_solution: as in ``code``.
      check_rows: as in ``code``.
    """
    options = _limits(timeout, memory_limit_mb)
    code([], check_solution=check_solution, check_rows=check_rows, **options)
    testing, points = testing_of(options), []
    for sample in samples:
        passed = list[bool]()
        if _FENCE in sample.completion:
            passed = tested(sample, _in_fences(sample.completion), testing, stop=False)
        points.append(_share(passed[: _FIRST if continuous else None]) if passed else 0.0)
    return points


_FENCE, _PYTHON = "```", "```python"


def _after_python(text: str) -> str:
    """A program as verl's ``prime_code`` finds it: all of the text where no fence stands."""
    return text.rpartition(_PYTHON)[2].partition(_FENCE)[0]


def _in_fences(text: str) -> str:
    """A program as verl's ``sandbox_fusion`` finds it: else in the first block of any language."""
    if _PYTHON in text:
        return _after_python(text)
    block = text.split(_FENCE)[1]
    language, _, program = block.partition("\n")
    return program if program and language.strip().isalpha() else block


def _limits(timeout: float, memory_limit_mb: float) -> dict[str, Any]:
    """Options of ``code`` with the limits of ``sandbox_fusion``."""
    for name, value in {"timeout": timeout, "memory_limit_mb": memory_limit_mb}.items():
        if not value > 0:
            raise UserError(f"rewards.sandbox_fusion.{name} = {value} must be above 0")
    return {"seconds": timeout, "total_seconds": 2 * timeout, "memory_mib": memory_limit_mb}


def fusion_reference(prompt: Prompt, where: str, options: Mapping[str, Any]) -> Reference | None:
    """``code.reference`` of ``sandbox_fusion``."""
    used = {**defaults_of(sandbox_fusion), **options}
    limits = _limits(used["timeout"], used["memory_limit_mb"])
    return reference(prompt, where, limits | {"check_solution": used["check_solution"]})


def _share(passed: Sequence[bool]) -> float:
    return sum(passed) / len(passed)


def _programs(samples: list[Sample]) -> list[float]:
    return prime_code(samples, continuous=True)


_SOURCES: dict[str, Callable[[list[Sample]], list[float]]] = {
    "openai/gsm8k": gsm8k,
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        math_reward,
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), math_dapo),
    **dict.fromkeys(
        (
            *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"),
            *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
        ),
        prime_math,
    ),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _programs),
    "hiyouga/geometry3k": geo3k,
    **dict.fromkeys(
        (
            *("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa"),
            *("searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"),
        ),
        search_r1_like_qa_em,
    ),
}
"""Verl's data sources and the reward of each."""


def default_compute_score(
    samples: list[Sample], column: str = "data_source", check_rows: int = 64
) -> list[float]:
    """Verl's ``default_compute_score``: the reward that it has for a row's data source.

    Args:
      samples: what to judge.
      column: with the data source; "aime" may begin it, the others are whole.
      check_rows: as in ``code``, of the rows with programs.

    Raises:
      UserError: a row names a data source that verl has no reward for.
    """
    code([], check_rows=check_rows)
    points = []
    for sample in samples:
        source = str(sample.prompt.meta.get(column))
        reward = math_dapo if source.startswith("aime") else _SOURCES.get(source)
        if reward is None:
            raise UserError(
                f"rewards.default_compute_score: prompt {sample.prompt.id} has {column} ="
                f" {source!r}, which has no reward in verl; give these rows a part of their own by"
                f" where, or one of {', '.join(_SOURCES)}"
            )
        points += reward([sample])
    return points


def source_reference(prompt: Prompt, where: str, options: Mapping[str, Any]) -> Reference | None:
    """``code.reference`` of ``default_compute_score``: None for rows without programs."""
    source = str(prompt.meta.get(options.get("column", "data_source")))
    return reference(prompt, where, {}) if _SOURCES.get(source) is _programs else None
