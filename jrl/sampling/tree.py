"""Groups whose members branch off one another: a tree of completions, in one program.

Some members are drawn from the prompt; then, in rounds, others are forked from those that are there
and rewound to a token at which they are to part. The cache of the shared past is copied and never
computed again. All members are rows of one group, as long as whole completions; what a row did not
draw itself, its shared past, lies outside its mask. So each token drawn is trained once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError, unknown_choice
from jrl.sampling.device_loop import as_rollout, by_row, first_slots, on_own_prompts
from jrl.sampling.params import SamplingParams
from jrl.sampling.places import PLACES, branches
from jrl.sampling.queue import Results
from jrl.sampling.sequences import (
    Prompts,
    SamplerInputs,
    Sequences,
    first_members,
    sequences_of,
)
from jrl.sampling.slots import Slots, check_length, decode, fork, rewind
from jrl.types import Array, Branching, Network, Params, Rollout


class TreeRollout(NamedTuple):
    """A rollout and the tree that it is.

    Attributes:
      rollout: N groups of G members.
      slot_steps: [] int32, slots in use, summed over decode steps.
      node: [N, G, T] int32, from 1 on: which node of its group's tree a token belongs to, a stretch
        of tokens that the same members go through; 0 past a completion's end.
    """

    rollout: Rollout
    slot_steps: Array
    node: Array


class TreeShape(NamedTuple):
    """Shape of every group's tree.

    Attributes:
      branching: who leaves whom, and where.
      group: G, members.
    """

    branching: Branching
    group: int

    @property
    def each(self) -> int:
        """Members that begin in one round."""
        return (self.group - self.branching.roots) // self.branching.rounds


def check_branching(branching: Branching, group: int, slots: int = 0) -> Branching:
    """The branching with its number of roots filled in.

    Raises:
      UserError: names what does not fit, and what would.
    """
    if branching.at not in PLACES:
        raise unknown_choice("tree.at", branching.at, PLACES)
    roots = branching.roots or -(-group // 2)
    if roots >= group:
        raise UserError(
            f"tree.roots = {roots}: sampling.group = {group} leaves no member to branch"
            " off; lower tree.roots or raise sampling.group"
        )
    if (group - roots) % branching.rounds:
        raise UserError(
            f"tree.rounds = {branching.rounds} does not divide the {group - roots} of"
            f" sampling.group = {group} members that {roots} roots leave; choose a number that does"
        )
    if 0 < slots < group:
        raise UserError(
            f"sampling.slots = {slots}: a tree of sampling.group = {group} members needs a slot for"
            f" each; raise sampling.slots to {group} or more, or lower sampling.group"
        )
    return branching._replace(roots=roots)


def generate_tree(
    key: Array,
    params: Params,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    *,
    network: Network,
    tree: TreeShape,
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    slots: int = 0,
) -> TreeRollout:
    """Completions of each prompt that share beginnings: program 1 of an iteration.

    Args:
      key: consumed.
      params: the policy's.
      prompt_tokens: [N, P] int32, from column 0.
      prompt_lengths: [N] int32, 1 to P.
      sampling_params: scalars; the bias, if any, [V].
      version: [] int32, the policy's version.
      ids: [N] int32; a tree depends on (key, its prompt's id) and the prompt alone.
      network: the policy.
      tree: of G members.
      max_new_tokens: T.
      stop_tokens: ids that end a sequence.
      slots: the most members alive at a time, so that ``slots // G`` trees are grown at a time, on
        each device where ``mesh.lone_axes`` divide the prompts; 0 for all.

    Returns:
      The tree. A token's mask is True, and its version and log-probability are set, in the one
      member that drew it; in members that left this one later it is part of the past.

    Raises:
      UserError: a tree that does not fit the group or the slots, or a completion the network.
    """
    chex.assert_rank([prompt_tokens, prompt_lengths, ids], [2, 1, 1])
    n, p = prompt_tokens.shape
    check_length(network, p, max_new_tokens)
    tree = tree._replace(branching=check_branching(*tree, slots))
    prompts = Prompts(prompt_tokens, prompt_lengths, ids, first_members(n, tree.group))

    def grow(parts: int) -> Callable[..., Any]:
        return partial(
            _grow_in_turn,
            network=network,
            tree=tree,
            width=max_new_tokens,
            stop_tokens=stop_tokens,
            at_once=_trees_at_once(n // parts, tree.group, slots),
        )

    inputs = SamplerInputs(key, params, prompts, sampling_params, version)
    results, mask, owner, steps = on_own_prompts(grow, inputs, network=network)
    rollout = as_rollout(results, prompts, version, sampled=mask)
    node = jax.vmap(nodes_of)(owner, rollout.lengths)
    return TreeRollout(rollout, steps.sum(), node)


def nodes_of(owner: Array, lengths: Array) -> Array:
    """The node that each token of ONE group belongs to, numbered from 1 on.

    Args:
      owner: [G, T] int32, which member drew the token.
      lengths: [G] int32, tokens.

    Returns:
      [G, T] int32, equal for two members as long as they share their past, and different before and
      after every token at which a member left; 0 past a completion's end.

    >>> owner = jnp.array([[0, 0, 0], [0, 1, 1]])
    >>> nodes_of(owner, jnp.array([3, 2])).tolist()
    [[1, 2, 2], [1, 3, 0]]
    """
    chex.assert_rank([owner, lengths], [2, 1])
    g, t = owner.shape
    live = jnp.arange(t)[None] < lengths[:, None]
    # Columns past the end of two members would otherwise count as shared.
    owner = jnp.where(live, owner, -1)
    same = jnp.expand_dims(owner, 0) == jnp.expand_dims(owner, 1)
    together = jnp.sum(same & live[None], axis=1)  # members that go through the token
    before = jnp.pad(together[:, :-1], ((0, 0), (1, 0)))
    owned = live & (owner == jnp.arange(g)[:, None])
    begins = owned & (together != before)  # somebody left, if only the member that this one left
    number = jnp.cumsum(begins.reshape(-1)).reshape(g, t)
    return jnp.where(live, jnp.take_along_axis(number, jnp.maximum(owner, 0), axis=0), 0).astype(
        jnp.int32
    )


def _trees_at_once(prompts: int, group: int, slots: int) -> int:
    """Trees grown at a time: as many as have slots, and divide the prompts."""
    most = prompts if not slots else max(slots // group, 1)
    # A divisor, since the loop over parts needs equal ones.
    return next(count for count in range(min(most, prompts), 0, -1) if prompts % count == 0)


_Trees = tuple[Results, Array, Array, Array]
"""The n * G members, which tokens each drew [n, G, T], who drew each [n, G, T], and slot-steps."""


def _grow_in_turn(inputs: SamplerInputs, *, at_once: int, **how: Any) -> _Trees:
    """The trees of n prompts, some at a time; steps are [1]."""

    def some(prompts: Prompts) -> _Trees:
        return _grow(inputs._replace(prompts=prompts), **how)

    n = inputs.prompts.ids.shape[0]
    if at_once == n:
        results, sampled, owner, steps = some(inputs.prompts)
        return results, sampled, owner, steps[None]
    # A loop over parts instead of a queue: the members of a tree leave one another in rounds, so
    # that none can give up its slot before the others have ended.
    split = lambda x: x.reshape(n // at_once, at_once, *x.shape[1:])  # noqa: E731
    *trees, steps = jax.lax.map(some, jax.tree.map(split, inputs.prompts))
    results, sampled, owner = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), trees)
    return results, sampled, owner, steps.sum()[None]


def _grow(
    inputs: SamplerInputs,
    *,
    network: Network,
    tree: TreeShape,
    width: int,
    stop_tokens: Sequence[int],
) -> _Trees:
    """The trees of n prompts side by side; steps are []."""
    weights, sequences = inputs.weights, sequences_of(inputs, network)
    (branching, group), each = tree, tree.each
    n, roots, measure = sequences.last.shape[0], branching.roots, PLACES[branching.at]
    draw = partial(
        decode,
        weights,
        version=inputs.version,
        network=network,
        steps=width,
        stop_tokens=stop_tokens,
        measure=measure,
    )

    def begin(count: int) -> Slots:
        """Slots for the first ``count`` members of every group, before their first token."""
        index = np.arange(n, dtype=np.int32)[:, None] * group + np.arange(count, dtype=np.int32)
        slots = first_slots(
            sequences, index.reshape(-1), count, network=network, weights=weights, width=width
        )
        measured = None if measure is None else by_row(jnp.zeros((n * count, width), jnp.float32))
        return slots.replace(measured=measured, aligned=True)

    def one_round(number: Array, carry: tuple[Slots, Array, Array, Array]) -> Any:
        grown, owner, forks, steps = carry
        present = roots + number * each
        source, place, forks = branches(grown, forks, present, branching, each, group)
        # Only the new members decode: those that are there have ended, and would idle in their
        # slots.
        new, count = draw(slots=_fork_members(grown, sequences, source, place, present))
        past = jnp.take_along_axis(owner, source[:, :, None], axis=1)
        owners = present + jnp.arange(each, dtype=jnp.int32)[None, :, None]
        owners = jnp.where(jnp.arange(width)[None, None] < place[:, :, None], past, owners)
        # Owners of the shared past are copied through every round, so a token keeps the member that
        # drew it even in a branch of a branch.
        owner = jax.lax.dynamic_update_slice_in_dim(owner, owners, present, axis=1)
        return _put_members(grown, new, n, present), owner, forks, steps + count * (n * each)

    first, count = draw(slots=begin(roots))
    # Room for all members from the start: a loop's state cannot grow.
    grown = _put_members(begin(group).replace(aligned=False), first, n, 0)
    owner = jnp.broadcast_to(jnp.arange(group, dtype=jnp.int32)[None, :, None], (n, group, width))
    carry = (grown, owner, jnp.zeros((n, group), jnp.int32), count * (n * roots))
    grown, owner, _, steps = jax.lax.fori_loop(0, branching.rounds, one_round, carry)
    results = Results(grown.tokens, grown.logprobs, grown.lengths, grown.stop, experts=None)
    return results, grown.mask.reshape(n, group, width), owner, steps


def _fork_members(
    tree: Slots, sequences: Sequences, source: Array, place: Array, first: Array
) -> Slots:
    """Slots of members that leave others, ready to decode.

    Args:
      tree: n * G rows.
      sequences: what all members begin with.
      source: [n, k] int32, the members that are left.
      place: [n, k] int32, tokens that are shared.
      first: [] int32, the number of the first new member.
    """
    n, count = source.shape
    all_keys = sequences.keys.reshape(n, -1)
    rows = source + jnp.arange(n)[:, None] * all_keys.shape[1]
    keys = jax.lax.dynamic_slice_in_dim(all_keys, first, count, axis=1)
    new = fork(tree, rows.reshape(-1), keys.reshape(-1), within=True)
    new = rewind(new, place.reshape(-1), jnp.repeat(sequences.last, count))
    # What came before was drawn by another member, which is trained on it.
    return new.replace(
        mask=jnp.zeros_like(new.mask),
        logprobs=jnp.zeros_like(new.logprobs),
        versions=jnp.full_like(new.versions, -1),
    )


def _put_members(tree: Slots, new: Slots, n: int, first: Array | int) -> Slots:
    """The tree of G rows a group with the members of ``new`` from number ``first`` on."""

    def put(old: Array, x: Array) -> Array:
        a, b = (y.reshape(n, y.shape[0] // n, *y.shape[1:]) for y in (old, x))
        return jax.lax.dynamic_update_slice_in_dim(a, b, first, axis=1).reshape(old.shape)

    # Keys, prompts and distributions are those that all members began with.
    names = ("pending", "lengths", "tokens", "mask", "logprobs", "versions", "stop")
    fields = {x: put(getattr(tree, x), getattr(new, x)) for x in names}
    if tree.measured is not None and new.measured is not None:
        fields["measured"] = put(tree.measured, new.measured)
    suffix = jax.tree.map(put, tree.cache.rows, new.cache.rows)
    return tree.replace(cache=tree.cache.replace(rows=suffix), **fields)
