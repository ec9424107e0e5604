"""Groups that are the leaves of a search tree, as a method's plan or ``[tree]`` asks for them.

In rounds a node of each prompt's tree is chosen (UCT, PUCT, ...), steps are drawn to follow it, and
a path that ends is judged and backed up. The leaves are the group's members, in the order in which
they were drawn; where the search has found too few, open nodes are continued to an end. A step that
several members go through is drawn once and trained once, in the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jrl.collect.groups import counted
from jrl.collect.members import demonstration_rollout
from jrl.collect.reward_stages import judged_parts
from jrl.collect.run_rows import RunRows, completion_ends, prompt_seeds, run_rows, step_ends
from jrl.collect.sources import (
    Around,
    Groups,
    Source,
    added_counts,
    all_entries,
    drawing,
    subjects_at,
)
from jrl.collect.sources_text import TextSource
from jrl.data.prompts import pad_prompts
from jrl.episodes.episode import Episode
from jrl.episodes.play import Device
from jrl.episodes.search import Searched, episode_at, leaf_rows, play_search
from jrl.episodes.transcript import RowShape, to_rollout
from jrl.episodes.tree import SEARCHES, SearchPlan, Tree, search_plan
from jrl.episodes.world import TextWorld
from jrl.rewards.pool import RewardPool
from jrl.sampling.places import entropy
from jrl.setup.adapters import drawn_trees
from jrl.setup.run import Run
from jrl.types import SILENT, Network, Params, Prompt, Search, StopReason, TrainState
from jrl.types.asks import DrawRequest

Estimate = Callable[[Mapping[str, Params], np.ndarray, np.ndarray], Any]
"""(weights "policy" and "value", tokens [M, P + T] int32, their lengths [M]) -> points [M]."""


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


class TreeSearch(Around):
    """A source around one that has and judges the problems: its groups are leaves of a search.

    Beside "prompt" it records "step" [N, G, T], how deep each token's node lies, from 0 on, "node"
    [N, G, T], the number of that node in its tree, from 1 on, and the statistic "node_value" [N, G,
    T], points: of each token's node, as the backup of all leaves of the tree left it.

    Args:
      rows: decode slots that stop at the ends of steps and measure entropies.
      search: how.
      source: whose problems are searched, and which judges the leaves.
      weights: [R] float, of the reward parts.
      width: P, tokens.
      ends: ids that end a completion.
      estimate: points of paths that have not ended, backed up as those of leaves are; ``draw`` then
        reads the weights "value" too. None to go by leaves alone.

    Attributes:
      trees: of the last draw, one a prompt.
    """

    def __init__(
        self,
        rows: RunRows,
        search: Search,
        source: Source,
        weights: np.ndarray,
        *,
        width: int,
        ends: Sequence[int],
        estimate: Estimate | None = None,
    ) -> None:
        super().__init__(source)
        self._rows, self._search, self._weights = rows, search, weights
        self._step_tokens = 0 if SEARCHES[search.by].whole else search.tokens
        self._estimate, self._ends = estimate, ends
        self.trees: list[Tree] = []
        self._sizes = width, rows.rows.max_new_tokens

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``; entries without a tree are sampled independently."""
        # Every entry of the request, whether it is searched or not, so that the groups come back in
        # its order.
        tickets, rows = all_entries(request)
        plan = plan_of(self._search, group_of(request))
        subject, prompts = self.source.prompts(request.key, rows)
        estimate = None if self._estimate is None else partial(self._estimate, request.weights)
        judge = partial(self.source.judge, step=int(request.step))
        leaves = Leaves(judge, self._weights, subject, prompts, self._sizes, estimate)
        name = drawing(request)
        version = int(request.versions[name])
        with self._rows.loaded(request.key, request.weights[name], version) as key:
            searched = play_search(
                Device(self._rows.rows),
                TextWorld(self._ends, self._step_tokens),
                prompts,
                prompt_seeds(key, request.stream, request.step, tickets),
                plan,
                leaves.score,
                # No rounds: open nodes are continued to an end at once, which is a plain sample of
                # the group.
                [0 if alone else plan.rounds for alone in drawn_alone(request)],
            )
        self.trees = searched.trees
        return self._as_groups(searched, leaves, subject, prompts, plan)

    def _as_groups(
        self,
        searched: Searched,
        judged: Leaves,
        subject: Any,
        prompts: list[Prompt],
        plan: SearchPlan,
    ) -> Groups:
        group = plan.leaves
        groups, points, judged_by_tree, silent = [], [], [], []
        for tree in searched.trees:
            # In the order of sampling, not the best ones: choosing by score would bias the group's
            # baseline.
            leaves = tree.leaves()[:group]
            scores = [judged.points[episode_at(tree, leaf)] for leaf in leaves]
            points.append([each for each, _, _ in scores])
            judged_by_tree.append([is_known for _, is_known, _ in scores])
            silent.append([bits for _, _, bits in scores])
            # A leaf without a score must not be the member that trains the shared tokens.
            groups.append(leaf_rows(tree, leaves, judged_by_tree[-1], plan.value)[0])
        rows = to_rollout(groups, RowShape(group, *self._sizes))
        # ABORTED leaves the group: its points are not 0, they are unknown.
        stop = np.where(judged_by_tree, rows.rollout.stop, np.int32(StopReason.ABORTED))
        node = rows.ids["node"]
        costs = ("slot_tokens", "slot_steps", "read_tokens", "reread_tokens")
        counts = {name: searched.counts[name] for name in costs}
        counts |= {
            # Tokens of rows that are not trained: the past shared with earlier members.
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
                SILENT: np.array(silent, np.int32),
            },
            stats={"node_value": rows.values},
        )


class Leaves:
    """Scores the paths of a search: finished ones by rewards, the others by estimates.

    Args:
      judge: (subject, prompts, rollout) -> ``Groups`` of one leaf each, with rewards.
      weights: [R] float, of the reward parts.
      subject: the problems.
      prompts: theirs.
      sizes: (P, T), tokens.
      estimate: of paths that have not ended; None for none.

    Attributes:
      points: leaf -> points [R] of its reward parts, whether they are known, and the bits of those
        that have no opinion.
      counts: of what judged the leaves, summed.
    """

    def __init__(
        self,
        judge: Callable[..., Groups],
        weights: np.ndarray,
        subject: Any,
        prompts: list[Prompt],
        sizes: tuple[int, int],
        estimate: Callable[[np.ndarray, np.ndarray], Any] | None,
    ) -> None:
        self._judge_rollout, self._weights = judge, weights
        self._subject, self._prompts = subject, prompts
        (self._width, self._limit), self._estimate = sizes, estimate
        self.points: dict[Episode, tuple[np.ndarray, bool, int]] = {}
        self.counts: dict[str, float] = {}

    def score(self, episodes: Sequence[Episode]) -> list[float | None]:
        """Points of the paths of a round; None for paths without a score yet."""
        scores: dict[Episode, float] = {}
        # All leaves of a round in one call, because a reward model or a pool of workers has a cost
        # per call.
        if leaves := [e for e in episodes if e.ending is not None]:
            scores |= self._judge(leaves)
        paths = [e for e in episodes if e.ending is None]
        if paths and self._estimate is not None:
            whole = [np.concatenate([e.opening, e.past()]) for e in paths]
            # All of one width, so that programs differ only in the number of paths.
            most = self._width + self._limit
            scores |= dict(zip(paths, estimates(self._estimate, most, whole), strict=True))
        return [scores.get(episode) for episode in episodes]

    def _judge(self, leaves: Sequence[Episode]) -> dict[Episode, float]:
        """The scores of leaves, each computed once; leaves without a score are left out."""
        tokens = np.zeros((len(leaves), self._limit), np.int32)
        lengths = np.array([leaf.at.length for leaf in leaves], np.int32)
        for row, leaf in zip(tokens, leaves, strict=True):
            row[: leaf.at.length] = leaf.past()
        # A leaf cut at its limit counts as truncated, as any completion does.
        complete = np.array([leaf.stop == StopReason.STOP_TOKEN for leaf in leaves])
        whose = np.array([leaf.problem.group for leaf in leaves])
        prompts = [self._prompts[i] for i in whose]
        padded = pad_prompts(prompts, self._width)
        rollout = demonstration_rollout(*padded, tokens, lengths, complete, 1)
        judged = self._judge_rollout(subjects_at(self._subject, whose), prompts, rollout)
        self.counts = added_counts(self.counts, judged.counts)
        # A reward may fail for one leaf; it is then not backed up, and the search continues.
        judged_leaves, scores = counted(judged.rollout)[:, 0], {}
        silent = judged.ids.get(SILENT, np.zeros((len(leaves), 1), np.int32))[:, 0]
        for leaf, points, is_known, bits in zip(
            leaves, judged.rewards[:, 0], judged_leaves, silent, strict=True
        ):
            self.points[leaf] = points, bool(is_known), int(bits)
            if is_known:
                scores[leaf] = float(points @ self._weights)
        return scores


# ---------------------------------------------------------------- of a run


def search_rows(run: Run, search: Search) -> RunRows:
    """The decode slots of a run's searches."""
    # As many rows as can run at a time: all members of all groups, or all steps of one expansion of
    # every tree.
    widest = run.config.train.prompts * max(run.config.sampling.group, search.width)
    return run_rows(
        run,
        widest,
        stop_tokens=step_ends(run, whole=SEARCHES[search.by].whole),
        max_new_tokens=run.kind.new_tokens,
        measure=entropy,
    )


def search_source(run: Run, search: Search, problems: Source) -> TreeSearch:
    """The search of a run on text, or on a procedural task.

    Args:
      run: that draws its completions.
      search: how.
      problems: the source that has and judges them.
    """
    return TreeSearch(
        search_rows(run, search),
        search,
        problems,
        np.array(list(run.rewards.weights.values()), np.float64),
        width=run.width,
        ends=completion_ends(run),
        estimate=run_estimate(run),
    )


class DrawnWeights:
    """(state) -> the weights by name that the source of a run draws with.

    Args:
      network: the policy.
      value: whether the value network is read too.
      policies: those of the plan that draw besides the policy.
    """

    def __init__(
        self, network: Network, value: bool = False, policies: tuple[Any, ...] = ()
    ) -> None:
        self.network, self.value, self.policies = network, value, policies

    def __call__(self, state: TrainState) -> dict[str, Params]:
        """The policy's tree, and that of "value" where it is read."""
        trees = drawn_trees(state, self.network, self.policies)
        return trees | ({"value": state.params["value"]} if self.value else {})


def drawn_weights(run: Run) -> DrawnWeights:
    """Weights that the source of a run samples with, by name."""
    curriculum = run.method.curriculum
    estimates_between = curriculum is not None and "estimate" in curriculum.uses
    value = run_estimate(run) is not None or estimates_between
    return DrawnWeights(run.network, value, run.method.plan.policies)


def run_estimate(run: Run) -> Estimate | None:
    """The run's estimate of unfinished paths in a search, or None."""
    draw = run.method.draw
    points = run.method.plan.estimate
    if draw.search is None or points is None or run.value is None:
        return None
    return value_estimate(run, points)


def value_estimate(run: Run, points: Callable[[Any], Any]) -> Estimate:
    """The run's value network at the last token, mapped by ``points``."""
    value, network = run.value, run.network
    assert value is not None

    @jax.jit
    def estimate(params: Mapping[str, Params], tokens: Any, lengths: Any) -> Any:
        columns = jax.numpy.arange(tokens.shape[1], dtype=jax.numpy.int32)
        at = jax.numpy.broadcast_to(columns, tokens.shape)
        # Segment 0 is padding, which nothing attends to.
        segments = (at < lengths[:, None]).astype(jax.numpy.int32)
        hidden, _ = network.hidden(params["policy"], tokens, at, segments)
        values = value.apply(params["value"], hidden, tokens, at, segments)
        # The value BEFORE a token is at its position; what follows the path is read at its last
        # token.
        last = jax.numpy.take_along_axis(values, lengths[:, None] - 1, axis=1)[:, 0]
        return points(last)

    return estimate


def undrawn_text(
    run: Run, pool: RewardPool | None, seed: int | None, split: str = "train"
) -> Source:
    """The prompts of a run on text with their judges; a search draws from them.

    Args:
      run: on text.
      pool: the reward functions.
      seed: of the order, or None for the data's own.
      split: "train" or "eval".
    """
    source = TextSource(
        all_prompts=run.data.prompts[split],
        width=run.width,
        seed=seed,
        program=None,
        sampling_params=None,
        pool=pool,
        tokenizer=run.tokenizer,
        name=split,
        steps=run.config.train.steps,
    )
    return judged_parts(run, source, pool, split)


def group_of(request: DrawRequest) -> int:
    """G: members of each group of a request, whose asks all have the same width."""
    (group,) = {ask.width for ask in request.asks}
    return group


def drawn_alone(request: DrawRequest) -> list[bool]:
    """[entries] bool: whether the members of an entry are sampled without search."""
    return [ask.tree is None for ask in request.asks for _ in range(ask.entries)]
