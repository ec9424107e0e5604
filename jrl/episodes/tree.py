"""Search trees over steps of text: selection, expansion and backup as values, on the host.

    plan = search_plan("puct", 4, rounds=64)
    nodes = plan.select(tree)

``rounds`` grows trees by them; its caller samples and scores the steps. A node is a step; the root
is the prompt. Methods read the results of a search: values of nodes (``deepsearch``,
``alphamath``), siblings (``mcts_dpo``, ``step_q``, ``tp_llama``).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from jrl.errors import UserError, unknown_choice


class Step(NamedTuple):
    """A sampled step.

    Attributes:
      content: tokens, text, or an action.
      tokens: number of sampled tokens.
      logprob: nats, the sum over its tokens.
      entropy: nats a token, the mean.
      done: whether the path ends with it.
      points: score of the path, final or estimated; None if unscored.
      answer: the environment's answer to it, of the kind of ``content``.
      restart: if a new context begins after it, the past that the next step continues in place of
        the path, of the kind of ``content``; None to continue the path.
      episode: the ``Episode`` up to here; None without an environment.
    """

    content: Any
    tokens: int = 1
    logprob: float = 0.0
    entropy: float = 0.0
    done: bool = False
    points: float | None = None
    answer: Any = ()
    restart: Any = None
    episode: Any = None


@dataclasses.dataclass
class Node:
    """A node with the statistics of the search.

    Attributes:
      step: that led here; None at the root.
      parent: number of the node before; -1 at the root.
      depth: steps from the root.
      children: their numbers, in the order drawn.
      visits: backups that went through.
      total: their sum, points; by ``constrained``, the value itself.
      expanded: whether steps were drawn from here.
    """

    step: Step | None = None
    parent: int = -1
    depth: int = 0
    children: list[int] = dataclasses.field(default_factory=list)
    visits: int = 0
    total: float = 0.0
    expanded: bool = False

    @property
    def value(self) -> float:
        """Points: the mean of the backups, 0 before the first."""
        return self.total / self.visits if self.visits else 0.0

    @property
    def done(self) -> bool:
        """Whether the path ends here."""
        return self.step is not None and self.step.done


class Tree:
    """The nodes of one search; number 0 is the root."""

    def __init__(self) -> None:
        self.nodes = [Node()]

    def add(self, parent: int, step: Step) -> int:
        """Appends a child; its number."""
        # By the first child, not by the selection: an expansion that failed leaves its node open.
        self.nodes[parent].expanded = True
        self.nodes[parent].children.append(len(self.nodes))
        self.nodes.append(Node(step, parent, self.nodes[parent].depth + 1))
        return len(self.nodes) - 1

    def step(self, node: int) -> Step:
        """The step that led to a node other than the root."""
        step = self.nodes[node].step
        assert step is not None
        return step

    def path(self, node: int) -> list[int]:
        """The nodes from the first step to this one; without the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.nodes[node].parent
        return nodes[::-1]

    def open(self) -> list[int]:
        """Nodes that can be expanded, and have not been."""
        return [i for i, n in enumerate(self.nodes) if not n.expanded and not n.done]

    def leaves(self) -> list[int]:
        """Nodes that end a path."""
        return [i for i, n in enumerate(self.nodes) if n.done]


Score = Callable[[Tree, int], float]
"""(tree, node) -> priority of its selection."""
Select = Callable[[Tree], list[int]]
"""(tree) -> nodes to expand; none to end the search."""
Backup = Callable[[Tree, int, float], None]
"""(tree, node, points): adds the score of a path that ends at the node to the nodes before it."""


# ---------------------------------------------------------------- selection


def uct(c: float = 2.0) -> Score:
    """The mean value plus c sqrt(ln N(parent) / N); unvisited nodes first.

    "Finite-time Analysis of the Multiarmed Bandit Problem" (Auer, Cesa-Bianchi and Fischer, 2002)
    at the nodes of a tree, with the constant of "MedS^3: Towards Medical Small Language Models with
    Self-Evolved Slow Thinking" (arXiv:2501.12051).
    """

    def score(tree: Tree, i: int) -> float:
        node, above = tree.nodes[i], tree.nodes[tree.nodes[i].parent]
        # Every sibling once before any twice: a mean of nothing compares with nothing.
        if not node.visits:
            return math.inf
        return node.value + c * math.sqrt(math.log(max(above.visits, 1)) / node.visits)

    return score


def puct(c: float = 1.0) -> Score:
    """The mean value plus c p sqrt(N(parent)) / (1 + N), p the step's probability by token.

    As in "AlphaMath Almost Zero: process Supervision without process" (arXiv:2405.03553); p is
    exp(logprob / tokens), so that a step is not unlikely for being long.
    """

    def score(tree: Tree, i: int) -> float:
        node, above = tree.nodes[i], tree.nodes[tree.nodes[i].parent]
        assert node.step is not None
        # By token: else long steps would hardly ever be chosen.
        prior = math.exp(node.step.logprob / max(node.step.tokens, 1))
        return node.value + c * prior * math.sqrt(above.visits) / (1 + node.visits)

    return score


def descend(score: Score) -> Select:
    """Descends from the root to the best-scored child until a node can be expanded."""

    def select(tree: Tree) -> list[int]:
        # Subtrees in which all has ended are left out, or a descent would stop at a leaf.
        alive = _alive(tree)
        node = 0
        while tree.nodes[node].expanded:
            children = [i for i in tree.nodes[node].children if i in alive]
            if not children:
                return []
            node = max(children, key=lambda i: score(tree, i))
        return [] if tree.nodes[node].done else [node]

    return select


def frontier(max_depth: int = 64) -> Select:
    """The one node of all that can be expanded that has the greatest F.

        F = 0.4 tanh(value of the parent) + 0.4 H + 0.2 sqrt(d / max_depth)

    As in "DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via
    Monte Carlo Tree Search" (arXiv:2509.25454). The weights are ours.
    """

    def score(tree: Tree, i: int) -> float:
        node = tree.nodes[i]
        # The root's parent is number -1, which would be the newest node.
        above = tree.nodes[node.parent].value if i else 0.0
        unsure = node.step.entropy if node.step else 0.0
        deep = math.sqrt(node.depth / max_depth)
        return 0.4 * math.tanh(above) + 0.4 * unsure + 0.2 * deep

    def select(tree: Tree) -> list[int]:
        candidates = [i for i in tree.open() if tree.nodes[i].depth < max_depth]
        return [max(candidates, key=lambda i: score(tree, i))] if candidates else []

    return select


def best_first(count: int = 1) -> Select:
    """The open nodes of the greatest mean log-probability of a token on the way to them.

    The priority of "Scaling up Multi-Turn Off-Policy RL and Multi-Agent Tree Search for LLM
    Step-Provers" (arXiv:2509.06493).
    """
    return lambda tree: sorted(tree.open(), key=lambda i: -likelihood(tree, i))[:count]


def likelihood(tree: Tree, i: int) -> float:
    """Nats: the mean log-probability of a token on the way to a node."""
    steps = [tree.nodes[j].step for j in tree.path(i)]
    tokens = sum(step.tokens for step in steps if step)
    return sum(step.logprob for step in steps if step) / max(tokens, 1)


def promise(tree: Tree, i: int) -> float:
    """Beam ranking: the backed-up value, or the path's likelihood before the first backup.

    An open node has been backed up at most once, by the points of its own step.
    """
    node = tree.nodes[i]
    return node.value if node.visits else math.exp(likelihood(tree, i))


def step_score(tree: Tree, i: int) -> float:
    """A step's points, 0 if unscored; ranks the paths that a search has found."""
    step = tree.nodes[i].step
    return 0.0 if step is None or step.points is None else step.points


def beam(width: int) -> Select:
    """The ``width`` best open nodes of the deepest level; the others are never looked at again."""

    def select(tree: Tree) -> list[int]:
        # What was not kept in its own level stays open, and is never looked at again.
        last = max((n.depth for n in tree.nodes if n.expanded), default=-1)
        level = [i for i in tree.open() if tree.nodes[i].depth > last]
        # sorted() is stable: equal scores keep the order of drawing, so a resumed search takes the
        # same nodes.
        return sorted(level, key=lambda i: -promise(tree, i))[:width]

    return select


def dvts() -> Select:
    """Diverse verifier tree search: a beam of one in every subtree below the root, side by side.

    As compared in "Can 1B LLM Surpass 405B LLM? Rethinking Compute-Optimal Test-Time Scaling"
    (arXiv:2502.06703). The first expansion of the root sets the number of subtrees.
    """

    def select(tree: Tree) -> list[int]:
        if not tree.nodes[0].expanded:
            return [0]
        best: dict[int, int] = {}
        for i in tree.open():
            top = tree.path(i)[0]
            rival = best.get(top)
            # Depth first: an older sibling with a better score belongs to a level that its subtree
            # has left.
            key = lambda j: (tree.nodes[j].depth, promise(tree, j))  # noqa: E731
            if rival is None or key(i) > key(rival):
                best[top] = i
        # A subtree is done with its first leaf; its budget goes to no other one.
        ended = {tree.path(i)[0] for i in tree.leaves()}
        return [i for top, i in sorted(best.items()) if top not in ended]

    return select


def _alive(tree: Tree) -> set[int]:
    """Nodes below which something can still be expanded."""
    alive: set[int] = set()
    for i in tree.open():
        alive.update(tree.path(i))
    return alive


# ---------------------------------------------------------------- backup


def mean_backup(tree: Tree, node: int, points: float) -> None:
    """Adds the points to every node of the path, the root included: values are means."""
    # The root, too: ``uct`` and ``puct`` read its visits as those above its children.
    for i in (*tree.path(node), 0):
        tree.nodes[i].visits += 1
        tree.nodes[i].total += points


def constrained(least: float = 0.1) -> Backup:
    """DeepSearch's backup: nodes near the leaf get more, and one on a right path stays positive.

        q(s_i) += max(i / l, least) q(leaf)

    but where the signs differ a right leaf replaces the value, and a wrong one leaves it. ``total``
    is then q itself, as the authors' code has it, and ``Node.value`` its share of the visits.
    """

    def backup(tree: Tree, node: int, points: float) -> None:
        length = tree.nodes[node].depth + 1
        for i in (*tree.path(node), 0):
            ancestor = tree.nodes[i]
            ancestor.visits += 1
            gain = max((ancestor.depth + 1) / length, least) * points
            # 0, which no backup has reached, is of either sign.
            if ancestor.total * points >= 0:
                ancestor.total += gain
            elif points > 0:
                ancestor.total = gain

    return backup


# ---------------------------------------------------------------- by name


class NamedSearch(NamedTuple):
    """A way to search.

    Attributes:
      select: (width, exploration) -> nodes to expand.
      backup: of points.
      value: of a node as the backup left it, points; the mean of the backups to it.
      explores: whether ``select`` reads the second number.
      whole: whether a step is a whole completion or episode.
    """

    select: Callable[[int, float], Select]
    backup: Backup = mean_backup
    value: Callable[[Node], float] = operator.attrgetter("value")
    explores: bool = False
    whole: bool = False


SEARCHES: dict[str, NamedSearch] = {
    "uct": NamedSearch(lambda n, c: descend(uct(c)), explores=True),
    "puct": NamedSearch(lambda n, c: descend(puct(c)), explores=True),
    "frontier": NamedSearch(lambda n, c: frontier(), constrained(), operator.attrgetter("total")),
    "best_first": NamedSearch(lambda n, c: best_first()),
    "beam": NamedSearch(lambda n, c: beam(n)),
    "greedy": NamedSearch(lambda n, c: beam(1)),
    "dvts": NamedSearch(lambda n, c: dvts()),
    "best_of_n": NamedSearch(lambda n, c: beam(1), whole=True),
}
"""By name, in training (``Search.by``) and at evaluation (``jrl eval --search``). "frontier" is
DeepSearch's; "greedy" samples ``width`` steps and continues from the best of them; "beam" keeps the
``width`` best of each level and samples as many from each; "dvts" does so in ``width`` subtrees;
"best_first" expands the likeliest open node of any depth; "best_of_n" samples ``width`` whole
completions."""

RENAMED = {"mcts": "puct"}
"""Earlier names of searches -> present names."""


class SearchPlan(NamedTuple):
    """Settings of a search.

    Attributes:
      select: nodes to expand in a round; they are expanded together.
      backup: called with every scored step.
      value: (node) -> its backed-up value, points.
      width: steps sampled from a node.
      rounds: at most.
      whole: whether a step is a whole completion or episode, so that a search has one level.
      tokens: no round begins after this many sampled tokens of a tree; 0 for no limit.
      leaves: number of leaves at which the search of a tree ends; after the rounds, open nodes are
        continued to an end until there are as many. 0 to end with the rounds.
    """

    select: Select
    backup: Backup
    value: Callable[[Node], float]
    width: int
    rounds: int
    whole: bool = False
    tokens: int = 0
    leaves: int = 0


def search_plan(
    name: str, width: int, *, rounds: int = 64, exploration: float = 1.0, leaves: int = 0
) -> SearchPlan:
    """A search by name.

    Args:
      name: of ``SEARCHES``.
      width: steps sampled from a node, and how wide beams are.
      rounds: at most; whole completions are sampled in one.
      exploration: the exploration constant of "uct" and "puct".
      leaves: see ``SearchPlan``.

    Raises:
      UserError: there is no such search, or it has no width.
    """
    if name in RENAMED:
        raise UserError(f"search = {name!r} is called {RENAMED[name]!r} now; use that name")
    if name not in SEARCHES:
        raise unknown_choice("search", name, SEARCHES)
    if width < 1 or rounds < 0:
        raise UserError(f"search: width = {width}, rounds = {rounds}; the width is at least 1")
    search = SEARCHES[name]
    select = search.select(width, exploration)
    # Whole completions have no next step: after one round there is nothing to expand.
    levels = min(rounds, 1) if search.whole else rounds
    return SearchPlan(
        select,
        search.backup,
        search.value,
        width,
        levels,
        whole=search.whole,
        leaves=leaves,
    )


# ---------------------------------------------------------------- results of a search


def _shared(tree: Tree, node: int) -> list[Any]:
    """The past of a step after a node: contents and answers on the path, of its context."""
    shared: list[Any] = []
    for i in tree.path(node):
        step = tree.step(i)
        shared += [step.content, step.answer] if len(step.answer) else [step.content]
        # Steps after a new context do not see the tokens before it.
        if step.restart is not None:
            shared = [step.restart]
    return shared


class Siblings(NamedTuple):
    """The children of one node that were visited.

    Attributes:
      path: contents of the steps that they share, each followed by its answer if it has one.
      steps: contents of the children.
      values: Q of each, points.
      visits: of each.
    """

    path: list[Any]
    steps: list[Any]
    values: list[float]
    visits: list[int]


def siblings(tree: Tree) -> list[Siblings]:
    """Groups for ``mcts_dpo``, ``step_q`` and ``tp_llama``: children whose values differ."""
    groups = []
    for i, node in enumerate(tree.nodes):
        visited = [j for j in node.children if tree.nodes[j].visits]
        values = [tree.nodes[j].value for j in visited]
        # Equal values prefer no step: such a group would train on its order alone.
        if len(set(values)) > 1:
            path = _shared(tree, i)
            steps = [tree.step(j).content for j in visited]
            groups.append(Siblings(path, steps, values, [tree.nodes[j].visits for j in visited]))
    return groups
