"""Evaluation by search in episodes with environments on the host: a step is a turn.

    jrl eval RUN --search beam --width 4
    jrl eval RUN --search mcts --out DIR

As ``evaluate.search`` is for text: paths are ranked by the policy's likelihood or by values, never
by the environment's own points; how the best path ended is what counts. With ``--out`` training
problems are searched, and turns of one node that lead to success more often than others are written
as preferences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jrl.config import Config
from jrl.config.secrets import reveal
from jrl.envs.calls import Calls
from jrl.envs.configured import configured_env
from jrl.envs.host import format_of
from jrl.envs.tree_rows import TreeRows, rows_of_tree
from jrl.errors import UserError
from jrl.evaluate import load_policy, wilson
from jrl.evaluate.verifiers import Verifier
from jrl.serving.episode_rows import EpisodeRows
from jrl.serving.search import SEARCHES, Scorer, SearchPlan, named_search
from jrl.train import build
from jrl.train.build import Run
from jrl.train.episode_search import EpisodeSearch, FoundEpisode
from jrl.train.prompt_seeds import prompt_seeds
from jrl.types import Array, Params, Prompt

_SLOTS, _CHUNK = 32, 16


def search_episodes(
    config: Config,
    name: str,
    *,
    width: int,
    rounds: int,
    checkpoint: int | None,
    train: bool,
    verifier: Verifier,
) -> tuple[dict[str, Any], list[TreeRows]]:
    """Evaluates a run's policy with a search on the problems of its environment.

    Args:
      config: of a run with ``data.env`` on the host.
      name: of ``serving.search.SEARCHES``, but for "best_of_n".
      width: of the search.
      rounds: at most.
      checkpoint: a training step; None for the newest.
      train: whether training problems are searched; else held-out ones.
      verifier: of ``verifiers.verifier_of``.

    Returns:
      The numbers, "accuracy" being the share of problems whose best path ended well, and the rows
      of each tree.

    Raises:
      UserError: no problems, a search that episodes do not have, or states that cannot be copied.
    """
    plan = named_search(name, width, rounds=rounds)
    if plan.whole:
        raise UserError(
            f"--search {name}: episodes are searched by turns; use one of"
            f" {', '.join(n for n in SEARCHES if n != name)}, or eval.samples for whole ones"
        )
    run = build.setup(config, trains=False)
    split = "train" if train else "eval"
    prompts = run.data.prompts[split][: config.eval.problems]
    if not prompts:
        raise UserError(f"data.{split} is missing; name a file of problems")
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        params, scorer_of = verifier(run, params, checkpoint)
        found = _searched(run, key, params, step, prompts, partial(_search, plan, scorer_of))
    won = sum(each.success for each in found)
    low, high = wilson(float(won), len(found))
    names = ("expansions", "turns", "drawn_tokens", "env_errors")
    means = {n: float(np.mean([getattr(each, n) for each in found])) for n in names}
    numbers = {"step": step, "accuracy": won / len(found), "accuracy_low": low}
    numbers |= {"accuracy_high": high, "problems": float(len(found)), **means}
    return numbers, [_rows(each) for each in found]


def _search(
    plan: SearchPlan,
    scorer_of: Callable[[Sequence[Prompt]], Scorer],
    search: EpisodeSearch,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
) -> list[FoundEpisode]:
    return search.search(prompts, seeds, plan, scorer_of)


def _searched(
    run: Run,
    key: Array,
    params: Params,
    step: int,
    prompts: Sequence[Prompt],
    search: Callable[..., list[FoundEpisode]],
) -> list[FoundEpisode]:
    """What a search finds in the run's environment, which it makes and ends."""
    data, sampling = run.config.episodes, run.config.sampling
    assert data is not None
    env = configured_env(data.env, reveal(data.options, "data"))
    chat = format_of(env, run.tokenizer)
    rows = EpisodeRows(
        run.network,
        slots=sampling.slots or _SLOTS,
        prompt_tokens=run.width,
        max_new_tokens=sampling.max_new_tokens,
        stop_tokens=run.tokenizer.stop_ids,
        chunk=_CHUNK,
        sampling={"temperature": run.config.eval.temperature or 1.0},
    )
    rows.set_weights(params, step)
    env.begin(step, "eval")
    seeds = prompt_seeds(key, "eval", step, np.arange(len(prompts)))
    with contextlib.closing(Calls()) as calls:
        try:
            return search(EpisodeSearch(rows, calls, env, chat, run.tokenizer), prompts, seeds)
        finally:
            with contextlib.suppress(Exception):  # what was found must not be lost here
                calls.run(env.shutdown, env.limits.call_seconds)


def _rows(found: FoundEpisode) -> TreeRows:
    """Rows of a tree by how its episodes ended."""
    tree, points = found.tree, {}
    for leaf in tree.leaves():
        step = tree.nodes[leaf].step
        assert step is not None
        if not step.content.reason:
            points[leaf] = float(step.content.success)
    return rows_of_tree(tree, found.opening.tolist(), points)
