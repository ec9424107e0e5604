"""Verl's rewards that run programs, and its choice of a reward by data source. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jrl.errors import UserError
from jrl.rewards import other_names
from jrl.rewards.base import Sample
from jrl.verifiers.code import Testing, judge, last_block, task_of, whole_program

_FIRST = 10
"""Tests whose share is the reward of a program that does not pass all."""


def _shares(
    samples: list[Sample], seconds: tuple[float, float], memory_mib: float, stop: bool
) -> list[list[bool]]:
    """Tests of its row that each program passes; seconds are of a test and of all."""
    testing = Testing("", "python", "language", *seconds, memory_mib, 1024.0, 0, 1e-6)
    passed = []
    for sample in samples:
        name, tests = task_of(sample.prompt, testing)
        program = whole_program(last_block(sample.completion), sample.prompt)
        passed.append(judge(program, tests, name, testing, stop=stop).passed)
    return passed


def prime_code(
    samples: list[Sample],
    continuous: bool = False,
    seconds: float = 4.0,
    total_seconds: float = 8.0,
    memory_mib: float = 512.0,
) -> list[float]:
    """Verl's ``prime_code``: 1 where a program passes all tests of its row.

    Departures: programs and tests are found as ``code`` finds them, and run in the sandbox.

    Args:
      samples: what to judge.
      continuous: pays the share of the first ten tests to other programs; as in verl's
        ``default_compute_score``.
      seconds: of one test.
      total_seconds: of a program; below ``reward_pool.timeout_seconds``.
      memory_mib: of all its processes together, MiB.
    """
    results = _shares(samples, (seconds, total_seconds), memory_mib, stop=not continuous)
    return [
        1.0 if all(passed) else _share(passed[:_FIRST]) if continuous else 0.0 for passed in results
    ]


def sandbox_fusion(
    samples: list[Sample],
    continuous: bool = False,
    timeout: float = 10.0,
    memory_limit_mb: float = 1024.0,
) -> list[float]:
    """Verl's ``sandbox_fusion``: the share of its row's tests that a program passes.

    0 without a fenced block. Departures: programs run in the sandbox of this machine, not at a
    service, and all tests of a program together have twice ``timeout``.

    Args:
      samples: what to judge.
      continuous: counts the first ten tests alone.
      timeout: seconds of one test; twice that must be below ``reward_pool.timeout_seconds``.
      memory_limit_mb: of all processes of a program together, MiB.
    """
    results = _shares(samples, (timeout, 2 * timeout), memory_limit_mb, stop=False)
    shares = [_share(passed[:_FIRST] if continuous else passed) for passed in results]
    return [
        share if "```" in sample.completion else 0.0
        for sample, share in zip(samples, shares, strict=True)
    ]


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


def default_compute_score(samples: list[Sample], column: str = "data_source") -> list[float]:
    """Verl's ``default_compute_score``: the reward that it has for a row's data source.

    Args:
      samples: what to judge.
      column: with the data source; "aime" may begin it, the others are whole.

    Raises:
      UserError: a row names a data source that verl has no reward for.
    """
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
