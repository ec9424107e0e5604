"""Calls about rows that have ended, while the others are decoded.

    with calls.step(3):                    # of training
        source.draw(request)               # whose rows go to ``calls.submit`` as they end
        calls.drain()                      # all of them were submitted
        judge(..., begun=calls.begun)      # what began is not called again

This is for functions of single samples in the pool's processes and for judges behind an endpoint.
Functions of a group or batch, judges that compare members or read other points, and models on the
run's devices are called when all rows have ended. A call is identified by the content of a sample,
so points do not depend on which row ended first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from jrl.episodes.transcript import Transcript, conversation
from jrl.judging.host import HostScorer, Texts, make_sample, with_ends
from jrl.judging.text_parts import TextParts
from jrl.rewards.base import Sample
from jrl.rewards.pool import Begun
from jrl.types import Prompt, Rollout, StopReason


@runtime_checkable
class EndsRows(Protocol):
    """A source that reports each row as it ends, by calling ``ended``; None for no report."""

    ended: Callable[[Transcript], None] | None


class RowCalls:
    """The calls of one source; a draw at a time.

    Args:
      functions: the reward functions on the host; None without.
      judges: None without.

    Attributes:
      begun: the calls of functions that began in this step; None outside of one.
    """

    def __init__(self, functions: HostScorer | None, judges: TextParts | None) -> None:
        self._functions, self._judges = functions, judges
        self.begun: Begun | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._submitted: list[Future[None]] = []
        self._step = 0

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A draw and its scoring; calls whose results were not collected are dropped at the end."""
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
        """Begins the calls about an episode that has ended; returns at once."""
        if row.alive and any(segment.drawn for segment in row.segments):
            self._submit(partial(self._of_row, row), True, True)

    def submit_groups(self, prompts: Sequence[Prompt], rollout: Rollout, first: int) -> None:
        """Begins the calls about groups of completions; returns at once.

        Args:
          prompts: n of them.
          rollout: of their members, on the host.
          first: number of the first group among those of the step; of several processes each calls
            about its own share.
        """
        stop, processes = np.asarray(rollout.stop), jax.process_count()
        judge = self._functions or self._judges
        if judge is None:
            return
        texts = Texts(prompts, rollout, judge.tokenizer)
        for i, j in np.argwhere(stop != StopReason.ABSENT).tolist():
            mine = (first + i) % processes == jax.process_index()
            whole = self._functions is not None and self._functions.pool.over_batch
            functions = jax.process_index() == 0 if whole else mine
            judges = mine and stop[i, j] != StopReason.ABORTED and stop[i, j] < StopReason.FAILED
            make = partial(texts.sample, i, j, self._step, judge.steps)
            self._submit(make, functions, bool(judges))

    def drain(self) -> None:
        """Waits until the calls of all rows have begun."""
        for each in self._submitted:
            each.result()

    def _submit(self, make: Callable[[], Sample], functions: bool, judges: bool) -> None:
        if self._thread is not None and (functions or judges):
            job = self._thread.submit(self._begin, make, functions, judges)
            self._submitted.append(job)

    def _of_row(self, row: Transcript) -> Sample:
        """The ``Sample`` of an episode, for its judges."""
        judge = self._functions or self._judges
        assert judge is not None
        return make_sample(
            row.prompt,
            np.concatenate([segment.tokens for segment in row.segments if segment.drawn]),
            row.stop,
            conversation(row, judge.tokenizer),
            judge.tokenizer,
            self._step,
            judge.steps,
        )

    def _begin(self, make: Callable[[], Sample], functions: bool, judges: bool) -> None:
        sample = make()
        if functions and self._functions is not None and self.begun is not None:
            by_token, tokenizer = self._functions.pool.by_token, self._functions.tokenizer
            self.begun.submit(with_ends(sample, tokenizer) if by_token else sample)
        if judges and self._judges is not None:
            self._judges.begin(self._judges.ended(sample))
