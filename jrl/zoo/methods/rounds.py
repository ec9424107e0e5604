"""Curricula that choose problems anew as a round of steps begins: tested ones, and written ones."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np

from jrl.methods.curriculum import Between, Curriculum, Outcome, Query, RoundTools, Selection, Table

State = dict[str, Any]


def in_order(rows: np.ndarray, query: Query) -> Selection:
    """The problems in some rows, in the data's own order."""
    assert query.order is not None, "a curriculum with a part between rounds runs on the host"
    row: Any = rows[query.order(query.tickets, len(rows))]
    return Selection(row)


# ---------------------------------------------------------------- problems that are mostly failed


def all_rows(table: Table) -> State:
    """Every problem."""
    return {"rows": np.arange(table.rows, dtype=np.int32)}


def choose_hard(state: State, query: Query) -> tuple[Selection, State]:
    """The round's problems in the data's own order."""
    return in_order(np.asarray(state["rows"]), query), state


def count_hard(state: State) -> dict[str, float]:
    """Number of problems in the round."""
    return {"hard_problems": float(len(state["rows"]))}


@dataclasses.dataclass(frozen=True)
class keep_failed:
    """A ``Between.run`` that tests the problems of the last round and leaves solved ones out.

    Where nothing is known of a problem it stays.

    Attributes:
      attempts: completions of each problem by which it is judged.
      most: share of them that may be successes.
      above: points; a completion with more is a success.
    """

    attempts: int
    most: float
    above: float

    def __call__(self, state: State, tools: RoundTools) -> State:
        """The state with the problems that are hard; as it was where there are none."""
        rows, log = np.asarray(state["rows"]), logging.getLogger("jrl")
        groups = tools.draw(rows, self.attempts)
        tested = np.asarray(groups.drawn() & groups.judged())
        right = tested & (np.asarray(groups.success()) > self.above)
        at = np.searchsorted(rows, np.asarray(groups.row))  # several groups where players have one
        total = [np.bincount(at, x.sum(axis=1), len(rows)) for x in (right, tested)]
        with np.errstate(invalid="ignore"):
            hard = rows[~(total[0] / total[1] > self.most)]
        if not len(hard):
            message = (
                "curriculum: none of %d problems is mostly failed; the round keeps all of them"
            )
            log.warning(message, len(rows))
            return state
        log.info("curriculum: %d of %d problems are hard", len(hard), len(rows))
        return {"rows": hard}


def hard_problems(steps: int, attempts: int, most: float, above: float) -> Curriculum:
    """The problems that are mostly failed as a round begins; no others are drawn in it.

    A problem that is left out is not tested again. Where all would be left out, the round has the
    problems of the last one.

    Args:
      steps: training steps of a round.
      attempts: completions of each problem by which it is judged.
      most: share of them that may be successes.
      above: points; a completion with more is a success.
    """
    run = keep_failed(attempts, most, above)
    between = Between(steps, run, count_hard, frozenset({"draw"}))
    return Curriculum(all_rows, choose_hard, between=between)


# ---------------------------------------------------------------- problems that are written


def none_failed(table: Table) -> State:
    """No problem failed, none written."""
    return {"failed": np.zeros(table.rows, bool), "data": np.int32(table.rows)}


def choose_any(state: State, query: Query) -> tuple[Selection, State]:
    """All problems, written ones too, in the data's own order."""
    return in_order(np.arange(len(state["failed"]), dtype=np.int32), query), state


def note_failed(state: State, outcome: Outcome) -> State:
    """The state with the problems whose newest group of the round had no reward at all."""
    failed, live = np.array(state["failed"]), np.asarray(outcome.live)
    lost = np.asarray(~(np.asarray(outcome.score) > 0).any(axis=1))
    failed[np.asarray(outcome.row)[live]] = lost[live]
    return {**state, "failed": failed}


def count_written(state: State) -> dict[str, float]:
    """Number of written problems."""
    return {"written_problems": float(len(state["failed"]) - state["data"])}


@dataclasses.dataclass(frozen=True)
class write_like_failed:
    """A ``Between.run`` that has problems written after those that the last round failed.

    Attributes:
      problems: how many are asked for.
      low: the least probability of success.
      high: the greatest.
    """

    problems: int
    low: float
    high: float

    def __call__(self, state: State, tools: RoundTools) -> State:
        """The state of a new round, the problems of use added."""
        log, rows = logging.getLogger("jrl"), np.flatnonzero(state["failed"])
        if not len(rows):
            log.info("curriculum: no problem was failed, and none is written")
        elif written := tools.write(rows, self.problems):
            logits = np.asarray(tools.estimate(written), np.float64)
            chances = (1 + np.tanh(logits / 2)) / 2  # the sigmoid, without overflow
            fits = [
                problem
                for problem, chance in zip(written, chances, strict=True)
                if self.low <= chance <= self.high
            ]
            tools.add(fits)
            message = "curriculum: %d problems written, %d neither hopeless nor easy"
            log.info(message, len(written), len(fits))
        return {**state, "failed": np.zeros(tools.rows, bool)}


def written_problems(steps: int, problems: int, low: float, high: float) -> Curriculum:
    """Problems that another model writes as a round begins, after those that were failed.

    They stand beside those of the data from then on, if the value network thinks them neither
    hopeless nor easy: its number, a logit, behind what the policy would see first.

    Args:
      steps: training steps of a round.
      problems: how many are asked for.
      low: the least probability of success.
      high: the greatest.
    """
    run = write_like_failed(problems, low, high)
    between = Between(steps, run, count_written, frozenset({"write", "estimate"}))
    return Curriculum(none_failed, choose_any, note_failed, between=between)
