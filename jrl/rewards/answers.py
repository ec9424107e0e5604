r"""The grammar of final answers, and whether two of them are the same.

An answer, without markup (dollar signs of LaTeX, ``\text``, ``\boxed``, bold, spaces, the full stop
at its end), is the first of these that it can be:

    answer   = [name "="] one               x = 5; the name may be missing on one side
    one      = date | time | quantity | choice | sequence | range | list | words | expression
    date     = March 5, 2024 | 5 March | 2024-03-05 | 3/5/2024
    time     = 3:30 [AM | PM] | 3 PM | 15:30 | noon;  a:b is a ratio too
    quantity = number [unit], in jrl.rewards.quantities:  2 1/2 | $1,200 | 50% | 3 dozen eggs
    based    = digits "_" base              1011_2
    choice   = "(" letter ")" [one]         (B) 12; either part may be missing on one side
    sequence = brackets around ones         (1, 2] | {1, 2} | (0, 1) \cup (2, 3) | 1 < x <= 2
    range    = one ("to" | "-") one         10 to 20, the same as [10, 20]
    list     = ones and separators          1, 2 | 3 or 4 | 1; 2 | \pm 3, which is 3, -3
    words    = what has words in it         compared as text, without case, articles, punctuation

Numbers are the same within a tolerance, whole ones exactly; 50% is 50, 0.5 and 1/2. Units must fit
(``units.fits``): one may be missing, two different ones are different. Tuples have an order; lists
and sets have none, and sets have no repeats. Words are never products of letters. An expression is
what remains; a computer algebra system may compare two of those, and nothing else.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from jrl.rewards.quantities import Quantity, read_quantity
from jrl.rewards.units import NO_UNIT, fits

LONGEST = 400
"""Characters; a longer answer is compared as text."""

_MOST_MARKUP = 4
"""Times ``LONGEST``, with markup: longer texts are not cleaned."""

_MOST_ITEMS = 40
_DEEPEST = 12

Checker = Callable[[str, str], bool]
"""(expected, answer), two expressions -> whether they are equal."""


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


Answer = Quantity | Words | Expression | Based | Colon | Date | Choice | Named | Items

_MARKS = [
    (r"\{,\}\s?(?:\\!)?|,\s?\\!\s?", ","),
    (r"\\left(?![a-z])|\\right(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\displaystyle|(?<!\\)\\!", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])|[\u00a0\u2009\u202f]", " "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\s?\^\s?(?:\{\s?\\(?:circ|degree)\s?\}|\\(?:circ|degree))|\\degree|º|\u02da", "°"),
    (r"°\s?([CF])\b", r" °\1"),
    (r"°(?!\s?[CF])", " degrees "),
    ("\u2212|\u2013(?=\\d)", "-"),
    ("[\u2013\u2014]", "-"),
    ("\u00d7", r"\\times "),
    ("[\u00b7\u22c5]", r"\\cdot "),
    ("\u2264|\\\\leq(?![a-z])|\\\\leqslant|<=", r"\\le "),
    ("\u2265|\\\\geq(?![a-z])|\\\\geqslant|>=", r"\\ge "),
    ("\u221e", r"\\infty "),
    ("\u03c0", r"\\pi "),
    ("\u222a", r"\\cup "),
    ("\u2208", r"\\in "),
    ("\u00b1|\\+/-", r"\\pm "),
    ("\u221a", r"\\sqrt"),
    (r"(?<![a-zA-Z\\])infinity(?![a-zA-Z])", r"\\infty "),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"\\?(?<![a-zA-Z])sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\frac\s?(\d)\s?(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s?(\d)\s?\{", r"\\frac{\1}{"),
    (r"\\frac\s?(\{[^{}]*\})\s?(\d)", r"\\frac\1{\2}"),
    (r"\\frac\s?\{([^{}]*)\}\s?\{", r"\\frac{\1}{"),
    (r"\\(?:lbrace|\{)", r"\\{"),
    (r"\\(?:rbrace|\})", r"\\}"),
    (r"(?<=\d) out of (?=\d)", "/"),
    (r"[\u201c\u201d]|``|''", '"'),
    (r"[\u2018\u2019]", "'"),
]
_CLEANING = [(re.compile(pattern), by) for pattern, by in _MARKS]
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|boldsymbol|bm|boxed"
    r"|fbox|operatorname\*?|emph|underline)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_OPENING = re.compile(
    r"^(?:(?:so|thus|hence|therefore),? )?(?:(?:the |my )?(?:final |correct )?answer(?: is|:| =)"
    r"|answer|(?:it|that|this) is(?= )|approximately|approx\.?|about|around|roughly|\\approx)"
    r"\s*:?\s+(?=\S)",
    re.IGNORECASE,
)


def clean(text: str) -> str:
    r"""An answer without markup, and with one spelling for each sign.

    >>> clean(r"$\text{7 apples}$."), clean("**18**"), clean(r"90^\circ")
    ('7 apples', '18', '90 degrees')
    """
    return _clean(text) if len(text) <= _MOST_MARKUP * LONGEST else text.strip()


@functools.lru_cache(4096)
def _clean(text: str) -> str:
    if not text.isascii():
        text = re.sub(
            "[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+",
            lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}",
            text,
        )
        text = re.sub(
            "[¼½¾⅐-⅞]",
            lambda m: " " + unicodedata.normalize("NFKC", m.group()).replace("\u2044", "/"),
            text,
        )
    for pattern, by in _CLEANING:
        text = pattern.sub(by, text)
    for _ in range(_DEEPEST):
        text, count = _WRAPPED.subn(r" \1 ", text)
        if not count:
            break
    return _bare(unicodedata.normalize("NFKC", text))


def _bare(text: str) -> str:
    """Without spaces, emphasis, signs of mathematics and punctuation around it."""
    before = None
    while text != before:
        before = text
        text = re.sub(r"\s+", " ", text).strip()
        text = re.sub(
            r"(?<!\.)[.,;:?]$|(?<=[a-z]{2})!$|\\\\$|^\\\(|\\\)$|^\\\[|\\\]$", "", text
        ).strip()
        for mark in ("**", "__", "$$", "$", "*", "_", "`", '"', "'"):
            inner = text[len(mark) : -len(mark)]
            if text.startswith(mark) and text.endswith(mark) and inner and mark not in inner:
                text = inner.strip()
        if (
            text.startswith("{")
            and _closing(text, 0) == len(text) - 1
            and not _split(text[1:-1])[1:]
        ):
            text = text[1:-1]
        text = _OPENING.sub("", text)
    return text


def _closing(text: str, start: int) -> int:
    """Where the bracket at ``start`` is closed; any bracket closes any, as in (1, 2]."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


def _split(text: str) -> list[str]:
    """The parts of a list, with separators outside brackets alone."""
    parts, depth, start = [], 0, 0
    # with spaces behind commas, the others are those of thousands
    spaced = re.search(r",\s", text) is not None
    for match in _SEPARATOR.finditer(text):
        sign = match.group()
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif depth == 0:
            if sign == "," and spaced and re.match(r"\d{3}(?!\d)", text[match.end() :]):
                continue
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


_SEPARATOR = re.compile(
    r"[(\[{)\]}]|\s*[,;]\s*(?:and\s|or\s)?|\s+(?:and|or)\s+|\s&\s|\s*\\(?:land|lor)(?![a-z])\s*"
)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = r"(jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
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
_BASED = re.compile(r"([0-9A-Za-z]+)\s?_\s?(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))")
_CHOICE = re.compile(
    r"(?:\(([A-J])\)|(?:option |choice )?([A-J])[.):])(?:\s+(.+))?$"
    r"|(?:option|choice) \(?([A-J])\)?$",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"(\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?)\s?(?:=|\\in(?![a-z])|:=)\s?([^=]+)$"
)
_ORDER = re.compile(r"\s*(\\le(?![a-z])|\\ge(?![a-z])|\\lt|\\gt|<|>)\s*")
_ITEM = r"-?\$?\d+(?:,\d{3})*(?:\.\d+)?(?:\s?(?:%|(?!to\b|and\b)[a-zA-Z]+))?"
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
    r"""What a cleaned text is by the grammar.

    Args:
      text: of ``clean``.
      commas: whether "1,234" is a list.
      depth: of brackets around it.

    >>> read("3 or 4").items[1].value, read("10 million").value, read("silent")
    (Fraction(4, 1), Fraction(10000000, 1), Words(text='silent'))
    """
    if depth > _DEEPEST or len(text) > LONGEST:
        return Words(_words(text))
    return _read(text, commas, depth)


@functools.lru_cache(4096)
def _read(text: str, commas: bool, depth: int) -> Answer:
    for attempt in (_date, _colon, _based):
        if (answer := attempt(text)) is not None:
            return answer
    quantity = read_quantity(text)
    if quantity is not None and not (commas and re.search(r"\d,\d", text)):
        return quantity
    return _compound(text, commas, depth) or _word_or_expression(text)


def _compound(text: str, commas: bool, depth: int) -> Answer | None:
    inner = functools.partial(read, depth=depth + 1)
    if choice := _CHOICE.match(text):
        letter = choice.group(1) or choice.group(2) or choice.group(4)
        content = choice.group(3)
        return Choice(letter.upper(), inner(_bare(content)) if content else None)
    name = _NAME.match(text)
    if name and not _ORDER.search(name.group(2)):
        return Named(_words(name.group(1)), inner(_bare(name.group(2))))
    sequence = _sequence(text, depth)
    if sequence is not None:
        return sequence
    if (span := _range(text, inner)) is not None:
        return span
    parts = re.split(r",", text) if commas else _split(text)
    if 1 < len(parts) <= _MOST_ITEMS and not re.search(r"\\l?dots|\.\.\.|\u2026|\\begin", text):
        return _listed([inner(_bare(part)) for part in parts])
    if text.count(r"\pm") == 1:
        return Items("", tuple(inner(_bare(text.replace(r"\pm", sign))) for sign in "+-"))
    return None


def _range(text: str, inner: Callable[[str], Answer]) -> Items | None:
    """10 to 20 as the interval; the unit may follow the last number alone."""
    span = _RANGE.match(text)
    # "3 - 5" is a difference, and "3 and 5" a list
    if not span or " - " in text or (" and " in text and not text.startswith("between ")):
        return None
    low, high = (inner(_bare(end)) for end in span.groups())
    if not (isinstance(low, Quantity) and isinstance(high, Quantity) and low.value < high.value):
        return None
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
    """What stands in brackets, a union of such, or a chain of inequalities."""
    inner = functools.partial(read, depth=depth + 1)
    pieces = re.split(r"\s*\\cup(?![a-z])\s*|(?<=[)\]])\s+U\s+(?=[(\[])", text)
    if len(pieces) > 1 and all(pieces):
        return Items("cup", tuple(inner(_bare(piece)) for piece in pieces))
    plain = text.replace(r"\{", "{").replace(r"\}", "}")
    if plain and plain[0] in "([{" and _closing(plain, 0) == len(plain) - 1:
        items = _split(plain[1:-1])
        brackets = plain[0] + plain[-1]
        if len(items) > _MOST_ITEMS:
            return None
        listed = _listed([inner(_bare(item)) for item in items]) if items else Items("", ())
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
    return Named(_words(name), Items(left + right, (inner(_bare(low)), inner(_bare(high)))))


def _is_name(term: str) -> bool:
    return bool(re.fullmatch(r"\\?[A-Za-z]+", term)) and term != r"\infty"


def _date(text: str) -> Date | None:
    for pattern, order in _DATES:
        if match := pattern.fullmatch(text):
            parts = dict(zip(order, match.groups(), strict=True))
            month = parts["m"]
            number = int(month) if month.isdigit() else _MONTHS.index(month[:3].lower()) + 1
            return Date(int(parts["y"] or 0), number, int(parts["d"]))
    return None


def _colon(text: str) -> Colon | None:
    text = {"noon": "12 pm", "midnight": "12 am"}.get(text.lower(), text)
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


def _based(text: str) -> Based | Quantity | None:
    match = _BASED.fullmatch(text)
    if not match or not re.search(r"\d", match.group(1)) or "_" in match.group(1):
        return None
    base = int(match.group(2) or match.group(3))
    try:
        int(match.group(1), base)
    except ValueError:
        return None
    if base == 10:
        return Quantity(Fraction(int(match.group(1))))
    return Based(match.group(1).upper().lstrip("0") or "0", base) if base > 1 else None


def _word_or_expression(text: str) -> Words | Expression:
    plain = re.sub(r"\\(?:begin|end)\s?\{\w+\*?\}|\\[a-zA-Z]+", " ", text)
    # two or more letters are a word, but for products such as xy and 2ab
    if re.fullmatch(r"[^\W\d_]{2,}", plain) and not re.fullmatch(
        "[b-df-hj-np-tv-z]{2}|a[bcxyz]|[bcxyz]a|[xyz]{3}", plain
    ):
        return Words(_words(text))
    for run in re.findall(r"[^\W\d_]{2,}", plain):
        if run.lower() in _FUNCTIONS or run.lower().removeprefix("arc") in _FUNCTIONS:
            continue
        if len(run) > 3 or not run.isascii() or (len(run) == 3 and re.search("[eiou]", run)):
            return Words(_words(text))
    if re.search(r"\\l?dots|\\cdots|\.\.\.|\u2026", text):
        return Words(_words(text))
    if re.search(r"[\d\\+*/^=<>|!_-]", text) or re.fullmatch("[a-zA-Z]{1,3}", text):
        return Expression(text)
    return Words(_words(text))


def _words(text: str) -> str:
    """A text without case, spaces, articles, and punctuation that says nothing."""
    text = re.sub(r"^(?:the|an|a) (?=\w{2})", "", text.casefold())
    return re.sub(r"\s+|(?<=\w)[-](?=[^\W\d])|[,\"'`$]|\.(?!\d)", "", text)


def same(answer: str, expected: str, tolerance: float = 1e-6, check: Checker | None = None) -> bool:
    r"""Whether two final answers are the same by the grammar of this module.

    Args:
      answer: the completion's.
      expected: the data set's.
      tolerance: relative, for numbers that are not both whole.
      check: compares two expressions; None compares their texts.

    >>> same("2.5", "2 1/2"), same("5 cm", "5 km"), same("2, 1", "1 and 2"), same("on", "no")
    (True, False, True, False)
    """
    left, right = clean(answer), clean(expected)
    if left.casefold() == right.casefold():
        return True
    if not left or not right:
        return False
    comparison = _Comparison(tolerance, check)
    a, b = read(left), read(right)
    if comparison(a, b):
        return True
    if check is not None and {type(a), type(b)} == {Items, Expression}:
        return check(right, left)
    # 1,234 beside 1, 234
    if isinstance(a, Items | Named) and isinstance(b, Quantity) and re.fullmatch(r"[\d,]+", right):
        return "," in right and comparison(a, read(right, commas=True))
    if isinstance(b, Items | Named) and isinstance(a, Quantity) and re.fullmatch(r"[\d,]+", left):
        return "," in left and comparison(read(left, commas=True), b)
    return False


class _Comparison:
    """Compares two answers that were read, the completion's first."""

    def __init__(self, tolerance: float, check: Checker | None) -> None:
        self.tolerance, self.check = Fraction(tolerance), check
        self.left = 3 * _MOST_ITEMS
        """Comparisons of expressions that remain: a list could ask for thousands."""

    def __call__(self, a: Answer, b: Answer) -> bool:
        if a == b:
            return True
        if isinstance(a, Named) or isinstance(b, Named):
            return self._named(a, b)
        if isinstance(a, Choice) or isinstance(b, Choice):
            return self._choice(a, b)
        if isinstance(a, Items) or isinstance(b, Items):
            return self._items(a, b)
        if isinstance(a, Quantity) and isinstance(b, Quantity):
            return self._quantities(a, b)
        if isinstance(a, Colon) or isinstance(b, Colon):
            return self._colons(a, b)
        if isinstance(b, Based):  # a base may be missing where one was expected
            return isinstance(a, Quantity) and str(a.value) == b.digits
        if isinstance(a, Date) and isinstance(b, Date):
            return a[1:] == b[1:] and 0 in (a.year, b.year)
        return self._expressions(a, b)

    def _named(self, a: Answer, b: Answer) -> bool:
        if isinstance(a, Named) and isinstance(b, Named):
            return a.name == b.name and self(a.value, b.value)
        return self(*(x.value if isinstance(x, Named) else x for x in (a, b)))

    def _choice(self, a: Answer, b: Answer) -> bool:
        if isinstance(a, Choice) and isinstance(b, Choice):
            if a.letter != b.letter:
                return False
            return a.content is None or b.content is None or self(a.content, b.content)
        choice, other = (a, b) if isinstance(a, Choice) else (b, a)
        assert isinstance(choice, Choice)
        if isinstance(other, Expression | Words) and other.text.upper() == choice.letter:
            return True
        if choice.content is None:
            return False
        return self(choice.content, other) if choice is a else self(other, choice.content)

    def _quantities(self, a: Quantity, b: Quantity) -> bool:
        if a.percent != b.percent:
            part, other = (a, b) if a.percent else (b, a)
            if other.unit.above:
                return False
            hundredth = part._replace(value=part.value / 100, percent=False)
            return any(self._numbers(x.value, other.value) for x in (part, hundredth))
        return fits(a.unit, b.unit) and self._numbers(a.value, b.value)

    def _numbers(self, a: Fraction, b: Fraction) -> bool:
        if a.denominator == b.denominator == 1:
            return a == b
        return abs(a - b) <= self.tolerance * max(abs(a), abs(b))

    def _colons(self, a: Answer, b: Answer) -> bool:
        if isinstance(a, Colon) and isinstance(b, Colon):
            if a.is_time and b.is_time:
                return _same_time(a, b)
            x, y = (tuple(p for p in c.parts) for c in (a, b))
            if a.is_time != b.is_time or len(x) != len(y) or 0 in x + y:
                return False
            return all(p * y[0] == q * x[0] for p, q in zip(x, y, strict=True))
        colon, other = (a, b) if isinstance(a, Colon) else (b, a)
        assert isinstance(colon, Colon)
        if not isinstance(other, Quantity) or other.unit.above or other.percent:
            return False
        first, second, *rest = colon.parts
        if colon.is_time:
            if not second and not any(rest):
                return other.value == first
            return not colon.half and not any(rest) and first / second == other.value
        return not rest and bool(second) and first / second == other.value

    def _items(self, a: Answer, b: Answer) -> bool:
        if not (isinstance(a, Items) and isinstance(b, Items)):
            items, other = (a, b) if isinstance(a, Items) else (b, a)
            assert isinstance(items, Items)
            if len(items.items) == 1 and items.brackets in ("", "{}"):
                return self(items.items[0], other) if items is a else self(other, items.items[0])
            if items.brackets == "[]" and isinstance(other, Colon) and len(items.items) == 2:
                return tuple(q.value for q in items.items if isinstance(q, Quantity)) == other.parts
            return False
        kinds = {a.brackets, b.brackets}
        if kinds == {"()", "[]"} or kinds == {"", "[]"}:
            # of two numbers the brackets make an interval
            if len(a.items) < 3:
                return False
        elif len(kinds) > 1 and kinds not in ({"", "()"}, {"", "{}"}):
            return False
        if kinds <= {"", "{}", "cup"} or kinds == {"", "[]"}:
            return self._any_order(a.items, b.items, "{}" in kinds)
        return len(a.items) == len(b.items) and all(map(self, a.items, b.items))

    def _any_order(self, a: Sequence[Answer], b: Sequence[Answer], repeats: bool) -> bool:
        if repeats:
            a, b = list(dict.fromkeys(a)), list(dict.fromkeys(b))
        remaining = list(b)
        # what is the same without a checker goes first
        for item in a:
            match = next((other for other in remaining if item == other), None)
            if match is None:
                match = next((other for other in remaining if self(item, other)), None)
            if match is None:
                return False
            remaining.remove(match)
        return not remaining

    def _expressions(self, a: Answer, b: Answer) -> bool:
        kinds = (Expression, Quantity)
        if isinstance(a, Words) and isinstance(b, Words):
            return a.text == b.text
        if not (isinstance(a, kinds) and isinstance(b, kinds)) or type(a) is type(b) is Quantity:
            return False
        left, right = _mathematics(a), _mathematics(b)
        if left is None or right is None:
            return False
        if _unspaced(left) == _unspaced(right):
            return True
        self.left -= 1
        return self.check is not None and self.left >= 0 and self.check(right, left)


def _unspaced(text: str) -> str:
    """An expression without the spaces that say nothing: those of "1 2" do."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text.casefold())


def _mathematics(answer: Expression | Quantity) -> str | None:
    """What a computer algebra system reads; None for a number with a unit."""
    if isinstance(answer, Expression):
        return answer.text
    value = answer.value / 100 if answer.percent else answer.value
    if answer.unit.above not in ((), (("degree", 1),)):
        return None
    return (
        str(value)
        if value.denominator == 1
        else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    )


def _same_time(a: Colon, b: Colon) -> bool:
    hours = []
    for time in (a, b):
        hour = int(time.parts[0])
        known = bool(time.half) or hour > 12 or hour == 0
        hours.append((hour % 12 + 12 * (time.half == "pm") if time.half else hour, known))
    if a.parts[1:] != b.parts[1:]:
        return False
    (first, first_known), (second, second_known) = hours
    if first_known and second_known:
        return first == second
    return a.parts[0] == b.parts[0] or (a.half == b.half == "" and first == second)
