"""Curricula: choice of a step's problems, as ``(init, choose, update)`` over arrays.

    state = curriculum.init(table)
    choice, state = curriculum.choose(state, query)     # before the step's groups are sampled
    state = curriculum.update(state, outcome)           # after the step, from all groups sampled

``choose`` and ``update`` are pure functions of arrays of fixed shapes, so they run on the host and
inside a compiled run alike. Choices come best first, and asked for fewer ``choose`` gives the same
first ones: a compiled run always asks for as many as a round may need.

Host work of a curriculum, such as testing problems or having some written, is its ``between``,
which runs at the start of a round of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.types import NOTHING, Array


class Table(NamedTuple):
    """The problems that a curriculum chooses from.

    A procedural task is a pool of problems: number i is made from key i.

    Attributes:
      rows: capacity; on the host some of them may still be empty.
      strata: how many levels or sources there are, at least 1.
      stratum: [rows] int32.
      columns: [rows] float32 by name, such as "difficulty".
    """

    rows: int
    strata: int
    stratum: Array
    columns: Mapping[str, Array] = NOTHING


class Query(struct.PyTreeNode):
    """A request for problems.

    Attributes:
      key: of the step and of the first ticket; consumed.
      tickets: [n] int32, consecutive.
      count: [] int32, how many of the n choices are used: the first ones.
      step: [] int32, training steps done.
      used: [rows] bool, chosen earlier in this step.
      order: static, (tickets [n], size) -> [n] int32 in [0, size): the data's own order of ``size``
        problems, epoch after epoch; on the host only, None in a compiled run.
    """

    key: Array
    tickets: Array
    count: Array
    step: Array
    used: Array
    order: Callable[[Any, int], Any] | None = struct.field(pytree_node=False, default=None)

    def live(self) -> Array:
        """[n] bool: choices that are used."""
        return jnp.arange(self.tickets.shape[0]) < self.count


class Selection(struct.PyTreeNode):
    """The problems that a curriculum chose, best first.

    Attributes:
      row: [n] int32.
      count: [n] int32, members of each group; None for the run's.
      limit: [n] int32, the most tokens of a completion; None for the run's.
      temperature: [n] float32; None for the run's.
      prior: [n] float32 by name, the curriculum's estimates of each; goes into ``Batch.prior``.
    """

    row: Array
    count: Array | None = None
    limit: Array | None = None
    temperature: Array | None = None
    prior: Mapping[str, Array] = struct.field(default_factory=dict)


class Outcome(struct.PyTreeNode):
    """Results of a step by problem: all groups sampled for training, dropped ones included.

    Attributes:
      step: [] int32, training steps done before this one.
      row: [m] int32.
      stratum: [m] int32.
      live: [m] bool, False for padding, and for groups of which no success is known.
      trained: [m] bool, whether the group was trained on.
      rate: [m] float32, mean success of the members.
      size: [m] float32, members; those whose success is not known are in neither.
      score: [m, M] float32, points; 0 for absent members.
      advantage: [m, M] float32, mean |advantage| of the member's tokens; 0 where not trained.
      prior: [m] float32 by name, as ``Selection`` gave it.
    """

    step: Array
    row: Array
    stratum: Array
    live: Array
    trained: Array
    rate: Array
    size: Array
    score: Array
    advantage: Array
    prior: Mapping[str, Array] = struct.field(default_factory=dict)


def unchanged(state: Any, *rest: Any) -> Any:
    """The first argument."""
    return state


class RoundTools(Protocol):
    """Host operations of a curriculum at the start of a round; problems are named by their rows."""

    @property
    def rows(self) -> int:
        """Number of problems, added ones included."""

    def draw(self, rows: np.ndarray, count: int) -> Any:
        """``count`` members of each problem, judged: ``collect.groups.PlacedGroups`` on host."""

    def write(self, rows: np.ndarray, count: int) -> list[Any]:
        """Problems that another model, asked for ``count``, writes after these; none if it fails.

        Those that cannot be used, or that the run has already, are left out.
        """

    def estimate(self, problems: list[Any]) -> np.ndarray:
        """[n] float, the value network's number for what the policy sees first; NaN if unknown."""

    def add(self, problems: list[Any]) -> None:
        """Appends problems, from row ``rows`` on."""


def no_counts(state: Any) -> dict[str, float]:
    """No counts."""
    return {}


class Between(NamedTuple):
    """The host part of a curriculum, run at the start of a round of steps.

    With it ``choose`` and ``update`` are not compiled: they may use NumPy, and the state's arrays
    may grow. A checkpoint holds the state and the problems that were added.

    Attributes:
      every: training steps of a round; the first round begins with the run.
      run: (state, tools) -> state, before the first step of the round draws.
      counts: state -> numbers by name, which every step of the round reports.
      uses: those of "draw", "write" and "estimate" that ``run`` calls.
    """

    every: int
    run: Callable[[Any, RoundTools], Any]
    counts: Callable[[Any], dict[str, float]] = no_counts
    uses: frozenset[str] = frozenset()


class Curriculum(NamedTuple):
    """The choice of a run's problems.

    Attributes:
      init: (table) -> state, arrays of fixed shapes.
      choose: (state, query) -> (choice, state).
      update: (state, outcome) -> state, once a training step.
      pool: rows of the table for a procedural task, whose problems are endless.
      between: host work at the start of a round of steps; None for none.
    """

    init: Callable[[Table], Any]
    choose: Callable[[Any, Query], tuple[Selection, Any]]
    update: Callable[[Any, Outcome], Any] = unchanged
    pool: int = 1024
    between: Between | None = None

    @property
    def uses(self) -> frozenset[str]:
        """Requirements of ``between`` on a run."""
        return frozenset() if self.between is None else self.between.uses


# ---------------------------------------------------------------- pieces


def top_rows(values: Array, query: Query) -> Array:
    """[n] int32: the unused rows with the greatest values, the greatest first.

    Args:
      values: [rows] float32; -inf excludes a row while any other is left.
      query: the request; rows in ``query.used`` come last.

    >>> query = Query(None, jnp.arange(2), 2, 0, jnp.array([False, True, False]))
    >>> top_rows(jnp.array([0.0, 9.0, 1.0]), query).tolist()
    [2, 0]
    """
    values = jnp.where(query.used, -jnp.inf, values)
    return jax.lax.top_k(values, query.tickets.shape[0])[1].astype(jnp.int32)


def rows_in_turn(uses: Array, query: Query, allowed: Array) -> tuple[Array, Array]:
    """The least used of the allowed rows, ties in an order that each step samples.

    Args:
      uses: [rows] int32, how often each was chosen.
      query: the request.
      allowed: [rows] bool; if there are too few, others follow.

    Returns:
      (rows [n] int32, uses afterwards).
    """
    order = jax.random.uniform(query.key, uses.shape)
    rows = top_rows(jnp.where(allowed, 0.0, -1e6) - uses + order, query)
    return rows, uses.at[rows].add(query.live().astype(uses.dtype))


def put_rows(values: Array, outcome: Outcome, new: Array) -> Array:
    """``values`` [rows] with ``new`` [m] at the rows of the outcome's live groups.

    A row that several groups of a step had gets the number of one of them.
    """
    at = jnp.where(outcome.live, outcome.row, values.shape[0])
    return values.at[at].set(new.astype(values.dtype), mode="drop")
