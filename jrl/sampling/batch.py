"""The decode batch of a row engine on the device, and the programs over it.

Every program has few shapes, so that all of them can be compiled before the first request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.models import gpu
from jrl.sampling.admission import Admission
from jrl.sampling.cache import put_prefixes, rows_of, share
from jrl.sampling.params import SamplingParams
from jrl.sampling.report import TokenReport
from jrl.sampling.slots import (
    IdleLimit,
    Measure,
    Slots,
    decode,
    prefill,
    refresh,
    start,
)
from jrl.sampling.suspend import extend_rows, fork_row, put_rows, take_rows
from jrl.types import Array, Network, Stack, StopReason


class DecodeBatch(struct.PyTreeNode):
    """Slots of unrelated rows, on the device; also, with S = 1, a row that has left its slot.

    Attributes:
      slots: S rows, each with its prompt as its prefix.
      prompts: [S, P] int32, the prompt of each row.
      stops: [S, K] int32, the tokens that end each row, padded with -1.
    """

    slots: Slots
    prompts: Array
    stops: Array


class ChunkInputs(NamedTuple):
    """The host's settings of one decode chunk.

    Attributes:
      version: [] int32, of the policy.
      halted: [S] int32, a ``StopReason`` for rows to stop first; RUNNING leaves a row as it is.
      steps: [] int32, decode steps, at most the columns of the output.
      idle: the chunk ends before more slot-steps than this would sample nothing.
      reports: [S] int32, alternatives reported with each token of a row; -1 for no report. None
        where no row may ask for one, which costs nothing.
      policies: [S] int32, the policy of several that samples each row; None for the network.
      masks: [S, ceil(V / 32)] uint32, a bit for each token that a row may sample in this chunk.
        None where no row is ever constrained, which costs nothing.
    """

    version: Any
    halted: Any
    steps: Any
    idle: IdleLimit
    reports: Any = None
    policies: Any = None
    masks: Any = None


class ChunkOutput(NamedTuple):
    """Output of one decode chunk, for the host.

    Attributes:
      tokens: [S, W] int32, each row's new tokens from column 0.
      logprobs: [S, W] float32, nats.
      counts: [S] int32, new tokens.
      lengths: [S] int32, completion tokens of each row, old and new.
      stop: [S] int32, a ``StopReason``.
      steps: [] int32, decode steps taken.
      report: for the rows that asked for one; its columns are those of ``tokens``.
      measured: [S, W] float32, ``measure`` at each token; None where nothing is measured.
    """

    tokens: Array
    logprobs: Array
    counts: Array
    lengths: Array
    stop: Array
    steps: Array
    report: TokenReport | None = None
    measured: Array | None = None


def empty_batch(
    weights: Any,
    *,
    network: Network,
    rows: int,
    prompt_tokens: int,
    max_new_tokens: int,
    stop_width: int,
    biases: bool,
    measured: bool = False,
) -> DecodeBatch:
    """An idle batch of the sizes of ``Rows``."""
    s, t = rows, max_new_tokens
    zeros = jnp.zeros(s, jnp.int32)
    # Own columns and prompts apart: an admission replaces a prompt alone.
    prompts = network.init_cache(s, prompt_tokens, weights)
    cache = share(prompts, zeros, 1, network=network, weights=weights, length=t)
    sampling_params = SamplingParams(
        temperature=jnp.ones(s, jnp.float32),
        top_k=zeros,
        top_p=jnp.ones(s, jnp.float32),
        min_p=jnp.zeros(s, jnp.float32),
        bias=jnp.zeros((s, network.vocab_size), jnp.float32) if biases else None,
    )
    keys = jax.random.split(jax.random.key(0), s)
    # Without room for a token every slot has stopped, and so is free.
    slots = start(cache, zeros[:, None], zeros + 1, keys, sampling_params, zeros, max_new_tokens=t)
    # Decided once: a leaf that appears later would be another program.
    slots = slots.replace(measured=jnp.zeros((s, t), jnp.float32) if measured else None)
    tokens = jnp.zeros((s, prompt_tokens), jnp.int32)
    return DecodeBatch(slots, tokens, jnp.full((s, stop_width), -1, jnp.int32))


def admit(weights: Any, batch: DecodeBatch, new: Admission, *, network: Network) -> DecodeBatch:
    """The batch with new rows in place of old ones; ``batch`` is donated."""
    slots, width = batch.slots, new.tokens.shape[1]
    # Once a prompt, whatever the number of its rows; `source` spreads the result.
    store = prefill(weights, new.tokens, new.lengths, network=network)
    lengths = jnp.asarray(new.lengths)[new.source]
    tokens = jnp.asarray(new.tokens)[new.source]
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(new.seeds), new.members)

    def put(old: Array, x: Any) -> Array:
        # Unused rows are beyond the batch, where nothing is written.
        return old.at[new.rows].set(x, mode="drop")

    # Tokens, log-probabilities and own cache columns stay as they are: nothing past a row's length
    # is read, and writing [rows, T] zeros would cost more than the rest of the admission.
    fresh = slots.replace(
        cache=put_prefixes(
            slots.cache, new.rows, rows_of(store, jnp.asarray(new.source)), lengths - 1
        ),
        pending=put(slots.pending, last),
        prompt_lengths=put(slots.prompt_lengths, lengths),
        lengths=put(slots.lengths, 0),
        limits=put(slots.limits, new.limits),
        mask=put(slots.mask, False),
        versions=put(slots.versions, -1),
        stop=put(slots.stop, jnp.where(new.limits > 0, StopReason.RUNNING, StopReason.LENGTH)),
        keys=put(slots.keys, keys),
        sampling_params=jax.tree.map(put, slots.sampling_params, new.sampling_params),
    )
    return DecodeBatch(
        fresh,
        batch.prompts.at[new.rows, :width].set(tokens, mode="drop"),
        put(batch.stops, new.stops),
    )


def decode_chunk(
    weights: Any,
    batch: DecodeBatch,
    chunk: ChunkInputs,
    *,
    network: Network,
    width: int,
    top: int = 0,
    measure: Measure | None = None,
    stack: Stack | None = None,
    at_once: int = 1,
) -> tuple[DecodeBatch, ChunkOutput]:
    """The batch after a chunk's steps, each a token more in every running row, and those tokens.

    Args:
      weights: as ``network.prepare`` returns them.
      batch: the state; donated.
      chunk: its steps, and what holds for single rows in it.
      network: the policy.
      width: W, columns of the output.
      top: K, the most alternatives reported.
      measure: of the distribution that each token is sampled from, if the batch has room for it.
      stack: the network's policies, where rows are sampled by different ones.
      at_once: as ``decode`` takes it, best a divisor of the steps.
    """
    if stack is not None and chunk.policies is not None:
        network = stack.speaking(chunk.policies)
    # Rows that the host ends (aborts, stop strings) are stopped in the chunk's own program: a
    # program of its own would be another return to the host.
    stop = jnp.where(chunk.halted == StopReason.RUNNING, batch.slots.stop, chunk.halted)
    slots = batch.slots.replace(stop=stop.astype(jnp.int32))
    # Kept, to be put back: the switched-off copy below is for this chunk alone.
    before, sampling_params = slots.lengths, slots.sampling_params
    # One program serves all sampling parameters, and only rows that ask for truncation pay for it.
    # A stopped row keeps its parameters until the slot is refilled, so it is switched off here.
    runs = slots.stop == StopReason.RUNNING
    used = sampling_params.replace(
        top_k=jnp.where(runs, sampling_params.top_k, 0),
        top_p=jnp.where(runs, sampling_params.top_p, 1.0),
        truncates=True,
        mixed=True,
        floors=True,
        greedy=True,
    )
    if chunk.masks is not None:
        assert used.bias is not None
        used = used.replace(bias=_masked(used.bias, chunk.masks))
    report = None
    if chunk.reports is not None:
        report = TokenReport.empty(jnp.where(runs, chunk.reports, -1), width, top)
    slots, count = decode(
        weights,
        slots.replace(sampling_params=used, report=report),
        chunk.version,
        network=network,
        steps=chunk.steps,
        stop_tokens=batch.stops,
        idle=chunk.idle,
        measure=measure,
        at_once=at_once,
    )
    # The host gets the new columns of each row alone: [S, W], where the arrays are [S, T].
    columns = before[:, None] + jnp.arange(width)[None]
    columns = jnp.minimum(columns, slots.tokens.shape[1] - 1)
    measured = slots.measured
    out = ChunkOutput(
        tokens=jnp.take_along_axis(slots.tokens, columns, axis=1),
        logprobs=jnp.take_along_axis(slots.logprobs, columns, axis=1),
        counts=slots.lengths - before,
        lengths=slots.lengths,
        stop=slots.stop,
        steps=count,
        report=slots.report,
        measured=None if measured is None else jnp.take_along_axis(measured, columns, axis=1),
    )
    return batch.replace(slots=slots.replace(sampling_params=sampling_params, report=None)), out


def _masked(bias: Array, masks: Array) -> Array:
    """The bias [S, V] with -inf for the tokens that a row's mask leaves out."""

    def masked() -> Array:
        bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
        allowed = bits.reshape(bias.shape[0], -1)[:, : bias.shape[1]]
        return jnp.where(allowed == 1, bias, -jnp.inf)

    if not gpu.branches():
        return masked()
    # One program for all chunks; those without a constrained row read the masks alone.
    constrained = jnp.any(masks != jnp.uint32(0xFFFFFFFF))
    return jax.lax.cond(constrained, masked, lambda: bias)


def recompute(weights: Any, batch: DecodeBatch, *, network: Network) -> DecodeBatch:
    """The batch with its cache recomputed from the tokens, under other weights."""
    return batch.replace(slots=refresh(weights, batch.slots, batch.prompts, network=network))


# ---------------------------------------------------------------- single rows


def extend(
    weights: Any,
    batch: DecodeBatch,
    rows: Array,
    tokens: Array,
    counts: Array,
    limits: Array,
    *,
    network: Network,
) -> DecodeBatch:
    """The batch with tokens from outside appended to a few rows; see ``extend_rows``."""
    slots = extend_rows(weights, batch.slots, rows, tokens, counts, limits, network=network)
    return batch.replace(slots=slots)


def suspend(batch: DecodeBatch, rows: Array) -> DecodeBatch:
    """Copies of some rows [m], for ``resume``."""
    take = lambda x: jnp.take(x, rows, axis=0, mode="clip")  # noqa: E731
    return DecodeBatch(take_rows(batch.slots, rows), take(batch.prompts), take(batch.stops))


def resume(batch: DecodeBatch, rows: Array, suspended: DecodeBatch) -> DecodeBatch:
    """The batch with suspended rows in these slots [m], whatever those held; ``batch`` is donated.

    The prompts come with the rows, or ``recompute`` would read those that the slots held before.
    """
    put = lambda x, new: x.at[rows].set(new, mode="drop")  # noqa: E731
    return DecodeBatch(
        put_rows(batch.slots, rows, suspended.slots),
        put(batch.prompts, suspended.prompts),
        put(batch.stops, suspended.stops),
    )


def fork(row: DecodeBatch, seed: Array, member: Array, length: Array, limit: Array) -> DecodeBatch:
    """A suspended row as it was earlier, as another member of its group; see ``fork_row``."""
    return row.replace(slots=fork_row(row.slots, seed, member, length, limit))


def resume_fork(batch: DecodeBatch, rows: Array, row: DecodeBatch, *fork_at: Array) -> DecodeBatch:
    """``resume`` of ``fork``, in one program; ``batch`` is donated."""
    return resume(batch, rows, fork(row, *fork_at))
