"""Completions of a whole batch in one program, with decode slots that stay full.

Sequences take turns in the slots. A block of slots whose sequences have all ended hands its results
over and takes the next ones, whose prompt was prefilled once with all others. When the queue is
empty and slots fall idle, the live ones may move together into a smaller state, so that the last
long completions do not drag the ended ones along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jrl.errors import UserError
from jrl.mesh import constrain, divided, free_axes, lone_axes, platform
from jrl.sampling.cache import pick, put_prefixes, rows_of, take
from jrl.sampling.params import SamplingParams, at_most, per_row
from jrl.sampling.slots import Slots, check_fits, decode, pieces_of, prefill, sequence_keys, start
from jrl.types import Array, Cache, Network, Params, Rollout, RoutingRecord, StopReason

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
    *,
    network: Network,
    group: int,
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
      network: the policy.
      group: members drawn from the distribution.
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
    (n, p), g, t = prompt_tokens.shape, group + baseline_members, max_new_tokens
    check_fits(network, p, t)
    weights = network.prepare(params)
    axes, parts = independent_axes(network, n)
    if shrink is None:
        shrink = shrinking_pays(t, stop_tokens, alone=parts > 1 or not divided())
    sizes = slot_sizes(n // parts * g, g, slots, block, shrink=shrink)

    members, recorded = (group, baseline_members), network.extras.recorded
    if sizes.slots == n * g and not sizes.smaller:
        # All sequences at once, to the end: the same as below with nothing in between.
        sequences = sequences_of(
            key, weights, prompt_tokens, prompt_lengths, sampling_params, ids, members, network
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
            members=members,
            width=t,
            stop_tokens=stop_tokens,
            chunk=chunk,
        )
        own = (False, False, True, True, False, False, True)
        results, steps, of_prompts = each_by_itself(draw, axes, own)(
            key, weights, prompt_tokens, prompt_lengths, sampling_params, version, ids
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
    *,
    network: Network,
    sizes: SlotSizes,
    members: tuple[int, int],
    width: int,
    stop_tokens: Sequence[int],
    chunk: int,
) -> tuple[Results, Array, Array | None]:
    """Sequences through a queue and smaller states.

    Returns:
      The results, the slot-steps [1], and the record of the prompts' routing.
    """
    sequences = sequences_of(
        key, weights, prompt_tokens, prompt_lengths, sampling_params, ids, members, network
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
    queue = finish(queue, sequences, sizes, advance, recorded, chunk=chunk)
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


# ---------------------------------------------------------------- what is on its way


class Sequences(struct.PyTreeNode):
    """B sequences to draw, and where their prompts are.

    Attributes:
      prompts: the prompts' cache, N rows.
      prompt_lengths: [N] int32, tokens.
      last: [N] int32, the last token of each prompt.
      keys: [B] PRNG keys.
      sampling_params: scalars.
      warm: [B] bool, False for a row that is drawn greedily whatever the distribution says.
    """

    prompts: Cache
    prompt_lengths: Array
    last: Array
    keys: Array
    sampling_params: SamplingParams
    warm: Array


class Results(struct.PyTreeNode):
    """What came of B sequences.

    Attributes:
      tokens: [B, T] int32.
      logprobs: [B, T] float32, nats.
      lengths: [B] int32.
      stop: [B] int32, a ``StopReason``.
      experts: [B, C, n, k], where tokens were routed; None where the cache keeps no record of it.
    """

    tokens: Array
    logprobs: Array
    lengths: Array
    stop: Array
    experts: Array | None


class Queue(struct.PyTreeNode):
    """A batch on its way through the slots.

    Attributes:
      slots: S rows in blocks that share a prefix.
      index: [S] int32, the sequence in each slot.
      waiting: [] int32, the first sequence that has had no slot yet.
      results: of the sequences that left their slots.
      steps: [] int32, slot-steps so far: one for every slot in every decode step.
      extra: what ``advance`` keeps of all B sequences; None where it keeps nothing.
    """

    slots: Slots
    index: Array
    waiting: Array
    results: Results
    steps: Array
    extra: Any = None


def sequences_of(
    key: Array,
    weights: Any,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling_params: SamplingParams,
    ids: Array,
    members: tuple[int, int],
    network: Network,
) -> Sequences:
    """All members, sampled and greedy ones, of some prompts."""
    sampled, greedy = members
    return Sequences(
        prompts=prefill(weights, prompt_tokens, prompt_lengths, network=network),
        prompt_lengths=prompt_lengths,
        last=jnp.take_along_axis(prompt_tokens, prompt_lengths[:, None] - 1, axis=1)[:, 0],
        keys=sequence_keys(key, ids, sampled + greedy).reshape(-1),
        sampling_params=sampling_params.replace(greedy=sampling_params.greedy or greedy > 0),
        warm=jnp.tile(jnp.arange(sampled + greedy) < sampled, prompt_tokens.shape[0]),
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

    A CPU's time grows with the slots. Elsewhere a step takes as long as reading the weights does,
    however few slots there are, and programs are large already.

    Args:
      max_new_tokens: T.
      stop_tokens: ids that end a sequence.
      alone: whether each device draws by itself.
    """
    return bool(stop_tokens) and max_new_tokens >= SHRINK_TOKENS and alone and platform() == "cpu"


def smaller_sizes(slots: int) -> tuple[int, ...]:
    """The numbers of slots below ``slots`` of the smaller states: each about 3/4 of the one before.

    >>> smaller_sizes(32)
    (24, 16, 12, 8, 6, 4, 2)
    """
    powers = [2**i for i in range(slots.bit_length())]
    sizes = {s for power in powers for s in (power, power + power // 2) if s != 3}
    return tuple(sorted((s for s in sizes if _SMALLEST <= s < slots), reverse=True))


# ---------------------------------------------------------------- the queue

Advance = Callable[[Queue, Array | int, Array | int], Queue]
"""(queue, steps, until) -> the queue after ``decode`` of its slots."""
Recorded = Callable[[Any], Array] | None
"""What reads the record of routing in a cache's own arrays, ``NetworkExtras.recorded``."""


def _fresh(sequences: Sequences, index: Array) -> dict[str, Any]:
    """What the slots of these sequences begin with, by name."""
    prompt = index // (sequences.keys.shape[0] // sequences.last.shape[0])
    sampling_params = per_row(sequences.sampling_params, index.shape[0])
    return {
        "pending": sequences.last[prompt],
        "prompt_lengths": sequences.prompt_lengths[prompt],
        "lengths": jnp.zeros_like(index),
        "stop": jnp.full_like(index, StopReason.RUNNING),
        "keys": sequences.keys[index],
        "sampling_params": sampling_params.replace(
            temperature=jnp.where(sequences.warm[index], sampling_params.temperature, 0.0)
        ),
    }


def fill_slots(
    sequences: Sequences, sizes: SlotSizes, *, network: Network, weights: Any, width: int
) -> Queue:
    """The first sequences in their slots."""
    n, rows, s = sequences.last.shape[0], sequences.keys.shape[0], sizes.slots
    group, index = rows // n, jnp.arange(s, dtype=jnp.int32)
    fresh = _fresh(sequences, index)
    prompts, lengths = sequences.prompts, sequences.prompt_lengths
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
    # Where all start at once and none takes another's place, all stay at the same column.
    slots = slots.replace(prompt_lengths=fresh["prompt_lengths"], aligned=s == rows)
    arrays = slots.replace(cache=None, sampling_params=None, keys=None)
    arrays = jax.tree.map(_by_row, arrays)
    experts = None
    if (recorded := network.extras.recorded) is not None:
        shape = jax.eval_shape(recorded, empty.own)
        experts = _by_row(jnp.full((rows, *shape.shape[1:]), -1, shape.dtype))
    return Queue(
        slots=arrays.replace(cache=cache, sampling_params=slots.sampling_params, keys=slots.keys),
        index=index,
        waiting=jnp.int32(s),
        results=Results(
            tokens=_by_row(jnp.zeros((rows, width), jnp.int32)),
            logprobs=_by_row(jnp.zeros((rows, width), jnp.float32)),
            lengths=jnp.zeros(rows, jnp.int32),
            stop=jnp.zeros(rows, jnp.int32),
            experts=experts,
        ),
        steps=jnp.int32(0),
    )


def _by_row(x: Array) -> Array:
    return constrain(x, "batch", *(None,) * (x.ndim - 1))


def finish(
    queue: Queue,
    sequences: Sequences,
    sizes: SlotSizes,
    advance: Advance,
    recorded: Recorded,
    *,
    chunk: int,
) -> Queue:
    """The queue when every sequence is decoded and among its results."""
    rows, width = queue.results.tokens.shape
    first, *later = *sizes.smaller, 0  # the live slots at which a state is given up
    if sizes.slots == rows:
        queue = advance(queue, width, first)
    else:

        def chunked(queue: Queue) -> Queue:
            # While sequences wait, free slots are refilled after every few steps; at the end there
            # is nothing to refill, and the rest is one loop.
            waits = queue.waiting < rows
            steps, until = jnp.where(waits, chunk, width), jnp.where(waits, 0, first)
            return _refill(advance(queue, steps, until), sequences, sizes.block, recorded)

        def unfinished(queue: Queue) -> Array:
            running = jnp.sum(queue.slots.stop == StopReason.RUNNING)
            return (queue.waiting < rows) | (running > first)

        # As many rounds of full lengths as there would be if nothing ended early.
        with at_most(-(-rows // sizes.slots)):
            queue = jax.lax.while_loop(unfinished, chunked, queue)
    for size, until in zip(sizes.smaller, later, strict=True):
        queue = advance(_compact(queue, size, recorded), width, until)
    return _hand_over(queue, recorded)


def _hand_over(queue: Queue, recorded: Recorded, rows: Array | None = None) -> Queue:
    """The queue with what is in some slots, or all, written to their sequences' results."""
    slots, results = queue.slots, queue.results

    def put(out: Array, new: Array) -> Array:
        index = queue.index
        if rows is not None:
            index, new = index[rows], new[rows]
        return out.at[index].set(new, mode="drop")

    experts = results.experts
    if recorded is not None and experts is not None:
        own = slots.cache.own
        own = own if rows is None else jax.tree.map(lambda x: x[rows], own)
        index = queue.index if rows is None else queue.index[rows]
        experts = experts.at[index].set(recorded(own), mode="drop")
    return queue.replace(
        results=Results(
            tokens=put(results.tokens, slots.tokens),
            logprobs=put(results.logprobs, slots.logprobs),
            lengths=put(results.lengths, slots.lengths),
            stop=put(results.stop, slots.stop),
            experts=experts,
        )
    )


def _refill(queue: Queue, sequences: Sequences, block: int, recorded: Recorded) -> Queue:
    """The queue with the next sequences in the blocks of slots whose own have all ended."""
    rows = queue.results.tokens.shape[0]
    members = rows // sequences.last.shape[0]

    def ended(queue: Queue) -> Array:
        return (queue.slots.stop != StopReason.RUNNING).reshape(-1, block).all(axis=1)

    # One block at a time: a loop writes in place, where a branch would copy the cache.
    def refill_one(queue: Queue) -> Queue:
        free = jnp.argmax(ended(queue))[None]
        mine = free * block + jnp.arange(block)
        queue = _hand_over(queue, recorded, mine)
        index = queue.waiting + jnp.arange(block, dtype=jnp.int32)
        prompt = queue.waiting[None] // members
        lengths = sequences.prompt_lengths[prompt] - 1
        # Own columns are not cleared: a row sees none past its length.
        cache = put_prefixes(queue.slots.cache, free, rows_of(sequences.prompts, prompt), lengths)
        put = lambda old, x: old.at[mine].set(x)  # noqa: E731
        fresh = {
            name: jax.tree.map(put, getattr(queue.slots, name), x)
            for name, x in _fresh(sequences, index).items()
        }
        return queue.replace(
            slots=queue.slots.replace(cache=cache, **fresh),
            index=put(queue.index, index),
            waiting=queue.waiting + block,
        )

    more = lambda queue: jnp.any(ended(queue)) & (queue.waiting < rows)  # noqa: E731
    with at_most(queue.index.shape[0] // block):
        return jax.lax.while_loop(more, refill_one, queue)


def _compact(queue: Queue, size: int, recorded: Recorded) -> Queue:
    """The queue with its live slots, at most ``size``, in a state of that size."""
    queue = _hand_over(queue, recorded)
    live = jnp.argsort(queue.slots.stop != StopReason.RUNNING, stable=True)[:size]
    slots = pick(queue.slots.replace(cache=None), live)
    slots = slots.replace(cache=take(queue.slots.cache, live))
    return queue.replace(slots=slots, index=queue.index[live])
