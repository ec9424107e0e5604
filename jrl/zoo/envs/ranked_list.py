"""Requests that are answered with a ranked list, each rank a reward part of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jrl.data.tasks.base import check_range
from jrl.episodes.coroutine import Outcome, Policy, coroutine_env
from jrl.episodes.host import EnvError, EnvExtras, HostEnv, Limits
from jrl.types import Prompt


def ranked_list(length: int = 10) -> HostEnv:
    """Requests answered by a list of items, one per line, the best first (``rank_grpo``).

    Reward part "rank_k" is 1 where the k-th item is one of the problem's answers, a list or a text
    with an item a line, and no earlier item is the same; in ``[rewards]`` name all of them, in
    order. The label "item" of each token is the number of its line, from 0 on; empty lines are no
    items.

    Args:
      length: items that are wanted.
    """
    check_range("data.length", length, 1, 1000)

    async def episode(policy: Policy, prompt: Prompt) -> Outcome:
        reply = await policy(prompt.text)
        relevant = {_plain(item) for item in _items_of(prompt.answer)} - {""}  # empty lines
        items, of_character = [], []
        for line in reply.text.splitlines(keepends=True):
            item = _plain(line)
            items += [item] if item else []
            of_character += [len(items) - 1 if item else -1] * len(line)
        rewards = [
            float(i < len(items) and items[i] in relevant and items[i] not in items[:i])
            for i in range(length)
        ]
        recall = sum(rewards) / max(min(len(relevant), length), 1)
        return Outcome(
            rewards,
            success=recall >= 1,
            metrics={"recall": recall},
            labels={"item": of_character},
            cut=reply.cut,
        )

    return coroutine_env(
        episode,
        parts=tuple(f"rank_{i + 1}" for i in range(length)),
        limits=Limits(turns=1),
        extras=EnvExtras(token_labels=("item",)),
    )


def _items_of(answer: Any) -> Sequence[str]:
    if isinstance(answer, str):
        return answer.splitlines()
    if isinstance(answer, list | tuple):
        return [str(item) for item in answer]
    raise EnvError(f"the answer is {answer!r:.60}; a ranked list needs a list, or an item a line")


def _plain(item: str) -> str:
    """An item without its number in the list, its marks and its case.

    >>> _plain("2. The Matrix (1999) "), _plain("- the matrix (1999)")
    ('the matrix (1999)', 'the matrix (1999)')
    """
    return re.sub(r"^\s*(?:\d+[.)]|[-*])\s+", "", item).strip().lower()
