"""Plans: members that a training step samples, in a first draw and further rounds.

    asks = plan.first(asks, view)                 # the run's G members of N problems, and more
    while any(asks): asks = plan.next(groups, view)      # at most ``rounds`` times

A plan returns asks, records of arrays. Its bounds are static, the shapes of a compiled run; on the
host only what is asked for is sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.methods.curriculum import unchanged
from jrl.types import Array, Branching, Params, Search, TrainState
from jrl.types.asks import BASELINE, Ask, Asks, Tokens


def same_version(step: Any) -> Any:
    """The version of the weights that sample for a step: the policy's own."""
    return step


class DrawingPolicy(NamedTuple):
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
    """Context of a plan, besides the groups.

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
        ``collect.plan.Tools``.
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
    """The members that a training step samples.

    Attributes:
      first: (asks, view) -> asks. It is given one ask, G members of N tickets, and returns asks of
        these tickets.
      next: (groups so far, view) -> asks; None for no further rounds.
      rounds: the most calls of ``next``. A round that asks for nothing is the last.
      members: G -> the most members that ``next`` adds to a group, a static bound.
      prompts: N -> the most groups that ``next`` adds to the step, a static bound.
      tokens: by which completions get longer where contexts are trained under; what needs more is
        left out.
      policies: those that draw besides the policy.
      tree: how the members that the run asks for branch off one another, or are searched for.
      estimate: (the value network's number) -> points of a path that has not ended, by which a
        search goes, too; None to go by finished paths alone.
    """

    first: Callable[[Asks, StepView], Asks] = unchanged
    next: Callable[[Any, StepView], Asks] | None = None
    rounds: int = 0
    members: Callable[[int], int] = nothing
    prompts: Callable[[int], int] = nothing
    tokens: int = 0
    policies: tuple[DrawingPolicy, ...] = ()
    tree: Branching | Search | None = None
    estimate: Callable[[Array], Array] | None = None


# ---------------------------------------------------------------- pieces


def also(asks: Asks, count: int, **how: Any) -> Ask:
    """``count`` further members of the run's tickets, numbered after those of all asks.

    Args:
      asks: of the step so far.
      count: members of each ticket.
      **how: further fields of ``Ask``.
    """
    base: Any = asks[0]
    first = sum(ask.width for ask in asks)
    xp: Any = np if isinstance(base.ticket, np.ndarray) else jnp
    full = lambda x: xp.full(base.ticket.shape, x, np.int32)  # noqa: E731
    return Ask(base.ticket, base.row, first=full(first), count=full(count), width=count, **how)


def more(groups: Any, count: Any, width: int, **how: Any) -> Ask:
    """Further members of the groups so far, numbered after those that each has.

    Args:
      groups: ``collect.groups.PlacedGroups``.
      count: [m] int, members of each, 0 for none.
      width: static, the most members.
      **how: further fields of ``Ask``.
    """
    live = groups.live()
    if jnp.ndim(count) and jnp.shape(count) != live.shape:
        raise UserError(
            f"more: count has shape {jnp.shape(count)}; of {len(live)} groups it is {live.shape},"
            " the members that each gains"
        )
    if jnp.issubdtype(jnp.result_type(count), jnp.floating):
        raise UserError("more: count has fractions; round it, as jnp.round(count).astype(int)")
    count = jnp.where(live, jnp.asarray(count, jnp.int32), 0)
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


def greedy_baseline(asks: Asks, view: StepView) -> Asks:
    """A ``Plan.first`` that adds one greedy completion as a baseline, not trained on.

    The baseline of ReMax.
    """
    cold = asks[0].count * np.float32(0)
    return (*asks, also(asks, 1, temperature=cold, use=BASELINE))


@dataclasses.dataclass(frozen=True)
class demonstrated:
    """A ``Plan.first`` that adds the data's own solutions as members.

    Attributes:
      members: of each prompt, all alike.
      alone: whether the policy draws nothing, as for supervised methods.
      distinct: whether each member is another one of the prompt's solutions, which the data lists;
        the method then needs "several solutions".
    """

    members: int
    alone: bool = False
    distinct: bool = False

    def __call__(self, asks: Asks, view: StepView) -> Asks:
        """The asks with the demonstrations'."""
        if not self.members:
            return asks
        if self.distinct:
            for number in range(self.members):
                solution = view.tools.solutions(asks, number)
                asks = (*asks, also(asks, 1, prefix=solution, prefix_as="given"))
            return asks
        solutions = view.tools.solutions(asks)
        ask = also(asks, self.members, prefix=solutions, prefix_as="given")
        if not self.alone:
            return (*asks, ask)
        return (ask.replace(first=ask.first * 0),)


def stored_apart(asks: Asks, view: StepView) -> Asks:
    """A ``Plan.first`` that samples problems with stored completions without search.

    A completion from a store takes a member's place, and with a searched one the steps would be
    lost that others go through. The method's first edit is a replay by prompt.
    """
    (ask,) = asks
    if not view.edits or not isinstance(ask.tree, Search):
        return asks
    has_stored = view.edits[0].holds(view.tools.prompt_ids(ask.row))
    if not has_stored.any():
        return asks
    part = lambda rows: jax.tree.map(lambda x: x[rows], ask)  # noqa: E731
    alone = part(has_stored).replace(tree=None)
    return (alone,) if has_stored.all() else (part(~has_stored), alone)


class _DryTools:
    """Tools of a plan that is inspected, not run."""

    def solutions(self, asks: Asks, number: int | None = None) -> Tokens:
        """One token for each entry."""
        entries = asks[0].count.shape[0]
        return Tokens(np.zeros((entries, 1), np.int32), np.ones(entries, np.int32))


def dry_view() -> StepView:
    """A view to inspect ``Plan.first`` with, without a run."""
    return StepView(np.int32(0), 0, None, 1, 1, (), (), _DryTools())  # type: ignore[arg-type]
