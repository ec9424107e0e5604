"""Rubrics that are written from preferences and kept where they tell them."""

import itertools
import json

import numpy as np
import pytest

from jrl.config.judge import criteria_of
from jrl.zoo.tools.rubrics import (
    central_rows,
    contrastive_rubrics,
    judge_rows,
    with_rubrics,
    writer_rows,
)

ROWS = [
    {"prompt": "Name a bird.", "chosen": chosen, "rejected": rejected}
    for chosen, rejected in (("a crow", "a crow and a rook"), ("a tall heron", "a gull"))
]
RUBRIC = '{"hard": ["Names one bird."], "principles": ["Is short."]}'


def write(messages):
    """Shortness is what it sees in every pair."""
    (message,) = messages
    assert "Name a bird." in message["content"]
    return f"Short ones win. {RUBRIC}"


def judge(messages):
    """The shorter one is better, by that rubric alone."""
    text = messages[-1]["content"]
    assert "1. (hard) Names one bird.\n2. Is short." in text
    first, second = (text.split(f"Answer {x}:\n")[1].split("\n\n")[0] for x in "AB")
    return f"[[{'A' if len(first) < len(second) else 'B'}]]"


def test_a_rubric_is_kept_where_it_tells_the_preferred_response():
    (row,) = contrastive_rubrics(ROWS, write, judge)
    assert (row["question"], row["chosen"]) == ("Name a bird.", "a crow")
    hard, soft = criteria_of(row["rubric"], "a row")  # what form = "rubric" reads
    assert (hard.text, hard.veto, soft.text, soft.veto) == (
        *("Names one bird.", True),
        *("Is short.", False),
    )


def test_a_judge_that_likes_the_first_keeps_none():
    assert contrastive_rubrics(ROWS, write, lambda messages: "[[A]]") == []


def test_what_is_no_rubric_is_left_out():
    for reply in ("none", '{"hard": "x"}', '{"hard": [], "principles": []}', '{"hard": [1]}'):
        assert contrastive_rubrics(ROWS, lambda messages, reply=reply: reply, judge) == []


@pytest.mark.parametrize("least", [0.0, 0.5, 0.75, 1.0])
def test_of_a_ranking_the_pairs_that_a_good_rubric_tells_are_kept(least):
    """Against equations 2 and 3 of the paper; equal scores are no pair."""
    texts, scores = ["aa", "a", "aaaa", "aaa"], [4.0, 3.0, 2.0, 2.0]
    row = {"prompt": "Name a bird.", "responses": texts[::-1], "scores": scores[::-1]}
    pairs = contrastive_rubrics([row], write, judge, least)
    ordered = [
        (x, y)
        for (x, s), (y, t) in itertools.combinations(zip(texts, scores, strict=True), 2)
        if s > t
    ]
    right = [len(x) < len(y) for x, y in ordered]
    accuracy = np.mean(right)
    assert (len(right), accuracy) == (5, 0.8)
    expected = [p for p, r in zip(ordered, right, strict=True) if r and accuracy >= least]
    assert {(p["chosen"], p["rejected"]) for p in pairs} == set(expected)


def test_pairs_train_a_writer_and_a_judge_in_the_words_that_they_are_asked_in():
    pairs = contrastive_rubrics(ROWS[:1], write, judge)
    (writer_row,) = writer_rows([*pairs, *pairs])
    assert json.loads(writer_row["answer"]) == json.loads(RUBRIC)
    prompts = []
    (row,) = with_rubrics(
        [{"question": "Name a bird.", "id": 3}],
        lambda messages: prompts.append(messages[0]["content"]) or writer_row["answer"],
    )
    assert prompts == [writer_row["question"]]
    assert (row["id"], row["rubric"]) == (3, pairs[0]["rubric"])
    assert with_rubrics([{"question": "?"}], lambda messages: "none") == []
    both = judge_rows(pairs)
    assert [each["answer"] for each in both] == ["[[A]]", "[[B]]"]
    assert all("By these criteria, hard ones first" in each["question"] for each in both)


def test_the_middle_of_the_scores_is_trained_on():
    rows = [{"mean": x / 10} for x in (9, 0, 3, 5, 7, 10, 1, 5)]
    low, high = np.quantile([row["mean"] for row in rows], [0.25, 0.75])
    assert central_rows(rows, "mean") == [r for r in rows if low <= r["mean"] <= high]
    assert [r["mean"] for r in central_rows(rows, "mean", 0.0, 0.5)] == [0.0, 0.3, 0.5, 0.1, 0.5]
