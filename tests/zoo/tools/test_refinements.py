"""GLoRe's rows: labels of steps, their balance, and refinements of wrong drafts."""

from collections import Counter

import pytest

from jrl.errors import UserError
from jrl.zoo.tools.refinements import (
    Solution,
    best_draft,
    global_rows,
    local_rows,
    sorm_rows,
    step_labels,
)

RIGHT = Solution("q", ("1+1=2.", " 2*3=6.", " So 6"), (True, True, True), True)
OTHER = Solution("q", ("1+1=2.", " 6/1=6.", " So 6"), (True, True, True), True)
WRONG = Solution("q", ("1+1=2.", " 2*3=5.", " So 5"), (True, False, False), False)
EARLY = Solution("q", ("1+1=3.", " 3*3=9.", " So 9"), (False, False, False), False)
LOST = Solution("other", ("7.",), (False,), False)
ALL = (RIGHT, OTHER, WRONG, EARLY, LOST)


def test_a_positive_label_reaches_the_steps_before_it():
    lucky = Solution("q", ("a", "b", "c"), (False, True, False), False)
    assert step_labels(lucky) == [True, True, False]
    assert lucky.first_wrong == 2
    with pytest.raises(UserError, match="3 steps and 2 labels"):
        step_labels(lucky._replace(reaches=(True, True)))


def test_a_result_that_nothing_uses_is_no_right_step():
    unused = Solution("q", ("1+1=2.", " 4*3=12.", " So 12"), (True, True, True), True)
    assert step_labels(unused) == [True] * 3
    assert step_labels(unused, consistent=True) == [False, True, True]
    assert step_labels(
        Solution("q", ("Let us see.", " 5"), (True, True), True), consistent=True
    ) == [
        True,
        True,
    ]


def test_each_number_of_steps_has_as_many_right_prefixes_as_wrong():
    every = sorm_rows(ALL, 0, consistent=False, balanced=False)
    assert len(every) == 13
    assert every[1] == {"prompt": "q", "responses": ["1+1=2. 2*3=6."], "scores": [1.0]}
    rows = sorm_rows(ALL, 0, consistent=False)
    texts = {s.question + "".join(s.steps[: i + 1]): i for s in ALL for i in range(len(s.steps))}
    count = Counter((texts[r["prompt"] + r["responses"][0]], r["scores"][0]) for r in rows)
    assert count == {(0, 1.0): 2, (0, 0.0): 2, (1, 1.0): 2, (1, 0.0): 2, (2, 1.0): 2, (2, 0.0): 2}
    assert rows == sorm_rows(ALL, 0, consistent=False)
    assert all(row in every for row in rows)


def test_a_global_refinement_turns_a_wrong_draft_into_a_right_solution():
    rows = global_rows(ALL, "{question}|{draft}")
    assert rows == [
        {"prompt": "q|" + WRONG.text, "solution": RIGHT.text},
        {"prompt": "q|" + EARLY.text, "solution": OTHER.text},
    ]


def test_a_local_refinement_marks_the_first_wrong_step():
    rows = local_rows((WRONG, RIGHT, OTHER), "{question}|{draft}")
    marked = "q|1+1=2.[BAD]  2*3=5. So 5"
    assert rows == [{"prompt": marked, "solution": RIGHT.text}]
    # from another first step none of the right ones goes on
    stray = Solution("q", ("0.", " 1."), (True, False), False)
    assert local_rows((stray, RIGHT)) == []
    assert "[BAD] 1+1=3." in local_rows((EARLY, RIGHT))[0]["prompt"]


def test_the_draft_stands_where_nothing_is_better():
    assert best_draft(["d", "g", "l"], [None, 0.1, None]) == "g"
    assert best_draft(["d", "g", "l"], [None, None, None]) == "d"
