r"""Answers without markup: LaTeX, Markdown, and the signs of Unicode in one spelling each."""

from __future__ import annotations

import functools
import re
import unicodedata

LONGEST = 400
"""Characters; a longer answer is compared as text."""

_MOST_MARKUP = 4
"""Times ``LONGEST``, with markup: longer texts are not cleaned."""

MOST_ITEMS = 40
"""Of a list; more are not compared one by one."""
DEEPEST = 12
"""Brackets inside each other."""

_PMATRIX = r"\\begin{pmatrix}\1\\end{pmatrix}"
_ROMAN = r"(\\(?:text|mathrm)\s?\{[^{}]*\}(?:\s?\^\s?\{?\d\}?)?)"
"""Words in a formula, such as the parts of a unit, with a power."""

_TOKEN = r"\d|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|\\(?:pi|theta|alpha|beta|phi)(?![a-zA-Z])"
"""What a command of LaTeX takes without braces: a digit, a letter or a sign."""

_MARKS = [
    (r"\.?\s+I hope it is correct\.?\s*$", ""),
    (r"(?<!\\)\$\s?(-?[\d.,]*\d(?:\\?%)?)\s?\$", r" \1 "),
    (r"\{,\}\s?(?:\\!)?|,\s?\\!\s?", ","),
    (r"\{:\}|\\colon(?![a-z])", ":"),
    (r"\\pmod\s?\{?\s?(\w+)\s?\}?|\(\\?b?mod\s?(\w+)\)", r" (mod \1\2)"),
    (r"\\textcolor\s?\{\w*\}\s?\{([^{}]*)\}|\\color\s?\{\w*\}", r"\1"),
    (r"\\left(?![a-z])|\\right(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\displaystyle|(?<!\\)\\!", ""),
    (r"[\[(]?\\begin\{array\}\s?\{[clr| ]*\}([\s\S]*?)\\end\{array\}[\])]?", _PMATRIX),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])|[\u00a0\u2009\u202f]", " "),
    (r"\\(?:[dtcs]|nice)frac", r"\\frac"),
    (rf"\\frac\s?\{{\s?{_ROMAN}\s?\}}\s?\{{\s?{_ROMAN}\s?\}}", r"\1/\2"),
    (r"(?<=[\d.])\\dot\s?\{?(\d)\}?(?:(\d*)\\dot\s?\{?(\d)\}?)?", r"\\overline{\1\2\3}"),
    (r"(?<=[\d.])\\bar\s?\{(\d+)\}|(?<=\d\.)\((\d+)\)", r"\\overline{\1\2}"),
    (
        r"(?<![\d.])(\d*\.\d*?)(?:(\d)\2{2,}|(\d{2,}?)\3+)\s?(?:\.{3}|\u2026|\\[lc]?dots(?![a-z]))",
        r"\1\\overline{\2\3}",
    ),
    (r"\s?\^\s?(?:\{\s?\\(?:circ|degree)\s?\}|\\(?:circ|degree))|\\degree|º|\u02da", "°"),
    (r"(\\(?:sin|cos|tan|cot|sec|csc)\s?[({]?\s?)(\d+(?:\.\d+)?)\s?°", r"\1{\\frac{\2\\pi}{180}}"),
    (r"°\s?([CF])\b", r" °\1"),
    (r"°(?!\s?[CF])", " degrees "),
    ("\u2044", "/"),
    ("\u2212|\u2013(?=\\d)", "-"),
    ("[\u2013\u2014]", "-"),
    ("\u00d7", r"\\times "),
    ("[\u00b7\u22c5]", r"\\cdot "),
    ("\u2264|\\\\leq(?![a-z])|\\\\leqslant|<=", r"\\le "),
    ("\u2265|\\\\geq(?![a-z])|\\\\geqslant|>=", r"\\ge "),
    (r"(?<![\w+*/^!-])(\d+|n)!=", r"\1! ="),  # factorials: n!=24 is one, x!=24 is not
    (r"!=|=/=|\\not\s?=|\\neq(?![a-z])|\u2260", r"\\ne "),
    ("\u221e", r"\\infty "),
    ("\u03c0", r"\\pi "),
    ("\u222a", r"\\cup "),
    ("\u2208", r"\\in "),
    ("\u00b1|\\+/-", r"\\pm "),
    (r"\u221a\s?(\d+(?:\.\d+)?|[a-zA-Z](?![a-zA-Z]))", r"\\sqrt{\1}"),
    ("\u221a", r"\\sqrt"),
    (r"\\langle(?![a-z])|\u27e8", "("),
    (r"\\rangle(?![a-z])|\u27e9", ")"),
    (r"\\varnothing|\u2205", r"\\emptyset "),
    (r"\\pounds(?![a-zA-Z])\s?", "\u00a3"),
    (r"(?<![a-zA-Z\\])infinity(?![a-zA-Z])", r"\\infty "),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"\\log\s?_\s?(?:\{\s?e\s?\}|e(?![a-zA-Z]))", r"\\ln "),
    (r"\\?(?<![a-zA-Z])sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
    (rf"\\sqrt\s?(\[\w+\])?\s?({_TOKEN})(?!\.?\d)", r"\\sqrt\1{\2}"),
    (rf"\\frac\s?({_TOKEN})\s?({_TOKEN})", r"\\frac{\1}{\2}"),
    (rf"\\frac\s?({_TOKEN})\s?\{{", r"\\frac{\1}{"),
    (rf"\\frac\s?(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})\s?({_TOKEN})", r"\\frac\1{\2}"),
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
    for _ in range(DEEPEST):
        text, count = _WRAPPED.subn(r" \1 ", text)
        if not count:
            break
    text = unicodedata.normalize("NFKC", text)
    # signs of units, where they follow a number
    text = re.sub(r"(?<=\d)\s+\\Omega(?![a-z])", " Ω", text)
    return bare(re.sub(r"(?<=\d)\s+\\mu\s+(?=[a-zA-Z]\b)", " μ", text))


def bare(text: str) -> str:
    """The text without surrounding spaces, emphasis, maths delimiters and punctuation."""
    before = None
    while text != before:
        before = text
        text = re.sub(r"\s+", " ", text).strip()
        text = re.sub(
            r"(?<!\.\.)[.,;:?]$|(?<=[a-z]{2})!$|\\+$|^\\\(|\\\)$|^\\\[|\\\]$", "", text
        ).strip()
        for mark in ("**", "__", "$$", "$", r"\$", "*", "_", "`", '"', "'"):
            inner = text[len(mark) : -len(mark)]
            if text.startswith(mark) and text.endswith(mark) and inner and mark not in inner:
                text = inner.strip()
        if (
            text.startswith("{")
            and closing(text, 0) == len(text) - 1
            and not split_list(text[1:-1])[1:]
        ):
            text = text[1:-1]
        text = _OPENING.sub("", text)
    return text


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at ``start``; any closes any, as in (1, 2]."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


def split_list(text: str) -> list[str]:
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
    r"[(\[{)\]}]|\s*[,;]\s*(?:and\s|or\s)?|\s+(?:and|or)\s+|\s&\s"
    r"|(?<=[)\]}\d])(?:and|or)(?=[(\[{\d\\-]|[A-Za-z]\()|\s*\\(?:land|lor)(?![a-z])\s*"
)


def plain_words(text: str) -> str:
    """A text without case, spaces, articles, and punctuation that says nothing."""
    text = re.sub(r"^(?:the|an|a) (?=\w{2})", "", text.casefold())
    text = re.sub(r"^(no (?:\w+ )?(?:solution|root|answer|value))s$", r"\1", text)
    return re.sub(r"\s+|(?<=\w)[-](?=[^\W\d])|[,\"'`$]|\.(?!\d)", "", text)
