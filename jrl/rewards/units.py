r"""Units of answers: words and signs behind a number, or in front of it, that name what is counted.

A unit is a product and quotient of names with powers ("km/h", "square feet", ``cm^2``), a currency,
or a phrase that nobody has listed ("red apples"). One name has many spellings. No unit is converted
into another: 1 km and 1000 m are different answers.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

_SPELLINGS = """
m meter metre|km kilometer kilometre|cm centimeter centimetre|mm millimeter millimetre
μm micrometer micrometre micron|nm nanometer nanometre
in inch|ft foot feet|yd yard|mi mile|light-year lightyear
g gram gramme gm|kg kilogram kilo kilogramme|mg milligram|lb lbs|pound|oz ounce|ton tonne|stone
s second sec|ms millisecond|min minute|h hour hr|day|wk week|mo month|yr year|decade|century
l L liter litre|ml mL milliliter millilitre|gal gallon|qt quart|pt pint|cup|tbsp tablespoon
tsp teaspoon|floz
mph|kph kmh kmph|N newton|J joule|kJ kilojoule|cal calorie|kcal|W watt|kW kilowatt|kWh|V volt
A amp ampere|Ω ohm|Hz hertz|kHz|MHz|GHz|Pa pascal|kPa|atm|bar|mol mole|acre|ha hectare
bit|byte|KB kilobyte|MB megabyte|GB gigabyte|TB terabyte
degree deg|celsius °C C|fahrenheit °F F|K kelvin|rad radian
dollar $ USD US$ buck|cent ¢ c|euro € EUR|sterling £ GBP|yen ¥ JPY|rupee ₹ INR Rs|yuan CNY RMB
peso|franc CHF|won ₩
"""
_CURRENCIES = frozenset(
    ["dollar", "cent", "euro", "sterling", "yen", "rupee", "yuan", "peso", "franc", "won"]
)
_TEMPERATURES = frozenset({"celsius", "fahrenheit"})


def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for entry in re.split(r"[|\n]", _SPELLINGS.strip()):
        first, *others = entry.split()
        for spelling in (first, *others):
            names[spelling] = first
            if len(spelling) > 2 and spelling.isalpha():
                names[spelling.lower()] = names[spelling.capitalize()] = first
                names[spelling.lower() + "s"] = names[spelling.capitalize() + "s"] = first
    irregular = {"inches": "in", "centuries": "century", "pence": "penny", "quid": "sterling"}
    return names | irregular | {"mins": "min", "secs": "s", "hrs": "h", "yds": "yd", "kgs": "kg"}


NAMES = _names()
"""Each spelling of a listed unit and its name. A letter stands for one only after a space."""

_GENERIC = frozenset({"unit", "units"})
"""Names nothing: "5 square units" is 5."""
_GENERIC_POWER = re.compile(r"(?:square|cubic|sq|cu) units?|units?\s?\^\s?[23]")

_TAIL = re.compile(
    r"\s+(?:in (?:total|all)|total|altogether|each|left|remaining|old|away|long|tall|high|wide|deep"
    r"|apiece|overall|or so)$"
)
_HEAD = re.compile(r"^(?:more |extra |additional |whole |full |total )?(?:of )?(?:(?:an?|the) )?")
_NOT_IN_A_PHRASE = re.compile(
    r"\b(?:and|or|to|than|not|if|when|is|are|plus|minus|mod|modulo|divided|multiplied|over|choose"
    r"|factorial|squared|cubed|root|log|sin|cos|tan|pi|tau|phi|theta|alpha|beta|gamma|delta|sigma"
    r"|omega|lambda|mu|infinity|percent|hundred|thousand|million|billion|trillion|dozen|score|gross"
    r"|hal(?:f|ves)|thirds?|quarters?|fifths?|sixths?|tenths?|hundredths?|thousandths?"
    r"|point|negative|zero|one|two|three|four|five|six|seven|eight|nine|ten|am|pm)\b"
)
"""Words that change a number, or join two answers: they are no unit."""


class Unit(NamedTuple):
    """The unit of a number.

    Attributes:
      above: listed names with powers, and at most one phrase, in the order of the alphabet.
      below: what follows "per" or "/".
    """

    above: tuple[tuple[str, int], ...]
    below: tuple[tuple[str, int], ...] = ()

    @property
    def is_listed(self) -> bool:
        """Whether all its names are listed ones."""
        return all(name in _LISTED for name, _ in self.above + self.below)


_LISTED = frozenset(NAMES.values())
NO_UNIT = Unit(())


@functools.lru_cache(4096)
def read_unit(text: str) -> Unit | None:
    """The unit that a text names; ``NO_UNIT`` for "" and "units", None where it names none.

    >>> read_unit("square feet") == read_unit("ft^2"), read_unit("km/h") == read_unit("km per hour")
    (True, True)
    >>> read_unit("million"), read_unit("x")
    (None, None)
    """
    text = re.sub(r"[{}]", "", text.strip())
    text = _TAIL.sub("", re.sub(r"(?<=[A-Za-z])\.(?=\s|$|/)", "", text)).strip()
    if "/" in text or re.search(r"\bper\b", text):
        parts = re.split(r"\s*/\s*|\s*\bper\s+", text)
        if len(parts) != 2:
            return None
        above, below = _factors(parts[0]), _factors(parts[1])
        return None if above is None or below is None else Unit(above, below)
    factors = _factors(text)
    if factors is None:
        return None
    below = tuple((name, -power) for name, power in factors if power < 0)
    return _without_fractions(Unit(tuple(f for f in factors if f[1] > 0), below))


def _without_fractions(unit: Unit) -> Unit:
    speeds = {"mph": ("mi", "h"), "kph": ("km", "h")}
    if len(unit.above) == 1 and unit.above[0][0] in speeds and not unit.below:
        distance, time = speeds[unit.above[0][0]]
        return Unit(((distance, 1),), ((time, 1),))
    return unit


def _factors(text: str) -> tuple[tuple[str, int], ...] | None:
    """Names and powers of a product, sorted; None where the text is no unit."""
    text = text.strip()
    if text in ("", *_GENERIC) or _GENERIC_POWER.fullmatch(text):
        return ()
    text = re.sub(r"^(?:of )?(?:an?|the) ", "", text)
    text = re.sub(r"\b(?:fl|fluid)\.? (?:oz|ounces?)\b", "floz", text)
    text = re.sub(r"\blight years?\b", "lightyear", text)
    text = re.sub(r"\bpounds? sterling\b", "sterling", text)
    words = re.findall(r"[A-Za-zμΩ°$€£¥₹₩¢-]+(?:\s?\^\s?-?\d|(?<=[a-z])[23]\b)?", text)
    powers: dict[str, int] = {}
    factor, last = 1, ""
    for word in words:
        name, power = re.fullmatch(r"(.*?)(?:\s?\^\s?(-?\d)|([23]))?", word).group(1, 2)  # type: ignore[union-attr]
        digit = power or word[len(name) :]
        if word in ("square", "sq", "cubic", "cu"):
            factor = 2 if word in ("square", "sq") else 3
        elif word in ("squared", "cubed") and last:
            powers[last] *= 2 if word == "squared" else 3
        elif name in NAMES:
            last = NAMES[name]
            powers[last] = powers.get(last, 0) + factor * int(digit or 1)
            factor = 1
        else:
            return _phrase(text)
    left = re.sub(r"[\s·*.]|\\cdot|\\times", "", text)
    if len(left) != len(re.sub(r"\s", "", "".join(words))) or factor != 1:
        return None
    return tuple(sorted(powers.items()))


def _phrase(text: str) -> tuple[tuple[str, int], ...] | None:
    """An unlisted name, such as "red apples", in the singular."""
    text = _HEAD.sub("", text.casefold()).strip()
    if not re.fullmatch(r"[^\W\d_]{2,}(?:[ '-][^\W\d_]+){0,5}", text) or _NOT_IN_A_PHRASE.search(
        text
    ):
        return None
    whole, _, substance = text.partition(" of ")
    if substance and whole in NAMES:
        return ((f"{NAMES[whole]} of {substance}", 1),)
    # the plural of the last word
    text = re.sub(r"(?<=[^s])s$", "", re.sub(r"(?<=ch|sh|ss|.x)es$", "", text))
    text = re.sub(
        r"ie$", "y", {"people": "person", "children": "child", "men": "man"}.get(text, text)
    )
    return ((text, 1),)


def fits(unit: Unit, other: Unit) -> bool:
    """Whether two units can be of one answer: one may be missing, or say less than the other.

    "cups of sugar" fits "cups", "red apples" fits "apples", "degrees" fits "degrees
    Celsius", "dollars per day" fits "dollars", and "pounds" fits both "lb" and "£".

    >>> fits(read_unit("km"), read_unit("")), fits(read_unit("km"), read_unit("cm"))
    (True, False)
    """
    unit, other = _pounds(unit, other), _pounds(other, unit)
    if unit == other or NO_UNIT in (unit, other):
        return True
    if unit.below != other.below:
        # "60 km" is no speed, but who pays $2 pays it per something
        if (unit.below and other.below) or _measures(unit) or _measures(other):
            return False
        return fits(unit._replace(below=()), other._replace(below=()))
    names = {name for name, _ in unit.above} | {name for name, _ in other.above}
    if "degree" in names and len(names) == 2 and names & _TEMPERATURES:
        return True
    if len(unit.above) == len(other.above) == 1:
        longer, shorter = unit.above[0][0], other.above[0][0]
        if len(longer) < len(shorter):
            longer, shorter = shorter, longer
        if longer.startswith(f"{shorter} of ") and unit.above[0][1] == other.above[0][1]:
            return True
        if longer not in _LISTED and shorter not in _LISTED:
            return longer.endswith(" " + shorter)
    return False


def _pounds(unit: Unit, other: Unit) -> Unit:
    """The unit with what "pound" is in the other one: a weight, or money."""
    factors = {name.partition(" of ")[0] for name, _ in other.above + other.below}
    meant = next((name for name in ("lb", "sterling") if name in factors), "pound")
    above, below = (
        tuple(sorted((re.sub(r"^pound(?=$| of )", meant, name), power) for name, power in part))
        for part in unit
    )
    return Unit(above, below)


def _measures(unit: Unit) -> bool:
    return any(name in _LISTED and name not in _CURRENCIES for name, _ in unit.above)


CURRENCY_SIGNS = {"$": "dollar", "US$": "dollar", "€": "euro", "£": "sterling", "¥": "yen"} | {
    "₹": "rupee",
    "₩": "won",
    "¢": "cent",
}
