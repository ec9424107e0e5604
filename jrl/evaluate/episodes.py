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
from collections.abc import Callable, Iterator, Sequence
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
from jrl.evaluate import load_policy
from jrl.evaluate.statistics import wilson
from jrl.evaluate.verifiers import Verifier
from jrl.serving.episode_rows import EpisodeRows
from jrl.serving.search import SEARCHES, by_likelihood, named_search
from jrl.train import build
from jrl.train.build import Run
from jrl.train.episode_search import EpisodeSearch, FoundEpisode
from jrl.train.prompt_seeds import prompt_seeds
from jrl.types import Params, Prompt

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
        seeds = prompt_seeds(key, "eval", step, np.arange(len(prompts)))
        with _opened(run, params, step) as search:
            found = search.search(prompts, seeds, plan, scorer_of)
    won = sum(each.success for each in found)
    low, high = wilson(float(won), len(found))
    names = ("expansions", "turns", "drawn_tokens", "env_errors")
    means = {n: float(np.mean([getattr(each, n) for each in found])) for n in names}
    numbers = {"step": step, "accuracy": won / len(found), "accuracy_low": low}
    numbers |= {"accuracy_high": high, "problems": float(len(found)), **means}
    return numbers, [_rows(each) for each in found]


@contextlib.contextmanager
def searching(
    config: Config,
    name: str = "best_first",
    *,
    width: int = 4,
    rounds: int = 64,
    checkpoint: int | None = None,
) -> Iterator[Callable[[Sequence[str]], list[bool]]]:
    """A run's policy as a searcher of its environment: (problems) -> whether each ended well.

        with searching(load_config("RUN/config.toml", ["run.dir=RUN"])) as solve:
            print(solve(["a -> a", "a -> b"]))

    Problems of one call are searched side by side, by the policy's likelihood; what is drawn for
    the n-th problem of all calls depends on n and the run's seed.

    Args:
      config: of a run with ``data.env`` on the host.
      name: of ``serving.search.SEARCHES``, but for "best_of_n".
      width: of the search.
      rounds: at most.
      checkpoint: a training step; None for the newest.
    """
    plan, run = named_search(name, width, rounds=rounds), build.setup(config, trains=False)
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        with _opened(run, params, step) as search:
            asked = 0

            def solve(problems: Sequence[str]) -> list[bool]:
                nonlocal asked
                numbers = np.arange(asked, asked + len(problems))
                asked += len(problems)
                empty = np.zeros(0, np.int32)
                prompts = [
                    Prompt(int(i), text, empty, "")
                    for i, text in zip(numbers, problems, strict=True)
                ]
                seeds = prompt_seeds(key, "eval", step, numbers)
                if not prompts:
                    return []
                found = search.search(prompts, seeds, plan, lambda told: by_likelihood)
                return [each.success for each in found]

            yield solve


@contextlib.contextmanager
def _opened(run: Run, params: Params, step: int) -> Iterator[EpisodeSearch]:
    """A search in the run's environment, which is made here and ended behind it."""
    data: Any = run.config.data
    sampling = run.config.sampling
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
    with contextlib.closing(Calls()) as calls:
        try:
            yield EpisodeSearch(rows, calls, env, chat, run.tokenizer)
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
