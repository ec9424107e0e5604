"""The decode batch of an engine: its state on the device, the programs over it, its inputs.

Every program has few shapes, so that all of them can be compiled before the first request:
admissions come in batches of a power of two, prompts in a few widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.sampling.cache import put_prefixes, rows_of
from jrl.sampling.params import SamplingParams
from jrl.sampling.report import TokenReport
from jrl.sampling.slots import IdleLimit, Measure, Slots, decode, pieces_of, prefill, refresh
from jrl.serving.request import PartialCompletion, Request, RequestLimits
from jrl.types import Array, Cache, Network, StopReason

MIN_WIDTH = 64
"""The narrowest width that prompts are padded to, tokens; each further one is four times wider."""


class Admission(NamedTuple):
    """New requests for some blocks of the batch: A prompts for D blocks of B rows each.

    Attributes:
      tokens: [A, W] int32, the prompts from column 0.
      lengths: [A] int32, tokens of each prompt.
      blocks: [D] int32, index of each block in the batch; M for an unused one.
      source: [D] int32, index of each block's prompt.
      seeds: [D * B, 2] uint32, the raw key of each row's request.
      members: [D * B] int32, member of the request.
      limits: [D * B] int32, the longest completion, tokens; 0 for an unused row.
      stops: [D * B, K] int32, stop tokens, padded with -1.
      sampling_params: one value a row.
    """

    tokens: Any
    lengths: Any
    blocks: Any
    source: Any
    seeds: Any
    members: Any
    limits: Any
    stops: Any
    sampling_params: SamplingParams


def widths(longest: int) -> tuple[int, ...]:
    """The widths that prompts are padded to, for prompts of up to ``longest`` tokens.

    >>> widths(600)
    (64, 256, 600)
    """
    found, width = [], MIN_WIDTH
    while width < longest:
        found.append(width)
        width *= 4
    return (*found, longest)


class AdmissionBuilder(NamedTuple):
    """Makes admissions on the host.

    Attributes:
      limits: of the engine's requests.
      block: B, slots that share a prompt.
      blocks: M, blocks of the batch.
      max_blocks: D, the most blocks in one admission, a power of two.
      widths: of prompts, ascending, tokens.
      stop_tokens: of requests that name none.
    """

    limits: RequestLimits
    block: int
    blocks: int
    max_blocks: int
    widths: tuple[int, ...]
    stop_tokens: tuple[int, ...]

    def build(
        self, blocks: Sequence[int], groups: Sequence[Sequence[PartialCompletion]]
    ) -> Admission:
        """The admission of each group, members of one request, into the block of the same index."""
        first = {group[0].number: group[0].request for group in groups}
        tokens, lengths = self._prompts(list(first.values()))
        row = {number: i for i, number in enumerate(first)}
        targets = np.full(self.max_blocks, self.blocks, np.int32)
        targets[: len(blocks)] = blocks
        source = np.zeros(self.max_blocks, np.int32)
        unused = Request(tokens=(0,), max_new_tokens=0)
        rows: list[tuple[Request, int]] = [(unused, 0)] * (self.max_blocks * self.block)
        for i, group in enumerate(groups):
            source[i] = row[group[0].number]
            start = i * self.block
            rows[start : start + len(group)] = [(m.request, m.member) for m in group]
        return Admission(
            tokens=tokens,
            lengths=lengths,
            blocks=targets,
            source=source,
            seeds=np.array([divmod(r.seed, 2**32) for r, _ in rows], np.uint32),
            members=np.array([member for _, member in rows], np.int32),
            limits=np.array([r.max_new_tokens for r, _ in rows], np.int32),
            stops=np.stack([self._stops(r) for r, _ in rows]),
            sampling_params=self._sampling_params([r for r, _ in rows]),
        )

    def _prompts(self, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and lengths: a power of two of rows, padded to one of the widths."""
        count = 1 << (len(requests) - 1).bit_length()
        longest = max(len(r.tokens) for r in requests)
        tokens = np.zeros((count, next(w for w in self.widths if w >= longest)), np.int32)
        lengths = np.ones(count, np.int32)
        for i, request in enumerate(requests):
            lengths[i] = len(request.tokens)
            tokens[i, : lengths[i]] = request.tokens
        return tokens, lengths

    def _stops(self, request: Request) -> np.ndarray:
        ids = self.stop_tokens if request.stop_tokens is None else request.stop_tokens
        return np.array([*ids, *[-1] * (self.limits.stop_tokens - len(ids))], np.int32)

    def _sampling_params(self, requests: Sequence[Request]) -> SamplingParams:
        v = self.limits.vocab_size
        rows: dict[str, Any] = {
            "temperature": np.array([r.temperature for r in requests], np.float32),
            "top_k": np.array([r.top_k for r in requests], np.int32),
            "top_p": np.array([r.top_p for r in requests], np.float32),
            "min_p": np.array([r.min_p for r in requests], np.float32),
            "bias": np.stack([r.bias(v) for r in requests]) if self.limits.biases else None,
        }
        return SamplingParams(**rows)


# ---------------------------------------------------------------- on the device


class DecodeBatch(struct.PyTreeNode):
    """Slots of unrelated requests, on the device.

    Attributes:
      slots: S rows, in blocks of B that share a prefix.
      prompts: [M, P] int32, the prompt of each block.
      stops: [S, K] int32, the tokens that end each row, padded with -1.
    """

    slots: Slots
    prompts: Array
    stops: Array


class ChunkOutput(NamedTuple):
    """What one chunk of decoding adds, for the host.

    Attributes:
      tokens: [S, W] int32, each row's new tokens from column 0.
      logprobs: [S, W] float32, nats.
      counts: [S] int32, new tokens.
      stop: [S] int32, a ``StopReason``.
      steps: [] int32, decode steps taken.
      report: for the rows that asked for one; its columns are those of ``tokens``.
      measured: [S, W] float32, ``measure`` at each token; None where nothing is measured.
    """

    tokens: Array
    logprobs: Array
    counts: Array
    stop: Array
    steps: Array
    report: TokenReport | None = None
    measured: Array | None = None


def empty_batch(
    weights: Any,
    *,
    network: Network,
    blocks: int,
    block: int,
    prompt_tokens: int,
    max_new_tokens: int,
    stop_tokens: int,
    biases: bool,
    measured: bool = False,
) -> DecodeBatch:
    """A batch in which nothing runs."""
    s, t = blocks * block, max_new_tokens
    own = network.init_cache(s, t, weights, pieces_of(t)).own
    prefix = network.init_cache(blocks, prompt_tokens, weights).own
    zeros = jnp.zeros(s, jnp.int32)
    sampling_params = SamplingParams(
        temperature=jnp.ones(s, jnp.float32),
        top_k=zeros,
        top_p=jnp.ones(s, jnp.float32),
        min_p=jnp.zeros(s, jnp.float32),
        bias=jnp.zeros((s, network.vocab_size), jnp.float32) if biases else None,
    )
    slots = Slots(
        cache=Cache(own=own, prefix=prefix, prefix_lengths=jnp.zeros(blocks, jnp.int32)),
        pending=zeros,
        prompt_lengths=zeros + 1,
        lengths=zeros,
        limits=zeros,
        tokens=jnp.zeros((s, t), jnp.int32),
        mask=jnp.zeros((s, t), bool),
        logprobs=jnp.zeros((s, t), jnp.float32),
        versions=jnp.full((s, t), -1, jnp.int32),
        stop=jnp.full(s, jnp.int32(StopReason.LENGTH)),
        keys=jax.random.split(jax.random.key(0), s),
        sampling_params=sampling_params,
        measured=jnp.zeros((s, t), jnp.float32) if measured else None,
    )
    prompts = jnp.zeros((blocks, prompt_tokens), jnp.int32)
    return DecodeBatch(slots, prompts, jnp.full((s, stop_tokens), -1, jnp.int32))


def admit(weights: Any, batch: DecodeBatch, new: Admission, *, network: Network) -> DecodeBatch:
    """The batch with new requests in some blocks, whose old rows are dropped."""
    slots, width = batch.slots, new.tokens.shape[1]
    block = slots.pending.shape[0] // batch.prompts.shape[0]
    store = prefill(weights, new.tokens, new.lengths, network=network)
    lengths = jnp.asarray(new.lengths)[new.source]
    tokens = jnp.asarray(new.tokens)[new.source]
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    rows = (new.blocks[:, None] * block + jnp.arange(block)[None]).reshape(-1)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(new.seeds), new.members)

    def put(old: Array, x: Any) -> Array:
        return old.at[rows].set(x, mode="drop")

    fresh = slots.replace(
        cache=put_prefixes(
            slots.cache, new.blocks, rows_of(store, jnp.asarray(new.source)), lengths - 1
        ),
        pending=put(slots.pending, jnp.repeat(last, block)),
        prompt_lengths=put(slots.prompt_lengths, jnp.repeat(lengths, block)),
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
        batch.prompts.at[new.blocks, :width].set(tokens, mode="drop"),
        put(batch.stops, new.stops),
    )


def decode_chunk(
    weights: Any,
    batch: DecodeBatch,
    version: Array,
    halted: Array,
    steps: Array,
    wanted: Array | None = None,
    idle: IdleLimit | None = None,
    *,
    network: Network,
    width: int,
    top: int = 0,
    measure: Measure | None = None,
) -> tuple[DecodeBatch, ChunkOutput]:
    """The batch after up to ``steps`` more tokens in every running row, and those tokens.

    Args:
      weights: as ``network.prepare`` returns them.
      batch: the state; donated.
      version: [] int32, of the policy.
      halted: [S] int32, a ``StopReason`` for rows to stop first; RUNNING leaves a row as it is.
      steps: [] int32, decode steps, at most ``width``.
      wanted: [S] int32, alternatives reported with each token of a row; -1 for no report. None
        where no row may ask for one, which costs nothing.
      idle: the chunk ends before more slot-steps than this would draw nothing; None for never.
      network: the policy.
      width: W, columns of the output.
      top: K, the most alternatives reported.
      measure: of the distribution that each token is drawn from, where the batch has room for it.
    """
    stop = jnp.where(halted == StopReason.RUNNING, batch.slots.stop, halted)
    slots = batch.slots.replace(stop=stop.astype(jnp.int32))
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
    report = None
    if wanted is not None:
        report = TokenReport.empty(jnp.where(runs, wanted, -1), width, top)
    slots, count = decode(
        weights,
        slots.replace(sampling_params=used, report=report),
        version,
        network=network,
        steps=steps,
        stop_tokens=batch.stops,
        idle=idle,
        measure=measure,
    )
    columns = before[:, None] + jnp.arange(width)[None]
    columns = jnp.minimum(columns, slots.tokens.shape[1] - 1)
    measured = slots.measured
    out = ChunkOutput(
        tokens=jnp.take_along_axis(slots.tokens, columns, axis=1),
        logprobs=jnp.take_along_axis(slots.logprobs, columns, axis=1),
        counts=slots.lengths - before,
        stop=slots.stop,
        steps=count,
        report=slots.report,
        measured=None if measured is None else jnp.take_along_axis(measured, columns, axis=1),
    )
    return batch.replace(slots=slots.replace(sampling_params=sampling_params, report=None)), out


def recompute(weights: Any, batch: DecodeBatch, *, network: Network) -> DecodeBatch:
    """The batch with its cache recomputed from the tokens, under other weights."""
    block = batch.slots.pending.shape[0] // batch.prompts.shape[0]
    prompts = jnp.repeat(batch.prompts, block, axis=0)
    return batch.replace(slots=refresh(weights, batch.slots, prompts, network=network))
