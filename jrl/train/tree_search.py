"""Groups that are the leaves of a search tree: what a training step draws with ``Draw.search``.

In rounds a node of each prompt's tree is chosen (UCT, PUCT, ...), steps are drawn to follow it, and
a path that ends is judged and backed up. The leaves are the group's members, in the order in which
they were drawn; where the search has found too few, open nodes are continued to an end. A step that
several members go through is drawn once and trained once, in the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.data.prompts import pad_prompts
from jrl.data.tasks import Task
from jrl.episodes.episode import Episode
from jrl.episodes.play import Device
from jrl.episodes.search import Searched, episode_at, leaf_rows, play_search
from jrl.episodes.transcript import RowShape, to_rollout
from jrl.episodes.tree import SEARCHES, SearchPlan, Tree, search_plan
from jrl.episodes.world import TextWorld
from jrl.methods.base import WrittenProblems
from jrl.rewards.pool import RewardPool
from jrl.sampling.places import entropy
from jrl.train.build import Run
from jrl.train.collect import Groups, TextSource, counted, source_rows
from jrl.train.demonstrations import demonstration_rollout
from jrl.train.objective import max_new_tokens
from jrl.train.prompt_seeds import prompt_seeds
from jrl.train.run_rows import RunRows, completion_ends, run_rows, step_ends
from jrl.train.score import drawing_policy
from jrl.types import Params, Prompt, Rollout, Search, StopReason, TrainState, stream

Judge = Callable[[Any, list[Prompt], Rollout], Groups]
"""(what the prompts are about, N prompts, N groups) -> the groups with their rewards."""


class Problems(NamedTuple):
    """Where the prompts of a search come from, and what judges completions of them.

    Attributes:
      ask: (root key, positions [N]) -> what they are about, and their prompts, N.
      judge: of completions.
      weights: [R] float32, of the reward parts that it returns.
    """

    ask: Callable[[Any, np.ndarray], tuple[Any, list[Prompt]]]
    judge: Judge
    weights: np.ndarray


class Guided(NamedTuple):
    """The parameters that a search with a value network reads.

    Attributes:
      policy: the policy's.
      value: the value network's.
    """

    policy: Params
    value: Params


Estimate = Callable[[Guided, np.ndarray, np.ndarray], Any]
"""(parameters, prompts and paths [M, P + T] int32, their lengths [M]) -> points [M]."""


def estimates(
    estimate: Callable[[np.ndarray, np.ndarray], Any], most: int, paths: Sequence[np.ndarray]
) -> list[float]:
    """Points of paths, which are read as a whole.

    Args:
      estimate: of (tokens [M, most] int32, lengths [M] int32) -> points [M].
      most: tokens.
      paths: at least one, the ids of prompt and path each.
    """
    count = 1 << (len(paths) - 1).bit_length()  # few shapes, hence few programs
    tokens, lengths = np.zeros((count, most), np.int32), np.ones(count, np.int32)
    for i, ids in enumerate(paths):
        tokens[i, : len(ids)], lengths[i] = ids, len(ids)
    return np.asarray(estimate(tokens, lengths), np.float64)[: len(paths)].tolist()


def plan_of(search: Search, group: int) -> SearchPlan:
    """The search of a method, until a tree has a leaf for each member of a group."""
    return search_plan(
        search.by,
        search.width,
        rounds=search.rounds,
        exploration=search.exploration,
        leaves=group,
    )


class TreeSearch:
    """Draws groups of leaves; ``draw`` is a ``GroupSource``.

    Beside "prompt" it records "step" [N, G, T], how deep each token's node lies, from 0 on, "node"
    [N, G, T], the number of that node in its tree, from 1 on, and the statistic "node_value" [N, G,
    T], points: of each token's node, as the backup of all leaves of the tree left it.

    Args:
      rows: decode slots that stop at the ends of steps and measure entropies.
      search: how.
      problems: what is searched.
      group: G.
      width: P, tokens.
      ends: ids that end a completion.
      estimate: points of paths that have not ended, backed up as those of leaves are; ``draw`` then
        takes ``Guided`` parameters. None to go by leaves alone.
      sample: stream of the run's keys that tokens are keyed by.

    Attributes:
      trees: of the last draw, one a prompt.
    """

    def __init__(
        self,
        rows: RunRows,
        search: Search,
        problems: Problems,
        *,
        group: int,
        width: int,
        ends: Sequence[int],
        estimate: Estimate | None = None,
        sample: str = "sample",
    ) -> None:
        self._rows, self._plan, self._problems = rows, plan_of(search, group), problems
        self._step_tokens = 0 if self._plan.whole else search.tokens
        self._estimate, self._sample = estimate, sample
        self._group, self._ends = group, ends
        self.trees: list[Tree] = []
        self._shape = RowShape(group, width, rows.rows.max_new_tokens)

    def draw(
        self,
        key: Any,
        params: Any,
        step: Any,
        positions: Any,
        version: Any = None,
        apart: Callable[[Prompt], bool] = lambda prompt: False,
    ) -> Groups:
        """See ``GroupSource``; the members of prompts that are ``apart`` share no steps."""
        positions = np.asarray(positions)
        subject, prompts = self._problems.ask(key, positions)
        estimate = None if self._estimate is None else partial(self._estimate, params)
        leaves = Leaves(self._problems, subject, prompts, self._shape, estimate)
        policy = params if self._estimate is None else params.policy
        with self._rows.loaded(key, policy, int(step if version is None else version)) as root:
            searched = play_search(
                Device(self._rows.rows),
                TextWorld(self._ends, self._step_tokens),
                prompts,
                prompt_seeds(root, self._sample, step, positions),
                self._plan,
                leaves.score,
                [0 if apart(prompt) else self._plan.rounds for prompt in prompts],
            )
        self.trees = searched.trees
        return self._as_groups(searched, leaves, subject, prompts)

    def _as_groups(
        self, searched: Searched, judged: Leaves, subject: Any, prompts: list[Prompt]
    ) -> Groups:
        groups, points, known = [], [], []
        for tree in searched.trees:
            leaves = tree.leaves()[: self._group]
            found = [judged.points[episode_at(tree, leaf)] for leaf in leaves]
            points.append([each for each, _ in found])
            known.append([is_known for _, is_known in found])
            # A leaf that nobody could judge would keep what it shares from being trained.
            groups.append(leaf_rows(tree, leaves, known[-1], self._plan.value)[0])
        rows = to_rollout(groups, self._shape)
        stop = np.where(known, rows.rollout.stop, np.int32(StopReason.ABORTED))
        node = rows.ids["node"]
        costs = ("slot_tokens", "slot_steps", "read_tokens", "reread_tokens")
        counts = {name: searched.counts[name] for name in costs}
        counts |= {
            "tree_shared_tokens": float((node > 0).sum() - rows.rollout.mask.sum()),
            "search_nodes": float(sum(len(tree.nodes) - 1 for tree in searched.trees)),
            "search_leaves": float(sum(len(tree.leaves()) for tree in searched.trees)),
        }
        return Groups(
            rollout=rows.rollout.replace(stop=stop),
            rewards=np.array(points, np.float32),
            subject=subject,
            counts=judged.counts | counts,
            ids={
                "prompt": np.array([p.id for p in prompts], np.int32),
                "step": rows.ids["step"],
                "node": node,
            },
            stats={"node_value": rows.values},
        )


class Leaves:
    """Judges the paths of a search: those that ended by rewards, the others by estimates.

    Attributes:
      points: leaf -> points [R] of its reward parts, and whether they are known.
      counts: of what judged the leaves, summed.
    """

    def __init__(
        self,
        problems: Problems,
        subject: Any,
        prompts: list[Prompt],
        shape: RowShape,
        estimate: Callable[[np.ndarray, np.ndarray], Any] | None,
    ) -> None:
        self._problems, self._subject, self._prompts = problems, subject, prompts
        self._shape, self._estimate = shape, estimate
        self.points: dict[Episode, tuple[np.ndarray, bool]] = {}
        self.counts: dict[str, float] = {}

    def score(self, episodes: Sequence[Episode]) -> list[float | None]:
        """Points of the paths of a round; None where nothing is known yet."""
        scores: dict[Episode, float] = {}
        if leaves := [e for e in episodes if e.ending is not None]:
            scores |= self._judge(leaves)
        paths = [e for e in episodes if e.ending is None]
        if paths and self._estimate is not None:
            whole = [np.concatenate([e.opening, e.past()]) for e in paths]
            most = self._shape.prompt_tokens + self._shape.completion_tokens
            scores |= dict(zip(paths, estimates(self._estimate, most, whole), strict=True))
        return [scores.get(episode) for episode in episodes]

    def _judge(self, leaves: Sequence[Episode]) -> dict[Episode, float]:
        """The score of leaves, each judged once; none where it is not known."""
        tokens = np.zeros((len(leaves), self._shape.completion_tokens), np.int32)
        lengths = np.array([leaf.at.length for leaf in leaves], np.int32)
        for row, leaf in zip(tokens, leaves, strict=True):
            row[: leaf.at.length] = leaf.past()
        complete = np.array([leaf.stop == StopReason.STOP_TOKEN for leaf in leaves])
        whose = np.array([leaf.problem.group for leaf in leaves])
        prompts = [self._prompts[i] for i in whose]
        asked = pad_prompts(prompts, self._shape.prompt_tokens)
        about = prompts
        if not isinstance(self._subject, list):
            about = jax.tree.map(lambda x: x[whose], self._subject)
        rollout = demonstration_rollout(*asked, tokens, lengths, complete, 1)
        judged = self._problems.judge(about, prompts, rollout)
        self.counts = {
            name: self.counts.get(name, 0.0) + judged.counts.get(name, 0.0)
            for name in self.counts | judged.counts
        }
        known, scores = counted(judged.rollout)[:, 0], {}
        for leaf, points, is_known in zip(leaves, judged.rewards[:, 0], known, strict=True):
            self.points[leaf] = points, bool(is_known)
            if is_known:
                scores[leaf] = float(points @ self._problems.weights)
        return scores


# ---------------------------------------------------------------- of a run


def search_rows(run: Run, search: Search) -> RunRows:
    """The decode slots of a run's searches."""
    widest = run.config.train.prompts * max(run.config.sampling.group, search.width)
    return run_rows(
        run,
        widest,
        stop_tokens=step_ends(run, whole=SEARCHES[search.by].whole),
        max_new_tokens=max_new_tokens(run.config, run.task),
        measure=entropy,
    )


def search_source(
    run: Run, search: Search, pool: RewardPool | None, rows: RunRows | None = None
) -> TreeSearch:
    """The search of a run on text, or on a procedural task.

    Args:
      run: that draws its completions.
      search: how.
      pool: the reward functions, in text.
      rows: of ``search_rows``; None for its own.
    """
    task = run.task
    weights = np.array(list(run.rewards.weights.values()), np.float64)
    if isinstance(task, Task):
        problems = task_problems(task, tuple(run.rewards.weights), weights)
    else:
        prompts, seed = run.data.prompts["train"], run.config.order_seed
        problems = text_problems(run, pool, weights, prompts, seed)
    return TreeSearch(
        search_rows(run, search) if rows is None else rows,
        search,
        problems,
        group=run.config.sampling.group,
        width=run.width,
        ends=completion_ends(run),
        estimate=run_estimate(run),
    )


def attempts_source(
    run: Run, search: Search, pool: RewardPool | None, rows: RunRows, attempts: int
) -> TreeSearch:
    """Groups of ``attempts`` completions, drawn apart; positions are those of ``data.train``."""
    weights = np.array(list(run.rewards.weights.values()), np.float64)
    return TreeSearch(
        rows,
        search._replace(rounds=0),
        text_problems(run, pool, weights, run.data.prompts["train"], None),
        group=attempts,
        width=run.width,
        ends=completion_ends(run),
        sample="curriculum",
    )


def sampled_params(run: Run) -> Callable[[TrainState], Any]:
    """(state) -> the parameters that the run's source draws with."""
    policy = partial(drawing_policy, network=run.network)
    if run_estimate(run) is None and not isinstance(run.method.curriculum, WrittenProblems):
        return policy
    return lambda state: Guided(policy(state), state.params["value"])


def run_estimate(run: Run) -> Estimate | None:
    """What a run's search makes of paths that have not ended, or None."""
    draw = run.method.draw
    if draw.search is None or draw.guide is None or run.value is None:
        return None
    return value_estimate(run, draw.guide)


def value_estimate(run: Run, points: Callable[[Any], Any]) -> Estimate:
    """What the run's value network says behind the last token, as ``points`` of its number."""
    value, network = run.value, run.network
    assert value is not None

    @jax.jit
    def estimate(params: Guided, tokens: Any, lengths: Any) -> Any:
        columns = jax.numpy.arange(tokens.shape[1], dtype=jax.numpy.int32)
        at = jax.numpy.broadcast_to(columns, tokens.shape)
        segments = (at < lengths[:, None]).astype(jax.numpy.int32)
        hidden, _ = network.hidden(params.policy, tokens, at, segments)
        values = value.apply(params.value, hidden, tokens, at, segments)
        last = jax.numpy.take_along_axis(values, lengths[:, None] - 1, axis=1)[:, 0]
        return points(last)

    return estimate


def text_problems(
    run: Run,
    pool: RewardPool | None,
    weights: np.ndarray,
    prompts: Sequence[Prompt],
    seed: int | None,
) -> Problems:
    """Prompts of a run on text, in the order of a seed or their own."""
    source = TextSource(
        prompts=prompts,
        width=run.width,
        seed=seed,
        program=None,
        sampling_params=run.sampling_params,
        pool=pool,
        tokenizer=run.tokenizer,
    )

    def ask(key: Any, positions: np.ndarray) -> tuple[list[Prompt], list[Prompt]]:
        chosen = source_rows(source.seed, positions, len(source.prompts))
        prompts = [source.prompts[i] for i in chosen]
        return prompts, prompts

    return Problems(ask, lambda _, prompts, rollout: source.judge(prompts, rollout), weights)


def task_problems(task: Task, parts: tuple[str, ...], weights: np.ndarray) -> Problems:
    """The training problems of a procedural task, judged on the device."""
    judges = {"verify": task.verify, "partial": task.partial}

    @jax.jit
    def make(key: Any, ids: Any) -> Any:
        keys = jax.vmap(lambda i: stream(key, "data", i))(ids)
        return jax.vmap(lambda k: task.generate(k, "train"))(keys)

    @jax.jit
    def points(problems: Any, tokens: Any, lengths: Any) -> Any:
        def one(problem: Any, tokens: Any, length: Any) -> Any:
            found = [judges[part](problem, tokens, length) for part in parts]
            return jax.numpy.array(found, jax.numpy.float32)

        return jax.vmap(jax.vmap(one, (None, 0, 0)))(problems, tokens, lengths)

    def ask(key: Any, positions: np.ndarray) -> tuple[Any, list[Prompt]]:
        made = jax.device_get(make(key, positions.astype(np.int32)))
        rows = zip(positions.tolist(), made.tokens, made.length, strict=True)
        return made, [Prompt(i, "", np.asarray(ids[:n], np.int32), "") for i, ids, n in rows]

    def judge(problems: Any, prompts: list[Prompt], rollout: Rollout) -> Groups:
        n = len(prompts)
        some = np.arange(1 << (n - 1).bit_length()) % n  # few shapes, hence few programs
        rows = jax.tree.map(lambda x: x[some], (problems, rollout.tokens, rollout.lengths))
        return Groups(rollout, np.asarray(points(*rows))[:n], problems, {}, {})

    return Problems(ask, judge, weights)
