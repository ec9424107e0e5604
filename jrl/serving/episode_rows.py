"""Decode slots for episodes: rows that stop at the end of a turn, wait, take an answer and resume.

A row keeps its cache from the first token of its prompt to the last of the episode, so a prompt and
every answer are computed once. A row that waits may leave its slot: parked, with a copy of its
cache, or dropped, to be read again. What is drawn is the same wherever a row waited.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.mesh import parts_of
from jrl.sampling.parking import extend_some, fork_row, pick_rows, put_rows
from jrl.sampling.slots import IdleLimit, Measure, Slots, check_length
from jrl.serving import batch as programs
from jrl.serving.batch import AdmissionBuilder, ChunkOutput, DecodeBatch
from jrl.serving.request import PartialCompletion, Request, RequestLimits
from jrl.serving.row_costs import RowCosts, Timings
from jrl.types import Network, Params, Stack, StopReason

_MAX_ADMITTED = 8
"""The most rows of one admission; more take several."""
_EXTENDED = 4
"""Rows that get tokens in one call, if there are as many slots.

Always the same number, each padded for itself, and prompts are computed one by one: products of
other shapes add in another order, and a row's bits must not depend on whose turn came with its own.
"""
_SHORT = 16
"""The narrowest width that answers are padded to, tokens."""


class RowStart(NamedTuple):
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
    """What a row resumes with: ids from outside, and the limit of tokens from then on."""

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
      chunk: the most decode steps between two returns to the host.
      sampling: temperature, top_k, top_p and min_p by name, as ``make_sampling_params`` takes them.
      parked: the most rows that may be parked; None for as many as there are slots, or as a device
        has of them where the mesh divides them: a parked row is whole on every device.
      measure: of the distribution that each token is drawn from; ``decode`` returns its numbers.
        None for nothing.
      each: whether every row is drawn by one policy of the network's several, which ``decode`` is
        told; False for the network as it is.

    Attributes:
      version: of the weights in use.
      costs: what the work has cost so far.
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
        parked: int | None = None,
        measure: Measure | None = None,
        each: bool = False,
    ) -> None:
        several = network.extras.stack if each else None
        if several is not None:
            network = several.speaking(jax.numpy.zeros(1, np.int32))
        check_length(network, prompt_tokens, max_new_tokens)
        self.slots, self.prompt_tokens, self.max_new_tokens = slots, prompt_tokens, max_new_tokens
        self.version = 0
        self._chunk, self._sampling = chunk, dict(sampling)
        self._parked = parked
        self.costs = RowCosts(slots)
        widths = programs.widths(max_new_tokens)
        self._widths = (_SHORT, *widths) if widths[0] > _SHORT else widths
        limits = RequestLimits(
            slots=slots,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            vocab_size=network.vocab_size,
            max_length=network.max_length,
            stop_tokens=len(stop_tokens),
            biases=False,
        )
        self._stops = np.array([*stop_tokens], np.int32)
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
            bind(_decode, network=network, several=several, width=chunk, measure=measure),
            donate_argnums=1,
        )
        self._extend = jax.jit(bind(extend_some, network=network), donate_argnums=1)
        self._pick = jax.jit(pick_rows)
        self._fork = jax.jit(fork_row)
        self._put = jax.jit(put_rows, donate_argnums=0)
        self._put_branch = jax.jit(_put_branch, donate_argnums=0)
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
                measured=measure is not None,
            )
        )
        self._weights: Any = None
        self._batch: DecodeBatch | None = None
        self._halted = np.full(slots, StopReason.RUNNING, np.int32)

    @property
    def parked(self) -> int:
        """The most rows that may be parked, under the mesh in use."""
        return self.slots // parts_of("batch", self.slots) if self._parked is None else self._parked

    @property
    def _state(self) -> DecodeBatch:
        assert self._batch is not None, "set_weights comes first"
        return self._batch

    def set_weights(self, params: Params, version: int) -> None:
        """Replaces the parameters from the next token on; rows keep their caches."""
        self._weights, self.version = self._prepare(params), version
        if self._batch is None:
            batch = self._make(self._weights)
            # Written here also for the slots that a parked row takes before any admission.
            stops = jax.numpy.broadcast_to(self._stops, batch.stops.shape)
            self._batch = batch.replace(stops=stops)

    def release(self) -> None:
        """Lets go of weights and caches, until ``set_weights``."""
        self._weights = self._batch = None

    def admit(self, starts: Mapping[int, RowStart]) -> int:
        """Begins rows, whatever they held; a prompt that several share is computed once.

        Returns:
          The prompts' tokens, each prompt counted as often as it was computed.
        """
        of_prompt: dict[tuple[int, ...], list[int]] = {}
        for row, start in starts.items():
            of_prompt.setdefault(start.tokens, []).append(row)
        most, read = self._builder.max_blocks, 0
        parts = [
            rows[i : i + most] for rows in of_prompt.values() for i in range(0, len(rows), most)
        ]
        for some in parts:
            groups = []
            for row in some:
                start = starts[row]
                request = Request(start.tokens, start.limit, seed=start.seed, **self._sampling)
                groups.append([PartialCompletion(0, start.member, request, None)])
            new = self._builder.build(some, groups)
            admit = functools.partial(self._admit, self._weights, self._batch, new)
            shape = new.tokens.shape
            self._batch = self._timed(self.costs.reading, ("admit", *shape), new.tokens.size, admit)
            self._halted[some] = StopReason.RUNNING
            read += len(groups[0][0].request.tokens)
        return read

    def extend(self, answers: Mapping[int, More]) -> None:
        """Appends ids from outside to rows that have stopped, which then run again."""
        size = min(_EXTENDED, self.slots)
        of_width: dict[int, list[int]] = {}
        for row, more in answers.items():
            width = next(w for w in self._widths if w >= len(more.tokens))
            of_width.setdefault(width, []).append(row)
        parts = [
            (width, rows[i : i + size])
            for width, rows in of_width.items()
            for i in range(0, len(rows), size)
        ]
        for width, some in parts:
            index = np.full(size, self.slots, np.int32)
            tokens = np.zeros((size, width), np.int32)
            counts, limits = np.zeros(size, np.int32), np.zeros(size, np.int32)
            for i, row in enumerate(some):
                more = answers[row]
                tokens[i, : len(more.tokens)] = more.tokens
                index[i], counts[i], limits[i] = row, len(more.tokens), more.limit
            extend = functools.partial(
                self._extend, self._weights, self._state.slots, index, tokens, counts, limits
            )
            slots = self._timed(self.costs.reading, ("extend", size, width), tokens.size, extend)
            self._batch = self._state.replace(slots=slots)

    def park(self, row: int) -> Slots:
        """A copy of a row, for ``resume``; its slot is free then."""
        pick = functools.partial(self._pick, self._state.slots, np.array([row], np.int32))
        return self._timed(self.costs.leaving, None, 1, pick)

    def fork(self, row: int, start: RowStart, length: int) -> Slots:
        """A copy of a row that has stopped, as it was earlier, for ``resume``.

        Args:
          row: stays as it is.
          start: of the new row: its member is another one of the same prompt.
          length: tokens behind the prompt that the copy keeps, at least 1.
        """
        return self._fork(self.park(row), *self._branching(start, length))

    def _branching(self, start: RowStart, length: int) -> tuple[Any, ...]:
        """What ``fork_row`` takes beside a row."""
        raw = np.array(divmod(start.seed, 2**32), np.uint32)
        return raw, *np.array([start.member, length, start.limit], np.int32)

    def resume(self, row: int, parked: Slots) -> None:
        """Puts a parked row into a slot, whatever that held."""
        put = functools.partial(self._put, self._state.slots, np.array([row], np.int32), parked)
        slots = self._timed(self.costs.returning, None, 1, put)
        self._batch = self._state.replace(slots=slots)
        self._halted[row] = StopReason.RUNNING

    def resume_branch(self, row: int, parked: Slots, start: RowStart) -> None:
        """``resume`` of a copy of a parked row as another member, in one program."""
        branching = self._branching(start, self.max_new_tokens)  # all that the row has
        asked = np.array([row], np.int32), parked, branching
        put = functools.partial(self._put_branch, self._state.slots, *asked)
        slots = self._timed(self.costs.returning, None, 1, put)
        self._batch = self._state.replace(slots=slots)
        self._halted[row] = StopReason.RUNNING

    def halt(self, row: int) -> None:
        """Stops a row before the next token."""
        self._halted[row] = StopReason.ABORTED

    def decode(
        self, wanted: int | None = None, policies: Sequence[int] | None = None
    ) -> ChunkOutput:
        """Draws up to a chunk of tokens in every running row; the output is on the host.

        The chunk ends early where slots are idle, see ``RowCosts.idle_steps``.

        Args:
          wanted: slots that are idle when their rows do not run; None for all.
          policies: [S], which policy each row is drawn by, where there are several.
        """
        version, steps = np.int32(self.version), np.int32(self._chunk)
        most = self.slots if wanted is None else wanted
        idle = IdleLimit(*np.array([most, self.costs.idle_steps()], np.int32))
        speak = None if policies is None else np.array(policies, np.int32)
        run = lambda steps: self._decode(  # noqa: E731
            self._weights, self._state, version, self._halted, steps, idle, speak
        )
        timed = self.costs.steps.due()
        if timed:
            jax.block_until_ready(self._batch)  # else the chunk is charged for what came before
            began = time.perf_counter()
            self._batch, out = run(np.int32(0))
            jax.device_get(out)
            empty = time.perf_counter() - began
        began = time.perf_counter()
        self._batch, out = run(steps)
        out = jax.device_get(out)
        if timed and out.steps:
            decoding = time.perf_counter() - began - empty
            self.costs.returns.record(1, empty)
            self.costs.steps.record(1, max(decoding, 0.0) / int(out.steps))
        self._halted = np.full(self.slots, StopReason.RUNNING, np.int32)
        return out

    def _timed(self, timings: Timings, shape: Hashable, size: int, work: Callable[[], Any]) -> Any:
        """What the work returns; now and then it is waited for, and what it took is recorded."""
        if not timings.due(shape):
            return work()
        jax.block_until_ready(self._batch)
        began = time.perf_counter()
        out = jax.block_until_ready(work())
        timings.record(size, time.perf_counter() - began)
        return out


def _put_branch(slots: Slots, rows: jax.Array, parked: Slots, branching: Any) -> Slots:
    return put_rows(slots, rows, fork_row(parked, *branching))


def _decode(
    weights: Any,
    batch: DecodeBatch,
    version: jax.Array,
    halted: jax.Array,
    steps: jax.Array,
    idle: IdleLimit,
    policies: jax.Array | None,
    *,
    network: Network,
    several: Stack | None,
    width: int,
    measure: Measure | None,
) -> tuple[DecodeBatch, ChunkOutput]:
    """``decode_chunk`` in which each row may be drawn by a policy of its own."""
    if several is not None and policies is not None:
        network = several.speaking(policies)
    given = weights, batch, version, halted, steps, None, idle
    return programs.decode_chunk(*given, network=network, width=width, measure=measure)
