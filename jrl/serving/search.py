"""Tree search with an engine: best of N, beams, diverse verifier tree search, MCTS.

    found = search(engine, prompts, named_search("beam", 4), score, end_tokens=(2,), seed=0, ...)
    print(found[0].tokens, found[0].cost)

A step is what is drawn up to a stop token or string, or a limit of tokens. All is done in token
ids: a path is the ids that were drawn, one step after the other, and never encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jrl.episodes.tree import (
    Backup,
    SearchCost,
    Select,
    Step,
    Tree,
    beam,
    best_first,
    descend,
    dvts,
    grow_all,
    mean_backup,
    puct,
    worth,
)
from jrl.errors import UserError, unknown_choice
from jrl.sampling.engine import Engine
from jrl.sampling.request import Request
from jrl.types import StopReason


class Path(NamedTuple):
    """A path of a search tree that has just been drawn to its last step.

    Attributes:
      prompt: number of the prompt.
      tokens: [t] int32, all that was drawn behind it.
      ends: lengths at which the steps end, the last one t.
      begin: where the last step begins.
      logprob: the mean log-probability of the tokens, nats.
      ended: whether nothing follows.
    """

    prompt: int
    tokens: np.ndarray
    ends: tuple[int, ...]
    begin: int
    logprob: float
    ended: bool


Scorer = Callable[[Sequence[Path]], Sequence[float | None]]
"""The paths of a round -> points of each, or None where nothing can be said yet."""


class SearchPlan(NamedTuple):
    """How to search.

    Attributes:
      select: nodes to expand in a round.
      width: steps drawn from a node.
      rounds: at most.
      whole: whether a step is a whole completion.
      backup: of points.
      tokens: drawn for a prompt, after which no more nodes are expanded; 0 for any number.
    """

    select: Select
    width: int
    rounds: int
    whole: bool = False
    backup: Backup = mean_backup
    tokens: int = 0


class Found(NamedTuple):
    """What a search found for a prompt.

    Attributes:
      tokens: [t] int32, the best path that ended, else the best one; its points are ``points``.
      points: of the scorer.
      tree: all that was drawn; a step's content are its ids.
      cost: nodes expanded, steps and tokens drawn.
      read_tokens: tokens of prompts and paths that were computed anew to draw from.
    """

    tokens: np.ndarray
    points: float
    tree: Tree
    cost: SearchCost
    read_tokens: int


SEARCHES = ("best_of_n", "greedy", "beam", "dvts", "best_first", "mcts")


def named_search(name: str, width: int, *, rounds: int = 64, c_puct: float = 1.0) -> SearchPlan:
    """A search by name, ``width`` wide.

    "best_of_n" draws ``width`` whole completions. "greedy" draws ``width`` steps and continues
    from the best of them. "beam" keeps the ``width`` best steps of each level and draws as many
    from each; "dvts" does so in ``width`` subtrees apart, each a beam of one. "best_first" expands
    in a round the one open node, of any depth, that is the likeliest by token. "mcts" expands one
    node a round, chosen by PUCT, and backs up means.

    Raises:
      UserError: there is no such search, or it has no width.
    """
    if name not in SEARCHES:
        raise unknown_choice("search", name, SEARCHES)
    if width < 1 or rounds < 1:
        raise UserError(f"search: width = {width}, rounds = {rounds}; both must be at least 1")
    if name == "best_of_n":
        return SearchPlan(beam(1), width, 1, whole=True)
    selects = {
        "greedy": beam(1),
        "beam": beam(width),
        "dvts": dvts(),
        "best_first": best_first(),
        "mcts": descend(puct(c_puct)),
    }
    select = selects[name]
    return SearchPlan(select, width, rounds)


def by_likelihood(paths: Sequence[Path]) -> list[float | None]:
    """Points of paths without a verifier: the geometric mean of their tokens' probabilities."""
    return [float(np.exp(path.logprob)) for path in paths]


def search(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plan: SearchPlan,
    score: Scorer = by_likelihood,
    *,
    end_tokens: Sequence[int],
    step_tokens: int,
    max_tokens: int,
    step_stops: Sequence[int] = (),
    stop_strings: tuple[str, ...] = (),
    seed: int,
    temperature: float = 1.0,
) -> list[Found]:
    """Searches for a completion of each prompt, all side by side.

    What is drawn depends on the weights, the seed, the prompt's number and the path alone, not on
    slots. A path is computed anew for each expansion; its cost is reported.

    Args:
      engine: idle. A path ends where it is too long to be one of its prompts.
      prompts: ids.
      plan: such as ``named_search`` returns.
      score: judges the paths of a round together.
      end_tokens: ids that end a completion.
      step_tokens: the most tokens of a step.
      max_tokens: the most of a completion.
      step_stops: ids that end a step.
      stop_strings: texts that end a step; the engine then needs a tokenizer.
      seed: of the draws.
      temperature: of the draws.

    Raises:
      UserError: a limit that no search can keep, or what the engine refuses.
    """
    if not 1 <= step_tokens <= max_tokens:
        raise UserError(f"step_tokens = {step_tokens}; give 1 to max_tokens = {max_tokens}")
    if plan.width > engine.limits.slots:
        raise UserError(
            f"search: width = {plan.width} and the engine has {engine.limits.slots} slots; draw"
            " fewer steps from a node, or give it more slots"
        )
    trees, ends, read = [Tree() for _ in prompts], set(end_tokens), [0] * len(prompts)
    stops = (*end_tokens, *(() if plan.whole else step_stops))

    def expand(asked: list[tuple[int, list[np.ndarray]]]) -> list[list[Step]]:
        numbers = {}
        for place, (i, path) in enumerate(asked):
            before = [token for ids in path for token in ids.tolist()]
            room = max_tokens - len(before)
            request = Request(
                tokens=(*prompts[i], *before),
                max_new_tokens=room if plan.whole else min(step_tokens, room),
                seed=_seed_of(seed, i, before),
                n=plan.width,
                temperature=temperature,
                stop_tokens=stops,
                stop_strings=() if plan.whole else stop_strings,
            )
            read[i] += len(request.tokens)
            numbers[engine.submit(request)] = place
        found: dict[tuple[int, int], tuple[Path, Step]] = {}
        for update in engine.run():
            if (done := update.completion) is None:
                continue
            place = numbers[update.request]
            i, path = asked[place]
            ids, logprob = np.asarray(done.tokens, np.int32), float(np.sum(done.logprobs))
            whole = np.concatenate([*path, ids])
            ended = bool(done.stop == StopReason.STOP_TOKEN and ids[-1] in ends)
            # Where nothing can follow, a path has ended.
            follows = len(prompts[i]) + len(whole) <= engine.limits.prompt_tokens
            ended = ended or len(whole) >= max_tokens or not (follows or plan.whole)
            mean = logprob / max(len(ids), 1)
            step_ends = tuple(np.cumsum([len(part) for part in (*path, ids)]).tolist())
            overall = _mean_logprob(trees[i], path, logprob, len(ids))
            drawn = Path(i, whole, step_ends, len(whole) - len(ids), overall, ended)
            found[place, update.member] = drawn, Step(ids, len(ids), logprob, -mean, ended, None)
        order = sorted(found)
        points = score([found[at][0] for at in order])
        steps: list[list[Step]] = [[] for _ in asked]
        for (place, member), worth_now in zip(order, points, strict=True):
            steps[place].append(found[place, member][1]._replace(points=worth_now))
        return steps

    costs = grow_all(
        trees, plan.select, expand, plan.backup, rounds=plan.rounds, tokens=plan.tokens
    )
    return [
        Found(*_best(tree), tree, cost, tokens)
        for tree, cost, tokens in zip(trees, costs, read, strict=True)
    ]


def _best(tree: Tree) -> tuple[np.ndarray, float]:
    """The ids and points of the best path that has ended, or of the best step where none has."""
    among = tree.leaves() or list(range(1, len(tree.nodes))) or [0]
    best = max(among, key=lambda i: worth(tree, i))
    steps = [tree.nodes[i].step for i in tree.path(best)]
    ids = [step.content for step in steps if step is not None]
    return np.concatenate([np.zeros(0, np.int32), *ids]), worth(tree, best)


def _mean_logprob(tree: Tree, path: list[np.ndarray], logprob: float, tokens: int) -> float:
    """Of the whole path: the steps before are found in the tree by their ids."""
    node, total, count = 0, logprob, tokens
    for ids in path:
        for child in tree.nodes[node].children:
            step = tree.nodes[child].step
            assert step is not None
            if step.content is ids:
                node, total, count = child, total + step.logprob, count + step.tokens
                break
    return total / max(count, 1)


def _seed_of(seed: int, prompt: int, path: Sequence[int]) -> int:
    """A seed for the draws that continue a path, below 2**64."""
    words = np.random.SeedSequence([seed, prompt, len(path), *path]).generate_state(2)
    return (int(words[0]) << 32) + int(words[1])
