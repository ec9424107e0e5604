"""Groups that are the leaves of a search tree: what a training step draws with ``Draw.search``.

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

from jrl.data.prompts import pad_prompts
from jrl.envs.transcript import RowShape, Segment, Transcript, to_rollout
from jrl.envs.tree import SEARCHES, Node, Step, Tree, grow_leaves
from jrl.errors import UserError
from jrl.methods.base import WrittenProblems
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.pool import RewardPool
from jrl.sampling.places import entropy
from jrl.serving.episode_rows import EpisodeRows
from jrl.serving.step_rows import DrawnStep, StepAsk, StepRows
from jrl.train.asks import DrawRequest
from jrl.train.build import Run, sampler_of
from jrl.train.demonstrations import demonstration_rollout
from jrl.train.groups import counted
from jrl.train.prompt_seeds import prompt_seeds
from jrl.train.score import drawn_trees
from jrl.train.sources import Around, Groups, Source, all_entries, drawing
from jrl.train.sources_text import TextSource
from jrl.types import Network, Params, Prompt, Search, StopReason, TrainState

_SLOTS, _CHUNK = 64, 16
"""Slots where the configuration names none, and the most decode steps between two looks."""

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
      group: G.
      width: P, tokens.
      ends: ids that end a completion.
      estimate: points of paths that have not ended, backed up as those of leaves are; ``draw`` then
        reads the weights "value" too. None to go by leaves alone.
      sample: stream of the run's keys that draws are keyed by.

    Attributes:
      trees: of the last draw, one a prompt; the content of a step is a ``DrawnStep``.
    """

    def __init__(
        self,
        rows: EpisodeRows,
        search: Search,
        source: Source,
        weights: np.ndarray,
        *,
        group: int,
        width: int,
        ends: Sequence[int],
        estimate: Estimate | None = None,
        sample: str = "sample",
    ) -> None:
        super().__init__(source)
        self._rows, self._search, self._weights = rows, search, weights
        self._estimate, self._sample = estimate, sample
        self._group, self._ends = group, ends
        self.trees: list[Tree] = []
        self._shape = RowShape(group, width, rows.max_new_tokens)

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``; entries that ask for no tree are drawn without search."""
        tickets, rows = all_entries(request)
        subject, prompts = self.source.prompts(request.key, rows)
        name = drawing(request)
        self._rows.set_weights(request.weights[name], int(request.versions[name]))
        forest = _Forest(
            StepRows(
                self._rows,
                [p.tokens.tolist() for p in prompts],
                prompt_seeds(request.key, self._sample, request.step, tickets),
                ends=self._ends,
                step_tokens=self._search.tokens,
            ),
            self._search,
            self.source,
            self._weights,
            self._shape,
            subject,
            prompts,
            None if self._estimate is None else partial(self._estimate, request.weights),
        )
        forest.grow(self._group, drawn_alone(request))
        self._rows.release()
        self.trees = forest.trees
        return self._as_groups(forest, subject, prompts)

    def _as_groups(self, forest: _Forest, subject: Any, prompts: list[Prompt]) -> Groups:
        leaves = [tree.leaves()[: self._group] for tree in forest.trees]
        judged = [[forest.judged[i, leaf] for leaf in ends] for i, ends in enumerate(leaves)]
        known = np.array([[ok for _, ok in group] for group in judged])
        groups = [
            _transcripts(tree, SEARCHES[self._search.by].value, prompt, ends, live)
            for tree, prompt, ends, live in zip(forest.trees, prompts, leaves, known, strict=True)
        ]
        rows = to_rollout(groups, self._shape)
        stop = np.where(known, rows.rollout.stop, np.int32(StopReason.ABORTED))
        node = rows.ids["node"]
        counts = {
            "tree_shared_tokens": float((node > 0).sum() - rows.rollout.mask.sum()),
            "search_nodes": float(sum(len(tree.nodes) - 1 for tree in forest.trees)),
            "search_leaves": float(sum(len(tree.leaves()) for tree in forest.trees)),
        }
        return Groups(
            rollout=rows.rollout.replace(stop=stop),
            rewards=np.array([[points for points, _ in group] for group in judged], np.float32),
            subject=subject,
            counts=forest.counts | forest.steps.counts | counts,
            ids={
                "prompt": np.array([p.id for p in prompts], np.int32),
                "step": rows.ids["step"],
                "node": node,
            },
            stats={"node_value": rows.values},
        )


class _Forest:
    """The trees of a step, grown side by side.

    Attributes:
      judged: (tree, leaf) -> points [R] of its reward parts, and whether they are known.
      counts: of what judged the leaves, summed.
    """

    def __init__(
        self,
        steps: StepRows,
        search: Search,
        source: Source,
        weights: np.ndarray,
        shape: RowShape,
        subject: Any,
        prompts: list[Prompt],
        estimate: Callable[[np.ndarray, np.ndarray], Any] | None,
    ) -> None:
        self._estimate = estimate
        self.steps, self.trees = steps, [Tree() for _ in prompts]
        self.judged: dict[tuple[int, int], tuple[np.ndarray, bool]] = {}
        self.counts: dict[str, float] = {}
        self._search, self._shape = search, shape
        self._source, self._weights = source, weights
        self._subject, self._prompts = subject, prompts

    def grow(self, group: int, apart: Sequence[bool]) -> None:
        """Searches until each tree has ``group`` leaves, and completes those that have too few.

        Trees that are ``apart`` are not searched: their leaves have no steps in common.
        """
        search = self._search
        grow_leaves(
            self.trees,
            SEARCHES[search.by].select(search.width, search.exploration),
            self._expand,
            leaves=group,
            width=search.width,
            rounds=[0 if alone else search.rounds for alone in apart],
        )

    def _expand(self, chosen: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """Draws steps behind nodes and backs up the leaves; (tree, number) of all that is new."""
        asks, following = [], [len(tree.nodes) for tree in self.trees]
        for i, node, count in chosen:
            path = _path(self.trees[i], node)
            asks.append(StepAsk(i, node, path, following[i], count))
            following[i] += count
        new = []
        for ask, found in zip(asks, self.steps.draw(asks), strict=True):
            for drawn in found:
                size, done = len(drawn.tokens), drawn.stop != StopReason.RUNNING
                total = float(drawn.logprobs.sum(dtype=np.float64))
                step = Step(drawn, size, total, drawn.entropy, done)
                new.append((ask.tree, self.trees[ask.tree].add(ask.node, step)))
        points: dict[tuple[int, int], float] = {}
        if leaves := [(i, node) for i, node in new if self.trees[i].nodes[node].done]:
            points |= self._judge(leaves)
        going = [at for at in new if at not in set(leaves)]
        if going and self._estimate is not None:
            points |= self._estimated(going)
        for i, node in new:
            if (i, node) in points:
                SEARCHES[self._search.by].backup(self.trees[i], node, points[i, node])
        return new

    def _estimated(self, nodes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """What the value network makes of paths that have not ended."""
        assert self._estimate is not None
        whole = [
            np.concatenate([self._prompts[i].tokens, _path(self.trees[i], node)])
            for i, node in nodes
        ]
        most = self._shape.prompt_tokens + self._shape.completion_tokens
        return dict(zip(nodes, estimates(self._estimate, most, whole), strict=True))

    def _judge(self, leaves: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """The score of leaves, each judged once; none where it is not known."""
        tokens = np.zeros((len(leaves), self._shape.completion_tokens), np.int32)
        paths = [_path(self.trees[i], node) for i, node in leaves]
        lengths = np.array([len(path) for path in paths], np.int32)
        for row, path in zip(tokens, paths, strict=True):
            row[: len(path)] = path
        stops = [_drawn(self.trees[i], node).stop for i, node in leaves]
        complete = np.array([stop == StopReason.STOP_TOKEN for stop in stops])
        whose = np.array([i for i, _ in leaves])
        prompts = [self._prompts[i] for i in whose]
        asked = pad_prompts(prompts, self._shape.prompt_tokens)
        about = prompts
        if not isinstance(self._subject, list):
            about = jax.tree.map(lambda x: x[whose], self._subject)
        rollout = demonstration_rollout(*asked, tokens, lengths, complete, 1)
        found = self._source.judge(about, prompts, rollout)
        self.counts = {
            name: self.counts.get(name, 0.0) + found.counts.get(name, 0.0)
            for name in self.counts | found.counts
        }
        known, scores = counted(found.rollout)[:, 0], {}
        for at, points, ok in zip(leaves, found.rewards[:, 0], known, strict=True):
            self.judged[at] = points, bool(ok)
            if ok:
                scores[at] = float(points @ self._weights)
        return scores


def _drawn(tree: Tree, node: int) -> DrawnStep:
    step = tree.nodes[node].step
    assert step is not None
    return step.content


def _path(tree: Tree, node: int) -> np.ndarray:
    """[t] int32, the tokens from the prompt to a node."""
    parts = [_drawn(tree, i).tokens for i in tree.path(node)]
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)


def _transcripts(
    tree: Tree,
    value: Callable[[Node], float],
    prompt: Prompt,
    leaves: Sequence[int],
    live: Sequence[bool],
) -> list[Transcript]:
    """The rows of a group: a step is drawn in the first that goes through it, of those that live.

    Args:
      tree: grown.
      value: of a node, points.
      prompt: of the tree.
      leaves: the members.
      live: whether each member counts; one that does not would keep its steps from being trained.
    """
    rows, owned = [], set()
    for member, (leaf, lives) in enumerate(zip(leaves, live, strict=True)):
        path, segments = tree.path(leaf), []
        for i, node in enumerate(path):
            step = _drawn(tree, node)
            worth = value(tree.nodes[node])
            part = Segment(step.tokens, node not in owned, step=i, node=node, value=worth)
            if part.drawn:
                versions = np.full(len(step.tokens), step.version, np.int32)
                part = part._replace(logprobs=step.logprobs, versions=versions)
            segments.append(part)
        owned |= set(path if lives else ())
        stop = _drawn(tree, leaf).stop
        rows.append(Transcript(prompt, member, prompt.tokens, tuple(segments), stop, member))
    return rows


# ---------------------------------------------------------------- of a run


def check_search(run: Run) -> None:
    """Raises UserError where a run cannot search."""
    named = "objective.tree"
    if jax.process_count() > 1:
        raise UserError(f"{named}: a search runs in one process; use one host")
    if run.config.sampling.mesh:
        raise UserError("sampling.mesh: a search draws on the mesh of training; remove it")
    if run.rollout_mesh is not None:
        raise UserError(f"{named}: a search draws on the mesh of training; remove [placement]")
    if run.rewards.model is not None:
        raise UserError(
            f"{named}: a search goes by rewards of functions, and [rewards.model] is none; remove"
            " it, or draw members apart"
        )
    own = [name for name in run.rewards.weights if ":" in name]
    if own and not run.kind.lines:
        raise UserError(
            f"{named}: a search on a task goes by verify and partial; remove rewards.{own[0]}"
        )


def search_rows(run: Run, search: Search) -> EpisodeRows:
    """The decode slots of a run's searches."""
    sampling, group = run.config.sampling, run.config.sampling.group
    lines = line_ends(run.tokenizer, run.network.vocab_size) if run.kind.lines else ()
    most = run.config.train.prompts * max(group, search.width)
    ends = _ends(run)
    return EpisodeRows(
        sampler_of(run),
        slots=min(sampling.slots or _SLOTS, most),
        prompt_tokens=run.width,
        max_new_tokens=run.kind.new_tokens,
        stop_tokens=(*ends, *(i for i in lines if i not in ends)),
        chunk=_CHUNK,
        sampling={
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        },
        measure=entropy,
    )


def _ends(run: Run) -> tuple[int, ...]:
    return run.kind.stop_tokens(run.tokenizer)


def search_source(
    run: Run, search: Search, problems: Source, rows: EpisodeRows | None = None
) -> TreeSearch:
    """The search of a run on text, or on a procedural task.

    Args:
      run: that draws its completions.
      search: how.
      problems: the source that has and judges them.
      rows: of ``search_rows``; None for its own.
    """
    return TreeSearch(
        search_rows(run, search) if rows is None else rows,
        search,
        problems,
        np.array(list(run.rewards.weights.values()), np.float64),
        group=run.config.sampling.group,
        width=run.width,
        ends=_ends(run),
        estimate=run_estimate(run),
    )


def attempts_source(
    run: Run, search: Search, pool: RewardPool | None, rows: EpisodeRows, attempts: int
) -> TreeSearch:
    """Groups of ``attempts`` completions, drawn apart, of rows of ``data.train``."""
    return TreeSearch(
        rows,
        search._replace(rounds=0),
        undrawn_text(run, pool, None),
        np.array(list(run.rewards.weights.values()), np.float64),
        group=attempts,
        width=run.width,
        ends=_ends(run),
        sample="curriculum",
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
    """What the source of a run draws with."""
    written = isinstance(run.method.curriculum, WrittenProblems)
    value = run_estimate(run) is not None or written
    return DrawnWeights(run.network, value, run.method.plan.policies)


def run_estimate(run: Run) -> Estimate | None:
    """What a run's search makes of paths that have not ended, or None."""
    draw = run.method.draw
    points = run.method.plan.estimate
    if draw.search is None or points is None or run.value is None:
        return None
    return value_estimate(run, points)


def value_estimate(run: Run, points: Callable[[Any], Any]) -> Estimate:
    """What the run's value network says behind the last token, as ``points`` of its number."""
    value, network = run.value, run.network
    assert value is not None

    @jax.jit
    def estimate(params: Mapping[str, Params], tokens: Any, lengths: Any) -> Any:
        columns = jax.numpy.arange(tokens.shape[1], dtype=jax.numpy.int32)
        at = jax.numpy.broadcast_to(columns, tokens.shape)
        segments = (at < lengths[:, None]).astype(jax.numpy.int32)
        hidden, _ = network.hidden(params["policy"], tokens, at, segments)
        values = value.apply(params["value"], hidden, tokens, at, segments)
        last = jax.numpy.take_along_axis(values, lengths[:, None] - 1, axis=1)[:, 0]
        return points(last)

    return estimate


def line_ends(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """The ids whose text ends a line."""
    return tuple(i for i in range(vocab_size) if "\n" in tokenizer.decode([i]))


def undrawn_text(run: Run, pool: RewardPool | None, seed: int | None) -> TextSource:
    """The training prompts of a run on text with their judges; a search draws from them.

    Args:
      run: on text.
      pool: the reward functions.
      seed: of the order, or None for the data's own.
    """
    return TextSource(
        all_prompts=run.data.prompts["train"],
        width=run.width,
        seed=seed,
        program=None,
        sampling_params=None,
        pool=pool,
        tokenizer=run.tokenizer,
    )


def drawn_alone(request: DrawRequest) -> list[bool]:
    """For each entry of a request, whether its members are drawn without search."""
    return [ask.tree is None for ask in request.asks for _ in range(len(ask.ticket))]
