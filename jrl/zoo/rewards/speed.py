"""A reward for programs that are right and fast."""

from __future__ import annotations

from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.verifiers.code import Limits, Verdicts, code, judge, last_block, task_of
from jrl.verifiers.code_tests import Tests


def code_speed(
    samples: list[Sample],
    slow: str = "input",
    column: str = "",
    language: str = "python",
    language_column: str = "language",
    repeats: int = 3,
    least: float = 0.1,
    seconds: float = 4.0,
    total_seconds: float = 4.0,
    memory_mib: float = 512.0,
    output_kib: float = 1024.0,
    max_tests: int = 0,
    tolerance: float = 1e-6,
) -> list[float]:
    """Programs by their tests, and by their speed beside the slow program of their row.

    PerfRL, "Leveraging Reinforcement Learning and Large Language Models for Code Optimization"
    (arXiv:2312.05657), ranks candidates y for a program x by eq(R, y) + perf(y), the unit tests R
    and the speed; ``method = "rrhf"`` learns from the order. Here

        eq   = share of the tests that y passes
        perf = max(0, 1 - T_y / T_x) if y passes all of them, else 0

    with T the processor time of all tests, so that the speed-up T_x / T_y is 1 / (1 - perf). Less
    than ``least`` is 0: the data set of the paper, PIE (arXiv:2302.07867), counts a program as
    optimised from a tenth on. Departures: the paper's numbers for eq and perf could not be found;
    of rewards RRHF reads the order alone. Time is measured, each test's least of ``repeats`` runs,
    so it is not the same in two runs; both programs run in the same sandbox, one after the other.

    Args:
      samples: what to judge; the program is the last fenced block, or all of the completion.
      slow: the column with the row's program, "input" in PIE.
      column: with the tests, as in ``code``.
      language: of rows that do not say.
      language_column: of the row's own language.
      repeats: runs of each test.
      least: in [0, 1], the least perf that counts.
      seconds: of one test.
      total_seconds: of all runs of one program; two are run, so that twice as much must be below
        ``reward_pool.timeout_seconds``.
      memory_mib: as in ``code``, as are ``output_kib``, ``max_tests`` and ``tolerance``.
      output_kib: KiB.
      max_tests: at most; 0 for all.
      tolerance: of numbers.

    Raises:
      UserError: a row without a slow program, or with one that fails its tests.
    """
    limits = Limits(seconds, total_seconds, memory_mib, output_kib, tolerance)
    code([], language=language, max_tests=max_tests, **limits._asdict())  # says what is wrong
    if repeats < 1 or not 0 <= least <= 1:
        raise UserError(
            f"rewards.code_speed: repeats = {repeats} must be at least 1, least = {least} in [0, 1]"
        )
    points = []
    for sample in samples:
        name, tests, program = task_of(sample, column, language, language_column, max_tests)
        often = tests._replace(cases=list(tests.cases) * repeats)
        verdicts = judge(program, often, name, limits)
        share = sum(verdicts.passed) / len(verdicts.passed)
        if share == 1:
            before = _slow(sample, slow, often, name, limits)
            saved = 1 - _least(verdicts, len(tests.cases)) / _least(before, len(tests.cases))
            share += saved if saved >= least else 0.0
        points.append(share)
    return points


def _least(verdicts: Verdicts, count: int) -> float:
    """Seconds of all tests, each its least over the repeats; above 0."""
    each = [min(verdicts.seconds[test::count]) for test in range(count)]
    return max(sum(each), 1e-9)


def _slow(sample: Sample, column: str, tests: Tests, language: str, limits: Limits) -> Verdicts:
    """Verdicts on the row's own program."""
    program = sample.prompt.meta.get(column)
    row = f"rewards.code_speed: prompt {sample.prompt.id}"
    if not isinstance(program, str) or not program.strip():
        raise UserError(f"{row} has no program in {column!r}; name the column in slow")
    verdicts = judge(last_block(program), tests, language, limits)
    if not all(verdicts.passed):
        raise UserError(
            f"{row}: its program in {column!r} passes {sum(verdicts.passed)} of"
            f" {len(verdicts.passed)} runs of its tests; raise total_seconds, or leave the row out"
        )
    return verdicts
