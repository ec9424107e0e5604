"""Reward functions of TRL under their names and with their options.

Each calls the function of this library that computes the same. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence

from jrl.errors import UserError
from jrl.rewards import shaping
from jrl.rewards.base import Sample


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
    """TRL's: ``repetition`` of tokens.

    Raises:
      UserError: ``max_penalty`` is above 0, or ``ngram_size`` below 1.
    """
    for name, value, ok in (
        ("ngram_size", ngram_size, ngram_size >= 1),
        ("max_penalty", max_penalty, max_penalty <= 0),
    ):
        if not ok:
            least = "at most 0" if name == "max_penalty" else "at least 1"
            raise UserError(
                f"rewards.get_repetition_penalty_reward.{name} = {value}; must be {least}"
            )
    return shaping.repetition(samples, ngram_size, max_penalty)


def get_soft_overlong_punishment(
    samples: list[Sample], max_completion_len: int, soft_punish_cache: int
) -> list[float]:
    """TRL's: ``soft_overlong``.

    Raises:
      UserError: ``soft_punish_cache`` is not between 0 and ``max_completion_len``.
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise UserError(
            f"rewards.get_soft_overlong_punishment.soft_punish_cache = {soft_punish_cache}; must be"
            f" 0 to max_completion_len = {max_completion_len}"
        )
    return shaping.soft_overlong(samples, max_completion_len, soft_punish_cache)
