r"""Rewards that compare an answer in words: multiple choice, exact match, F1, what is contained."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.rewards.exact import marked_answer, same_answer

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def stated_answer(text: str) -> str:
    r"""The answer in a text: the last <answer>...</answer>, a mark such as \boxed, or all of it."""
    tagged = _TAGGED.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def normalised(text: str) -> str:
    """SQuAD's form of an answer: lower case, without punctuation, articles and further spaces.

    >>> normalised("The  Eiffel Tower!")
    'eiffel tower'
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", _unpunctuated(text)).split())


def _unpunctuated(text: str) -> str:
    bare = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(bare.split())


def references(answer: Any, key: str) -> list[str]:
    """The texts that an answer of the data allows: one, a list, or Search-R1's {"target": ...}.

    Raises:
      UserError: it is none of these, or empty.
    """
    value = answer.get("target") if isinstance(answer, dict) else answer
    texts = [value] if isinstance(value, str | int | float) else value
    if not isinstance(texts, list | tuple) or not texts:
        raise UserError(f"{key}: the answer is {str(answer)[:60]}; give a text or a list of texts")
    return [str(text) for text in texts]


def exact_match(samples: list[Sample]) -> list[float]:
    """1 where the stated answer is one of the references in SQuAD's form, else 0.

    References of which nothing is left in that form, such as "A" and "+", keep what they have.
    verl's ``search_r1_like_qa_em`` without its fine for many answer tags.
    """
    return _best(samples, "rewards.exact_match", lambda a, b: float(a == b))


def contains(samples: list[Sample]) -> list[float]:
    """1 where the stated answer holds one of the references, both in SQuAD's form, else 0."""
    return _best(samples, "rewards.contains", lambda a, b: float(b in a))


def f1(samples: list[Sample]) -> list[float]:
    """The best F1 of words, between the stated answer and the references in SQuAD's form."""
    return _best(samples, "rewards.f1", word_f1)


def word_f1(answer: str, reference: str) -> float:
    """F1 of the words of two texts, counted with their repetitions.

    >>> round(word_f1("red big dog", "big dog"), 3)
    0.8
    """
    a, b = answer.split(), reference.split()
    if not a or not b:
        return float(a == b)
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b))


def _best(samples: list[Sample], key: str, compare: Any) -> list[float]:
    points = []
    for sample in samples:
        answer = stated_answer(sample.completion)
        texts = references(sample.prompt.answer, key)
        points.append(max(_compared(answer, text, compare) for text in texts))
    return points


def _compared(answer: str, text: str, compare: Any) -> float:
    """The points of an answer beside a reference.

    Of "A" and "+" nothing is left in SQuAD's form, where "the" and "" would be right.
    """
    forms: tuple[Callable[[str], str], ...] = (normalised, _unpunctuated, str.strip)
    for form in forms:
        if reference := form(text):
            return float(compare(form(answer), reference))
    return float(not answer.strip())


# A small "a" before a word is an article.
_LETTER = re.compile(
    r"(?<![A-Za-z])(?:\(?([A-Z])(?:\)|\.|:|\s*$|(?=\s))|\(([a-z])\))|\A\s*([a-z])[).:]?\s*\Z"
)
_SAYS = re.compile(
    r"(?i:answer|choice|option)\s*(?:(?i:is)|:)?\s*:?\s*\**\(?([A-Z]|[a-z](?!\s+\w))(?![A-Za-z])"
)


def multiple_choice(
    samples: list[Sample], choices: str = "choices", letters: str = string.ascii_uppercase
) -> list[float]:
    r"""1 where the choice that is stated is the right one, else 0.

    The stated answer may be a letter ("C", "(C)", "C. Paris", "the answer is C") or the text of a
    choice. The data's answer may be a letter, the number of a choice from 0, or its text.

    Args:
      samples: what to judge.
      choices: the column with the list of choices; rows may have none where answers are letters.
      letters: that number them.

    Raises:
      UserError: a row's answer is none of its choices.
    """
    return [
        float(
            _chosen(stated_answer(s.completion), s, choices, letters) == _right(s, choices, letters)
        )
        for s in samples
    ]


def _options(sample: Sample, choices: str) -> list[str]:
    value = sample.prompt.meta.get(choices) or ()
    if isinstance(value, dict):  # ARC's layout
        value = value.get("text", ())
    return [str(each).strip() for each in value]


def _place(text: str, options: Sequence[str]) -> int | None:
    """The number of the choice that a text is; None for none, or where several are alike."""
    if text in options:
        return options.index(text)
    alike = [i for i, option in enumerate(options) if text and _is_alike(text, option)]
    return alike[0] if len(alike) == 1 else None


def _is_alike(text: str, option: str) -> bool:
    """Whether words are the same in SQuAD's form; or numbers, whose signs it removes, by value."""
    if re.search(r"\d", option):
        return same_answer(text, option)
    return bool(normalised(option)) and normalised(text) == normalised(option)


def _holds(text: str, option: str) -> bool:
    """Whether a sentence holds a choice: its words, or as it is written where it has digits."""
    if re.search(r"\d", option):
        whole = rf"(?<![\w.,/^-]){re.escape(option)}(?![\w/^%]|[.,]\d)"
        return len(option) > 1 and re.search(whole, text, re.IGNORECASE) is not None
    words = normalised(option)
    return len(words) > 1 and f" {words} " in f" {normalised(text)} "


def _right(sample: Sample, choices: str, letters: str) -> int:
    answer, options = sample.prompt.answer, _options(sample, choices)
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer
    text = str(answer).strip()
    if (place := _place(text, options)) is not None:
        return place
    if len(text.strip("().")) == 1 and text.strip("().").upper() in letters:
        return letters.index(text.strip("().").upper())
    if text.isdecimal() and int(text) < max(len(options), 1):
        return int(text)
    raise UserError(
        f"rewards.multiple_choice: the answer {text[:40]!r} of prompt {sample.prompt.id} is no"
        f" letter and none of its {choices!r}"
    )


def _chosen(text: str, sample: Sample, choices: str, letters: str) -> int:
    """The number of the stated choice; -1 for none."""
    options, text = _options(sample, choices), text.strip()
    if (place := _place(text, options)) is not None:
        return place
    usable = letters[: len(options)] if options else letters
    # "I think it is Paris": a text of a choice goes before a letter that may be a word
    named = [letter.upper() for letter in _SAYS.findall(text) if letter.upper() in usable]
    if named:
        return letters.index(named[-1])
    contained = [i for i, option in enumerate(options) if _holds(text, option)]
    if len(contained) == 1:
        return contained[0]
    letters_found = ["".join(groups).upper() for groups in _LETTER.findall(text)]
    bare = [letter for letter in letters_found if letter in usable]
    return letters.index(bare[-1]) if bare else -1
