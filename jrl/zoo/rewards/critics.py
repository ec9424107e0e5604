"""Reward functions that train judges, and one for reflection; published by single papers.

A judge is trained as any policy is, on rows whose prompt shows what is to be judged and whose
answer is the right verdict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jrl.errors import UserError, unknown_choice
from jrl.rewards.base import Sample
from jrl.rewards.math import math_reward
from jrl.rewards.replies import (
    is_number,
    read_object,
    read_preference,
    read_ranking,
    read_score,
    read_step,
    read_yes_no,
)
from jrl.system.float32 import fits_float32

# ---------------------------------------------------------------- RISE-Judge, FARE


def judge_verdict(
    samples: list[Sample], form: str = "pairwise", low: float = 1.0, high: float = 10.0
) -> list[float]:
    """1 where the verdict in a judge's reply is the row's label; else, or without one, 0.

    What judges are trained by in "Improve LLM-as-a-Judge Ability as a General Ability"
    (RISE-Judge, arXiv:2502.11689) and "Foundational Automatic Evaluators: Scaling Multi-Task
    Generative Evaluator Training for Reasoning-Centric Domains" (FARE, arXiv:2510.17793).

    RISE-Judge is a run of ``sft`` on written judgments, then one of ``online_dpo`` on those that
    the judge samples: one with the label is preferred to one without. FARE's rounds of rejection
    sampling are a run of ``psr``, the likelihood of the judgments with a point, a round a step (how
    many judgments a round has is not in its abstract); its five kinds of prompts are rows for the
    forms "pairwise", "step" (the first wrong one), "yes_no" (an answer verified with and without a
    reference) and "score".

    Args:
      samples: replies of the judge; ``prompt.answer`` is the label: "A", "yes", 7, -1, [2, 1, 3].
      form: of the verdict, which is read as those of ``[rewards]`` are.
      low: least score.
      high: greatest score.
    """
    if form not in _READERS:
        raise unknown_choice("rewards.judge_verdict.form", form, _READERS)
    points = []
    for sample in samples:
        label = _READERS[form](_labelled(sample.prompt.answer, form), low, high)
        if label is None:
            raise UserError(
                f"rewards.judge_verdict: prompt {sample.prompt.id} has the answer"
                f" {sample.prompt.answer!r:.40}, which is no verdict of form = {form!r}"
            )
        points.append(float(_READERS[form](sample.completion, low, high) == label))
    return points


_MOST = 1000
"""Steps of a solution, and answers in a list."""
_READERS: Mapping[str, Callable[[str, float, float], Any]] = {
    "pairwise": lambda text, low, high: read_preference(text),
    "yes_no": lambda text, low, high: read_yes_no(text),
    "score": read_score,
    "step": lambda text, low, high: read_step(text, _MOST),
    "listwise": lambda text, low, high: read_ranking(text, _listed(text)),
}


def _listed(text: str) -> int:
    ranking = (read_object(text) or {}).get("ranking")
    return len(ranking) if isinstance(ranking, list) else _MOST


def _labelled(label: Any, form: str) -> str:
    """A label as the reply of a judge that gives it."""
    name = {"pairwise": "verdict", "yes_no": "verdict", "listwise": "ranking"}.get(form, form)
    if isinstance(label, str):
        if form in ("pairwise", "yes_no"):
            return json.dumps({name: label})
        try:
            label = json.loads(label)
        except ValueError:
            return ""
    return json.dumps({name: label})


# ---------------------------------------------------------------- FAPO


def fapo_critic(samples: list[Sample], column: str = "total_steps") -> list[float]:
    """Points for the first wrong step that a critic names: fewer the farther from the true one.

    The reward of the judge of "FAPO: Flawed-Aware Policy Optimization for Efficient and Reliable
    Reasoning" (arXiv:2510.22543), as its released code has it, for the stated step t (from 0 on, or
    -1) and the labelled t* of n steps:

        1                    t = t* = -1
        1 - |t - t*| / n     both name a step
        -1                   one of them does, or the reply states none

    Args:
      samples: replies that state a step in a box; the answer is the labelled step.
      column: with the number of steps.
    """
    points = []
    for sample in samples:
        count, label = _wrong_step(sample, column)
        stated = read_step(sample.completion, count)
        if stated is None or (stated == -1) != (label == -1):
            points.append(-1.0)
        else:
            points.append(1.0 - abs(stated - label) / count)
    return points


def _wrong_step(sample: Sample, column: str) -> tuple[int, int]:
    """The number of steps of a labelled solution, and its first wrong one or -1."""
    count, label = sample.prompt.meta.get(column), sample.prompt.answer
    try:
        steps, wrong = int(count), int(label)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        steps = wrong = 0
    if not -1 <= wrong < steps:
        raise UserError(
            f"rewards.fapo_critic: prompt {sample.prompt.id} has {column} = {count!r:.40} and the"
            f" answer {label!r:.40}; give the number of steps, and a step from 0 on or -1"
        )
    return steps, wrong


# ---------------------------------------------------------------- RewardAnything


def listwise_agreement(samples: list[Sample]) -> list[float]:
    """Agreement of the order of several responses' scores with the labelled ones, 0 to 1.

    The accuracy reward of "RewardAnything: Generalizable Principle-Following Reward Models"
    (arXiv:2506.03637), as its released code has it: over pairs of responses with labels l and
    scores s,

        1 - sum(w p) / sum(w),  w = 1 + |l_i - l_j|

    p is 1 where the order is reversed, 1/2 where unequal labels have equal scores, else 0. The
    paper adds a reward of the form. Departure: a reply that does not end with a JSON object, or
    leaves a labelled response without a finite score, is 0; the code mends some, and counts the
    pairs that have scores, which pays an empty object in full.

    Args:
      samples: replies that end with {"scores": {"model-1": 2, ...}}; the answer has them, too, as
        JSON or a table.
    """
    points = []
    for sample in samples:
        labels = _labelled_scores(sample)
        scores = _numbers((read_object(sample.completion) or {}).get("scores"), labels)
        points.append(0.0 if scores is None else pair_agreement(scores, labels))
    return points


def _numbers(scores: Any, names: Iterable[str]) -> dict[str, float] | None:
    """The scores of these names; None unless each is a finite number."""
    if not isinstance(scores, Mapping):
        return None
    values: dict[str, Any] = {name: scores.get(name) for name in names}
    readable = all(is_number(x) and fits_float32(x) for x in values.values())
    return values if readable else None


def _labelled_scores(sample: Sample) -> dict[str, float]:
    """The scores in a row's answer."""
    labels = answer = sample.prompt.answer
    with contextlib.suppress(ValueError):
        labels = json.loads(answer) if isinstance(answer, str) else answer
    scores = labels.get("scores") if isinstance(labels, Mapping) else None
    numbers = _numbers(scores, scores) if isinstance(scores, Mapping) else None
    if not numbers:
        raise UserError(
            f"rewards.listwise_agreement: prompt {sample.prompt.id} has the answer"
            f' {answer!r:.40}; give {{"scores": {{NAME: NUMBER, ...}}}}'
        )
    return numbers


def pair_agreement(scores: Mapping[str, float], labels: Mapping[str, float]) -> float:
    """The share of pairs, by weight, whose order is the labelled one; 1 without a pair.

    >>> pair_agreement({"a": 1, "b": 5, "c": 5}, {"a": 1, "b": 3, "c": 5})
    0.8636363636363636
    """
    total = lost = 0.0
    for a, b in itertools.combinations(labels, 2):
        difference, expected = scores[a] - scores[b], labels[a] - labels[b]
        weight = 1 + abs(expected)
        total += weight
        lost += weight * (
            1.0 if difference * expected < 0 else 0.5 if difference == 0 != expected else 0.0
        )
    return 1.0 if total == 0 else 1 - lost / total


# ---------------------------------------------------------------- SRPO

_PART = r"<{0}>(.+?)</{0}>\s*"
_REFLECTED = re.compile(
    "".join(_PART.format(n) for n in ("think", "answer", "reflection", "think", "answer")) + r"\Z",
    re.DOTALL,
)


def srpo(
    samples: list[Sample],
    form: float = 0.5,
    length: float = 0.1,
    target: float = 2.0,
    most: float = 2.5,
) -> list[float]:
    """Points for what a reflection makes of the first answer, for its form and its length.

    "SRPO: Enhancing Multimodal LLM Reasoning via Reflection-Aware Reinforcement Learning"
    (arXiv:2506.01713), as its released code has it: with a the length of the first thought and
    answer and L that of the completion,

        effect + form 1[well-formed] + length exp(-(|L - target a| / ((most - target) a))^2)

    The effect is 1 where reflection mends a wrong answer, 0.75 where it keeps a right one, 0.25
    where it spoils one, 0 where both are wrong, and 0.5 for a single answer that is right. Well
    formed is <think>, <answer>, <reflection>, <think>, <answer> and no other of these.
    Departures: lengths are characters, where the code counts tokens; answers are compared as
    ``math`` does; text alone.

    Args:
      samples: what to judge.
      form: points for the form.
      length: factor of the length's points, which want both thoughts and answers.
      target: length of the whole, of a.
      most: length at which a point has fallen to 1/e, of a.
    """
    points = []
    for sample in samples:
        text = sample.completion
        sections = {n: re.findall(_PART.format(n), text, re.DOTALL) for n in ("think", "answer")}
        answers = sections["answer"]
        value = _effect(sample, answers)
        counts = [text.count(f"<{n}>") for n in ("think", "answer", "reflection")]
        value += form * (counts == [2, 2, 1] and _REFLECTED.search(text) is not None)
        if len(answers) > 1 and len(sections["think"]) > 1:
            a = len(sections["think"][0].strip()) + len(answers[0].strip())
            if a:
                value += length * math.exp(-(((len(text) / a - target) / (most - target)) ** 2))
        points.append(value)
    return points


def _effect(sample: Sample, answers: list[str]) -> float:
    if not answers:
        return 0.0
    ends = answers[:1] + answers[1:][-1:]
    of_answers = [dataclasses.replace(sample, completion=f"\\boxed{{{a.strip()}}}") for a in ends]
    right = [points > 0 for points in math_reward(of_answers)]
    if len(right) == 1:
        return 0.5 * right[0]
    before, after = right
    if after:
        return 0.75 if before else 1.0
    return 0.25 if before else 0.0
