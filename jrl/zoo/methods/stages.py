"""Methods that train in stages: other problems, longer completions, harder ones as steps pass.

A row's stage is its number in the column "stage" of the data, 0 where there is none: 0 for maths
and 1 for code, say. On a procedural task all problems are of stage 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.curriculum import (
    Curriculum,
    Outcome,
    Query,
    Selection,
    Table,
    put_rows,
    rows_in_turn,
)
from jrl.methods.definition import variant
from jrl.methods.domains import Count, Share, Tokens
from jrl.methods.group_relative import grpo
from jrl.objectives.aggregates import token_mean
from jrl.types import Array

State = dict[str, Array]
_NO_LIMIT = 2**30
"""Tokens: the run's own limit is lower."""


def first_state(table: Table) -> State:
    """The initial state: no problem used or solved, all left."""
    stage = table.columns.get("stage", jnp.zeros(table.rows))
    return {
        "stage": jnp.asarray(stage).astype(jnp.int32),
        "uses": jnp.zeros(table.rows, jnp.int32),
        "rate": jnp.zeros(table.rows, jnp.float32),
        "left": jnp.ones(table.rows, bool),
    }


def note_rates(state: State, outcome: Outcome) -> State:
    """The share of right members in each problem's last group."""
    return state | {"rate": put_rows(state["rate"], outcome, outcome.rate)}


def _of_stage(state: State, stage: Any) -> Array:
    """[rows] bool: of a stage, or of the last one that there is."""
    return state["stage"] == jnp.minimum(stage, state["stage"].max())


def stages(
    stage_of: Callable[[Array], Array], limit_of: Callable[[Array], Array], solved: float = 1.0
) -> Curriculum:
    """Problems of the step's stage, the least used first, with the step's limit of tokens.

    Args:
      stage_of: ([] int32, steps done) -> [] int32.
      limit_of: ([] int32, steps done) -> [] int32, the most tokens of a completion.
      solved: share of right members in a problem's last group from which on it is used only where
        too few others are left.
    """

    def choose(state: State, query: Query) -> tuple[Selection, State]:
        step = jnp.asarray(query.step, jnp.int32)
        hard = (state["rate"] < solved) | (state["uses"] == 0)
        of_stage = _of_stage(state, stage_of(step))
        # solved problems of the stage come before those of another one
        enough = (of_stage & hard & ~query.used).sum() >= query.tickets.shape[0]
        rows, uses = rows_in_turn(state["uses"], query, of_stage & (hard | ~enough))
        limit = jnp.full(rows.shape, limit_of(step), jnp.int32)
        return Selection(rows, limit=limit), state | {"uses": uses}

    return Curriculum(first_state, choose, note_rates)


def growing(first: int, every: int) -> Callable[[Array], Array]:
    """A limit of ``first`` tokens, and as many more after each ``every`` steps; none for 0."""

    def limit_of(step: Array) -> Array:
        if not first:
            return jnp.int32(_NO_LIMIT)
        return jnp.minimum(first * (1 + step // every), _NO_LIMIT).astype(jnp.int32)

    return limit_of


@variant(grpo)
def acereason(
    base: Method,
    code_from: Count = 1000,
    lengthen_steps: Count = 250,
    first_limit: Tokens = 8192,
    solved: Share = 0.75,
) -> Method:
    """GRPO on maths alone, then on code alone, with completions that may grow, and no KL.

    "AceReason-Nemotron: Advancing Math and Code Reasoning through Reinforcement Learning"
    (arXiv:2505.16400): rows of stage 0 (maths) for the first ``code_from`` steps, then rows of
    stage 1 (code, ``configs/code.toml``'s reward: all tests or nothing). The limit is
    ``first_limit`` tokens, as many more after each ``lengthen_steps``: 8K, 16K, 24K, 32K, up to
    ``sampling.max_new_tokens``. Problems that the policy solves (``solved`` of their last group)
    are left out while there are others. One update for each batch (``train.minibatches = 1``), the
    loss of GRPO with all tokens weighed alike. Not known: steps of a stage, and the share that
    makes a problem easy; departure: easy problems leave as they are met, not between stages.
    """
    limits = growing(first_limit, lengthen_steps)
    curriculum = stages(lambda step: (step >= code_from).astype(jnp.int32), limits, solved)
    return base.with_(curriculum=curriculum, aggregate=token_mean)


@variant(grpo)
def nemotron_cascade(
    base: Method,
    stage_steps: Count = 200,
    lengthen_steps: Count = 200,
    first_limit: Tokens = 0,
    solved: Share = 1.0,
) -> Method:
    """GRPO domain by domain: the rows of stage 0, then those of stage 1, and so on.

    Cascade RL of "Nemotron-Cascade: Scaling Cascaded Reinforcement Learning for General-Purpose
    Reasoning Models" (arXiv:2512.13607): preferences, instructions, maths, code and software, each
    for ``stage_steps`` steps and with its own verifier (``combine = "by_kind"``, or ``where`` in
    each reward's table); the last stage goes on to the end. Within a stage the limit starts with
    ``first_limit`` tokens and grows by as many each ``lengthen_steps``; 0 for the run's limit. One
    update for each batch, no KL, all tokens weighed alike; problems with ``solved`` of their last
    group right, all of it, teach nothing and are left out while there are others. Not known: steps
    of a stage and of a limit. Departures: one run and one optimiser, so the learning rate has one
    schedule; a limit and a rate for each stage are runs of their own that start from each other's
    checkpoints.
    """
    within = growing(first_limit, lengthen_steps)
    curriculum = stages(lambda step: step // stage_steps, lambda s: within(s % stage_steps), solved)
    return base.with_(curriculum=curriculum, aggregate=token_mean)


@variant(grpo)
def totrl(base: Method, stage_steps: Count = 100) -> Method:
    """GRPO on puzzles whose prompts ask for a tree of thoughts, first without thinking, then with.

    "ToTRL: Unlock LLM Tree-of-Thoughts Reasoning Potential through Puzzles Solving"
    (arXiv:2505.12717): rows of stage 0 ask for a tree of thoughts of a model whose thinking is
    off, those of stage 1, after ``stage_steps``, of one whose thinking is on.
    ``jrl.zoo.puzzle_rows`` writes such rows (``guidance = "tree"``); rewards are ``reasoning_gym``
    and ``format``. Not known: the paper's points, the steps of a stage and the estimator; here
    GRPO's, and a weighted sum of the rewards.
    """
    curriculum = stages(lambda step: step // stage_steps, growing(0, 1))
    return base.with_(curriculum=curriculum)


def hardest(state: State, share: float) -> Array:
    """[rows] bool: of the rows that are left the ``share`` with the lowest rates, rounded up.

    Where rates are equal the earlier rows stay.
    """
    order = jnp.argsort(jnp.where(state["left"], state["rate"], jnp.inf), stable=True)
    keep = jnp.ceil(share * state["left"].sum() - 1e-4).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    return state["left"] & (place < keep)


@variant(grpo)
def drive(
    base: Method,
    hard_from: Count = 500,
    phase_steps: Count = 50,
    keep: Share = 0.5,
    first_group: Count = 8,
    first_limit: Tokens = 24576,
) -> Method:
    """GRPO on all problems in small groups, then on ever fewer hard ones in large groups.

    "DRIVE: Data Curation Best Practices for Reinforcement Learning with Verifiable Reward in
    Competitive Code Generation" (arXiv:2511.06307): for ``hard_from`` steps rows of stage 0,
    ``first_group`` members of each and at most ``first_limit`` tokens. Then Pre-GRPO: rows of stage
    1, ``sampling.group`` members of each (64), and after each ``phase_steps`` only the share
    ``keep`` with the lowest pass rates is left. The reward is that of ``configs/code.toml``. Not
    known: the share, the length of a phase and that of the first stage. A problem's rate is that of
    its last group, 0 where it had none.
    """

    def choose(state: State, query: Query) -> tuple[Selection, State]:
        late = jnp.asarray(query.step) >= hard_from
        eligible = _of_stage(state, late.astype(jnp.int32)) & (state["left"] | ~late)
        rows, uses = rows_in_turn(state["uses"], query, eligible)
        count, limit = jnp.where(late, _NO_LIMIT, jnp.array([first_group, first_limit]))
        each = [jnp.full(rows.shape, x, jnp.int32) for x in (count, limit)]
        return Selection(rows, count=each[0], limit=each[1]), state | {"uses": uses}

    def update(state: State, outcome: Outcome) -> State:
        state = note_rates(state, outcome)
        done = jnp.asarray(outcome.step) + 1 - hard_from
        pool = state | {"left": state["left"] & _of_stage(state, 1)}
        ends = (done > 0) & (done % phase_steps == 0)
        return state | {"left": jnp.where(ends, hardest(pool, keep), state["left"])}

    return base.with_(curriculum=Curriculum(first_state, choose, update), aggregate=token_mean)
