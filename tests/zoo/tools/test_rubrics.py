"""Rubrics that are written from preferences and kept where they tell them."""

from jrl.config.judge import criteria_of
from jrl.zoo.tools.rubrics import contrastive_rubrics

ROWS = [
    {"prompt": "Name a bird.", "chosen": chosen, "rejected": rejected}
    for chosen, rejected in (("a crow", "a crow and a rook"), ("a tall heron", "a gull"))
]


def write(messages):
    """Shortness is what it sees in every pair."""
    (message,) = messages
    assert "Name a bird." in message["content"]
    return 'Short ones win. {"hard": ["Names one bird."], "principles": ["Is short."]}'


def judge(messages):
    """The shorter one is better, by that rubric alone."""
    text = messages[-1]["content"]
    assert "1. (hard) Names one bird.\n2. Is short." in text
    first, second = (text.split(f"Response {x}:\n")[1].split("\n\n")[0] for x in "AB")
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
