"""Plans: which members a training step samples, in a first draw and in further rounds.

    asks = plan.first(asks, view)                 # the run's G members of N problems, and more
    while any(asks): asks = plan.next(groups, view)      # at most ``rounds`` times

A plan returns asks, records of arrays. Its bounds are static, the shapes of a compiled run; on the
host only what is asked for is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrl.methods.curriculum import unchanged
from jrl.train.asks import Ask, Asks
from jrl.types import Array, Params, TrainState


def same_version(step: Any) -> Any:
    """The version of what draws for a training step: that of the policy itself."""
    return step


class Policy(NamedTuple):
    """A policy that draws besides the one that is trained.

    Attributes:
      name: of its weights in a request.
      params: (train state) -> its tree.
      version: (training steps done) -> how many had been done when it was made.
    """

    name: str
    params: Callable[[TrainState], Params]
    version: Callable[[Any], Any] = same_version


class StepView(NamedTuple):
    """What a plan may read besides the groups.

    Attributes:
      step: [] int32, training steps done.
      round: 0 for ``Plan.first``, then the number of the round, from 1 on; [] int32, traced in a
        compiled run.
      key: of the step and the round; consumed.
      prompts: static, N.
      group: static, G.
      curriculum: the curriculum's state, to read.
      edits: the states of the edits, to read.
      tools: what the data offers: ``solutions(asks)`` and ``hints(groups, level, levels)``; see
        ``train.plan.Tools``.
    """

    step: Any
    round: Any
    key: Array
    prompts: int
    group: int
    curriculum: Any
    edits: tuple[Any, ...]
    tools: Any


def nothing(size: int) -> int:
    """0, a bound."""
    return 0


class Plan(NamedTuple):
    """Which members a training step samples.

    Attributes:
      first: (asks, view) -> asks. It is given one ask, G members of N tickets, and returns asks of
        these tickets.
      next: (groups so far, view) -> asks; None for no further rounds.
      rounds: the most calls of ``next``. A round that asks for nothing is the last.
      members: G -> the most members that ``next`` adds to a group, a static bound.
      prompts: N -> the most groups that ``next`` adds to the step, a static bound.
      policies: those that draw besides the policy.
    """

    first: Callable[[Asks, StepView], Asks] = unchanged
    next: Callable[[Any, StepView], Asks] | None = None
    rounds: int = 0
    members: Callable[[int], int] = nothing
    prompts: Callable[[int], int] = nothing
    policies: tuple[Policy, ...] = ()


# ---------------------------------------------------------------- pieces


def each(**how: Any) -> Callable[[Asks, StepView], Asks]:
    """A ``Plan.first`` that sets fields of the run's ask, such as ``tree``."""

    def first(asks: Asks, view: StepView) -> Asks:
        return tuple(ask.replace(**how) for ask in asks)

    return first


def also(asks: Asks, count: int, **how: Any) -> Ask:
    """``count`` further members of the run's tickets, numbered after those of all asks.

    Args:
      asks: of the step so far.
      count: members of each ticket.
      **how: further fields of ``Ask``.
    """
    base = asks[0]
    first = sum(ask.width for ask in asks)
    xp: Any = np if isinstance(base.ticket, np.ndarray) else jnp
    full = lambda x: xp.full(base.ticket.shape, x, np.int32)  # noqa: E731
    return Ask(base.ticket, base.row, first=full(first), count=full(count), width=count, **how)


def more(groups: Any, count: Any, width: int, **how: Any) -> Ask:
    """Further members of the groups so far, numbered after those that each has.

    Args:
      groups: ``train.groups.PlacedGroups``.
      count: [m] int, members of each, 0 for none.
      width: static, the most members.
      **how: further fields of ``Ask``.
    """
    count = jnp.where(groups.live(), jnp.asarray(count, jnp.int32), 0)
    return Ask(
        ticket=groups.ticket,
        row=groups.row,
        first=groups.next_number(),
        count=jnp.minimum(count, width),
        width=width,
        **how,
    )


def new(count: Any, entries: int, group: int, **how: Any) -> Ask:
    """``group`` members of new tickets, whose problems the curriculum chooses.

    Args:
      count: [] int, how many tickets; the rest of the entries ask for nothing.
      entries: static, the most tickets.
      group: static, members of each.
      **how: further fields of ``Ask``; with ``row`` the problems are these.
    """
    live = jnp.arange(entries) < count
    zeros = jnp.zeros(entries, jnp.int32)
    members = jnp.where(live, group, 0).astype(jnp.int32)
    return Ask(**{"ticket": None, "row": None, **how}, first=zeros, count=members, width=group)
