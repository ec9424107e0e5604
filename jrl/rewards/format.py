r"""Rewards for the format of a completion: a boxed answer, tags, a pattern; a stated confidence."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.rewards.exact import boxed


def format_reward(
    samples: list[Sample], pattern: str | None = None, tags: Sequence[str] = ()
) -> list[float]:
    r"""1 for a completion in the required format, else 0.

    Args:
      samples: what to judge.
      pattern: a regular expression that must match the complete text, without surrounding
        spaces; "." matches newlines too.
      tags: names such as ["think", "answer"]; each must open and close exactly once, in this
        order, with content, and only spaces between them.

    Returns:
      Points, 0 or 1 for each sample. Without pattern and tags, 1 for a ``\boxed{...}`` answer.

    Raises:
      UserError: both pattern and tags are given, the pattern is not a regular expression, or a
        tag is no name.
    """
    if pattern is not None and (not isinstance(pattern, str) or not pattern):
        raise UserError(f"rewards.format.pattern = {pattern!r}; must be a regular expression")
    if not isinstance(tags, list | tuple) or not all(isinstance(t, str) and t for t in tags):
        raise UserError(f"rewards.format.tags = {tags!r}; must be a list of names")
    if pattern is not None and tags:
        raise UserError("rewards.format.pattern and rewards.format.tags are both set; keep one")
    if pattern is None and not tags:
        return [float(boxed(sample.completion) is not None) for sample in samples]
    try:
        form = re.compile(pattern if pattern is not None else _tag_pattern(tags), re.DOTALL)
    except re.error as error:
        raise UserError(f"rewards.format.pattern = {pattern!r}; not a pattern: {error}") from None
    return [float(form.fullmatch(sample.completion.strip()) is not None) for sample in samples]


_STATED = re.compile(r"confidence\W{0,12}(\d+(?:\.\d+)?|\.\d+)\s*(%?)", re.IGNORECASE)


def confidence(samples: list[Sample]) -> list[float]:
    """The confidence that each completion states last, such as "Confidence: 80%" or "0.8".

    Returns:
      A number in [0, 1] for each sample; numbers above 1 are read as percent. 1 where none is
      stated, so that silence is no way out of being judged (``car``).
    """
    statements = [_STATED.findall(sample.completion) for sample in samples]
    return [_share(*stated[-1]) if stated else 1.0 for stated in statements]


def _share(number: str, percent: str) -> float:
    value = float(number)
    return min(value / 100 if percent or value > 1 else value, 1.0)


def _tag_pattern(tags: Sequence[str]) -> str:
    """A pattern of the tags in order, without nesting."""
    names = "|".join(re.escape(tag) for tag in tags)
    mark = rf"</?(?:{names})>"
    inside = rf"(?!\s*{mark})(?:(?!{mark}).)+"
    return r"\s*".join(rf"<{re.escape(tag)}>{inside}</{re.escape(tag)}>" for tag in tags)
