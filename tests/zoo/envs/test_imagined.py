"""Prompts for imagined dialogues, and parsing of their replies."""

import pytest

from jrl.zoo.envs.imagined import (
    ATTEMPTS,
    SKILLS,
    Task,
    UnreadableError,
    draw_seed,
    imagine_row,
    read_dialogue,
    read_personas,
    read_score,
    reason,
    reason_prompt,
)

TASK = Task("Teach recursion.", "a teacher", "a student", "Is it understood?", "Teach me.")
TALK = "Agent: What do you know?\nHuman: Loops.\nAgent: Good.\nHuman: I see!\nEND"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (TALK, ["Teach me.", "What do you know?", "Loops.", "Good.", "I see!"]),
        ("Sure:\n\n**Human:** Hi\n**Agent**: *waves*\n\nHi.\n**END**", ["Hi", "*waves*\n\nHi."]),
        ("Human: a\nhuman: b\nAGENT: c: d\nEnd.\nAgent: more", ["a\nb", "c: d"]),
        ("<think>Human: no\nEND</think>Human: yes\nAgent: c\nEND", ["yes", "c"]),
    ],
)
def test_a_dialogue_is_read(reply, expected):
    messages = read_dialogue(reply, "Teach me.")
    assert [m["content"] for m in messages] == expected
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"][
        : len(expected)
    ]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("Agent: Hi.\nHuman: Hi.\nAgent: It is", "may be cut"),
        ("Agent: Hi.\nEND", "no dialogue of two"),
        ("I cannot.\nEND", "no dialogue of two"),
        ("Human: Hi\nAgent:\nEND", "without words"),
        (None, "may be cut"),
    ],
)
def test_what_is_no_dialogue_is_not(reply, reason):
    with pytest.raises(UnreadableError, match=reason):
        read_dialogue(reply, "Hello.")


def test_scores_and_lists():
    assert read_score("Score: 3\nBetter: **Score**: 7.5 / 10") == 0.75
    for reply in ("Score: high", "Score: 11", "Score: -1", "8", None):
        with pytest.raises(UnreadableError, match="no score from 0 to 10"):
            read_score(reply)
    assert read_personas("- a b\n* c\n12. a b\nno") == ["a b", "c"]
    with pytest.raises(UnreadableError):
        read_personas("nobody")


def scripted(*replies):
    calls, left = [], list(replies)

    def ask(prompt, seed):
        calls.append((prompt, seed))
        return left.pop(0)

    return ask, calls


def test_a_row_says_how_it_came_about():
    ask, calls = scripted("?", TALK, "?", "?", "It is.\nScore: 10")
    row = imagine_row(ask, TASK, ["a shy one", "a proud one"], 3, seed=1)
    assert row["reward"] == 1.0
    assert (row["number"], row["persona"]) == (3, "a proud one")
    assert row["critique"] == "It is.\nScore: 10"
    assert row["messages"][0] == {"role": "user", "content": "Teach me."}
    prompts = [prompt for prompt, _ in calls]
    assert SKILLS[row["skill"]] in prompts[0]
    assert "a proud one" in prompts[0]
    assert TASK.goal in prompts[-1]
    assert "Human: I see!" in prompts[-1]
    assert len({seed for _, seed in calls}) == 5  # what is asked for again is drawn anew
    again, same = scripted("?", TALK, "?", "?", "It is.\nScore: 10")
    assert imagine_row(again, TASK, ["a shy one", "a proud one"], 3, seed=1) == row
    assert same == calls


def test_criteria_revise_a_dialogue():
    task = TASK._replace(criteria=("The student doubts.",))
    revised = "Human: Teach me.\nAgent: No.\nEND"
    ask, calls = scripted(TALK, revised, "Score: 0")
    row = imagine_row(ask, task, ["one"], 0, seed=0)
    assert [m["content"] for m in row["messages"]] == ["Teach me.", "No."]
    assert "- The student doubts." in calls[1][0]
    assert "Agent: No." in calls[2][0]


def test_what_stays_unreadable_is_given_up():
    ask, calls = scripted(*["?"] * 9)
    with pytest.raises(UnreadableError):
        imagine_row(ask, TASK, ["one"], 0, seed=0)
    assert len(calls) == ATTEMPTS


def test_all_skills_are_imagined():
    rows = []
    for number in range(30):
        ask, _ = scripted(TALK, "Score: 5")
        rows.append(imagine_row(ask, TASK, ["one"], number, seed=0)["skill"])
    assert set(rows) == set(SKILLS)
    assert draw_seed(0, 1, "imagine", 0) != draw_seed(1, 1, "imagine", 0)


def test_personas_that_are_known_are_kept():
    task = TASK._replace(personas=4)
    ask, calls = scripted("1. b\n2. c\n", "?", "1. c\n2. d\n3. e")
    assert reason(ask, task, ["a", "a"], seed=0) == ["a", "b", "c", "d"]
    assert "- a\n" in calls[0][0]
    assert "List 3 such people" in calls[0][0]
    assert calls[1][0] == calls[2][0] == reason_prompt(task, 1, ["a", "b", "c"])
    ask, calls = scripted()
    assert reason(ask, task, list("abcd"), seed=0) == list("abcd")
    with pytest.raises(UnreadableError):
        reason(scripted("?", None, "")[0], task, [], seed=0)
