"""Problems that a run draws from, chosen anew at the start of each round: ``Method.curriculum``.

    rounds = HardRounds(rule, prompts, attempts, ...)
    source = rounds.around(draw)          # a GroupSource of ``rounds.prompts``, as they are then

What is chosen is a function of the weights at the start of the round, the key and the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from jrl.errors import UserError
from jrl.methods.base import HardProblems
from jrl.rewards.pool import RewardPool
from jrl.train.build import Run
from jrl.train.collect import Groups, GroupSource, counted
from jrl.train.tree_search import Guided, attempts_source, search_rows, search_source
from jrl.types import Prompt
from jrl.waits import waiting


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


class HardRounds:
    """Rounds on the problems that the policy mostly fails.

    Args:
      rule: of the method.
      prompts: all problems.
      attempts: a source of ``rule.attempts`` members; a position is a row of ``prompts``.
      points: (rewards [N, G, R]) -> points [N, G], that say what is right.
      at_once: problems that are tested together.
      notes: what an earlier call of the run had chosen, of ``notes``.

    Attributes:
      prompts: those of this round.
    """

    def __init__(
        self,
        rule: HardProblems,
        prompts: Sequence[Prompt],
        attempts: GroupSource,
        points: Callable[[np.ndarray], np.ndarray],
        *,
        at_once: int,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.prompts = CurrentPrompts(prompts)
        self._rule, self._attempts, self._points = rule, attempts, points
        self._all, self._rows = prompts, np.arange(len(prompts))
        self._at_once, self._round = at_once, -1
        if notes:
            self._round = int(notes["round"])
            self._take(np.asarray(notes["rows"]))

    def _take(self, rows: np.ndarray) -> None:
        self._rows, self.prompts.now = rows, [self._all[i] for i in rows]

    def around(self, draw: GroupSource) -> GroupSource:
        """A source of ``prompts`` that begins a round when its first step comes.

        ``counts`` gains "hard_problems", how many the round has.
        """

        def drawn(key: Any, params: Any, step: Any, positions: Any, **more: Any) -> Groups:
            number = int(step) // self._rule.steps
            if number != self._round:
                with waiting("problems that are tested", lambda: f"{len(self.prompts)} in all"):
                    self._begin(key, params, step)
                self._round = number
            found = draw(key, params, step, positions, **more)
            return found._replace(counts=found.counts | {"hard_problems": float(len(self.prompts))})

        return drawn

    def _begin(self, key: Any, params: Any, step: Any) -> None:
        """Tests the problems of the last round, and leaves out what is mostly solved."""
        rows, rule = self._rows, self._rule
        parts = [rows[i : i + self._at_once] for i in range(0, len(rows), self._at_once)]
        shares = np.concatenate([self._share_right(key, params, step, part) for part in parts])
        hard = rows[~(shares > rule.most)]
        said = logging.getLogger("jrl")
        if not len(hard):
            said.warning(
                "curriculum: none of %d problems is failed mostly; the round goes on with all",
                len(rows),
            )
            return
        self._take(hard)
        said.info("curriculum: %d of %d problems are hard", len(hard), len(rows))

    def _share_right(self, key: Any, params: Any, step: Any, rows: np.ndarray) -> np.ndarray:
        """[n] float; NaN where nothing is known of a problem."""
        found = self._attempts(key, params, step, rows)
        known = np.asarray(counted(found.rollout))
        right = known & (self._points(np.asarray(found.rewards)) > self._rule.above)
        with np.errstate(invalid="ignore"):
            return right.sum(axis=1) / known.sum(axis=1)

    def notes(self) -> dict[str, Any]:
        """What a checkpoint holds, an entry "curriculum"; {} before the first round."""
        if self._round < 0:
            return {}
        return {"curriculum": {"round": self._round, "rows": self._rows}}


# ---------------------------------------------------------------- of a run


def hard_rounds(
    run: Run, rule: HardProblems, pool: RewardPool | None, notes: Mapping[str, Any] | None
) -> tuple[HardRounds, GroupSource]:
    """The rounds of a run that searches, and its source of groups; ``notes`` of its checkpoint."""
    search, prompts = run.method.draw.search, run.data.prompts["train"]
    assert search is not None, "``check_curriculum`` makes sure of it"
    rows = search_rows(run, search)
    tested = attempts_source(run, search, pool, rows, rule.attempts)

    def attempts(key: Any, params: Any, step: Any, positions: Any) -> Groups:
        policy = params.policy if isinstance(params, Guided) else params
        return tested.draw(key, policy, step, positions)

    names = list(run.rewards.weights)
    weights = np.array(list(run.rewards.weights.values()))
    judge = names.index(run.rewards.judge) if run.rewards.judge in names else None

    def points(rewards: np.ndarray) -> np.ndarray:
        return rewards @ weights if judge is None else rewards[:, :, judge]

    at_once = run.config.train.prompts
    rounds = HardRounds(rule, prompts, attempts, points, at_once=at_once, notes=notes)
    data = run.data._replace(prompts={**run.data.prompts, "train": rounds.prompts})
    return rounds, rounds.around(search_source(run._replace(data=data), search, pool, rows).draw)


def check_curriculum(run: Run) -> None:
    """Raises UserError where a run cannot choose its problems in rounds."""
    if run.method.curriculum is None:
        return
    said = f"method = {run.config.method!r} chooses its problems in rounds, "
    if run.task is not None:
        raise UserError(
            f"{said}and those of a procedural task are never the same; give data.train, or set"
            " objective.round_steps to 0"
        )
    if run.config.episodes is not None or run.method.draw.search is None:
        raise UserError(
            f"{said}which are searched as text; set objective.round_steps to 0, or remove"
            " data.env and objective.tree = 'none'"
        )
