"""Reward functions of TRL and verl under their names and with their options.

Each calls the function of this library that computes the same; differences are said where there are
any.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jrl.errors import unknown_choice
from jrl.rewards import shaping
from jrl.rewards.base import Sample
from jrl.rewards.exact import boxed, same_answer
from jrl.rewards.matching import normalised, references, stated_answer
from jrl.rewards.math import math_reward as math
from jrl.rewards.minerva import last_box, normal_form

# ---------------------------------------------------------------- TRL


def accuracy_reward(samples: list[Sample]) -> list[float | None]:
    """TRL's: ``accuracy``."""
    return shaping.accuracy(samples)


def reasoning_accuracy_reward(
    samples: list[Sample], reasoning_delimiters: Sequence[str] = ("</think>",)
) -> list[float | None]:
    """TRL's: ``reasoning_accuracy``."""
    return shaping.reasoning_accuracy(samples, reasoning_delimiters)


def think_format_reward(samples: list[Sample]) -> list[float]:
    """TRL's: ``think_format``."""
    return shaping.think_format(samples)


def get_cosine_scaled_reward(
    samples: list[Sample],
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> list[float | None]:
    """TRL's: ``cosine_length``."""
    right, wrong = (max_value_correct, min_value_correct), (min_value_wrong, max_value_wrong)
    return shaping.cosine_length(samples, max_len, right, wrong)


def get_repetition_penalty_reward(
    samples: list[Sample], ngram_size: int = 3, max_penalty: float = -1.0
) -> list[float]:
    """TRL's: ``repetition`` of tokens."""
    return shaping.repetition(samples, ngram_size, max_penalty)


def get_soft_overlong_punishment(
    samples: list[Sample], max_completion_len: int, soft_punish_cache: int
) -> list[float]:
    """TRL's: ``soft_overlong``."""
    return shaping.soft_overlong(samples, max_completion_len, soft_punish_cache)


# ---------------------------------------------------------------- verl


def gsm8k(
    samples: list[Sample], method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> list[float]:
    """Verl's ``gsm8k``: the last number behind "#### ", letter for letter.

    Args:
      samples: what to judge.
      method: "strict", or "flexible" for the last number of the text's last 300 letters.
      format_score: points of another number.
      score: points of the right one.
    """
    points = []
    for sample in samples:
        tail = sample.completion[-300:]
        if method == "strict":
            numbers = [n.replace(",", "") for n in re.findall(r"#### (\-?[0-9\.\,]+)", tail)]
        else:  # the full stop of a sentence is a form, too
            numbers = re.findall(r"(\-?[0-9\.\,]+)", tail)
            numbers.sort(key=lambda n: n != ".")
        right = bool(numbers) and numbers[-1] == str(sample.prompt.answer)
        points.append(score if right else format_score if numbers else 0.0)
    return points


def math_reward(samples: list[Sample]) -> list[float]:
    r"""Verl's ``math_reward``, of MATH: 1 where the last ``\boxed{...}`` is the answer, else 0.

    Departure: the two are compared as ``math`` does it, not letter for letter after replacements.
    """
    points = []
    for sample in samples:
        answer = boxed(sample.completion)
        alone = dataclasses.replace(sample, completion=f"\\boxed{{{answer}}}")
        points.append(0.0 if answer is None else math([alone])[0])
    return points


def math_batch(samples: list[Sample]) -> list[float]:
    """Verl's ``math_batch``: ``math_reward``, of all samples at once there."""
    return math_reward(samples)


def math_verify(samples: list[Sample]) -> list[float]:
    """Verl's ``math_verify``: ``math``, which asks math-verify where it is installed."""
    return math(samples)


def prime_math(samples: list[Sample]) -> list[float]:
    """Verl's ``prime_math``: 1 for a right answer, boxed or stated, else 0.

    Departure: the answer is found and compared as ``math`` does it.
    """
    return math(samples)


def math_dapo(
    samples: list[Sample], strict_box_verify: bool = False, compare: str = "grammar"
) -> list[float]:
    r"""Verl's ``math_dapo``: 1 where what follows the last "Answer:" is the answer, else -1.

    Of the text's last 300 letters. Departure: the two are compared by the grammar of
    ``jrl.rewards.answers``; ``compare = "minerva"`` has the verdicts of verl, to reproduce DAPO.

    Args:
      samples: what to judge.
      strict_box_verify: the last ``\boxed{...}`` of the last 100 letters, letter for letter.
      compare: "grammar", or "minerva" for Minerva's list of replaced letters.
    """
    if compare not in ("grammar", "minerva"):
        raise unknown_choice("rewards.math_dapo.compare", compare, ("grammar", "minerva"))
    points = []
    for sample in samples:
        answer = str(sample.prompt.answer)
        stated = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", sample.completion[-300:])
        if strict_box_verify:
            right = last_box(sample.completion[-100:]) == answer
        elif compare == "minerva":
            right = normal_form(stated[-1] if stated else "[INVALID]") == normal_form(answer)
        else:
            right = bool(stated) and same_answer(stated[-1], answer)
        points.append(1.0 if right else -1.0)
    return points


def geo3k(samples: list[Sample], format_score: float = 0.1, use_boxed: bool = True) -> list[float]:
    r"""Verl's ``geo3k``: 0.9 for a boxed answer that is right, 0.1 for its form.

    The form is <think>...</think> with a ``\boxed{...}`` behind it. Without ``use_boxed`` the whole
    text is the answer.
    """
    form = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
    points = []
    for sample in samples:
        answer = boxed(sample.completion) if use_boxed else sample.completion.strip()
        right = answer is not None and same_answer(answer, str(sample.prompt.answer))
        is_formed = form.fullmatch(sample.completion) is not None
        points.append((1 - format_score) * right + format_score * is_formed)
    return points


def search_r1_like_qa_em(
    samples: list[Sample], format_score: float = 0.0, score: float = 1.0
) -> list[float]:
    """Verl's for Search-R1: exact match of what stands in the last <answer>...</answer>.

    A quarter of the points where tags are opened or closed more than ten times; 0 without an
    answer.
    """
    points = []
    for sample in samples:
        text = sample.completion
        if not re.search(r"<answer>(.*?)</answer>", text, re.DOTALL):
            points.append(0.0)
            continue
        texts = references(sample.prompt.answer, "rewards.search_r1_like_qa_em")
        right = normalised(stated_answer(text)) in [normalised(each) for each in texts]
        many = max(text.count("<answer>"), text.count("</answer>")) > 10
        points.append((score / 4 if many else score) if right else format_score)
    return points


NAMES = {
    function.__name__: function
    for function in (
        accuracy_reward,
        reasoning_accuracy_reward,
        think_format_reward,
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        gsm8k,
        math_batch,
        math_dapo,
        math_reward,
        math_verify,
        prime_math,
        geo3k,
        search_r1_like_qa_em,
    )
}
"""Functions by the names that scripts for TRL and verl use."""
