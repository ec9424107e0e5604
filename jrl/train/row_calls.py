"""Calls about rows that have ended, while the others are decoded.

    with calls.step(3):                    # of training
        source.draw(request)               # whose rows go to ``calls.submit`` as they end
        calls.drain()                      # all of them were submitted
        judge(..., begun=calls.begun)      # what began is not called again

The functions of single samples in the pool's processes and the judges behind an address are called
so; functions of a group or of a batch, judges that compare members or go by other points, and
models on the run's devices are called when all rows are there. What is called about is the content
of a sample, so points do not depend on which row ended first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from jrl.episodes.transcript import Transcript, conversation
from jrl.rewards.pool import Begun
from jrl.train.judging import HostJudge, make_sample, with_ends
from jrl.train.text_parts import TextParts


class EndsRows(Protocol):
    """A source that says which rows have ended; ``ended`` is called with each, None is nobody."""

    ended: Callable[[Transcript], None] | None


class RowCalls:
    """The calls of one source; a draw at a time.

    Args:
      functions: the reward functions on the host; None without.
      judges: None without.

    Attributes:
      begun: the calls of functions that began in this step; None outside of one.
    """

    def __init__(self, functions: HostJudge | None, judges: TextParts | None) -> None:
        self._functions, self._judges = functions, judges
        self.begun: Begun | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._submitted: list[Future[None]] = []
        self._step = 0

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A draw and its judging; at the end what nobody collected is dropped."""
        self._step, self._submitted = step, []
        with contextlib.ExitStack() as stack:
            if self._judges is not None:
                stack.callback(self._judges.stop)
            if self._functions is not None:
                self.begun = stack.enter_context(self._functions.pool.begin())
            # Text is decoded here and not in the caller's thread, which has the device.
            self._thread = ThreadPoolExecutor(1, "rewards")
            stack.callback(self._thread.shutdown, cancel_futures=True)
            try:
                yield
            finally:
                self.begun, self._thread = None, None

    def submit(self, row: Transcript) -> None:
        """Begins the calls about a row that has ended; returns at once."""
        if self._thread is not None and row.alive:
            self._submitted.append(self._thread.submit(self._begin, row, self.begun))

    def drain(self) -> None:
        """Waits until the calls of all rows have begun."""
        for each in self._submitted:
            each.result()

    def _begin(self, row: Transcript, begun: Begun | None) -> None:
        drawn = [segment.tokens for segment in row.segments if segment.drawn]
        judge = self._functions or self._judges
        if not drawn or judge is None:
            return
        tokenizer = judge.tokenizer
        sample = make_sample(
            row.prompt,
            np.concatenate(drawn),
            row.stop,
            conversation(row, tokenizer),
            tokenizer,
            self._step,
            judge.steps,
        )
        if begun is not None and self._functions is not None:
            by_token = self._functions.pool.by_token
            begun.submit(with_ends(sample, tokenizer) if by_token else sample)
        if self._judges is not None:
            self._judges.begin(self._judges.ended(sample))
