"""The prover: episodes of tactics, and the statements that are shipped."""

import asyncio
import json
from pathlib import Path

import fuzzing
import hypothesis
import numpy as np
import pytest
import scripted
from hypothesis import strategies as st
from scripted import reply

from jrl.episodes.configured import configured_env
from jrl.episodes.host import EnvError, Limits, check_feedback
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.envs.propositions import parse_formula, provable, show
from jrl.zoo.envs.prover import INSTRUCTION, prover, tactic_of
from jrl.zoo.envs.statements import MOST_TACTICS, main, proved, statements
from jrl.zoo.envs.tactics import TACTICS

SHIPPED = Path(__file__).parents[3] / "configs" / "prover"
BARBARA = "(a -> b) -> (b -> c) -> a -> c"


def problem(text):
    return Prompt(0, text, np.zeros(0, np.int32), "-")


def play(env, statement, *turns, cut=False):
    """The opening, and the feedback to each turn."""
    return asyncio.run(scripted.play_turns(env, turns, problem(statement), cut=cut))


def test_a_proof_is_played_turn_by_turn():
    env = configured_env("prover", {"turns": 6, "turn_tokens": 30})
    assert (env.limits.turns, env.limits.turn_tokens) == (6, 30)
    proof = ["intros f g x", "apply g.", "\n  apply f  \nand so on", "exact x"]
    opening, feedbacks = play(env, BARBARA, *proof)
    assert opening == [{"role": "user", "content": f"{INSTRUCTION}\n\n|- {BARBARA}"}]
    above = "f : a -> b\ng : b -> c\nx : a\n|- "
    assert [t.messages for t in feedbacks[:3]] == [
        [{"role": "user", "content": above + target}] for target in "cba"
    ]
    assert [(t.reward, t.done, t.success) for t in feedbacks] == [
        *[((0.0,), False, False)] * 3,
        ((1.0,), True, True),
    ]


def test_a_tactic_that_fails_ends_the_episode():
    _, (first, end) = play(prover(), BARBARA, "intros", "exact h1")
    assert not first.done
    assert (end.reward, end.done, end.success, end.cut) == ((0.0,), True, False, False)
    assert end.metrics == {"tactic_errors": 1.0}
    _, (end,) = play(prover(penalty=0.5), BARBARA, "intr", cut=True)
    assert (end.reward, end.done, end.cut) == ((-0.5,), True, True)  # a line that has no end
    _, (end,) = play(prover(), "True", "trivial", cut=True)
    assert (end.success, end.cut) == (True, False)


def test_a_tactic_that_fails_may_be_told_and_cost_points():
    env = prover(errors_end=False, penalty=0.25)
    _, feedbacks = play(env, "a -> a", "left", "simp", "", "intro h", "exact h", cut=True)
    assert [t.messages[0]["content"] for t in feedbacks[:1]] == [
        "error: tactic 'left' failed, the target is no \\/: a -> a\n\n|- a -> a"
    ]
    assert "error: unknown tactic 'simp'" in feedbacks[1].messages[0]["content"]
    assert "error: expected a tactic, found nothing" in feedbacks[2].messages[0]["content"]
    assert [t.reward for t in feedbacks] == [(-0.25,)] * 3 + [(0.0,), (1.0,)]
    assert [t.done for t in feedbacks] == [False] * 4 + [True]
    assert feedbacks[-1].success
    # A state is the same whether an error stands above it or not.
    assert [t.state_key for t in feedbacks[:4]] == ["|- a -> a"] * 3 + ["h : a\n|- a"]


def test_a_system_message_comes_first():
    opening, _ = play(prover(system="Be brief."), "a")
    assert [m["role"] for m in opening] == ["system", "user"]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("", "the statement '' cannot be read: character 1: expected a formula, found the end"),
        ("a -> (b", r"'a -> \(b' cannot be read: character 8: expected a connective or '\)'"),
        ("What is 2 + 2?", "cannot be read: character 1: expected a formula, found 'What'"),
    ],
)
def test_a_statement_that_cannot_be_read_fails_its_members(statement, message):
    with pytest.raises(EnvError, match=message):
        play(prover(), statement)


def test_branches_share_no_later_tactics():
    env = prover()

    async def play_branches():
        state, _ = await env.init(problem("a -> b -> a"), 0)
        state, _ = await env.step(state, reply("intro x"))
        branch = env.fork(state)
        ends = []
        for start in (state, branch, branch):
            after, _ = await env.step(start, reply("intro y", 1))
            ends.append((await env.step(after, reply("exact x", 2)))[1].success)
        return ends

    assert asyncio.run(play_branches()) == [True] * 3


@pytest.mark.parametrize(
    ("text", "tactic"),
    [
        ("", ""),
        ("\n\n  intro h \n exact h", "intro h"),
        ("<think>\nintros?\n</think>\n\nexact h", "exact h"),
        ("```lean\napply h\n```", "apply h"),
        ("```", ""),
    ],
)
def test_the_tactic_is_the_first_line(text, tactic):
    assert tactic_of(text) == tactic


ARGUMENT = st.sampled_from(["", "h", "h1", "h2", "h : a", "x y", "h : (a -> b) /\\ ~c", "."])
LINES = st.builds("{} {}".format, st.sampled_from([*TACTICS]), ARGUMENT)


@fuzzing.settings(200)
@hypothesis.given(st.lists(LINES | st.text(max_size=30), max_size=12), st.booleans())
def test_any_text_is_answered(turns, errors_end):
    env = prover(errors_end=errors_end)

    async def play_text():
        state, _ = await env.init(problem("(a \\/ b) /\\ (a <-> b) -> ~~a"), 0)
        for number, text in enumerate(turns):
            state, feedback = await env.step(state, reply(text, number))
            feedback = check_feedback(feedback, env.limits, 1)
            assert feedback.success == (state == ())
            if feedback.done:
                break

    asyncio.run(play_text())


@pytest.mark.parametrize("penalty", [-1.0, float("nan"), "1"])
def test_a_penalty_is_a_cost(penalty):
    with pytest.raises(UserError, match=r"penalty = .*; give a number of at least 0"):
        prover(penalty=penalty)


def test_a_configuration_names_it():
    name = "prover"
    env = configured_env(name, {"turns": 5, "errors_end": False, "call_seconds": 2.0})
    assert env.limits == Limits(turns=5, call_seconds=2.0)
    _, (feedback,) = play(env, "a -> a", "split")
    assert not feedback.done
    with pytest.raises(UserError, match=r"data.tactics = 1: there is no such option"):
        configured_env(name, {"tactics": 1})


# ---------------------------------------------------------------- statements


def test_statements_are_those_of_their_seed_and_can_be_proved():
    rows = proved(7, 60)
    assert statements(7, 60) == [text for text, _ in rows]
    assert len({text for text, _ in rows}) == 60
    assert len({*statements(8, 60)} & {text for text, _ in rows}) < 30
    lengths = [len(proof) for _, proof in rows]
    assert 3 <= min(lengths) < max(lengths) <= MOST_TACTICS
    assert len(set(lengths)) >= 5
    assert max(map(lengths.count, lengths)) <= 15  # a quarter
    env = prover()
    for text, proof in rows:
        assert provable((), parse_formula(text))
        assert show(parse_formula(text)) == text
        assert play(env, text, *proof)[1][-1].success


def test_statements_have_the_atoms_and_the_depth_that_are_asked_for():
    text = "".join(statements(0, 40, atoms=5, depth=4))
    assert {c for c in text if c.isalpha()} - set("False") >= {*"bcd"}
    assert {c for c in "".join(statements(0, 20, atoms=2)) if c in "abcde"} == {"a", "b"}
    few = max(map(len, statements(0, 8, depth=2)))
    assert few < max(map(len, statements(0, 8, depth=4)))
    with pytest.raises(UserError, match="of 4000 statements were found with atoms = 1, depth = 2"):
        statements(0, 4000, atoms=1, depth=2)
    with pytest.raises(UserError, match="atoms = 0, depth = 3; give 1 to 26 and 2 to 5"):
        statements(0, 1, atoms=0)


def test_the_statements_that_are_shipped_are_those_that_are_drawn(tmp_path):
    main([str(tmp_path)])
    rows = {}
    for name in ("train", "eval"):
        generated, shipped = (p / f"{name}.jsonl" for p in (tmp_path, SHIPPED))
        assert generated.read_text() == shipped.read_text()
        rows[name] = {json.loads(line)["question"] for line in generated.read_text().splitlines()}
    assert (len(rows["train"]), len(rows["eval"])) == (400, 100)
    assert not rows["train"] & rows["eval"]


def test_other_files_are_made_by_options(tmp_path):
    main([str(tmp_path / "own"), "--count", "3", "--held-out", "2", "--seed", "5"])
    lines = (tmp_path / "own" / "train.jsonl").read_text().splitlines()
    assert len(lines) == 3
    row = json.loads(lines[0])
    assert play(prover(), row["question"], *row["answer"].split("\n"))[1][-1].success
    assert len((tmp_path / "own" / "eval.jsonl").read_text().splitlines()) == 2
