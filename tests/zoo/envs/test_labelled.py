"""Labels that environments give to episodes and to tokens, and the environments that give some."""

import asyncio

import numpy as np
import pytest

from jrl.episodes.chat import PlainFormat
from jrl.episodes.check_env import check_env
from jrl.episodes.env_calls import call_step
from jrl.episodes.host import EnvError, EnvExtras, Feedback, HostEnv, check_feedback
from jrl.episodes.transcript import RowShape, Segment, Transcript, to_rollout
from jrl.errors import UserError
from jrl.models.tokenizer import char_tokenizer
from jrl.types import Prompt, StopReason
from jrl.zoo.envs.foretell import foretell
from jrl.zoo.envs.ranked_list import ranked_list

TOKENIZER = char_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .<>/-\n")
STOP = TOKENIZER.stop_ids[0]


def answered(env, prompt, text):
    """The feedback to one turn, its labels by token, as a run has it; the turn ends with a stop."""

    async def play():
        state, _ = await env.init(prompt, 0)
        tokens = np.array([*TOKENIZER.encode(text), STOP], np.int32)
        arguments = env, PlainFormat(TOKENIZER), TOKENIZER, state, 0, tokens, False
        return (await call_step(*arguments))[1]

    return asyncio.run(play())


def problem(answer, **meta):
    return Prompt(3, "what", np.zeros(0, np.int32), answer, meta)


def test_items_of_a_list_are_known_by_token_and_paid_by_rank():
    env = ranked_list(4)
    text = "1. dune\n\n- alien\ndune\nheat"
    feedback = answered(env, problem(["Dune", "heat", "up"]), text)
    assert feedback.reward == (1.0, 0.0, 0.0, 1.0)  # an item counts once
    assert feedback.metrics == {"recall": pytest.approx(2 / 3)}
    assert not feedback.success
    assert env.parts == ("rank_1", "rank_2", "rank_3", "rank_4")
    lines = [("1. dune\n", 0), ("\n", -1), ("- alien\n", 1), ("dune\n", 2), ("heat", 3)]
    expected = [item for line, item in lines for _ in line]
    assert feedback.labels["item"] == [*expected, -1]  # the stop token adds no character
    assert answered(env, problem("dune\n\nheat"), "heat\ndune").success


def test_a_token_of_many_characters_has_the_label_of_the_first():
    class Pairs:
        """Two characters a token."""

        def decode(self, ids, skip_special=True):
            return "".join("ab" if i else "" for i in ids)

    async def step(state, reply):
        return state, Feedback((), 0.0, True, labels={"place": range(len(reply.text))})

    env = HostEnv(None, step, extras=EnvExtras(token_labels=("place",)))

    async def play(give):
        paired = env._replace(step=give)
        arguments = paired, PlainFormat(TOKENIZER), Pairs(), 0, 0, np.array([1, 0, 2, 3]), False
        return (await call_step(*arguments))[1]

    async def step_with_list(state, reply):
        return state, Feedback((), 0.0, True, labels={"place": [*range(len(reply.text))]})

    assert asyncio.run(play(step_with_list)).labels == {"place": [0, 2, 2, 4]}

    async def short(state, reply):
        return state, Feedback((), 0.0, True, labels={"place": [1]})

    with pytest.raises(EnvError, match="label place: 1 numbers for 6 characters"):
        asyncio.run(play(short))

    async def unknown(state, reply):
        return state, Feedback((), 0.0, True, labels={"place": 1})

    with pytest.raises(EnvError, match="label place is not declared by the environment"):
        asyncio.run(play(unknown))


@pytest.mark.parametrize("label", [1.5, "1", [0.5], 2**31, None])
def test_a_label_is_a_whole_number(label):
    env = ranked_list(1)
    with pytest.raises(EnvError, match="label item is .*, not a whole number"):
        check_feedback(Feedback(done=True, labels={"item": label}), env.limits, 1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"labels": ("turn",)}, "env.extras.labels: 'turn' is taken"),
        ({"labels": ("a",), "token_labels": ("a",)}, "env.extras.token_labels: 'a' is taken"),
        ({"token_labels": "item"}, "env.extras.token_labels = 'item'; must be a tuple of names"),
    ],
)
def test_labels_have_names_of_their_own(names, message):
    with pytest.raises(UserError, match=message):
        check_env(ranked_list(1)._replace(extras=EnvExtras(**names)))


def test_a_problem_is_solved_in_one_group_and_foretold_in_the_other():
    env = foretell(passes=4)
    assert (env.extras.asks, env.extras.labels) == (2, ("predicted_tokens", "predicted_passes"))
    solved = answered(env, problem("42", ask=0), "42")
    assert (solved.reward, solved.success, solved.labels) == ((1.0,), True, {})
    prediction = "<tokens>9</tokens> <tokens>12</tokens> <passes>3</passes>"
    foretold = answered(env, problem("42", ask=1), prediction)
    assert foretold.labels == {"predicted_tokens": 12, "predicted_passes": 3}
    assert (foretold.reward, foretold.metrics) == ((0.0,), {"predictions_read": 1.0})
    none = answered(env, problem("42", ask=1), "<passes>5</passes> 42")
    assert none.labels == {"predicted_tokens": -1, "predicted_passes": -1}  # more than there are

    async def opened(ask):
        return (await env.init(problem("42", ask=ask), 0))[1].messages[0]["content"]

    assert asyncio.run(opened(0)) == "what"
    assert "how many of 4 attempts" in asyncio.run(opened(1))


def test_labels_become_ids_of_rows():
    segment = Segment(
        np.array([5, 6], np.int32),
        True,
        np.zeros(2, np.float32),
        np.zeros(2, np.int32),
        labels={"item": np.array([0, 1], np.int32)},
    )
    between = Segment(np.array([7], np.int32), False)
    opening = np.array([2], np.int32)
    row = Transcript(
        problem(""), 0, opening, (segment, between), StopReason.DONE, labels={"guess": 4}
    )
    bare = row._replace(member=1, labels={}, segments=(segment._replace(labels={}),))
    shape = RowShape(2, 1, 4, labels=("guess",), token_labels=("item",))
    ids = to_rollout([[row, bare]], shape).ids
    assert ids["guess"].tolist() == [[4, -1]]
    assert ids["item"].tolist() == [[[0, 1, -1, -1], [-1] * 4]]


def test_what_cannot_be_is_named():
    with pytest.raises(UserError, match="data.length = 0"):
        ranked_list(0)
    with pytest.raises(UserError, match="data.passes = 0"):
        foretell(passes=0)
    with pytest.raises(EnvError, match="a ranked list needs a list"):
        answered(ranked_list(2), problem(7), "x")
