r"""Constraints as TÜLU 3's verifier counts them, by the names in its data's ``func_name``.

"Tulu 3: Pushing Frontiers in Open Language Model Post-Training" (arXiv:2411.15124), as the
functions of ``open_instruct/if_functions.py`` (commit e6c3044) have it: counts are exact where
IFEval has relations, and "around" allows a tenth. Imports no JAX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jrl.rewards.language import language_of


def _near(count: int, n: int, quantifier: str, around: int) -> bool:
    """TÜLU 3's three quantifiers; any other is not followed."""
    if quantifier == "around":
        return abs(count - n) <= around
    return (quantifier == "at least" and count >= n) or (quantifier == "at most" and count <= n)


def _tenth(n: int) -> int:
    return max(round(n * 0.1), 1)


def _paragraph_count(text: str, n: int) -> bool:
    parts = "\n".join(line.strip() for line in text.splitlines()).strip().split("* * *")
    return len(parts) == n and all(part.strip() for part in parts)


def _sentences(text: str, n: int, quantifier: str) -> bool:
    parts = re.split(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?|!)\s", text)
    return _near(len(parts), n, quantifier, 1)


def _paragraphs(text: str, n: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == n and 1 <= i <= n and parts[i - 1].strip().startswith(first_word)


def _postscript(text: str, marker: str) -> bool:
    _, separator, rest = text.partition(marker)
    return bool(separator) and len((separator + rest).strip()) > len(marker)


def _bullets(text: str, n: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == n


def _sections(text: str, n: int, splitter: str) -> bool:
    parts = text.split(splitter)
    return len(parts) - (not parts[0]) == n


def _json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1]


def _language(text: str, language: str) -> bool:
    return language_of(text) == language


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "verify_keywords": (
        lambda text, words: all(word.lower() in text.lower() for word in words),
        ("keyword_list",),
    ),
    "verify_keyword_frequency": (
        lambda text, word, n: re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == n,
        ("word", "N"),
    ),
    "validate_forbidden_words": (
        lambda text, words: not any(word.lower() in text.lower() for word in words),
        ("forbidden_words",),
    ),
    "verify_letter_frequency": (lambda text, c, n: text.count(c) == n, ("letter", "N")),
    "validate_response_language": (_language, ("language",)),
    "verify_paragraph_count": (_paragraph_count, ("N",)),
    "validate_word_constraint": (
        lambda text, n, q: _near(len(text.split()), n, q, _tenth(n)),
        ("N", "quantifier"),
    ),
    "verify_sentence_constraint": (_sentences, ("N", "quantifier")),
    "validate_paragraphs": (_paragraphs, ("N", "first_word", "i")),
    "verify_postscript": (_postscript, ("postscript_marker",)),
    "validate_placeholders": (
        lambda text, n: len(re.findall(r"\[(.*?)\]", text)) >= n,
        ("N",),
    ),
    "verify_bullet_points": (_bullets, ("N",)),
    "validate_title": (lambda text: re.search(r"<<(.*?)>>", text), ()),
    "validate_choice": (lambda text, options: any(o in text for o in options), ("options",)),
    "validate_highlighted_sections": (
        lambda text, n: len(re.findall(r"\*(.*?)\*", text)) >= n,
        ("N",),
    ),
    "validate_sections": (_sections, ("N", "section_splitter")),
    "validate_json_format": (_json, ()),
    "validate_repeat_prompt": (
        lambda text, prompt: text.startswith(prompt),
        ("original_prompt",),
    ),
    "validate_two_responses": (_two_responses, ()),
    "validate_uppercase": (lambda text: text == text.upper(), ()),
    "validate_lowercase": (lambda text: text == text.lower(), ()),
    "validate_frequency_capital_words": (
        lambda text, n, q: _near(len(re.findall(r"\b[A-Z]+\b", text)), n, q, _tenth(n)),
        ("N", "quantifier"),
    ),
    "validate_end": (lambda text, phrase: text.endswith(phrase), ("end_phrase",)),
    "validate_quotation": (lambda text: text.startswith('"') and text.endswith('"'), ()),
    "validate_no_commas": (lambda text: "," not in text, ()),
}
"""By name: the check, and the arguments that it needs, in its order."""
