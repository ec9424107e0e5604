"""Continuous batching for requests that arrive one by one: a queue in front of the row engine.

Between two chunks of decoding the host removes finished completions, returns new tokens and admits
queued requests into free rows. The completions of a request depend on its seed, not on the other
requests. All device work is done by ``rows.Rows``.
"""

from __future__ import annotations

import collections
import itertools
import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np

from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.admission import RowSampling, RowStart
from jrl.sampling.batch import ChunkOutput
from jrl.sampling.chunk_length import LENGTHS, ChunkLength, choices
from jrl.sampling.grammar import no_mask
from jrl.sampling.request import (
    PLAIN_REQUESTS,
    TOP_LOGPROBS,
    PartialCompletion,
    QueueFull,
    Request,
    RequestFeatures,
    RequestLimits,
    TokenLogprobs,
    Update,
    check_request,
)
from jrl.sampling.rows import RowOptions, Rows
from jrl.sampling.slots import check_length
from jrl.types import Network, Params, StopReason

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
      requests: what they may ask for, and how many may wait.
      version: of the parameters, recorded with each token.

    Attributes:
      limits: what requests may ask for.
      rows: the row engine.
      chunk_length: the controller that chooses the length of chunks.
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
        requests: RequestFeatures = PLAIN_REQUESTS,
        version: int = 0,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise UserError(
                f"chunk = {chunk}; must be at least 1, or None to measure and choose it"
            )
        check_length(network, 1, max_new_tokens)
        grammars = requests.grammars
        self._tokenizer, self._grammars = tokenizer, grammars
        self._chunk, self._queue_limit = chunk, requests.queue
        self.chunk_length = ChunkLength()
        # At least one token has to fit after the longest prompt.
        prompt_tokens = min(prompt_tokens, network.max_length - 1)
        self.limits = RequestLimits(
            slots=slots,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            vocab_size=network.vocab_size,
            max_length=network.max_length,
            stop_tokens=max(_MIN_STOP_TOKENS, len(stop_tokens)),
            biases=requests.biases or grammars is not None,
            reports=requests.reports,
            grammars=grammars is not None,
        )
        self.rows = Rows(
            network,
            slots=slots,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            stop_tokens=stop_tokens,
            chunk=chunk or LENGTHS[-1],
            options=RowOptions(
                prompts=slots,
                # A request's own limits keep it within the network, see ``new_tokens``.
                total_tokens=network.max_length,
                stop_width=self.limits.stop_tokens,
                biases=self.limits.biases,
                masks=grammars is not None,
                top_logprobs=min(TOP_LOGPROBS, network.vocab_size) if requests.reports else None,
            ),
        )
        self.rows.set_weights(params, version)
        self.slot_steps = self.live_steps = 0
        self._numbers = itertools.count()
        self._waiting: collections.deque[PartialCompletion] = collections.deque()
        self._members: list[PartialCompletion | None] = [None] * slots
        self._updates: list[Update] = []

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises:
          QueueFull: the queue has no room for it.
          UserError: a request that cannot be served.
        """
        # Before the number is taken: a refused request leaves no trace in the order of later ones.
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
        # A copy of the list, as the deque loses members meanwhile.
        for member in [m for m in self._waiting if m.number == number]:
            self._waiting.remove(member)
            self._updates.append(member.extend([], [], self.version, StopReason.ABORTED))
        for row, running in enumerate(self._members):
            if running is not None and running.number == number:
                self._updates.append(running.extend([], [], self.version, StopReason.ABORTED))
                self._leave(row, StopReason.ABORTED)

    @property
    def running(self) -> int:
        """Completions in slots."""
        return sum(member is not None for member in self._members)

    @property
    def busy(self) -> bool:
        """Whether ``step`` has work."""
        return bool(self._waiting or self._updates or self.running)

    @property
    def version(self) -> int:
        """The version of the parameters in use."""
        return self.rows.version

    # ------------------------------------------------------------ decoding

    def step(self) -> list[Update]:
        """Admits queued completions, decodes one chunk, and returns the updates."""
        self._fill()
        # Before the chunk's length is chosen: a row under a grammar allows one step.
        masks = self._masks()
        # Those of aborts since the last step come first.
        updates, self._updates = self._updates, []
        if not self.running:
            return updates
        if self._chunk is None and self.chunk_length.measuring:
            self.rows.wait()  # else the chunk is charged for admissions
        began = time.perf_counter()
        steps = self._chunk or self.chunk_length.steps(queued=bool(self._waiting))
        out = self._decode(steps if masks is None else 1, masks)
        for row, member in enumerate(self._members):
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
        if masks is None:
            self.chunk_length.record_chunk(int(out.steps), time.perf_counter() - began)
        return updates

    def _masks(self) -> np.ndarray | None:
        """[S, W] uint32, the tokens that each row may sample next; None where no row has a grammar.

        A row whose grammar allows none, or has grown too complex, is aborted.
        """
        masks: np.ndarray | None = None
        for row, member in enumerate(self._members):
            if member is None or member.request.grammar is None:
                continue
            assert self._grammars is not None  # the request was checked
            # One request's grammar must not end the step of the others.
            try:
                member.constrain(self._grammars)
                assert member.constraint is not None
                mask = member.constraint.mask()
            except UserError as error:
                _log().warning("request %d: its grammar cannot go on: %s", member.number, error)
                self._updates.append(member.extend([], [], self.version, StopReason.ABORTED))
                self._leave(row, StopReason.ABORTED)
                continue
            if masks is None:
                masks = no_mask(len(self._members), self.limits.vocab_size)
            masks[row] = mask
        return masks

    def _decode(self, steps: int, masks: np.ndarray | None) -> ChunkOutput:
        """Decodes up to this many steps; the output is on the host."""
        counts = [None if m is None else m.request.top_logprobs for m in self._members]
        reports = [-1 if top is None else top for top in counts]
        out = self.rows.decode(0, steps=steps, reports=reports, masks=masks)
        self.slot_steps += int(out.steps) * len(self._members)
        return out

    def run(self) -> Iterator[Update]:
        """Steps until nothing waits or runs; requests may be added meanwhile."""
        while self.busy:
            yield from self.step()

    def _leave(self, row: int, stop: StopReason) -> None:
        """Frees a row; the next chunk stops it on the device."""
        self._members[row] = None
        # Lazily: a program of its own to stop one row would cost a return to the host.
        self.rows.halt(row, stop)

    # ------------------------------------------------------------ admission

    def _fill(self) -> None:
        """Admits waiting completions into free rows."""
        starts: dict[int, RowStart] = {}
        for row, running in enumerate(self._members):
            if running is None and self._waiting:
                self._members[row] = member = self._waiting.popleft()
                starts[row] = self._start(member)
        self.rows.admit(starts)

    def _start(self, member: PartialCompletion) -> RowStart:
        request = member.request
        bias = request.bias(self.limits.vocab_size) if request.biased else None
        sampling = RowSampling(
            request.temperature,
            request.top_k,
            request.top_p,
            request.min_p,
            bias,
            request.stop_tokens,
        )
        tokens, limit = tuple(request.tokens), request.max_new_tokens
        return RowStart(tokens, request.seed, member.member, limit, sampling)

    # ------------------------------------------------------------ weights, programs

    def set_weights(self, params: Params, version: int, *, recompute: bool = False) -> None:
        """Replaces the parameters, from the next token on.

        Args:
          params: the policy's.
          version: recorded with the tokens they sample.
          recompute: whether to recompute the cache of running completions; else it keeps keys and
            values of the old parameters, as asynchronous systems do.
        """
        self.rows.set_weights(params, version, recompute=recompute and self.running > 0)

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
        steps = choices() if self._chunk is None else (self._chunk,)
        # Rows with a grammar take single steps.
        single = (1,) if self._grammars is not None else ()
        return self.rows.compile(recompute=refresh, steps=(*steps, *single))

    @property
    def executables(self) -> int:
        """Programs compiled so far, including the one that prepares the weights."""
        return self.rows.executables


def _reports(out: ChunkOutput, row: int, count: int, top: int | None) -> list[TokenLogprobs]:
    """Reports on a row's new tokens; empty if none were requested."""
    if out.report is None or top is None:
        return []
    report = out.report
    ids, logprobs = (x[row, :count, :top].tolist() for x in (report.top_ids, report.top_logprobs))
    alternatives = [tuple(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]
    sampled = report.logprobs[row, :count].tolist()
    return [TokenLogprobs(*each) for each in zip(sampled, alternatives, strict=True)]


def _log() -> logging.Logger:
    return logging.getLogger("jrl")
