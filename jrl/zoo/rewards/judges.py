"""Forms of judging that single papers published; ``[rewards.NAME] form = "fapo"`` names one.

Questions are in words of our own: a released judge that was trained on its paper's words wants
those in ``template``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jrl.config.judge import JudgeTable
from jrl.rewards.base import Points, Sample
from jrl.rewards.judge_prompts import TEXTS, FormText, answer_of, shown
from jrl.rewards.replies import is_number, read_object, read_step, read_yes_no
from jrl.rewards.steps import numbered_steps, steps_of
from jrl.rewards.verdicts import (
    Form,
    NamedForm,
    Question,
    by_sample,
    by_steps,
    pooled,
    preferred,
    question,
)

# ---------------------------------------------------------------- BRPO


def _brpo(table: JudgeTable, key: str) -> Form:
    """Each member against one of its group, chosen at random: 1 for a win, -1 for none.

    The reward of "Writing-Zero: Bridge the Gap Between Non-verifiable Problems and Verifiable
    Rewards" (arXiv:2506.00103): a pairwise judge writes principles and a critique and scores both,

        R(y_i) = 1 if score(y_i) > score(y_ref) else -1

    The reference has no points, and is not trained on with ``method = "brpo"`` and
    ``objective.reference = "judge"``. It follows from the prompt and the step. With ``swap`` both
    orders are asked, and a win is one in both; the paper's judge is asked once (``swap = false``).
    """
    orders = 2 if table.swap else 1

    def reference(samples: Sequence[Sample]) -> int:
        first = samples[0]
        return zlib.crc32(f"{first.prompt.id} {first.step}".encode()) % len(samples)

    def questions(samples: Sequence[Sample], vote: int) -> list[Question]:
        at = reference(samples)
        out = []
        for sample in (s for i, s in enumerate(samples) if i != at):
            both = answer_of(sample), answer_of(samples[at])
            for first, second in (both, both[::-1])[:orders]:
                fields = {"first": first, "second": second}
                out.append(question(table, sample, fields, _scores_of_two))
        return out

    def points(samples: Sequence[Sample], verdicts: Sequence[Sequence[float]]) -> list[Points]:
        pairs = [verdicts[i : i + orders] for i in range(0, len(verdicts), orders)]
        wins = [preferred([pooled(v, table.vote) for v in pair]) for pair in pairs]
        out: list[Points] = [None if win is None else 1.0 if win == 1 else -1.0 for win in wins]
        at = reference(samples)
        return [*out[:at], None, *out[at:]]

    return Form(True, questions, points)


def _scores_of_two(reply: str) -> float | None:
    """1 where the first of two has the higher score, 0 where the second has, 0.5 for equal ones."""
    scores = (read_object(reply) or {}).get("scores")
    if not isinstance(scores, list) or len(scores) != 2 or not all(map(is_number, scores)):
        return None
    return ((scores[0] > scores[1]) - (scores[0] < scores[1]) + 1) / 2


brpo = NamedForm(
    _brpo,
    FormText(
        """{principle}
Compare two answers to the request below. First name the principles by which such answers are to be
judged, with a weight for each; then criticise both answers by them.

Request:
{question}

Answer A:
{first}

Answer B:
{second}

End with a JSON object of their scores from 0 to 10, A's first, such as {"scores": [7, 4]}.""",
        ("first", "second"),
        (("first",), ("second",)),
    ),
)

# ---------------------------------------------------------------- RLAIF-V

_CLAIM = """Question:
{question}

A reply to it claims something. {claim}

End with a line "Verdict: yes" or "Verdict: no"."""


def _rlaif_v(table: JudgeTable, key: str) -> Form:
    """Minus the number of an answer's claims that the judge rejects.

    The divided and conquered feedback of "RLAIF-V: Aligning MLLMs through Open-Source AI Feedback
    for Super GPT-4V Trustworthiness" (arXiv:2405.17220): the judge splits an answer into atomic
    claims and turns each into a question that yes affirms; it is then asked each of them alone, and

        score(y) = -(number of rejected claims)

    Votes are pooled for each claim, which is rejected below 0.5; the list of claims is that of the
    first vote that has one. A claim without a verdict leaves the answer without points.
    Departures: the paper compares the probabilities of "yes" and "no" in place of a verdict, has
    one model split and another one judge, and shows both an image.
    """

    def questions(samples: Sequence[Sample], vote: int) -> list[Question]:
        return [question(table, s, shown(s), _claims) for s in samples]

    def follow(
        samples: Sequence[Sample], verdicts: Sequence[Sequence[list[str]]], vote: int
    ) -> list[Question]:
        claims = verdicts[0][0] if verdicts[0] else []
        fields = shown(samples[0])
        return [
            question(table, samples[0], {**fields, "claim": claim}, read_yes_no, _CLAIM)
            for claim in claims
        ]

    def points(samples: Sequence[Sample], verdicts: Sequence[Sequence[Any]]) -> list[Points]:
        claims = [pooled(votes, table.vote) for votes in verdicts[1:]]
        if not verdicts[0] or None in claims:
            return [None]
        return [-float(sum(claim < 0.5 for claim in claims if claim is not None))]

    return Form(False, questions, points, follow)


def _claims(reply: str) -> list[str] | None:
    claims = (read_object(reply) or {}).get("claims")
    if not isinstance(claims, list) or not all(isinstance(c, str) and c.strip() for c in claims):
        return None
    return claims


rlaif_v = NamedForm(
    _rlaif_v,
    FormText(
        """Split the answer below into all that it claims, each claim a single fact, and write each
as a question that "yes" affirms and that can be understood without the answer.

Question:
{question}

Answer:
{completion}

End with a JSON object such as {"claims": ["Is the sky blue?"]}; the list is empty where nothing is
claimed."""
    ),
)

# ---------------------------------------------------------------- FAPO


def _fapo(table: JudgeTable, key: str) -> Form:
    """1 where a solution has a wrong step, 0 where it has none.

    The flawed positives of "FAPO: Flawed-Aware Policy Optimization for Efficient and Reliable
    Reasoning" (arXiv:2510.22543): right answers (``only``) are shown with the reference, and the
    judge gives the index of the first wrong step, from 0 on, or -1. With ``weight = -1``, which is
    minus lambda, beside an outcome of 1 and -1 this is

        R = outcome - lambda 1[the answer is right and a step is wrong]

    The judge itself is trained by the reward function "fapo_critic". An index beyond the last step
    is no verdict.
    """

    def ask(sample: Sample, _: Any) -> Question:
        fields = {**shown(sample), "steps": numbered_steps(sample.completion, first=0)}
        read = partial(read_step, count=len(steps_of(sample.completion)))
        return question(table, sample, fields, read)

    def pay(sample: Sample, _: Any, votes: Sequence[int]) -> Points:
        return pooled([float(step >= 0) for step in votes], table.vote)

    return by_sample(ask, pay)


fapo = NamedForm(
    _fapo,
    FormText(
        """{principle}
Check the solution of a problem step by step; its final answer may be right although a step is not.

Problem:
{question}

Right answer:
{reference}

Solution:
{steps}

End with the number of the first step that is wrong, or -1 where none is, in \\boxed{}.""",
        ("completion", "conversation", "steps"),
        (("steps", "completion", "conversation"),),
    ),
)

# ---------------------------------------------------------------- CAPO


def _capo(table: JudgeTable, key: str) -> Form:
    """Minus a point at every token of the steps that the judge calls wrong.

    The process reward of "CAPO: Towards Enhancing LLM Reasoning through Generative Credit
    Assignment" (arXiv:2508.02298): a general model reads a completion once and lists its wrong
    steps, each judged for itself,

        r_t = -1[t in T_wrong]

    with several critiques voted: ``vote = "majority"``, "min" for the intersection, "mean" for the
    average. ``weight`` is the paper's W_process, and ``method = "capo"`` the rest of its formula. A
    token that two steps share belongs to the worse one.
    """

    def pay(sample: Sample, wrong: list[float]) -> list[float]:
        points = [0.0] * len(sample.tokens)
        for (begin, end), share in zip(steps_of(sample.completion), wrong, strict=True):
            inside = sample.by_token([(begin, end, 1.0)], spread=True)
            points = [min(p, -share) if x else p for p, x in zip(points, inside, strict=True)]
        return points

    return by_steps(table, pay)


capo = NamedForm(_capo, TEXTS["steps"])

# ---------------------------------------------------------------- RewardAnything


def _reward_anything(table: JudgeTable, key: str) -> Form:
    """Scores of all members of a group in one reply, by a principle in words.

    "RewardAnything: Generalizable Principle-Following Reward Models" (arXiv:2506.03637): the judge
    reads ``principle``, the question and all answers under names, and replies with scores from 1 to
    5 and a ranking; the scores, here mapped to [0, 1], are the rewards of the group. The form of
    question and reply is that of the released code; each vote begins with another member. A reply
    that does not score every member once has no verdict. Its training is GRPO on the reward
    function "listwise_agreement".
    """

    def order(count: int, vote: int) -> list[int]:
        return [(i + vote) % count for i in range(count)]

    def questions(samples: Sequence[Sample], vote: int) -> list[Question]:
        at = order(len(samples), vote)
        texts = {f"model-{n}": answer_of(samples[i]) for n, i in enumerate(at, 1)}
        fields = {"completions": json.dumps(texts, ensure_ascii=False), "count": str(len(at))}
        return [question(table, samples[0], fields, partial(_listed_scores, order=at))]

    def points(samples: Sequence[Sample], verdicts: Sequence[Sequence[Any]]) -> list[Points]:
        columns = zip(*verdicts[0], strict=True) if verdicts[0] else [[] for _ in samples]
        return [pooled(each, table.vote) for each in columns]

    return Form(True, questions, points)


def _listed_scores(reply: str, order: Sequence[int]) -> list[float] | None:
    """The members' scores, mapped to [0, 1], in their own order."""
    scores = (read_object(reply) or {}).get("scores")
    names = [f"model-{n}" for n in range(1, len(order) + 1)]
    if not isinstance(scores, Mapping) or set(scores) != set(names):
        return None
    if not all(is_number(scores[name]) and 1 <= scores[name] <= 5 for name in names):
        return None
    by_member = {i: (scores[name] - 1) / 4 for name, i in zip(names, order, strict=True)}
    return [by_member[i] for i in range(len(order))]


reward_anything = NamedForm(
    _reward_anything,
    FormText(
        """Judge how well each response follows the principle, which counts for more than what is
usually preferred. Think briefly, score each response from 1 (contradicts it) to 5 (follows it and
is excellent) and use the whole range; then sort them.

Principle: {principle}

Prompt: {question}

Responses: {completions}

End with a JSON object such as
{"scores": {"model-1": 2, "model-2": 4}, "best-to-worst": ["model-2", "model-1"]}""",
        ("completions", "count"),
        (("completions",),),
    ),
)
