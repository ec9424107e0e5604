"""Rewards of an answer by name: exact match, or the F1 of its words."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl.episodes.host import Reply
from jrl.rewards.base import Sample
from jrl.rewards.exact import exact_reward
from jrl.types import Prompt
from jrl.user_code import load

EXACT, F1 = "exact", "f1"
Judge = Callable[[Prompt, str], Any]
"""(problem, answer) -> reward; sync or async."""


def judge_of(reward: str | Judge, key: str = "data.reward") -> Judge:
    """A reward function of (prompt, text).

    Args:
      reward: "exact" for the answer's number or text (``rewards.exact``), "f1" for the words of
        the last answer (``answer_f1``), ``FILE.py:function``, or a function, which is returned.
      key: that names it, for messages.

    Raises:
      UserError: there is no such function.
    """
    if not isinstance(reward, str):
        return reward
    if reward == F1:
        return lambda prompt, text: answer_f1(last_answer(text), str(prompt.answer))
    if reward != EXACT:
        return load(reward, key)

    def exact(prompt: Prompt, text: str) -> float:
        return exact_reward([Sample(prompt, text, np.zeros(0, np.int32), "stop_token")])[0]

    return exact


def with_values(text: str, **values: Any) -> str:
    r"""A text with the values of its {fields}; other braces, as of LaTeX and JSON, stay.

    >>> with_values(r"\boxed{A} of {count}", count=3)
    '\\boxed{A} of 3'
    """
    fields = re.compile(rf"\{{({'|'.join(values)})\}}")
    return fields.sub(lambda field: str(values[field[1]]), text)


def last_turn_reward(reward: str | Judge) -> Callable[[Prompt, Reply], Any]:
    """``judge_of`` the last turn's text, for ``tools.tool_env``."""
    judge = judge_of(reward)
    return lambda prompt, reply: judge(prompt, reply.text)


def answer_words(text: str) -> list[str]:
    """The words of an answer, without case, articles and punctuation.

    >>> answer_words("The City of Ravel.")
    ['city', 'of', 'ravel']
    """
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def answer_f1(text: str, answer: str) -> float:
    """Word overlap of two answers: the harmonic mean of precision and recall, 0 to 1.

    >>> answer_f1("ravel", "Ravel"), round(answer_f1("the city Ravel", "Ravel"), 2)
    (1.0, 0.67)
    """
    words, right = answer_words(text), answer_words(answer)
    both = sum((collections.Counter(words) & collections.Counter(right)).values())
    return 2 * both / (len(words) + len(right)) if both else 0.0


def last_answer(text: str) -> str:
    """The text after the last "Answer:", to the end of its line; "" where there is none."""
    answers = re.findall(r"answer\s*:\s*(.*)", text, re.IGNORECASE)
    return answers[-1].strip(" *.") if answers else ""
