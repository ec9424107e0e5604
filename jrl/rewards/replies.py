"""Verdicts in the replies of judges, read strictly. Imports no JAX.

A verdict is the end of a reply: a JSON object, ``[[7]]``, or a last line such as ``Score: 7``. What
a model thinks before ``</think>`` is not read. Of anything else the verdict is None, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_LONGEST = 50_000
"""Characters at the end of a reply that a verdict may take."""
_NUMBER = re.compile(r"[-+]?\d{1,12}(?:\.\d{1,12})?")
_BRACKETS = re.compile(r"\[\[([^\[\]]{1,1000})\]\][\s.*`]{0,20}$")
_BOX = re.compile(r"\\boxed\{([^{}]{0,100})\}")
_WHOLE = re.compile(r"-?\d{1,6}")
_YES = {"yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}
_PREFERRED = {"a": 1.0, "b": 0.0, "c": 0.5, "tie": 0.5}
"""Which of two; "C" is a tie, as in MT-Bench's prompts."""


def read_score(reply: str, low: float, high: float) -> float | None:
    r"""A score, mapped to [0, 1]; None where there is none, or outside of its scale.

    Args:
      reply: of a judge.
      low: the least score.
      high: the greatest; "Score: 7/10" is read where that is 10.

    >>> read_score("Good but long.\nScore: 7/10", 0, 10), read_score('{"score": 3}', 1, 5)
    (0.7, 0.5)
    >>> read_score("[[11]]", 0, 10), read_score("A 7 or an 8.", 0, 10)
    (None, None)
    """
    value = _verdict(reply, ("score", "rating"))
    if isinstance(value, str):
        number, slash, most = (x.strip() for x in value.partition("/"))
        if slash and not (_NUMBER.fullmatch(most) and float(most) == high):
            return None
        value = float(number) if _NUMBER.fullmatch(number) else None
    if not is_number(value) or not low <= value <= high:
        return None
    return float((value - low) / (high - low))


def read_yes_no(reply: str) -> float | None:
    r"""1 for yes, 0 for no; None where a reply says neither.

    >>> read_yes_no("It follows.\nVerdict: **Yes**"), read_yes_no('{"verdict": false}')
    (1.0, 0.0)
    >>> read_yes_no("Yes and no.") is None
    True
    """
    value = _verdict(reply, ("verdict", "answer"), bare=True)
    if isinstance(value, bool):
        return float(value)
    return _YES.get(value.strip().lower()) if isinstance(value, str) else None


def read_preference(reply: str) -> float | None:
    """1 where the first of two is better, 0 where the second is, 0.5 for a tie; else None.

    >>> read_preference("Both are right, A is shorter. [[A]]"), read_preference("[[C]]")
    (1.0, 0.5)
    """
    value = _verdict(reply, ("verdict", "better"))
    return _PREFERRED.get(value.strip().lower()) if isinstance(value, str) else None


def read_ranking(reply: str, count: int) -> list[int] | None:
    """The places of ``count`` answers, best first, from 0; None unless each is named once.

    >>> read_ranking('{"ranking": [2, 1, 3]}', 3), read_ranking("[[2 > 1]]", 2)
    ([1, 0, 2], [1, 0])
    >>> read_ranking("Ranking: 2, 2, 1", 3) is None
    True
    """
    value = _verdict(reply, ("ranking",))
    if isinstance(value, str):
        parts = [part.strip() for part in re.split(r"[>,]", value)]
        value = [int(p) for p in parts] if all(re.fullmatch(r"\d{1,6}", p) for p in parts) else None
    if not isinstance(value, list) or not all(type(x) is int for x in value):
        return None
    return [x - 1 for x in value] if sorted(value) == list(range(1, count + 1)) else None


def read_criteria(reply: str, count: int, levels: Sequence[int] = ()) -> list[float] | None:
    """Degree to which each of ``count`` criteria is met, in [0, 1]; None unless all are decided.

    Args:
      reply: a JSON object with "1", "2", ... or such an object under "criteria"; each true, false,
        "yes", "no", a number from 0 to 1, or an object with that as "met".
      count: of criteria.
      levels: of each, the number of its levels n, of which k from 0 on is k / (n - 1); 0 of one
        that is met or not. () where none has levels.

    >>> read_criteria('So: {"1": true, "2": {"reason": "no source", "met": false}}', 2)
    [1.0, 0.0]
    >>> read_criteria('{"1": 2, "2": true}', 2, levels=[5, 0])
    [0.5, 1.0]
    >>> read_criteria('{"1": true}', 2) is None
    True
    """
    parsed = _object(_final(reply)) or {}
    inside = parsed.get("criteria", parsed)
    if not isinstance(inside, dict):
        return None
    sizes = levels or [0] * count
    values = [_met(inside.get(str(i)), n) for i, n in enumerate(sizes, 1)]
    extra = [name for name in inside if name.isdecimal() and not 1 <= int(name[:9]) <= count]
    verdicts = [value for value in values if value is not None]
    return verdicts if len(verdicts) == count and not extra else None


def read_object(reply: str) -> dict[str, Any] | None:
    """The JSON object that a reply ends with; None where there is none.

    >>> read_object('Both are short. {"scores": [3, 4]}'), read_object("3, 4")
    ({'scores': [3, 4]}, None)
    """
    return _object(_final(reply))


def read_steps(reply: str, count: int) -> list[int] | None:
    """The numbers, from 1 on, of the steps that are wrong of ``count``; None unless all are steps.

    >>> read_steps('Step 2 divides by 0. {"wrong": [2]}', 3), read_steps('{"wrong": []}', 3)
    ([2], [])
    >>> read_steps('{"wrong": [4]}', 3) is None
    True
    """
    wrong = (read_object(reply) or {}).get("wrong")
    if not isinstance(wrong, list) or not all(type(x) is int and 1 <= x <= count for x in wrong):
        return None
    return sorted(set(wrong))


def read_step(reply: str, count: int) -> int | None:
    r"""The number, from 0 on, of the first wrong step of ``count``, or -1 for none; else None.

    It is the last of a reply's boxes, or ``{"step": 1}``, or a last line "Step: 1".

    >>> read_step(r"Step 1 is wrong: \boxed{1}", 2), read_step("Step: -1", 2)
    (1, -1)
    >>> read_step(r"\boxed{2}", 2) is None
    True
    """
    boxes = _BOX.findall(_final(reply))
    value = boxes[-1] if boxes else _verdict(reply, ("step",))
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    return value if type(value) is int and -1 <= value < count else None


def _met(value: Any, levels: int = 0) -> float | None:
    if isinstance(value, dict):
        value = value.get("level" if levels else "met")
    if levels:
        return value / (levels - 1) if type(value) is int and 0 <= value < levels else None
    if isinstance(value, str):
        return _YES.get(value.strip().lower())
    if isinstance(value, bool):
        return float(value)
    return float(value) if is_number(value) and 0 <= value <= 1 else None


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _verdict(reply: str, names: Sequence[str], *, bare: bool = False) -> Any:
    """Final value of a reply: from its JSON object, or a text; None if there is none."""
    text = _final(reply)
    parsed = _object(text)
    if parsed is not None:
        scores = [parsed[name] for name in names if name in parsed]
        return scores[0] if len(scores) == 1 else None
    if brackets := _BRACKETS.search(text[-1100:]):
        return brackets[1]
    text = text[-1100:].removesuffix("```").rstrip()
    line = re.sub(r"[*_`#]", "", text.rpartition("\n")[2]).strip()
    words = "|".join(names)
    if match := re.fullmatch(rf"(?:final )?(?:{words})\s?[:=]\s?(.+?)\.?", line, re.IGNORECASE):
        return match[1]
    return line.removesuffix(".") if bare else None


def _final(reply: str) -> str:
    """The end of a reply behind what was thought; "" where thinking did not end."""
    _, mark, after = reply.rpartition("</think>")
    if not mark and "<think>" in reply:
        return ""
    return (after if mark else reply)[-_LONGEST:].strip()


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text ends with, perhaps in a fence; None where there is none."""
    text = text.removesuffix("```").rstrip()
    if not text.endswith("}"):
        return None
    for start in _starts(text):
        try:
            value = json.loads(text[start:], object_pairs_hook=_unique, parse_constant=_refuse)
        except _Ambiguous:
            return None
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None


def _starts(text: str) -> list[int]:
    """Possible starts of an outermost object; at most 100, to bound the time of hostile replies.

    What is inside of another brace is a part of something, perhaps of something that was cut.
    """
    starts, depth = [], 0
    for match in re.finditer(r"[{}]", text):
        opens = match[0] == "{"
        if opens and depth == 0:
            starts.append(match.start())
        depth = max(depth + (1 if opens else -1), 0)
    return starts[-100:]


class _Ambiguous(Exception):
    """An object that names something twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise _Ambiguous
    return dict(pairs)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
