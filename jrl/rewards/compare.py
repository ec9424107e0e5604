r"""Whether two final answers are the same, by the grammar of ``jrl.rewards.answers``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from jrl.rewards.answers import (
    Answer,
    Based,
    Choice,
    Colon,
    Date,
    Expression,
    Items,
    Measured,
    Named,
    Words,
    plain_name,
    read,
)
from jrl.rewards.markup import LONGEST, MOST_ITEMS, bare, clean, split_list
from jrl.rewards.quantities import Quantity, read_quantity
from jrl.rewards.units import NO_UNIT, Unit, fits, read_unit

_LAKHS = re.compile(r"\D{0,4}\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])")
"""Digits in the groups of India."""

_SUM = re.compile(r"(.*[\d}])\s?([+-])\s?(.+)")
_PRODUCT = re.compile(r"(.*[\d}])\s?([*/]|\\times|\\cdot|\\div)\s?(.+)")
_MULTIPLE = re.compile(r"(?!\w\s?=)-?(?:[\d.]*[a-zA-Z]|\\frac\{[a-zA-Z]\}\{\d+\})\s?=")
"""Equations that are not solved, such as 2x = 12: 12 is no value of x."""
_UNSOLVED = re.compile(rf"{_MULTIPLE.pattern}|[xyz](?:\s?[+-]\s?[xyz])+\s?=[^=]+$")
"""An expected x + y = 5 is a line; a + b = 5 and AB + CD = 5 are sums that were asked for."""

_OPERATIONS = re.compile(
    r"(?<=\d)\s?x\s?(?=\d)|\\(?:[dt]?frac|d?binom|sqrt|times|cdot|div|pi|left|right|circ|degree"
    r"|log|ln|lg|exp|sin|cos|tan|cot|gcd|lcm|max|min|overline|lfloor|rfloor|lceil|rceil)(?![a-z])"
    r"|\\[%$,;:! {}]"
)
"""What stands between numbers; other commands of LaTeX are names or relations."""
_SIGNS = re.compile(r"[<>≤≥]|\\(?:le|ge|lt|gt|ne|leq|geq|in|pm)(?![a-z])")

_UP = re.compile(r"\b(?:profit|gain|increased?|rise|surplus|above|more)\b", re.IGNORECASE)
_DOWN = re.compile(r"\b(?:loss|decreased?|drop|fall|deficit|below|less|fewer)\b", re.IGNORECASE)
"""Words behind a number that are no unit, and turn it round."""

_QUARTERS = re.compile(r"(\d{1,9}) quarters?")
_QUARTER = Unit((("quarter", 1),))
"""3 quarters are 0.75, and 3 coins or seasons: nobody but the question says which; 4 are coins."""

Checker = Callable[[str, str], bool]
"""(expected, answer), two expressions -> whether they are equal."""


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
    if left == right:
        return True
    if any(a.search(left) and b.search(right) for a, b in ((_UP, _DOWN), (_DOWN, _UP))):
        return False  # a profit of $5 and a loss of $5
    if not left or not right:
        return False
    for text, other, unsolved in ((left, right, _MULTIPLE), (right, left, _UNSOLVED)):
        if "=" not in other and unsolved.match(text):
            return False
    comparison = _Comparison(tolerance, check)
    a, b = _last_member(left, right), _last_member(right, left)
    if comparison(a, b):
        return True
    if check is not None and (
        {type(a), type(b)} == {Items, Expression}
        or (_is_equation(a, left) and _is_equation(b, right))
    ):
        return check(right, left)
    if {type(a), type(b)} == {Quantity, Expression} and _joined(left) == _joined(right):
        return True  # 5 m beside 5m
    counted = [_QUARTERS.fullmatch(text) for text in (left, right)]
    if any(counted):
        coins = [
            Quantity(Fraction(match[1]), _QUARTER) if match else x
            for match, x in zip(counted, (a, b), strict=True)
        ]
        if all(isinstance(x, Quantity) for x in coins):
            return comparison(*coins)
    # 1,234 beside 1, 234
    commas = re.compile(r"\d,\d")
    if _is_bare(a) and isinstance(b, Quantity) and commas.search(right):
        return comparison(a, read(right, commas=True))
    if _is_bare(b) and isinstance(a, Quantity) and commas.search(left):
        return comparison(read(left, commas=True), b)
    # 12,34,567 beside 1234567
    for number, listed, text in ((a, b, right), (b, a, left)):
        if isinstance(number, Quantity) and _is_bare(listed) and _LAKHS.match(text):
            grouped = read(_LAKHS.sub(lambda m: m.group().replace(",", ""), text))
            return comparison(grouped, b) if number is b else comparison(a, grouped)
    return False


def _last_member(text: str, other: str) -> Answer:
    """What a text says; beside what has no "=", 5 for 2 + 3 = 5, and nothing for 1 + 1 = 5."""
    if "=" in text and "=" not in other and len(text) <= LONGEST:
        *_, before, last = text.split("=")
        first, second = _value(before), _value(last)
        if first is not None and second is not None:
            if first == second:
                return read(bare(last))
            if first.denominator == second.denominator == 1:  # 2/3 = 0.67 is rounded
                return Words(text)
        if _is_arithmetic(before, last):
            return read(bare(last))
    return read(text)


def _is_arithmetic(text: str, result: str) -> bool:
    r"""Whether a text computes with numbers alone, which may have units: 3!, \sqrt{9}, 5 cm + 3 cm.

    One letter is a unit where the result has it, too, and a variable elsewhere.
    """
    plain = _OPERATIONS.sub(" ", text)
    # Several answers, and inequalities, are no result of one computation.
    if "\\" in plain or any(len(split_list(x)) > 1 or _SIGNS.search(x) for x in (text, result)):
        return False
    words, units = (re.findall(r"[^\W\d_]+", each) for each in (plain, result))
    return all(re.search(r"\d", each) for each in (plain, result)) and all(
        (unit := read_unit(word)) is not None
        and unit.is_listed
        and (len(word) > 1 or word in units)
        for word in words
    )


def _value(text: str) -> Fraction | None:
    """Of sums and products of numbers without units and brackets; None for anything else."""
    text = re.sub(r"\\?\$", "", text).strip()
    number = read_quantity(text)
    if number is not None:
        return number.value if number.unit == NO_UNIT and not number.percent else None
    operation = _SUM.fullmatch(text) or _PRODUCT.fullmatch(text)
    first, second = map(_value, operation.group(1, 3)) if operation else (None, None)
    if operation is None or first is None or second is None:
        return None
    sign = operation.group(2)
    if sign in "+-":
        return first + second if sign == "+" else first - second
    if sign in ("/", r"\div"):
        return first / second if second else None
    return first * second


def _is_equation(answer: Answer, text: str) -> bool:
    """Whether an answer is an equation between expressions, whose sides may be exchanged."""
    value = answer.value if isinstance(answer, Named) else answer
    return text.count("=") == 1 and isinstance(value, Expression)


def _is_bare(answer: Answer) -> bool:
    value = answer.value if isinstance(answer, Named) else answer
    return isinstance(value, Items) and value.brackets in ("", "{}")


class _Comparison:
    """Compares two answers that were read, the completion's first."""

    def __init__(self, tolerance: float, check: Checker | None) -> None:
        self.tolerance, self.check = Fraction(tolerance), check
        self.left = 3 * MOST_ITEMS
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
        if isinstance(a, Based) and a.base == 10 and not isinstance(b, Based):
            return self(Quantity(Fraction(int(a.digits))), b)
        if isinstance(b, Based):  # a base may be missing where one was expected
            return isinstance(a, Quantity) and str(a.value) == b.digits
        if isinstance(a, Date) and isinstance(b, Date):
            return a[1:] == b[1:] and 0 in (a.year, b.year)
        if isinstance(a, Measured) or isinstance(b, Measured):
            units = [x.unit if isinstance(x, Measured | Quantity) else NO_UNIT for x in (a, b)]
            bare = [x.value if isinstance(x, Measured) else x for x in (a, b)]
            bare = [x._replace(unit=NO_UNIT) if isinstance(x, Quantity) else x for x in bare]
            return fits(*units) and self(*bare)
        return self._expressions(a, b)

    def _named(self, a: Answer, b: Answer) -> bool:
        if isinstance(a, Named) and isinstance(b, Named):
            return a.name == b.name and self(a.value, b.value)
        named, other = (a, b) if isinstance(a, Named) else (b, a)
        assert isinstance(named, Named)
        first, sign, _ = (
            other.text.partition("=") if isinstance(other, Expression) else ("", "", "")
        )
        if sign and plain_name(first) != named.name:
            return False
        if named.name[0] == "(" and isinstance(other, Items):
            # (x, y) = (1, 2) beside y = 2, x = 1
            values = {x.name: x.value for x in other.items if isinstance(x, Named)}
            if values:
                if len(values) != len(other.items) or set(values) != set(named.name[1:-1]):
                    return False
                other = Items("()", tuple(values[name] for name in named.name[1:-1]))
        return self(named.value, other) if named is a else self(other, named.value)

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
        if not (_is_decimal(a) or _is_decimal(b)):  # whole numbers and fractions are exact
            return a == b
        return abs(a - b) <= self.tolerance * max(abs(a), abs(b))

    def _colons(self, a: Answer, b: Answer) -> bool:
        if isinstance(a, Colon) and isinstance(b, Colon):
            if a.is_time and b.is_time:
                return _same_time(a, b)
            # Where one is no time, both are ratios.
            x, y = _ratio(a), _ratio(b)
            if len(x) != len(y) or not x or 0 in x + y:
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
                ends = tuple(q.value for q in items.items if isinstance(q, Quantity))
                return ends == _ratio(other)
            return False
        kinds = {a.brackets, b.brackets}
        if kinds == {"()", "[]"} or kinds == {"", "[]"}:
            # of two numbers the brackets make an interval
            if len(a.items) < 3:
                return False
        elif kinds == {"", "cup"}:  # x < 2 or x > 3
            if not all(isinstance(x, Items) and len(x.brackets) == 2 for x in a.items + b.items):
                return False
        elif len(kinds) > 1 and kinds not in ({"", "()"}, {"", "{}"}):
            return False
        if kinds <= {"", "{}", "cup"} or kinds == {"", "[]"}:
            sets = [dict.fromkeys(x.items) if x.brackets == "{}" else x.items for x in (a, b)]
            if kinds == {""} and _in_order(a.items, b.items):
                return len(a.items) == len(b.items) and all(map(self, a.items, b.items))
            return self._any_order(*map(list, sets))
        return len(a.items) == len(b.items) and all(map(self, a.items, b.items))

    def _any_order(self, a: Sequence[Answer], b: Sequence[Answer]) -> bool:
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
    """An expression without spaces that say nothing, and with the same braces: x^2 is x^{2}."""
    text = _joined(_folded(text))
    text = re.sub(r"(?<![\^_])\{([A-Za-z])\}", r"\1", text)
    return re.sub(r"(?<=[\^_])(\d+|[A-Za-z])", r"{\1}", text)


def _joined(text: str) -> str:
    """A text without the spaces that no two numbers have between them."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _folded(text: str) -> str:
    """An expression in small letters, unless a letter is in it in both cases: m/M is not M/m."""
    letters = set(re.sub(r"\\[A-Za-z]+", "", text))
    if any(x.isupper() and x.lower() in letters for x in letters):
        return text
    return re.sub(r"\\[A-Za-z]+|[A-Z]", lambda m: m[0] if len(m[0]) > 1 else m[0].lower(), text)


def _is_decimal(x: Fraction) -> bool:
    """Whether a number is not whole, and a finite decimal."""
    return x.denominator > 1 and pow(10, x.denominator.bit_length(), x.denominator) == 0


def _mathematics(answer: Expression | Quantity) -> str | None:
    """Input for a computer algebra system; None for a number with a unit."""
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


def _ratio(colon: Colon) -> tuple[Fraction, ...]:
    """The numbers of a ratio, which may look like a time; () for one that can be no ratio."""
    if not colon.is_time or colon.parts[2]:
        return colon.parts
    return () if colon.half else colon.parts[:2]


def _in_order(answers: Sequence[Answer], expected: Sequence[Answer]) -> bool:
    """Whether values without names stand for several names: x = 1, y = 2.

    Roots x_1 and x_2 have no order.
    """
    named = [x.name.partition("_")[0] for x in expected if isinstance(x, Named)]
    names = {name.rstrip("0123456789") for name in named}
    return len(names) == len(expected) and not any(isinstance(x, Named) for x in answers)


def _same_time(a: Colon, b: Colon) -> bool:
    hours = []
    for time in (a, b):
        hour = int(time.parts[0])
        definite = bool(time.half) or hour > 12 or hour == 0
        hours.append((hour % 12 + 12 * (time.half == "pm") if time.half else hour, definite))
    if a.parts[1:] != b.parts[1:]:
        return False
    (first, first_known), (second, second_known) = hours
    if first_known and second_known:
        return first == second
    return a.parts[0] == b.parts[0] or (a.half == b.half == "" and first == second)
