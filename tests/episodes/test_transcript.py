"""From transcripts to rows: every id where it belongs, points where they are paid, failures out."""

from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.collect.groups import to_batch
from jrl.episodes.transcript import (
    RowShape,
    Segment,
    Transcript,
    conversation,
    rows_of_players,
    to_rollout,
    trained_once,
)
from jrl.errors import UserError
from jrl.methods.group_relative import grpo
from jrl.models.config import ModelConfig
from jrl.models.tokenizer import char_tokenizer
from jrl.models.transformer import transformer
from jrl.sampling.params import make_sampling_params
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.types import Prompt, StopReason

P, T, V = 6, 24, 48


def prompt(number=0):
    return Prompt(number, "", np.zeros(0, np.int32), None)


def sampled(ids, reward=(), version=3, **labels):
    ids = np.array(ids, np.int32)
    logprobs = -0.25 * (1 + np.arange(len(ids), dtype=np.float32))
    versions = np.full(len(ids), version, np.int32)
    return Segment(ids, True, logprobs, versions, reward=reward, **labels)


def outside(ids, **labels):
    return Segment(np.array(ids, np.int32), False, **labels)


def row(*segments, opening=(7, 8), stop=StopReason.DONE, member=0, **more):
    return Transcript(prompt(), member, np.array(opening, np.int32), segments, stop, **more)


def test_a_row_holds_every_segment_in_its_place():
    transcript = row(
        sampled([11, 12], reward=(0.5,), turn=0, state=4),
        outside([21, 22, 23]),
        sampled([13], reward=(2.0,), turn=1, step=1, state=9, version=5),
        episode=6,
        role=1,
    )
    rows = to_rollout([[transcript]], RowShape(1, P, T))
    rollout = rows.rollout.check()
    assert rollout.prompt_tokens[0, :2].tolist() == [7, 8]
    assert rollout.prompt_lengths.tolist() == [2]
    assert rollout.tokens[0, 0, :6].tolist() == [11, 12, 21, 22, 23, 13]
    assert rollout.lengths.tolist() == [[6]]
    assert rollout.mask[0, 0, :7].tolist() == [True, True, False, False, False, True, False]
    assert rollout.versions[0, 0, :7].tolist() == [3, 3, -1, -1, -1, 5, -1]
    assert rollout.sampler_logprobs[0, 0, :7].tolist() == [-0.25, -0.5, 0, 0, 0, -0.25, 0]
    assert rows.ids["turn"][0, 0, :6].tolist() == [0, 0, 0, 0, 0, 1]
    assert rows.ids["state"][0, 0, :6].tolist() == [4, 4, 0, 0, 0, 9]
    assert (rows.ids["episode"].tolist(), rows.ids["role"].tolist()) == ([[6]], [[1]])
    assert rows.paid[0, 0, :6].tolist() == [0, 0.5, 0, 0, 0, 2.0]
    assert rows.rewards.tolist() == [[[2.5]]]


segments = st.builds(
    lambda ids, mine, pay: sampled(ids, (pay,)) if mine else outside(ids),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([0.0, 1.0, -0.5]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(segments, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
)
def test_rows_are_openings_and_segments_end_to_end(members, tail):
    openings = [[5, 6, *tail[:j]] for j in range(len(members))]
    group = [
        row(*parts, opening=o, member=j)
        for j, (parts, o) in enumerate(zip(members, openings, strict=True))
    ]
    rows = to_rollout([group], RowShape(len(group), P, T))
    rollout = rows.rollout.check()
    start = rollout.prompt_tokens[0, : rollout.prompt_lengths[0]].tolist()
    for j, parts in enumerate(members):
        expected = [*openings[j], *(int(x) for part in parts for x in part.tokens)]
        ids = rollout.tokens[0, j, : rollout.lengths[0, j]].tolist()
        assert start + ids == expected
        mine = [int(x) for part in parts if part.drawn for x in part.tokens]
        assert rollout.tokens[0, j][rollout.mask[0, j]].tolist() == mine
        assert ((rollout.versions >= 0) == rollout.mask).all()
        assert rows.paid[0, j].sum() == pytest.approx(rows.rewards[0, j].sum())
        assert rows.rewards[0, j].sum() == pytest.approx(group[j].points)


def test_reasons_become_truncation_and_membership():
    reasons = [StopReason.DONE, StopReason.LENGTH, StopReason.TURNS, StopReason.FAILED]
    reasons += [StopReason.TIMEOUT]
    group = [row(sampled([1], (1.0,)), stop=r, member=i) for i, r in enumerate(reasons)]
    rows = to_rollout([group], RowShape(6, P, T))  # and one row that is not there
    batch = to_batch(rows.rollout, rows.rewards, np.ones(1, np.float32), rows.ids)
    assert batch.members.tolist() == [[True, True, True, False, False, False]]
    assert batch.truncated.tolist()[0][:3] == [False, True, True]
    assert batch.mask.sum() == 3


@cache
def updates():
    """(batch) -> parameters after a step of plain gradient descent, and before."""
    config = ModelConfig(
        vocab_size=V,
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=16,
        max_length=P + T,
    )
    network = transformer(config)
    params = network.init(jax.random.key(0))
    objective = grpo().objective
    common = {"network": network, "objective": objective, "optimizer": optax.sgd(1.0)}
    step = jax.jit(make_step(**common))
    state = init_state(jax.random.key(1), params, **common, value=None)
    return lambda batch: step(state, batch, make_sampling_params())[0].params["policy"]


def test_a_failed_member_changes_no_gradient():
    def updated(group, g):
        rows = to_rollout([group], RowShape(g, P, T))
        return updates()(to_batch(rows.rollout, rows.rewards, np.ones(1, np.float32), rows.ids))

    good = row(sampled([1, 2, 3], (1.0,)), outside([4]), sampled([5]))
    poor = row(sampled([9, 8], (0.25,)), member=1)
    fault = row(sampled([30, 31, 32]), opening=(7, 9), stop=StopReason.FAILED, member=2)
    expected = updated([good, poor], 2)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-6), updated([good, poor, fault], 3), expected
    )
    # As a reward of 0 it would have changed it.
    zero = updated([good, poor, fault._replace(opening=good.opening, stop=StopReason.DONE)], 3)
    gaps = jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), zero, expected))
    assert max(gaps) > 1e-3


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([row(sampled([1] * (T + 1)))], "rows are never cut"),
        ([row(sampled([1])), row(sampled([1]), opening=(8,))], "different first tokens"),
        ([row(sampled([1]), opening=range(P + 1))], "data.max_prompt_tokens"),
        ([row(sampled([1], (1.0, 2.0)))], "2 reward parts; the run has 1"),
        ([row(Segment(np.array([1]), True))], "without log-probabilities"),
        ([row(outside([], reward=(1.0,)))], "before the first token"),
        ([row()] * 3, "3 rows in a group; the batch holds 2"),
    ],
)
def test_what_does_not_fit_is_named(group, message):
    with pytest.raises(UserError, match=message):
        to_rollout([group], RowShape(2, P, T))


def said(role, content):
    return {"role": role, "content": content}


def talk(*turns):
    """A row of turns (player, words); the environment says "?" after each."""
    tokenizer, answer = char_tokenizer(), (said("user", "?"),)
    segments = []
    for number, (player, words) in enumerate(turns):
        segments.append(sampled(tokenizer.encode(words), turn=number, player=player))
        segments.append(outside(tokenizer.encode("?"), turn=number, messages=answer))
    return row(*segments)


def test_a_judge_reads_the_turns_that_another_member_is_trained_on():
    members = [talk((0, "ab"), (0, "c")), talk((0, "ab"), (0, "d"))]
    names = [[0, 1, 2, 3], [0, 1, 4, 5]]
    once, _ = trained_once(members, names, [True, True])
    assert [s.drawn for s in once[1].segments] == [False, False, True, False]
    assert [conversation(each, char_tokenizer()) for each in once] == [
        [said("assistant", "ab"), said("user", "?"), said("assistant", last), said("user", "?")]
        for last in "cd"
    ]


def test_a_judge_of_a_player_reads_what_the_others_said():
    (solver,), (critic,) = rows_of_players([[talk((0, "ab"), (1, "c"), (0, "d"))]], 2)
    for each, roles in ((solver, ("assistant", "user")), (critic, ("user", "assistant"))):
        words = conversation(each, char_tokenizer())
        assert words[::2] == [said(roles[i], x) for i, x in ((0, "ab"), (1, "c"), (0, "d"))]
        assert words[1::2] == 3 * [said("user", "?")]
