"""Judges by criteria, and by steps and wholes, of single papers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

from jrl.config.judge import Criterion, JudgeTable
from jrl.rewards.base import Sample
from jrl.rewards.judge_prompts import TEXTS, FormText, shown
from jrl.rewards.replies import read_object
from jrl.rewards.steps import numbered_steps, steps_of
from jrl.rewards.verdicts import (
    Form,
    NamedForm,
    Question,
    by_criteria,
    by_sample,
    pooled,
    question,
)

# ---------------------------------------------------------------- Rubicon


def rubicon_score(
    met: Sequence[float],
    criteria: Sequence[Criterion],
    saturation: float = 2.0,
    interaction: float = 0.2,
    shaping: float = 2.0,
) -> float:
    """The points of a response whose criteria are met so far, in [0, 1].

    The aggregation of "Reinforcement Learning with Rubric Anchors" (Rubicon, arXiv:2508.12790): a
    rubric's criteria have levels and weights, a critic gives a level of each, and beyond their
    weighted sum a failed veto takes all, single criteria saturate, pairs of them interact, and the
    region of high scores is stretched. The paper describes the four in words alone; its functions
    and numbers are not published, and these are ours:

        0 where a criterion with a veto is met by less than half; else with m_k how far k is met
        s_k = (1 - exp(-a m_k)) / (1 - exp(-a))                                  saturation a
        u = sum w_k s_k / sum w_k,  v = sum_{j<k} w_j w_k s_j s_k / sum_{j<k} w_j w_k
        r = ((1 - b) u + b v)^c                             interaction b, shaping c

    u takes weights below 0 away, v is over those above 0 alone, and u itself where there are no
    two. Numbers of one's own: ``mine = rubicon_form(shaping=3.0)`` in a file, and ``form =
    "FILE.py:mine"``.

    Args:
      met: how far each criterion is met, in [0, 1].
      criteria: of the rubric.
      saturation: a, above 0; near 0 criteria add up as in ``rubric_score``.
      interaction: b in [0, 1], the share of pairs that are met together.
      shaping: c, at least 1: how many times as far apart the best responses are.

    >>> two = [Criterion(text="vivid"), Criterion(text="plain")]
    >>> rubicon_score([1.0, 1.0], two), rubicon_score([0.0, 0.0], two)
    (1.0, 0.0)
    """
    if any(c.veto and m < 0.5 for m, c in zip(met, criteria, strict=True)):
        return 0.0
    saturated = [math.expm1(-saturation * m) / math.expm1(-saturation) for m in met]
    weights = [max(c.weight, 0.0) for c in criteria]
    total = sum(c.weight * s for c, s in zip(criteria, saturated, strict=True)) / sum(weights)
    pairs = list(itertools.combinations(zip(weights, saturated, strict=True), 2))
    both = sum(v * w for (v, _), (w, _) in pairs)
    together = sum(v * w * s * t for (v, s), (w, t) in pairs) / both if both else total
    mixed = (1 - interaction) * total + interaction * together
    return float(min(max(mixed, 0.0), 1.0) ** shaping)


def rubicon_form(
    saturation: float = 2.0, interaction: float = 0.2, shaping: float = 2.0
) -> NamedForm:
    """The form ``rubicon`` with numbers of one's own; see ``rubicon_score``."""
    score = partial(rubicon_score, saturation=saturation, interaction=interaction, shaping=shaping)
    return NamedForm(partial(by_criteria, score=score), TEXTS["rubric"])


rubicon = rubicon_form()

# ---------------------------------------------------------------- Datarus-R1


def _datarus(table: JudgeTable, key: str) -> Form:
    """The mean of what single steps are worth, and what the whole is worth, in equal shares.

    The hierarchical reward of "Datarus-R1: An Adaptive Multi-Step Reasoning LLM for Automated Data
    Analysis" (arXiv:2508.13382), which scores the soundness of single steps and the coherence of
    the whole trajectory; beside the form of its tags in ``combine = "cosine_shift"``. A judge gives
    n steps s_i and the whole w on the part's ``scale``:

        r_HRM = (mean of s_i + w) / 2

    The abstract alone could be read, and the authors published a model and an agent, no training:
    the equal shares are ours, and a judge stands for their reward model, which learned preferences.
    Steps are paragraphs; in an episode they are the policy's turns, shown with what the tools said.
    A vote counts where it has a score for every step; a completion without a step has no opinion.
    """
    low, high = table.scale
    bounds = {"low": f"{low:g}", "high": f"{high:g}"}

    def count(sample: Sample) -> int:
        turns = sum(m["role"] == "assistant" for m in sample.messages)
        return turns or len(steps_of(sample.completion))

    def ask(sample: Sample, n: int) -> Question:
        steps = _turns(sample) if sample.messages else numbered_steps(sample.completion)
        fields = {**shown(sample), **bounds, "steps": steps, "count": str(n)}
        read = partial(_step_and_whole, count=n, low=low, high=high)
        return question(table, sample, fields, read)

    return by_sample(ask, lambda sample, n, votes: pooled(votes, table.vote), count)


def _turns(sample: Sample) -> str:
    """An episode's messages, those of the policy numbered."""
    number, lines = itertools.count(1), []
    for message in sample.messages:
        by_policy = message["role"] == "assistant"
        name = f"Step {next(number)}" if by_policy else str(message["role"])
        lines.append(f"{name}: {message['content']}")
    return "\n\n".join(lines)


def _step_and_whole(reply: str, count: int, low: float, high: float) -> float | None:
    """The mean of the steps' mean score and the whole's, in [0, 1]; None unless all are there."""
    verdict = read_object(reply) or {}
    steps, whole = verdict.get("steps"), verdict.get("whole")
    if not isinstance(steps, list) or len(steps) != count:
        return None
    scores = [x for x in [*steps, whole] if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(scores) != count + 1 or not all(low <= x <= high for x in scores):
        return None
    mean = (sum(scores[:-1]) / count + scores[-1]) / 2
    return float((mean - low) / (high - low))


datarus = NamedForm(
    _datarus,
    FormText(
        """{principle}
Judge the solution below twice: each step by itself, whether it is sound and its code does what it
should, and the whole, whether the steps follow from one another and reach a conclusion.

Question:
{question}

Solution, in {count} steps:
{steps}

Give scores from {low} (worst) to {high} (best). End with a JSON object of a score for each step and
one for the whole, such as {"steps": [4, 5], "whole": 4}.""",
        ("completion", "conversation", "low", "high", "steps", "count"),
        (("steps", "completion", "conversation"),),
    ),
)
