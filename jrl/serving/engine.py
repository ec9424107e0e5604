"""Continuous batching for requests that arrive one by one: a host queue in front of device slots.

Between two chunks of decoding the host removes finished completions, returns new tokens and admits
queued requests into free slots. The completions of a request depend on its seed, not on the other
requests. All device work is a few compiled programs, see ``Engine.compile``.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.slots import check_length
from jrl.serving import batch as programs
from jrl.serving.batch import AdmissionBuilder, ChunkOutput, DecodeBatch
from jrl.serving.chunk_length import LENGTHS, ChunkLength
from jrl.serving.request import (
    TOP_LOGPROBS,
    PartialCompletion,
    QueueFull,
    Request,
    RequestLimits,
    TokenLogprobs,
    Update,
    check_request,
)
from jrl.types import Network, Params, StopReason

_MAX_ADMITTED = 8
"""The most blocks of one admission; more take several."""
_MIN_STOP_TOKENS = 8
"""A request may always name this many stop tokens."""


class Engine:
    """Slots that serve a queue of requests. Not thread-safe.

    Args:
      network: the policy.
      params: its parameters.
      slots: completions decoded at once.
      prompt_tokens: the longest prompt.
      max_new_tokens: the longest completion.
      stop_tokens: ids that end a completion; () for none but its length.
      tokenizer: for texts and stop strings; None where neither is needed.
      chunk: decode steps between two returns to the host; None measures and chooses, see
        ``chunk_length``. It changes no completion.
      block: slots that share the cache of one prompt and are filled together; divides ``slots``.
        A group of completions reads its prompt once a block.
      biases: whether requests may change logits; costs [slots, V] float32 numbers.
      reports: whether requests may ask for ``top_logprobs``; costs steps in which one did.
      queue: completions that may wait for a slot; None for any number.
      version: of the parameters, recorded with each token.

    Attributes:
      limits: what requests may ask for.
      chunk_length: the controller that chooses the length of chunks.
      version: of the parameters in use.
      slot_steps: slots times decode steps so far.
      live_steps: those of them that sampled a token.

    Raises:
      UserError: sizes that do not fit the network or each other.
    """

    def __init__(
        self,
        network: Network,
        params: Params,
        *,
        slots: int,
        prompt_tokens: int,
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        tokenizer: Tokenizer | None = None,
        chunk: int | None = None,
        block: int = 1,
        biases: bool = False,
        reports: bool = False,
        queue: int | None = None,
        version: int = 0,
    ) -> None:
        if block < 1 or slots < 1 or slots % block:
            raise UserError(
                f"slots = {slots}; must be a multiple of block = {block}, both at least 1"
            )
        if chunk is not None and chunk < 1:
            raise UserError(
                f"chunk = {chunk}; must be at least 1, or None to measure and choose it"
            )
        check_length(network, 1, max_new_tokens)
        self._network, self._tokenizer = network, tokenizer
        self._block, self._chunk, self._queue_limit = block, chunk, queue
        self.chunk_length = ChunkLength()
        prompt_tokens = min(prompt_tokens, network.max_length - 1)
        self.limits = RequestLimits(
            slots=slots,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            vocab_size=network.vocab_size,
            max_length=network.max_length,
            stop_tokens=max(_MIN_STOP_TOKENS, len(stop_tokens)),
            biases=biases,
            reports=reports,
        )
        self._builder = AdmissionBuilder(
            limits=self.limits,
            block=block,
            blocks=slots // block,
            max_blocks=1 << (min(_MAX_ADMITTED, slots // block).bit_length() - 1),
            widths=programs.widths(prompt_tokens),
            stop_tokens=tuple(stop_tokens),
        )
        bind = functools.partial
        self._prepare = jax.jit(network.prepare)
        self._admit = jax.jit(bind(programs.admit, network=network), donate_argnums=1)
        self._chunk_program = jax.jit(
            bind(
                programs.decode_chunk,
                network=network,
                width=chunk or LENGTHS[-1],
                top=min(TOP_LOGPROBS, network.vocab_size),
            ),
            donate_argnums=1,
        )
        self._recompute = jax.jit(bind(programs.recompute, network=network), donate_argnums=1)
        self._weights = self._prepare(params)
        make = bind(
            programs.empty_batch,
            network=network,
            blocks=slots // block,
            block=block,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            stop_tokens=self.limits.stop_tokens,
            biases=biases,
        )
        self._batch: DecodeBatch = jax.jit(make)(self._weights)
        self.version = version
        self.slot_steps = self.live_steps = 0
        self._numbers = itertools.count()
        self._waiting: collections.deque[PartialCompletion] = collections.deque()
        self._rows: list[PartialCompletion | None] = [None] * slots
        self._halted = np.full(slots, StopReason.RUNNING, np.int32)
        self._updates: list[Update] = []

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises:
          QueueFull: the queue has no room for it.
          UserError: a request that cannot be served.
        """
        check_request(request, self.limits, self._tokenizer)
        limit = self._queue_limit
        if limit is not None and len(self._waiting) + request.n > limit:
            raise QueueFull(f"{len(self._waiting)} completions wait; the queue holds {limit}")
        number = next(self._numbers)
        self._waiting.extend(
            PartialCompletion(number, member, request, self._tokenizer)
            for member in range(request.n)
        )
        return number

    def abort(self, number: int) -> None:
        """Ends a request's completions; the next ``step`` returns them as they are."""
        for member in [m for m in self._waiting if m.number == number]:
            self._waiting.remove(member)
            self._updates.append(member.extend([], [], self.version, StopReason.ABORTED))
        for row, running in enumerate(self._rows):
            if running is not None and running.number == number:
                self._updates.append(running.extend([], [], self.version, StopReason.ABORTED))
                self._leave(row, StopReason.ABORTED)

    @property
    def queued(self) -> int:
        """Completions waiting for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Completions in slots."""
        return sum(member is not None for member in self._rows)

    @property
    def busy(self) -> bool:
        """Whether ``step`` has work."""
        return bool(self._waiting or self._updates or self.running)

    @property
    def weights(self) -> Any:
        """The policy's weights, as ``network.prepare`` returned them."""
        return self._weights

    @property
    def slot_use(self) -> float:
        """The share of slot-steps that sampled a token."""
        return self.live_steps / max(self.slot_steps, 1)

    # ------------------------------------------------------------ decoding

    def step(self) -> list[Update]:
        """Admits queued completions, decodes one chunk, and returns the updates."""
        self._fill()
        updates, self._updates = self._updates, []
        if not self.running:
            return updates
        if self._chunk is None and self.chunk_length.measuring:
            jax.block_until_ready(self._batch)  # else the chunk is charged for admissions
        began = time.perf_counter()
        out = self._decode(self._chunk or self.chunk_length.steps(queued=bool(self._waiting)))
        for row, member in enumerate(self._rows):
            if member is None:
                continue
            count = int(out.counts[row])
            self.live_steps += count
            update = member.extend(
                out.tokens[row, :count].tolist(),
                out.logprobs[row, :count].tolist(),
                self.version,
                StopReason(int(out.stop[row])),
                _reports(out, row, count, member.request.top_logprobs),
            )
            updates.append(update)
            if update.completion is not None:
                self._leave(row, update.completion.stop)
                self.chunk_length.record_completion(len(update.completion.tokens))
        self.chunk_length.record_chunk(int(out.steps), time.perf_counter() - began)
        return updates

    def _decode(self, steps: int) -> ChunkOutput:
        """Decodes up to this many steps; the output is on the host."""
        version, halted = np.int32(self.version), self._halted
        wanted = self._wanted() if self.limits.reports else None
        self._batch, out = self._chunk_program(
            self._weights, self._batch, version, halted, np.int32(steps), wanted
        )
        self._halted = np.full_like(halted, StopReason.RUNNING)
        if wanted is not None and wanted.max() < 0:
            out = out._replace(report=None)  # nobody reads it, so it stays on the device
        out = jax.device_get(out)
        self.slot_steps += int(out.steps) * len(self._rows)
        return out

    def _wanted(self) -> np.ndarray:
        """[S] int32, alternatives that each row's request asked for; -1 for no report."""
        asked = [None if m is None else m.request.top_logprobs for m in self._rows]
        return np.array([-1 if top is None else top for top in asked], np.int32)

    def run(self) -> Iterator[Update]:
        """Steps until nothing waits or runs; requests may be added meanwhile."""
        while self.busy:
            yield from self.step()

    def _leave(self, row: int, stop: StopReason) -> None:
        """Frees a slot; the next chunk stops its row on the device."""
        self._rows[row] = None
        self._halted[row] = stop

    # ------------------------------------------------------------ admission

    def _fill(self) -> None:
        """Admits waiting completions into free blocks, a few blocks at a time."""
        b = self._block
        free = [
            i
            for i in range(len(self._rows) // b)
            if all(self._rows[i * b + j] is None for j in range(b))
        ]
        while free and self._waiting:
            groups: list[list[PartialCompletion]] = []
            while self._waiting and len(groups) < min(self._builder.max_blocks, len(free)):
                first = self._waiting.popleft()
                groups.append([first])
                while (
                    len(groups[-1]) < b
                    and self._waiting
                    and self._waiting[0].number == first.number
                ):
                    groups[-1].append(self._waiting.popleft())
            blocks, free = free[: len(groups)], free[len(groups) :]
            for i, group in zip(blocks, groups, strict=True):
                for j, member in enumerate(group):
                    self._rows[i * b + j] = member
                self._halted[i * b : (i + 1) * b] = StopReason.RUNNING
            new = self._builder.build(blocks, groups)
            self._batch = self._admit(self._weights, self._batch, new)

    # ------------------------------------------------------------ weights, state, programs

    def set_weights(self, params: Params, version: int, *, recompute: bool = False) -> None:
        """Replaces the parameters, from the next token on.

        Args:
          params: the policy's.
          version: recorded with the tokens they sample.
          recompute: whether to recompute the cache of running completions; else it keeps keys and
            values of the old parameters, as asynchronous systems do.
        """
        self._weights, self.version = self._prepare(params), version
        if recompute and self.running:
            self._batch = self._recompute(self._weights, self._batch)

    def suspend(self) -> dict[str, Any]:
        """A copy of the state without the parameters, a pytree of NumPy arrays.

        ``resume`` of an engine with the same arguments continues from it, in any process.
        """
        slots = self._batch.slots
        keys = jax.random.key_data(slots.keys)
        device = jax.device_get(self._batch.replace(slots=slots.replace(keys=keys)))
        following = next(self._numbers)
        self._numbers = itertools.count(following)
        host = {
            "version": self.version,
            "counts": [self.slot_steps, self.live_steps],
            "next": following,
            "waiting": [m.to_json() for m in self._waiting],
            "rows": [None if m is None else m.to_json() for m in self._rows],
            "updates": [u.to_json() for u in self._updates],
        }
        text = np.frombuffer(json.dumps(host).encode(), np.uint8)
        leaves = [np.asarray(x) for x in jax.tree.leaves(device)]
        return {"batch": leaves, "halted": self._halted.copy(), "host": text}

    def resume(self, state: dict[str, Any]) -> None:
        """Continues from a suspended state, which replaces the engine's own.

        The version is the state's; after a weight update call ``set_weights``.

        Raises:
          UserError: the state is of an engine of other sizes.
        """
        slots = self._batch.slots
        bare = self._batch.replace(slots=slots.replace(keys=jax.random.key_data(slots.keys)))
        if [x.shape for x in jax.tree.leaves(bare)] != [np.shape(x) for x in state["batch"]]:
            raise UserError("the suspended state comes from an engine of other sizes")
        leaves = [jnp.asarray(x) for x in state["batch"]]
        found: DecodeBatch = jax.tree.unflatten(jax.tree.structure(bare), leaves)
        keys = jax.random.wrap_key_data(found.slots.keys)
        self._batch = found.replace(slots=found.slots.replace(keys=keys))
        host = json.loads(bytes(np.asarray(state["host"], np.uint8)))
        self.version = host["version"]
        self.slot_steps, self.live_steps = host["counts"]
        self._numbers = itertools.count(host["next"])
        back = functools.partial(PartialCompletion.from_json, tokenizer=self._tokenizer)
        self._waiting = collections.deque(back(x) for x in host["waiting"])
        self._rows = [None if x is None else back(x) for x in host["rows"]]
        self._halted = np.array(state["halted"], np.int32)
        self._updates = [Update.from_json(x) for x in host["updates"]]

    def compile(self, *, refresh: bool = True) -> int:
        """Runs every program once on empty input, so that no request waits for a compilation.

        Args:
          refresh: also the program that recomputes the cache under new weights, which takes as long
            as scoring all slots at their full length.

        Returns:
          The number of programs.

        Raises:
          UserError: a request is running or waiting.
        """
        if self.busy:
            raise UserError("compile the engine before it is given requests")
        sizes = [1 << i for i in range(self._builder.max_blocks.bit_length())]
        for count, width in itertools.product(sizes, self._builder.widths):
            prompt = Request(tokens=(0,) * min(width, self.limits.prompt_tokens), max_new_tokens=1)
            groups = [[PartialCompletion(i, 0, prompt, None)] for i in range(count)]
            new = self._builder.build([], groups)
            empty = new._replace(limits=np.zeros_like(new.limits))
            self._batch = self._admit(self._weights, self._batch, empty)
        self._decode(1)
        if refresh:
            self._batch = self._recompute(self._weights, self._batch)
        jax.block_until_ready(self._batch)
        return self.executables

    @property
    def executables(self) -> int:
        """Programs compiled so far, including the one that prepares the weights."""
        jitted: tuple[Any, ...] = (self._prepare, self._admit, self._chunk_program, self._recompute)
        return sum(f._cache_size() for f in jitted)


def _reports(out: ChunkOutput, row: int, count: int, top: int | None) -> list[TokenLogprobs]:
    """What is reported about a row's new tokens; empty where nothing was asked for."""
    if out.report is None or top is None:
        return []
    found = out.report
    ids, logprobs = (x[row, :count, :top].tolist() for x in (found.top_ids, found.top_logprobs))
    alternatives = [tuple(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]
    own = found.logprobs[row, :count].tolist()
    return [TokenLogprobs(*each) for each in zip(own, alternatives, strict=True)]
