"""Tools of a run for the host part of a curriculum, ``Curriculum.between``.

    rounds = HostRounds(problems, source, text_rounds(run, source))
    collected = rounds.begun(collected, request, setting)   # before a step's first draw

As a round begins the curriculum may test problems, have some written and ask the value network; its
state, and the problems that it added, are in ``CollectState``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np

from jrl.collect.groups import Origin, PlacedGroups, place
from jrl.collect.members import numbers, uses
from jrl.collect.plan import CollectState, Setting
from jrl.collect.run_rows import prompt_seeds
from jrl.collect.sources import Source, innermost, join_groups, to_host
from jrl.collect.tree_search import estimates, value_estimate
from jrl.data.datasets import MemoryRows
from jrl.data.messages import Wording
from jrl.data.prompts import build_prompts
from jrl.episodes.host import EnvError
from jrl.errors import UserError
from jrl.setup.run import Run
from jrl.system.wait_reports import waiting
from jrl.types import Prompt
from jrl.types.asks import DrawRequest, new_ask


class Problems(Sequence[Prompt]):
    """The training prompts of a run: those of the data, then the added ones.

    Args:
      prompts: of the data.
      make: (row) -> its prompt, or None where it cannot be used.
    """

    def __init__(self, prompts: Sequence[Prompt], make: Callable[[Any], Prompt | None]) -> None:
        self._data, self.make = prompts, make
        self._added: list[Prompt] = []
        self._rows: tuple[Any, ...] = ()

    def set_added(self, rows: tuple[Any, ...]) -> None:
        """Replaces the added rows by these; ``make`` must accept each."""
        if rows == self._rows:
            return
        first = 1 + max(prompt.id for prompt in self._data)
        prompts = [prompt for row in rows if (prompt := self.make(row)) is not None]
        self._added = [dataclasses.replace(p, id=first + i) for i, p in enumerate(prompts)]
        self._rows = rows

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._data) + len(self._added)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: Any) -> Any:
        """One prompt, or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        size = len(self._data)
        return self._data[index] if index < size else self._added[index - size]


class HostTools(NamedTuple):
    """Calls of a run's environment and value network between rounds.

    Attributes:
      write: (texts of problems, how many, seed) -> texts or rows; None where nobody writes.
      estimate: (weights by name, prompts, seeds) -> [n] float, the value network's numbers; NaN
        where no episode opens. None without a value network.
    """

    write: Callable[[Sequence[str], int, int], Sequence[Any]] | None = None
    estimate: Callable[[Any, Sequence[Prompt], Sequence[int]], np.ndarray] | None = None


class Written(NamedTuple):
    """A written problem: its row, and the prompt made from it."""

    row: Any
    prompt: Prompt


class RunTools:
    """``methods.curriculum.RoundTools`` of one round.

    Args:
      request: of the step that the round begins with; its asks are not read.
      source: what draws.
      setting: of the run.
      problems: the prompts of the run; None on a task, which makes them.
      host: what the environment and the value network do.
      added: rows that earlier rounds added.

    Attributes:
      added: those, and the rows that this round added.
    """

    def __init__(
        self,
        request: DrawRequest,
        source: Source,
        setting: Setting,
        problems: Problems | None,
        host: HostTools,
        added: tuple[Any, ...],
    ) -> None:
        self._request, self._source, self._setting = request, source, setting
        self._problems, self._host, self.added = problems, host, added
        self._seeds, self._progress = 0, ""

    @property
    def rows(self) -> int:
        """Number of problems."""
        assert self._setting.table is not None
        return self._setting.table.rows if self._problems is None else len(self._problems)

    def draw(self, rows: np.ndarray, count: int) -> PlacedGroups:
        """As ``RoundTools.draw``, the problems of a training step at a time."""
        parts, tickets = [], np.asarray(rows, np.int32)
        for begin in range(0, len(tickets), self._setting.prompts):
            self._progress = f"{begin} of {len(tickets)} problems tested so far"
            part = tickets[begin : begin + self._setting.prompts]
            request = self._request.replace(asks=(new_ask(part, part, count),), stream="curriculum")
            parts.append(to_host(self._source.draw(request)))
        ask = new_ask(tickets, tickets, count)
        origin = Origin(tickets, tickets, numbers((ask,)), uses((ask,)), np.int32(0), {})
        return place(
            join_groups(parts), origin, self._setting.weights, self._setting.accuracy_column
        )

    def write(self, rows: np.ndarray, count: int) -> list[Written]:
        """As ``RoundTools.write``, without unusable problems and those that the run already has."""
        self._check_named("write")
        assert self._problems is not None
        assert self._host.write is not None, "a row of the table of features makes sure of it"
        self._progress = f"{len(self.added)} problems written so far"
        texts = sorted({self._problems[row].text for row in np.asarray(rows).tolist()})
        (seed,), log = self._next_seeds(1), logging.getLogger("jrl")
        try:
            listed = list(self._host.write(texts, count, seed))
        except EnvError as error:
            log.warning("curriculum: nothing was written: %s", error)
            return []
        texts_so_far = {prompt.text for prompt in self._problems}
        usable = []
        for row in listed:
            prompt = self._problems.make(row)
            if prompt is not None and prompt.text not in texts_so_far:
                usable.append(Written(row, prompt))
                texts_so_far.add(prompt.text)
        if len(usable) < len(listed):
            log.info("curriculum: %d of %d written problems are of use", len(usable), len(listed))
        return usable

    def estimate(self, problems: list[Written]) -> np.ndarray:
        """As ``RoundTools.estimate``."""
        self._check_named("estimate")
        assert self._host.estimate is not None, "a row of the table of features makes sure of it"
        prompts = [problem.prompt for problem in problems]
        if not prompts:
            return np.zeros(0)
        return self._host.estimate(self._request.weights, prompts, self._next_seeds(len(prompts)))

    def add(self, problems: list[Written]) -> None:
        """As ``RoundTools.add``."""
        self._check_named("write")
        assert self._problems is not None
        self.added = (*self.added, *(problem.row for problem in problems))
        self._problems.set_added(self.added)

    def _check_named(self, name: str) -> None:
        """Raises UserError where the curriculum does not say that it uses a tool."""
        curriculum = self._setting.method.curriculum
        if curriculum is not None and name not in curriculum.uses:
            raise UserError(
                f"curriculum.between uses tools of {name!r}, which are made for those that name"
                f' them; add "{name}" to Between.uses'
            )

    def _next_seeds(self, count: int) -> list[int]:
        """``count`` numbers below 2**64, different at each call of a round."""
        places = np.arange(self._seeds, self._seeds + count)
        self._seeds += count
        return prompt_seeds(self._request.key, "curriculum", self._request.step, places)

    def progress(self) -> str:
        """Progress of the round, as text; read by another thread."""
        return self._progress


class HostRounds(NamedTuple):
    """Begins the rounds of a run's curriculum.

    Attributes:
      source: what draws.
      problems: the prompts of the run; None on a task, which makes them.
      host: what the environment and the value network do.
    """

    source: Source
    problems: Problems | None = None
    host: HostTools = HostTools()

    def begun(
        self, collected: CollectState, request: DrawRequest, setting: Setting
    ) -> CollectState:
        """The collector's state for the request's step: after ``between`` if a round begins."""
        if self.problems is not None:  # a failed step may have left other problems
            self.problems.set_added(collected.added)
        curriculum = setting.method.curriculum
        assert curriculum is not None
        between = curriculum.between
        if between is None or int(request.step) % between.every:
            return collected
        state = request, self.source, setting, self.problems, self.host
        tools = RunTools(*state, collected.added)
        with waiting("problems of a round", tools.progress):
            after = between.run(collected.curriculum, tools)
        return collected.replace(curriculum=after, added=tools.added)


# ---------------------------------------------------------------- of a run


def with_problems(run: Run) -> tuple[Run, Problems | None]:
    """(run, prompts that its curriculum can add to), if the curriculum has problems written."""
    curriculum = run.method.curriculum
    if curriculum is None or "write" not in curriculum.uses:
        return run, None
    problems = Problems(run.data.prompts["train"], partial(_prompt_of, run))
    data = run.data._replace(prompts={**run.data.prompts, "train": problems})
    return run._replace(data=data), problems


Openings = Callable[[Sequence[Prompt], Sequence[int]], list[np.ndarray | None]]
"""(prompts, seeds) -> what the policy sees first of each, token ids; None if no episode opens."""


def text_rounds(run: Run, source: Source) -> HostTools:
    """Calls of a run's value network between rounds."""
    return _host_tools(run, None, _as_they_are)


def episode_rounds(run: Run, source: Source) -> HostTools:
    """Calls of a run's environment and value network between rounds.

    Args:
      run: whose curriculum is asked what it uses.
      source: of the run, around its ``HostEpisodes``.
    """
    episodes: Any = innermost(source)
    return _host_tools(run, episodes.written, episodes.openings)


def _host_tools(run: Run, write: Any, opened: Openings) -> HostTools:
    curriculum = run.method.curriculum
    uses = frozenset() if curriculum is None else curriculum.uses
    if "estimate" not in uses:
        return HostTools(write)
    estimate = value_estimate(run, lambda number: number)

    def numbers_of(
        params: Mapping[str, Any], prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> np.ndarray:
        openings = opened(prompts, seeds)
        with_opening = [i for i, ids in enumerate(openings) if ids is not None]
        values = np.full(len(prompts), np.nan)
        if with_opening:
            whole = [ids for ids in openings if ids is not None]
            values[with_opening] = estimates(partial(estimate, params), run.width, whole)
        return values

    return HostTools(write, numbers_of)


def _as_they_are(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[np.ndarray | None]:
    """Openings of prompts without an environment."""
    return [np.asarray(prompt.tokens) for prompt in prompts]


def _prompt_of(run: Run, row: Any) -> Prompt | None:
    """The prompt of a row or text, made as those of the data; None if it is not usable."""
    data: Any = run.config.data
    question, answer = (data.fields.get(name, name) for name in ("question", "answer"))
    fields = dict(row) if isinstance(row, Mapping) else {question: row}
    answer_text = fields.pop(answer, "")
    try:
        (prompt,), _ = build_prompts(
            MemoryRows([fields], "written problem"),
            Wording(run.tokenizer, **data.wording),
            question_key=question,
            answer_key=None,
            max_prompt_tokens=run.width,
        )
    except UserError:  # it has no question, or one that is too long
        return None
    return dataclasses.replace(prompt, answer=str(answer_text))
