"""The sampler: decode slots over a KV cache, as pure functions over one state.

``generate`` is the whole of it for a batch: prefill each prompt once, copy its cache to the slots
of its group, decode on the device until every slot has stopped. The pieces are there for finer
control: a ``Slots`` value can be kept across a weight update and resumed, forked into
continuations that share their past, and extended by tokens from outside (tools, hints).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jrl.errors import UserError
from jrl.mesh import constrain
from jrl.sampling.draw import Law, draw, log_law
from jrl.types import Array, Network, Params, Rollout, StopReason


class Slots(struct.PyTreeNode):
    """S sequences being decoded. The cache holds all tokens of a row but the newest, ``pending``.

    Attributes:
      cache: the network's cache, rows leading.
      pending: [S] int32, the newest token of each row, not yet in the cache.
      prompt_lengths: [S] int32, tokens.
      lengths: [S] int32, completion tokens present.
      limits: [S] int32, the most completion tokens allowed.
      tokens: [S, T] int32, the completion so far.
      mask: [S, T] bool, True where the policy drew the token.
      logprobs: [S, T] float32, nats, of the law drawn from.
      versions: [S, T] int32, the policy version that drew each token; -1 elsewhere.
      stop: [S] int32, a ``StopReason``; decoding moves the rows that are RUNNING.
      keys: [S] PRNG keys; the draw of token t uses ``fold_in(key, t)``.
      law: one value a row.
    """

    cache: Any
    pending: Array
    prompt_lengths: Array
    lengths: Array
    limits: Array
    tokens: Array
    mask: Array
    logprobs: Array
    versions: Array
    stop: Array
    keys: Array
    law: Law


def sequence_keys(key: Array, ids: Array, group: int) -> Array:
    """[N, group] keys, each a function of (key, prompt id, member) alone."""
    members = jnp.arange(group)
    prompt_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
    return jax.vmap(lambda k: jax.vmap(jax.random.fold_in, (None, 0))(k, members))(prompt_keys)


def prefill(
    params: Params, prompt_tokens: Array, prompt_lengths: Array, *, network: Network, length: int
) -> Any:
    """The cache of N prompts, each computed once however many samples it gets.

    The last token of each prompt is left out: it is the first ``pending`` token.

    Args:
      params: the policy's.
      prompt_tokens: [N, P] int32, from column 0.
      prompt_lengths: [N] int32.
      network: the policy.
      length: C, tokens each row of the cache has room for.

    Returns:
      The network's cache with N rows.
    """
    n, p = prompt_tokens.shape
    positions = jnp.broadcast_to(jnp.arange(p), (n, p))
    live = positions < prompt_lengths[:, None] - 1
    cache = network.init_cache(n, length, params)
    _, cache = network.extend(params, cache, prompt_tokens, positions, live)
    return cache


def start(
    cache: Any,
    prompt_tokens: Array,
    prompt_lengths: Array,
    keys: Array,
    law: Law,
    limits: Array,
    *,
    max_new_tokens: int,
) -> Slots:
    """Slots ready to decode, one a row of ``cache``.

    Args:
      cache: S rows, as ``prefill`` gives them (repeated for a group).
      prompt_tokens: [S, P] int32.
      prompt_lengths: [S] int32.
      keys: [S] PRNG keys.
      law: scalars or [S].
      limits: [S] int32, tokens, at most ``max_new_tokens``.
      max_new_tokens: T, the width of the completion arrays.
    """
    s = prompt_tokens.shape[0]
    pending = jnp.take_along_axis(prompt_tokens, prompt_lengths[:, None] - 1, axis=1)[:, 0]
    return Slots(
        cache=cache,
        pending=pending,
        prompt_lengths=prompt_lengths,
        lengths=jnp.zeros(s, jnp.int32),
        limits=limits,
        tokens=jnp.zeros((s, max_new_tokens), jnp.int32),
        mask=jnp.zeros((s, max_new_tokens), bool),
        logprobs=jnp.zeros((s, max_new_tokens), jnp.float32),
        versions=jnp.full((s, max_new_tokens), -1, jnp.int32),
        stop=jnp.where(limits > 0, StopReason.RUNNING, StopReason.LENGTH).astype(jnp.int32),
        keys=keys,
        law=jax.tree.map(lambda x: jnp.broadcast_to(x, (s,)), law),
    )


def decode(
    params: Params,
    slots: Slots,
    version: Array,
    *,
    network: Network,
    steps: int,
    stop_tokens: Sequence[int],
) -> Slots:
    """Draws up to ``steps`` tokens for every running slot, ending early when none runs.

    Args:
      params: the policy's.
      slots: the state; donate it to a jitted call, since the cache is updated in place.
      version: [] int32, written beside each token drawn.
      network: the policy.
      steps: the most tokens a slot gains in this call.
      stop_tokens: ids that end a sequence; the stop token is part of the completion.

    Returns:
      The new state.
    """
    stops = jnp.array(tuple(stop_tokens), jnp.int32)

    def running(carry: tuple[Array, Slots]) -> Array:
        i, slots = carry
        return (i < steps) & jnp.any(slots.stop == StopReason.RUNNING)

    @jax.named_scope("decode")
    def one_token(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        i, slots = carry
        runs = slots.stop == StopReason.RUNNING
        position = slots.prompt_lengths + slots.lengths - 1
        hidden, cache = network.extend(
            params, slots.cache, slots.pending[:, None], position[:, None], runs[:, None]
        )
        logprobs = log_law(network.logits(params, hidden[:, 0]), slots.law)
        token = draw(_uniform(slots.keys, slots.lengths), logprobs)
        logprob = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
        here = runs[:, None] & (jnp.arange(slots.tokens.shape[1])[None] == slots.lengths[:, None])
        lengths = slots.lengths + runs
        going = jnp.where(lengths >= slots.limits, StopReason.LENGTH, StopReason.RUNNING)
        reason = jnp.where(jnp.isin(token, stops), StopReason.STOP_TOKEN, going)
        return i + 1, slots.replace(
            cache=cache,
            pending=jnp.where(runs, token, slots.pending),
            lengths=lengths,
            tokens=jnp.where(here, token[:, None], slots.tokens),
            mask=slots.mask | here,
            logprobs=jnp.where(here, logprob[:, None], slots.logprobs),
            versions=jnp.where(here, version, slots.versions),
            stop=jnp.where(runs, reason, slots.stop).astype(jnp.int32),
        )

    return jax.lax.while_loop(running, one_token, (jnp.int32(0), slots))[1]


def _uniform(keys: Array, counts: Array) -> Array:
    """[S] float32 in [0, 1): draw number ``counts[s]`` of each row's own key."""
    return jax.vmap(lambda k, t: jax.random.uniform(jax.random.fold_in(k, t)))(keys, counts)


def fork(slots: Slots, source: Array, keys: Array) -> Slots:
    """Slots whose row i continues row ``source[i]``, with its own key from here on.

    Args:
      slots: S rows.
      source: [S'] int32 rows of ``slots``; a row may be named many times.
      keys: [S'] PRNG keys.

    Returns:
      S' rows that share their past with their sources.
    """
    chex.assert_equal_shape([source, keys])
    return jax.tree.map(lambda x: jnp.take(x, source, axis=0), slots).replace(keys=keys)


def extend(
    params: Params, slots: Slots, tokens: Array, counts: Array, *, network: Network
) -> Slots:
    """Appends tokens from outside (a tool's output, a hint), which are never trained on.

    A row that had stopped runs again, unless it is at its limit.

    Args:
      params: the policy's.
      slots: S rows.
      tokens: [S, Q] int32, from column 0.
      counts: [S] int32, how many of them each row gets; 0 leaves a row as it is. What would pass
        a row's limit is cut off.
      network: the policy.

    Returns:
      The state after all tokens but the newest have entered the cache.
    """
    q = tokens.shape[1]
    counts = jnp.minimum(counts, slots.limits - slots.lengths)
    column = jnp.arange(q)[None]
    # The cache lacks the pending token, and must go on lacking the newest one.
    fed = jnp.concatenate([slots.pending[:, None], tokens[:, :-1]], axis=1)
    positions = (slots.prompt_lengths + slots.lengths - 1)[:, None] + column
    _, cache = network.extend(params, slots.cache, fed, positions, column < counts[:, None])
    offset = jnp.arange(slots.tokens.shape[1])[None] - slots.lengths[:, None]
    here = (offset >= 0) & (offset < counts[:, None])
    placed = jnp.take_along_axis(tokens, jnp.clip(offset, 0, q - 1), axis=1)
    newest = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    lengths = slots.lengths + counts
    running = jnp.where(lengths < slots.limits, StopReason.RUNNING, StopReason.LENGTH)
    return slots.replace(
        cache=cache,
        pending=jnp.where(counts > 0, newest, slots.pending),
        lengths=lengths,
        tokens=jnp.where(here, placed, slots.tokens),
        stop=jnp.where(counts > 0, running, slots.stop).astype(jnp.int32),
    )


def refresh(params: Params, slots: Slots, prompt_tokens: Array, *, network: Network) -> Slots:
    """Recomputes the cache with new parameters, to resume after a weight update.

    Without it the old keys and values stay, as asynchronous systems do by default.

    Args:
      params: the new policy's.
      slots: S rows.
      prompt_tokens: [S, P] int32, the prompts that the slots were started with.
      network: the policy.
    """
    p = prompt_tokens.shape[1]
    width = p + slots.tokens.shape[1]
    column = jnp.arange(width)[None]
    index = column - slots.prompt_lengths[:, None]
    past = jnp.take_along_axis(slots.tokens, jnp.clip(index, 0, slots.tokens.shape[1] - 1), axis=1)
    prompt = jnp.pad(prompt_tokens, ((0, 0), (0, width - p)))
    tokens = jnp.where(index >= 0, past, prompt)
    positions = jnp.broadcast_to(column, tokens.shape)
    live = positions < (slots.prompt_lengths + slots.lengths - 1)[:, None]
    empty = jax.tree.map(jnp.zeros_like, slots.cache)
    _, cache = network.extend(params, empty, tokens, positions, live)
    return slots.replace(cache=cache)


def generate(
    key: Array,
    params: Params,
    prompt_tokens: Array,
    prompt_lengths: Array,
    law: Law,
    version: Array,
    ids: Array,
    *,
    network: Network,
    group: int,
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    baseline_members: int = 0,
) -> Rollout:
    """``group`` completions of each prompt: program 1 of an iteration.

    Args:
      key: consumed.
      params: the policy's.
      prompt_tokens: [N, P] int32, from column 0.
      prompt_lengths: [N] int32, 1 to P.
      law: scalars.
      version: [] int32, the policy's version.
      ids: [N] int32; a sequence's draws depend on (key, its prompt's id, its member) alone.
      network: the policy.
      group: members drawn from the law.
      max_new_tokens: T.
      stop_tokens: ids that end a sequence.
      baseline_members: further members drawn greedily, flagged in ``Rollout.baseline``.

    Returns:
      The rollout, G = group + baseline_members.

    Raises:
      UserError: prompt and completion do not fit the network.
    """
    chex.assert_rank([prompt_tokens, prompt_lengths, ids], [2, 1, 1])
    n, p = prompt_tokens.shape
    g, t = group + baseline_members, max_new_tokens
    check_fits(network, p, t)
    cache = prefill(params, prompt_tokens, prompt_lengths, network=network, length=p + t)

    def repeat(x: Array) -> Array:
        return constrain(jnp.repeat(x, g, axis=0), "batch", *(None,) * (x.ndim - 1))

    baseline = jnp.arange(g) >= group
    rows = law.replace(temperature=jnp.tile(jnp.where(baseline, 0.0, law.temperature), n))
    slots = start(
        jax.tree.map(lambda x: jnp.repeat(x, g, axis=0), cache),
        repeat(prompt_tokens),
        repeat(prompt_lengths),
        sequence_keys(key, ids, g).reshape(n * g),
        rows,
        jnp.full(n * g, t, jnp.int32),
        max_new_tokens=t,
    )
    slots = decode(params, slots, version, network=network, steps=t, stop_tokens=stop_tokens)
    return Rollout(
        prompt_tokens=prompt_tokens,
        prompt_lengths=prompt_lengths,
        tokens=slots.tokens.reshape(n, g, t),
        lengths=slots.lengths.reshape(n, g),
        mask=slots.mask.reshape(n, g, t),
        sampler_logprobs=slots.logprobs.reshape(n, g, t),
        versions=slots.versions.reshape(n, g, t),
        stop=slots.stop.reshape(n, g),
        baseline=jnp.broadcast_to(baseline, (n, g)),
    ).check()


def check_fits(network: Network, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises UserError when prompt and completion together are longer than the network allows."""
    if max_new_tokens < 1:
        raise UserError(f"sampling.max_new_tokens = {max_new_tokens}; must be at least 1")
    if prompt_tokens + max_new_tokens > network.max_length:
        raise UserError(
            f"sampling.max_new_tokens = {max_new_tokens}: with prompts of up to {prompt_tokens} "
            f"tokens a sequence may reach {prompt_tokens + max_new_tokens}, but the model holds "
            f"{network.max_length}; lower it to {max(network.max_length - prompt_tokens, 0)} or "
            "lower data.max_prompt_tokens"
        )
