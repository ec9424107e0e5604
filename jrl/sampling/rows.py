"""The host engine: rows that are admitted, decoded in chunks, extended, suspended and forked.

Episodes, searches, evaluation and servers stand on it. A row keeps its cache from the first token
of its prompt to its last, so a prompt, and every text that an environment appends, is computed
once. A row that waits may leave its slot with a copy of its cache. What is sampled is the same
whatever slot a row has and wherever it waited: draws are keyed by the row's seed, its member and
the place of the token.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.mesh import parts_of
from jrl.models import gpu
from jrl.sampling import batch as programs
from jrl.sampling.admission import AdmissionBuilder, RowSampling, RowStart, widths
from jrl.sampling.batch import ChunkInputs, ChunkOutput, DecodeBatch
from jrl.sampling.grammar import no_mask
from jrl.sampling.row_costs import RowCosts, Timings
from jrl.sampling.slots import IdleLimit, Measure, check_length
from jrl.types import Network, Params, Stack, StopReason

_MOST_ADMITTED = 8
"""The most rows of one admission; more take several."""
_EXTENDED = 4
"""Rows that are extended in one call, if there are as many slots.

Always the same number, each padded for itself: products of other shapes add in another order, and
a row's bits must not depend on whose turn came with its own.
"""
_MIN_EXTENSION = 16
"""The narrowest width that texts from outside are padded to, tokens."""

SuspendedRow = DecodeBatch
"""A row that has left its slot: a batch of one row. It stays on the device."""


class More(NamedTuple):
    """Ids from outside that a row continues after, and its limit of tokens from then on."""

    tokens: Sequence[int]
    limit: int


class RowOptions(NamedTuple):
    """Options of rows in a server of requests; episodes and searches use none.

    Attributes:
      prompts: the most prompts computed together. More cost less time, but then a row's rounding
        depends on the prompts that came with its own.
      total_tokens: the longest row, prompt included, that is ever admitted; None for the sum of
        ``prompt_tokens`` and ``max_new_tokens``.
      stop_width: the most stop tokens that a row may bring; 0 for no more than ``stop_tokens``.
      biases: whether rows may bring a bias; costs [S, V] float32 numbers.
      masks: whether ``decode`` may be told which tokens a row may sample; needs ``biases``.
      top_logprobs: the most alternatives that ``decode`` may report with each token; None for no
        reports, which costs nothing.
    """

    prompts: int = 1
    total_tokens: int | None = None
    stop_width: int = 0
    biases: bool = False
    masks: bool = False
    top_logprobs: int | None = None


PLAIN_ROWS = RowOptions()
"""Rows of episodes and searches."""


class Rows:
    """S rows on the device. Not thread-safe: one thread calls it.

    Args:
      network: the policy.
      slots: S.
      prompt_tokens: the longest prompt.
      max_new_tokens: T, the most tokens of a row after its prompt, sampled or not.
      stop_tokens: ids that stop a row.
      chunk: the most decode steps between two returns to the host.
      sampling: temperature, top_k, top_p and min_p by name, as ``make_sampling_params`` takes them,
        and ``bias``: of rows that bring no sampling of their own.
      suspended: the most suspended rows; None for as many as there are slots, or as a device has of
        them where the mesh divides them: a suspended row is whole on every device.
      measure: of the distribution that each token is sampled from; ``decode`` returns its numbers.
        None for nothing.
      row_policies: whether every row is sampled by one of the network's several policies, which
        ``decode`` is told; False for the network as it is.
      options: for a server of requests.

    Attributes:
      version: of the weights in use.
      costs: what the work has cost so far.

    Raises:
      UserError: sizes that do not fit the network or each other.
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
        sampling: Mapping[str, Any] | None = None,
        suspended: int | None = None,
        measure: Measure | None = None,
        row_policies: bool = False,
        options: RowOptions = PLAIN_ROWS,
    ) -> None:
        if slots < 1:
            raise UserError(f"slots = {slots}; must be at least 1")
        total = options.total_tokens or prompt_tokens + max_new_tokens
        check_length(network, total - max_new_tokens, max_new_tokens)
        # The network is bound when a chunk is traced; until then any policy of several gives the
        # shapes.
        stack = network.extras.stack if row_policies else None
        if stack is not None:
            network = stack.speaking(jnp.zeros(1, jnp.int32))
        self.slots, self.prompt_tokens, self.max_new_tokens = slots, prompt_tokens, max_new_tokens
        self.version, self.costs = 0, RowCosts(slots)
        self._chunk, self._suspended = chunk, suspended
        self._reports = options.top_logprobs is not None
        masks = options.masks and options.biases
        self._no_mask = no_mask(slots, network.vocab_size) if masks else None
        prompt_widths, text_widths = widths(prompt_tokens), widths(max_new_tokens)
        self._widths = tuple(sorted({*text_widths, min(_MIN_EXTENSION, text_widths[0])}))
        # A power of two, so that the shapes of admissions are few. Every admission has this many
        # rows: an unused one costs a masked write, another shape would cost a compilation.
        max_rows = 1 << (min(_MOST_ADMITTED, slots).bit_length() - 1)
        self._builder = AdmissionBuilder(
            slots=slots,
            max_rows=max_rows,
            max_prompts=min(options.prompts, max_rows),
            widths=prompt_widths,
            stop_width=max(options.stop_width, len(stop_tokens)),
            sampling=RowSampling(**sampling or {}, stop_tokens=tuple(stop_tokens)),
            vocab_size=network.vocab_size if options.biases else 0,
        )
        self._bind(network, stack, measure, options)
        self._weights: Any = None
        self._batch: DecodeBatch | None = None
        self._halted = np.full(slots, StopReason.RUNNING, np.int32)

    def _bind(
        self, network: Network, stack: Stack | None, measure: Measure | None, options: RowOptions
    ) -> None:
        """The programs over the batch, each compiled when it first runs."""
        bind = functools.partial
        self._prepare = jax.jit(network.prepare)
        self._make = jax.jit(
            bind(
                programs.empty_batch,
                network=network,
                rows=self.slots,
                prompt_tokens=self.prompt_tokens,
                max_new_tokens=self.max_new_tokens,
                stop_width=self._builder.stop_width,
                biases=options.biases,
                measured=measure is not None,
            )
        )
        # The state is donated everywhere: a second one would double the memory of the caches.
        self._admit = jax.jit(bind(programs.admit, network=network), donate_argnums=1)
        self._decode = jax.jit(
            bind(
                programs.decode_chunk,
                network=network,
                width=self._chunk,
                top=options.top_logprobs or 0,
                measure=measure,
                stack=stack,
            ),
            donate_argnums=1,
            static_argnames="at_once",
        )
        self._recompute = jax.jit(bind(programs.recompute, network=network), donate_argnums=1)
        self._extend = jax.jit(bind(programs.extend, network=network), donate_argnums=1)
        # Through ``partial``: programs of one function are counted together over all engines.
        self._suspend = jax.jit(bind(programs.suspend))
        self._fork = jax.jit(bind(programs.fork))
        self._resume = jax.jit(bind(programs.resume), donate_argnums=0)
        self._resume_fork = jax.jit(bind(programs.resume_fork), donate_argnums=0)

    # ------------------------------------------------------------ weights

    @property
    def max_suspended(self) -> int:
        """The most suspended rows, under the mesh in use."""
        if self._suspended is not None:
            return self._suspended
        return self.slots // parts_of("batch", self.slots)

    @property
    def weights(self) -> Any:
        """The policy's weights, as ``network.prepare`` returned them; None without any."""
        return self._weights

    @property
    def batch(self) -> DecodeBatch:
        """The state on the device; the next call that changes it deletes its arrays."""
        assert self._batch is not None, "set_weights comes first"
        return self._batch

    def set_weights(self, params: Params, version: int, *, recompute: bool = False) -> None:
        """Replaces the parameters from the next token on.

        Args:
          params: the policy's.
          version: recorded with the tokens that they sample.
          recompute: whether to compute the caches of all rows again; else rows keep the keys and
            values of the old parameters, as asynchronous systems do.
        """
        self._weights, self.version = self._prepare(params), version
        if self._batch is None:
            # Not in ``__init__``: an engine between two steps of training holds no device memory.
            self._batch = self._make(self._weights)
        elif recompute:
            self._batch = self._recompute(self._weights, self._batch)

    def release(self) -> None:
        """Frees weights and caches, until ``set_weights``."""
        self._weights = self._batch = None

    # ------------------------------------------------------------ rows

    def admit(self, starts: Mapping[int, RowStart]) -> int:
        """Begins rows, whatever they held; a prompt that several share is computed once.

        Args:
          starts: by row.

        Returns:
          The prompts' tokens, each prompt counted as often as it was computed.
        """
        computed = 0
        for part in self._builder.split(starts):
            new = self._builder.build(part)
            # Not waited for: the host prepares the next admission while the device computes this
            # one.
            admit = functools.partial(self._admit, self._weights, self._batch, new)
            shape = new.tokens.shape
            self._batch = self._timed(self.costs.reading, ("admit", *shape), new.tokens.size, admit)
            # A halt that was noted for the old row must not stop the new one.
            self._halted[list(part)] = StopReason.RUNNING
            computed += sum(map(len, {start.tokens for start in part.values()}))
        return computed

    def extend(self, texts: Mapping[int, More]) -> None:
        """Appends ids from outside to rows that have stopped, which then run again."""
        size = min(_EXTENDED, self.slots)
        # Texts of one width together: a short one beside a long one would be padded to its width.
        of_width: dict[int, list[int]] = {}
        for row, more in texts.items():
            width = next(w for w in self._widths if w >= len(more.tokens))
            of_width.setdefault(width, []).append(row)
        for width, rows in of_width.items():
            for i in range(0, len(rows), size):
                self._extend_some(rows[i : i + size], texts, size, width)

    def _extend_some(
        self, rows: Sequence[int], texts: Mapping[int, More], size: int, width: int
    ) -> None:
        """``extend`` of at most ``size`` rows, their texts padded to one width."""
        index = np.full(size, self.slots, np.int32)  # out of range: writes nothing
        tokens = np.zeros((size, width), np.int32)
        counts, limits = np.zeros(size, np.int32), np.zeros(size, np.int32)
        for i, row in enumerate(rows):
            more = texts[row]
            tokens[i, : len(more.tokens)] = more.tokens
            index[i], counts[i], limits[i] = row, len(more.tokens), more.limit
        extend = functools.partial(
            self._extend, self._weights, self.batch, index, tokens, counts, limits
        )
        shape = "extend", size, width
        self._batch = self._timed(self.costs.reading, shape, tokens.size, extend)

    def suspend(self, row: int) -> SuspendedRow:
        """A copy of a row, for ``resume``; its slot is free then."""
        copy = functools.partial(self._suspend, self.batch, np.array([row], np.int32))
        return self._timed(self.costs.leaving, None, 1, copy)

    def fork(self, row: int, start: RowStart, length: int) -> SuspendedRow:
        """A copy of a row that has stopped, as it was earlier, for ``resume``.

        Args:
          row: stays as it is.
          start: of the new row: its member is another one of the same prompt.
          length: tokens after the prompt that the copy keeps, at least 1.
        """
        # The copy is rewound, not the row: the row itself may go on.
        return self._fork(self.suspend(row), *_fork_at(start, length))

    def resume(self, row: int, suspended: SuspendedRow, start: RowStart | None = None) -> None:
        """Puts a suspended row into a slot, whatever that held.

        Args:
          row: the slot.
          suspended: can be resumed any number of times.
          start: resumes it as another member of the same prompt, which continues from the end of
            the row; None for the same member.
        """
        where = np.array([row], np.int32)
        # Another member in one program: a copy between the two would be one more row in memory.
        if start is None:
            put = functools.partial(self._resume, self.batch, where, suspended)
        else:
            at = _fork_at(start, self.max_new_tokens)  # keeps all that the row has
            put = functools.partial(self._resume_fork, self.batch, where, suspended, *at)
        self._batch = self._timed(self.costs.returning, None, 1, put)
        self._halted[row] = StopReason.RUNNING

    def halt(self, row: int, stop: StopReason = StopReason.ABORTED) -> None:
        """Stops a row before the next token."""
        # On the device with the next chunk: a call of its own would cost as much as a step.
        self._halted[row] = stop

    # ------------------------------------------------------------ decoding

    def decode(
        self,
        idle_slots: int | None = None,
        policies: Sequence[int] | None = None,
        *,
        steps: int | None = None,
        reports: Sequence[int] | None = None,
        masks: np.ndarray | None = None,
        fetch: bool = True,
    ) -> ChunkOutput:
        """Samples up to a chunk of tokens in every running row.

        The chunk ends early where slots are idle, see ``RowCosts.idle_steps``.

        Args:
          idle_slots: slots that count as idle when their rows do not run; None for all, 0 for a
            chunk that never ends early.
          policies: [S], which policy each row is sampled by, where there are several.
          steps: at most ``chunk``; None for ``chunk``, whose cost is measured now and then.
          reports: [S], alternatives to report with each token of a row; -1 for no report.
          masks: [S, ceil(V / 32)] uint32, a bit for each token that a row may sample; one mask
            holds for the chunk, so ``steps`` is 1 for a grammar. None allows all.
          fetch: whether the output is brought to the host; else it is not waited for.
        """
        # Slots for which there is no work are not idle, and must not end the chunk early.
        most, chunk = self.slots if idle_slots is None else idle_slots, self._chunk
        run = functools.partial(
            self._run_chunk,
            at_once=gpu.block_of(chunk if steps is None else steps),
            idle=IdleLimit(*np.array([most, self.costs.idle_steps()], np.int32)),
            reports=reports,
            policies=None if policies is None else np.array(policies, np.int32),
            masks=self._no_mask if masks is None else masks,
        )
        timed = steps is None and self.costs.steps.due()
        if timed:
            self.wait()  # else the chunk is charged for what was dispatched before it
            # A chunk of no steps takes as long as the return to the host, which each one includes.
            began = time.perf_counter()
            jax.device_get(run(0))
            empty = time.perf_counter() - began
        began = time.perf_counter()
        out = run(chunk if steps is None else steps)
        out = jax.device_get(out) if fetch else out
        if timed and out.steps:
            decoding = time.perf_counter() - began - empty
            self.costs.returns.record(1, empty)
            self.costs.steps.record(1, max(decoding, 0.0) / int(out.steps))
        # The device has stopped them; a halt acts once, since the slot may have a new row by then.
        self._halted = np.full(self.slots, StopReason.RUNNING, np.int32)
        return out

    def _run_chunk(
        self,
        steps: int,
        *,
        at_once: int,
        idle: IdleLimit,
        reports: Sequence[int] | None,
        policies: np.ndarray | None,
        masks: np.ndarray | None,
    ) -> ChunkOutput:
        """One call of the program; the output is on the device."""
        # Where reports can be asked for they always have an array, so that there is one program;
        # on a GPU it would branch in every step, and there are two.
        counts = np.array([-1] * self.slots if reports is None else reports, np.int32)
        reports_wanted = self._reports and (gpu.branches() or bool(counts.max() >= 0))
        chunk = ChunkInputs(
            version=np.int32(self.version),
            halted=self._halted,
            steps=np.int32(steps),
            idle=idle,
            reports=counts if reports_wanted else None,
            policies=policies,
            masks=masks,
        )
        self._batch, out = self._decode(self._weights, self.batch, chunk, at_once=at_once)
        # A report that nobody asked for is not sent to the host.
        return out if counts.max() >= 0 else out._replace(report=None)

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        jax.block_until_ready(self._batch)

    def _timed(self, timings: Timings, shape: Hashable, size: int, work: Callable[[], Any]) -> Any:
        """Runs the work; now and then waits for it and records the seconds."""
        if not timings.due(shape):
            return work()
        self.wait()
        began = time.perf_counter()
        out = jax.block_until_ready(work())
        timings.record(size, time.perf_counter() - began)
        return out

    # ------------------------------------------------------------ programs

    def compile(self, *, recompute: bool = True, steps: Sequence[int] = (1,)) -> int:
        """Runs the programs that admit and decode once on empty input.

        Args:
          recompute: also the program of ``set_weights(recompute=True)``, which takes as long as
            scoring all rows at their full length.
          steps: of the chunks that will be decoded. On a GPU those of other blocks have programs of
            their own, and those with a report.

        Returns:
          The number of programs.
        """
        # All shapes that ``AdmissionBuilder.build`` can make; each new one would be compiled while
        # a request waits.
        counts = [1 << i for i in range(self._builder.max_prompts.bit_length())]
        for count, width in itertools.product(counts, self._builder.widths):
            new = self._builder.empty(count, width)
            self._batch = self._admit(self._weights, self._batch, new)
        for most in {gpu.block_of(each): each for each in steps}.values():
            for top in (-1, 0) if self._reports and not gpu.branches() else (-1,):
                self.decode(0, steps=most, reports=[top] * self.slots)
        if recompute:
            self._batch = self._recompute(self._weights, self._batch)
        self.wait()
        return self.executables

    @property
    def executables(self) -> int:
        """Programs compiled so far, including the one that prepares the weights."""
        moves = self._suspend, self._fork, self._resume, self._resume_fork
        jitted: tuple[Any, ...] = (self._prepare, self._make, self._admit, self._decode)
        return sum(f._cache_size() for f in (*jitted, self._recompute, self._extend, *moves))


def _fork_at(start: RowStart, length: int) -> tuple[Any, ...]:
    """The arguments of ``batch.fork`` besides the row."""
    raw = np.array(divmod(start.seed, 2**32), np.uint32)
    return raw, *np.array([start.member, length, start.limit], np.int32)
