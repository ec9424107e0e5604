"""A solver and its judge in one episode: what each is asked, and what it is paid."""

import numpy as np
import pytest
from scripted import play

from jrl.episodes.check_env import check_env
from jrl.episodes.configured import configured_env
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.envs.judged import read_step_verdicts, tagged_steps

PROMPT = Prompt(0, "What is 6 * 7?", np.zeros(0, np.int32), "42")


def talk(env, *turns):
    return play(env, turns, PROMPT)


@pytest.mark.parametrize(
    ("answer", "verdict", "solver", "judge"),
    [
        ("It is 42", "So.\nVerdict: yes", 1.0, 1.5),
        ("It is 41", "Verdict: no", 0.0, 1.5),
        ("It is 41", "Verdict: yes", 0.0, 0.5),
        ("It is 42", "Verdict: no", 1.0, 0.5),
        ("It is 41", "who knows", 0.0, 0.0),  # no verdict agrees with nothing
    ],
)
def test_the_judge_is_paid_for_agreeing_with_the_outcome(answer, verdict, solver, judge):
    env = check_env(configured_env("judged", {"form_weight": 0.5}))
    opening, to_judge, end = talk(env, answer, verdict)
    assert opening[-1]["content"] == PROMPT.text
    assert "42" not in to_judge.messages[0]["content"]  # it is not told the answer
    assert to_judge.next == 1
    assert (end.reward, end.earlier, end.done) == ((judge,), ((solver,),), True)
    assert end.success == (solver == 1)
    assert end.labels == {"outcome": int(solver)}
    assert end.metrics["agreement"] == float(judge > 1)
    assert end.metrics["verdicts_read"] == float(verdict != "who knows")


SOLUTION = "<step>6 * 7</step> is <step>42</step> so 42"


def verdicts(*steps, final="CORRECT", between=""):
    parts = "".join(f"<step>so \\boxed{{{s}}}</step>{between}" for s in steps)
    return (
        f"<step_verification>{parts}</step_verification>\n"
        f"<final_verification>\\boxed{{{final}}}</final_verification>"
    )


def test_steps_are_labelled_and_judged_one_by_one():
    env = check_env(configured_env("judged", {"form": "steps"}))
    _, to_judge, end = talk(env, SOLUTION, verdicts("INCORRECT", "CORRECT"))
    numbers = to_judge.labels["solution_step"]
    assert "".join("_01"[n + 1] for n in numbers) == "0" * 18 + "_" * 4 + "1" * 15 + "_" * 6
    assert "It has 2 steps" in to_judge.messages[0]["content"]
    assert "\\boxed{CORRECT}" in to_judge.messages[0]["content"]
    assert end.labels == {"outcome": 1, "verified_steps": 2, "verdicts": 0b10}
    assert (end.earlier, end.reward) == (((1.0,),), (1.8,))
    *_, end = talk(env, SOLUTION, verdicts("CORRECT"))  # one verdict for two steps
    assert end.labels == {"outcome": 1, "verified_steps": 0, "verdicts": 0}
    assert end.reward[0] == pytest.approx(1 + 0.8 * 0.2)
    *_, end = talk(env, "<step>a</step>" * 40, verdicts(*["CORRECT"] * 40, final="INCORRECT"))
    assert end.labels == {"outcome": 0, "verified_steps": 0, "verdicts": 0}  # no room for 40


@pytest.mark.parametrize(
    ("reply", "right", "form"),
    [
        (verdicts("CORRECT", "CORRECT"), True, 1.0),
        (f" {verdicts('CORRECT', 'INCORRECT', final='INCORRECT')}\n", False, 1.0),
        (verdicts("CORRECT", "CORRECT", final="MAYBE"), None, 0.2),
        (verdicts("CORRECT", "CORRECT", between=" and "), True, 0.6),
        (verdicts("CORRECT", "MAYBE"), True, 0.2),
        (verdicts(), True, 0.2),
        (verdicts("CORRECT", between="!", final="MAYBE"), None, 0.0),
        (f"Well. {verdicts('CORRECT', 'CORRECT')}", True, 0.0),
        ("\\boxed{CORRECT}", None, 0.0),
    ],
)
def test_the_form_has_the_points_of_the_released_code(reply, right, form):
    verdict = read_step_verdicts(reply, 2)
    assert verdict.right is right
    assert verdict.form == pytest.approx(form)


def test_what_cannot_be_judged_is_said():
    assert tagged_steps("<step>a\nb</step>") == [(0, 16)]
    with pytest.raises(UserError, match="data.form = 'score'; choose from steps, yes_no"):
        configured_env("judged", {"form": "score"})
    with pytest.raises(UserError, match="write {question} into it"):
        configured_env("judged", {"question": "Solve it."})
