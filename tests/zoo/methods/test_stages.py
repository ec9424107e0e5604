"""Curricula of stages: which problems, how many members and how many tokens at which step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.methods.curriculum import Outcome, Query, Table
from jrl.train.batches import number_columns
from jrl.types import Prompt
from jrl.zoo.methods.stages import acereason, drive, hardest, nemotron_cascade, totrl

STAGE = np.array([0, 1, 0, 1, 2, 0, 1, 1], np.float32)


def table(columns=None):
    return Table(8, 1, jnp.zeros(8, jnp.int32), {"stage": STAGE} if columns is None else columns)


def chosen(curriculum, state, step, n=3):
    query = Query(jax.random.key(step), jnp.arange(n), jnp.int32(n), step, jnp.zeros(8, bool))
    return curriculum.choose(state, query)


def update(curriculum, state, step, rows, rates):
    rows, n = jnp.array(rows), len(rows)
    rate, ones, zeros = jnp.array(rates, jnp.float32), jnp.ones(n, bool), jnp.zeros((n, 4))
    outcome = Outcome(step, rows, rows * 0, ones, ones, rate, jnp.full(n, 4.0), zeros, zeros)
    return curriculum.update(state, outcome)


def test_acereason_has_maths_then_code_and_longer_completions():
    curriculum = acereason(code_from=4, lengthen_steps=2, first_limit=100).curriculum
    state = curriculum.init(table())
    for step, stage, limit in [(0, 0, 100), (1, 0, 100), (2, 0, 200), (4, 1, 300), (9, 1, 500)]:
        choice, state = chosen(curriculum, state, step)
        assert {int(STAGE[row]) for row in choice.row} == {stage}
        assert choice.limit.tolist() == [limit] * 3


def test_acereason_leaves_out_what_is_solved_while_there_are_others():
    curriculum = acereason(code_from=1, solved=0.75).curriculum
    state = curriculum.init(table())
    _, state = chosen(curriculum, state, 1, n=4)  # the four of code, each used once
    state = update(curriculum, state, 1, [1, 3], [0.75, 0.5])
    choice, _ = chosen(curriculum, state, 2)
    assert sorted(choice.row.tolist()) == [3, 6, 7]
    state = update(curriculum, state, 2, [6, 7], [1.0, 1.0])
    choice, _ = chosen(curriculum, state, 3)  # one is hard; solved ones of code before maths
    assert 3 in choice.row.tolist()
    assert {int(STAGE[row]) for row in choice.row} == {1}


def test_a_cascade_goes_through_all_stages_and_stays_in_the_last():
    curriculum = nemotron_cascade(stage_steps=2, first_limit=50, lengthen_steps=1).curriculum
    state = curriculum.init(table())
    for step, stage, limit in [(0, 0, 50), (1, 0, 100), (2, 1, 50), (4, 2, 50), (7, 2, 100)]:
        choice, state = chosen(curriculum, state, step, n=1)
        assert int(STAGE[choice.row[0]]) == stage
        assert choice.limit.tolist() == [limit]
    free = nemotron_cascade(stage_steps=2).curriculum
    assert chosen(free, free.init(table()), 0)[0].limit[0] > 10**6


def test_totrl_turns_thinking_on_after_the_first_stage():
    curriculum = totrl(stage_steps=3).curriculum
    state = curriculum.init(table())
    stages = [int(STAGE[chosen(curriculum, state, step, n=1)[0].row[0]]) for step in range(6)]
    assert stages == [0, 0, 0, 1, 1, 1]


def test_drive_keeps_the_hardest_half_in_each_phase():
    curriculum = drive(
        hard_from=2, phase_steps=2, keep=0.5, first_group=3, first_limit=9
    ).curriculum
    state = curriculum.init(table())
    choice, state = chosen(curriculum, state, 1)
    assert {int(STAGE[row]) for row in choice.row} == {0}
    assert (choice.count.tolist(), choice.limit.tolist()) == ([3] * 3, [9] * 3)
    choice, state = chosen(curriculum, state, 2, n=4)
    assert sorted(choice.row.tolist()) == [1, 3, 6, 7]
    assert min(choice.count.tolist() + choice.limit.tolist()) > 10**6
    state = update(curriculum, state, 2, [1, 3, 6, 7], [0.5, 0.25, 1.0, 0.0])
    assert np.asarray(state["left"]).all()  # the phase has not ended
    state = update(curriculum, state, 3, [6], [0.1])
    choice, state = chosen(curriculum, state, 4, n=2)
    assert sorted(choice.row.tolist()) == [6, 7]
    state = update(curriculum, update(curriculum, state, 4, [7], [0.2]), 5, [6], [0.1])
    assert chosen(curriculum, state, 6, n=1)[0].row.tolist() == [6]


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_the_hardest_are_the_lowest_rates_of_those_left(share):
    rng = np.random.default_rng(0)
    rate, left = rng.choice([0, 0.25, 0.5, 1], 20).astype(np.float32), rng.random(20) < 0.6
    keep = int(np.ceil(share * left.sum()))
    expected = sorted(np.flatnonzero(left), key=lambda i: rate[i])[:keep]
    selected = hardest({"rate": jnp.array(rate), "left": jnp.array(left)}, share)
    assert np.flatnonzero(selected).tolist() == sorted(expected)


def test_without_the_column_all_problems_are_of_one_stage():
    curriculum = nemotron_cascade(stage_steps=1).curriculum
    state = curriculum.init(table({}))
    rows = []
    for step in range(4):
        choice, state = chosen(curriculum, state, step, n=2)
        rows += choice.row.tolist()
    assert sorted(rows) == [*range(8)]  # each once before any is used again


def test_columns_of_numbers_are_those_that_all_rows_have():
    def prompt(**meta):
        return Prompt(0, "", np.zeros(1, np.int32), "", meta)

    rows = [prompt(stage=0, level=1.5, name="a", on=True), prompt(stage=2, level=None, name="b")]
    columns = number_columns(rows)
    assert {name: x.tolist() for name, x in columns.items()} == {"stage": [0.0, 2.0]}
    assert number_columns([]) == {}
    mixed = [prompt(stage="1"), prompt(), prompt(stage=""), prompt(stage=2)]  # of CSV and others
    assert number_columns(mixed)["stage"].tolist() == [1.0, 0.0, 0.0, 2.0]
    with pytest.raises(UserError, match="row 1: stage = 'first'; write a number"):
        number_columns([prompt(stage="first")])
