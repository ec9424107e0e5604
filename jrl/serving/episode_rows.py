"""Decode slots for episodes: rows that stop at the end of a turn, wait, take an answer and resume.

A row keeps its cache from the first token of its prompt to the last of the episode, so a prompt and
every answer are computed once. A row that waits costs its slot and nothing else: decoding moves
only rows that run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.sampling.slots import check_fits, extend
from jrl.serving import batch as programs
from jrl.serving.batch import AdmissionBuilder, ChunkOutput, DecodeBatch
from jrl.serving.request import Limits, PartialCompletion, Request
from jrl.types import Array, Network, Params, StopReason

_MAX_ADMITTED = 8
"""The most rows of one admission; more take several."""


class Start(NamedTuple):
    """What a row begins with.

    Attributes:
      tokens: the prompt's ids.
      seed: below 2**64, of the prompt; ``member`` is folded into it.
      member: number in the group.
      limit: tokens after the prompt at which the row stops.
    """

    tokens: tuple[int, ...]
    seed: int
    member: int
    limit: int


class More(NamedTuple):
    """What a row goes on with: ids from outside, and the limit of tokens from then on."""

    tokens: Sequence[int]
    limit: int


class EpisodeRows:
    """S rows on the device. Not thread-safe: one thread calls it.

    Args:
      network: the policy.
      slots: S.
      prompt_tokens: the longest prompt.
      max_new_tokens: T, the most tokens of a row after its prompt, drawn or not.
      stop_tokens: ids that end a turn.
      chunk: decode steps between two returns to the host.
      sampling: temperature, top_k, top_p and min_p by name, as ``make_sampling_params`` takes them.

    Attributes:
      version: of the weights in use.
    """

    def __init__(
        self,
        network: Network,
        *,
        slots: int,
        prompt_tokens: int,
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        chunk: int,
        sampling: Mapping[str, Any],
    ) -> None:
        check_fits(network, prompt_tokens, max_new_tokens)
        self.slots, self.prompt_tokens, self.max_new_tokens = slots, prompt_tokens, max_new_tokens
        self.version = 0
        self._chunk, self._sampling = chunk, dict(sampling)
        self._widths = programs.widths(max_new_tokens)
        limits = Limits(
            slots=slots,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            vocab_size=network.vocab_size,
            max_length=network.max_length,
            stop_tokens=len(stop_tokens),
            biases=False,
        )
        self._builder = AdmissionBuilder(
            limits=limits,
            block=1,
            blocks=slots,
            max_blocks=1 << (min(_MAX_ADMITTED, slots).bit_length() - 1),
            widths=programs.widths(prompt_tokens),
            stop_tokens=tuple(stop_tokens),
        )
        bind = functools.partial
        self._prepare = jax.jit(network.prepare)
        self._admit = jax.jit(bind(programs.admit, network=network), donate_argnums=1)
        self._decode = jax.jit(
            bind(programs.decode_chunk, network=network, width=chunk), donate_argnums=1
        )
        self._extend = jax.jit(bind(extend_rows, network=network), donate_argnums=1)
        self._make = jax.jit(
            bind(
                programs.empty_batch,
                network=network,
                blocks=slots,
                block=1,
                prompt_tokens=prompt_tokens,
                max_new_tokens=max_new_tokens,
                stop_tokens=len(stop_tokens),
                biases=False,
            )
        )
        self._weights: Any = None
        self._batch: DecodeBatch | None = None
        self._halted = np.full(slots, StopReason.RUNNING, np.int32)

    def set_weights(self, params: Params, version: int) -> None:
        """Replaces the parameters from the next token on; rows keep their caches."""
        self._weights, self.version = self._prepare(params), version
        if self._batch is None:
            self._batch = self._make(self._weights)

    def release(self) -> None:
        """Lets go of weights and caches, until ``set_weights``."""
        self._weights = self._batch = None

    def admit(self, starts: Mapping[int, Start]) -> None:
        """Begins rows, whatever they held; a prompt that several share is computed once."""
        rows, most = list(starts), self._builder.max_blocks
        for first in range(0, len(rows), most):
            some = rows[first : first + most]
            groups = []
            for row in some:
                start = starts[row]
                request = Request(start.tokens, start.limit, seed=start.seed, **self._sampling)
                number = [starts[other].tokens for other in some].index(start.tokens)
                groups.append([PartialCompletion(number, start.member, request, None)])
            self._batch = self._admit(self._weights, self._batch, self._builder.build(some, groups))
            self._halted[some] = StopReason.RUNNING

    def extend(self, answers: Mapping[int, More]) -> None:
        """Appends ids from outside to rows that have stopped, which then run again."""
        longest = max(len(more.tokens) for more in answers.values())
        tokens = np.zeros((self.slots, next(w for w in self._widths if w >= longest)), np.int32)
        counts, limits = np.zeros(self.slots, np.int32), np.zeros(self.slots, np.int32)
        for row, more in answers.items():
            tokens[row, : len(more.tokens)] = more.tokens
            counts[row], limits[row] = len(more.tokens), more.limit
        self._batch = self._extend(self._weights, self._batch, tokens, counts, limits)

    def halt(self, row: int) -> None:
        """Stops a row before the next token."""
        self._halted[row] = StopReason.ABORTED

    def decode(self) -> ChunkOutput:
        """Draws up to a chunk of tokens in every running row; the output is on the host."""
        version, steps = np.int32(self.version), np.int32(self._chunk)
        self._batch, out = self._decode(self._weights, self._batch, version, self._halted, steps)
        self._halted = np.full(self.slots, StopReason.RUNNING, np.int32)
        return jax.device_get(out)


def extend_rows(
    weights: Any,
    batch: DecodeBatch,
    tokens: Array,
    counts: Array,
    limits: Array,
    *,
    network: Network,
) -> DecodeBatch:
    """The batch with tokens from outside behind some rows.

    Args:
      weights: as ``network.prepare`` returns them.
      batch: the state; donated.
      tokens: [S, Q] int32, from column 0.
      counts: [S] int32, how many each row gets; 0 leaves it as it is.
      limits: [S] int32, completion tokens at which a row stops that gets any.
      network: the policy.
    """
    given = counts > 0
    slots = batch.slots.replace(limits=jax.numpy.where(given, limits, batch.slots.limits))
    return batch.replace(slots=extend(weights, slots, tokens, counts, network=network))
