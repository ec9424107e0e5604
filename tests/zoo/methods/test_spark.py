"""SPARK: what rollouts are recycled into, where the questions go, and what they are paid."""

import jax
import numpy as np
import pytest

from jrl.collect.edit import edited
from jrl.collect.plan import Setting, StepKey, host_rounds, new_collected, sample_step
from jrl.collect.plan_tools import TextTools
from jrl.collect.sources import Groups
from jrl.config.features import check_features
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.rewards.base import Sample
from jrl.setup.features import method_features
from jrl.types import SILENT, Prompt, Rollout, StopReason
from jrl.types.asks import Tokens
from jrl.zoo.methods.spark import _agrees, recycled, spark

WORDS = ["", "", "yes", "no", "Verdict: A", "Verdict: B", "4", "5", "6", "um"]
YES, NO, A, B, FOUR, FIVE, SIX, UM = range(2, 10)


def samples(*groups):
    """Groups of completions; the right answer is 4."""
    out = []
    for row, texts in enumerate(groups):
        prompt = Prompt(row, f"q{row}", np.zeros(1, np.int32), "4")
        out.append([None if t is None else Sample(prompt, t, np.zeros(1), "length") for t in texts])
    right = np.array([[t is not None and t.endswith("4") for t in texts] for texts in groups])
    return out, right


def test_every_group_makes_the_question_of_its_kind():
    """By the cases of the released ``new_data_gen``, over many steps."""
    groups = [
        ["so 4", "4", "is 4", "4"],
        ["5", "6", "um", "so 5"],
        ["4", "so 5", None, "um"],
        ["um", "um", "um", "um"],
        ["um", "5", "um", "so 4"],
    ]
    questions_by_step = [recycled(*samples(*groups), step, 9) for step in range(300)]
    by_place = {
        place: [
            q
            for each in questions_by_step
            for q in each
            if q.place == place and q.label is not None
        ]
        for place in range(5)
    }
    reflections = {
        place: [
            q for each in questions_by_step for q in each if q.place == place and q.label is None
        ]
        for place in range(5)
    }
    assert {(q.label, q.pair) for q in by_place[0]} == {(1.0, False)}
    assert {(q.label, q.pair) for q in by_place[1]} == {(0.0, False)}
    assert {q.text.split("Proposed answer:\n")[1][0] for q in by_place[1]} == {"5", "6"}
    assert by_place[3] == []  # without an answer nothing is judged
    for place in (2, 4):
        pairs = [q for q in by_place[place] if q.pair]
        assert 0.6 < len(pairs) / len(by_place[place]) < 0.8
        assert 0.4 < np.mean([q.label for q in pairs]) < 0.6  # either order
        alone = [q.label for q in by_place[place] if not q.pair]
        assert 0.3 < np.mean(alone) < 0.7
        for q in by_place[place]:
            first = q.text.split("answer:\n" if not q.pair else "Answer A:\n")[1][0]
            assert q.label == float(first == "4")
            assert f"q{place}" in q.text
    assert reflections[0] == []
    # of the first half of the groups, 3 of 5, all that was written is mended
    assert {q.text.split("attempt at it:\n")[1].split("\n")[0] for q in reflections[1]} == {
        *("5", "6", "um", "so 5")
    }
    assert {q.text.split("attempt at it:\n")[1].split("\n")[0] for q in reflections[2]} == {
        *("so 5", "um")
    }
    assert {q.text.split("attempt at it:\n")[1].split("\n")[0] for q in reflections[4]} == {"5"}
    assert recycled(*samples(*groups), 7, 9) == questions_by_step[7]  # nothing else is random


def test_no_more_questions_than_asked_for_of_either_kind():
    questions = recycled(*samples(*[["4", "5"]] * 12), 0, 3)
    assert [q.label is None for q in questions] == [False] * 3 + [True] * 3
    assert len({q.place for q in questions[:3]}) == 3


@pytest.mark.parametrize(
    ("pair", "label", "reply", "points"),
    [
        (False, 1.0, "It follows.\nVerdict: yes", 1.0),
        (False, 1.0, "no", 0.0),
        (False, 0.0, "no", 1.0),
        (False, 0.0, "perhaps", 0.0),
        (True, 1.0, "[[A]]", 1.0),
        (True, 0.0, "Verdict: A", 0.0),
        (True, 1.0, "Verdict: tie", 0.0),
    ],
)
def test_a_verdict_is_paid_for_being_right(pair, label, reply, points):
    question = recycled(*samples(["4", "5"]), 0, 1)[0]._replace(pair=pair, label=label)
    assert _agrees(question.verdict, reply) == points
    assert question._replace(label=None).verdict == 0


# ---------------------------------------------------------------- in a step

N, G, P, T, MORE = 4, 2, 3, 2, 5
PROMPTS = [Prompt(i, f"q{i}", np.array([20 + i], np.int32), "4") for i in range(10)]
ANSWERS = {0: (FOUR, FOUR), 1: (FIVE, UM), 2: (FOUR, FIVE), 3: (UM, UM)}


class Words:
    def decode(self, ids):
        return " ".join(WORDS[i] for i in ids if i > 1)


def recycled_prompt(question):
    """A prompt of four tokens, or one that is too long."""
    if "attempt" in question:
        return np.full(99 if "q1" in question else 4, 30, np.int32)
    return np.array([31, 32, 33, 34], np.int32)


def draw(asks):
    """Completions by row; those under a question say yes, and their second member B."""
    (ask,) = asks
    rows, under = np.asarray(ask.row), ask.context is not None
    tokens = np.zeros((len(rows), G, T), np.int32)
    for a, row in enumerate(rows.tolist()):
        tokens[a, :, 0] = (YES, B) if under else ANSWERS[row % 4]
    tokens[:, :, 1] = 1
    live = np.arange(G)[None] < np.asarray(ask.count)[:, None]
    prompts = ask.context or Tokens(np.full((len(rows), P), 9, np.int32), np.ones(len(rows), int))
    stop = np.where(live, StopReason.STOP_TOKEN, StopReason.ABSENT).astype(np.int32)
    shape = tokens.shape
    rollout = Rollout(
        *(np.asarray(prompts.ids)[:, :P], np.asarray(prompts.lengths), tokens),
        np.where(live, T, 0).astype(np.int32),
        np.broadcast_to(live[..., None], shape).copy(),
        np.full(shape, -1.0, np.float32),
        np.zeros(shape, np.int32),
        *(stop, np.zeros(live.shape, bool)),
    )
    rewards = np.stack([(tokens[..., 0] == FOUR), np.full(live.shape, 0.5)], -1)
    ids = {"prompt": rows.astype(np.int32), SILENT: np.full(live.shape, 2, np.int32)}
    return Groups(rollout, rewards.astype(np.float32), None, {}, ids)


def step_of(method, cursor=0, words=None, tokens_of=recycled_prompt):
    tools = TextTools(PROMPTS, T, tokenizer=words or Words(), tokens_of=tokens_of, longest=64)
    order = lambda tickets: np.asarray(tickets) % 10  # noqa: E731
    ones = np.ones(2, np.float32)
    setting = Setting(method, N, G, ones, 0, order, lambda key: tools, contexts=True)
    collected = new_collected(setting).replace(cursor=np.int32(cursor))
    now = StepKey(np.asarray(jax.random.key_data(jax.random.key(0))), np.int32(3))
    groups, after, counts = sample_step(draw, collected, now, setting, host_rounds)
    trained, after, _ = edited(groups, after, now, setting)
    return groups, trained, after, counts


@pytest.fixture(scope="module")
def stepped():
    return step_of(spark(question_tokens=MORE, pointwise=1.0, kl_coef=0.0))


def test_questions_are_groups_of_the_same_step(stepped):
    groups, trained, after, counts = stepped
    questions = np.flatnonzero(np.asarray(groups.round).max(axis=1) > 0)
    # a verdict of the groups 0, 1 and 2, no more than 2; reflections on 1 (too long), 2 and 3
    assert counts["rounds"] == 2
    assert 2 <= len(questions) <= 4
    assert trained.ticket.shape == (2 * N,)  # the room of a batch: N problems, N questions
    assert np.asarray(trained.members()).any(axis=1).sum() == N + len(questions)
    # the data's order goes on behind the N problems
    assert int(after.cursor) == N
    for n in questions.tolist():
        row, rollout = int(groups.row[n]), groups.rollout
        prompt = rollout.prompt_tokens[n, : rollout.prompt_lengths[n]].tolist()
        head = rollout.tokens[n, 0, : rollout.lengths[n, 0]].tolist()
        question = [31, 32, 33, 34] if groups.rewards[n, 0, 1] == 0 else [30] * 4
        assert prompt == question[:P]  # what does not fit a prompt stands before the completion
        assert head == [question[P], YES, 1]
        assert rollout.mask[n, 0, :3].tolist() == [False, True, True]
        assert rollout.versions[n, 0, :3].tolist() == [-1, 0, 0]
        assert row < N


def test_verdicts_are_paid_by_agreement_and_reflections_by_the_problem(stepped):
    groups = stepped[0]
    rewards, silent = np.asarray(groups.rewards), np.asarray(groups.ids[SILENT])
    questions = np.flatnonzero(np.asarray(groups.round).max(axis=1) > 0)
    np.testing.assert_array_equal(silent[:N], 2)
    verdicts = 0
    for n in questions.tolist():
        row = int(groups.row[n])
        if silent[n, 0] == 0:  # every member said yes, and then B, which is no verdict of this kind
            verdicts += 1
            assert rewards[n].tolist() in ([[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]])
            if row in (0, 1):
                assert rewards[n, 0, 0] == float(row == 0)
        else:
            assert rewards[n, :, 1].tolist() == [0.5, 0.5]  # as the problem's functions say
    assert verdicts == 2


def test_questions_are_made_once_a_step():
    """Of each completion the text is made once, and each question is written once."""
    read, questions = [], []

    class Counting(Words):
        def decode(self, ids):
            read.append(tuple(ids))
            return super().decode(ids)

    def counting(question):
        questions.append(question)
        return recycled_prompt(question)

    method = spark(question_tokens=MORE, pointwise=1.0, kl_coef=0.0)
    groups, *_ = step_of(method, words=Counting(), tokens_of=counting)
    verdicts = int((np.asarray(groups.ids[SILENT])[N:, 0] == 0).sum())
    assert verdicts == 2
    assert len(read) == (N + verdicts) * G
    assert len(questions) == len(set(questions)) == 4  # with the one that is too long
    assert groups.prior == {}


def test_without_its_questions_it_is_grpo(stepped):
    plain = step_of(get_method("grpo"))[0]
    groups = stepped[0]
    assert plain.ticket.shape == (N,)
    np.testing.assert_array_equal(groups.rewards[:N], plain.rewards)
    np.testing.assert_array_equal(groups.ticket[:N], plain.ticket)


def test_the_next_step_takes_the_next_problems():
    method = spark(question_tokens=MORE, kl_coef=0.0)
    _, trained, after, _ = step_of(method, cursor=N)
    assert int(after.cursor) == 2 * N
    assert np.asarray(trained.row)[:N].tolist() == [4, 5, 6, 7]


def test_a_task_and_episodes_have_no_questions_in_words():
    features = method_features(spark())
    with pytest.raises(UserError, match=r"needs data.train: a task has no words for them"):
        check_features({"questions": features["questions"]})
    text = {"records": "data.train", "episodes": "data.env"}
    with pytest.raises(UserError, match="which asks about completions, does not go with data.env"):
        check_features({"questions": features["questions"]} | text)
    assert "questions" not in method_features(get_method("grpo"))
