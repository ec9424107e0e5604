"""A reward for correct mathematical answers, checked by math-verify if it is installed."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jrl.rewards.base import Sample
from jrl.rewards.bounds import LONGEST, is_tame
from jrl.rewards.exact import exact_reward, expected_answer, final_answer, marked_answer, to_number
from jrl.rewards.exact import same_answer as same_number

_SECONDS = 3.0
"""Processor time of one comparison; the pool's limit would end the process too."""


def math_reward(samples: list[Sample], tolerance: float = 1e-6) -> list[float]:
    """1 for a completion whose final answer equals the prompt's, else 0.

    Numbers are compared as ``exact_reward`` does. Anything else (sets, intervals, expressions) goes
    to math-verify, the ``math`` extra, if ``bounds.is_tame`` holds of both and within 3 s; else
    the texts are compared.

    Args:
      samples: what to judge.
      tolerance: relative, for numbers that are not both integers.

    Returns:
      Points, 0 or 1 for each sample.
    """
    checker = _math_verify()
    if checker is None:
        return exact_reward(samples, tolerance)
    return [float(_is_right(sample, tolerance, checker)) for sample in samples]


def _is_right(sample: Sample, tolerance: float, checker: Callable[[str, str], bool]) -> bool:
    expected = expected_answer(sample.prompt.answer)
    answer = final_answer(sample.completion)
    if to_number(expected) is not None and answer is not None and to_number(answer) is not None:
        return same_number(answer, expected, tolerance)
    if answer is not None and same_number(answer, expected, tolerance):
        return True
    marked = marked_answer(sample.completion)
    # Unmarked, the answer is looked for in the end of the completion.
    claimed = sample.completion[-LONGEST:] if marked is None else marked
    if not (is_tame(expected) and is_tame(claimed)):
        return False
    return checker(expected, claimed if marked is None else f"\\boxed{{{marked}}}")


class _TooLong(BaseException):
    """The comparison took too long; not an Exception, as sympy catches many of those."""


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Raises _TooLong after a while, in a main thread, such as that of a worker process.

    The clock is the processor's: on a busy machine a right answer stays right.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@functools.cache
def _math_verify() -> Callable[[str, str], bool] | None:
    """(expected, completion) -> whether they agree; None without math-verify."""
    try:
        import math_verify
    except ImportError:
        return None
    # math-verify's own time limits use alarm signals, so they are off and the reward pool sets the
    # limit; the loggers would warn about that on every call.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    parse: Any = functools.partial(math_verify.parse, parsing_timeout=None)

    def verify(expected: str, completion: str) -> bool:
        gold = parse(f"\\boxed{{{expected}}}")
        return bool(math_verify.verify(gold, parse(completion), timeout_seconds=None))

    def agrees(expected: str, completion: str) -> bool:
        try:
            with _limited_time():
                return verify(expected, completion)
        except (_TooLong, MemoryError, RecursionError):
            return False

    verify("x + 1", "\\boxed{1 + x}")  # builds the grammar outside of a comparison's time limit
    return agrees


math_reward.prepare = _math_verify  # type: ignore[attr-defined]
