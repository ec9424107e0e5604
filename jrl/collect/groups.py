"""Groups of a training step at fixed places, for plans, reward edits and edits.

    groups = place(source_groups, origin, ...)        # the first draw
    groups = put_members(groups, more, origin, base)  # a further round
    batch = batch_of(groups)

A place is a ticket of the step and a column is a member's number, so a member's place does not
depend on the rounds, on the host and in a compiled run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding

from jrl.mesh import batch_sharding, replicated, spec
from jrl.types import (
    NOTHING,
    Array,
    Batch,
    Rollout,
    StopReason,
    opinions,
)
from jrl.types.asks import TRAIN

EMPTY = -1
"""The ticket of a place that no group has."""


class PlacedGroups(struct.PyTreeNode):
    """Groups of a step: m places for them, M for the members of each.

    Attributes:
      rollout: [m, M, ...]; absent members have stopped as ``StopReason.ABSENT``.
      rewards: [m, M, R] float32, points.
      weights: [R] float32, of the reward parts.
      ids: labels by name, [m], [m, M] or [m, M, T] int32; "prompt" [m] at least.
      stats: [m, M, T] float32 by name, recorded by an environment.
      prior: [m] float32 by name, estimates of the curriculum and of ``rewards`` for a group.
      ticket: [m] int32, ``EMPTY`` for a place without a group.
      row: [m] int32, the problem in the data.
      use: [m, M] int32, ``TRAIN``, ``BASELINE`` or ``ASIDE``.
      selected: [m, M] bool, False for members that an edit removed.
      round: [m, M] int32, the round of the plan that asked for the member; 0 for the first.
      accuracy_column: static, of the reward part that defines success; None for the score.
    """

    rollout: Rollout
    rewards: Array
    weights: Array
    ids: dict[str, Array]
    stats: dict[str, Array]
    prior: dict[str, Array]
    ticket: Array
    row: Array
    use: Array
    selected: Array
    round: Array
    accuracy_column: int | None = struct.field(pytree_node=False, default=None)

    def live(self) -> Array:
        """[m] bool: places that have a group."""
        return self.ticket != EMPTY

    def drawn(self) -> Array:
        """[m, M] bool: members sampled for training, those that an edit left out included."""
        return counted(self.rollout) & (self.use == TRAIN) & self.live()[:, None]

    def members(self) -> Array:
        """[m, M] bool: members that are trained on."""
        return self.drawn() & self.selected

    def score(self) -> Array:
        """[m, M] float32, points: the weighted sum of the reward parts."""
        return (self.rewards * self.weights[None, None]).sum(-1)

    def success(self) -> Array:
        """[m, M] float32: the reward part that defines success, or the score if there is none."""
        return (
            self.score()
            if self.accuracy_column is None
            else self.rewards[:, :, self.accuracy_column]
        )

    def judged(self) -> Array:
        """[m, M] bool: members whose success is known: the part that defines it has an opinion."""
        if self.accuracy_column is None:
            return jnp.ones(self.use.shape, bool)
        return opinions(self.rewards, self.ids)[:, :, self.accuracy_column]

    def sizes(self) -> Array:
        """[m] int32: members sampled for training."""
        return self.drawn().sum(axis=1)

    def rate(self) -> Array:
        """[m] float32: mean success of the members that were judged; 0 of a group without any."""
        sampled = self.drawn() & self.judged()
        total = jnp.where(sampled, self.success(), 0.0).sum(axis=1)
        return total / jnp.maximum(sampled.sum(axis=1), 1)

    def next_number(self) -> Array:
        """[m] int32: the number after that of the last member asked for."""
        present = self.rollout.stop != StopReason.ABSENT
        numbers = jnp.arange(1, self.use.shape[1] + 1, dtype=jnp.int32)
        return jnp.where(present, numbers, 0).max(axis=1)


def counted(rollout: Rollout) -> Any:
    """[N, G] bool: members that count in their group.

    They are neither greedy baselines, nor left out (ABORTED), nor did their environment fail.
    """
    left_out = (rollout.stop == StopReason.ABORTED) | (rollout.stop >= StopReason.FAILED)
    return ~rollout.baseline & ~left_out


class Origin(NamedTuple):
    """Tickets, rows and member numbers of sampled groups.

    Attributes:
      ticket: [A] int32, of each group drawn.
      row: [A] int32.
      number: [A, W] int32, of each member in its group; -1 where it is absent.
      use: [W] int32.
      round: [] int32.
      prior: [A] float32 by name.
    """

    ticket: Any
    row: Any
    number: Any
    use: Any
    round: Any
    prior: Mapping[str, Any]


def place(sampled: Any, origin: Origin, weights: Any, accuracy_column: int | None) -> PlacedGroups:
    """The groups of a first draw, a place for each and a column for each of their members.

    Args:
      sampled: a source's ``Groups`` of A tickets, or of A times the players.
      origin: of the A tickets.
      weights: [R] float32.
      accuracy_column: of the reward part that defines success; None for the score.
    """
    shape = sampled.rollout.lengths.shape
    players = shape[0] // origin.ticket.shape[0]
    xp: Any = np if isinstance(sampled.rollout.lengths, np.ndarray) else jnp
    each = lambda x: xp.repeat(xp.asarray(x), players, axis=0)  # noqa: E731
    use = xp.asarray(origin.use)
    if use.shape != shape[1:]:  # the data fix the members of a group
        use = xp.full(shape[1:], TRAIN, np.int32)
    return PlacedGroups(
        rollout=sampled.rollout,
        rewards=sampled.rewards,
        weights=weights,
        ids=dict(sampled.ids),
        stats=dict(sampled.stats or {}),
        prior={name: each(x) for name, x in origin.prior.items()},
        ticket=each(origin.ticket),
        row=each(origin.row),
        use=xp.broadcast_to(use[None], shape).astype(np.int32),
        selected=xp.ones(shape, bool),
        round=xp.zeros(shape, np.int32) + xp.asarray(origin.round, np.int32),
        accuracy_column=accuracy_column,
    )


def widened(groups: PlacedGroups, places: int, members: int, tokens: int = 0) -> PlacedGroups:
    """The groups with further empty places, members and columns of tokens.

    Args:
      groups: m of M members and T tokens.
      places: at least m.
      members: at least M.
      tokens: columns of tokens to add.
    """
    (m, size), t = groups.use.shape, groups.rollout.tokens.shape[2]
    if (places, members, tokens) == (m, size, 0):
        return groups
    xp: Any = np if isinstance(groups.use, np.ndarray) else jnp

    def pad(x: Any, fill: Any = 0, *, by_member: bool, by_token: bool = False) -> Any:
        edges = [(0, places - m)] + [(0, members - size)] * by_member + [(0, tokens)] * by_token
        edges += [(0, 0)] * (x.ndim - len(edges))
        return xp.pad(x, edges, constant_values=fill)

    def label(x: Any) -> Any:
        return pad(x, by_member=x.ndim > 1, by_token=x.ndim > 2 and x.shape[2] == t)

    rollout = groups.rollout
    by_token = {"tokens": 0, "mask": False, "sampler_logprobs": 0, "versions": -1}
    by_member = {"lengths": 0, "stop": int(StopReason.ABSENT), "baseline": False}
    wide = {n: pad(getattr(rollout, n), fill, by_member=True) for n, fill in by_member.items()}
    for n, fill in by_token.items():
        wide[n] = pad(getattr(rollout, n), fill, by_member=True, by_token=True)
    return groups.replace(
        rollout=rollout.replace(
            prompt_tokens=pad(rollout.prompt_tokens, by_member=False),
            prompt_lengths=pad(rollout.prompt_lengths, 1, by_member=False),
            routing=None,
            **wide,
        ),
        rewards=pad(groups.rewards, by_member=True),
        ids={n: label(x) for n, x in groups.ids.items()},
        stats={n: label(x) for n, x in groups.stats.items()},
        prior={n: pad(x, by_member=False) for n, x in groups.prior.items()},
        ticket=pad(groups.ticket, EMPTY, by_member=False),
        row=pad(groups.row, by_member=False),
        use=pad(groups.use, by_member=True),
        selected=pad(groups.selected, True, by_member=True),
        round=pad(groups.round, by_member=True),
    )


def put_members(groups: PlacedGroups, new: PlacedGroups, origin: Origin, base: Any) -> PlacedGroups:
    """The groups with the members of a further draw at their places.

    Args:
      groups: m places, M columns.
      new: A groups of W members, as ``place`` makes them.
      origin: their tickets and member numbers; members numbered -1 are left out.
      base: [] int32, the step's first ticket, which has place 0.
    """
    m, size = groups.use.shape
    present = origin.number >= 0
    # m is past the end, where nothing is written.
    at = jnp.where(present, (origin.ticket - base)[:, None], m)
    column = jnp.where(present, origin.number, size)
    group = jnp.where(present.any(axis=1), origin.ticket - base, m)

    def by_member(old: Any, x: Any) -> Any:
        x = _fitted(x, old.shape[2:])
        if isinstance(old, np.ndarray):
            old, inside = old.copy(), np.asarray((at < m) & (column < size))
            old[np.asarray(at)[inside], np.asarray(column)[inside]] = np.asarray(x)[inside]
            return old
        return old.at[at, column].set(x.astype(old.dtype), mode="drop")

    def by_group(old: Any, x: Any) -> Any:
        if isinstance(old, np.ndarray):
            old, inside = old.copy(), np.asarray(group < m)
            old[np.asarray(group)[inside]] = np.asarray(x)[inside]
            return old
        return old.at[group].set(x.astype(old.dtype), mode="drop")

    def label(old: Any, x: Any) -> Any:
        return by_group(old, x) if old.ndim == 1 else by_member(old, x)

    prompts = ("prompt_tokens", "prompt_lengths")
    members = ("tokens", "lengths", "mask", "sampler_logprobs", "versions", "stop", "baseline")
    put = {n: by_group(getattr(groups.rollout, n), getattr(new.rollout, n)) for n in prompts}
    put |= {n: by_member(getattr(groups.rollout, n), getattr(new.rollout, n)) for n in members}
    xp: Any = np if isinstance(groups.ticket, np.ndarray) else jnp
    none = {name: xp.zeros(m, np.float32) for name in new.prior if name not in groups.prior}
    return groups.replace(
        rollout=groups.rollout.replace(**put),
        rewards=by_member(groups.rewards, new.rewards),
        ids={n: label(x, new.ids[n]) for n, x in groups.ids.items()},
        stats={n: by_member(x, new.stats[n]) for n, x in groups.stats.items()},
        prior={
            n: by_group(x, new.prior[n]) if n in new.prior else x
            for n, x in (groups.prior | none).items()
        },
        ticket=by_group(groups.ticket, new.ticket),
        row=by_group(groups.row, new.row),
        use=by_member(groups.use, new.use),
        selected=by_member(groups.selected, new.selected),
        round=by_member(groups.round, new.round),
    )


def _fitted(x: Any, shape: tuple[int, ...]) -> Any:
    """Members' records [A, W, ...] with as many columns of tokens as ``shape`` has."""
    if x.ndim != 3 or x.shape[2:] == shape:
        return x
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, ((0, 0), (0, 0), (0, shape[0] - x.shape[2])))


def take(groups: PlacedGroups, places: Any) -> PlacedGroups:
    """The groups at some places, in this order."""
    weights = groups.weights
    picked = jax.tree.map(lambda x: x[places], groups.replace(weights=None))
    return picked.replace(weights=weights)


def to_batch(
    rollout: Rollout,
    rewards: Array,
    weights: Array,
    ids: Mapping[str, Array] = NOTHING,
    recorded: Mapping[str, Array] | None = None,
    members: Any = None,
    prior: Mapping[str, Array] = NOTHING,
    *,
    sampled: bool = True,
) -> Batch:
    """The batch of a training step; pure, so that compiled runs use it too.

    Args:
      rollout: from the sampler.
      rewards: [N, G, R] float32, points.
      weights: [R] float32.
      ids: of ``Groups``.
      recorded: ``Groups.stats``.
      members: [N, G] bool, those trained on; None for all that count in their group.
      prior: [N] float32 by name, a curriculum's estimates of each problem.
      sampled: False if no policy sampled the completions; then ``sampler_logprobs`` are left out.
    """
    stats = {"external": external(rollout).astype(np.float32), **(recorded or {})}
    if sampled:
        stats["sampler_logprobs"] = rollout.sampler_logprobs
    members = counted(rollout) if members is None else members
    return Batch(
        prompt_tokens=rollout.prompt_tokens,
        prompt_lengths=rollout.prompt_lengths,
        tokens=rollout.tokens,
        lengths=rollout.lengths,
        mask=rollout.mask & members[:, :, None],
        rewards=rewards,
        reward_weights=weights,
        members=members,
        baseline=rollout.baseline,
        truncated=(rollout.stop == StopReason.LENGTH) | (rollout.stop == StopReason.TURNS),
        stats=stats,
        ids=dict(ids),
        prior=dict(prior),
        routing=rollout.routing,
    )


def batch_of(groups: PlacedGroups, *, sampled: bool = True) -> Batch:
    """The batch of groups at their places; ``sampled`` as for ``to_batch``."""
    rows = groups.rollout, groups.rewards, groups.weights, groups.ids, groups.stats
    return to_batch(*rows, groups.members(), groups.prior, sampled=sampled)


def external(rollout: Rollout) -> Any:
    """[N, G, T] bool: trained tokens that no policy sampled."""
    return rollout.mask & (rollout.versions < 0)


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """The batch on the mesh, prompts divided over the data axes."""
    # A packing has an axis of microbatches before that of rows.
    packing = _place(batch.packing, NamedSharding(mesh, spec((None, "batch"))))
    batch = batch.replace(packing=None)
    weights = _place(batch.reward_weights, replicated(mesh))
    rows = _place(batch.replace(reward_weights=None), batch_sharding(mesh))
    return rows.replace(reward_weights=weights, packing=packing)


def _place(tree: Any, where: NamedSharding) -> Any:
    """Arrays put where they belong, without waiting for other processes."""
    if jax.process_count() == 1:
        return jax.device_put(tree, where)

    def put(x: Any) -> Array:
        if isinstance(x, jax.Array):
            return jax.device_put(x, where)
        # Every process holds the whole host array and puts its own shards.
        return jax.make_array_from_callback(x.shape, where, lambda part: x[part])

    return jax.tree.map(put, tree)
