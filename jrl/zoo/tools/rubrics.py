"""Rubrics from preferences: OpenRubrics' contrastive generation, and its filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jrl.rewards.replies import read_object, read_preference
from jrl.rewards.verdicts import preferred

Speak = Callable[[list[dict[str, str]]], str]
"""(messages) -> a reply, such as ``jrl.episodes.endpoint``."""

_WRITE = """Two responses to a prompt, of which the first is preferred.

Prompt:
{prompt}

Preferred:
{chosen}

Not preferred:
{rejected}

Write a rubric by which such responses can be told apart without naming either: hard rules, which
the prompt states and a response must keep, and principles of what makes a response good. End with a
JSON object such as {{"hard": ["Has at most three sentences."], "principles": ["Is specific."]}}."""

_JUDGE = """Which of two responses to the prompt is better by the rubric? Hard rules come first.

Prompt:
{prompt}

Rubric:
{rubric}

Response A:
{first}

Response B:
{second}

End with [[A]], [[B]], or [[C]] for a tie."""


def contrastive_rubrics(
    rows: Iterable[Mapping[str, Any]], write: Speak, judge: Speak | None = None
) -> list[dict[str, Any]]:
    """The rows of preferences with rubrics that tell the preferred response.

    Contrastive Rubric Generation of "OpenRubrics: Towards Scalable Synthetic Rubric Generation for
    Reward Modeling and LLM Alignment" (arXiv:2510.07743): a model sees prompt, preferred and other
    response and writes hard rules and principles; a rubric is kept if a judge that goes by it alone
    prefers the preferred response, here in both orders. The rows are for a reward part with ``form
    = "rubric"`` and ``column = "rubric"``, hard rules as vetoes. Not known: how the paper makes one
    score of the criteria. Its own rubric writer and judge are trained by ``sft`` on such rows.

    Args:
      rows: with "prompt", "chosen" and "rejected", texts.
      write: writes rubrics.
      judge: goes by them; None for the same model.

    Returns:
      {"question", "rubric", "chosen", "rejected"} of each row whose rubric is kept.
    """
    out = []
    for row in rows:
        texts = {name: str(row[name]) for name in ("prompt", "chosen", "rejected")}
        rubric = _criteria(write(_messages(_WRITE.format(**texts))))
        if rubric and _agrees(texts, rubric, judge or write):
            pair = {name: texts[name] for name in ("chosen", "rejected")}
            out.append({"question": texts["prompt"], "rubric": rubric, **pair})
    return out


def _criteria(reply: str) -> list[dict[str, Any]]:
    """The criteria of a reply, hard rules first; [] where it has none that can be read."""
    written = read_object(reply) or {}
    hard, principles = written.get("hard", []), written.get("principles", [])
    lists = isinstance(hard, list) and isinstance(principles, list)
    if not lists or not all(isinstance(x, str) and x.strip() for x in (*hard, *principles)):
        return []
    return [{"text": x, "veto": True} for x in hard] + [{"text": x} for x in principles]


def _agrees(texts: Mapping[str, str], rubric: Sequence[Mapping[str, Any]], judge: Speak) -> bool:
    """Whether a judge that goes by the rubric prefers the preferred response, in both orders."""
    lines = [f"{i}. {'(hard) ' * bool(c.get('veto'))}{c['text']}" for i, c in enumerate(rubric, 1)]
    verdicts = []
    for first, second in (("chosen", "rejected"), ("rejected", "chosen")):
        fields = {"prompt": texts["prompt"], "rubric": "\n".join(lines)}
        question = _JUDGE.format(**fields, first=texts[first], second=texts[second])
        verdicts.append(read_preference(judge(_messages(question))))
    return preferred(verdicts) == 1


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
