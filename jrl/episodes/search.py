"""Searches over the turns of episodes, or the steps of text: the strategy of trees.

    searched = play_search(device, world, prompts, seeds, search_plan("puct", 4), by_likelihood)

Every turn sampled after a node is played on a copy of the node's environment state, concurrently
for all trees: while one turn is answered, others are sampled. A path is computed once, because each
turn begins with a copy of its node's row. The scheduler is that of independent episodes, so
contexts, players and limits are the same, and a search is the same in training and at evaluation.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jrl.episodes.calls import Answer
from jrl.episodes.episode import ABSENT, EnvCall, Episode
from jrl.episodes.follow import Continue
from jrl.episodes.play import Device, Scheduler, uncopied
from jrl.episodes.rounds import Expansion, Rounds, SearchCost, search_rounds
from jrl.episodes.transcript import Segment, Transcript, trained_once, turns_of
from jrl.episodes.tree import Node, SearchPlan, Select, Step, Tree, step_score
from jrl.episodes.world import World
from jrl.sampling.row_costs import WaitCosts, WaitingPlace
from jrl.types import Prompt, StopReason


class Path(NamedTuple):
    """A path of a search tree up to its newest turn, as the policy saw it.

    Attributes:
      opening: [p] int32, its first tokens.
      tokens: [t] int32, all tokens after the opening in the last turn's context, sampled or not.
      ends: indices at which its turns end, the last one t.
      begin: index at which the last turn begins.
      logprob: nats, the mean over all sampled tokens of the path, in all contexts.
      ended: whether the path is finished.
    """

    opening: np.ndarray
    tokens: np.ndarray
    ends: tuple[int, ...]
    begin: int
    logprob: float
    ended: bool


Scorer = Callable[[Sequence[Path]], Sequence[float | None]]
"""The paths of a round -> points of each, or None for no score yet."""
EpisodeScorer = Callable[[Sequence[Episode]], Sequence[float | None]]
"""The same of episodes; ``Episode.problem.group`` is the tree."""


def by_likelihood(paths: Sequence[Path]) -> list[float | None]:
    """Points of paths without a verifier: the geometric mean of their tokens' probabilities."""
    return [float(np.exp(path.logprob)) for path in paths]


def by_path(score: Scorer) -> EpisodeScorer:
    """A scorer that reads the ids of a path alone."""
    return lambda episodes: score([path_of(episode) for episode in episodes])


def path_of(episode: Episode) -> Path:
    """The path to an episode's last turn, without the answer to it."""
    segments, turns = episode.segments, turns_of(episode.segments)
    last = turns[-1]
    # Only the tokens that the policy saw: a value network reads the context of the samples.
    context = segments[last].context
    indices = [i for i in range(last + 1) if segments[i].context == context]
    sizes = np.cumsum([len(segments[i].tokens) for i in indices]).tolist()
    ends = tuple(size for i, size in zip(indices, sizes, strict=True) if i in set(turns))
    sampled = [s for s in segments if s.drawn]
    total = sum(_logprob(s) for s in sampled)
    return Path(
        episode.opening,
        np.concatenate([segments[i].tokens for i in indices]),
        ends,
        ends[-1] - len(segments[last].tokens),
        total / max(sum(len(s.tokens) for s in sampled), 1),
        episode.ending is not None,
    )


def _logprob(segment: Segment) -> float:
    assert segment.logprobs is not None
    return float(segment.logprobs.sum(dtype=np.float64))


def step_of(episode: Episode, begin: int, points: float | None) -> Step:
    """The last step of an episode.

    Args:
      episode: has ended or paused.
      begin: number of its segments that are the node's.
      points: score of the path; not read if it failed.
    """
    # A node holds what follows its parent, so that a path is the nodes' contents and answers.
    segments = episode.segments[begin:]
    last = turns_of(segments)[-1] + 1
    sampled = [s for s in segments if s.drawn]
    context, restart = segments[last - 1].context, None
    answer = [s.tokens for s in segments[last:]] if episode.at.context == context else []
    # After a summary the policy no longer sees the path, so rows of siblings must not contain it.
    if episode.ending is None and episode.at.context != context:
        restart = episode.past()
    empty, measured = np.zeros(0, np.int32), episode.turn.measured
    failed = episode.ending is not None and bool(episode.ending.reason)
    return Step(
        np.concatenate([s.tokens for s in segments[:last]]),
        tokens=sum(len(s.tokens) for s in sampled),
        logprob=sum(map(_logprob, sampled)),
        entropy=float(measured.mean()) if len(measured) else 0.0,
        done=episode.ending is not None,
        points=None if failed else points,
        answer=np.concatenate([empty, *answer]).astype(np.int32),
        restart=restart,
        episode=episode,
    )


def episode_at(tree: Tree, node: int) -> Episode:
    """The episode up to a node other than the root."""
    return tree.step(node).episode


def best_node(tree: Tree) -> int:
    """The best path that has ended without failing, or the best open one if there is none.

    Failed paths have no points; 0 for a tree without steps.
    """
    ended = [i for i in tree.leaves() if tree.step(i).points is not None]
    among = ended or list(range(1, len(tree.nodes))) or [0]
    return max(among, key=lambda i: step_score(tree, i))


def won(tree: Tree) -> bool:
    """Whether any path has ended well."""
    return any(episode_at(tree, i).success for i in tree.leaves())


# ---------------------------------------------------------------- the search


class Searched(NamedTuple):
    """Result of a search: trees, costs and counts.

    Attributes:
      roots: the episodes before their first turn; those that failed to open have a reason.
      trees: one per prompt; ``Step.episode`` of a node is the episode from the opening to it.
      costs: of each tree.
      counts: counters by name, as in ``groups.Played``.
      verified: whether success is certain, as for checked proofs.
    """

    roots: list[Episode]
    trees: list[Tree]
    costs: list[SearchCost]
    counts: dict[str, float]
    verified: bool = False

    def successes(self) -> list[bool]:
        """Success of each tree: of its best path, or of any path if the environment verifies."""
        # Ranked by score only: success is not known when a path has to be chosen.
        best = [(tree, best_node(tree)) for tree in self.trees]
        if self.verified:
            return [won(tree) for tree in self.trees]
        return [node > 0 and episode_at(tree, node).success for tree, node in best]


def play_search(
    device: Device,
    world: World,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    plan: SearchPlan,
    score: EpisodeScorer,
    rounds: Sequence[int] | None = None,
) -> Searched:
    """Searches a tree of each prompt, all side by side.

    Samples after a node depend on the weights, the prompt's seed, the path and the number of the
    new node; not on slots, nor on when environments answer.

    Args:
      device: samples. Rows are never dropped because of timing: a path that is prefilled again has
        other rounding, which could change a choice between nodes.
      world: answers; its states can be copied.
      prompts: N.
      seeds: [N], below 2**64.
      plan: how to search.
      score: scores the paths of a round together.
      rounds: [N], at most; None for the plan's.
    """
    strategy = SearchStrategy(prompts, seeds, plan, score, rounds, stops=world.verified)
    # Dropping rows depends on timing, and with it the rounding of their values.
    scheduler = Scheduler(device._replace(choose=suspended_or_held), world, strategy)
    scheduler.run()
    names = ("slot_tokens", "slot_steps", "read_tokens", "reread_tokens", "turns")
    faults = ("env_errors", "env_timeouts", "env_fork_errors", "env_close_errors", "idle_seconds")
    summaries = ("summaries",) if world.rules.limits.contexts > 1 else ()
    counts = dict.fromkeys((*names, *faults, *summaries), 0.0) | scheduler.counts
    return Searched(strategy.roots, strategy.trees, strategy.costs, counts, world.verified)


Searcher = Callable[[Sequence[Prompt], Sequence[int], SearchPlan, EpisodeScorer], Searched]
"""(prompts, seeds, plan, scorer of paths) -> the search, with weights that are already loaded."""


def suspended_or_held(wait: WaitCosts) -> WaitingPlace:
    """The cheaper of the two places in which a row keeps its cache."""
    return WaitingPlace.HELD if wait.held <= wait.parked else WaitingPlace.PARKED


class SearchStrategy:
    """The strategy of a search: in each round, episodes continue the selected nodes.

    A round ends when every turn of it has been answered, so that the next selection does not depend
    on timing; all its paths are scored together.

    Args:
      prompts: N.
      seeds: [N].
      plan: how to search.
      score: judges paths.
      rounds: [N], at most; None for the plan's.
      stops: whether a search ends with a path that has ended well.

    Attributes:
      roots: one a prompt.
      trees: one a prompt.
      costs: of each.
      left: episodes of the round that have neither ended nor paused.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        plan: SearchPlan,
        score: EpisodeScorer,
        rounds: Sequence[int] | None = None,
        *,
        stops: bool = False,
    ) -> None:
        self.roots = [Episode(i, 0, *p) for i, p in enumerate(zip(prompts, seeds, strict=True))]
        self.trees = [Tree() for _ in prompts]
        self.costs = [SearchCost(0, 0, 0)] * len(self.roots)
        self.left = 0
        self._plan = plan._replace(select=_unless_won(plan.select)) if stops else plan
        self._score, self._limits = score, rounds
        self._begun = self._over = False
        self._open: list[int] = []  # trees whose environments have opened
        self._search: Rounds | None = None
        self._round: list[tuple[Episode, list[Episode]]] = []  # nodes, and what continues them
        self._parents: dict[Episode, Episode] = {}
        self._numbers = [1] * len(self.roots)  # of the next node of each tree

    def advance(self, scheduler: Scheduler) -> bool:
        """Begins the next round once the last one has been answered."""
        # All roots open before the first round, so that no tree runs ahead by the clock.
        if not self._begun:
            self._begun, self.left = True, len(self.roots)
            for root in self.roots:
                scheduler.open(root)
        if self.left or self._over:
            return not self._over
        try:
            chosen = self._next()
        except StopIteration as end:
            self._over = True
            for i, cost in zip(self._open, end.value, strict=True):
                self.costs[i] = cost
                # Only those that nobody has continued have an environment left.
                nodes = range(1, len(self.trees[i].nodes))
                for episode in (self.roots[i], *(episode_at(self.trees[i], n) for n in nodes)):
                    scheduler.close(episode)
            return False
        self._expand(scheduler, chosen)
        return True

    def _next(self) -> list[Expansion]:
        if self._search is not None:
            return self._search.send(self._steps())
        # Trees that did not open are left out: their groups fail as a whole.
        self._open = [i for i, root in enumerate(self.roots) if root.ending is None]
        limits = None if self._limits is None else [self._limits[i] for i in self._open]
        self._search = search_rounds([self.trees[i] for i in self._open], self._plan, limits)
        return next(self._search)

    def _steps(self) -> list[list[Step]]:
        """The steps of the round that has been played, judged together."""
        # One call for all trees: a reward model or a judge reads the paths as one batch.
        points = iter(self._score([child for _, children in self._round for child in children]))
        return [
            [step_of(child, len(node.segments), next(points)) for child in children]
            for node, children in self._round
        ]

    def _expand(self, scheduler: Scheduler, chosen: Sequence[Expansion]) -> None:
        for node, _ in self._round:
            # A node is expanded once, but for a root, so its environment can end.
            if node.at.turn:
                scheduler.close(node)
        self._round, self._parents = [], {}
        for place, number, count in chosen:
            i = self._open[place]
            node = episode_at(self.trees[i], number) if number else self.roots[i]
            # The number that the node will have in its tree keys its tokens, as a member's does.
            children = [node.continued(self._numbers[i] + k) for k in range(count)]
            self._numbers[i] += count
            self._round.append((node, children))
            self._parents |= dict.fromkeys(children, node)
            for child in children:
                scheduler.begin(child, node)
        self.left = len(self._parents)

    # ------------------------------------------------------------ what happens to episodes

    def opened(self, scheduler: Scheduler, episode: Episode) -> None:
        """Notes a root; one that failed has been counted as ended."""
        if episode.ending is None:
            episode.room = scheduler.rows.max_new_tokens
            self.left -= 1

    def turn_ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """Copies the node's environment for the turn, unless the episode has it already."""
        # Copied when the turn is over, not when it begins: fewer copies live at a time.
        if episode.state is ABSENT:
            scheduler.copy(self._parents[episode].state, waits=episode, copy_for=episode)
        else:
            scheduler.ask(episode)

    def copied(self, scheduler: Scheduler, call: EnvCall, answer: Answer) -> None:
        """Asks the copy about the turn."""
        episode = call.copy_for
        assert episode is not None
        if not answer.error:
            episode.state = answer.value
        if episode.ending is not None:  # by a limit of time, meanwhile
            scheduler.close(episode)
        elif answer.error:
            scheduler.counts["env_fork_errors"] += 1
            scheduler.end(episode, StopReason.FAILED, uncopied(answer))
        else:
            scheduler.ask(episode)

    def continues(self, scheduler: Scheduler, episode: Episode, following: Continue) -> None:
        """Pauses it as a node; where a step is a whole episode it continues instead."""
        # Best of N is a search of one level: its steps end with their episodes.
        if self._plan.whole:
            scheduler.resume(episode, following)
            return
        if following.new_context:  # which no row holds yet
            scheduler.slots.remove(episode)
        else:
            scheduler.slots.pause(episode)
        self.left -= 1

    def ended(self, scheduler: Scheduler, episode: Episode) -> None:
        """Notes a leaf, or a root that failed to open."""
        self.left -= 1


def _unless_won(select: Select) -> Select:
    """The selection, until a path has ended well."""
    return lambda tree: [] if won(tree) else select(tree)


# ---------------------------------------------------------------- rows to train on


def leaf_rows(
    tree: Tree, leaves: Sequence[int], live: Sequence[bool], value: Callable[[Node], float]
) -> tuple[list[Transcript], int]:
    """The rows of a group, as ``trained_once`` makes them, and the tokens that they share.

    Args:
      tree: grown.
      leaves: the members.
      live: whether each member counts.
      value: of a node, points, as the backup of all leaves left it.
    """
    rows, nodes = [], []
    for member, leaf in enumerate(leaves):
        path = tree.path(leaf)
        # A node's episode has the segments up to its end, so their numbers say whose each is.
        ends = [len(episode_at(tree, node).segments) for node in path]
        row = episode_at(tree, leaf).transcript()._replace(member=member, episode=member)
        nodes.append([path[bisect.bisect_right(ends, i)] for i in range(len(row.segments))])
        pairs = zip(row.segments, nodes[-1], strict=True)
        segments = (s._replace(node=n, value=value(tree.nodes[n])) for s, n in pairs)
        rows.append(row._replace(segments=tuple(segments)))
    return trained_once(rows, nodes, live)
