"""Layouts of a batch in a network's rows: sequences, shared prompts, packed, or in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.types import Array, Batch, Packing, RoutingRecord, SharedRows, Stats


class SequenceRows(NamedTuple):
    """Prompt and completion of every sequence side by side.

    Attributes:
      tokens: [B, L] int32; columns 0..P-1 hold the prompt, P..L-1 the completion.
      positions: [B, L] int32; a completion follows its own prompt without a gap.
      segments: [B, L] int32; 1 where a token is, 0 for padding.
      before: [B, T] int32, the column whose hidden state predicts each completion token.
    """

    tokens: Array
    positions: Array
    segments: Array
    before: Array


def rows(batch: Batch) -> SequenceRows:
    """A batch as complete sequences, for networks that cannot share prompts; B = N * G."""
    n, g, t = batch.tokens.shape
    p = batch.prompt_tokens.shape[1]
    # A copy of the prompt for every member: the cost that ``shared_rows`` avoids.
    prompt = jnp.repeat(batch.prompt_tokens, g, axis=0)
    prompt_lengths = jnp.repeat(batch.prompt_lengths, g)[:, None]
    # Lengths, not the mask: untrained tokens, such as an environment's replies, are read as
    # context.
    lengths = batch.lengths.reshape(n * g, 1)
    column, step = jnp.arange(p)[None], jnp.arange(t)[None]
    # The first token follows the prompt's own end, which is not the prompt's last column.
    before = jnp.where(step == 0, prompt_lengths - 1, p + step - 1)
    return SequenceRows(
        tokens=jnp.concatenate([prompt, batch.tokens.reshape(n * g, t)], axis=1),
        # Positions continue at the prompt's true length; the columns between it and P are padding.
        positions=jnp.concatenate(
            [jnp.broadcast_to(column, prompt.shape), prompt_lengths + step], axis=1
        ),
        segments=jnp.concatenate([column < prompt_lengths, step < lengths], axis=1).astype(
            jnp.int32
        ),
        before=before,
    )


def shared_rows(batch: Batch) -> SharedRows:
    """A batch with every prompt once for its group: R = N * G and C = T, or as its packing says.

    A row holds the tokens that completion tokens are predicted from, one column for each: the
    prompt's last token, then the completion without its own last one. So the state at column t is
    the one before token t. The rest of the prompt is keys and values for its rows; it needs no
    states of its own, so its last layer's output and its logits are never computed.
    """
    n, g, t = batch.tokens.shape
    last = jnp.take_along_axis(batch.prompt_tokens, batch.prompt_lengths[:, None] - 1, axis=1)
    last = jnp.broadcast_to(last[:, :, None], (n, g, 1))
    step = jnp.arange(t, dtype=jnp.int32)[None]
    # Position of a row's first column: it holds the prompt's last token again.
    start = jnp.repeat(batch.prompt_lengths, g)[:, None] - 1
    tokens = jnp.concatenate([last, batch.tokens[:, :, :-1]], axis=2)
    lengths: Array | None = batch.lengths.reshape(n * g)
    segments = (step < batch.lengths.reshape(n * g, 1)).astype(jnp.int32)
    if "context" in batch.ids:  # each continues the prompt, at its own columns of the row
        context = batch.ids["context"]
        live = step[None] < batch.lengths[:, :, None]
        # A new context starts from the prompt again, so its first token is predicted by the
        # prompt's last.
        first = live & (jnp.diff(context, axis=2, prepend=-1) != 0)
        tokens = jnp.where(first, last, tokens)
        began = jax.lax.cummax(jnp.where(first, step[None], 0), axis=2).reshape(n * g, t)
        segments, step, lengths = segments * (began + 1), step - began, None
    # One completion a row; attention reads row r with prompt r // g.
    shared = SharedRows(
        prompt_tokens=batch.prompt_tokens[:, None],
        prompt_lengths=batch.prompt_lengths[:, None] - 1,
        tokens=tokens.reshape(n * g, t),
        positions=start + step,
        segments=segments,
        owners=jnp.zeros((n * g, t), jnp.int32),
        lengths=lengths,
        routing=batch.routing,
    )
    if (experts := batch.routing) is not None:
        rows = experts.tokens.reshape(n * g, t, *experts.tokens.shape[3:])
        shared = shared._replace(routing=RoutingRecord(experts.prompts[:, None], rows))
    if (packing := batch.packing) is None:
        return shared
    m, b = packing.order.shape
    # Packed: gather rows column by column. Columns without a token point at member 0, and their
    # segment is 0, which nothing attends to.
    at, order = (jnp.maximum(packing.members, 0), packing.steps), packing.order.reshape(-1)
    if (experts := shared.routing) is not None:
        # The record follows its tokens, or training would route a token by another one's experts.
        prompts = experts.prompts[order, 0].reshape(m, b, *experts.prompts.shape[2:])
        experts = RoutingRecord(prompts, experts.tokens[at])
    if packing.segments is not None:
        packed = packing.segments
    elif "context" in batch.ids:
        packed = jnp.where(packing.members < 0, 0, packing.members * t + shared.segments[at])
    else:
        packed = packing.members + 1
    return SharedRows(
        prompt_tokens=batch.prompt_tokens[order].reshape(m, b, -1),
        prompt_lengths=shared.prompt_lengths[order].reshape(m, b),
        tokens=shared.tokens[at],
        positions=shared.positions[at],
        segments=packed,
        owners=packing.owners,
        ends=packing.ends,
        routing=experts,
    )


def unpacked(packing: Packing | None, rows: int, columns: int) -> Callable[[Array], Array]:
    """The inverse of the packing, for arrays: [R, C, ...] -> [rows, columns, ...]."""
    if packing is None:
        # Not packed: rows are in batch order already.
        return lambda x: x
    # Invert the gather once: for each completion token, where its statistic stands in the packing.
    # Empty columns write to index ``size``, which "drop" leaves out.
    size = rows * columns
    flat = jnp.where(packing.members < 0, size, packing.members * columns + packing.steps)
    source = jnp.arange(flat.size, dtype=jnp.int32)
    index = jnp.zeros(size, jnp.int32).at[flat.reshape(-1)].set(source, mode="drop")

    def unpack(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[index].reshape(rows, columns, *x.shape[2:])

    return unpack


def split(batch: Batch, parts: int) -> Batch:
    """The batch as ``parts`` smaller ones along a new leading axis: row i goes to part i % parts.

    Strided, so that under data sharding every device keeps its own rows. A packing is one for each
    of these parts already.
    """

    def rows_of(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)

    # Reward weights have no prompt axis, so every part gets a copy.
    weights = jnp.broadcast_to(batch.reward_weights, (parts, *batch.reward_weights.shape))
    bare = jax.tree.map(rows_of, batch.replace(reward_weights=None, packing=None))
    return bare.replace(reward_weights=weights, packing=batch.packing)


def undivided(batch: Batch) -> Batch:
    """The one part of a batch that is not split, its packing without the axis of parts."""
    packing = jax.tree.map(lambda x: x[0], batch.packing)
    return batch.replace(packing=packing)


def in_parts(function: Callable[[Batch], Stats], batch: Batch, parts: int) -> Stats:
    """``function`` over parts of the batch in turn, to bound memory; rows come back in order."""
    if parts == 1:
        return function(undivided(batch))
    stats = jax.lax.map(function, split(batch, parts))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), stats)
