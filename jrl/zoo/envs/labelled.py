"""Environments of one turn that tell methods more than points: predictions, items of a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jrl.episodes.calls import run_either
from jrl.episodes.host import EnvError, Feedback, HostEnv, Limits, Reply
from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.types import Prompt
from jrl.zoo.envs.named import EXACT, judge_of

FORETELL = (
    "{question}\n\nDo not solve it. Foretell how solutions will turn out: how many tokens a right"
    " one takes, how many of {passes} attempts are right, and which notions help. End with"
    " <tokens>NUMBER</tokens> <passes>NUMBER</passes> <notions>A, B</notions>."
)
"""What a policy is asked of a problem beside its solution."""


def foretell(
    reward: str = EXACT, *, passes: int = 8, ask: str = FORETELL, turn_tokens: int = 0
) -> HostEnv:
    """Problems that are solved in one group, and foretold in another (``masa``).

    A prediction is worth 0 points here; the method gives it what the solutions make of it. Notions
    are not judged.

    Args:
      reward: of solutions: "exact", "f1" or ``FILE.py:function``, as in ``named.mcp``.
      passes: attempts of which the policy foretells how many are right; as ``objective.passes``.
      ask: the words of the second group, with {question} and {passes}.
      turn_tokens: the most of the turn; 0 for what is left.
    """
    judge = judge_of(reward, "data.reward")
    if not isinstance(passes, int) or passes < 1:
        raise UserError(f"data.passes = {passes!r}; give a number of attempts, at least 1")

    async def init(prompt: Prompt, seed: int) -> tuple[Prompt, list[Message]]:
        asked = prompt.text
        if prompt.meta.get("ask"):
            asked = ask.format(question=prompt.text, passes=passes)
        return prompt, [{"role": "user", "content": asked}]

    async def step(prompt: Prompt, reply: Reply) -> tuple[Prompt, Feedback]:
        if not prompt.meta.get("ask"):
            points = float(await run_either(judge, prompt, reply.text))
            return prompt, Feedback((), points, True, points >= 1, cut=reply.cut)
        told = {name: _number(name, reply.text) for name in ("tokens", "passes")}
        labels = {
            "predicted_tokens": told["tokens"],
            "predicted_passes": told["passes"] if told["passes"] <= passes else -1,
        }
        read = float(min(labels.values()) >= 0)
        return prompt, Feedback((), 0.0, True, metrics={"predictions_read": read}, labels=labels)

    limits = Limits(turns=1, turn_tokens=turn_tokens)
    names = ("predicted_tokens", "predicted_passes")
    return HostEnv(init, step, limits=limits, asks=2, labels=names)


def _number(name: str, text: str) -> int:
    """The last number in tags of this name; -1 where there is none."""
    found = re.findall(rf"<{name}>\s*(\d{{1,7}})\s*</{name}>", text)
    return int(found[-1]) if found else -1


def ranked_list(length: int = 10, *, turn_tokens: int = 0) -> HostEnv:
    """Requests that are answered with a list of items, one a line, the best first (``rank_grpo``).

    Reward part "rank_k" is 1 where the k-th item is one of the problem's answers, a list or a text
    with an item a line, and did not stand before; in ``[rewards]`` name all of them, in order. The
    label "item" of each token is the number of its line, from 0 on; empty lines are no items.

    Args:
      length: items that are wanted.
      turn_tokens: the most of the turn; 0 for what is left.
    """
    if not isinstance(length, int) or not 1 <= length <= 1000:
        raise UserError(f"data.length = {length!r}; give the items of a list, 1 to 1000")

    async def init(prompt: Prompt, seed: int) -> tuple[Prompt, list[Message]]:
        return prompt, [{"role": "user", "content": prompt.text}]

    async def step(prompt: Prompt, reply: Reply) -> tuple[Prompt, Feedback]:
        wanted = {_plain(item) for item in _items_of(prompt.answer)}
        items, of_character = [], []
        for line in reply.text.splitlines(keepends=True):
            item = _plain(line)
            items += [item] if item else []
            of_character += [len(items) - 1 if item else -1] * len(line)
        points = [
            float(i < len(items) and items[i] in wanted and items[i] not in items[:i])
            for i in range(length)
        ]
        found = sum(points) / max(min(len(wanted), length), 1)
        return prompt, Feedback(
            reward=points,
            done=True,
            success=found >= 1,
            metrics={"recall": found},
            labels={"item": of_character},
            cut=reply.cut,
        )

    parts = tuple(f"rank_{i + 1}" for i in range(length))
    limits = Limits(turns=1, turn_tokens=turn_tokens)
    return HostEnv(init, step, parts=parts, limits=limits, token_labels=("item",))


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
