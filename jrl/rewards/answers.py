r"""The grammar of final answers.

An answer, without markup (dollar signs of LaTeX, ``\text``, ``\boxed``, bold, spaces, the full stop
at its end), is the first of these that it can be:

    answer   = [name "="] one               x = 5, or 5 = x; the name may be missing on one side;
                                            (x, y) = (1, 2); f(2) = 7; R^2 = 0.9
             | {numbers "="} number         2 + 3 = 5, which is 5 beside what has no "="
             | quantity "(" quantity ")"    4 (four)
    one      = date | time | quantity | choice | sequence | range | list | words | expression
    date     = [day of the week] March 5, 2024 | 5 March | 2024-03-05 | 3/5/2024
    time     = 3:30 [AM | PM] | 3 PM | 15:30 | noon;  a:b is a ratio too, as is 15:20 beside 3:4
    quantity = number [unit], in jrl.rewards.quantities:  2 1/2 | $1,200 | 50% | 3 dozen eggs
    based    = digits "_" base              1011_2
    choice   = "(" letter ")" [one]         (B) 12; either part may be missing on one side
    sequence = brackets around ones         (1, 2] | {1, 2} | (0, 1) \cup (2, 3) | 1 < x <= 2
             | inequality "and" another     x > 1 and x < 3, which is 1 < x < 3
             | {name "|" inequality}        {x | x > 2}, which is (2, \infty)
             | \mathbb{R}                   all real numbers
    range    = one ("to" | "-") one         10 to 20, the same as [10, 20]
    list     = ones and separators          1, 2 | 3 or 4 | 1; 2 | \pm 3, which is 3, -3
    words    = what has words in it         compared as text, without case, articles, punctuation

``!=`` is ``\ne``, but right behind a number or n, as in n!=24, a factorial and "=".

``jrl.rewards.compare`` says when two are the same. Numbers are the same within a tolerance, whole
ones exactly; 50% is 50, 0.5 and 1/2. Units must fit (``units.fits``): one may be missing, two
different ones are different. Tuples have an order; lists and sets have none, and sets have no
repeats. Words are never products of letters. An expression is what remains; a computer algebra
system may compare two of those, and nothing else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from jrl.rewards.markup import (
    DEEPEST,
    LONGEST,
    MOST_ITEMS,
    bare,
    closing,
    plain_words,
    split_list,
)
from jrl.rewards.quantities import Quantity, read_quantity
from jrl.rewards.units import NO_UNIT, Unit, fits, read_unit


class Words(NamedTuple):
    """A text that is no mathematics."""

    text: str


class Expression(NamedTuple):
    """Mathematics that is no number."""

    text: str


class Based(NamedTuple):
    """Digits in another base than ten."""

    digits: str
    base: int


class Colon(NamedTuple):
    """Numbers with colons between them: a time of day, a duration, a ratio."""

    parts: tuple[Fraction, ...]
    half: str = ""  # "am", "pm"
    is_time: bool = False


class Date(NamedTuple):
    """A day; a part that is not named is 0. ``month`` and ``day`` of 3/5/2024 stay in order."""

    year: int
    month: int
    day: int


class Choice(NamedTuple):
    """A letter of a multiple choice, and what it stands for."""

    letter: str
    content: Answer | None


class Named(NamedTuple):
    """A name and its value: x = 5."""

    name: str
    value: Answer


class Items(NamedTuple):
    """Several answers: brackets "()", "[]", "[)", "(]", "{}", "cup", or "" for a list."""

    brackets: str
    items: tuple[Answer, ...]


class Measured(NamedTuple):
    """An expression with a unit: 2 pi cm."""

    value: Expression
    unit: Unit


_INFINITE = Expression(r"-\infty"), Expression(r"\infty")

Answer = Measured | Quantity | Words | Expression | Based | Colon | Date | Choice | Named | Items

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_WEEKDAY = re.compile(r"(?:mon|tues|wednes|thurs|fri|satur|sun)day,? ", re.IGNORECASE)
_DATES = [
    (re.compile(_MONTH + r" (\d{1,2})(?:st|nd|rd|th)?(?:,? (\d{4}))?", re.I), "mdy"),
    (re.compile(r"(\d{1,2})(?:st|nd|rd|th)? (?:of )?" + _MONTH + r"(?:,? (\d{4}))?", re.I), "dmy"),
    (re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})"), "ymd"),
    (re.compile(r"(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})"), "mdy"),
]
_TIME = re.compile(
    r"(\d{1,2})(?::([0-5]\d))?(?::([0-5]\d))?\s?(?:(a|p)\.?\s?m\b\.?|o'?clock)", re.IGNORECASE
)
_COLON = re.compile(r"\d+(?:\.\d+)?(?:\s?:\s?\d+(?:\.\d+)?){1,3}")
_BASED = re.compile(
    r"\(?([0-9A-Za-z]+)\)?\s?_\s?(?:\{\s*(?:base )?(\d{1,2}|[a-z]+)\s*\}|(\d{1,2}))"
)
_CHOICE = re.compile(
    r"(?:\(([A-J])\)|(?:option |choice )?([A-J])[.):])(?:\s+(?!and\b|or\b)(.+))?$"
    r"|(?:option|choice) \(?([A-J])\)?$",
    re.IGNORECASE,
)
_NAMES = (
    r"\\?[A-Za-z]+(?:_(?:\w+|\{[\w+-]+\}|\\[a-z]+|\{\\[a-z]+\}))?(?:\([a-z]\))?",
    r"(?:m\s?)?\\angle\s?[A-Z]+",
    r"\\(?:overline|overrightarrow|vec|bar|hat)\s?\{?\s?[A-Za-z]+\}?",
    r"\\\|\s?(?:\\vec\s?)?\{?[A-Za-z]+\}?\s?\\\|",  # a norm
    r"\|[A-Z]{2}\|",
    # f(2) or P(X > 2), but y(x - 2) is a product
    r"(?:[fghFGHPEC]|\\?(?:gcd|lcm|max|min|Var))[(\[][\w, +<>^|\\{}-]+[)\]]",
    r"[A-Za-z](?:'{1,3}|\^\{-1\})?\(\s?-?\d[\d., -]*\)",
    r"[fghFGH](?:'{1,3}|\^\{-1\})\([a-z]\)",
    r"[Rs]\^\{?2\}?",
    r"\([A-Za-z](?:\s?,\s?[A-Za-z])+\)",
    r"[A-Za-z]{1,3}(?:\s?:\s?[A-Za-z]{1,3})+",  # a ratio
)
_NAME = re.compile(rf"({'|'.join(_NAMES)})\s?(?:=|\\in(?![a-z])|:=)\s?([^=]+)$")
_ORDER = re.compile(r"\s*(\\le(?![a-z])|\\ge(?![a-z])|\\lt|\\gt|<|>)\s*")
_ITEM = r"-?\$?\d+(?:,\d{3})*(?:\.\d+)?(?:\s?(?:%|(?!to\b|and\b)[a-zA-Z]+))?"
_OR = re.compile(r"\bor\b|\\lor(?![a-z])")
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_REALS = re.compile(
    r"\\mathbb\s?\{?\s?R\s?\}?|(?:all )?(?:the )?(?:real numbers|reals)", re.IGNORECASE
)
_BUILDER = re.compile(r"\{\s?(\\?[A-Za-z]+)\s?(?:\||:|\\mid(?![a-z]))\s?(.+)\}")
"""{x | x > 2}"""
_RANGE = re.compile(rf"(?:from |between )?({_ITEM}) ?(?:to|-|and) ?({_ITEM})$")
_FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "exp",
        "sqrt",
        "min",
        "max",
        "gcd",
        "lcm",
        "mod",
        "det",
        "lim",
        "frac",
        "left",
        "right",
    ]
)


def read(text: str, commas: bool = False, depth: int = 0) -> Answer:
    r"""Parsed value of a cleaned text.

    Args:
      text: of ``markup.clean``.
      commas: whether "1,234" is a list.
      depth: of brackets around it.

    >>> read("3 or 4").items[1].value, read("10 million").value, read("silent")
    (Fraction(4, 1), Fraction(10000000, 1), Words(text='silent'))
    """
    if depth > DEEPEST or len(text) > LONGEST:
        return Words(plain_words(text))
    return _read(text, commas, depth)


@functools.lru_cache(4096)
def _read(text: str, commas: bool, depth: int) -> Answer:
    for attempt in (_date, _colon, _based):
        if (answer := attempt(text)) is not None:
            return answer
    quantity = read_quantity(text)
    if quantity is not None and not (commas and re.search(r"\d,\d", text)):
        return quantity
    return _compound(text, commas, depth) or _measured(text) or _word_or_expression(text)


def _compound(text: str, commas: bool, depth: int) -> Answer | None:
    inner = functools.partial(read, depth=depth + 1)
    if choice := _CHOICE.match(text):
        letter = choice.group(1) or choice.group(2) or choice.group(4)
        content = choice.group(3)
        return Choice(letter.upper(), inner(bare(content)) if content else None)
    name = _NAME.match(text)
    if name and not _ORDER.search(name.group(2)):
        return Named(plain_name(name.group(1)), inner(bare(name.group(2))))
    swapped = re.fullmatch(r"([^=]+)=\s?([A-Za-z])", text)  # 5 = x
    if swapped and (quantity := read_quantity(bare(swapped.group(1)))):
        return Named(plain_name(swapped.group(2)), quantity)
    sequence = _sequence(text, depth)
    if sequence is not None:
        return sequence
    if (span := _range(text, inner)) is not None:
        return span
    parts = re.split(r",", text) if commas else split_list(text)
    if 1 < len(parts) <= MOST_ITEMS and not re.search(r"\\l?dots|\.\.\.|\u2026|\\begin", text):
        listed = _listed([inner(bare(part)) for part in parts])
        return listed if _OR.search(text) else _both(listed)
    parts = re.split(r"(?<=[a-z])\s+(?=\d)", text)  # 3 hours 20 minutes
    if len(parts) > 1:
        quantities = [read_quantity(part) for part in parts]
        if all(q is not None and q.unit != NO_UNIT and q.unit.is_listed for q in quantities):
            return Items("", tuple(q for q in quantities if q is not None))
    if len(_PLUS_MINUS.findall(text)) == 1:
        return Items("", tuple(inner(bare(_PLUS_MINUS.sub(sign, text))) for sign in "+-"))
    return _twice(text)


def plain_name(text: str) -> str:
    """A name without case, spaces and braces: a_1 for a_{1}."""
    return re.sub("[{}]", "", plain_words(text))


def _twice(text: str) -> Quantity | None:
    """A quantity that is written twice: 4 (four), $5 (five dollars)."""
    match = re.fullmatch(r"([^()]+) \(([^()]+)\)", text)
    first, second = map(read_quantity, match.groups()) if match else (None, None)
    if not first or not second or first[::2] != second[::2] or not fits(first.unit, second.unit):
        return None
    return second if first.unit == NO_UNIT else first


def _range(text: str, inner: Callable[[str], Answer]) -> Items | Colon | None:
    """10 to 20 as the interval; the unit may follow the last number alone."""
    span = _RANGE.match(text)
    # "3 - 5" is a difference, and "3 and 5" a list
    if not span or " - " in text or (" and " in text and not text.startswith("between ")):
        return None
    low, high = (inner(bare(end)) for end in span.groups())
    if not (isinstance(low, Quantity) and isinstance(high, Quantity)):
        return None
    if low.value >= high.value:  # odds of 4 to 3
        is_ratio = " to " in text and low.unit == high.unit == NO_UNIT and high.value > 0
        return Colon((low.value, high.value)) if is_ratio else None
    if low.unit == NO_UNIT:
        low = low._replace(unit=high.unit, percent=high.percent)
    elif high.unit == NO_UNIT:
        high = high._replace(unit=low.unit)
    return Items("[]", (low, high)) if low.unit == high.unit else None


def _listed(items: Sequence[Answer]) -> Items | Named:
    """A list; "x = 1, 2" and "x = 1 or x = 2" are one name with a list."""
    flat: list[Answer] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Items) and item.brackets == "" else [item])
    first = flat[0]
    if isinstance(first, Named):
        values = [i.value if isinstance(i, Named) else i for i in flat]
        if all(not isinstance(i, Named) or i.name == first.name for i in flat):
            return Named(first.name, Items("", tuple(values)))
    return Items("", tuple(flat))


def _sequence(text: str, depth: int) -> Items | Answer | None:
    """Value of a bracketed text, a union of such, or a chain of inequalities."""
    inner = functools.partial(read, depth=depth + 1)
    if _REALS.fullmatch(text):
        return Items("()", _INFINITE)
    pieces = re.split(r"\s*\\cup(?![a-z])\s*|(?<=[)\]])\s+U\s+(?=[(\[])", text)
    if len(pieces) > 1 and all(pieces):
        return Items("cup", tuple(inner(bare(piece)) for piece in pieces))
    plain = text.replace(r"\{", "{").replace(r"\}", "}")
    if builder := _BUILDER.fullmatch(plain):
        values = inner(bare(builder.group(2)))
        if not isinstance(values, Named) or values.name != plain_words(builder.group(1)):
            return None
        return values.value if isinstance(values.value, Items) else None
    if plain and plain[0] in "([{" and closing(plain, 0) == len(plain) - 1:
        items = split_list(plain[1:-1])
        brackets = plain[0] + plain[-1]
        if len(items) > MOST_ITEMS:
            return None
        listed = _listed([inner(bare(item)) for item in items]) if items else Items("", ())
        if len(items) > 1 or (brackets == "{}" and text.startswith("\\")):
            return Items(brackets, listed.items) if isinstance(listed, Items) else None
        if len(items) == 1 and not isinstance(listed, Named):
            return listed.items[0] if len(listed.items) == 1 else listed
    return _inequality(text, inner)


def _inequality(text: str, inner: Callable[[str], Answer]) -> Answer | None:
    """The interval of a name's values: x > 3, 1 < x <= 2."""
    parts = _ORDER.split(text)
    if len(parts) not in (3, 5):
        return None
    terms, signs = parts[::2], parts[1::2]
    names = [i for i, term in enumerate(terms) if _is_name(term)]
    if len(names) != 1 or not all(terms) or (len(terms) == 3 and names != [1]):
        return None
    rising = [sign in ("<", r"\lt", r"\le") for sign in signs]
    if len(set(rising)) > 1:
        return None
    terms, signs = (terms, signs) if rising[0] else (terms[::-1], signs[::-1])
    place = next(i for i, term in enumerate(terms) if _is_name(term))
    name = terms[place]
    low = terms[place - 1] if place else r"-\infty"
    high = terms[place + 1] if place + 1 < len(terms) else r"\infty"
    closed = ["\\" in sign and sign[1] in "lg" and sign.endswith("e") for sign in signs]
    left = "[" if place and closed[place - 1] else "("
    right = "]" if place + 1 < len(terms) and closed[place] else ")"
    return Named(plain_words(name), Items(left + right, (inner(bare(low)), inner(bare(high)))))


def _both(listed: Items | Named) -> Items | Named:
    """1 < x < 3 for x > 1 and x < 3; anything else, such as x < 1 and x > 3, is a list."""
    value = listed.value if isinstance(listed, Named) else None
    if not isinstance(listed, Named) or not isinstance(value, Items) or len(value.items) != 2:
        return listed
    rays = [x for x in value.items if isinstance(x, Items) and len(x.items) == 2]
    if value.brackets or len(rays) != 2 or not all(len(x.brackets) == 2 for x in rays):
        return listed
    first, second = rays
    above, below = (first, second) if first.items[1] == _INFINITE[1] else (second, first)
    (low, no_limit), (no_least, high) = above.items, below.items
    if (no_least, no_limit) != _INFINITE:
        return listed
    if not (isinstance(low, Quantity) and isinstance(high, Quantity)):
        return listed
    if not (low.value < high.value and low.unit == high.unit and low.percent == high.percent):
        return listed
    return Named(listed.name, Items(above.brackets[0] + below.brackets[1], (low, high)))


def _is_name(term: str) -> bool:
    return bool(re.fullmatch(r"\\?[A-Za-z]+", term)) and term != r"\infty"


def _date(text: str) -> Date | None:
    text = _WEEKDAY.sub("", text, count=1) if _WEEKDAY.match(text) else text
    for pattern, order in _DATES:
        if match := pattern.fullmatch(text):
            parts = dict(zip(order, match.groups(), strict=True))
            month = parts["m"]
            number = int(month) if month.isdigit() else _MONTHS.index(month[:3].lower()) + 1
            return Date(int(parts["y"] or 0), number, int(parts["d"]))
    return None


def _colon(text: str) -> Colon | None:
    text = re.sub(r"^(?:12(?::00)? )?(noon|midnight)$", r"\1", text.lower())
    text = {"noon": "12 pm", "midnight": "12 am"}.get(text, text)
    if match := _TIME.fullmatch(text):
        hours, minutes, seconds, half = match.groups()
        parts = (Fraction(int(hours)), Fraction(int(minutes or 0)), Fraction(int(seconds or 0)))
        return Colon(parts, half.lower() + "m" if half else "", True)
    if not _COLON.fullmatch(text):
        return None
    fields = [field.strip() for field in text.split(":")]
    is_time = all(re.fullmatch("[0-5][0-9]", field) for field in fields[1:]) and len(fields) < 4
    values = tuple(Fraction(field) for field in fields)
    is_time = is_time and values[0] <= 24 and values[0].denominator == 1
    return Colon(values + (Fraction(0),) * (3 - len(values)) if is_time else values, "", is_time)


def _based(text: str) -> Based | None:
    match = _BASED.fullmatch(text)
    if not match or not re.search(r"\d", match.group(1)) or "_" in match.group(1):
        return None
    named = read_quantity(match.group(2) or match.group(3))
    if named is None or named.unit != NO_UNIT or not 2 <= named.value <= 36:
        return None
    base = int(named.value)
    try:
        int(match.group(1), base)
    except ValueError:
        return None
    return Based(match.group(1).upper().lstrip("0") or "0", base)


def _word_or_expression(text: str) -> Words | Expression:
    plain = re.sub(r"\\(?:begin|end)\s?\{\w+\*?\}|\\[a-zA-Z]+", " ", text)
    # two or more letters are a word, but for products such as xy and 2ab
    if re.fullmatch(r"[^\W\d_]{2,}", plain) and not re.fullmatch(
        "[b-df-hj-np-tv-z]{2}|a[bcxyz]|[bcxyz]a|[xyz]{3}", plain
    ):
        return Words(plain_words(text))
    for run in re.findall(r"[^\W\d_]{2,}", plain):
        if run.lower() in _FUNCTIONS or run.lower().removeprefix("arc") in _FUNCTIONS:
            continue
        if len(run) > 3 or not run.isascii() or (len(run) == 3 and re.search("[eiou]", run)):
            return Words(plain_words(text))
    if re.search(r"\\l?dots|\\cdots|\.\.\.|\u2026", text):
        return Words(plain_words(text))
    if re.search(r"[\d\\+*/^=<>|!_-]", text) or re.fullmatch("[a-zA-Z]{1,3}", text):
        return Expression(text)
    return Words(plain_words(text))


def _measured(text: str) -> Measured | None:
    """An expression and the unit behind it; single letters are variables."""
    for space in re.finditer(r"\s+(?=[A-Za-z])", text):
        head, tail = text[: space.start()], text[space.end() :]
        if "\\" not in head or not re.match("[A-Za-z]{2}", tail):
            continue
        if head.count("{") != head.count("}"):
            continue
        unit = read_unit(tail)
        if unit is not None and unit.is_listed:
            value = _word_or_expression(head)
            return Measured(value, unit) if isinstance(value, Expression) else None
    return None
