"""Continuous batching: refill free slots; at the end compact live rows into smaller batches.

A block of slots whose sequences have all ended writes its results and is refilled. When the queue
is empty and slots fall idle, the live rows are compacted into ever smaller states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.sampling.cache import pick, put_prefixes, rows_of, take
from jrl.sampling.sequences import Sequences, fresh_rows
from jrl.sampling.slots import Slots
from jrl.types import Array, StopReason


class Results(struct.PyTreeNode):
    """Results of B sequences.

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


Advance = Callable[[Queue, Array | int, Array | int], Queue]
"""(queue, steps, until) -> the queue after ``decode`` of its slots."""
ReadsRecorded = Callable[[Any], Array] | None
"""Reads the routing record in a cache's own arrays, ``NetworkExtras.recorded``."""


def finish(
    queue: Queue,
    sequences: Sequences,
    advance: Advance,
    recorded: ReadsRecorded,
    *,
    block: int,
    smaller: tuple[int, ...],
    chunk: int,
) -> Queue:
    """The queue when every sequence is decoded and among its results.

    Args:
      queue: with the first sequences in its slots.
      sequences: all of them.
      advance: decodes.
      recorded: see ``ReadsRecorded``.
      block: slots that are refilled together; they share a prompt.
      smaller: slots of the smaller states, falling; empty to stay in the first one.
      chunk: decode steps between refills of free slots.
    """
    (rows, width), slots = queue.results.tokens.shape, queue.index.shape[0]
    first, *later = *smaller, 0  # the live slots at which a state is left for the next one
    if slots == rows:
        # As many slots as sequences: nothing waits, so no refill is compiled.
        queue = advance(queue, width, first)
    else:

        def chunked(queue: Queue) -> Queue:
            # While sequences wait, free slots are refilled after every few steps; at the end there
            # is nothing to refill, and the rest is one loop.
            some_wait = queue.waiting < rows
            steps, until = jnp.where(some_wait, chunk, width), jnp.where(some_wait, 0, first)
            return _refill(advance(queue, steps, until), sequences, block, recorded)

        def unfinished(queue: Queue) -> Array:
            running = jnp.sum(queue.slots.stop == StopReason.RUNNING)
            return (queue.waiting < rows) | (running > first)

        with jax.named_scope("queue"):
            queue = jax.lax.while_loop(unfinished, chunked, queue)
    for size, until in zip(smaller, later, strict=True):
        queue = advance(_compact(queue, size, recorded), width, until)
    return _hand_over(queue, recorded)


def _hand_over(queue: Queue, recorded: ReadsRecorded, rows: Array | None = None) -> Queue:
    """The queue with some or all slots written to their sequences' results."""
    slots, results = queue.slots, queue.results
    chosen = (lambda x: x) if rows is None else (lambda x: x[rows])
    index = chosen(queue.index)

    def put(out: Array, new: Array) -> Array:
        return out.at[index].set(chosen(new), mode="drop")

    # The record of routing lies in the cache, and goes with the slot's next sequence.
    experts = results.experts
    if recorded is not None and experts is not None:
        caches = jax.tree.map(chosen, slots.cache.rows)
        experts = experts.at[index].set(recorded(caches), mode="drop")
    return queue.replace(
        results=Results(
            tokens=put(results.tokens, slots.tokens),
            logprobs=put(results.logprobs, slots.logprobs),
            lengths=put(results.lengths, slots.lengths),
            stop=put(results.stop, slots.stop),
            experts=experts,
        )
    )


def _refill(queue: Queue, sequences: Sequences, block: int, recorded: ReadsRecorded) -> Queue:
    """The queue with the next sequences in the blocks of slots whose own have all ended."""
    rows = queue.results.tokens.shape[0]
    members = rows // sequences.last.shape[0]

    def ended(queue: Queue) -> Array:
        return (queue.slots.stop != StopReason.RUNNING).reshape(-1, block).all(axis=1)

    # One block at a time: a loop writes in place, where a branch would copy the cache.
    def refill_one(queue: Queue) -> Queue:
        free = jnp.argmax(ended(queue))[None]
        rows = free * block + jnp.arange(block)
        queue = _hand_over(queue, recorded, rows)
        index = queue.waiting + jnp.arange(block, dtype=jnp.int32)
        prompt = queue.waiting[None] // members
        lengths = sequences.prompt_lengths[prompt] - 1
        # Own columns are not cleared: a row sees none past its length.
        cache = put_prefixes(queue.slots.cache, free, rows_of(sequences.prompts, prompt), lengths)
        put = lambda old, x: old.at[rows].set(x)  # noqa: E731
        fresh = {
            name: jax.tree.map(put, getattr(queue.slots, name), x)
            for name, x in fresh_rows(sequences, index).items()
        }
        return queue.replace(
            slots=queue.slots.replace(cache=cache, **fresh),
            index=put(queue.index, index),
            waiting=queue.waiting + block,
        )

    more = lambda queue: jnp.any(ended(queue)) & (queue.waiting < rows)  # noqa: E731
    with jax.named_scope("refill"):
        return jax.lax.while_loop(more, refill_one, queue)


def _compact(queue: Queue, size: int, recorded: ReadsRecorded) -> Queue:
    """The queue with its live slots, at most ``size``, in a state of that size."""
    # Written out first: a row that has ended may have no place in the smaller state.
    queue = _hand_over(queue, recorded)
    # Stable, so that rows keep their order. Where fewer run than the new state holds, ended ones
    # fill it up: their results are written already and do not change.
    live = jnp.argsort(queue.slots.stop != StopReason.RUNNING, stable=True)[:size]
    slots = pick(queue.slots.replace(cache=None), live)
    slots = slots.replace(cache=take(queue.slots.cache, live))
    return queue.replace(slots=slots, index=queue.index[live])
