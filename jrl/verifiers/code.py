"""Programs by their tests, in the sandbox: the reward ``code``. Imports no JAX."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jrl.episodes.sandbox import Sandbox, SandboxLimits
from jrl.errors import UserError
from jrl.rewards.base import Sample, defaults_of
from jrl.system.event_loop import run_coroutine
from jrl.verifiers.code_tests import Tests, passes, tests_of
from jrl.verifiers.languages import LANGUAGES, commands_of, language_named, source_of
from jrl.verifiers.references import Reference

if TYPE_CHECKING:
    from jrl.types import Prompt

_DRIVER = Path(__file__).with_name("driver.py")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
_MIB = 1 << 20
_LONGEST_PROGRAM = 1 << 18
_LONGEST_RUN = 64 * _MIB
_SHOWN = 120
_FREE_FILES = 64 * _MIB
_PATIENCE = 4
"""Times its limits that a row's own solution may take on a busy machine."""


SOLUTIONS = ("solution", "solutions", "canonical_solution", "reference_solution", "code")
"""Columns in which a row's own solution is looked for: of APPS, TACO, HumanEval, MBPP."""


class Verdicts(NamedTuple):
    """Results of a program's tests.

    Attributes:
      passed: for each test.
      notes: how each of them ended, as far as it ran: "ok" and what it gave, "timeout" ...
      compiler: its complaint, or "".
      seconds: of processor time that each of them took, as far as it ran.
      compiling: seconds of processor time of the compiler.
    """

    passed: list[bool]
    notes: list[str]
    compiler: str = ""
    seconds: tuple[float, ...] = ()
    compiling: float = 0.0


def code(
    samples: list[Sample],
    column: str = "",
    language: str = "python",
    language_column: str = "language",
    partial: bool = False,
    seconds: float = 4.0,
    total_seconds: float = 8.0,
    memory_mib: float = 512.0,
    output_kib: float = 1024.0,
    max_tests: int = 0,
    tolerance: float = 1e-6,
    check_solution: str = "",
    check_rows: int = 64,
) -> list[float]:
    """Programs by the tests of their rows: 1 where all are passed, else 0.

    The program is the last fenced block of the completion, or all of it. Its tests are read from
    the row in the layouts of APPS, TACO and verl's ``prime_code`` ({"inputs", "outputs"}, with
    "fn_name" where a function is called), of lists of {"input", "output"}, of MBPP (asserts) and
    HumanEval (``test`` and ``entry_point``), each as values or as JSON text. Every test has a
    process of its own in one run of the sandbox; outputs are compared outside. All tests or nothing
    is the reward of AceReason (arXiv:2505.16400), a share of them verl's.

    Args:
      samples: what to judge.
      column: with the tests; "" looks in the usual ones.
      language: of rows that do not say: "python", "c", "c++", "go", "java", "javascript", "rust".
      language_column: of the row's own language, if there is such a column.
      partial: pays the share of tests that are passed.
      seconds: of one test.
      total_seconds: of a program with its compiler; below ``reward_pool.timeout_seconds``.
      memory_mib: of all its processes together, MiB.
      output_kib: of one test, KiB; of all of them four times as much.
      max_tests: at most, the first ones; 0 for all.
      tolerance: of numbers with a point or an exponent, absolute or relative.
      check_solution: a column with a right program, which is run before training begins, so that
        rows whose tests it fails are named; "" looks in the usual ones (``SOLUTIONS``).
      check_rows: of each file, rows whose solution is run then; 0 for none.

    Raises:
      UserError: a row without tests, or a language that cannot be run here.
    """
    limits = seconds, total_seconds, memory_mib, output_kib
    testing = Testing(column, language, language_column, *limits, max_tests, tolerance)
    _check(testing)
    if check_rows < 0:  # what it and check_solution are for is in ``reference``
        raise UserError(f"rewards.code.check_rows = {check_rows}: give 0 for none, or a number")
    points = []
    for sample in samples:
        passed = tested(sample, last_block(sample.completion), testing, stop=not partial)
        share = sum(passed) / len(passed)
        points.append(share if partial else float(share == 1.0))
    return points


def tested(sample: Sample, program: str, testing: Testing, *, stop: bool) -> list[bool]:
    """Which of its row's tests the program of a completion passes; see ``judge``."""
    name, tests = task_of(sample.prompt, testing)
    program = whole_program(program, sample.prompt)
    return judge(program, tests, name, testing, stop=stop).passed


class Testing(NamedTuple):
    """The options of ``code`` by which programs are tested."""

    column: str
    language: str
    language_column: str
    seconds: float
    total_seconds: float
    memory_mib: float
    output_kib: float
    max_tests: int
    tolerance: float


def testing_of(options: Mapping[str, Any]) -> Testing:
    """The options of ``code`` by which programs are tested, defaults for those that are missing."""
    chosen = {**defaults_of(code), **options}
    return Testing(*(chosen[name] for name in Testing._fields))


def task_of(prompt: Prompt, testing: Testing) -> tuple[str, Tests]:
    """The language of a row's programs, and its tests."""
    name = language_named(str(prompt.meta.get(testing.language_column) or testing.language))
    tests = tests_of(prompt.meta, prompt.answer, testing.column, prompt.id + 1)
    if testing.max_tests:
        tests = tests._replace(cases=tests.cases[: testing.max_tests])
    return name, tests


def whole_program(program: str, prompt: Prompt) -> str:
    """The program with what stands before it, where it is a function's body, as in HumanEval."""
    called = prompt.meta.get("entry_point")
    if called and not re.search(rf"\bdef\s+{re.escape(str(called))}\b", program):
        return (prompt.question or prompt.text) + program
    return program


def _check(testing: Testing) -> None:
    for name in ("seconds", "total_seconds", "memory_mib", "output_kib"):
        if not (value := getattr(testing, name)) > 0:
            raise UserError(f"rewards.code.{name} = {value} must be above 0")
    if testing.max_tests < 0:
        raise UserError(
            f"rewards.code.max_tests = {testing.max_tests}: give 0 for all, or a number"
        )
    if testing.seconds > testing.total_seconds:
        raise UserError(
            f"rewards.code.seconds = {testing.seconds:g} of one test is more than total_seconds ="
            f" {testing.total_seconds:g} of all; raise total_seconds"
        )
    language_named(testing.language)


def last_block(text: str) -> str:
    r"""The last fenced block of a text, or all of it.

    >>> last_block("Thus:\n```python\nprint(1)\n```\n")
    'print(1)\n'
    """
    blocks = _FENCE.findall(text)
    return str(blocks[-1][1]) if blocks else text


def judge(
    program: str, tests: Tests, language: str, testing: Testing, *, stop: bool = False
) -> Verdicts:
    """Runs a program's tests and judges what they gave.

    Args:
      program: source.
      tests: of the row.
      language: a name of ``language_named``.
      testing: limits and tolerance.
      stop: whether the first test that does not end well is the last.

    Returns:
      A verdict for each test; False for those that did not run.
    """
    count = len(tests.cases)
    if len(program) > _LONGEST_PROGRAM or not program.strip():
        return Verdicts([False] * count, [])
    if language != "python":
        _check_language(language, tests, testing.memory_mib)
    lines = _run(program, tests, language, testing, stop)
    if lines and "compiler" in lines[0]:
        return Verdicts([False] * count, [], lines[0]["compiler"])
    passed = [
        passes(tests, case, line["how"], line["text"], testing.tolerance)
        for case, line in zip(tests.cases, lines, strict=False)
    ]
    notes = [f"{line['how']} {line['text'][:_SHOWN]!r}" for line in lines]
    seconds = tuple(line["seconds"] for line in lines)
    compiling = lines[0]["compiling"] if lines else 0.0
    passed += [False] * (count - len(passed))
    return Verdicts(passed, notes, seconds=seconds, compiling=compiling)


def is_cut_short(verdicts: Verdicts) -> bool:
    """Whether a program's tests had no time, or were ended together, before all had run."""
    timed_out = any(note.startswith("timeout") for note in verdicts.notes)
    return timed_out or (not verdicts.compiler and len(verdicts.notes) < len(verdicts.passed))


def judge_solution(program: str, tests: Tests, language: str, testing: Testing) -> Verdicts:
    """As ``judge`` of a row's own solution; where time ran out, by processor time.

    On a busy machine a program waits for a processor. So it runs once more with more time, and is
    in time if the processor time of its tests, and of its compiler, is within the limits.
    """
    verdicts = judge(program, tests, language, testing)
    if not is_cut_short(verdicts):
        return verdicts
    seconds, total_seconds = _PATIENCE * testing.seconds, _PATIENCE * testing.total_seconds
    longer = testing._replace(seconds=seconds, total_seconds=total_seconds)
    again = judge(program, tests, language, longer)
    longest, total = max(again.seconds, default=seconds), again.compiling + sum(again.seconds)
    in_time = longest <= testing.seconds and total <= testing.total_seconds
    return again if in_time else verdicts


def _run(
    program: str, tests: Tests, language: str, testing: Testing, stop: bool
) -> list[dict[str, Any]]:
    """The driver's report of each test that ran."""
    compile_, command = ([], []) if language == "python" else commands_of(language)
    spec = {
        "form": tests.form,
        "program": source_of(language, program),
        "setup": tests.setup,
        "function": tests.function,
        "tests": [case.sent for case in tests.cases],
        "seconds": testing.seconds,
        "output": int(testing.output_kib * 1024),
        "stop": stop,
        "compile": compile_,
        "command": command,
        "file": LANGUAGES[language].file if command else "",
    }
    sent = json.dumps(json.dumps(spec))
    run = f"{_DRIVER.read_text()}\nmain(json.loads({sent}))\n"
    sandbox = _sandbox(testing.total_seconds, testing.memory_mib, testing.output_kib, language)
    result = run_coroutine(sandbox.run(run, longest=_LONGEST_RUN))
    lines = []
    for line in result.output.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # cut off
            break
    return lines


@functools.cache
def _sandbox(total_seconds: float, memory_mib: float, output_kib: float, language: str) -> Sandbox:
    how = LANGUAGES.get(language)
    return Sandbox(
        SandboxLimits(
            seconds=total_seconds,
            memory_bytes=int(memory_mib * _MIB),
            # escapes of JSON make up to six characters of one
            output_bytes=int(output_kib * 1024) * 6 * 4 + _MIB,
            file_bytes=_FREE_FILES if how is None else 4 * _FREE_FILES,
            processes=32 if how is None else 128,
            address_bytes=0 if how is None else how.address_bytes,
        )
    )


@functools.cache
def _hello(language: str, memory_mib: float) -> str:
    """The complaint of a machine that cannot run a language, or ""."""
    from jrl.verifiers.code_tests import Case

    tests = Tests("stdin", [Case("", "42")])
    testing = Testing("", language, "", 20, 60, memory_mib, 64, 0, 0)
    lines = _run(LANGUAGES[language].hello, tests, language, testing, True)
    if not lines:
        return "its process was ended"
    return lines[0].get("compiler", "") or ("" if lines[0]["text"].strip() == "42" else str(lines))


def _check_language(language: str, tests: Tests, memory_mib: float) -> None:
    if tests.form != "stdin":
        raise UserError(
            f"rewards.code: a program in {language} has tests of the form {tests.form!r};"
            " only Python has functions to call, give inputs and outputs as text"
        )
    trouble = _hello(language, memory_mib)
    if trouble:
        raise UserError(
            f"rewards.code: programs in {language} cannot be run in the sandbox here: a first one"
            f" ends with {trouble[:300]!r}; install {LANGUAGES[language].tools[0]} where every user"
            " may run it, or raise memory_mib"
        )


# ---------------------------------------------------------------- tests of tests


def reference(prompt: Prompt, where: str, options: Mapping[str, Any]) -> Reference | None:
    """The row's own solution beside its tests; None for a row without one.

    Args:
      prompt: of the row.
      where: which row it is, for messages.
      options: of ``code``.

    Raises:
      UserError: ``check_solution`` names a column that holds no program.
    """
    solution = _solution(prompt.meta, options.get("check_solution", ""))
    if not solution:
        return None
    testing = testing_of(options)

    def complaint() -> str:
        language, tests = task_of(prompt, testing)
        program = whole_program(solution, prompt)
        return _failures(judge_solution(program, tests, language, testing), tests)

    columns = {**prompt.meta, "answer": prompt.answer, "question": prompt.question}
    return Reference(where, repr(("code", solution, testing, columns)), complaint)


def _failures(verdicts: Verdicts, tests: Tests) -> str:
    failed = [i for i, passed in enumerate(verdicts.passed) if not passed]
    if not failed:
        return ""
    first = failed[0]
    note = verdicts.compiler or dict(enumerate(verdicts.notes)).get(first, "it did not run")
    return (
        f"fails tests {failed[:10]} (counted from 0): test {first} expects"
        f" {str(tests.cases[first].expected)[:_SHOWN]!r} and has {note[:300]}"
    )


def _solution(meta: Mapping[str, Any], column: str) -> str:
    """The first solution in a column, a text, a list of texts, or JSON of one; "" for none."""
    name = column or next((n for n in SOLUTIONS if meta.get(n)), "")
    value = meta.get(name)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[0] if value else None
    if isinstance(value, str):
        return last_block(value)
    if column and value is not None:
        raise UserError(
            f"rewards.code.check_solution = {column!r}: a row has {str(value)[:40]!r} in it, not a"
            " program"
        )
    return ""
