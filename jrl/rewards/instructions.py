r"""Verifiable instructions: IFEval's 25 constraints, and TÜLU 3's of the same. Imports no JAX.

"Instruction-Following Evaluation for Large Language Models" (arXiv:2311.07911): a row has
``instruction_id_list`` and ``kwargs``, one object for each. What each constraint counts is what the
authors' released ``instruction_following_eval`` counts, to its quirks: ``tests/rewards`` holds
their values on 64 texts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrl.errors import UserError, unknown_choice
from jrl.rewards.base import Sample
from jrl.rewards.language import language_of, sentences, words
from jrl.rewards.tulu_instructions import FUNCTIONS

Check = Callable[[str, Mapping[str, Any]], bool]
_Constraint = tuple[dict[str, Any], str]
"""The arguments of a constraint, and its name."""

# ---------------------------------------------------------------- what they share


def _enough(count: int, threshold: int, relation: str) -> bool:
    """IFEval's two relations."""
    if relation not in ("less than", "at least"):
        raise unknown_choice("relation", relation, ("less than", "at least"))
    return count < threshold if relation == "less than" else count >= threshold


def _pattern(text: str) -> str:
    """Keywords are regular expressions in the authors' code; what is none stands for itself."""
    try:
        re.compile(text)
    except re.error:
        return re.escape(text)
    return text


# ---------------------------------------------------------------- the 25 constraints


def _existence(text: str, k: Mapping[str, Any]) -> bool:
    return all(re.search(_pattern(word), text, re.IGNORECASE) for word in k["keywords"])


def _frequency(text: str, k: Mapping[str, Any]) -> bool:
    count = len(re.findall(_pattern(k["keyword"].strip()), text, re.IGNORECASE))
    return _enough(count, k["frequency"], k["relation"])


def _forbidden(text: str, k: Mapping[str, Any]) -> bool:
    patterns = (rf"\b{_pattern(word)}\b" for word in k["forbidden_words"])
    return not any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def _letters(text: str, k: Mapping[str, Any]) -> bool:
    count = text.lower().count(k["letter"].strip().lower())
    return _enough(count, k["let_frequency"], k["let_relation"])


def _language(text: str, k: Mapping[str, Any]) -> bool:
    return language_of(text) in (k["language"], None)


def _number_sentences(text: str, k: Mapping[str, Any]) -> bool:
    return _enough(len(sentences(text)), k["num_sentences"], k["relation"])


def _paragraphs(text: str, k: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    if not all(parts[1:-1]):
        return False
    empty = sum(not part for part in parts[:1]) + sum(not part for part in parts[1:][-1:])
    return len(parts) - empty == k["num_paragraphs"]


def _number_words(text: str, k: Mapping[str, Any]) -> bool:
    return _enough(len(re.findall(r"\w+", text)), k["num_words"], k["relation"])


def _first_word(text: str, k: Mapping[str, Any]) -> bool:
    parts, nth = text.split("\n\n"), k["nth_paragraph"]
    count = sum(bool(part.strip()) for part in parts)
    if nth > count or not parts[nth - 1].strip():
        return False
    word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    first = re.split(r"[.,?!'\"]", word)[0].lower()
    return count == k["num_paragraphs"] and first == k["first_word"].lower()


def _placeholders(text: str, k: Mapping[str, Any]) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= k["num_placeholders"]


def _postscript(text: str, k: Mapping[str, Any]) -> bool:
    marker = k["postscript_marker"].strip()
    patterns = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = patterns.get(marker, r"\s*" + _pattern(marker.lower()) + r".*$")
    return bool(re.search(pattern, text.lower(), re.MULTILINE))


def _bullets(text: str, k: Mapping[str, Any]) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == k["num_bullets"]


def _constrained(text: str, k: Mapping[str, Any]) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


def _highlights(text: str, k: Mapping[str, Any]) -> bool:
    single = re.findall(r"\*[^\n\*]*\*", text)
    double = re.findall(r"\*\*[^\n\*]*\*\*", text)
    count = sum(bool(part.strip("*").strip()) for part in single)
    count += sum(bool(part.removeprefix("**").removesuffix("**").strip()) for part in double)
    return count >= k["num_highlights"]


def _sections(text: str, k: Mapping[str, Any]) -> bool:
    pattern = r"\s?" + _pattern(k["section_spliter"].strip()) + r"\s?\d+\s?"
    return len(re.split(pattern, text)) - 1 >= k["num_sections"]


def _json(text: str, k: Mapping[str, Any]) -> bool:
    bare = text.strip()
    for start in ("```json", "```Json", "```JSON", "```"):
        bare = bare.removeprefix(start)
    try:
        json.loads(bare.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, k: Mapping[str, Any]) -> bool:
    titles = re.findall(r"<<[^\n]+>>", text)
    return any(title.lstrip("<").rstrip(">").strip() for title in titles)


def _two_responses(text: str, k: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in text.split("******")]
    full = [part for part in parts if part]
    return all(parts[1:-1]) and len(full) == 2 and full[0] != full[1]


def _repeat(text: str, k: Mapping[str, Any]) -> bool:
    return text.strip().lower().startswith(k["prompt_to_repeat"].strip().lower())


def _ending(text: str, k: Mapping[str, Any]) -> bool:
    return text.strip().strip('"').lower().endswith(k["end_phrase"].strip().lower())


def _capital_words(text: str, k: Mapping[str, Any]) -> bool:
    count = sum(word.isupper() for word in words(text))
    return _enough(count, k["capital_frequency"], k["capital_relation"])


def _english_capital(text: str, k: Mapping[str, Any]) -> bool:
    return text.isupper() and language_of(text) in ("en", None)


def _english_lowercase(text: str, k: Mapping[str, Any]) -> bool:
    return text.islower() and language_of(text) in ("en", None)


def _no_comma(text: str, k: Mapping[str, Any]) -> bool:
    return "," not in text


def _quotation(text: str, k: Mapping[str, Any]) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


CONSTRAINTS: dict[str, tuple[Check, tuple[str, ...]]] = {
    "keywords:existence": (_existence, ("keywords",)),
    "keywords:frequency": (_frequency, ("keyword", "frequency", "relation")),
    "keywords:forbidden_words": (_forbidden, ("forbidden_words",)),
    "keywords:letter_frequency": (_letters, ("letter", "let_frequency", "let_relation")),
    "language:response_language": (_language, ("language",)),
    "length_constraints:number_sentences": (_number_sentences, ("num_sentences", "relation")),
    "length_constraints:number_paragraphs": (_paragraphs, ("num_paragraphs",)),
    "length_constraints:number_words": (_number_words, ("num_words", "relation")),
    "length_constraints:nth_paragraph_first_word": (
        _first_word,
        ("num_paragraphs", "nth_paragraph", "first_word"),
    ),
    "detectable_content:number_placeholders": (_placeholders, ("num_placeholders",)),
    "detectable_content:postscript": (_postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": (_bullets, ("num_bullets",)),
    "detectable_format:constrained_response": (_constrained, ()),
    "detectable_format:number_highlighted_sections": (_highlights, ("num_highlights",)),
    "detectable_format:multiple_sections": (_sections, ("section_spliter", "num_sections")),
    "detectable_format:json_format": (_json, ()),
    "detectable_format:title": (_title, ()),
    "combination:two_responses": (_two_responses, ()),
    "combination:repeat_prompt": (_repeat, ("prompt_to_repeat",)),
    "startend:end_checker": (_ending, ("end_phrase",)),
    "change_case:capital_word_frequency": (
        _capital_words,
        ("capital_frequency", "capital_relation"),
    ),
    "change_case:english_capital": (_english_capital, ()),
    "change_case:english_lowercase": (_english_lowercase, ()),
    "punctuation:no_comma": (_no_comma, ()),
    "startend:quotation": (_quotation, ()),
}
"""IFEval's constraints by id: the check, and the arguments that it needs."""


def follows(text: str, constraint: str, kwargs: Mapping[str, Any], *, loose: bool = False) -> bool:
    """Whether a text follows a constraint of IFEval; an empty text follows none.

    Args:
      text: the response.
      constraint: an id of ``CONSTRAINTS``.
      kwargs: its arguments; those that are None do not count.
      loose: whether the text without its first line, its last, both, or without asterisks may
        follow it instead.

    Raises:
      UserError: there is no such constraint, or an argument is missing.
    """
    if constraint not in CONSTRAINTS:
        raise unknown_choice("instruction_id_list", constraint, tuple(CONSTRAINTS))
    check, needed = CONSTRAINTS[constraint]
    absent = [name for name in needed if kwargs.get(name) is None]
    if absent:
        raise UserError(f"rewards.instructions: {constraint} needs {', '.join(absent)} in kwargs")
    return any(
        bool(version.strip()) and check(version, kwargs)
        for version in (versions(text) if loose else [text])
    )


def versions(text: str) -> list[str]:
    """The eight texts that IFEval's loose accuracy looks at."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(version.replace("*", "") for version in cut)]


# ---------------------------------------------------------------- the reward


def instructions(
    samples: list[Sample],
    loose: bool = False,
    partial: bool = False,
    column: str = "instruction_id_list",
    kwargs_column: str = "kwargs",
) -> list[float]:
    """Instructions that a program can check: 1 where all of a row's are followed, else 0.

    A row has IFEval's ``instruction_id_list`` and ``kwargs``; or its answer (``ground_truth``) is
    TÜLU 3's, {"func_name": ..., "N": ...}, whose functions count in their own way
    (arXiv:2411.15124), or a list of {"instruction_id": [..], "kwargs": [..]}. Each may be JSON
    text. TÜLU 3 pays 10 for its one constraint: ``weight = 10``.

    Args:
      samples: what to judge.
      loose: IFEval's loose accuracy, see ``versions``; the strict one otherwise.
      partial: pays the share of the constraints that are followed.
      column: with the ids.
      kwargs_column: with their arguments.

    Raises:
      UserError: a row without constraints, one that does not exist, or one without an argument.
    """
    points = []
    for sample in samples:
        meta, text = sample.prompt.meta, sample.completion
        verdicts = []
        for kwargs, name in _constraints(meta, sample.prompt.answer, column, kwargs_column):
            if name in FUNCTIONS:
                tried = versions(text) if loose else [text]
                verdicts.append(any(_tulu(name, version, kwargs) for version in tried))
            else:
                verdicts.append(follows(text, name, kwargs, loose=loose))
        if not verdicts:
            raise UserError(
                f"rewards.instructions: row {sample.prompt.id + 1} has no constraints in"
                f" {column!r}, nor TÜLU 3's ground_truth; name the"
                " column with rewards.instructions.column"
            )
        share = sum(verdicts) / len(verdicts)
        points.append(share if partial else float(share == 1.0))
    return points


def _constraints(
    meta: Mapping[str, Any], answer: Any, column: str, kwargs_column: str
) -> list[_Constraint]:
    """The constraints of a row."""
    if meta.get(column):
        names = list(_loaded(meta[column]))
        arguments = list(_loaded(meta.get(kwargs_column)) or [{}] * len(names))
        return _paired(names, arguments)
    value = _loaded(answer)
    constraints: list[_Constraint] = []
    for item in [value] if isinstance(value, Mapping) else value if _is_list(value) else []:
        item = item if isinstance(item, Mapping) else {}
        if "func_name" in item:
            if item["func_name"] not in FUNCTIONS:
                raise unknown_choice("func_name", item["func_name"], tuple(FUNCTIONS))
            constraints.append((dict(item), str(item["func_name"])))
        elif "instruction_id" in item:
            names = item["instruction_id"]
            constraints += _paired([names] if isinstance(names, str) else names, item["kwargs"])
    return constraints


def _paired(names: Sequence[str], arguments: Any) -> list[_Constraint]:
    arguments = [arguments] if isinstance(arguments, Mapping) else list(arguments)
    if len(arguments) != len(names):
        raise UserError(
            f"rewards.instructions: {len(names)} constraints ({', '.join(names)[:80]}) have"
            f" {len(arguments)} kwargs; give one object for each"
        )
    return [
        (dict(_loaded(kwargs) or {}), name) for kwargs, name in zip(arguments, names, strict=True)
    ]


def _tulu(name: str, text: str, kwargs: Mapping[str, Any]) -> bool:
    check, needed = FUNCTIONS[name]
    absent = [key for key in needed if kwargs.get(key) is None]
    if absent:
        raise UserError(f"rewards.instructions: {name} needs {', '.join(absent)}")
    return bool(check(text, *(kwargs[key] for key in needed)))


def _loaded(value: Any) -> Any:
    """A value, from JSON or a literal of Python where it is a text."""
    if isinstance(value, str):
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
        return [value]
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
