"""Decode slots over a cache, as pure functions over one state.

A ``Slots`` value can be kept across a weight update and resumed, forked into continuations that
share their past, rewound, and extended by tokens from outside (tools, hints). ``generate`` puts
these functions together for a batch in one program, ``serving`` for requests that come one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jrl.errors import UserError
from jrl.models import gpu
from jrl.models.decode import put_columns
from jrl.sampling.cache import pick, share, take
from jrl.sampling.params import SamplingParams, per_row, sample, sampling_logprobs
from jrl.sampling.report import TokenReport
from jrl.types import Array, Cache, Network, StopReason


class Slots(struct.PyTreeNode):
    """S sequences being decoded. The cache holds all tokens of a row but the newest, ``pending``.

    Attributes:
      cache: the network's, with room for ``T`` own tokens a row at most.
      pending: [S] int32, the newest token of each row, not yet in the cache.
      prompt_lengths: [S] int32, tokens.
      lengths: [S] int32, completion tokens present.
      limits: [S] int32, the most completion tokens allowed.
      tokens: [S, T] int32, the completion so far.
      mask: [S, T] bool, True where the policy drew the token.
      logprobs: [S, T] float32, nats, of the distribution drawn from.
      versions: [S, T] int32, the policy version that drew each token; -1 elsewhere.
      stop: [S] int32, a ``StopReason``; decoding moves the rows that are RUNNING.
      keys: [S] PRNG keys; the draw of token t uses ``fold_in(key, t)``.
      sampling_params: one value a row.
      report: what a reply tells of the tokens of one call of ``decode``; None for nothing.
      measured: [S, T] float32, ``decode``'s ``measure`` at each token drawn; None for nothing.
      aligned: static, whether all running rows have the same number of own tokens, so that they
        write one column together.
    """

    cache: Cache
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
    sampling_params: SamplingParams
    report: TokenReport | None = None
    measured: Array | None = None
    aligned: bool = struct.field(pytree_node=False, default=False)


Measure = Callable[[Array], Array]
"""(log-probabilities of all tokens [S, V] float32, nats) -> a number for each row, [S] float32."""


class IdleLimit(NamedTuple):
    """Limit of idle slot-steps in one call of ``decode``.

    Attributes:
      needed: [] int32, slots for which there is work; each of them that does not run is idle.
      steps: [] int32, slot-steps. The first decode step is taken however many slots are idle.
    """

    needed: Array
    steps: Array

    def of(self, runs: Array) -> Array:
        """[] int32: slots that are idle while ``runs`` [] int32 of them run."""
        return jnp.maximum(self.needed - runs, 0)


def prefill(
    weights: Any, prompt_tokens: Array, prompt_lengths: Array, *, network: Network
) -> Cache:
    """The cache of N prompts, each computed once however many samples it gets.

    The last token of each prompt is left out: it is the first ``pending`` token.

    Args:
      weights: the policy's, as ``network.prepare`` returns them.
      prompt_tokens: [N, P] int32, from column 0.
      prompt_lengths: [N] int32.
      network: the policy.

    Returns:
      The network's cache with N rows of P tokens.
    """
    n, p = prompt_tokens.shape
    cache = network.init_cache(n, p, weights)
    if network.extras.fill is not None:
        return network.extras.fill(weights, cache, prompt_tokens, prompt_lengths - 1)
    # The last token is left to the decode loop, so no logits of a prompt are ever made.
    positions = jnp.broadcast_to(jnp.arange(p, dtype=jnp.int32), (n, p))
    live = positions < prompt_lengths[:, None] - 1
    _, cache = network.extend(weights, cache, prompt_tokens, positions, live)
    return cache


def start(
    cache: Cache,
    prompt_tokens: Array,
    prompt_lengths: Array,
    keys: Array,
    sampling_params: SamplingParams,
    limits: Array,
    *,
    max_new_tokens: int,
) -> Slots:
    """Slots ready to decode, one a row of ``cache``.

    Args:
      cache: S rows that hold their prompts but for the last token, such as ``prefill`` gives, or
        ``cache.share`` of it for groups.
      prompt_tokens: [S, P] int32.
      prompt_lengths: [S] int32.
      keys: [S] PRNG keys.
      sampling_params: scalars or [S].
      limits: [S] int32, tokens, at most ``max_new_tokens``.
      max_new_tokens: T, the width of the completion arrays.
    """
    # The prefill left the last token out: the first decode step feeds it, and its logits give token
    # 0.
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
        sampling_params=per_row(sampling_params, s),
    )


def decode(
    weights: Any,
    slots: Slots,
    version: Array,
    *,
    network: Network,
    steps: Array | int,
    stop_tokens: Sequence[int] | Array,
    until: Array | int = 0,
    idle: IdleLimit | None = None,
    measure: Measure | None = None,
    at_once: int = 1,
) -> tuple[Slots, Array]:
    """Draws up to ``steps`` tokens for every running slot, ending early when none runs.

    Args:
      weights: the policy's, as ``network.prepare`` returns them.
      slots: the state; donate it to a jitted call, since the cache is updated in place.
      version: [] int32, recorded with each token drawn.
      network: the policy.
      steps: the most tokens a slot gains in this call.
      stop_tokens: ids that end a sequence; the stop token is part of the completion. For stops of
        its own for each row an array [S, K] int32, padded with -1.
      until: the call also ends when no more slots than this run.
      idle: the call also ends before more slot-steps than this would draw nothing; None for never.
      measure: of the distribution that each token is drawn from, written to ``slots.measured``;
        None where that is None.
      at_once: steps that nearly every call takes, where their number is an array. On a GPU the end
        is looked for after so many, at most ``gpu.STEPS``; steps beyond it take time, and draw
        nothing. Whether slots are idle is looked at as often.

    Returns:
      The new state, and the number of decode steps taken, [] int32.
    """
    stops = jnp.asarray(stop_tokens, jnp.int32)
    # One row that is broadcast: [S, K] would be compared S times over for the same ids.
    stops = stops if stops.ndim == 2 else stops[None]
    # Found once and counted up: a maximum over rows in the loop would be sent between devices.
    first = jnp.max(slots.lengths) if slots.aligned else None

    before = slots.lengths

    def lasts(carry: tuple[Array, Slots, Array]) -> Array:
        i, slots, _ = carry
        # A loop, not a scan: it ends with the longest row, and the rows that end before cost a slot
        # each.
        return (i < steps) & (jnp.sum(slots.stop == StopReason.RUNNING) > until)

    def running(carry: tuple[Array, Slots, Array]) -> Array:
        i, slots, spent = carry
        unfinished, runs = lasts(carry), jnp.sum(slots.stop == StopReason.RUNNING)
        return (
            unfinished
            if idle is None
            else unfinished & ((i == 0) | (spent + idle.of(runs) <= idle.steps))
        )

    one_token = partial(_one_token, weights, stops, first, network, idle, measure)
    # Steps between two looks at the end: a number that is known, and no more than there are.
    at_once = gpu.block_of(steps) if isinstance(steps, int) else min(gpu.steps_at_once(), at_once)

    def several(carry: tuple[Array, Slots, Array]) -> tuple[Array, Slots, Array]:
        # Steps beyond the end draw nothing, so that it is exact. While slots are idle the others
        # draw on: these steps take their time in any case.
        begin = carry[0]

        def one(step: Array, state: tuple[Slots, Array]) -> tuple[Slots, Array]:
            now = begin + step, *state
            return one_token(now, lasts(now))[1:]

        return begin + at_once, *jax.lax.fori_loop(0, at_once, one, carry[1:])

    # A loop that ends early has no trip count in its program. It is named, so that a profile tells
    # it apart, and ``plan.useful`` can say how often it runs.
    with jax.named_scope("decode"):
        begin = jnp.int32(0), slots, jnp.int32(0)
        step = one_token if at_once == 1 else several
        _, slots, _ = jax.lax.while_loop(running, step, begin)
    # What follows from the lengths is not written step by step. A row that runs has run from the
    # beginning, so that the one with the most new tokens has one for each step.
    columns = jnp.arange(slots.tokens.shape[1])[None]
    new = (columns >= before[:, None]) & (columns < slots.lengths[:, None])
    slots = slots.replace(
        mask=slots.mask | new, versions=jnp.where(new, version, slots.versions).astype(jnp.int32)
    )
    return slots, jnp.max(slots.lengths - before)


def _one_token(
    weights: Any,
    stops: Array,
    first: Array | None,
    network: Network,
    idle: IdleLimit | None,
    measure: Measure | None,
    carry: tuple[Array, Slots, Array],
    active: Array | bool = True,
) -> tuple[Array, Slots, Array]:
    """One decode step: a token more in every running row.

    Args:
      weights: the policy's.
      stops: [S or 1, K] int32.
      first: [] int32, where the rows are aligned their column at step 0.
      network: the policy.
      idle: counts the slot-steps that draw nothing; None where nobody asks.
      measure: as in ``decode``.
      carry: the number of the step, the state, and the slot-steps so far that drew nothing.
      active: [] bool, False for a step that leaves everything as it is.
    """
    i, slots, spent = carry
    column = None if first is None else first + i
    runs = (slots.stop == StopReason.RUNNING) & active
    spent = spent if idle is None else spent + jnp.where(active, idle.of(jnp.sum(runs)), 0)
    # The newest token is the only one that the cache lacks; its position is the row's last.
    position = slots.prompt_lengths + slots.lengths - 1
    cache = slots.cache.replace(column=column)
    hidden, cache = network.extend(
        weights, cache, slots.pending[:, None], position[:, None], runs[:, None]
    )
    with jax.named_scope("draw"):
        logits = network.logits(weights, hidden[:, 0])
        # By the row's key and the token's number alone, so that neither the batch nor the order
        # in which rows get their slots changes what is drawn.
        uniform = _uniforms(slots.keys, slots.lengths)
        token, logprob = sample(uniform, logits, slots.sampling_params)
    # From the same logits, so that a report costs no second pass over the vocabulary matrix.
    report = slots.report
    if report is not None:
        # Past the last column nothing is written.
        at = jnp.where(active, i, report.logprobs.shape[1])
        report = report.with_step(at, logits, token, slots.sampling_params)
    lengths = slots.lengths + runs
    at_limit = jnp.where(lengths >= slots.limits, StopReason.LENGTH, StopReason.RUNNING)
    stopped = jnp.any(token[:, None] == stops, axis=1)
    reason = jnp.where(stopped, StopReason.STOP_TOKEN, at_limit)
    # Rows that have ended stay in the arrays until all are done, and write nothing.
    columns = jnp.where(runs, slots.lengths, slots.tokens.shape[1])

    def put(x: Array, new: Array | bool) -> Array:
        return _put(x, new, columns, column)

    measured = slots.measured
    if measured is not None and measure is not None:
        measured = put(measured, measure(sampling_logprobs(logits, slots.sampling_params)))
    slots = slots.replace(
        cache=cache.replace(column=None),
        pending=jnp.where(runs, token, slots.pending),
        lengths=lengths,
        tokens=put(slots.tokens, token),
        logprobs=put(slots.logprobs, logprob),
        stop=jnp.where(runs, reason, slots.stop).astype(jnp.int32),
        report=report,
        measured=measured,
    )
    return i + 1, slots, spent


def _uniforms(keys: Array, counts: Array) -> Array:
    """[S] float32 in [0, 1): draw number ``counts`` [S] of each row's own key [S]."""
    draw = lambda key, t: jax.random.uniform(jax.random.fold_in(key, t))  # noqa: E731
    return jax.vmap(draw)(keys, counts)


def _put(x: Array, new: Array | bool, columns: Array, column: Array | None) -> Array:
    """``x`` [S, T] with new [S] or [] in each row's column; columns beyond T write nothing.

    ``column`` is the one of all columns within T, where there is but one.
    """
    values = jnp.broadcast_to(new, columns.shape).astype(x.dtype)
    inside = columns < x.shape[1]
    if column is not None:
        at = jnp.minimum(column, x.shape[1] - 1)
        return put_columns(x, values[:, None], at, 1, inside[:, None])
    # Row by row, so that rows on other devices are seen to be untouched.
    put = lambda row, at, value: row.at[at].set(value, mode="drop")  # noqa: E731
    return jax.vmap(put)(x, columns, values)


def fork(slots: Slots, source: Array, keys: Array, *, within: bool = False) -> Slots:
    """Slots whose row i continues row ``source[i]``, with its own key from here on.

    Args:
      slots: S rows.
      source: [S'] int32 rows of ``slots``; a row may be named many times.
      keys: [S'] PRNG keys.
      within: whether each row continues one of its own block, the M blocks of new rows being those
        of the old ones. Their prefixes then stay shared; else each row gets a copy of its own,
        since continuations of any rows may be neighbours.

    Returns:
      S' rows that share their past with their sources.
    """
    chex.assert_equal_shape([source, keys])
    # The cache is taken apart from the rest: with long prompts its prefixes are most of it, and
    # within their blocks they stay where they are.
    cache = slots.cache
    cache = cache.replace(rows=pick(cache.rows, source)) if within else take(cache, source)
    return pick(slots.replace(cache=None), source).replace(keys=keys, cache=cache)


def rewind(slots: Slots, lengths: Array, last: Array | None = None) -> Slots:
    """Rows as they were when their completions had these lengths; they run again from there.

    With ``fork`` before it, continuations of any position.

    Args:
      slots: S rows.
      lengths: [S] int32, at least 1; a row that has no more tokens stays as it is.
      last: [S] int32, the last token of each row's prompt; with it lengths may be 0.

    Returns:
      The state, whose cache is the old one: what is past a row's end is not seen.
    """
    # The newest token that stays is pending again, and will be written where it is already.
    rewinds = lengths < slots.lengths
    lengths = jnp.where(rewinds, lengths, slots.lengths)
    remains = jnp.arange(slots.tokens.shape[1])[None] < lengths[:, None]
    newest = jnp.take_along_axis(slots.tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    if last is not None:
        newest = jnp.where(lengths == 0, last, newest)
    # Cleared past the new length, or a shorter completion would carry numbers of tokens that it
    # lacks.
    measured = None if slots.measured is None else jnp.where(remains, slots.measured, 0.0)
    return slots.replace(
        measured=measured,
        aligned=False,
        pending=jnp.where(rewinds, newest, slots.pending),
        lengths=lengths,
        tokens=jnp.where(remains, slots.tokens, 0),
        mask=slots.mask & remains,
        logprobs=jnp.where(remains, slots.logprobs, 0.0),
        versions=jnp.where(remains, slots.versions, -1),
        stop=jnp.where(rewinds, StopReason.RUNNING, slots.stop).astype(jnp.int32),
    )


def extend(weights: Any, slots: Slots, tokens: Array, counts: Array, *, network: Network) -> Slots:
    """Appends tokens from outside (a tool's output, a hint), which are never trained on.

    A row that had stopped runs again, unless it is at its limit.

    Args:
      weights: the policy's, as ``network.prepare`` returns them.
      slots: S rows.
      tokens: [S, Q] int32, from column 0.
      counts: [S] int32, how many of them each row gets; 0 leaves a row as it is. What would pass
        a row's limit is cut off.
      network: the policy.

    Returns:
      The state after all tokens but the newest have entered the cache.
    """
    q = tokens.shape[1]
    # Without the cut the tokens would be written past the row's columns, and dropped there
    # unnoticed, while its length said that they are present.
    counts = jnp.minimum(counts, slots.limits - slots.lengths)
    column = jnp.arange(q)[None]
    # The cache lacks the pending token, and must keep lacking the newest one.
    fed = jnp.concatenate([slots.pending[:, None], tokens[:, :-1]], axis=1)
    positions = (slots.prompt_lengths + slots.lengths - 1)[:, None] + column
    _, cache = network.extend(weights, slots.cache, fed, positions, column < counts[:, None])
    # A gather over all T columns, since a scatter of [S, Q] places is a loop over rows on some
    # backends.
    offset = jnp.arange(slots.tokens.shape[1])[None] - slots.lengths[:, None]
    within = (offset >= 0) & (offset < counts[:, None])
    placed = jnp.take_along_axis(tokens, jnp.clip(offset, 0, q - 1), axis=1)
    newest = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    lengths = slots.lengths + counts
    running = jnp.where(lengths < slots.limits, StopReason.RUNNING, StopReason.LENGTH)
    return slots.replace(
        cache=cache,
        pending=jnp.where(counts > 0, newest, slots.pending),
        lengths=lengths,
        tokens=jnp.where(within, placed, slots.tokens),
        stop=jnp.where(counts > 0, running, slots.stop).astype(jnp.int32),
        aligned=False,
    )


def refresh(weights: Any, slots: Slots, prompt_tokens: Array, *, network: Network) -> Slots:
    """Recomputes the cache with new parameters, to resume after a weight update.

    Without it the old keys and values stay, as asynchronous systems do by default.

    Args:
      weights: the new policy's, as ``network.prepare`` returns them.
      slots: S rows.
      prompt_tokens: [S, P] int32, the prompts that the slots were started with.
      network: the policy.
    """
    # All rows in one pass at their full width: the cost of scoring the batch once.
    old = slots.cache
    s, p = prompt_tokens.shape
    width = slots.tokens.shape[1]
    if old.prefix_lengths is None:
        width, first = p + width, jnp.zeros(s, jnp.int32)
        cache = network.init_cache(s, width, weights)
    else:
        # Each block's prompt is read once here too, not once for each member.
        members = s // old.prefix_lengths.shape[0]
        prompts, lengths = prompt_tokens[::members], slots.prompt_lengths[::members]
        cache = prefill(weights, prompts, lengths, network=network)
        cache = share(
            cache,
            old.prefix_lengths,
            members,
            network=network,
            weights=weights,
            length=width,
        )
        first = old.offsets()
    # Positions first .. first + width - 1 of each row: prompt, then completion.
    positions = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    index = positions - slots.prompt_lengths[:, None]
    past = jnp.take_along_axis(slots.tokens, jnp.clip(index, 0, slots.tokens.shape[1] - 1), axis=1)
    prompt = jnp.take_along_axis(prompt_tokens, jnp.clip(positions, 0, p - 1), axis=1)
    tokens = jnp.where(index >= 0, past, prompt)
    live = positions < (slots.prompt_lengths + slots.lengths - 1)[:, None]
    _, cache = network.extend(weights, cache, tokens, positions, live)
    return slots.replace(cache=cache)


def check_length(network: Network, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises UserError when prompt and completion together are longer than the network allows."""
    if max_new_tokens < 1:
        raise UserError(f"sampling.max_new_tokens = {max_new_tokens}; must be at least 1")
    if prompt_tokens + max_new_tokens > network.max_length:
        room = network.max_length - prompt_tokens
        remedy = f"lower it to {room}, or shorten" if room > 0 else "shorten"
        raise UserError(
            f"sampling.max_new_tokens = {max_new_tokens}: with prompts of up to {prompt_tokens} "
            f"tokens a sequence may reach {prompt_tokens + max_new_tokens}, but the model holds "
            f"{network.max_length}; {remedy} the prompts (data.max_prompt_tokens for those of text)"
        )
