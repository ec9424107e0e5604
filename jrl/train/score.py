"""Scoring: the per-token statistics of given completions, under given parameters.

One forward pass over prompt and completion; logits exist for completion tokens only, and only for
a chunk of them at a time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.mesh import constrain
from jrl.sampling.draw import Law, token_logprobs
from jrl.types import Array, Batch, Network, Params, Stats, ValueNetwork

_LOGITS_AT_ONCE = 2**24
"""Logits held at a time, in numbers (64 MiB of float32); more rows are walked in chunks."""


class Rows(NamedTuple):
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


def rows(batch: Batch) -> Rows:
    """Lays a batch out for a forward pass, B = N * G."""
    n, g, t = batch.tokens.shape
    p = batch.prompt_tokens.shape[1]
    prompt = jnp.repeat(batch.prompt_tokens, g, axis=0)
    prompt_lengths = jnp.repeat(batch.prompt_lengths, g)[:, None]
    lengths = batch.lengths.reshape(n * g, 1)
    column, step = jnp.arange(p)[None], jnp.arange(t)[None]
    before = jnp.where(step == 0, prompt_lengths - 1, p + step - 1)
    return Rows(
        tokens=jnp.concatenate([prompt, batch.tokens.reshape(n * g, t)], axis=1),
        positions=jnp.concatenate(
            [jnp.broadcast_to(column, prompt.shape), prompt_lengths + step], axis=1
        ),
        segments=jnp.concatenate([column < prompt_lengths, step < lengths], axis=1).astype(
            jnp.int32
        ),
        before=before,
    )


def head_statistics(
    params: Params,
    hidden: Array,
    tokens: Array,
    *,
    network: Network,
    law: Law,
    entropy: bool,
) -> Stats:
    """Log-probabilities (and entropy) of tokens from the hidden states before them.

    Args:
      params: the policy's.
      hidden: [B, T, D], the state before each token.
      tokens: [B, T] int32.
      network: the policy.
      law: scalars.
      entropy: whether "entropy" is wanted.

    Returns:
      "logprobs" and perhaps "entropy", [B, T] float32, nats. ``[B, T, V]`` is never held when it
      is large: chunks of tokens are recomputed in the backward pass.
    """
    b, t, _ = hidden.shape
    chunk = max(1, min(t, _LOGITS_AT_ONCE // (b * network.vocab_size)))

    def score(chunk_hidden: Array, chunk_tokens: Array) -> Stats:
        c = chunk_tokens.shape[1]
        logits = network.logits(params, chunk_hidden)
        stats = token_logprobs(
            logits.reshape(b * c, -1), chunk_tokens.reshape(b * c), law, entropy=entropy
        )
        return {name: x.reshape(b, c) for name, x in stats.items()}

    if chunk == t:
        return score(hidden, tokens)
    pad = -t % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    tokens = jnp.pad(tokens, ((0, 0), (0, pad)))
    split = lambda x: jnp.moveaxis(x.reshape(b, -1, chunk, *x.shape[2:]), 1, 0)  # noqa: E731
    stats = jax.lax.map(lambda xs: jax.checkpoint(score)(*xs), (split(hidden), split(tokens)))
    return {k: jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :t] for k, x in stats.items()}


@jax.named_scope("score")
def score(
    params: Params,
    batch: Batch,
    law: Law,
    *,
    network: Network,
    value: ValueNetwork | None,
    want: frozenset[str],
) -> Stats:
    """Statistics of a batch's completion tokens under ``params``.

    Args:
      params: {"policy": tree, and "value": tree when "values" is wanted}.
      batch: groups of completions.
      law: scalars; the law that the tokens were drawn from.
      network: the policy.
      value: the value network, when "values" is wanted.
      want: of "logprobs", "entropy", "values".

    Returns:
      The wanted statistics, [N, G, T] float32; what lies outside ``batch.mask`` is meaningless.
    """
    n, g, t = batch.tokens.shape
    laid = rows(batch)
    tokens = constrain(laid.tokens, "batch", None)
    hidden, _ = network.hidden(params["policy"], tokens, laid.positions, laid.segments)
    stats: Stats = {}
    if want & {"logprobs", "entropy"}:
        at = jnp.take_along_axis(hidden, laid.before[:, :, None], axis=1)
        stats |= head_statistics(
            params["policy"],
            at,
            batch.tokens.reshape(n * g, t),
            network=network,
            law=law,
            entropy="entropy" in want,
        )
    if "values" in want:
        assert value is not None, "an objective that needs values is built with a value network"
        values = value.apply(params["value"], hidden, laid.tokens, laid.positions, laid.segments)
        stats["values"] = jnp.take_along_axis(values, laid.before, axis=1)
    return {k: v.reshape(n, g, t) for k, v in stats.items() if k in want}


def split(batch: Batch, parts: int) -> Batch:
    """The batch as ``parts`` smaller ones along a new leading axis: row i goes to part i % parts.

    Strided, so that under data sharding every device keeps its own rows.
    """

    def rows_of(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)

    weights = jnp.broadcast_to(batch.reward_weights, (parts, *batch.reward_weights.shape))
    return jax.tree.map(rows_of, batch.replace(reward_weights=None)).replace(reward_weights=weights)


def in_parts(function: Callable[[Batch], Stats], batch: Batch, parts: int) -> Stats:
    """``function`` over parts of the batch in turn, to bound memory; rows come back in order."""
    if parts == 1:
        return function(batch)
    stats = jax.lax.map(function, split(batch, parts))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), stats)
