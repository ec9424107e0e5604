"""Problems that a run draws from, chosen anew at the start of each round: ``Method.curriculum``.

    source = HardRounds(rule, prompts, source, attempts, ...)   # of ``rounds.prompts``, as they are

What is chosen is a function of the weights at the start of the round, the key and the step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, overload

import jax
import numpy as np

from jrl.data.prompts import build_prompts
from jrl.data.sources import MemoryRows
from jrl.episodes.host import EnvError
from jrl.errors import UserError
from jrl.methods.base import HardProblems, Method, WrittenProblems
from jrl.rewards.pool import RewardPool
from jrl.system.wait_reports import waiting
from jrl.train.build import Run
from jrl.train.groups import counted
from jrl.train.host_episodes import host_source
from jrl.train.prompt_seeds import prompt_seeds
from jrl.train.sources import Around, Groups, Source
from jrl.train.tree_search import (
    attempts_source,
    estimates,
    search_rows,
    search_source,
    undrawn_text,
    value_estimate,
)
from jrl.types import Prompt
from jrl.types.asks import DrawRequest, new_ask


class CurrentPrompts(Sequence[Prompt]):
    """The prompts of a run as they are now.

    Attributes:
      now: the prompts; a round replaces them.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.now = prompts

    def __len__(self) -> int:
        """How many there are."""
        return len(self.now)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: Any) -> Any:
        """One of them, or some."""
        return self.now[index]


class HardRounds(Around):
    """Rounds on the problems that the policy mostly fails.

    Args:
      rule: of the method.
      prompts: all problems, which a round narrows down.
      source: of groups of ``prompts``.
      attempts: a source of ``rule.attempts`` members, of rows of all problems.
      points: (rewards [N, G, R]) -> points [N, G], that say what is right.
      at_once: problems that are tested together.
      notes: what an earlier call of the run had chosen, of ``notes``.

    Attributes:
      current: the prompts of this round.
    """

    def __init__(
        self,
        rule: HardProblems,
        prompts: CurrentPrompts,
        source: Source,
        attempts: Source,
        points: Callable[[np.ndarray], np.ndarray],
        *,
        at_once: int,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(source)
        self.current = prompts
        self._rule, self._attempts, self._points = rule, attempts, points
        self._all, self._rows = prompts.now, np.arange(len(prompts))
        self._at_once, self._round, self._tested = at_once, -1, 0
        if notes:
            self._round = int(notes["round"])
            self._take(np.asarray(notes["rows"]))

    def _take(self, rows: np.ndarray) -> None:
        self._rows, self.current.now = rows, [self._all[i] for i in rows]

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``; begins a round when its first step comes.

        ``counts`` gains "hard_problems", how many the round has.
        """
        number = int(request.step) // self._rule.steps
        if number != self._round:
            with waiting("problems that are tested", self._told):
                self._begin(request)
            self._round = number
        groups = self.source.draw(_reordered(request, self.source))
        return groups._replace(counts=groups.counts | {"hard_problems": float(len(self.current))})

    def _told(self) -> str:
        """How far the tests are; read by another thread."""
        return f"{self._tested} of {len(self._rows)} so far"

    def _begin(self, request: DrawRequest) -> None:
        """Tests the problems of the last round, and leaves out what is mostly solved."""
        rows, rule, found = self._rows, self._rule, list[np.ndarray]()
        for begin in range(0, len(rows), self._at_once):
            self._tested = begin
            part = rows[begin : begin + self._at_once]
            found.append(self._share_right(request, part))
        shares = np.concatenate(found)
        hard = rows[~(shares > rule.most)]
        said = logging.getLogger("jrl")
        if not len(hard):
            said.warning(
                "curriculum: none of %d problems is mostly failed; the round keeps all of them",
                len(rows),
            )
            return
        self._take(hard)
        said.info("curriculum: %d of %d problems are hard", len(hard), len(rows))

    def _share_right(self, request: DrawRequest, rows: np.ndarray) -> np.ndarray:
        """[n] float; NaN where nothing is known of a problem."""
        ask = new_ask(rows, rows, self._rule.attempts)
        found = self._attempts.draw(request.replace(asks=(ask,)))
        known = np.asarray(counted(found.rollout))
        right = known & (self._points(np.asarray(found.rewards)) > self._rule.above)
        with np.errstate(invalid="ignore"):
            return right.sum(axis=1) / known.sum(axis=1)

    def notes(self) -> dict[str, Any]:
        """What a checkpoint holds, an entry "curriculum"; none before the first round."""
        inner = super().notes()
        if self._round < 0:
            return inner
        return inner | {"curriculum": {"round": self._round, "rows": self._rows}}


class WrittenRounds(Around):
    """Rounds on the problems of the data and on those that are written after failed ones.

    A problem counts as failed where no member of its newest group in the round has any points.

    Args:
      rule: of the method.
      prompts: those of the data; written ones are added.
      source: of groups of ``prompts``.
      write: (texts of failed problems, how many, seed) -> texts or rows.
      make: (row) -> its prompt, or None where it cannot be used.
      chances: (params, prompts, seeds) -> [n] float, the probability of success that the value
        network gives to each; NaN where no episode opens.
      weights: [R] float, of the reward parts.
      notes: what an earlier call of the run had written, of ``notes``.
    """

    def __init__(
        self,
        rule: WrittenProblems,
        prompts: CurrentPrompts,
        source: Source,
        write: Callable[[Sequence[str], int, int], Sequence[Any]],
        make: Callable[[Any], Prompt | None],
        chances: Callable[[Any, Sequence[Prompt], Sequence[int]], np.ndarray],
        weights: np.ndarray,
        *,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(source)
        self._prompts, self._next_id = prompts, 1 + max(prompt.id for prompt in prompts)
        self._rule, self._write, self._make = rule, write, make
        self._chances, self._weights = chances, weights
        self._rows: list[Any] = []
        self._failed: dict[str, bool] = {}
        self._round = 0
        if notes:
            self._round, self._failed = notes["round"], dict(notes["failed"])
            self._add([(row, prompt) for row in notes["rows"] if (prompt := make(row))])

    def _add(self, written: Sequence[tuple[Any, Prompt]]) -> None:
        first = self._next_id + len(self._rows)
        self._rows += [row for row, _ in written]
        new = [dataclasses.replace(p, id=first + i) for i, (_, p) in enumerate(written)]
        self._prompts.now = [*self._prompts.now, *new]

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``; begins a round when its first step comes.

        The weights "value" are read. ``counts`` gains "written_problems", how many there are.
        """
        number = int(request.step) // self._rule.steps
        if number != self._round:
            with waiting("problems that are written", lambda: f"{len(self._rows)} so far"):
                self._begin(request)
            self._round, self._failed = number, {}
        groups = self.source.draw(_reordered(request, self.source))
        points = np.asarray(groups.rewards) @ self._weights
        won = (np.asarray(counted(groups.rollout)) & (points > 0)).any(axis=1)
        texts = [prompt.text for prompt in groups.subject]
        self._failed |= dict(zip(texts, (~won).tolist(), strict=True))
        counts = groups.counts | {"written_problems": float(len(self._rows))}
        return groups._replace(counts=counts)

    def _begin(self, request: DrawRequest) -> None:
        """Adds what is written, as far as it can be used; a writer that fails adds nothing."""
        rule, said = self._rule, logging.getLogger("jrl")
        failed = sorted(text for text, lost in self._failed.items() if lost)
        if not failed:
            said.info("curriculum: no problem was failed, and none is written")
            return
        key, step = request.key, request.step
        (seed,) = prompt_seeds(key, "curriculum", step, np.zeros(1, np.int32))
        try:
            rows = list(self._write(failed, rule.problems, seed))
        except EnvError as error:
            said.warning("curriculum: nothing was written: %s", error)
            return
        here = {prompt.text for prompt in self._prompts}
        usable: list[tuple[Any, Prompt]] = []
        for row in rows:
            if (prompt := self._make(row)) and prompt.text not in here:
                usable.append((row, prompt))
                here.add(prompt.text)
        prompts = [prompt for _, prompt in usable]
        seeds = prompt_seeds(key, "curriculum", step, np.arange(1, len(prompts) + 1))
        chances = self._chances(request.weights, prompts, seeds) if prompts else np.zeros(0)
        fits = [
            each
            for each, chance in zip(usable, chances, strict=True)
            if rule.low <= chance <= rule.high
        ]
        self._add(fits)
        said.info(
            "curriculum: %d problems written, %d of use, %d neither hopeless nor easy",
            *(len(rows), len(usable), len(fits)),
        )

    def notes(self) -> dict[str, Any]:
        """What a checkpoint holds, an entry "curriculum"."""
        note = {"round": self._round, "rows": list(self._rows), "failed": dict(self._failed)}
        return super().notes() | {"curriculum": note}


def _reordered(request: DrawRequest, source: Source) -> DrawRequest:
    """The request for the same tickets, of the problems that a new round has."""
    asks = (ask.replace(row=source.order(np.asarray(ask.ticket))) for ask in request.asks)
    return request.replace(asks=tuple(asks))


# ---------------------------------------------------------------- of a run


def rounds_of(
    run: Run, pool: RewardPool | None, notes: Mapping[str, Any] | None
) -> HardRounds | WrittenRounds:
    """The source of a run's groups, in rounds; ``notes`` are those of its checkpoint."""
    rule: Any = run.method.curriculum
    if isinstance(rule, HardProblems):
        return hard_rounds(run, rule, pool, notes)
    return written_rounds(run, rule, notes)


def written_rounds(
    run: Run, rule: WrittenProblems, notes: Mapping[str, Any] | None
) -> WrittenRounds:
    """The rounds of a run on episodes whose environment writes problems."""
    prompts = CurrentPrompts(run.data.prompts["train"])
    source = host_source(run, prompts, run.config.sampling.group)
    estimate = value_estimate(run, jax.nn.sigmoid)

    def chances(
        params: Mapping[str, Any], asked: Sequence[Prompt], seeds: Sequence[int]
    ) -> np.ndarray:
        openings = source.openings(asked, seeds)
        there = [i for i, ids in enumerate(openings) if ids is not None]
        found = np.full(len(asked), np.nan)
        if there:
            whole = [ids for ids in openings if ids is not None]
            found[there] = estimates(partial(estimate, params), run.width, whole)
        return found

    return WrittenRounds(
        rule,
        prompts,
        source,
        source.written,
        partial(_prompt_of, run),
        chances,
        np.array(list(run.rewards.weights.values())),
        notes=notes,
    )


def _prompt_of(run: Run, row: Any) -> Prompt | None:
    """The prompt of a row or text, as those of the data are made; None where it cannot be."""
    data: Any = run.config.data
    question, answer = (data.fields.get(name, name) for name in ("question", "answer"))
    known = dict(row) if isinstance(row, Mapping) else {question: row}
    told = known.pop(answer, "")
    try:
        (made,), _ = build_prompts(
            MemoryRows([known], "written problem"),
            run.tokenizer,
            question_key=question,
            answer_key=None,
            **data.wording,
            max_prompt_tokens=run.width,
        )
    except UserError:  # it has no question, or one that is too long
        return None
    return dataclasses.replace(made, answer=str(told))


def hard_rounds(
    run: Run, rule: HardProblems, pool: RewardPool | None, notes: Mapping[str, Any] | None
) -> HardRounds:
    """The source of a run that searches, in rounds; ``notes`` of its checkpoint."""
    search, prompts = run.method.draw.search, CurrentPrompts(run.data.prompts["train"])
    assert search is not None, "the checks of a curriculum make sure of it"
    rows = search_rows(run, search)
    attempts = attempts_source(run, search, pool, rows, rule.attempts)
    weights, judge = np.array(list(run.rewards.weights.values())), run.rewards.judged

    def points(rewards: np.ndarray) -> np.ndarray:
        return rewards @ weights if judge is None else rewards[:, :, judge]

    data = run.data._replace(prompts={**run.data.prompts, "train": prompts})
    current, seed = run._replace(data=data), run.config.data.order_seed(run.config.seed)
    source = search_source(current, search, undrawn_text(current, pool, seed), rows)
    at_once = run.config.train.prompts
    return HardRounds(rule, prompts, source, attempts, points, at_once=at_once, notes=notes)


def has_rounds(method: Method) -> bool:
    """Whether problems are chosen on the host between rounds of steps."""
    return isinstance(method.curriculum, HardProblems | WrittenProblems)
