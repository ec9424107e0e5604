"""Steps of search trees on the row engine; a path is never computed again.

A row holds the cache of its whole path. When a step has ended the row is suspended, and each step
that follows begins with a copy of it. Prompts are computed once, too: all first steps begin with a
copy of a row that has sampled nothing yet. An environment's answer to a step is read once, before
the steps that follow it begin.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jrl.sampling.admission import RowStart
from jrl.sampling.rows import More, Rows, SuspendedRow
from jrl.types import StopReason


class StepAsk(NamedTuple):
    """Steps to draw behind a node.

    Attributes:
      tree: its number.
      node: number of the node in the tree, 0 for the root.
      path: [t] int32, the tokens from the prompt to the end of the node's step.
      answer: [a] int32, what an environment said to that step; the new steps follow it.
      first: number that the first of the new nodes will have; the others follow.
      steps: how many to draw.
    """

    tree: int
    node: int
    path: np.ndarray
    first: int
    steps: int
    answer: np.ndarray = np.zeros(0, np.int32)


class DrawnStep(NamedTuple):
    """A step that was drawn.

    Attributes:
      tokens: [t] int32.
      logprobs: [t] float32, nats.
      entropy: nats, the mean over its tokens; 0 where ``rows`` measure nothing.
      version: the policy's.
      stop: STOP_TOKEN or LENGTH where the completion ends with it, else RUNNING.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    entropy: float
    version: int
    stop: StopReason


class _Job:
    """A step under way."""

    def __init__(self, place: tuple[int, int], ask: StepAsk, number: int) -> None:
        self.place, self.ask, self.number = place, ask, number
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def step(self, version: int, stop: StopReason) -> DrawnStep:
        tokens, logprobs, measured = map(np.concatenate, zip(*self.parts, strict=True))
        return DrawnStep(tokens, logprobs, float(measured.mean()), version, stop)


class StepRows:
    """Draws steps of trees side by side.

    What is drawn behind a node depends on the weights, the prompt's seed, the path and the number
    of the new node alone: the node is the member that its draws are keyed by.

    Args:
      rows: with weights; nobody else's meanwhile. They stop at the tokens that end a step, and
        measure entropies. A node whose row has no room among the suspended ones is read again.
      prompts: ids of each tree's prompt.
      seeds: below 2**64, of each tree's draws.
      ends: ids that end a completion.
      step_tokens: the most tokens of a step.

    Attributes:
      counts: "slot_tokens" (drawn), "slot_steps", "read_tokens" of prompts, and of paths that were
        read again, which "reread_tokens" counts alone.
    """

    def __init__(
        self,
        rows: Rows,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        ends: Sequence[int],
        step_tokens: int,
    ) -> None:
        self._rows, self._prompts, self._seeds = rows, prompts, seeds
        self._ends, self._step_tokens = set(ends), step_tokens
        self._suspended: dict[tuple[int, int], SuspendedRow] = {}
        self._begun: set[int] = set()
        names = ("slot_tokens", "slot_steps", "read_tokens", "reread_tokens")
        self.counts = dict.fromkeys(names, 0.0)

    def draw(self, asks: Sequence[StepAsk]) -> list[list[DrawnStep]]:
        """The steps asked for, those of each node in the order of their numbers."""
        found: list[list[DrawnStep | None]] = [[None] * ask.steps for ask in asks]
        waiting = collections.deque(
            _Job((i, k), ask, ask.first + k) for i, ask in enumerate(asks) for k in range(ask.steps)
        )
        self._read_answers(asks)
        # Rows of nodes that are expanded now stay until the last step behind them has begun.
        users = collections.Counter((job.ask.tree, job.ask.node) for job in waiting)
        running: dict[int, _Job] = {}
        while waiting or running:
            for row in range(self._rows.slots):
                if waiting and row not in running:
                    running[row] = job = waiting.popleft()
                    self._begin(row, job, users)
            out = self._rows.decode(len(running))
            self.counts["slot_steps"] += int(out.steps) * len(running)
            for row, job in list(running.items()):
                if count := int(out.counts[row]):
                    measured = np.zeros((1, count)) if out.measured is None else out.measured[[row]]
                    numbers = np.asarray(measured)[0, :count]
                    tokens, logprobs = np.asarray(out.tokens), np.asarray(out.logprobs)
                    job.parts.append((tokens[row, :count], logprobs[row, :count], numbers))
                    self.counts["slot_tokens"] += count
                if out.stop[row] != StopReason.RUNNING:
                    place, k = job.place
                    found[place][k] = self._ended(row, job, StopReason(int(out.stop[row])), users)
                    del running[row]
        return [[step for step in steps if step is not None] for steps in found]

    def _read_answers(self, asks: Sequence[StepAsk]) -> None:
        """Continues the rows of nodes by what they were answered, as many at a time as slots."""
        due = [ask for ask in asks if len(ask.answer) and (ask.tree, ask.node) in self._suspended]
        for begin in range(0, len(due), self._rows.slots):
            some = dict(enumerate(due[begin : begin + self._rows.slots]))
            for row, ask in some.items():
                self._rows.resume(row, self._suspended[ask.tree, ask.node])
            most = self._rows.max_new_tokens
            self._rows.extend({row: More(ask.answer.tolist(), most) for row, ask in some.items()})
            for row, ask in some.items():
                self._suspended[ask.tree, ask.node] = self._rows.suspend(row)

    def _begin(self, row: int, job: _Job, users: collections.Counter[tuple[int, int]]) -> None:
        """Puts a copy of the node's row into a slot."""
        ask = job.ask
        key = (ask.tree, ask.node)
        behind = len(ask.path) + len(ask.answer)
        limit = min(behind + self._step_tokens, self._rows.max_new_tokens)
        start = RowStart(tuple(self._prompts[ask.tree]), self._seeds[ask.tree], job.number, limit)
        if key not in self._suspended:
            self._keep(key, self._read(row, start, ask), users)
        self._rows.resume(row, self._suspended[key], start)
        users[key] -= 1
        if not users[key] and ask.node:
            # A node is expanded once, but for a root whose paths all ended.
            del self._suspended[key]

    def _read(self, row: int, start: RowStart, ask: StepAsk) -> SuspendedRow:
        """The row of a node with its answer, computed; it takes the slot meanwhile."""
        past = [*ask.path.tolist(), *ask.answer.tolist()]
        read = self._rows.admit({row: start}) + len(ask.path)
        if past:
            self._rows.extend({row: More(past, self._rows.max_new_tokens)})
        self.counts["read_tokens"] += read
        self.counts["reread_tokens"] += read * (ask.tree in self._begun)
        self._begun.add(ask.tree)
        return self._rows.suspend(row)

    def _ended(
        self,
        row: int,
        job: _Job,
        stop: StopReason,
        users: collections.Counter[tuple[int, int]],
    ) -> DrawnStep:
        """The step that a row has drawn; the row is kept for those that may follow."""
        step = job.step(self._rows.version, stop)
        length = len(job.ask.path) + len(job.ask.answer) + len(step.tokens)
        ended = stop == StopReason.STOP_TOKEN and int(step.tokens[-1]) in self._ends
        if ended or length >= self._rows.max_new_tokens:
            return step._replace(stop=StopReason.STOP_TOKEN if ended else StopReason.LENGTH)
        self._keep((job.ask.tree, job.number), self._rows.suspend(row), users)
        return step._replace(stop=StopReason.RUNNING)

    def _keep(
        self, key: tuple[int, int], row: SuspendedRow, users: collections.Counter[tuple[int, int]]
    ) -> None:
        """Keeps a row; where there is no room, instead of the one that was kept the longest."""
        self._suspended[key] = row
        for other in list(self._suspended):
            if len(self._suspended) <= max(self._rows.max_suspended, 1):
                break
            if not users[other] and other != key:
                del self._suspended[other]
