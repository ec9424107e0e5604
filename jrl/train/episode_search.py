"""Search in episodes with environments on the host: a step is a turn, and what it was answered.

    found = EpisodeSearch(rows, calls, env, chat, tokenizer).search(prompts, seeds, plan, score)

Every turn that is drawn behind a node is played on a copy of the environment as the node left it
(``HostEnv.fork``), side by side for all trees. A path is computed once: a turn begins with a copy
of its node's cache, behind the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.envs.calls import Answer, Calls
from jrl.envs.chat import Format
from jrl.envs.episode import call_init, call_step
from jrl.envs.host import HostEnv
from jrl.envs.tree import Step, Tree, grow_all, worth
from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.serving.episode_rows import EpisodeRows
from jrl.serving.search import Path, Scorer, SearchPlan
from jrl.serving.step_rows import DrawnStep, StepAsk, StepRows
from jrl.types import Prompt

GRACE_SECONDS = 2.0
"""How long after its deadline a call's answer may arrive before its event loop is looked at."""


@dataclasses.dataclass
class Turn:
    """A turn of a search tree, its ids when iterated over.

    Attributes:
      number: of the node, in the order in which a tree's turns were asked for, from 1 on.
      tokens: [t] int32, what the policy drew.
      logprob: nats, their sum.
      answer: [a] int32, what the environment said to it.
      state: the environment's behind it; None where the episode has ended.
      success: whether it ended well.
      reason: what failed, in words.
    """

    number: int
    tokens: np.ndarray
    logprob: float
    answer: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    state: Any = None
    success: bool = False
    reason: str = ""

    def __iter__(self) -> Any:
        """The ids that were drawn."""
        return iter(self.tokens.tolist())


class FoundEpisode(NamedTuple):
    """What a search found for a problem.

    Attributes:
      opening: [p] int32, what the policy sees first; empty where the environment did not open.
      success: whether the best path that ended did so well.
      tree: all that was played; contents are ``Turn``.
      expansions: nodes that turns were drawn from.
      turns: that were played.
      drawn_tokens: of them.
      env_errors: turns that the environment failed to answer.
    """

    opening: np.ndarray
    success: bool
    tree: Tree
    expansions: int
    turns: int
    drawn_tokens: int
    env_errors: int


class EpisodeSearch:
    """Searches episodes side by side.

    Args:
      rows: with weights, which stop at the ends of turns; nobody else's meanwhile.
      calls: nobody else's meanwhile.
      env: whose states can be copied.
      chat: how its messages become ids.
      tokenizer: the policy's.

    Raises:
      UserError: the environment's states cannot be copied.
    """

    def __init__(
        self, rows: EpisodeRows, calls: Calls, env: HostEnv, chat: Format, tokenizer: Tokenizer
    ) -> None:
        if env.fork is None:
            raise UserError(
                "--search: turns are tried on copies of the environment's state, and this one has"
                " none (HostEnv.fork is None: a process, a connection); use another environment"
            )
        self._rows, self._calls, self._env, self._chat = rows, calls, env, chat
        self._tokenizer = tokenizer

    def search(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        plan: SearchPlan,
        score_of: Callable[[Sequence[Prompt]], Scorer],
    ) -> list[FoundEpisode]:
        """Plays a tree of episodes of each problem.

        Args:
          prompts: the problems.
          seeds: below 2**64, of each problem's draws, and given to ``env.init``.
          plan: how to search, by turns.
          score_of: (problems with the openings as their tokens) -> what judges paths.

        Raises:
          UserError: no environment opens.
        """
        limits, longest = self._env.limits, self._rows.prompt_tokens
        pairs = zip(prompts, seeds, strict=True)
        asked = [(call_init, (self._env, self._chat, *pair, longest)) for pair in pairs]
        opened = self._all(asked)
        there = [i for i, answer in enumerate(opened) if not answer.error]
        if not there:
            raise UserError(f"no environment opened: {opened[0].error}")
        openings = [opened[i].value[1] for i in there]
        told = [
            dataclasses.replace(prompts[i], tokens=ids)
            for i, ids in zip(there, openings, strict=True)
        ]
        forest = _Forest(
            self,
            [opened[i].value[0] for i in there],
            StepRows(
                self._rows,
                [ids.tolist() for ids in openings],
                [seeds[i] for i in there],
                ends=(),
                step_tokens=limits.turn_tokens or self._rows.max_new_tokens,
            ),
            score_of(told),
            plan.width,
        )
        budget = {"rounds": plan.rounds, "tokens": plan.tokens}
        costs = grow_all(forest.trees, plan.select, forest.expand, plan.backup, **budget)
        forest.close()
        empty = np.zeros(0, np.int32)
        found = [FoundEpisode(empty, False, Tree(), 0, 0, 0, 1) for _ in prompts]
        for i, ids, tree, cost in zip(there, openings, forest.trees, costs, strict=True):
            errors = sum(bool(_turn(tree, n).reason) for n in range(1, len(tree.nodes)))
            won = _best_ends_well(tree)
            found[i] = FoundEpisode(ids, won, tree, *cost, errors)
        return found

    def _all(self, asked: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Answer]:
        """The answers to calls (function, arguments) that are made together, in their order."""
        seconds, found = self._env.limits.call_seconds, dict[int, Answer]()
        for number, (function, arguments) in enumerate(asked):
            self._calls.submit(number, function, *arguments, seconds=seconds)
        until = time.monotonic() + seconds + GRACE_SECONDS
        while len(found) < len(asked):
            with contextlib.suppress(queue.Empty):
                answer = self._calls.inbox.get(timeout=1.0)
                found[answer.number] = answer
                continue
            if time.monotonic() > until and self._calls.blocked(GRACE_SECONDS):
                said = "the event loop was blocked; an async function must not wait by itself"
                lost = [n for n in range(len(asked)) if n not in found]
                found |= {n: Answer(n, error=said, timeout=True) for n in lost}
        return [found[n] for n in range(len(asked))]


class _Forest:
    """The trees of a search, and the environments behind their nodes."""

    def __init__(
        self,
        search: EpisodeSearch,
        states: list[Any],
        steps: StepRows,
        score: Scorer,
        width: int,
    ) -> None:
        self.trees = [Tree() for _ in states]
        self._search, self._roots, self._steps = search, states, steps
        self._score, self._width = score, width
        self._following = [1] * len(states)
        self._states = list(states)  # all that are to be closed

    def expand(self, asked: list[tuple[int, list[Turn]]]) -> list[list[Step]]:
        """Draws turns behind nodes, and plays each on a copy of its node's environment."""
        asks = []
        for i, path in asked:
            before = [x for turn in path for x in (turn.tokens, turn.answer)]
            answer = before.pop() if before else np.zeros(0, np.int32)
            ids = np.concatenate([np.zeros(0, np.int32), *before]).astype(np.int32)
            node = path[-1].number if path else 0
            asks.append(StepAsk(i, node, ids, self._following[i], self._width, answer))
            self._following[i] += self._width
        drawn = self._steps.draw(asks)
        played = self._played(asked, asks, drawn)
        paths = [
            _path_of(i, path, turn)
            for (i, path), turns in zip(asked, played, strict=True)
            for turn in turns
        ]
        points = iter(self._score(paths))
        return [
            [_step_of(turn, step, next(points)) for turn, step in zip(turns, steps, strict=True)]
            for turns, steps in zip(played, drawn, strict=True)
        ]

    def _played(
        self,
        asked: list[tuple[int, list[Turn]]],
        asks: Sequence[StepAsk],
        drawn: Sequence[Sequence[DrawnStep]],
    ) -> list[list[Turn]]:
        env, search, stops = self._search._env, self._search, self._search._tokenizer.stop_ids
        jobs = [(p, k, step) for p, steps in enumerate(drawn) for k, step in enumerate(steps)]
        roots, pasts = self._roots, [path for _, path in asked]
        before = [pasts[p][-1].state if pasts[p] else roots[asks[p].tree] for p, _, _ in jobs]
        copies = search._all([(env.fork, (state,)) for state in before])
        ready = [n for n, copy in enumerate(copies) if not copy.error]
        calls = []
        for n in ready:
            p, _, step = jobs[n]
            said = copies[n].value, len(pasts[p]), step.tokens, step.tokens[-1] not in stops
            calls.append((call_step, (env, search._chat, search._tokenizer, *said)))
        answers = dict(zip(ready, search._all(calls), strict=True))
        # Of a copy and the state that ``step`` made of it the later one is closed.
        self._states += [a.value[0] if not a.error else copies[n].value for n, a in answers.items()]
        found: list[list[Turn]] = [[] for _ in asked]
        for n, (p, k, step) in enumerate(jobs):
            total = float(step.logprobs.sum(dtype=np.float64))
            turn = Turn(asks[p].first + k, step.tokens, total, reason=copies[n].error)
            if not turn.reason:
                self._answered(turn, answers[n], asks[p], len(pasts[p]))
            found[p].append(turn)
        return found

    def _answered(self, turn: Turn, answer: Answer, ask: StepAsk, number: int) -> None:
        """What came of a turn; it keeps its state where another turn may follow."""
        if answer.error:
            turn.reason = answer.error
            return
        state, feedback, ids, _ = answer.value
        behind = len(ask.path) + len(ask.answer) + len(turn.tokens) + len(ids)
        full = behind >= self._search._rows.max_new_tokens
        if feedback.done or full or number + 1 >= self._search._env.limits.turns:
            turn.success = bool(feedback.done and feedback.success)
        else:
            turn.state, turn.answer = state, np.array(ids, np.int32)

    def close(self) -> None:
        """Ends all environments; what cannot be closed harms nobody."""
        unique = list({id(state): state for state in self._states}.values())
        self._search._all([(self._search._env.close, (state,)) for state in unique])


def _step_of(turn: Turn, step: DrawnStep, points: float | None) -> Step:
    known = None if turn.reason else points
    sizes = len(turn.tokens), turn.logprob
    return Step(turn, *sizes, step.entropy, turn.state is None, known, turn.answer)


def _path_of(tree: int, past: Sequence[Turn], turn: Turn) -> Path:
    """The path to a turn, without what that was answered."""
    path = [*past, turn]
    parts = [ids for each in path for ids in (each.tokens, each.answer)][:-1]
    sizes = np.cumsum([len(ids) for ids in parts])
    drawn = sum(len(each.tokens) for each in path)
    mean = sum(each.logprob for each in path) / max(drawn, 1)
    ends = tuple(sizes[::2].tolist())
    begin = ends[-1] - len(turn.tokens)
    return Path(tree, np.concatenate(parts), ends, begin, mean, turn.state is None)


def _turn(tree: Tree, node: int) -> Turn:
    step = tree.nodes[node].step
    assert step is not None
    return step.content


def _best_ends_well(tree: Tree) -> bool:
    """Whether the best path that ended did so well."""
    ended = [i for i in tree.leaves() if not _turn(tree, i).reason]
    return bool(ended) and _turn(tree, max(ended, key=lambda i: worth(tree, i))).success
