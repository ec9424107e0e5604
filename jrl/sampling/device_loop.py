"""The device loop: rows of a whole batch, of one turn or several, in one program.

Where rows outnumber slots, or the last ones move into smaller states, they go through
``sampling.queue``; else one loop decodes all of them. Completions are rows of one turn
(``sampling.generate``), episodes rows of several (``episodes.device_play``), and the members of a
tree (``sampling.tree``) share what is here of devices and records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jrl.mesh import constrain, divided, free_axes, lone_axes
from jrl.models import gpu
from jrl.sampling.cache import rows_of, share
from jrl.sampling.queue import Queue, Results, finish
from jrl.sampling.sequences import Prompts, SamplerInputs, Sequences, fresh_rows, sequences_of
from jrl.sampling.slot_sizes import SlotPlan, SlotSizes, shrinking_pays, slot_sizes
from jrl.sampling.slots import Slots, decode, start
from jrl.types import Array, Network, Rollout, RoutingRecord, StopReason


class Turns(NamedTuple):
    """Callbacks for rows of several turns, each answered by an environment.

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
    """Results of N * G rows.

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


def sample_rows(
    inputs: SamplerInputs,
    *,
    network: Network,
    width: int,
    stop_tokens: Sequence[int],
    plan: SlotPlan,
    turns: Turns | None = None,
) -> Sampled:
    """The device loop: rows of all prompts through the slots, each with one turn or several.

    Args:
      inputs: with the members of every prompt.
      network: the policy.
      width: T.
      stop_tokens: ids that end a turn.
      plan: how rows take turns in the slots.
      turns: None for rows that end with their first turn.
    """

    def run(parts: int) -> Callable[..., Any]:
        return partial(
            _sample_rows,
            network=network,
            sizes=sizes_on(parts, inputs.prompts, plan, width, stop_tokens),
            width=width,
            stop_tokens=stop_tokens,
            chunk=max(plan.chunk, gpu.steps_at_once()),
            turns=turns,
        )

    results, steps, routing, log = on_own_prompts(run, inputs, network=network)
    return Sampled(results, steps.sum(), routing, log)


def sizes_on(
    parts: int, prompts: Prompts, plan: SlotPlan, width: int, stop_tokens: Sequence[int]
) -> SlotSizes:
    """The sizes of each of the ``parts`` that devices divide the prompts into."""
    n, group = prompts.members.number.shape
    # By default decided by the shapes, not by timings: the programs of a run do not depend on the
    # machine's load.
    pays = shrinking_pays(width, stop_tokens, alone=parts > 1 or not divided())
    return slot_sizes(n // parts * group, group, plan, pays=pays)


def _sample_rows(
    inputs: SamplerInputs,
    *,
    network: Network,
    sizes: SlotSizes,
    width: int,
    stop_tokens: Sequence[int],
    chunk: int,
    turns: Turns | None,
) -> tuple[Results, Array, Array | None, Any]:
    """``sample_rows`` of one device's prompts.

    Returns:
      The results, the slot-steps [1], the record of the prompts' routing, and the turns' log.
    """
    weights, shared = inputs.weights, inputs.shared
    sequences = sequences_of(inputs, network)
    queue = fill_slots(sequences, sizes, network=network, weights=weights, width=width)
    draw = partial(decode, weights, version=inputs.version, stop_tokens=stop_tokens, at_once=chunk)
    recorded = network.extras.recorded
    routing = None if recorded is None else recorded(sequences.prompts.rows)

    def advance(queue: Queue, steps: Array | int, until: Array | int) -> Queue:
        if turns is not None:
            return _advance_turns(queue, steps, until, turns, weights, shared, draw, chunk)
        slots, count = draw(queue.slots, network=network, steps=steps, until=until)
        return queue.replace(slots=slots, steps=queue.steps + count * queue.index.shape[0])

    if turns is not None:
        queue = turns.begin(queue, sequences, inputs.prompts.state)
    # Prompts were computed for all sequences before: a prompt whose members wait is not read twice.
    queue = finish(
        queue,
        sequences,
        advance,
        recorded,
        block=sizes.block,
        smaller=sizes.smaller,
        chunk=chunk,
    )
    log = None if turns is None else turns.log(queue)
    return queue.results, queue.steps[None], routing, log


def _advance_turns(
    queue: Queue,
    steps: Array | int,
    until: Array | int,
    turns: Turns,
    weights: Any,
    shared: Any,
    draw: Callable[..., tuple[Slots, Array]],
    chunk: int,
) -> Queue:
    """The queue after ``steps`` more decode steps, with every turn that ended answered.

    The decode loop runs ``chunk`` steps at a time, so that a row waits no longer for its answer.
    """

    def more(carry: tuple[Array, Queue]) -> Array:
        done_steps, queue = carry
        running = jnp.sum(queue.slots.stop == StopReason.RUNNING)
        # Rows wait for their answers, so they may need more steps than they have columns; they end
        # by their turns. The bound is for sequences that wait for a slot.
        waiting = queue.waiting < queue.results.lengths.shape[0]
        return ((done_steps < steps) | ~waiting) & (running > until)

    def one(carry: tuple[Array, Queue]) -> tuple[Array, Queue]:
        done_steps, queue = carry
        limited = queue.slots.replace(limits=turns.limits(queue))
        slots, count = draw(limited, network=turns.network(queue, shared), steps=chunk)
        queue = queue.replace(slots=slots, steps=queue.steps + count * queue.index.shape[0])
        # A loop of one turn or none: it writes in place, where a branch would copy the cache.
        with jax.named_scope("answers"):
            answer = partial(turns.answer, weights)
            queue = jax.lax.while_loop(lambda q: jnp.any(turn_ended(q)), answer, queue)
        return done_steps + count, queue

    with jax.named_scope("turns"):
        return jax.lax.while_loop(more, one, (jnp.int32(0), queue))[1]


def results_of(rows: Slots, sequences: Sequences, network: Network) -> tuple[Results, Array | None]:
    """The results of rows that had a slot each, and the record of their prompts' routing."""
    recorded = network.extras.recorded
    experts = None if recorded is None else recorded(rows.cache.rows)
    routing = None if recorded is None else recorded(sequences.prompts.rows)
    return Results(rows.tokens, rows.logprobs, rows.lengths, rows.stop, experts), routing


def turn_ended(queue: Queue) -> Array:
    """[S] bool: rows whose turn is over and not answered yet."""
    stop = queue.slots.stop
    return (stop == StopReason.STOP_TOKEN) | (stop == StopReason.LENGTH)


def as_rollout(
    results: Results,
    prompts: Prompts,
    version: Array,
    *,
    sampled: Array | None = None,
    routing: Array | None = None,
) -> Rollout:
    """The record of N * G rows.

    Args:
      results: of the rows.
      prompts: N of them.
      version: [] int32, of the policy.
      sampled: [N, G, T] bool, tokens that the row itself sampled; None for all.
      routing: of the prompts, [N, P, n, k]; None for no record.
    """
    n, t = prompts.tokens.shape[0], results.tokens.shape[1]
    g = results.tokens.shape[0] // n
    lengths, stop = results.lengths.reshape(n, g), results.stop.reshape(n, g)
    # Past a sequence's end lies what its slot's last sequence wrote there.
    mask = jnp.arange(t)[None, None] < lengths[:, :, None]
    mask = mask if sampled is None else mask & sampled
    rollout = Rollout(
        prompt_tokens=prompts.tokens,
        prompt_lengths=prompts.lengths,
        tokens=results.tokens.reshape(n, g, t),
        lengths=lengths,
        mask=mask,
        sampler_logprobs=jnp.where(mask, results.logprobs.reshape(n, g, t), 0.0),
        versions=jnp.where(mask, version, -1).astype(jnp.int32),
        stop=stop,
        baseline=jnp.zeros((n, g), bool),  # which members are baselines their asks say
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


# ---------------------------------------------------------------- over devices


def on_own_prompts(
    run: Callable[[int], Callable[[SamplerInputs], Any]], inputs: SamplerInputs, *, network: Network
) -> Any:
    """A sampler's output, run by each device on its own prompts where the mesh allows that.

    No device waits for another in the loop over tokens then. Devices that must talk to each other
    go in step: backends may pair up all devices for that, and wait for those that have finished.

    Args:
      run: (parts into which the prompts are cut) -> the sampler of one part, which takes inputs
        with prepared weights, and returns arrays with a row for each of its own.
      inputs: of all prompts.
      network: the policy.
    """
    # Once: the loop over tokens would slice layers out of their stacks again for every token.
    inputs = inputs._replace(weights=network.prepare(inputs.weights))
    axes, parts = independent_axes(network, inputs.prompts.ids.shape[0])
    sampler = run(parts)
    if not axes:
        return sampler(inputs)
    sharded = PartitionSpec(axes)
    specs: Any = SamplerInputs._make([PartitionSpec()] * len(inputs))
    specs = specs._replace(prompts=sharded)
    return jax.shard_map(sampler, in_specs=(specs,), out_specs=sharded, check_vma=False)(inputs)


def independent_axes(network: Network, prompts: int) -> tuple[tuple[str, ...], int]:
    """Mesh axes along which devices sample their own prompts, and the number of parts."""
    axes = lone_axes(network.extras.gathered)
    parts = math.prod(free_axes()[axis] for axis in axes)
    # Parts of unequal size would be programs of unequal shapes: then all devices go in step.
    return ((), 1) if prompts % parts else (axes, parts)


# ---------------------------------------------------------------- the first sequences


def fill_slots(
    sequences: Sequences, sizes: SlotSizes, *, network: Network, weights: Any, width: int
) -> Queue:
    """The first sequences in their slots."""
    rows, s = sequences.keys.shape[0], sizes.slots
    index = np.arange(s, dtype=np.int32)
    slots = first_slots(
        sequences, index, sizes.block, network=network, weights=weights, width=width
    )
    experts = None
    if (recorded := network.extras.recorded) is not None:
        shape = jax.eval_shape(recorded, slots.cache.rows)
        experts = by_row(jnp.full((rows, *shape.shape[1:]), -1, shape.dtype))
    return Queue(
        # Where all start at once and none takes another's place, all stay at the same column.
        slots=slots.replace(aligned=s == rows),
        index=jnp.asarray(index),
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


def first_slots(
    sequences: Sequences,
    index: np.ndarray,
    block: int,
    *,
    network: Network,
    weights: Any,
    width: int,
) -> Slots:
    """Slots of some sequences, before their first token.

    Args:
      sequences: G members of each of N prompts.
      index: [S] int32, which of them, a constant.
      block: neighbours in ``index`` that are members of one prompt, whose cache they share.
      network: the policy.
      weights: as ``network.prepare`` returns them.
      width: T.
    """
    prompts, lengths = sequences.prompts, sequences.prompt_lengths
    # One prefix a block: its rows read the keys and values of their prompt together.
    first = index[::block] // (sequences.keys.shape[0] // lengths.shape[0])
    if not np.array_equal(first, np.arange(lengths.shape[0])):
        prompts, lengths = rows_of(prompts, jnp.asarray(first)), lengths[first]
    # Own columns for the slots alone: waiting sequences have no cache.
    cache = share(prompts, lengths - 1, block, network=network, weights=weights, length=width)
    fresh = fresh_rows(sequences, jnp.asarray(index))
    slots = start(
        cache,
        fresh["pending"][:, None],
        jnp.ones(len(index), jnp.int32),
        fresh["keys"],
        fresh["sampling_params"],
        jnp.full(len(index), width, jnp.int32),
        max_new_tokens=width,
    )
    starts = {name: fresh[name] for name in ("prompt_lengths", "stop", "limits") if name in fresh}
    # New arrays are divided by rows like the cache, or each would be sent to all devices.
    arrays = slots.replace(**starts, cache=None, sampling_params=None, keys=None)
    return jax.tree.map(by_row, arrays).replace(
        cache=cache, sampling_params=slots.sampling_params, keys=slots.keys
    )


def by_row(x: Array) -> Array:
    """The array, its first axis divided over devices as a batch is."""
    return constrain(x, "batch", *(None,) * (x.ndim - 1))
