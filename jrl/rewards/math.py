"""A reward for correct mathematical answers, checked by math-verify if it is installed."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from jrl.rewards.base import Sample
from jrl.rewards.bounds import LONGEST, is_tame
from jrl.rewards.exact import (
    check_tolerance,
    claimed_answer,
    exact_reward,
    expected_answers,
    last_statement,
    same_answer,
)
from jrl.system.time_limit import time_limit

_SAME = 1e-5
"""Relative difference of values that math-verify may call equal."""

_PRODUCT = re.compile(r"((?<![\w^{}\\.])\d+(?:\.\d+)?)\s?(?=\([^(),]+\))")
"""A number before brackets."""

_SECONDS = 3.0
"""Processor time of one comparison; the pool's limit would end the process too."""


def math_reward(samples: list[Sample], tolerance: float = 1e-6) -> list[float]:
    """1 for a completion whose final answer equals the prompt's, else 0.

    Answers are read and compared by the grammar of ``jrl.rewards.answers``. Two expressions in them
    go to math-verify, the ``math`` extra, if ``bounds.is_tame`` holds of both and within 3 s; what
    it calls equal is computed once more. Without it the texts of expressions are compared. Of
    answers in a list one is enough.

    Args:
      samples: what to judge.
      tolerance: relative, for numbers that are not both integers.

    Returns:
      Points, 0 or 1 for each sample.

    Raises:
      UserError: the tolerance is no number of at least 0.
    """
    check_tolerance(tolerance, "math")
    if not samples:  # before an import that takes seconds
        return []
    checker = _math_verify()
    if checker is None:
        return exact_reward(samples, tolerance)
    return [float(_is_right(sample, tolerance, checker)) for sample in samples]


def _is_right(sample: Sample, tolerance: float, checker: _MathVerify) -> bool:
    answers = expected_answers(sample.prompt.answer)
    return any(_agrees(sample, expected, tolerance, checker) for expected in answers)


def _agrees(sample: Sample, expected: str, tolerance: float, checker: _MathVerify) -> bool:
    check = checker.agrees
    answer = claimed_answer(sample.completion, expected)
    try:
        with time_limit(_SECONDS, _TooLong, processor=True):
            if answer is not None and same_answer(answer, expected, tolerance, check):
                return True
            unmarked = sample.completion, last_statement(sample.completion)
            if answer not in unmarked:  # it was marked, or has the number that was expected
                return False
            # unmarked, the answer is looked for in the end of the completion
            tail = sample.completion[-LONGEST:]
            extracted = checker.extract(tail) if is_tame(tail) else None
            return extracted is not None and same_answer(extracted, expected, tolerance, check)
    except (_TooLong, MemoryError, RecursionError):
        return False


class _TooLong(BaseException):
    """The comparison took too long; not an Exception, as sympy catches many of those."""


class _MathVerify:
    """Parses and compares expressions with math-verify, and computes again what it calls equal."""

    def __init__(self, library: Any) -> None:
        self._verify = library.verify
        # math-verify's own time limits use alarm signals, so they are off and this module and the
        # reward pool set limits
        self._parse: Any = functools.partial(library.parse, parsing_timeout=None)
        self.agrees("x + 1", "1 + x")  # builds the grammar outside of a comparison's time limit

    def extract(self, text: str) -> str | None:
        """The text of the answer in a completion, as math-verify finds it."""
        parsed = self._parse(text)
        return parsed[-1] if parsed and isinstance(parsed[-1], str) else None

    def agrees(self, expected: str, answer: str) -> bool:
        """Whether two expressions are equal."""
        if not (is_tame(expected) and is_tame(answer)):
            return False
        # math-verify reads 1000(26) as a function's value
        texts = (_PRODUCT.sub(r"\1\\cdot", text) for text in _of_one_case(expected, answer))
        gold, claim = (self._parse(f"\\boxed{{{text}}}") for text in texts)
        if not gold or not claim or not self._verify(gold, claim, timeout_seconds=None):
            return False
        if any(
            _lost_letters(text, parsed[0]) for text, parsed in ((expected, gold), (answer, claim))
        ):
            return False
        return equal_values(gold[0], claim[0])


_NAMES = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


def _of_one_case(*texts: str) -> list[str]:
    r"""The texts with other letters for capitals that small letters stand beside.

    math-verify reads m and M, and \delta and \Delta, as one name.

    >>> _of_one_case("m/M", "M + 1")
    ['m/q', 'q + 1']
    """
    names = {name for text in texts for name in _NAMES.findall(text)}
    free = (letter for letter in "qwzvujk" if not {letter, letter.upper()} & names)
    twins = sorted(name for name in names if name != name.lower() and name.lower() in names)
    others = dict(zip(twins, free, strict=False))
    return [_NAMES.sub(lambda m: others.get(m[0], m[0]), text) for text in texts]


def _lost_letters(text: str, parsed: Any) -> bool:
    """Whether math-verify dropped all the letters of a text, as units: "5m" became 5."""
    bare = re.sub(r"\\[a-zA-Z]+|_\{?\w+\}?|[a-zA-Z]{3,}", "", text)
    return bool(re.search(r"[a-df-hj-zA-Z]", bare)) and not getattr(parsed, "free_symbols", True)


def equal_values(gold: Any, claim: Any) -> bool:
    """Whether two parsed answers have equal values, where they can be computed.

    math-verify rounds to six places, so it takes 1e-7 for 2e-7; it also compares what it read of a
    text, which may be a part. Relations and what has no value are left to it.
    """
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(claim, sympy.Expr)):
        if isinstance(gold, sympy.core.relational.Relational) and not gold.free_symbols:
            return bool(gold == claim)  # 1 = 1 and 2 = 2 are both true
        return True
    if gold.free_symbols != claim.free_symbols:
        return True
    if gold.is_Rational and claim.is_Rational:
        return bool(gold == claim)
    names = sorted(gold.free_symbols, key=str)
    for shift in (0, 1):
        point = {name: sympy.Rational(7 * i + 12 + 5 * shift, 11) for i, name in enumerate(names)}
        try:
            a, b = (sympy.N(side.subs(point), 40) for side in (gold, claim))
            if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
                continue
            if abs(a - b) > _SAME * max(abs(a), abs(b)):
                return False
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            return True
    return True


@functools.cache
def _math_verify() -> _MathVerify | None:
    """math-verify with its guards; None where it is not installed."""
    try:
        import math_verify
    except ImportError:
        return None
    # the loggers would warn on every call that the time limits are off
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return _MathVerify(math_verify)


math_reward.prepare = _math_verify  # type: ignore[attr-defined]
