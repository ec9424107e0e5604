"""Rubrics from preferences (OpenRubrics), and the rows of a critic's middle scores (Rubicon)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.config.judge import JudgeTable
from jrl.episodes.model_endpoint import Speaker, user_message
from jrl.rewards.base import Sample
from jrl.rewards.judge_prompts import filled
from jrl.rewards.replies import read_object
from jrl.rewards.verdicts import make_form
from jrl.types import Prompt

_FORM = """End with a JSON object such as
{"hard": ["Has at most three sentences."], "principles": ["Is specific."]}."""
_CONTRAST = """Responses to a prompt, the best one first.

Prompt:
{prompt}

{responses}

Write a rubric by which such responses can be told apart without naming any: hard rules, which the
prompt states and a response must keep, and principles of what makes a response good. """
_ALONE = """Write a rubric for responses to the prompt below: hard rules, which it states and which
they must keep, and principles of what makes a response good.

Prompt:
{prompt}

"""


def contrastive_rubrics(
    rows: Iterable[Mapping[str, Any]],
    write: Speaker,
    judge: Speaker | None = None,
    least: float = 0.5,
) -> list[dict[str, Any]]:
    """The pairs of preferences with rubrics that tell the preferred response.

    Contrastive Rubric Generation of "OpenRubrics: Towards Scalable Synthetic Rubric Generation for
    Reward Modeling and LLM Alignment" (arXiv:2510.07743): a model sees a prompt and its responses
    from the best to the worst, and writes hard rules and principles R. A judge that goes by R is
    asked about each of the pairs P of a better and a worse one, and

        Acc = 1/|P| sum over P of 1[the judge prefers the better one]

    A pair is kept where Acc >= ``least`` (tau, 0.5 in the paper) and the judge was right about it.
    Departures: the judge is asked in both orders, and is right where it is in both; it is asked in
    the words of ``form = "pairwise"``, where the paper's judge names a gatekeeper criterion first.

    The rows train the two models by ``sft``: ``writer_rows`` and ``judge_rows``. A policy then
    learns by ``form = "pairwise"`` with ``column = "rubric"``; ``with_rubrics`` writes the column.

    Args:
      rows: with "prompt" and either "chosen" and "rejected", or "responses" and their "scores".
      write: writes rubrics; it returns text, so it is not async.
      judge: goes by them; None for the same model.
      least: tau.

    Returns:
      {"question", "rubric", "chosen", "rejected", "questions", "replies"} of each pair; the last
      two are the texts to the judge in both orders, and its replies.
    """
    pairs = []
    for row in rows:
        prompt, ranked = str(row["prompt"]), _ranked(row)
        texts = "\n\n".join(f"Response {i}:\n{x}" for i, (x, _) in enumerate(ranked, 1))
        fields = {"prompt": prompt, "responses": texts}
        rubric = _criteria(write([user_message(filled(_CONTRAST + _FORM, fields))]))
        strict = [(a, b) for (a, s), (b, t) in itertools.combinations(ranked, 2) if s > t]
        if not rubric or not strict:
            continue
        judged = [_judged(prompt, rubric, pair, judge or write) for pair in strict]
        if np.mean([right for right, _ in judged]) >= least:
            pairs += [each for right, each in judged if right]
    return pairs


def writer_rows(pairs: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows that train a rubric writer by ``sft``: a prompt alone, and its rubric; one for each.

    Args:
      pairs: from ``contrastive_rubrics``.
    """
    rows = {}
    for pair in pairs:
        hard = [c["text"] for c in pair["rubric"] if c.get("veto")]
        soft = [c["text"] for c in pair["rubric"] if not c.get("veto")]
        rubric = json.dumps({"hard": hard, "principles": soft})
        question = filled(_ALONE + _FORM, {"prompt": pair["question"]})
        rows[question, rubric] = {"question": question, "answer": rubric}
    return list(rows.values())


def judge_rows(pairs: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows that train a judge by ``sft``: a question with rubric and pair, and what was said."""
    return [
        {"question": question, "answer": reply}
        for pair in pairs
        for question, reply in zip(pair["questions"], pair["replies"], strict=True)
    ]


def with_rubrics(
    rows: Iterable[Mapping[str, Any]], write: Speaker, question: str = "question"
) -> list[dict[str, Any]]:
    """The rows with a rubric each, in the column "rubric"; without those that get none to read.

    Args:
      rows: of prompts.
      write: writes rubrics, such as the model that ``writer_rows`` trained.
      question: the column of the prompt.
    """

    def rubric_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return _criteria(write([user_message(filled(_ALONE + _FORM, {"prompt": row[question]}))]))

    return [{**row, "rubric": rubric} for row in rows if (rubric := rubric_of(row))]


def central_rows(
    rows: Sequence[Mapping[str, Any]], column: str, low: float = 0.25, high: float = 0.75
) -> list[Mapping[str, Any]]:
    """The rows whose score lies between two quantiles of all scores, both included.

    The offline filter of "Reinforcement Learning with Rubric Anchors" (Rubicon, arXiv:2508.12790):
    a critic scores responses of the base model, and prompts in a central part of the scores are
    trained on; others are too easy, or too hard or noisy. Which quantiles is not published.

    Args:
      rows: with a number each, such as the mean of its samples' rewards.
      column: of the number.
      low: the quantile below which rows are left out, in [0, 1].
      high: the one above which they are.
    """
    scores = np.array([float(row[column]) for row in rows])
    least, most = np.quantile(scores, [low, high])
    return [row for row, x in zip(rows, scores, strict=True) if least <= x <= most]


def _ranked(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The responses with their scores, the best one first."""
    if "responses" not in row:
        return [(str(row["chosen"]), 1.0), (str(row["rejected"]), 0.0)]
    scored = zip(map(str, row["responses"]), map(float, row["scores"]), strict=True)
    return sorted(scored, key=lambda each: -each[1])


def _criteria(reply: str) -> list[dict[str, Any]]:
    """The criteria of a reply, hard rules first; [] where it has none that can be read."""
    written = read_object(reply) or {}
    hard, principles = written.get("hard", []), written.get("principles", [])
    lists = isinstance(hard, list) and isinstance(principles, list)
    if not lists or not all(isinstance(x, str) and x.strip() for x in (*hard, *principles)):
        return []
    return [{"text": x, "veto": True} for x in hard] + [{"text": x} for x in principles]


def _judged(
    prompt: str, rubric: list[dict[str, Any]], pair: tuple[str, str], judge: Speaker
) -> tuple[bool, dict[str, Any]]:
    """Whether a judge by the rubric prefers the first of a pair in both orders, and the row."""
    table = JudgeTable(url="http://judge", model="judge", form="pairwise", column="rubric")
    form, (chosen, rejected) = make_form(table, "rubrics"), pair
    none = np.zeros(0, np.int32)
    problem = Prompt(0, prompt, none, rejected, {"rubric": rubric}, question=prompt)
    samples = [Sample(problem, chosen, none, "stop_token")]
    questions = form.questions(samples, 0)
    texts = [question.messages[-1]["content"] for question in questions]
    replies = [judge([user_message(text)]) for text in texts]
    verdicts = [q.read(reply) for q, reply in zip(questions, replies, strict=True)]
    (points,) = form.points(samples, [[] if v is None else [v] for v in verdicts])
    row = {"question": prompt, "rubric": rubric, "chosen": chosen, "rejected": rejected}
    return points == 1, row | {"questions": texts, "replies": replies}
