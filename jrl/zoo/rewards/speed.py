"""A reward for programs that are right and fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jrl.errors import UserError
from jrl.rewards.base import Points, Sample, defaults_of, options_of
from jrl.verifiers.code import (
    Verdicts,
    code,
    is_cut_short,
    judge,
    judge_solution,
    last_block,
    task_of,
    testing_of,
    whole_program,
)
from jrl.verifiers.references import Reference

if TYPE_CHECKING:
    from jrl.types import Prompt


@options_of(code, "partial", "check_solution", total_seconds=4.0)
def code_speed(
    samples: list[Sample],
    slow: str = "input",
    repeats: int = 3,
    least: float = 0.1,
    **options: Any,
) -> list[Points]:
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
    Where the slow one has no time, as on a busy machine, there is no opinion.

    Args:
      samples: what to judge; the program is the last fenced block, or all of the completion.
      slow: the column with the row's program, "input" in PIE.
      repeats: runs of each test.
      least: in [0, 1], the least perf that counts.
      **options: of ``code``; ``total_seconds``, here 4, is of all runs of one program: two are run,
        so that twice as much must be below ``reward_pool.timeout_seconds``. The slow programs of
        ``check_rows`` rows are tested before training begins.

    Raises:
      UserError: a row without a slow program, or with one whose output is wrong.
    """
    code([], **options)  # says what is wrong
    if repeats < 1 or not 0 <= least <= 1:
        raise UserError(
            f"rewards.code_speed: repeats = {repeats} must be at least 1, least = {least} in [0, 1]"
        )
    points, testing = list[Points](), testing_of(options)
    for sample in samples:
        name, tests = task_of(sample.prompt, testing)
        program = whole_program(last_block(sample.completion), sample.prompt)
        often = tests._replace(cases=list(tests.cases) * repeats)
        verdicts = judge(program, often, name, testing)
        share = sum(verdicts.passed) / len(verdicts.passed)
        if share == 1:
            before = judge(_slow_program(sample, slow), often, name, testing)
            if is_cut_short(before):
                points.append(None)
                continue
            _check_slow(sample, slow, before)
            saved = 1 - _least(verdicts, len(tests.cases)) / _least(before, len(tests.cases))
            share += saved if saved >= least else 0.0
        points.append(share)
    return points


def reference(prompt: Prompt, where: str, options: Mapping[str, Any]) -> Reference:
    """The row's slow program beside its tests, as ``code.reference`` of a solution."""
    chosen = {**defaults_of(code_speed), **options}
    sample, testing = Sample(prompt, "", np.zeros(0, np.int32), "stop_token"), testing_of(chosen)

    def complaint() -> str:
        name, tests = task_of(prompt, testing)
        often = tests._replace(cases=list(tests.cases) * chosen["repeats"])
        program = _slow_program(sample, chosen["slow"])
        _check_slow(sample, chosen["slow"], judge_solution(program, often, name, testing))
        return ""

    used = chosen["slow"], chosen["repeats"], testing, dict(prompt.meta), prompt.answer
    return Reference(where, repr(("code_speed", *used)), complaint)


def _least(verdicts: Verdicts, count: int) -> float:
    """Seconds of all tests, each its least over the repeats; above 0."""
    each = [min(verdicts.seconds[test::count]) for test in range(count)]
    return max(sum(each), 1e-9)


def _slow_program(sample: Sample, column: str) -> str:
    """The row's own program."""
    program = sample.prompt.meta.get(column)
    if not isinstance(program, str) or not program.strip():
        raise UserError(
            f"rewards.code_speed: prompt {sample.prompt.id} has no program in {column!r}; name the"
            " column in slow"
        )
    return last_block(program)


def _check_slow(sample: Sample, column: str, verdicts: Verdicts) -> None:
    """Raises UserError unless the row's own program passes all of its tests."""
    if not all(verdicts.passed):
        raise UserError(
            f"rewards.code_speed: prompt {sample.prompt.id}: its program in {column!r} passes"
            f" {sum(verdicts.passed)} of {len(verdicts.passed)} runs of its tests; raise"
            " total_seconds, or leave the row out"
        )
