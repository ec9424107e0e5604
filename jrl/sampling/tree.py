"""Groups whose members branch off one another: a tree of completions, in one program.

Some members are drawn from the prompt; then, in rounds, others are forked from those that are there
and rewound to a token at which they are to part. The cache of the shared past is copied and never
computed again. All members are rows of one group, as long as whole completions; what a row did not
draw itself, its shared past, lies outside its mask. So each token drawn is trained once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError, choose
from jrl.sampling.cache import share
from jrl.sampling.generate import by_row, each_by_itself, independent_axes
from jrl.sampling.params import SamplingParams
from jrl.sampling.slots import (
    Measure,
    Slots,
    check_length,
    decode,
    fork,
    pieces_of,
    prefill,
    rewind,
    sequence_keys,
    start,
)
from jrl.types import Array, Branching, Network, Params, Rollout


def entropy(logprobs: Array) -> Array:
    """[S] float32, nats: the entropy of each row's distribution [S, V]; 0 where it is certain."""
    probs = jnp.exp(logprobs)
    return -jnp.sum(jnp.where(probs > 0, probs * logprobs, 0.0), axis=-1)


def closeness(logprobs: Array) -> Array:
    """[S] float32, 1 minus the difference between the two largest probabilities of each row."""
    top = jnp.exp(jax.lax.top_k(logprobs, 2)[0])
    return 1.0 - (top[:, 0] - top[:, 1])


PLACES: dict[str, Measure | None] = {
    "entropy": entropy,
    "gap": closeness,
    "surprise": None,
    "even": None,
}
"""``Branching.at`` -> what is measured of the distributions drawn from; None where nothing is."""


class Drawn(NamedTuple):
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


def check_branching(branching: Branching, group: int, slots: int = 0) -> Branching:
    """The same with the number of roots written out.

    Raises:
      UserError: names what does not fit, and what would.
    """
    if branching.at not in PLACES:
        raise choose("objective.tree", branching.at, PLACES)
    roots = branching.roots or -(-group // 2)
    if roots >= group:
        raise UserError(
            f"objective.tree_roots = {roots}: sampling.group = {group} leaves no member to branch"
            " off; lower tree_roots or raise sampling.group"
        )
    if (group - roots) % branching.rounds:
        raise UserError(
            f"objective.tree_rounds = {branching.rounds} does not divide the {group - roots} of"
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
    branching: Branching,
    group: int,
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    slots: int = 0,
) -> Drawn:
    """``group`` completions of each prompt that share beginnings: program 1 of an iteration.

    Args:
      key: consumed.
      params: the policy's.
      prompt_tokens: [N, P] int32, from column 0.
      prompt_lengths: [N] int32, 1 to P.
      sampling_params: scalars; the bias, if any, [V].
      version: [] int32, the policy's version.
      ids: [N] int32; a tree depends on (key, its prompt's id) and the prompt alone.
      network: the policy.
      branching: who leaves whom, and where.
      group: G.
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
    branching = check_branching(branching, group, slots)
    weights = network.prepare(params)
    axes, parts = independent_axes(network, n)
    grow = partial(
        _grow_in_turn,
        network=network,
        branching=branching,
        group=group,
        width=max_new_tokens,
        stop_tokens=stop_tokens,
        at_once=_trees_at_once(n // parts, group, slots),
    )
    own = (False, False, True, True, False, False, True)
    members, owner, steps = each_by_itself(grow, axes, own)(
        key, weights, prompt_tokens, prompt_lengths, sampling_params, version, ids
    )
    rollout = Rollout(
        prompt_tokens=prompt_tokens,
        prompt_lengths=prompt_lengths,
        tokens=members["tokens"],
        lengths=members["lengths"],
        mask=members["mask"],
        sampler_logprobs=members["logprobs"],
        versions=members["versions"],
        stop=members["stop"],
        baseline=jnp.zeros((n, group), bool),
    ).check()
    node = jax.vmap(nodes_of)(owner, rollout.lengths)
    return Drawn(rollout, steps.sum(), node)


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
    owner = jnp.where(live, owner, -1)
    same = jnp.expand_dims(owner, 0) == jnp.expand_dims(owner, 1)
    together = jnp.sum(same & live[None], axis=1)  # members that go through the token
    before = jnp.pad(together[:, :-1], ((0, 0), (1, 0)))
    own = live & (owner == jnp.arange(g)[:, None])
    begins = own & (together != before)  # somebody left, if only the member that this one left
    number = jnp.cumsum(begins.reshape(-1)).reshape(g, t)
    return jnp.where(live, jnp.take_along_axis(number, jnp.maximum(owner, 0), axis=0), 0).astype(
        jnp.int32
    )


def _trees_at_once(prompts: int, group: int, slots: int) -> int:
    """Trees grown at a time: as many as have slots, and divide the prompts."""
    most = prompts if not slots else max(slots // group, 1)
    return next(count for count in range(min(most, prompts), 0, -1) if prompts % count == 0)


def _grow_in_turn(
    key: Array,
    weights: Any,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    *,
    at_once: int,
    **how: Any,
) -> tuple[dict[str, Array], Array, Array]:
    """The trees of n prompts, some at a time: members by field, owners [n, G, T], steps [1]."""

    def some(prompts: tuple[Array, Array, Array]) -> tuple[dict[str, Array], Array, Array]:
        tokens, lengths, ids = prompts
        return _grow(key, weights, tokens, lengths, sampling_params, version, ids, **how)

    n = ids.shape[0]
    prompts = (prompt_tokens, prompt_lengths, ids)
    if at_once == n:
        members, owner, steps = some(prompts)
        return members, owner, steps[None]
    parts = jax.tree.map(lambda x: x.reshape(n // at_once, at_once, *x.shape[1:]), prompts)
    members, owner, steps = jax.lax.map(some, parts)
    members, owner = jax.tree.map(lambda x: x.reshape(n, *x.shape[2:]), (members, owner))
    return members, owner, steps.sum()[None]


def _grow(
    key: Array,
    weights: Any,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    *,
    network: Network,
    branching: Branching,
    group: int,
    width: int,
    stop_tokens: Sequence[int],
) -> tuple[dict[str, Array], Array, Array]:
    """The trees of n prompts side by side; see ``_grow_in_turn``."""
    n, roots = prompt_tokens.shape[0], branching.roots
    each, measure = (group - roots) // branching.rounds, PLACES[branching.at]
    keys = sequence_keys(key, ids, group)
    prompts = prefill(weights, prompt_tokens, prompt_lengths, network=network)
    last = jnp.take_along_axis(prompt_tokens, prompt_lengths[:, None] - 1, axis=1)[:, 0]
    draw = partial(
        decode,
        weights,
        version=version,
        network=network,
        steps=width,
        stop_tokens=stop_tokens,
        measure=measure,
    )

    def begin(count: int) -> Slots:
        """Slots for the first ``count`` members of every group."""
        cache = share(
            prompts,
            prompt_lengths - 1,
            count,
            network=network,
            weights=weights,
            length=width,
            pieces=pieces_of(width),
        )
        repeated = partial(jnp.repeat, repeats=count, axis=0)
        slots = start(
            cache,
            repeated(last)[:, None],
            jnp.ones(n * count, jnp.int32),
            keys[:, :count].reshape(-1),
            sampling_params,
            jnp.full(n * count, width, jnp.int32),
            max_new_tokens=width,
        )
        measured = None if measure is None else jnp.zeros((n * count, width), jnp.float32)
        slots = slots.replace(
            prompt_lengths=repeated(prompt_lengths), measured=measured, aligned=True
        )
        # New arrays are divided by rows like the cache, or each would be sent to all devices.
        arrays = slots.replace(cache=None, sampling_params=None, keys=None)
        return jax.tree.map(by_row, arrays).replace(
            cache=cache, sampling_params=slots.sampling_params, keys=slots.keys
        )

    first, count = draw(slots=begin(roots))
    tree = _put_members(begin(group).replace(aligned=False), first, n, 0)
    owner = jnp.broadcast_to(jnp.arange(group, dtype=jnp.int32)[None, :, None], (n, group, width))

    def one_round(number: Array, carry: tuple[Slots, Array, Array, Array]) -> Any:
        tree, owner, forks, steps = carry
        here = roots + number * each
        source, place, forks = _branches(tree, forks, here, branching, each, group)
        rows = (source + jnp.arange(n)[:, None] * group).reshape(-1)
        mine = jax.lax.dynamic_slice_in_dim(keys, here, each, axis=1).reshape(-1)
        new = fork(tree, rows, mine, within=True)
        new = rewind(new, place.reshape(-1), jnp.repeat(last, each))
        # What came before was drawn by another member, which is trained on it.
        new = new.replace(
            mask=jnp.zeros_like(new.mask),
            logprobs=jnp.zeros_like(new.logprobs),
            versions=jnp.full_like(new.versions, -1),
        )
        new, count = draw(slots=new)
        past = jnp.take_along_axis(owner, source[:, :, None], axis=1)
        whose = here + jnp.arange(each, dtype=jnp.int32)[None, :, None]
        whose = jnp.where(jnp.arange(width)[None, None] < place[:, :, None], past, whose)
        owner = jax.lax.dynamic_update_slice_in_dim(owner, whose, here, axis=1)
        return _put_members(tree, new, n, here), owner, forks, steps + count * (n * each)

    carry = (tree, owner, jnp.zeros((n, group), jnp.int32), count * (n * roots))
    tree, owner, _, steps = jax.lax.fori_loop(0, branching.rounds, one_round, carry)
    names = ("tokens", "lengths", "mask", "logprobs", "versions", "stop")
    members = {x: getattr(tree, x).reshape(n, group, *getattr(tree, x).shape[1:]) for x in names}
    return members, owner, steps


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
    own = jax.tree.map(put, tree.cache.own, new.cache.own)
    return tree.replace(cache=tree.cache.replace(own=own), **fields)


def _branches(
    tree: Slots, forks: Array, here: Array, branching: Branching, count: int, group: int
) -> tuple[Array, Array, Array]:
    """Which members are left at which of their own tokens, in one round.

    Each member that is there names its best places, and the best of all that are named are taken,
    no more of one member than an equal share rounded up.

    Args:
      tree: n * G rows, of which the first ``here`` of each group are there.
      forks: [n, G] int32, how often each member was left.
      here: [] int32.
      branching: says what a place is worth.
      count: k, branches of a group.
      group: G.

    Returns:
      Members [n, k] and places [n, k] int32, a place being the tokens that are shared, and the new
      ``forks``.
    """
    t = tree.tokens.shape[1]
    own = tree.mask.reshape(-1, group, t)
    most = min(-(-count // branching.roots), t)
    if branching.at == "even":
        values, places = _even_places(own, forks, most)
    else:
        numbers = -tree.logprobs if branching.at == "surprise" else tree.measured
        assert numbers is not None
        # The places that a member was left at before are the best ones; they count no more.
        worth = jnp.where(own, numbers.reshape(own.shape), -jnp.inf)
        most = min(most * branching.rounds, t)
        values, places = jax.lax.top_k(worth, most)
    rank = jnp.arange(most)[None, None]
    share = -(-count // here)
    if branching.at != "even":
        share = share + jnp.expand_dims(forks, 2)
        values = jnp.where(rank < jnp.expand_dims(forks, 2), -jnp.inf, values)
    values = jnp.where(rank < share, values, -jnp.inf)
    best, index = jax.lax.top_k(values.reshape(-1, group * most), count)
    source = index // most
    place = jnp.take_along_axis(places.reshape(-1, group * most), index, axis=1)
    left = best > branching.above
    place = jnp.where(left, place, 0).astype(jnp.int32)
    counted = jax.nn.one_hot(source, group, dtype=jnp.int32) * jnp.expand_dims(left, 2)
    return source.astype(jnp.int32), place, forks + counted.sum(axis=1)


def _even_places(own: Array, forks: Array, most: int) -> tuple[Array, Array]:
    """Values and places [n, G, most]: the middle, then the quarters of what each member drew.

    The longest stretches that are left are worth the most.
    """
    count = jnp.expand_dims(own.sum(axis=2), 2)
    number = jnp.expand_dims(forks, 2) + jnp.arange(most)[None, None]
    first = jnp.expand_dims(jnp.argmax(own, axis=2), 2)
    places = first + jnp.floor(count * jnp.asarray(_halves(own.shape[1] + most))[number])
    return jnp.where(count > 0, count / (number + 1), -jnp.inf), places.astype(jnp.int32)


def _halves(count: int) -> np.ndarray:
    """[count] float32 in (0, 1): the bits of 1, 2, 3, ... in reverse behind the binary point.

    >>> _halves(5).tolist()
    [0.5, 0.25, 0.75, 0.125, 0.625]
    """
    reverse = [int(f"{i:b}"[::-1], 2) / 2 ** i.bit_length() for i in range(1, count + 1)]
    return np.array(reverse, np.float32)
