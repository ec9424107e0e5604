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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.episodes.calls import Answer, Calls
from jrl.episodes.chat import Format
from jrl.episodes.episode import Episode, call_init, call_step
from jrl.episodes.host import EnvError, HostEnv
from jrl.episodes.tree import Select, Step, Tree, grow_all, worth
from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.rows import Rows
from jrl.sampling.step_rows import DrawnStep, StepAsk, StepRows
from jrl.serving.search import Path, Scorer, SearchPlan
from jrl.types import Prompt, StopReason

GRACE_SECONDS = 2.0
"""How long after its deadline a call's answer may arrive before its event loop is looked at."""


@dataclasses.dataclass
class Turn:
    """A turn of a search tree, its ids when iterated over.

    Attributes:
      number: of the node, in the order in which a tree's turns were asked for, from 1 on.
      tokens: [t] int32, what the policy drew.
      logprob: nats, their sum.
      episode: all from the opening to here; its ``stop`` says why it ended, None if it has not.
      answer: [a] int32, what the environment said to it.
      state: the environment's behind it; None where the episode has ended.
      success: whether it ended well.
    """

    number: int
    tokens: np.ndarray
    logprob: float
    episode: Episode
    answer: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    state: Any = None
    success: bool = False

    def __iter__(self) -> Any:
        """The ids that were drawn."""
        return iter(self.tokens.tolist())

    @property
    def reason(self) -> str:
        """What failed, in words; "" where nothing did."""
        return self.episode.reason


TurnScorer = Callable[[Sequence[tuple[int, Sequence[Turn]]]], Sequence[float | None]]
"""((tree, turns of a path) of a round) -> points of each, or None where nothing can be said yet."""


class FoundEpisode(NamedTuple):
    """What a search found for a problem.

    Attributes:
      opening: [p] int32, what the policy sees first; empty where the environment did not open.
      success: whether the best path that ended did so well, or any, where the environment verifies.
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
    """

    def __init__(
        self, rows: Rows, calls: Calls, env: HostEnv, chat: Format, tokenizer: Tokenizer
    ) -> None:
        self.rows, self.env, self.chat, self.tokenizer = rows, env, chat, tokenizer
        self._calls = calls

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
          UserError: the environment's states cannot be copied, or no environment opens.
        """
        if self.env.fork is None:
            raise UserError(
                "--search: turns are tried on copies of the environment's state, and this one has"
                " none (HostEnv.fork is None: a process, a connection, a coroutine); use another"
                " environment"
            )
        episodes = self.opened(prompts, seeds)
        there = [i for i, episode in enumerate(episodes) if episode.has_state]
        if not there:
            raise UserError(f"no environment opened: {episodes[0].reason}")
        openings = [episodes[i].opening for i in there]
        told = [
            dataclasses.replace(prompts[i], tokens=ids)
            for i, ids in zip(there, openings, strict=True)
        ]
        score = score_of(told)
        budget = {"rounds": plan.rounds, "tokens": plan.tokens}
        with self.forest([episodes[i] for i in there], _by_path(score)) as forest:
            expand = lambda asked: forest.expand(asked, [plan.width] * len(asked))  # noqa: E731
            select = _unless_won(plan.select) if self.env.extras.verified else plan.select
            costs = grow_all(forest.trees, select, expand, plan.backup, **budget)
        empty = np.zeros(0, np.int32)
        found = [FoundEpisode(empty, False, Tree(), 0, 0, 0, 1) for _ in prompts]
        for i, ids, tree, cost in zip(there, openings, forest.trees, costs, strict=True):
            errors = sum(bool(turn_of(tree, n).reason) for n in range(1, len(tree.nodes)))
            won = _won(tree) if self.env.extras.verified else _best_ends_well(tree)
            found[i] = FoundEpisode(ids, won, tree, *cost, errors)
        return found

    def opened(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Episode]:
        """The episodes of problems before their first turn; those that fail to open say why."""
        episodes = [
            Episode(i, 0, *problem) for i, problem in enumerate(zip(prompts, seeds, strict=True))
        ]
        longest = self.rows.prompt_tokens
        asked = [(call_init, (self.env, self.chat, e.prompt, e.seed, longest)) for e in episodes]
        for episode, answer in zip(episodes, self.answers(asked), strict=True):
            if answer.error:
                _fail(episode, answer)
            else:
                episode.open(*answer.value)
                episode.room = self.rows.max_new_tokens
        return episodes

    @contextlib.contextmanager
    def forest(self, episodes: Sequence[Episode], score: TurnScorer) -> Iterator[EpisodeForest]:
        """Trees of episodes that have opened; their environments end behind it."""
        steps = StepRows(
            self.rows,
            [episode.opening.tolist() for episode in episodes],
            [episode.seed for episode in episodes],
            ends=(),
            step_tokens=self.env.limits.turn_tokens or self.rows.max_new_tokens,
        )
        forest = EpisodeForest(self, episodes, steps, score)
        try:
            yield forest
        finally:
            forest.close()

    def answers(
        self, asked: Sequence[tuple[Any, tuple[Any, ...]]], seconds: float = 0.0
    ) -> list[Answer]:
        """The answers to calls (function, arguments) that are made together, in their order.

        Args:
          asked: the calls.
          seconds: that each may take; 0 for the environment's ``call_seconds``.
        """
        seconds, found = seconds or self.env.limits.call_seconds, dict[int, Answer]()
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


class EpisodeForest:
    """The trees of a search, and the environments behind their nodes.

    Attributes:
      trees: one an episode; contents are ``Turn``.
      counts: of the tokens that were drawn and read, and of what failed.
    """

    def __init__(
        self,
        search: EpisodeSearch,
        episodes: Sequence[Episode],
        steps: StepRows,
        score: TurnScorer,
    ) -> None:
        self.trees = [Tree() for _ in episodes]
        self._search, self._roots, self._steps = search, list(episodes), steps
        self._score = score
        self._following = [1] * len(episodes)
        self._states = [episode.state for episode in episodes]  # all that are to be closed
        self.counts = steps.counts
        names = ("env_errors", "env_timeouts", "env_fork_errors", "env_close_errors")
        self.counts |= dict.fromkeys(names, 0.0)

    def expand(
        self, asked: Sequence[tuple[int, list[Turn]]], counts: Sequence[int]
    ) -> list[list[Step]]:
        """Draws turns behind nodes, and plays each on a copy of its node's environment.

        Args:
          asked: (tree, turns on the way to the node).
          counts: how many turns to draw behind each.
        """
        asks = []
        for (i, path), count in zip(asked, counts, strict=True):
            before = [x for turn in path for x in (turn.tokens, turn.answer)]
            answer = before.pop() if before else np.zeros(0, np.int32)
            ids = np.concatenate([np.zeros(0, np.int32), *before]).astype(np.int32)
            node = path[-1].number if path else 0
            asks.append(StepAsk(i, node, ids, self._following[i], count, answer))
            self._following[i] += count
        drawn = self._steps.draw(asks)
        played = self._played(asked, asks, drawn)
        paths = [
            (i, [*path, turn])
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
        asked: Sequence[tuple[int, list[Turn]]],
        asks: Sequence[StepAsk],
        drawn: Sequence[Sequence[DrawnStep]],
    ) -> list[list[Turn]]:
        env, search, stops = self._search.env, self._search, self._search.tokenizer.stop_ids
        jobs = [(p, k, step) for p, steps in enumerate(drawn) for k, step in enumerate(steps)]
        pasts = [path for _, path in asked]
        before = [
            (path[-1].episode, path[-1].state) if path else (self._roots[i], self._roots[i].state)
            for i, path in asked
        ]
        copies = search.answers([(env.fork, (before[p][1],)) for p, _, _ in jobs])
        ready = [n for n, copy in enumerate(copies) if not copy.error]
        calls = []
        for n in ready:
            p, _, step = jobs[n]
            said = copies[n].value, len(pasts[p]), step.tokens, step.tokens[-1] not in stops
            calls.append((call_step, (env, search.chat, search.tokenizer, *said)))
        answers = dict(zip(ready, search.answers(calls), strict=True))
        # Of a copy and the state that ``step`` made of it the later one is closed.
        self._states += [a.value[0] if not a.error else copies[n].value for n, a in answers.items()]
        found: list[list[Turn]] = [[] for _ in asked]
        for n, (p, k, step) in enumerate(jobs):
            episode = before[p][0].continued(k)
            episode.grow(step.tokens, step.logprobs, step.version)
            episode.end_turn()
            total = float(step.logprobs.sum(dtype=np.float64))
            turn = Turn(asks[p].first + k, step.tokens, total, episode)
            if copies[n].error:
                self.counts["env_fork_errors"] += 1
                _fail(episode, copies[n])
            else:
                self._answered(turn, answers[n])
            found[p].append(turn)
        return found

    def _answered(self, turn: Turn, answer: Answer) -> None:
        """What came of a turn; it keeps its state where another turn may follow."""
        episode = turn.episode
        if answer.error:
            self.counts["env_timeouts" if answer.timeout else "env_errors"] += 1
            _fail(episode, answer)
            return
        state, feedback, ids, state_id = answer.value
        try:
            episode.pay(feedback)
        except EnvError as error:
            self.counts["env_errors"] += 1
            _fail(episode, Answer(0, error=str(error)))
            return
        turn.success = bool(feedback.done and feedback.success)
        if feedback.done:
            episode.stop = StopReason.LENGTH if feedback.cut else StopReason.DONE
        elif episode.turn + 1 >= self._search.env.limits.turns:
            episode.stop = StopReason.TURNS
        elif episode.length + len(ids) >= episode.room:
            episode.stop = StopReason.LENGTH
        else:
            episode.answer(ids, state_id)
            turn.state, turn.answer = state, np.array(ids, np.int32)

    def close(self) -> None:
        """Ends all environments; what cannot be closed harms nobody."""
        unique = list({id(state): state for state in self._states}.values())
        ended = self._search.answers([(self._search.env.close, (state,)) for state in unique])
        self.counts["env_close_errors"] += sum(bool(answer.error) for answer in ended)


def _fail(episode: Episode, answer: Answer) -> None:
    episode.reason = answer.error
    episode.stop = StopReason.TIMEOUT if answer.timeout else StopReason.FAILED


def _step_of(turn: Turn, step: DrawnStep, points: float | None) -> Step:
    known = None if turn.reason else points
    sizes = len(turn.tokens), turn.logprob
    return Step(turn, *sizes, step.entropy, turn.state is None, known, turn.answer)


def _by_path(score: Scorer) -> TurnScorer:
    """By the ids of a path alone."""
    return lambda paths: score([path_of(i, turns) for i, turns in paths])


def path_of(tree: int, path: Sequence[Turn]) -> Path:
    """The path to a turn, without what that was answered."""
    turn = path[-1]
    parts = [ids for each in path for ids in (each.tokens, each.answer)][:-1]
    sizes = np.cumsum([len(ids) for ids in parts])
    drawn = sum(len(each.tokens) for each in path)
    mean = sum(each.logprob for each in path) / max(drawn, 1)
    ends = tuple(sizes[::2].tolist())
    begin = ends[-1] - len(turn.tokens)
    return Path(tree, np.concatenate(parts), ends, begin, mean, turn.state is None)


def turn_of(tree: Tree, node: int) -> Turn:
    """The turn of a node that is not the root."""
    step = tree.nodes[node].step
    assert step is not None
    return step.content


def _won(tree: Tree) -> bool:
    """Whether any path has ended well."""
    return any(turn_of(tree, i).success for i in tree.leaves())


def _unless_won(select: Select) -> Select:
    """The selection, until a path has ended well."""
    return lambda tree: [] if _won(tree) else select(tree)


def _best_ends_well(tree: Tree) -> bool:
    """Whether the best path that ended did so well."""
    ended = [i for i in tree.leaves() if not turn_of(tree, i).reason]
    return bool(ended) and turn_of(tree, max(ended, key=lambda i: worth(tree, i))).success
