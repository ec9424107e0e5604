r"""Size limits for answers given to a computer algebra system.

A short answer can stand for more work than there is time: ``9^{9^{9^9}}``, ``(10^9)!``. So texts
are judged by their form before sympy sees them, which computes such numbers while it reads them.
"""

from __future__ import annotations

import re

from jrl.rewards.markup import closing

LONGEST = 400
"""Characters of an answer."""

_DEEPEST = 12
"""Brackets inside each other; answers of data sets have 4 at most."""

_MOST_OPERATORS = 80
_LONGEST_NUMBER = 40
_LARGEST_POWER = 10_000
"""Of a number or a letter: 2^{10000} has 3,011 digits."""

_LARGEST_EXPANSION = 40
"""Sum of the powers of brackets and functions, which sympy multiplies out."""

_ENDLESS = re.compile(
    r"\\(?:i*nt|o?int|sum|prod|lim|limsup|liminf|bigcup|bigcap|def|newcommand|begin|overline)(?![a-z])"
)
_MATRIX = re.compile(r"\\begin\s*\{[pbvBV]?(?:small)?matrix\}")
_POWER = re.compile(r"(.?)\s*(?:\^|\*\*)\s*")
_EXPONENT = re.compile(r"[+-]?\s*(\d+)")


def is_tame(text: str) -> bool:
    r"""Whether an answer, in LaTeX or plain, is small enough to be read and compared by sympy.

    Bounded are its length, its depth, its operators, the digits of its numbers, powers (none in the
    exponent of another), factorials and binomials, and roots; sums, integrals and limits, which
    would be computed, are left out.

    >>> is_tame(r"\frac{x^2 + 1}{\sqrt{2}}"), is_tame("9^{9^9}"), is_tame("1000!!")
    (True, False, False)
    """
    if len(text) > LONGEST or _depth(text) > _DEEPEST:
        return False
    if len(re.findall(r"[-+*/^!=<>|&]|\\[a-zA-Z]+", text)) > _MOST_OPERATORS:
        return False
    if any(len(digits) > _LONGEST_NUMBER for digits in re.findall(r"[\d.,_]+", text)):
        return False
    if re.search(r"\d[eE][+-]?[\d_]{4,}", text):
        return False
    without_matrices = _MATRIX.sub("", text)
    if _ENDLESS.search(without_matrices):
        return False
    return _powers_are_small(text) and _factorials_are_small(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, abs(depth))
    return deepest


def _powers_are_small(text: str) -> bool:
    expansion = 0
    for power in _POWER.finditer(text):
        exponent = _group(text, power.end())
        if re.search(r"\^|\*\*|!|\\[dt]?binom|\\times|\\cdot|\*", exponent):
            return False
        # x^2^3, and (x^2)^3 where the inner power stands in brackets
        # and the factorial of a power, which is one of its value
        if re.match(r"\s*(?:\^|\*\*|!)", text[power.end() + len(exponent) :]):
            return False
        number = _EXPONENT.search(exponent)
        size = int(number.group(1)) if number else 1
        if size > _LARGEST_POWER or len(re.findall(r"\d+", exponent)) > 2:
            return False
        if not number:
            continue
        base = power.group(1)
        is_bracket = base in (")", "]", "}", "|")
        of_function = re.search(r"\\[a-zA-Z]+\s*$", text[: power.start() + len(base)])
        if is_bracket or of_function:
            expansion += size
            if "^" in _bracket_before(text, power.start() + len(base)) and size > 10:
                return False
    return expansion <= _LARGEST_EXPANSION


def _group(text: str, start: int) -> str:
    """The exponent at ``start``: one bracket, one command or number, one letter."""
    opening = text[start : start + 1]
    if opening and opening in "({[":
        return text[start : closing(text, start) + 1 or None]
    match = re.match(r"[+-]?\s*(?:\\[a-zA-Z]+(?:\s*\{[^{}]*\})*|\d+|.)", text[start:], re.DOTALL)
    return match.group() if match else ""


def _bracket_before(text: str, end: int) -> str:
    """The bracket that closes right before ``end``, or ""."""
    depth = 0
    for i in range(end - 1, -1, -1):
        depth += (text[i] in ")]}") - (text[i] in "([{")
        if depth <= 0:
            return text[i:end]
    return text[:end]


def _factorials_are_small(text: str) -> bool:
    counts = re.search(r"(?<!\\)!|\\[dt]?binom|\\choose|factorial|gamma|Gamma", text)
    if not counts:
        return True
    if re.search(r"!\s*!|!\s*[)\]}]+\s*!", text) or text.count("!") > 6:
        return False
    if any(len(digits) > 4 for digits in re.findall(r"\d+", text)):
        return False
    of_bracket = re.search(r"[)\]}]\s*!|\\[dt]?binom|\\choose|factorial|gamma|Gamma", text)
    grows = re.search(r"\^|\*|\\times|\\cdot|\)\s*\(", text)
    return not (of_bracket and grows)
