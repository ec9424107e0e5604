"""Verl's rewards that run programs, and its choice of a reward by data source. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jrl.errors import UserError
from jrl.rewards import other_names
from jrl.rewards.base import Sample, defaults_of, options_of
from jrl.verifiers.code import code, reference, tested, testing_of
from jrl.verifiers.references import Reference

if TYPE_CHECKING:
    from jrl.types import Prompt

_FIRST = 10
"""Tests whose share is the reward of a program that does not pass all."""


@options_of(code, "partial")
def prime_code(samples: list[Sample], continuous: bool = False, **options: Any) -> list[float]:
    """Verl's ``prime_code``: 1 where a program passes all tests of its row.

    Departures: programs and tests are found as ``code`` finds them, and run in the sandbox.

    Args:
      samples: what to judge.
      continuous: pays the share of the first ten tests to other programs; as in verl's
        ``default_compute_score``.
      **options: of ``code``.
    """
    code([], **options)  # says what is wrong
    testing = testing_of(options)
    results = [tested(sample, testing, stop=not continuous) for sample in samples]
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

    0 without a fenced block. Departures: programs run in the sandbox of this machine, not at a
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
    results = [tested(sample, testing_of(options), stop=False) for sample in samples]
    shares = [_share(passed[:_FIRST] if continuous else passed) for passed in results]
    return [
        share if "```" in sample.completion else 0.0
        for sample, share in zip(samples, shares, strict=True)
    ]


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
    "openai/gsm8k": other_names.gsm8k,
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        other_names.math_reward,
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), other_names.math_dapo),
    **dict.fromkeys(
        (
            *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"),
            *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
        ),
        other_names.prime_math,
    ),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _programs),
    "hiyouga/geometry3k": other_names.geo3k,
    **dict.fromkeys(
        (
            *("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa"),
            *("searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"),
        ),
        other_names.search_r1_like_qa_em,
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
        reward = other_names.math_dapo if source.startswith("aime") else _SOURCES.get(source)
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
