r"""Final answers: extracting them from texts, reading numbers, and comparing two of them."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from jrl.errors import UserError
from jrl.rewards.answers import Based, Choice, Colon, Items, Words, read
from jrl.rewards.base import Sample
from jrl.rewards.compare import Checker, same
from jrl.rewards.markup import LONGEST, clean
from jrl.rewards.quantities import Quantity

_NUMBER = re.compile(
    r"""(?:(?<![\w.])|(?<=\\approx)|(?<=\\boxed))-?\s?\$?(?:\d+\s(?=\d+/\d))?"""
    r"""(?:\d{1,3}(?:(?:,|\{,\}|[ \u2009\u202f](?=\d{3}(?![\d/]|[ ]\d+/\d)))\d{3})+|\d+)?"""
    r"""(?:\.\d+|(?<=\d))(?:[eE][+-]?\d+)?"""
    r"""(?:\s?/\s?\d+(?![\d/]|\.\d))?"""
    r"""(?:[ ](?:hundred|thousand|million|billion|trillion|dozen)\b)*"""
    r"""|(?<!\d)-?\d*\\[dt]?frac\s?\{-?\d+\}\s?\{-?\d+\}""",
    re.VERBOSE,
)
_BEHIND = re.compile(
    r"""\s?(?:\\?%|percent\b|per\s?cent\b|°[CF]?|\^\\circ|\\pi\b|π|pi\b|[ap]\.?m\b\.?|[A-Za-z]+)
    (?:\^\{?[23]\}?|[²³]|\s?(?:/|per\s)\s?[A-Za-z]+)?""",
    re.VERBOSE | re.IGNORECASE,
)
_FORMULA = re.compile(r"(?<!\\)\$((?:\\.|[^$\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MARK = re.compile(r"(^[ \t]*)?#{4,}[ \t]*(.*)", re.MULTILINE)
_STATED = re.compile(
    r"(?:^|[.\n]|final answer:) *(?:so,? |thus,? |therefore,? )?(?:the )?"
    r"(?:final |correct |right |best )?(?:answer|option|choice) is:?"
    r"\s+([^\n]{1,200}?)"
    r"(?:\.?\s*I hope it is correct)?\.?\s*$",
    re.IGNORECASE,
)
"""The last sentence of a text, "The answer is ..."."""
_BETWEEN = re.compile(
    r"(?:\\?[$\s)\]]|\\q?quad\b|\\[,;:])*(?:[,;]|(?:\\text\s*\{)?\s*(?:and|or)\b)\s*"
    r"(?:(?:and|or)\b)?(?:\\?[$\s(\[}]|\\q?quad\b|\\[,;:])*"
)
"""Text that joins two boxes into one list."""
_MINUS = re.compile(r"(?:=|\$|\\\(|\\\[|\bis)[ ]*-\\?$")
"""A sign before a box."""
_FAR = 40
"""Characters; boxes farther from each other are no list."""
_HEADED = re.compile(r"\W*(?:the )?(?:final )?answer\W*", re.IGNORECASE)


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
    r"""The content of the last ``\boxed{...}``, or what follows a later "####", else None.

    Boxes with "and", "or" or a comma between them are one list. A heading of Markdown is no mark:
    "#### Step 1" with lines below it. "#### Answer" marks the line below it.

    >>> marked_answer("#### **18**"), marked_answer("#### Step 1\n3 + 4 = 7")
    ('18', None)
    >>> marked_answer(r"$\boxed{3}$ and $\boxed{5}$")
    '3, 5'
    """
    boxes = _boxes(text)
    for mark in reversed(list(_MARK.finditer(text, boxes[-1].end if boxes else 0))):
        line, below = mark.group(2).strip(), text[mark.end() :].strip()
        answer = None
        if mark.group(1) is None and line:
            answer = line
        elif not line or _HEADED.fullmatch(line):
            answer = below.split("\n", 1)[0]
        elif not below or not _is_heading(line):
            answer = line
        # words behind a box are a remark
        if answer and not (boxes and isinstance(read(clean(_plain(answer))), Words)):
            return _plain(answer)
    return _joined(text, boxes)


def _plain(line: str) -> str:
    """A line without emphasis and without "Answer:" before it."""
    line = re.sub(r"^\W*(?:final )?answer\s*:\W*(?=[\w$\\(\[{-])", "", line.strip(), flags=re.I)
    emphasis = re.fullmatch(r"(\*{1,3}|_{1,3}|`)(.+?)\1[.]?", line)
    return emphasis.group(2).strip() if emphasis else line


def _is_heading(line: str) -> bool:
    """Whether a line with others below it is a heading: it has words, and they are no unit."""
    answer = read(clean(_plain(line)))
    if isinstance(answer, Quantity):
        return not answer.unit.is_listed and bool(re.search(r"[A-Z]", line))
    return isinstance(answer, Words | Choice)


def _last_quantity(text: str) -> str | None:
    """The last number of a text with what may change it: per cent, a unit, a formula around it."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    for formula in _FORMULA.finditer(text[-LONGEST:]):
        # between the dollar signs of two prices are words
        content = next(filter(None, formula.groups()))
        place = formula.start() + max(0, len(text) - LONGEST)
        bare = re.sub(r"\\text\{[^{}]*\}|\\[a-zA-Z]+", "", content)
        is_around = place <= last.start() < last.end() <= place + len(formula.group())
        value = re.split(r"=|\\approx", content)[-1].strip()
        is_more = "\\" in content or re.search("[A-Za-z]", value)
        if is_around and is_more and not re.search("[A-Za-z]{3}", bare):
            return value
    number, end = last.group().strip(), last.end()
    if "$" in number and text.startswith("$", end):  # not a price but mathematics
        number, end = number.replace("$", ""), end + 1
    behind = _BEHIND.match(text, end)
    if behind is None:
        return number
    quantity = read(clean(number + behind.group()))
    if isinstance(quantity, Quantity) and not quantity.unit.is_listed:
        return number  # any noun may follow a number in a sentence
    following = behind.group().strip()
    if following in ("in", "A", "c", "C"):
        return number  # "18 in total"
    # "in 5 A" and "5 a day" are words, "2 pi" and "3 i" are not
    is_factor = re.fullmatch(r"\\pi|π|pi|i|x|y|z|n", following)
    if isinstance(quantity, Quantity | Colon) or is_factor:
        return number + behind.group()
    return number


class _Box(NamedTuple):
    """A closed box: where it begins and ends in the text, and what it holds."""

    start: int
    end: int
    content: str


def _boxes(text: str) -> list[_Box]:
    """The closed boxes of a text, braces balanced, by where they begin."""
    opened: list[re.Match[str]] = []
    boxes = []
    for brace in re.finditer(r"\\f?boxed\s*\{|[{}]", text):
        if brace.group() != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if len(start.group()) > 1:
                content = text[start.end() : brace.start()].strip()
                boxes.append(_Box(start.start(), brace.end(), content))
    return sorted(boxes)


def boxed(text: str) -> str | None:
    r"""The content of the last closed ``\boxed{...}`` or ``\fbox{...}``, braces balanced, or None.

    >>> boxed(r"\boxed{1} then \boxed{ {2} } then \boxed{3")
    '{2}'
    """
    boxes = _boxes(text)
    return boxes[-1].content or None if boxes else None


def _joined(text: str, boxes: list[_Box]) -> str | None:
    """Contents of the last boxes: one, or a list of those joined by "and" or a comma."""
    if not boxes:
        return None
    contents = [boxes[-1].content]
    if contents[0] and _MINUS.search(text[max(0, boxes[-1].start - _FAR) : boxes[-1].start]):
        return f"-{contents[0]}"
    for box, after in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        between = text[box.end : after.start]
        if len(between) > _FAR or not _BETWEEN.fullmatch(between):
            break
        if box.content not in contents:
            contents.insert(0, box.content)
    return ", ".join(filter(None, contents)) or None


def to_number(text: str) -> Fraction | None:
    r"""The number that a text represents, or None if it is more than a number.

    Its unit, a currency and a percent sign are left out: "$1,200.50" is 1200.5, and "50%" is 50.

    >>> to_number("$1,200.50"), to_number(r"-\frac{3}{4}"), to_number("3 or 4")
    (Fraction(2401, 2), Fraction(-3, 4), None)
    """
    if len(text) > LONGEST:
        return None
    quantity = read(clean(text))
    if isinstance(quantity, Based) and quantity.base == 10:
        return Fraction(int(quantity.digits))
    return quantity.value if isinstance(quantity, Quantity) else None


def same_answer(
    answer: str, expected: str, tolerance: float = 1e-6, check: Checker | None = None
) -> bool:
    """Whether two final answers are the same, by the grammar of ``jrl.rewards.answers``.

    Args:
      answer: the completion's.
      expected: the dataset's.
      tolerance: relative, for numbers that are not both integers; 0 compares exactly.
      check: compares two expressions; None compares their texts.

    >>> same_answer("3.50", "$3.5"), same_answer("Blue.", "blue"), same_answer("5 cm", "5 km")
    (True, True, False)
    """
    return same(answer, expected, tolerance, check)


def exact_reward(samples: list[Sample], tolerance: float = 1e-6) -> list[float]:
    """1 for a completion whose final answer is the prompt's, else 0.

    A dataset's worked answer is read like a completion: what follows its "####" counts. An answer
    in words is compared with the marked answer, or with the complete text if none is marked. Of
    answers in a list one is enough.

    Args:
      samples: what to judge.
      tolerance: relative, for numbers that are not both integers.

    Returns:
      Points, 0 or 1 for each sample.

    Raises:
      UserError: the tolerance is no number of at least 0.
    """
    check_tolerance(tolerance, "exact")
    return [float(_is_right(sample, tolerance)) for sample in samples]


def check_tolerance(tolerance: Any, name: str) -> None:
    """Raises UserError for a tolerance of the reward of that name that compares nothing."""
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not number or not 0 <= tolerance < math.inf:
        raise UserError(f"rewards.{name}.tolerance = {tolerance!r}; must be a number of at least 0")


def expected_answer(answer: Any) -> str:
    """The final answer inside a prompt's ``answer``, as text."""
    text = str(answer).strip()
    return marked_answer(text) or text


def expected_answers(answer: Any) -> list[str]:
    """The final answers of which a completion must give one: a list holds several."""
    return [expected_answer(x) for x in (answer if isinstance(answer, list | tuple) else [answer])]


def last_statement(text: str) -> str | None:
    """The answer in a text that ends with "The answer is ...", else None.

    >>> last_statement("She is faster. The answer is Evelyn.")
    'Evelyn'
    """
    stated = _STATED.search(text[-LONGEST:])
    return stated.group(1) if stated else None


def claimed_answer(completion: str, expected: str) -> str | None:
    """The answer that a completion gives, where it can be found without parsing mathematics.

    What is marked; where a number is expected, the last one; else what the last sentence states, or
    the complete text.
    """
    marked = marked_answer(completion)
    if marked is not None:
        return marked
    if to_number(expected) is None and not isinstance(read(clean(expected)), Colon):
        return last_statement(completion) or completion
    stated = last_statement(completion)
    if stated is not None and isinstance(read(clean(stated)), Items):
        return stated  # several numbers, of which the last is not the answer
    return _last_quantity(completion) or completion


def _is_right(sample: Sample, tolerance: float) -> bool:
    for expected in expected_answers(sample.prompt.answer):
        answer = claimed_answer(sample.completion, expected)
        if answer is not None and same_answer(answer, expected, tolerance):
            return True
    return False
