r"""Quantities: numbers as people write them, with their unit.

    quantity = [currency] number [scale] [percent | unit]
    number   = decimal | fraction | mixed | power of ten | words ("twenty-one", "two thirds")
    scale    = hundred | thousand | million | ... | dozen | score | gross

``jrl.rewards.answers`` has the grammar of complete answers, and cleans a text before it is read.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from jrl.rewards.units import CURRENCY_SIGNS, NAMES, NO_UNIT, Unit, read_unit

_LARGEST_EXPONENT = 300
"""Of ten: a number of more digits would take long to write out."""

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: i for i, word in enumerate(_ONES)} | {
    word: 10 * i for i, word in enumerate(_TENS, 2)
}
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9} | {
    "trillion": 10**12,
    "dozen": 12,
    "gross": 144,
    "lakh": 10**5,
    "crore": 10**7,
}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6} | {
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "twelfth": 12,
    "hundredth": 100,
    "thousandth": 1000,
}
_SHORT_SCALES = {"k": 10**3, "K": 10**3, "m": 10**6, "M": 10**6, "bn": 10**9, "B": 10**9}
"""Behind a currency alone: $5k."""

_DECIMAL = (
    r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+|\d{1,3}(?:'\d{3})+|\d{1,3}(?:\\?_\d{3})+"
    r"|\d{1,3}(?:\.\d{3}){2,}(?![.\d])|\d+)?(?:\.\d+|(?<=\d)\.?)"
)
_NUMBER = re.compile(
    rf"""(?P<mixed>(?P<whole>\d+)(?:\s+and\s+|\s*)(?P<above>\\frac\{{\d+\}}\{{\d+\}}|(?<=\s)\d+\s?/\s?\d+))
      | \\frac\{{\s*(?P<num>-?{_DECIMAL})\s*\}}\{{\s*(?P<den>-?{_DECIMAL})\s*\}}
      | (?P<repeat>\d*\.\d*)\\overline\{{(?P<period>\d+)\}}
      | (?P<decimal>{_DECIMAL})(?:[eE](?P<e>[+-]?\d+)(?!\w))?
        (?:\s?(?:\\times|\\cdot|\*|x(?=\s?10\s?\^))\s?10\s?\^\s?(?:\{{\s*(?P<p1>[+-]?\d+)\s*\}}|(?P<p2>[+-]?\d+)))?
        (?:\s?/\s?(?P<below>-?{_DECIMAL})(?![\d/]))?
    """,
    re.VERBOSE,
)
_POWER_OF_TEN = re.compile(r"10\s?\^\s?(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))")
_SIGN = re.compile(r"\s*([-+]|negative\b|minus\b)\s*", re.IGNORECASE)
_CURRENCY = re.compile(
    r"\s*(\\?\$|US\$|[€£¥₹₩¢]|(?:USD|EUR|GBP|JPY|INR|CNY|RMB|CHF|Rs\.?)(?=\s?\d))\s*"
)
_SCALE = re.compile(rf"[\s-]*\b({'|'.join(SCALES)})\b", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(?:\\?%|(?:percent(?:age points?)?|per cent|pct)\b)", re.IGNORECASE)
_WORD = re.compile(r"[\s-]*([A-Za-z]+)")


class Quantity(NamedTuple):
    """A number and what it counts.

    Attributes:
      value: as written, so 50 for 50%.
      unit: ``NO_UNIT`` where none is named.
      percent: whether the value is in hundredths.
    """

    value: Fraction
    unit: Unit = NO_UNIT
    percent: bool = False


def read_quantity(text: str) -> Quantity | None:
    r"""The quantity that a cleaned text is, or None if it is anything else.

    >>> read_quantity("1.5 million").value, read_quantity("-2 1/2").value
    (Fraction(1500000, 1), Fraction(-5, 2))
    >>> read_quantity("3 i"), read_quantity("3 or 4")
    (None, None)
    """
    sign, place, currency = 1, 0, None
    for _ in range(3):  # "-$5", "$-5"
        if match := _CURRENCY.match(text, place):
            if currency:
                return None
            sign_or_code = match.group(1).strip("\\.")
            currency = CURRENCY_SIGNS.get(sign_or_code) or NAMES[sign_or_code]
        elif match := _SIGN.match(text, place):
            if match.group(1) != "+":
                sign = -sign
        else:
            break
        place = match.end()
    number = _number_at(text, place)
    if number is None:
        return None
    value, place = number
    if currency and (short := re.compile(r"\s?(k|K|m|M|bn|B)\b").match(text, place)):
        value, place = value * _SHORT_SCALES[short.group(1)], short.end()
    if value.denominator > 1 and (
        match := re.compile(r"\s+an?\b").match(text, place)
    ):  # half a dozen
        place = match.end() if _SCALE.match(text, match.end()) else place
    while scale := _SCALE.match(text, place):
        value, place = value * SCALES[scale.group(1).lower()], scale.end()
    value *= sign
    if match := _PERCENT.match(text, place):
        unit = _unit_behind(text, match.end())
        return None if unit is None or currency else Quantity(value, NO_UNIT, True)
    unit = _unit_behind(text, place)
    if unit is None:
        return None
    if currency:
        unit = _paid(currency, unit)
        return None if unit is None else Quantity(value, unit)
    return Quantity(value, unit)


def _paid(currency: str, unit: Unit) -> Unit | None:
    """A currency's sign and what follows the number: "$5 USD", "$5 per day"."""
    if unit.above in ((), ((currency, 1),)) or not unit.is_listed:
        return Unit(((currency, 1),), unit.below)
    return None


def _unit_behind(text: str, place: int) -> Unit | None:
    rest = text[place:]
    if not rest.strip():
        return NO_UNIT
    spaced = rest[0].isspace() or rest[0] in "°$€£¥₹₩¢/-"
    rest = rest.strip()
    if rest[0] == "-" and re.match(r"-[A-Za-z]", rest):  # a 5-mile run
        rest = rest[1:]
    # unspaced, a letter is a variable and letters are factors: 5m, 2ab
    if not spaced and (len(rest) == 1 or re.split(r"[\s/^.]", rest)[0] not in NAMES):
        return None
    return read_unit(rest)


def _number_at(text: str, place: int) -> tuple[Fraction, int] | None:
    """The number that begins there, and where it ends."""
    if power := _POWER_OF_TEN.match(text, place):
        value = _ten_to(power.group(1) or power.group(2))
        return None if value is None else (value, power.end())
    match = _NUMBER.match(text, place)
    if match is None or not match.group():
        return _words_at(text, place)
    value = _value(match)
    if value is None:
        return None
    end = match.end()
    parts = re.compile(r"\s+([a-z]+?)s?\b").match(text, end)
    if parts and parts.group(1) in _PARTS and value.denominator == 1:  # 3 quarters
        coins = parts.group(1) == "quarter" and value >= 4
        if not coins:
            return value / _PARTS[parts.group(1)], parts.end()
    half = re.compile(r"\s+and\s+(?:a|one)\s+half\b").match(text, end)
    if half:
        return value + Fraction(1, 2), half.end()
    return value, end


def _ten_to(exponent: str) -> Fraction | None:
    power = int(exponent) if len(exponent) < 9 else _LARGEST_EXPONENT + 1
    return Fraction(10) ** power if abs(power) <= _LARGEST_EXPONENT else None


def _decimal(text: str) -> Fraction:
    if text.count(".") > 1:  # 1.234.567
        text = text.replace(".", "")
    return Fraction(re.sub(r"[, '\\_]", "", text).rstrip("."))


def _value(match: re.Match[str]) -> Fraction | None:
    if match.group("mixed"):
        above, below = map(int, re.findall(r"\d+", match.group("above")))
        # 2 \frac{3}{2} is a product, if anything
        if not 0 < above < below:
            return None
        return int(match.group("whole")) + Fraction(above, below)
    if match.group("num"):
        divisor = _decimal(match.group("den"))
        return _decimal(match.group("num")) / divisor if divisor else None
    if match.group("period"):
        digits, period = match.group("repeat"), match.group("period")
        places = len(digits.split(".")[1])
        tail = Fraction(int(period), (10 ** len(period) - 1) * 10**places)
        return Fraction((digits if digits != "." else "0").rstrip(".") or 0) + tail
    value = _decimal(match.group("decimal"))
    for exponent in (match.group("e"), match.group("p1") or match.group("p2")):
        if exponent:
            scale = _ten_to(exponent)
            if scale is None:
                return None
            value *= scale
    if match.group("below"):
        divisor = _decimal(match.group("below"))
        return value / divisor if divisor else None
    return value


def _words_at(text: str, place: int) -> tuple[Fraction, int] | None:
    """A number in words: "one hundred and five", "two and a half", "three quarters"."""
    words: list[tuple[str, int]] = []
    at = place
    while match := _WORD.match(text, at):
        words.append((match.group(1).lower(), match.end()))
        at = match.end()
    total = current = 0
    used, i = 0, 0
    while i < len(words):
        word = words[i][0]
        if word in _SMALL:
            if used and not _may_follow(words[i - 1][0], word):
                break
            current += _SMALL[word]
        elif word in ("a", "an") and not used and i + 1 < len(words):
            following = words[i + 1][0]
            if following not in SCALES and following.rstrip("s") not in _PARTS:
                return None
            current = 0 if following.rstrip("s") in _PARTS else 1
        elif word == "hundred" and used:
            current *= 100
        elif word in SCALES and (used or i == 0) and word != "hundred":
            total, current = total + max(current, 1) * SCALES[word], 0
        elif word == "and" and used and i + 1 < len(words) and words[i - 1][0] in SCALES:
            if words[i + 1][0] not in _SMALL:
                break
            i += 1
            continue
        else:
            break
        used = i = i + 1
    value, end = Fraction(total + current), words[used - 1][1] if used else place
    return _with_part(value, used, end, [w for w, _ in words], [e for _, e in words])


def _may_follow(before: str, word: str) -> bool:
    """Whether two words of a number may follow each other: "twenty one", not "one two"."""
    return before in SCALES or before == "and" or (before in _TENS and 0 < _SMALL[word] < 10)


def _with_part(
    value: Fraction, used: int, end: int, words: list[str], ends: list[int]
) -> tuple[Fraction, int] | None:
    """The number with the part of one that follows it: "half", "two thirds", "and a half"."""
    i = used
    if i < len(words) and words[i] == "and" and used:
        i += 1
        if i < len(words) and words[i] in ("a", "an", "one"):
            i += 1
        if i < len(words) and words[i] in ("half", "quarter", "third"):
            return value + Fraction(1, _PARTS[words[i]]), ends[i]
        return value, end
    part = words[i].rstrip("s") if i < len(words) else ""
    part = "half" if part in ("halve", "half") else part
    if part in _PARTS and (used or part == "half"):
        return (value or Fraction(1)) / _PARTS[part], ends[i]
    return (value, end) if used else None
