"""Completions of a whole batch in one program, with decode slots that stay full.

Where sequences outnumber slots, or the last ones move into smaller states, they go through
``sampling.queue``; else one loop decodes all of them. Rows may take turns with an environment
(``envs.play``): a completion is a row of one turn.
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
from jrl.sampling.queue import CHUNK, Queue, Results, finish
from jrl.sampling.slots import (
    Sequences,
    check_length,
    decode,
    fresh_rows,
    pieces_of,
    sequences_of,
    start,
)
from jrl.types import Array, Cache, Network, Params, Rollout, RoutingRecord, StopReason

SHRINK_TOKENS = 256
"""Completions at least so long pay for smaller states, each the decode loop compiled once more: at
256 tokens they keep 87 % of slot-steps live, where half as many keep 71 %."""

_SMALLEST = 2


class Prompts(NamedTuple):
    """N prompts, and what belongs to each.

    Attributes:
      tokens: [N, P] int32, from column 0.
      lengths: [N] int32, 1 to P.
      state: of an environment, any pytree of arrays with N rows; None without one.
    """

    tokens: Array
    lengths: Array
    state: Any = None


class Turns(NamedTuple):
    """Rows that take several turns, each of which is answered.

    Attributes:
      begin: (queue, sequences, state of the prompts) -> the queue with ``extra`` for all rows.
      limits: (queue) -> [S] int32, completion tokens at which each row's turn ends.
      network: (queue, ``shared``) -> the network that samples the rows.
      answer: (weights, queue) -> the queue with every turn that ended answered, or its row over.
      log: (queue) -> what is returned of ``extra``, arrays with a row for each.
    """

    begin: Callable[[Queue, Sequences, Any], Queue]
    limits: Callable[[Queue], Array]
    network: Callable[[Queue, Any], Network]
    answer: Callable[[Any, Queue], Queue]
    log: Callable[[Queue], Any]


class Sampled(NamedTuple):
    """What came of N * G rows.

    Attributes:
      results: of the rows.
      slot_steps: [] int32, slots in use, summed over decode steps.
      routing: of the prompts, [N, P, n, k]; None where the cache keeps no record of it.
      log: of the turns; None without ``Turns``.
    """

    results: Results
    slot_steps: Array
    routing: Array | None
    log: Any


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
    chunk: int = CHUNK,
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
    check_length(network, prompt_tokens.shape[1], max_new_tokens)
    prompts = Prompts(prompt_tokens, prompt_lengths)
    sampled = sample_rows(
        key,
        params,
        prompts,
        sampling_params,
        version,
        ids,
        network=network,
        members=(group, baseline_members),
        width=max_new_tokens,
        stop_tokens=stop_tokens,
        slots=slots,
        block=block,
        chunk=chunk,
        shrink=shrink,
    )
    rollout = as_rollout(sampled.results, prompts, version, group, routing=sampled.routing)
    return rollout, sampled.slot_steps


def sample_rows(
    key: Array,
    params: Params,
    prompts: Prompts,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    shared: Any = None,
    *,
    network: Network,
    members: tuple[int, int],
    width: int,
    stop_tokens: Sequence[int],
    slots: int,
    block: int,
    chunk: int,
    shrink: bool | None,
    turns: Turns | None = None,
) -> Sampled:
    """The device loop: rows of all prompts through the slots, each with one turn or several.

    Arguments that are not named here are those of ``generate``.

    Args:
      key: consumed.
      params: the policy's.
      prompts: N of them.
      sampling_params: scalars.
      version: [] int32.
      ids: [N] int32.
      shared: given to ``turns.network``, a pytree of arrays.
      network: the policy.
      members: of a group, sampled and greedy ones.
      width: T.
      stop_tokens: ids that end a turn.
      slots: S.
      block: of slots.
      chunk: decode steps between refills, and after which turns that ended are answered.
      shrink: into smaller states.
      turns: None for rows that end with their first turn.
    """
    n = ids.shape[0]

    def run(parts: int) -> Callable[..., Any]:
        # Devices that draw by themselves have their own slots: sizes are those of one's part.
        pays = shrinking_pays(width, stop_tokens, alone=parts > 1 or not divided())
        sizes = slot_sizes(
            n // parts * sum(members),
            sum(members),
            slots,
            block,
            shrink=pays if shrink is None else shrink,
        )
        return partial(
            _sample_rows,
            network=network,
            sizes=sizes,
            members=members,
            width=width,
            stop_tokens=stop_tokens,
            chunk=chunk,
            turns=turns,
        )

    args = key, params, prompts, sampling_params, version, ids, shared
    results, steps, routing, log = on_own_prompts(run, *args, network=network)
    return Sampled(results, steps.sum(), routing, log)


def _sample_rows(
    key: Array,
    weights: Any,
    prompts: Prompts,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    shared: Any,
    *,
    network: Network,
    sizes: SlotSizes,
    members: tuple[int, int],
    width: int,
    stop_tokens: Sequence[int],
    chunk: int,
    turns: Turns | None,
) -> tuple[Results, Array, Array | None, Any]:
    """``sample_rows`` of one device's prompts.

    Returns:
      The results, the slot-steps [1], the record of the prompts' routing, and the turns' log.
    """
    tokens, lengths, state = prompts
    sequences = sequences_of(key, weights, tokens, lengths, sampling_params, ids, members, network)
    queue = fill_slots(sequences, sizes, network=network, weights=weights, width=width)
    draw = partial(decode, weights, version=version, stop_tokens=stop_tokens)
    recorded = network.extras.recorded
    routing = None if recorded is None else recorded(sequences.prompts.own)

    def one_turn(queue: Queue, steps: Array | int, until: Array | int) -> Queue:
        slots, count = draw(queue.slots, network=network, steps=steps, until=until)
        return queue.replace(slots=slots, steps=queue.steps + count * queue.index.shape[0])

    def all_turns(queue: Queue, steps: Array | int, until: Array | int) -> Queue:
        """As ``one_turn``, ``chunk`` steps at a time, with every turn that ends answered."""
        assert turns is not None

        def more(carry: tuple[Array, Queue]) -> Array:
            taken, queue = carry
            running = jnp.sum(queue.slots.stop == StopReason.RUNNING)
            return (taken < steps) & (running > until)

        def one(carry: tuple[Array, Queue]) -> tuple[Array, Queue]:
            taken, queue = carry
            limited = queue.slots.replace(limits=turns.limits(queue))
            slots, count = draw(limited, network=turns.network(queue, shared), steps=chunk)
            size = queue.index.shape[0]
            queue = queue.replace(slots=slots, steps=queue.steps + count * size)
            # A loop of one turn or none: it writes in place, where a branch would copy the cache.
            with jax.named_scope("answers"):
                answer = partial(turns.answer, weights)
                queue = jax.lax.while_loop(lambda q: jnp.any(turn_ended(q)), answer, queue)
            return taken + count, queue

        with jax.named_scope("turns"):
            return jax.lax.while_loop(more, one, (jnp.int32(0), queue))[1]

    if turns is None and sizes.slots == sequences.keys.shape[0] and not sizes.smaller:
        # A slot for each sequence, to the end. What a queue needs is not compiled then: results
        # apart from the slots, and one more decode loop for each smaller state.
        rows, count = draw(queue.slots, network=network, steps=width)
        experts = None if recorded is None else recorded(rows.cache.own)
        results = Results(rows.tokens, rows.logprobs, rows.lengths, rows.stop, experts)
        return results, (count * sizes.slots)[None], routing, None
    if turns is not None:
        queue = turns.begin(queue, sequences, state)
    # Prompts were computed for all sequences before: a prompt whose members wait is not read twice.
    queue = finish(
        queue,
        sequences,
        one_turn if turns is None else all_turns,
        recorded,
        block=sizes.block,
        smaller=sizes.smaller,
        chunk=chunk,
    )
    log = None if turns is None else turns.log(queue)
    return queue.results, queue.steps[None], routing, log


def turn_ended(queue: Queue) -> Array:
    """[S] bool: rows whose turn is over and not answered yet."""
    stop = queue.slots.stop
    return (stop == StopReason.STOP_TOKEN) | (stop == StopReason.LENGTH)


def as_rollout(
    results: Results,
    prompts: Prompts,
    version: Array,
    group: int,
    *,
    drawn: Array | None = None,
    routing: Array | None = None,
) -> Rollout:
    """The record of N * G rows.

    Args:
      results: of the rows.
      prompts: N of them.
      version: [] int32, of the policy.
      group: sampled members; those after them are greedy.
      drawn: [N, G, T] bool, tokens that the row itself sampled; None for all.
      routing: of the prompts, [N, P, n, k]; None for no record.
    """
    n, t = prompts.tokens.shape[0], results.tokens.shape[1]
    g = results.tokens.shape[0] // n
    lengths, stop = results.lengths.reshape(n, g), results.stop.reshape(n, g)
    # Past a sequence's end lies what its slot's last sequence wrote there.
    mask = jnp.arange(t)[None, None] < lengths[:, :, None]
    mask = mask if drawn is None else mask & drawn
    rollout = Rollout(
        prompt_tokens=prompts.tokens,
        prompt_lengths=prompts.lengths,
        tokens=results.tokens.reshape(n, g, t),
        lengths=lengths,
        mask=mask,
        sampler_logprobs=jnp.where(mask, results.logprobs.reshape(n, g, t), 0.0),
        versions=jnp.where(mask, version, -1).astype(jnp.int32),
        stop=stop,
        baseline=jnp.broadcast_to(jnp.arange(g) >= group, (n, g)),
    ).check()
    if routing is None or results.experts is None:
        return rollout
    return with_routing(rollout, routing, results.experts)


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


def on_own_prompts(
    run: Callable[[int], Callable[..., Any]],
    key: Array,
    params: Params,
    prompts: Prompts,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    shared: Any = None,
    *,
    network: Network,
) -> Any:
    """A sampler's output, run by each device on its own prompts where the mesh allows that.

    No device waits for another in the loop over tokens then. Devices that must talk to each other
    go in step: backends may pair up all devices for that, and wait for those that have finished.

    Args:
      run: (parts into which the prompts are cut) -> the sampler of one part, which takes the other
        arguments, ``params`` prepared, and returns arrays with a row for each of its own.
      key: the same for all.
      params: the policy's.
      prompts: N of them.
      sampling_params: scalars.
      version: [] int32.
      ids: [N] int32.
      shared: any other arrays, the same for all.
      network: the policy.
    """
    # Once: the loop over tokens would slice layers out of their stacks again for every token.
    weights = network.prepare(params)
    axes = lone_axes(network.extras.gathered)
    parts = math.prod(free_axes()[axis] for axis in axes)
    # Parts of unequal size would be programs of unequal shapes: then all devices go in step.
    if ids.shape[0] % parts:
        axes, parts = (), 1
    sampler, args = run(parts), (key, weights, prompts, sampling_params, version, ids, shared)
    if not axes:
        return sampler(*args)
    whole, own = PartitionSpec(), PartitionSpec(axes)
    return jax.shard_map(
        sampler,
        in_specs=(whole, whole, own, whole, whole, own, whole),
        out_specs=own,
        check_vma=False,
    )(*args)


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
    # In a queue blocks wait for their slowest member, so there members leave one by one.
    block = block or (group if slots == rows else 1)
    if group % block:
        raise UserError(f"block = {block} does not divide the {group} members of a group")
    if slots < block:
        raise UserError(f"slots = {slots} do not hold one block of {block} sequences")
    # A block that lacks members would never be all ended, and never be refilled.
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
    # Without stop tokens all rows end together, and there is nothing to move.
    long = bool(stop_tokens) and max_new_tokens >= SHRINK_TOKENS
    return long and alone and time_follows_rows()


def smaller_sizes(slots: int) -> tuple[int, ...]:
    """The numbers of slots below ``slots`` of the smaller states: each about 3/4 of the one before.

    >>> smaller_sizes(32)
    (24, 16, 12, 8, 6, 4, 2)
    """
    # Two sizes for each halving: with halvings alone up to half of the slots idle before a move.
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
    # Own columns for the slots alone: waiting sequences have no cache.
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
