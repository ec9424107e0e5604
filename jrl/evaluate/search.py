"""Evaluation by search: best of N, beams, DVTS and MCTS, with what they cost.

    jrl eval RUN --search beam --width 4 --step-tokens 64
    jrl eval RUN --search mcts --out DIR
    jrl eval RUN --search beam --by model rewards.model.path=RUN_OF_A_REWARD_MODEL

The search goes by the policy's own likelihood, by a reward model, or by the run's own value
network, never by the answer; what it takes in the end is judged as any completion is. With
``--out`` training problems are searched, every path that ended is judged, and what the trees then
say of steps is written as rows to train on.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jrl.config import Config
from jrl.data.prompts import pad_prompts
from jrl.data.tasks import Task
from jrl.envs.tree import Tree
from jrl.envs.tree_rows import TreeRows, rows_of_tree
from jrl.errors import UserError
from jrl.evaluate import load_policy
from jrl.evaluate.episodes import search_episodes
from jrl.evaluate.statistics import wilson
from jrl.evaluate.verifiers import LIKELIHOOD, verifier_of
from jrl.serving.engine import Engine
from jrl.serving.search import (
    Found,
    Scorer,
    SearchPlan,
    by_likelihood,
    named_search,
    search,
)
from jrl.train import build
from jrl.train.build import Run
from jrl.train.demonstrations import demonstration_rollout
from jrl.train.fits import check_problems, check_slots
from jrl.train.sources_text import TextSource
from jrl.types import Array, Params, Prompt, stream

_SLOTS = 32


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
      name: of ``serving.search.SEARCHES``.
      width: of the search.
      step_tokens: the most tokens of a step. In text a step ends with a line, too; in episodes it
        is a turn, and this is not read.
      rounds: at most.
      checkpoint: a training step; None for the newest.
      out: a directory for siblings.jsonl and paths.jsonl (``envs.tree_rows.TreeRows``) of a search
        on the first training problems; None for none.
      by: what paths are ranked by: "likelihood"; "model", the reward model of ``rewards.model``;
        "value", the value network that the run trained; or "ratio", by how much likelier a token of
        the last step is for the run's policy than for the one that it began with, which then draws
        (the Q of ``step_q``).
      reduce: of the values behind the steps of a path, what counts: "last", "min" or "mean".

    Returns:
      ``step``, accuracy with its 95 % interval, and of each problem on average: "expansions" of
      nodes, "steps", "drawn_tokens", and "read_tokens" that were computed again. With ``out`` also
      the numbers of rows, "siblings" and "paths".

    Raises:
      UserError: an environment on the device, nothing to evaluate on, a search that does not fit,
        or a directory that cannot be written to.
    """
    folder = None if out is None else _folder(out)
    if config.data.plays:
        numbers, left = search_episodes(
            config,
            name,
            width=width,
            rounds=rounds,
            checkpoint=checkpoint,
            train=folder is not None,
            verifier=verifier_of(config, by, reduce),
        )
        return numbers | ({} if folder is None else _written(folder, left))
    plan = named_search(name, width, rounds=rounds)
    verifier = verifier_of(config, by, reduce)
    run = searched_run(config, width)
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        split = "eval" if folder is None else "train"
        problems, prompts = problems_of(run, key, split)
        most = longest_completion(run)
        params, scorer_of = verifier(run, params, checkpoint)
        scorer = scorer_of(prompts)
        sizes = {"step_tokens": step_tokens, "seed": run.config.seed}
        found = searched(run, params, prompts, plan, scorer=scorer, **sizes)
        taken = [each.tokens for each in found]
        right = points_of(run, problems, prompts, np.arange(len(found)), taken, most) >= 1
        rows = None if folder is None else _rows(run, problems, prompts, found, most)
    low, high = wilson(float(right.sum()), len(right))
    costs = np.array([[*each.cost, each.read_tokens] for each in found], float).mean(0)
    names = ("expansions", "steps", "drawn_tokens", "read_tokens")
    return {
        "step": step,
        "accuracy": float(right.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "problems": float(len(right)),
        **dict(zip(names, costs.tolist(), strict=True)),
        **({} if folder is None or rows is None else _written(folder, rows)),
    }


def searched_run(config: Config, width: int) -> Run:
    """The run of a configuration, where its problems can be searched this wide.

    Raises:
      UserError: episodes of environments, or searches that do not fit.
    """
    run = build.setup(config, trains=False)
    if run.config.data.plays or run.kind.episode_columns:
        raise UserError(
            "--search: episodes in an environment on the device are not searched; leave it out"
        )
    longest = min(run.network.max_length, run.width + run.kind.new_tokens)
    check_slots("--width", max(_SLOTS, width), longest, run.model)
    if config.data.has_solutions:
        check_problems(run, "eval.problems", config.eval.problems)
    return run


def longest_completion(run: Run) -> int:
    """T: the most tokens of a completion."""
    return run.kind.new_tokens


def searched(
    run: Run,
    params: Params,
    prompts: Sequence[Prompt],
    plan: SearchPlan,
    *,
    step_tokens: int,
    seed: int,
    scorer: Scorer = by_likelihood,
) -> list[Found]:
    """What a search finds for each prompt.

    Args:
      run: from ``searched_run``.
      params: the policy's.
      prompts: at least one.
      plan: how to search.
      step_tokens: the most tokens of a step. In text a step ends with a line, too.
      seed: of the draws.
      scorer: judges paths.
    """
    most = longest_completion(run)
    longest = max(len(prompt.tokens) for prompt in prompts)
    size = most if plan.whole else min(step_tokens, most)
    engine = Engine(
        run.network,
        params,
        slots=max(_SLOTS, plan.width),
        prompt_tokens=longest if plan.whole else min(longest + most, run.network.max_length - size),
        max_new_tokens=size,
        stop_tokens=run.tokenizer.stop_ids,
        tokenizer=run.tokenizer if run.kind.lines else None,  # steps of a text end with a line
    )
    return search(
        engine,
        [prompt.tokens.tolist() for prompt in prompts],
        plan,
        scorer,
        end_tokens=run.tokenizer.stop_ids,
        step_tokens=size,
        max_tokens=most,
        stop_strings=("\n",) if run.kind.lines else (),
        seed=seed,
        temperature=run.config.eval.temperature or 1.0,
    )


def _folder(out: str) -> pathlib.Path:
    """The directory, made where it is missing."""
    folder = pathlib.Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name a directory to write to") from None
    return folder


def problems_of(run: Run, key: Array, split: str) -> tuple[Any, list[Prompt]]:
    """The first problems of a split, and their prompts."""
    count = run.config.eval.problems
    if not isinstance(run.task, Task):
        prompts = list(run.data.prompts[split][:count])
        if not prompts:
            raise UserError(f"data.{split} is missing; name a file of prompts")
        return None, prompts
    task, data = run.task, "data" if split == "train" else "eval_data"
    keys = jax.vmap(lambda i: stream(key, data, i))(np.arange(count))
    problems = jax.device_get(jax.jit(jax.vmap(lambda k: task.generate(k, split)))(keys))
    rows = zip(problems.tokens, problems.length, strict=True)
    return problems, [
        Prompt(i, "", np.asarray(tokens[:length], np.int32), "")
        for i, (tokens, length) in enumerate(rows)
    ]


def points_of(
    run: Run,
    problems: Any,
    prompts: list[Prompt],
    whose: np.ndarray,
    paths: Sequence[np.ndarray],
    most: int,
) -> np.ndarray:
    """[M] float32, points of the reward part that says what is right, of M completions.

    Args:
      run: the run.
      problems: of a task; None in text.
      prompts: N.
      whose: [M] int, which prompt each completion belongs to.
      paths: M arrays of ids.
      most: T, tokens.
    """
    tokens = np.zeros((len(paths), most), np.int32)
    lengths = np.array([len(path) for path in paths], np.int32)
    for row, path in zip(tokens, paths, strict=True):
        row[: len(path)] = path
    if isinstance(run.task, Task):
        asked = jax.tree.map(lambda x: x[whose], problems)
        return np.asarray(jax.jit(jax.vmap(run.task.verify))(asked, tokens, np.maximum(lengths, 1)))
    asked = [prompts[i] for i in whose]
    rollout = demonstration_rollout(
        *pad_prompts(asked, run.width), tokens, lengths, np.ones(len(paths), bool), 1
    )
    with build.reward_pool(run.config) as pool:
        source = TextSource(
            all_prompts=asked,
            width=run.width,
            seed=None,
            program=None,
            sampling_params=None,
            pool=pool,
            tokenizer=run.tokenizer,
            name="eval",
        )
        rewards = np.asarray(source.judge(asked, asked, rollout).rewards)
    return rewards[:, 0, list(run.rewards.weights).index(run.rewards.judge)]


# ---------------------------------------------------------------- rows to train on


def _rows(
    run: Run, problems: Any, prompts: list[Prompt], found: Sequence[Found], most: int
) -> list[TreeRows]:
    """The rows of all trees, every path that ended being right or not."""
    leaves = [(i, leaf) for i, each in enumerate(found) for leaf in each.tree.leaves()]
    if not leaves:
        return []
    paths = [ids_of(found[i].tree, leaf) for i, leaf in leaves]
    whose = np.array([i for i, _ in leaves])
    right = points_of(run, problems, prompts, whose, paths, most) >= 1
    points: list[dict[int, float]] = [{} for _ in found]
    for (i, leaf), is_right in zip(leaves, right.tolist(), strict=True):
        points[i][leaf] = float(is_right)
    return [
        rows_of_tree(each.tree, prompt.tokens.tolist(), judged)
        for each, prompt, judged in zip(found, prompts, points, strict=True)
    ]


def ids_of(tree: Tree, leaf: int) -> np.ndarray:
    """[t] int32, the ids on the way to a leaf."""
    steps = [tree.nodes[i].step for i in tree.path(leaf)]
    return np.concatenate([step.content for step in steps if step is not None])


def _written(folder: pathlib.Path, rows: Sequence[TreeRows]) -> dict[str, float]:
    """Writes both files; how many rows each has."""
    counts = {}
    for name in TreeRows._fields:
        listed = [row for each in rows for row in getattr(each, name)]
        text = "".join(json.dumps(row) + "\n" for row in listed)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        counts[name] = float(len(listed))
    return counts
