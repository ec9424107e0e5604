"""The groups of a training step, from the first draw through the plan's rounds.

    groups, collected, counts = sample_step(draw, collected, now, setting, host_rounds)
    trained, collected, share = edited(groups, collected, now, setting)         # collect/edit.py
    collected = learned(curriculum, collected, outcome_of(groups, trained, ...))

The same functions run on the host and inside a compiled run; ``host_rounds`` samples what is asked
for, ``traced_rounds`` the bounds, in a loop of one program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.collect.contexts import in_common
from jrl.collect.groups import Origin, PlacedGroups, place, put_members, widened
from jrl.collect.members import numbers, uses
from jrl.collect.sources import added_counts
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.methods.curriculum import Query, Selection, Table, unchanged
from jrl.methods.plan import StepView
from jrl.methods.stores import HostStore
from jrl.types import Array, stream
from jrl.types.asks import Ask, Asks, Tokens, new_ask


class CollectState(struct.PyTreeNode):
    """State of the collector between steps, beside the ``TrainState``.

    The training step does not donate it. In a compiled run it goes through ``lax.scan`` and
    ``vmap``; on the host it is saved with each checkpoint.

    Attributes:
      cursor: [] int32, tickets issued.
      curriculum: the curriculum's state, arrays of fixed shapes.
      edits: the states of the method's edits; on the host their stores have no bounds.
      added: static, rows of the problems that the curriculum added; on the host alone.
    """

    cursor: Array
    curriculum: Any = ()
    edits: tuple[Any, ...] = ()
    added: tuple[Any, ...] = struct.field(pytree_node=False, default=())


class Tools(Protocol):
    """Tools of a kind of data for plans."""

    def solutions(self, asks: Asks, number: int | None = None) -> Tokens:
        """The data's solution of each entry of the first ask; solution ``number`` of several."""

    def hints(self, groups: PlacedGroups, level: Any, levels: int) -> Mapping[str, Any]:
        """Fields of an ask, [m] entries, that give hint number ``level`` of ``levels``."""

    def samples(self, groups: PlacedGroups) -> list[list[Any]]:
        """The members of groups as reward functions see them; for prompts in text only."""

    def contexts(self, questions: Sequence[str], most: int) -> tuple[Tokens, Any]:
        """(prompts of the plan's own questions, [n] bool: those that fit); for text only."""


def same_rows(tickets: Any) -> Any:
    """The order in which ticket i uses row i."""
    return tickets


class Setting(NamedTuple):
    """Constants of the collector over a run's steps.

    Attributes:
      method: its curriculum, plan, rewards and edits are used here.
      prompts: N.
      group: G.
      weights: [R] float32, of the reward parts.
      accuracy_column: of the reward part that defines success; None for the score.
      order: tickets [n] -> rows [n], the data's own order, without a curriculum; a ``Collector``
        takes that of its source.
      tools: (root key) -> tools of the data for plans; None without any.
      table: the problems, for a curriculum.
      contexts: whether asks may have contexts that are trained under, which takes a host.
      in_order: (tickets [n], size) -> [n] int32 in [0, size): the data's own order of ``size``
        problems, for a curriculum on the host; None if there is none.
    """

    method: Method
    prompts: int
    group: int
    weights: Any
    accuracy_column: int | None = None
    order: Callable[[Any], Any] = same_rows
    tools: Callable[[Any], Any] | None = None
    table: Table | None = None
    contexts: bool = False
    in_order: Callable[[Any, int], Any] | None = None


class StepKey(NamedTuple):
    """The step that groups are sampled for.

    Attributes:
      key: the run's root key.
      step: [] int32, training steps done.
    """

    key: Any
    step: Any


Draw = Callable[[Asks], Any]
"""Asks of the same tickets -> ``Groups``."""


class Drawn(NamedTuple):
    """Draws of a step so far.

    Attributes:
      groups: at their places.
      counts: of the draws, by name.
      collected: the collector's state after them.
      used: as in ``FirstAsks``.
    """

    groups: PlacedGroups
    counts: dict[str, Any]
    collected: CollectState
    used: Any


Rounds = Callable[[Draw, Drawn, Any, StepKey, Setting], tuple[Drawn, Any]]
"""(source, the first draw, the step's first ticket, step, constants) -> (all draws, [] float
rounds)."""


class FirstAsks(NamedTuple):
    """The first draw of a step.

    Attributes:
      asks: asks for the same N tickets.
      origin: tickets, rows and numbers of their members.
      collected: the collector's state after it.
      used: [rows] bool, problems chosen by a curriculum; None without one.
      order: [N] int, index of each ticket's group among the groups of asks with different tickets;
        None if all asks have the same tickets.
    """

    asks: Asks
    origin: Origin
    collected: CollectState
    used: Any
    order: Any = None


def first_asks(collected: CollectState, now: StepKey, setting: Setting) -> FirstAsks:
    """The first asks of a step."""
    plan, n = setting.method.plan, setting.prompts
    issued, after, used = issue(n, n, None, collected, now, setting)
    ask: Any = new_ask(issued.ticket, issued.choice.row, setting.group, tree=plan.tree)
    asks: Asks = (_as_chosen(ask, issued.choice),)
    if plan.first is not unchanged:
        asks = plan.first(asks, view_of(0, after, now, setting))
    order = None
    tickets: Any = [other.ticket for other in asks]
    if any(ticket.shape != ask.ticket.shape for ticket in tickets):  # on the host alone
        order = np.argsort(np.concatenate(tickets))
    places = asks if order is None else (ask,)
    origin = Origin(ask.ticket, ask.row, numbers(places), uses(places), np.int32(0), issued.prior)
    return FirstAsks(asks, origin, after, used, order)


def rest_of_step(
    first: FirstAsks,
    first_groups: Any,
    draw: Draw,
    base: Any,
    now: StepKey,
    setting: Setting,
    rounds: Rounds,
) -> tuple[PlacedGroups, CollectState, dict[str, Any]]:
    """The groups of a step at their places, before the edits.

    Args:
      first: asks of the first draw.
      first_groups: the source's groups for them.
      draw: the source, for this step.
      base: [] int32, the step's first ticket.
      now: the step.
      setting: of the run.
      rounds: ``host_rounds`` or ``traced_rounds``.

    Returns:
      (groups with the method's rewards, the collector's state, counts). With ``Plan.next`` places
      and columns are the bounds in a compiled run, and those asked for on the host.
    """
    groups = place(first_groups, first.origin, setting.weights, setting.accuracy_column)
    if setting.method.plan.next is None:
        view = view_of(0, first.collected, now, setting)
        return setting.method.rewards(groups, view), first.collected, first_groups.counts
    drawn = Drawn(groups, dict(first_groups.counts), first.collected, first.used)
    drawn, done = rounds(draw, drawn, base, now, setting)
    view = view_of(jnp.int32(done), drawn.collected, now, setting)
    groups = setting.method.rewards(drawn.groups, view)
    return groups, drawn.collected, drawn.counts | {"rounds": done + 1.0}


def sample_step(
    draw: Draw, collected: CollectState, now: StepKey, setting: Setting, rounds: Rounds
) -> tuple[PlacedGroups, CollectState, dict[str, Any]]:
    """``first_asks``, their draw, and ``rest_of_step``."""
    first = first_asks(collected, now, setting)
    groups, base = draw(first.asks), collected.cursor
    return rest_of_step(first, groups, draw, base, now, setting, rounds)


# ---------------------------------------------------------------- tickets


class Issued(NamedTuple):
    """New tickets and the problems chosen for them; ``prior`` by name, [n] float32."""

    ticket: Any
    choice: Selection
    prior: Mapping[str, Any]


def issue(
    entries: int, count: Any, used: Any, collected: CollectState, now: StepKey, setting: Setting
) -> tuple[Issued, CollectState, Any]:
    """The next tickets and the problems that the curriculum chooses for them.

    Args:
      entries: n, static.
      count: [] int, how many of them are used, the first ones.
      used: [rows] bool, chosen earlier in this step; None for none.
      collected: before.
      now: the step.
      setting: of the run.

    Returns:
      (tickets, the collector's state, rows used in this step).
    """
    curriculum = setting.method.curriculum
    xp: Any = np if isinstance(collected.cursor, int | np.integer | np.ndarray) else jnp
    tickets = (collected.cursor + xp.arange(entries)).astype(np.int32)
    after = collected.replace(cursor=xp.asarray(collected.cursor + count, np.int32))
    if curriculum is None:
        return Issued(tickets, Selection(setting.order(tickets)), {}), after, used
    assert setting.table is not None
    used = jnp.zeros(setting.table.rows, bool) if used is None else used
    key = jax.random.fold_in(stream(now.key, "curriculum", now.step), tickets[0])
    query = Query(key, tickets, jnp.int32(count), jnp.int32(now.step), used, setting.in_order)
    result = curriculum.choose(collected.curriculum, query)
    if not isinstance(result, tuple) or not isinstance(result[0], Selection):
        raise UserError(
            f"curriculum.choose returned {result!r:.60}; return (Selection(rows), state)"
        )
    choice, state = result
    # What was added between rounds has rows after those of the table.
    rows = setting.table.rows if curriculum.between is None else None
    _check_choice(choice, tickets.shape, count, rows)
    at = jnp.where(query.live(), choice.row, setting.table.rows)
    used = used.at[at].set(True, mode="drop")
    return Issued(tickets, choice, choice.prior), after.replace(curriculum=state), used


def _check_choice(choice: Selection, shape: tuple[int, ...], count: Any, size: int | None) -> None:
    """Raises UserError for rows that are no problems, and for numbers that are not one a row.

    Args:
      choice: returned by a curriculum.
      shape: of the tickets that it was asked for.
      count: how many of them are used.
      size: problems of the data; None where it is not known.
    """
    row = choice.row
    remedy = f"return {shape} int32, a problem for each ticket of the query"
    if np.shape(row) != shape:
        raise UserError(f"curriculum.choose returned rows of shape {np.shape(row)}; {remedy}")
    if not jnp.issubdtype(dtype := jnp.result_type(row), jnp.integer):
        raise UserError(f"curriculum.choose returned rows of {dtype}; {remedy}")
    # In a compiled run, whose problems are endless, the rows are not known here.
    traced = any(isinstance(x, jax.core.Tracer) for x in (row, count))
    if size is not None and not traced:
        used = np.asarray(row)[: int(count)]
        if len(wrong := used[(used < 0) | (used >= size)]):
            raise UserError(
                f"curriculum.choose returned row {wrong[0]}; rows are from 0 to {size - 1}"
            )
    if not isinstance(choice.prior, Mapping):
        raise UserError(
            f"curriculum.choose returned prior = {choice.prior!r:.40}; return arrays {shape} by"
            " name"
        )
    each = {name: getattr(choice, name) for name in ("count", "limit", "temperature")}
    each |= {f"prior[{name!r}]": x for name, x in choice.prior.items()}
    for name, x in each.items():
        if x is not None and np.shape(x) != shape:
            raise UserError(
                f"curriculum.choose returned {name} of shape {np.shape(x)}; return {shape}, one for"
                " each row"
            )


def _as_chosen(ask: Ask, choice: Selection) -> Ask:
    """The run's ask with the numbers that the curriculum chose."""
    chosen = {"count": choice.count, "limit": choice.limit, "temperature": choice.temperature}
    if choice.count is not None:
        chosen["count"] = jnp.minimum(choice.count, ask.width).astype(jnp.int32)
    return ask.replace(**{name: x for name, x in chosen.items() if x is not None})


def view_of(number: Any, collected: CollectState, now: StepKey, setting: Setting) -> StepView:
    """The view of a step that plans read."""
    key = jax.random.fold_in(stream(now.key, "plan", now.step), number)
    size = setting.prompts, setting.group
    states = collected.curriculum, collected.edits
    tools = None if setting.tools is None else setting.tools(now.key)
    return StepView(now.step, number, key, *size, *states, tools)


# ---------------------------------------------------------------- rounds


def requests(asks: Asks) -> list[Asks]:
    """The asks that can be drawn together: those of the same tickets."""
    together: list[Asks] = []
    for ask in asks:
        last = together[-1][0] if together else None
        if last is not None and ask.ticket is not None and ask.ticket is last.ticket:
            together[-1] = (*together[-1], ask)
        else:
            together.append((ask,))
    return together


def any_members(asks: Asks) -> Any:
    """[] bool: whether any members are asked for."""
    return jnp.any(jnp.stack([jnp.any(ask.count > 0) for ask in asks])) if asks else False


def _numbered(asks: Asks, drawn: Drawn, state: Any) -> tuple[Asks, Mapping[str, Any], Drawn]:
    """The asks of one request with tickets and rows, within the bounds of the plan.

    Returns:
      (asks, prior by name, the draws with the new tickets issued).
    """
    base, now, setting, columns = state
    plan, (ask, *others) = setting.method.plan, asks
    if ask.ticket is not None:
        room = [jnp.clip(columns - a.first, 0, a.count) for a in asks]
        bounded = [a.replace(count=x) for a, x in zip(asks, room, strict=True)]
        for a in bounded[1:]:
            assert a.ticket is ask.ticket
        return tuple(bounded), drawn.groups.prior, drawn
    assert not others, "asks for new tickets are drawn one by one"
    entries = ask.count.shape[0]
    number = jnp.cumsum(ask.count > 0) - 1
    left = setting.prompts + plan.prompts(setting.prompts) - (drawn.collected.cursor - base)
    live = (ask.count > 0) & (number < left)
    carried = drawn.used, drawn.collected
    issued, collected, used = issue(entries, live.sum(), *carried, now, setting)
    at = jnp.where(live, number, 0)
    ticket = jnp.where(live, jnp.asarray(issued.ticket)[at], -1)
    row = jnp.asarray(issued.choice.row)[at] if ask.row is None else ask.row
    ask = ask.replace(ticket=ticket, row=row, count=jnp.where(live, ask.count, 0))
    prior = {name: jnp.asarray(x)[at] for name, x in issued.prior.items()} | dict(ask.prior or {})
    return (ask.replace(prior=None),), prior, drawn._replace(collected=collected, used=used)


def _put(
    groups: PlacedGroups, sampled: Any, asks: Asks, prior: Any, number: Any, base: Any
) -> PlacedGroups:
    """The groups with the members that one request of a round sampled."""
    origin = Origin(asks[0].ticket, asks[0].row, numbers(asks), uses(asks), number, prior)
    new = place(sampled, origin, groups.weights, groups.accuracy_column)
    return put_members(groups, new, origin, base)


def traced_rounds(
    draw: Draw, drawn: Drawn, base: Any, now: StepKey, setting: Setting
) -> tuple[Drawn, Any]:
    """The plan's rounds in a compiled run: a loop whose body samples the bounds.

    Returns:
      (the draws, groups at the bounds; rounds [] float32).
    """
    plan: Any = setting.method.plan
    places, columns = bounds(drawn.groups, setting)
    state = base, now, setting, columns

    def one(carry: Any) -> Any:
        number, _, drawn = carry
        view = view_of(number, drawn.collected, now, setting)
        asks = plan.next(setting.method.rewards(drawn.groups, view), view)
        continues = any_members(asks)

        # A round that asks for nothing costs a test and no prefill; under ``vmap`` both are paid.
        def play_round(drawn: Drawn) -> Drawn:
            for part in requests(asks):
                part, prior, drawn = _numbered(part, drawn, state)
                sampled = draw(part)
                groups = _put(drawn.groups, sampled, part, prior, number, base)
                counts = {n: x + sampled.counts[n] for n, x in drawn.counts.items()}
                drawn = drawn._replace(groups=groups, counts=counts)
            return drawn

        after = jax.lax.cond(continues, play_round, lambda drawn: drawn, drawn)
        return number + continues, continues, after

    def more(carry: Any) -> Any:
        number, continues, _ = carry
        return continues & (number <= plan.rounds)

    # Weak types and NumPy scalars would change in the first turn of the loop.
    drawn = drawn._replace(groups=widened(drawn.groups, places, columns))
    first = jax.tree.map(_strong, (jnp.int32(1), jnp.bool_(True), drawn))
    number, _, drawn = jax.lax.while_loop(more, one, first)
    return drawn, (number - 1).astype(jnp.float32)


def _strong(x: Any) -> Any:
    """An array of its own dtype, as a loop carries it."""
    return jax.lax.convert_element_type(jnp.asarray(x), jnp.asarray(x).dtype)


def bounds(groups: PlacedGroups, setting: Setting) -> tuple[int, int]:
    """(places, columns) of a step's groups after all rounds, static."""
    plan, (m, size) = setting.method.plan, groups.use.shape
    return m + plan.prompts(setting.prompts), size + plan.members(setting.group)


def host_rounds(
    draw: Draw, drawn: Drawn, base: Any, now: StepKey, setting: Setting
) -> tuple[Drawn, Any]:
    """The plan's rounds on the host, where only the requested members are sampled.

    Returns:
      (the draws, rounds).
    """
    plan = setting.method.plan
    assert plan.next is not None
    groups, (_, columns) = jax.device_get(drawn.groups), bounds(drawn.groups, setting)
    # Also in a step without hints, so that all steps are one program.
    tokens = plan.tokens if setting.contexts else 0
    drawn = drawn._replace(groups=widened(groups, groups.use.shape[0], columns, tokens))
    state, again = (base, now, setting, columns), 0
    for number in range(1, plan.rounds + 1):
        view = view_of(number, drawn.collected, now, setting)
        asks = plan.next(setting.method.rewards(drawn.groups, view), view)
        if not asks or not bool(any_members(asks)):
            return _without(again, drawn), number - 1
        for part in requests(asks):
            names = part[0].ticket is None and part[0].row is not None
            part, prior, drawn = _numbered(part, drawn, state)
            part, prior = _live_entries(*jax.device_get((part, prior)))
            if not part[0].entries:
                continue
            sampled = jax.device_get(draw(part)._replace(subject=None))
            if names:
                again += int((np.asarray(part[0].count) > 0).sum())
            issued = int(np.asarray(drawn.collected.cursor)) - int(base)
            groups = widened(drawn.groups, max(issued, drawn.groups.use.shape[0]), columns)
            if part[0].keep and part[0].context is not None:
                groups, sampled = in_common(groups, sampled, part, int(base))
            groups = _put(groups, sampled, part, prior, np.int32(number), int(base))
            counts = added_counts(drawn.counts, sampled.counts)
            drawn = drawn._replace(groups=groups, counts=counts)
    return _without(again, drawn), plan.rounds


def _without(count: int, drawn: Drawn) -> Drawn:
    """The draws without the tickets of problems that the plan named.

    They are taken again in the next step: the data's order, which follows the tickets, would
    otherwise pass over as many problems.
    """
    cursor = np.asarray(drawn.collected.cursor - count, np.int32)
    return drawn._replace(collected=drawn.collected.replace(cursor=cursor))


def _live_entries(asks: Asks, prior: Mapping[str, Any]) -> tuple[Asks, dict[str, Any]]:
    """The entries with members, padded with empty ones to a power of two.

    Each other number of entries would be another compiled program.
    """
    count = np.stack([ask.count for ask in asks]).max(axis=0)
    live = np.flatnonzero(count > 0)
    if len(live) == 0:
        return tuple(jax.tree.map(lambda x: x[:0], ask) for ask in asks), {}
    size = min(1 << (len(live) - 1).bit_length(), len(count))
    rest = np.flatnonzero(count == 0)[: size - len(live)]
    rows = np.concatenate([live, rest])
    return (
        tuple(jax.tree.map(lambda x: np.asarray(x)[rows], ask) for ask in asks),
        {name: np.asarray(x)[rows] for name, x in prior.items()},
    )


def new_collected(setting: Setting, shapes: Any = None) -> CollectState:
    """The collector's initial state; ``shapes`` of a step's groups in a compiled run."""
    method = setting.method
    state: Any = ()
    if (curriculum := method.curriculum) is not None:
        assert setting.table is not None
        state = curriculum.init(setting.table)
    cursor: Any = np.int32(0) if shapes is None else jnp.int32(0)
    return CollectState(
        cursor, state, tuple(edit.init(shapes, setting.prompts) for edit in method.edits)
    )


# ---------------------------------------------------------------- in a checkpoint


def packed(collected: CollectState) -> dict[str, Any]:
    """Arrays by name: each leaf of the states under its number, stores with rows end to end."""
    leaves, _ = jax.tree.flatten(collected, is_leaf=_is_store)
    notes = {str(i): x.packed() if _is_store(x) else np.asarray(x) for i, x in enumerate(leaves)}
    return notes | ({"added": list(collected.added)} if collected.added else {})


def unpacked(like: CollectState, notes: Mapping[str, Any]) -> CollectState:
    """Inverse of ``packed``; ``like`` is the initial state of the run."""
    leaves, structure = jax.tree.flatten(like, is_leaf=_is_store)
    values = [notes[str(i)] for i in range(len(leaves))]
    restored = [_like(x, v) for x, v in zip(leaves, values, strict=True)]
    collected: CollectState = jax.tree.unflatten(structure, restored)
    return collected.replace(added=tuple(notes.get("added", ())))


def _like(x: Any, value: Any) -> Any:
    """A checkpoint's value, as the type of the initial one."""
    if _is_store(x):
        return x.unpacked(value)
    return jnp.asarray(value) if isinstance(x, jax.Array) else np.asarray(value)


def _is_store(x: Any) -> bool:
    return isinstance(x, HostStore)
