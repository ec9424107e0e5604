"""Evaluation by search, of text or of episodes: beams, best-first, PUCT, best of N, and the cost.

    jrl eval RUN --search beam --width 4 --step-tokens 64
    jrl eval RUN --search puct --out DIR
    jrl eval RUN --search beam --by model rewards.model.path=RUN_OF_A_REWARD_MODEL

The search goes by the policy's own likelihood, by a reward model, or by the run's own value
network, never by the answer or by an environment's points; what it takes in the end is judged as
any completion is, or as the environment ended it. With ``--out`` training problems are searched,
every path that ended is judged, and what the trees then say of steps is written as rows to train
on.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jrl.collect.members import demonstration_rollout
from jrl.collect.sources import subjects_at
from jrl.config import Config
from jrl.config.judge import POLICY
from jrl.data.prompts import pad_prompts
from jrl.episodes.search import Searched, best_node, episode_at
from jrl.episodes.tree import Tree, search_plan
from jrl.episodes.tree_rows import TreeRows, rows_of_tree
from jrl.errors import UserError
from jrl.evaluate.evaluator import load_policy, right_part
from jrl.evaluate.searcher import search_once, searched_run
from jrl.evaluate.statistics import verdict_quality, wilson
from jrl.evaluate.verifiers import JUDGE, LIKELIHOOD, verifier_of
from jrl.setup.reward_parts import judge_of, reward_pool
from jrl.setup.run import Run
from jrl.train.batches import undrawn_source
from jrl.types import Array, Prompt, StopReason

_ACCEPTED = 0.5
"""Least points of a judge, which gives 0 to 1, for an answer that it accepts."""


def search_run(
    config: Config,
    name: str,
    *,
    width: int = 4,
    step_tokens: int = 64,
    rounds: int = 64,
    checkpoint: int | None = None,
    out: str | None = None,
    by: str = LIKELIHOOD,
    reduce: str = "last",
) -> dict[str, Any]:
    """Evaluates a run's policy with a search on its held-out problems.

    Args:
      config: a run's configuration.
      name: of ``episodes.tree.SEARCHES``.
      width: of the search.
      step_tokens: the most tokens of a step. In text a step ends with a line, too; in episodes it
        is a turn, and this is not read.
      rounds: at most.
      checkpoint: a training step; None for the newest.
      out: a directory for siblings.jsonl and paths.jsonl (``episodes.tree_rows.TreeRows``) of a
        search on the first training problems; None for none.
      by: what paths are ranked by: "likelihood"; "model", the reward model of ``rewards.model``;
        "value", the value network that the run trained; or "ratio", by how much likelier a token of
        the last step is for the run's policy than for the one that it began with, which then
        samples (the Q of ``step_q``); or "judge", by the first judge of [rewards].
      reduce: reduction of the values after a path's steps: "last", "min" or "mean".

    Returns:
      ``step``, accuracy with its 95 % interval, and of each problem on average: "expansions" of
      nodes, "steps" (in episodes "turns", and "env_errors"), "drawn_tokens", and "read_tokens" of
      prompts and answers, as often as they were computed. By a judge also "judge_precision" and
      "judge_recall" of its verdicts on all complete paths, of which those of at least 0.5 points
      are accepted. With ``out`` also the numbers of rows, "siblings" and "paths".

    Raises:
      UserError: an environment on the device, nothing to evaluate on, a search that does not fit,
        or a directory that cannot be written to.
    """
    folder = None if out is None else _folder(out)
    plan = search_plan(name, width, rounds=rounds)
    verifier = verifier_of(config, by, reduce)
    run = searched_run(config, width, "" if folder is None else f"rows {name}")
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        # Rows are trained on, so they are made of the training problems.
        split = "eval" if folder is None else "train"
        problems, prompts = problems_of(run, key, split)
        params, scorer = verifier(run, params, checkpoint)
        how = run, key, params, step, prompts, plan, scorer
        searched = search_once(*how, step_tokens=step_tokens, split=split)
        right = right_answers(run, problems, prompts, searched)
        rows = None if folder is None else _rows(run, problems, prompts, searched)
        verdicts = _verdicts(run, problems, prompts, searched) if by == JUDGE else {}
    low, high = wilson(float(right.sum()), len(right))
    return {
        "step": step,
        "accuracy": float(right.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "problems": float(len(right)),
        **verdicts,
        **_costs(run, searched),
        **({} if folder is None or rows is None else _written(folder, rows)),
    }


def _costs(run: Run, searched: Searched) -> dict[str, float]:
    """Mean costs of a search per problem."""
    count = len(searched.trees)
    expansions, steps, tokens = np.array(searched.costs, float).mean(0).tolist()
    costs = {"expansions": expansions, run.kind.step_name: steps}
    costs |= {"drawn_tokens": tokens, "read_tokens": searched.counts["read_tokens"] / count}
    for name, faults in run.kind.faults.items():
        costs[name] = sum(searched.counts[fault] for fault in faults) / count
    return costs


def right_answers(
    run: Run,
    problems: Any,
    prompts: list[Prompt],
    searched: Searched,
    ends: Sequence[tuple[int, int]] | None = None,
) -> np.ndarray:
    """[M] bool, whether paths are right: as an environment ended them, or as they are judged.

    Args:
      run: the run.
      problems: as ``problems_of`` gives them.
      prompts: N.
      searched: their trees.
      ends: M pairs (tree, node) of the nodes that the paths end with; None for the path that each
        search takes in the end.
    """
    if run.kind.plays:
        if ends is None:
            # An environment has verified every path, so any of them counts; a tree is empty where
            # none has opened.
            return np.array(searched.successes())
        return np.array([episode_at(searched.trees[i], node).success for i, node in ends])
    if ends is None:
        # A search in text does not know which paths are right: the one that it takes counts.
        ends = [(i, best_node(tree)) for i, tree in enumerate(searched.trees)]
    paths = [ids_of(searched.trees[i], node) for i, node in ends]
    # A path that was cut, or never ended, is judged as such, as a completion that was cut is.
    stops = [episode_at(searched.trees[i], node).stop if node else None for i, node in ends]
    complete = np.array([stop == StopReason.STOP_TOKEN for stop in stops])
    whose = np.array([i for i, _ in ends])
    return points_of(run, problems, prompts, whose, paths, complete) >= 1


def _folder(out: str) -> pathlib.Path:
    """The directory, made where it is missing."""
    folder = pathlib.Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name a directory to write to") from None
    return folder


def problems_of(
    run: Run, key: Array, split: str, most: int | None = None
) -> tuple[Any, list[Prompt]]:
    """The first problems of a split, at most ``most`` or ``eval.problems``, and their prompts."""
    most = run.config.eval.problems if most is None else most
    count = run.kind.problems(run.data, most, split)
    if not count:
        which = "held-out prompts" if split == "eval" else "prompts"
        raise UserError(f"data.{split} is missing; name a file of {which}")
    rows = np.arange(min(count, most))
    return undrawn_source(run, None, split).prompts(key, rows)


def points_of(
    run: Run,
    problems: Any,
    prompts: list[Prompt],
    whose: np.ndarray,
    paths: Sequence[np.ndarray],
    complete: np.ndarray | None = None,
) -> np.ndarray:
    """[M] float32, points of the judging reward part, of M completions.

    Args:
      run: the run.
      problems: as ``problems_of`` gives them.
      prompts: N.
      whose: [M] int, which prompt each completion belongs to.
      paths: M arrays of ids.
      complete: [M] bool, False where a completion was cut; None where none was.
    """
    tokens = np.zeros((len(paths), run.kind.new_tokens), np.int32)
    lengths = np.array([len(path) for path in paths], np.int32)
    # Sources judge rollouts, so paths are judged as the completions of an evaluation are.
    for row, path in zip(tokens, paths, strict=True):
        row[: len(path)] = path
    prompts_of_paths = [prompts[i] for i in whose]
    ended = np.ones(len(paths), bool) if complete is None else complete
    rollout = demonstration_rollout(
        *pad_prompts(prompts_of_paths, run.width), tokens, lengths, ended, 1
    )
    with reward_pool(run.config) as pool:
        judged = undrawn_source(run, pool, "eval").judge(
            subjects_at(problems, whose), prompts_of_paths, rollout
        )
    # A policy that accepts its own paths would measure its confidence instead of its accuracy.
    names = run.kind.eval_weights(run.rewards.weights)
    right = [*names][right_part(run, names)]
    if run.rewards.givers.get(right) == "judge" and judge_of(run.config, right).model == POLICY:
        raise UserError(
            f"rewards.{right} says what is right, and is the policy's own judgement; set judge ="
            " true in a part that compares answers, such as [rewards.math]"
        )
    return np.asarray(judged.rewards)[:, 0, right_part(run, names)]


# ---------------------------------------------------------------- rows to train on


def _rows(run: Run, problems: Any, prompts: list[Prompt], searched: Searched) -> list[TreeRows]:
    """The rows of all trees, every path that ended being right or not."""
    leaves = _complete_paths(searched)
    if not leaves:
        return []
    right = right_answers(run, problems, prompts, searched, leaves)
    points: list[dict[int, float]] = [{} for _ in searched.trees]
    for (i, leaf), is_right in zip(leaves, right.tolist(), strict=True):
        points[i][leaf] = float(is_right)
    return [
        rows_of_tree(tree, root.opening.tolist(), judged)
        for tree, root, judged in zip(searched.trees, searched.roots, points, strict=True)
    ]


def _complete_paths(searched: Searched) -> list[tuple[int, int]]:
    """(tree, node) of the last nodes of all paths that ended without a fault."""
    return [
        (i, leaf)
        for i, tree in enumerate(searched.trees)
        for leaf in tree.leaves()
        if not (ending := episode_at(tree, leaf).ending) or not ending.reason
    ]


def _verdicts(
    run: Run, problems: Any, prompts: list[Prompt], searched: Searched
) -> dict[str, float]:
    """Precision and recall of a search's judge on the complete paths that it has judged."""
    # The value of a node that nothing has visited is 0, and no verdict.
    nodes = [(i, searched.trees[i].nodes[leaf], leaf) for i, leaf in _complete_paths(searched)]
    leaves = [(i, leaf) for i, node, leaf in nodes if node.visits]
    if not leaves:
        return {}
    accepted = np.array([node.value >= _ACCEPTED for _, node, _ in nodes if node.visits])
    right = np.asarray(right_answers(run, problems, prompts, searched, leaves), bool)
    return verdict_quality(accepted, right)


def ids_of(tree: Tree, node: int) -> np.ndarray:
    """[t] int32, the ids on the way to a node of a search in text."""
    return np.concatenate([np.zeros(0, np.int32), *(tree.step(i).content for i in tree.path(node))])


def _written(folder: pathlib.Path, rows: Sequence[TreeRows]) -> dict[str, float]:
    """Writes both files; how many rows each has."""
    counts = {}
    for name in TreeRows._fields:
        listed = [row for each in rows for row in getattr(each, name)]
        text = "".join(json.dumps(row) + "\n" for row in listed)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        counts[name] = float(len(listed))
    return counts
