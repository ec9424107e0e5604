r"""Final answers: extracting them from texts, reading numbers, and comparing two of them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from jrl.rewards.base import Sample

_NUMBER = re.compile(
    r"""(?<![\w.])-?\s?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][+-]?\d+)?"""
    r"""(?:\s?/\s?\d+(?![\d/.]))?""",
    re.VERBOSE,
)
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*\{?(-?\d+)\}?\s*\{?(-?\d+)\}?")
_TOO_LONG = 400
"""Characters; an answer longer than this is not read as a number."""


def final_answer(text: str) -> str | None:
    r"""The final answer in a text.

    The content of the last ``\boxed{...}``; without one, what follows the last "####" on its line;
    without either, the last number in the text.

    Args:
      text: a completion, or a dataset's worked answer.

    Returns:
      The answer's text, or None when there is none.

    >>> final_answer(r"so 3 + 4 = \boxed{\frac{7}{2}} sheep in 2 fields")
    '\\frac{7}{2}'
    >>> final_answer("She pays $1,250.50 in all.")
    '$1,250.50'
    """
    marked = marked_answer(text)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(text)
    return numbers[-1].strip() if numbers else None


def marked_answer(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, else what follows the last "####", else None."""
    answer = boxed(text)
    if answer is not None:
        return answer
    _, marker, rest = text.rpartition("####")
    line = rest.strip().split("\n", 1)[0].strip()
    return line if marker and line else None


def boxed(text: str) -> str | None:
    r"""The content of the last closed ``\boxed{...}`` or ``\fbox{...}``, braces balanced, or None.

    >>> boxed(r"\boxed{1} then \boxed{ {2} } then \boxed{3")
    '{2}'
    """
    opened: list[re.Match[str]] = []
    last, content = -1, None
    for brace in re.finditer(r"\\f?boxed\s*\{|[{}]", text):
        if brace.group() != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if len(start.group()) > 1 and start.start() > last:
                last, content = start.start(), text[start.end() : brace.start()].strip()
    return content or None


def to_number(text: str) -> Fraction | None:
    r"""The number that a text represents, or None if it is more than a number.

    Commas between digits, dollar signs, ``\$``, percent signs, ``\text{...}``, units of letters
    after the number, spaces and a full stop at the end are ignored: "$1,200.50" is 1200.5, and
    "50%" is 50. Fractions are read as "3/4" and ``\frac{3}{4}``.

    >>> to_number("$1,200.50"), to_number(r"-\frac{3}{4}"), to_number("3 or 4")
    (Fraction(2401, 2), Fraction(-3, 4), None)
    """
    if len(text) > _TOO_LONG:
        return None
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[!,;: ]|\\left|\\right", "", text)
    text = text.replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text).strip().rstrip(".").strip()
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        sign, above, below = fraction.groups()
        text = f"{above}/{below}"
        return _fraction(text, -1 if sign else 1)
    text = re.sub(r"(?<=\d)\s+[A-Za-z][A-Za-z .²³^]*$", "", text)
    text = re.sub(r"\s*/\s*", "/", re.sub(r"^([-+])\s+", r"\1", text))
    return _fraction(text, 1)


def _fraction(text: str, sign: int) -> Fraction | None:
    exponent = re.search(r"[eE]([+-]?\d+)$", text)
    # Fraction would compute all digits; it also reads digits with underscores between them.
    if "_" in text or (exponent and abs(int(exponent.group(1))) > 300):
        return None
    try:
        return sign * Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def same_answer(answer: str, expected: str, tolerance: float = 1e-6) -> bool:
    """Whether two final answers are the same.

    Args:
      answer: the completion's.
      expected: the dataset's.
      tolerance: relative, for numbers that are not both integers; 0 compares exactly.

    Returns:
      For two integers, whether they are equal; for other numbers, whether they differ by at most
      ``tolerance`` times the expected one; else whether the texts are equal, ignoring case, spaces,
      dollar signs and a full stop at the end.

    >>> same_answer("3.50", "$3.5"), same_answer("Blue.", "blue"), same_answer("12", "13")
    (True, True, False)
    """
    left, right = to_number(answer), to_number(expected)
    if left is not None and right is not None:
        if left.denominator == right.denominator == 1:
            return left == right
        return abs(left - right) <= Fraction(tolerance) * abs(right)
    return _normal(answer) == _normal(expected)


def _normal(text: str) -> str:
    return re.sub(r"\s+|\$|\.$", "", text.strip()).casefold()


def exact_reward(samples: list[Sample], tolerance: float = 1e-6) -> list[float]:
    """1 for a completion whose final answer is the prompt's, else 0.

    A dataset's worked answer is read like a completion: what follows its "####" counts. An answer
    in words is compared with the marked answer, or with the complete text if none is marked.

    Args:
      samples: what to judge.
      tolerance: relative, for numbers that are not both integers.

    Returns:
      Points, 0 or 1 for each sample.
    """
    return [float(_is_right(sample, tolerance)) for sample in samples]


def expected_answer(answer: Any) -> str:
    """The final answer inside a prompt's ``answer``, as text."""
    text = str(answer).strip()
    return marked_answer(text) or text


def _is_right(sample: Sample, tolerance: float) -> bool:
    expected = expected_answer(sample.prompt.answer)
    if to_number(expected) is not None:
        answer = final_answer(sample.completion)
    else:
        answer = marked_answer(sample.completion) or sample.completion
    return answer is not None and same_answer(answer, expected, tolerance)
