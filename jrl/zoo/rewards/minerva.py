r"""Minerva's comparison of final answers, letter for letter, as verl's ``math_dapo`` has it.

From appendix D of "Solving Quantitative Reasoning Problems with Language Models" (arXiv:2206.14858)
by way of lm-evaluation-harness. What it calls equal depends on replaced letters: "5 km" is 5, and
"4." is not 4. ``jrl.rewards.answers`` is the grammar that this library trusts; this is for runs
that are to be those of others.
"""

from __future__ import annotations

import re

_REPLACED = [
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
]
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots"),
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds"),
    *("meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}"),
    *("\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = [
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"(\\text\{)(.*?)(\})", r"\2"),
    (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
]


def normal_form(answer: str) -> str:
    r"""The form in which two answers are equal or not.

    >>> normal_form("x = 5 km"), normal_form(r"$\frac12$"), normal_form("1,234")
    ('5', '\\frac{1}{2}', '1234')
    """
    answer = answer.split("=")[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    for pattern, by in _UNWRAPPED:
        answer = re.sub(pattern, by, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits.strip() if digits.isdigit() else answer.strip()


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{``, letter for letter; None where it is not closed.

    >>> last_box(r"\boxed{1} \boxed{ {2} }"), last_box(r"\boxed{1} \boxed{2")
    (' {2} ', None)
    """
    _, mark, content = text.rpartition("\\boxed{")
    depth = 1
    for end, letter in enumerate(content if mark else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return content[:end]
    return None
