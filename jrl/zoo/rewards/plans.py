"""Rewards of plans that solutions begin with; each of one paper."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

from jrl.config.judge import JudgeTable
from jrl.rewards.base import Sample
from jrl.rewards.judge_prompts import FormText
from jrl.rewards.math import math_reward
from jrl.rewards.verdicts import Form, NamedForm, by_sample, pooled, question

_PLAN = re.compile(r"<plan>(.*?)</plan>", re.DOTALL)

# ---------------------------------------------------------------- PTA-GRPO


def _pta_plan(table: JudgeTable, key: str) -> Form:
    """The share of solutions by a completion's plan that are right; 0 without a plan.

    The quality of the plan in "Plan Then Action:High-Level Planning Guidance Reinforcement Learning
    for LLM Reasoning" (PTA-GRPO, arXiv:2510.01833): several solutions follow a plan, and

        r_plan = mean over them of 1[the answer is right]

    beside the rewards of the answer and of the form, with GRPO on plan and reasoning alike. The
    judge is who solves: ``model = "policy"`` with ``votes`` solutions at ``temperature`` 1. Their
    final answers are compared as ``math`` does, and one without an answer is wrong.

    The paper's equations could not be read. Two public reviews of it on OpenReview describe the
    three rewards r_outcome, r_analytic (this one) and r_format, and m = 3 plans a question with z =
    3 solutions each; neither has the weights of the three, which are those of the run.
    Departures: the plan is shown in a question, where the paper continues the completion behind it,
    and the policy is not trained on these solutions; the first stage, which fine-tunes on plans
    that a larger model summarises, is a run of ``sft``.
    """
    return by_sample(
        lambda sample, plan: question(table, sample, {"plan": plan}, partial(_solved, sample)),
        lambda sample, plan, votes: pooled(votes, table.vote),
        lambda sample: plan_of(sample.completion),
        silent=0.0,
    )


def plan_of(text: str) -> str:
    """The plan in a completion's <plan> tags; "" where there is none, or more than one.

    >>> plan_of("<plan> add, then halve </plan><think>...</think>")
    'add, then halve'
    """
    plans = _PLAN.findall(text)
    return plans[0].strip() if len(plans) == 1 else ""


def _solved(sample: Sample, reply: str) -> float:
    return math_reward([dataclasses.replace(sample, completion=reply)])[0]


pta_plan = NamedForm(
    _pta_plan,
    FormText(
        """{question}

Follow this plan, and end with the answer in \\boxed{}.

{plan}""",
        ("plan",),
        (("plan",),),
    ),
    reads_answer=True,
)
