"""Completions of a whole batch in one program, with decode slots that stay full.

Where sequences outnumber slots, or the last ones move into smaller states, they go through
``sampling.queue``; else one loop decodes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrl.errors import UserError
from jrl.mesh import constrain, divided, free_axes, lone_axes
from jrl.models.matmul import time_follows_rows
from jrl.sampling.cache import rows_of
from jrl.sampling.params import SamplingParams
from jrl.sampling.queue import Queue, Results, finish
from jrl.sampling.slots import (
    Members,
    Sequences,
    check_length,
    decode,
    fresh_rows,
    pieces_of,
    sequences_of,
    start,
)
from jrl.types import Array, Cache, Network, Params, Rollout, RoutingRecord

SHRINK_TOKENS = 256
"""Completions at least so long pay for smaller states, each the decode loop compiled once more: at
256 tokens they keep 87 % of slot-steps live, where half as many keep 71 %."""

_SMALLEST = 2


def generate(
    key: Array,
    params: Params,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    members: Members | None = None,
    *,
    network: Network,
    group: int = 0,
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    baseline_members: int = 0,
    slots: int = 0,
    block: int = 0,
    chunk: int = 4,
    shrink: bool | None = None,
) -> tuple[Rollout, Array]:
    """``group`` completions of each prompt: program 1 of an iteration.

    Args:
      key: consumed.
      params: the policy's.
      prompt_tokens: [N, P] int32, from column 0.
      prompt_lengths: [N] int32, 1 to P.
      sampling_params: scalars; the bias, if any, [V].
      version: [] int32, the policy's version.
      ids: [N] int32; a sequence's draws depend on (key, its prompt's id, its member) alone.
      members: [N, G], which members are drawn and how; None for numbers 0 to ``group`` - 1.
      network: the policy.
      group: members drawn from the distribution; not read with ``members``.
      max_new_tokens: T.
      stop_tokens: ids that end a sequence.
      baseline_members: further members drawn greedily, flagged in ``Rollout.baseline``.
      slots: S, sequences decoded at a time, by each device where ``mesh.lone_axes`` divide the
        prompts, else by all together; 0 takes all.
      block: members of a group that share one copy of their prompt's cache and leave their slots
        together; divides G = group + baseline_members. 0 is the whole group when all sequences
        have a slot, and 1 when they queue.
      chunk: decode steps between refills of free slots.
      shrink: whether the last live slots move into ever smaller states; None where it pays, see
        ``shrinking_pays``.

    Returns:
      The rollout, and the slot-steps it took, [] int32: slots in use, summed over decode steps.
      ``slot_use`` of the two is the share of slot-steps that drew a token.

    Raises:
      UserError: prompt and completion do not fit the network, or the slots no block.
    """
    chex.assert_rank([prompt_tokens, prompt_lengths, ids], [2, 1, 1])
    assert members is None or not baseline_members, "greedy members have temperature 0"
    group = group if members is None else members.number.shape[1]
    (n, p), g, t = prompt_tokens.shape, group + baseline_members, max_new_tokens
    if members is None or not members.fits:
        check_length(network, p, t)
    # Once: the loop over tokens would slice layers out of their stacks again for every token.
    weights = network.prepare(params)
    axes, parts = independent_axes(network, n)
    if shrink is None:
        shrink = shrinking_pays(t, stop_tokens, alone=parts > 1 or not divided())
    sizes = slot_sizes(n // parts * g, g, slots, block, shrink=shrink)

    if members is not None and members.limit is not None:
        members = members.replace(limit=jnp.minimum(members.limit, t))
    chosen = (group, baseline_members) if members is None else members
    recorded = network.extras.recorded
    if sizes.slots == n * g and not sizes.smaller:
        # A slot for each sequence, to the end. What a queue needs is not compiled then: results
        # apart from the slots, and one more decode loop for each smaller state.
        sequences = sequences_of(
            key, weights, prompt_tokens, prompt_lengths, sampling_params, ids, chosen, network
        )
        queue = fill_slots(sequences, sizes, network=network, weights=weights, width=t)
        rows, count = decode(
            weights, queue.slots, version, network=network, steps=t, stop_tokens=stop_tokens
        )
        experts = None if recorded is None else recorded(rows.cache.own)
        results = Results(rows.tokens, rows.logprobs, rows.lengths, rows.stop, experts)
        of_prompts = None if recorded is None else recorded(sequences.prompts.own)
        steps = count * sizes.slots
    else:
        draw = partial(
            _draw_in_turn,
            network=network,
            sizes=sizes,
            sampled=(group, baseline_members),
            width=t,
            stop_tokens=stop_tokens,
            chunk=chunk,
        )
        own = (False, False, True, True, False, False, True, True)
        results, steps, of_prompts = each_by_itself(draw, axes, own)(
            key, weights, prompt_tokens, prompt_lengths, sampling_params, version, ids, members
        )
    rollout = _as_rollout(results, prompt_tokens, prompt_lengths, version, group, g)
    if of_prompts is not None and results.experts is not None:
        rollout = with_routing(rollout, of_prompts, results.experts)
    return rollout, steps.sum()


def _draw_in_turn(
    key: Array,
    weights: Any,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    members: Members | None,
    *,
    network: Network,
    sizes: SlotSizes,
    sampled: tuple[int, int],
    width: int,
    stop_tokens: Sequence[int],
    chunk: int,
) -> tuple[Results, Array, Array | None]:
    """Sequences through a queue and smaller states.

    Returns:
      The results, the slot-steps [1], and the record of the prompts' routing.
    """
    chosen = sampled if members is None else members
    sequences = sequences_of(
        key, weights, prompt_tokens, prompt_lengths, sampling_params, ids, chosen, network
    )

    def advance(queue: Queue, steps: Array | int, until: Array | int) -> Queue:
        slots, count = decode(
            weights,
            queue.slots,
            version,
            network=network,
            steps=steps,
            stop_tokens=stop_tokens,
            until=until,
        )
        return queue.replace(slots=slots, steps=queue.steps + count * queue.index.shape[0])

    recorded = network.extras.recorded
    queue = fill_slots(sequences, sizes, network=network, weights=weights, width=width)
    queue = finish(
        queue,
        sequences,
        advance,
        recorded,
        block=sizes.block,
        smaller=sizes.smaller,
        chunk=chunk,
    )
    of_prompts = None if recorded is None else recorded(sequences.prompts.own)
    return queue.results, queue.steps[None], of_prompts


def _as_rollout(
    results: Results,
    prompt_tokens: Array,
    prompt_lengths: Array,
    version: Array,
    group: int,
    g: int,
) -> Rollout:
    """The record of N * G sequences."""
    n, t = prompt_tokens.shape[0], results.tokens.shape[1]
    lengths, stop = results.lengths.reshape(n, g), results.stop.reshape(n, g)
    # Past a sequence's end lies what its slot's last sequence wrote there.
    mask = jnp.arange(t)[None, None] < lengths[:, :, None]
    return Rollout(
        prompt_tokens=prompt_tokens,
        prompt_lengths=prompt_lengths,
        tokens=results.tokens.reshape(n, g, t),
        lengths=lengths,
        mask=mask,
        sampler_logprobs=jnp.where(mask, results.logprobs.reshape(n, g, t), 0.0),
        versions=jnp.where(mask, version, -1).astype(jnp.int32),
        stop=stop,
        baseline=jnp.broadcast_to(jnp.arange(g) >= group, (n, g)),
    ).check()


def with_routing(rollout: Rollout, prompts: Array, tokens: Array) -> Rollout:
    """The rollout with the record of its prompts [N, P, n, k] and completions [N * G, T, n, k]."""
    n, g, t = rollout.tokens.shape  # a cache may have more columns than were asked for
    tokens = tokens[:, :t].reshape(n, g, t, *tokens.shape[2:])
    prompts = prompts[:, : rollout.prompt_tokens.shape[1]]
    # Past a sequence's end is what its slot held before.
    tokens = jnp.where(rollout.mask[..., None, None], tokens, -1)
    return rollout.replace(routing=RoutingRecord(prompts, tokens))


def slot_use(rollout: Rollout, slot_steps: Array) -> Array:
    """[] float32: the share of slot-steps that drew a token; 1 where no slot ever idled."""
    return rollout.mask.sum() / jnp.maximum(slot_steps, 1)


# ---------------------------------------------------------------- over devices


def independent_axes(network: Network, prompts: int) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which each device samples by itself, and into how many parts they cut."""
    axes = lone_axes(network.extras.gathered)
    parts = math.prod(free_axes()[axis] for axis in axes)
    return (axes, parts) if prompts % parts == 0 else ((), 1)


def each_by_itself(
    sample: Callable[..., Any], axes: tuple[str, ...], own: Sequence[bool]
) -> Callable[..., Any]:
    """``sample`` run by each device along these axes on its own prompts, in its own time.

    ``own`` says which arguments have a row for each prompt; the others are whole on all devices.

    No device waits for another in the loop over tokens. Devices that must talk to each other go in
    step: backends may pair up all devices for that, and then wait for those that have finished.
    """
    if not axes:
        return sample
    return jax.shard_map(
        sample,
        in_specs=tuple(PartitionSpec(axes) if rows else PartitionSpec() for rows in own),
        out_specs=PartitionSpec(axes),
        check_vma=False,
    )


# ---------------------------------------------------------------- sizes


class SlotSizes(NamedTuple):
    """How many slots there are at first, in blocks of what size, and the sizes that follow."""

    slots: int
    block: int
    smaller: tuple[int, ...]


def slot_sizes(rows: int, group: int, slots: int, block: int, *, shrink: bool) -> SlotSizes:
    """The sizes for this many sequences.

    Raises:
      UserError: a block that does not divide the group, or that the slots do not hold.
    """
    slots = min(slots, rows) if slots else rows
    block = block or (group if slots == rows else 1)
    if group % block:
        raise UserError(f"block = {block} does not divide the {group} members of a group")
    if slots < block:
        raise UserError(f"slots = {slots} do not hold one block of {block} sequences")
    slots -= slots % block
    return SlotSizes(slots, block, smaller_sizes(slots) if shrink else ())


def shrinking_pays(max_new_tokens: int, stop_tokens: Sequence[int], *, alone: bool) -> bool:
    """Whether the last live slots should move into smaller states.

    Only where a step's time falls with the slots. Where it is the time of reading the weights,
    smaller states gain nothing, and each is the decode loop compiled once more.

    Args:
      max_new_tokens: T.
      stop_tokens: ids that end a sequence.
      alone: whether each device draws by itself.
    """
    long = bool(stop_tokens) and max_new_tokens >= SHRINK_TOKENS
    return long and alone and time_follows_rows()


def smaller_sizes(slots: int) -> tuple[int, ...]:
    """The numbers of slots below ``slots`` of the smaller states: each about 3/4 of the one before.

    >>> smaller_sizes(32)
    (24, 16, 12, 8, 6, 4, 2)
    """
    powers = [2**i for i in range(slots.bit_length())]
    sizes = {s for power in powers for s in (power, power + power // 2) if s != 3}
    return tuple(sorted((s for s in sizes if _SMALLEST <= s < slots), reverse=True))


# ---------------------------------------------------------------- the first sequences


def fill_slots(
    sequences: Sequences, sizes: SlotSizes, *, network: Network, weights: Any, width: int
) -> Queue:
    """The first sequences in their slots."""
    n, rows, s = sequences.last.shape[0], sequences.keys.shape[0], sizes.slots
    group, index = rows // n, jnp.arange(s, dtype=jnp.int32)
    fresh = fresh_rows(sequences, index)
    prompts, lengths = sequences.prompts, sequences.prompt_lengths
    # One prefix a block: its rows read the keys and values of their prompt together.
    if (s, sizes.block) != (rows, group):
        first = index[:: sizes.block] // group
        prompts, lengths = rows_of(prompts, first), lengths[first]
    empty = network.init_cache(s, width, weights, pieces_of(width))
    cache = Cache(empty.own, prompts.own, (lengths - 1).astype(jnp.int32))
    slots = start(
        cache,
        fresh["pending"][:, None],
        jnp.ones_like(index),
        fresh["keys"],
        fresh["sampling_params"],
        jnp.full(s, width, jnp.int32),
        max_new_tokens=width,
    )
    begun = {name: fresh[name] for name in ("prompt_lengths", "stop", "limits") if name in fresh}
    # Where all start at once and none takes another's place, all stay at the same column.
    slots = slots.replace(**begun, aligned=s == rows)
    # New arrays are divided by rows like the cache, or each would be sent to all devices.
    arrays = slots.replace(cache=None, sampling_params=None, keys=None)
    arrays = jax.tree.map(by_row, arrays)
    experts = None
    if (recorded := network.extras.recorded) is not None:
        shape = jax.eval_shape(recorded, empty.own)
        experts = by_row(jnp.full((rows, *shape.shape[1:]), -1, shape.dtype))
    return Queue(
        slots=arrays.replace(cache=cache, sampling_params=slots.sampling_params, keys=slots.keys),
        index=index,
        waiting=jnp.int32(s),
        results=Results(
            tokens=by_row(jnp.zeros((rows, width), jnp.int32)),
            logprobs=by_row(jnp.zeros((rows, width), jnp.float32)),
            lengths=jnp.zeros(rows, jnp.int32),
            stop=jnp.zeros(rows, jnp.int32),
            experts=experts,
        ),
        steps=jnp.int32(0),
    )


def by_row(x: Array) -> Array:
    """The array, its first axis divided over devices as a batch is."""
    return constrain(x, "batch", *(None,) * (x.ndim - 1))
