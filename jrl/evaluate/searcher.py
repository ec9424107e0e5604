"""A run's policy as a searcher, of text or of episodes: as training searches, with eval's settings.

    with searcher_of(run, key, params, step, width=4) as search:
        searched = search(prompts, seeds, search_plan("beam", 4), by_path(by_likelihood))

The trees of ``searched`` are those that training would grow with these weights and seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jrl.collect.run_rows import prompt_seeds
from jrl.collect.searchers import SearchHow
from jrl.config import Config
from jrl.episodes.search import (
    Scorer,
    Searched,
    Searcher,
    by_likelihood,
    by_path,
)
from jrl.episodes.tree import SearchPlan, search_plan
from jrl.errors import UserError
from jrl.evaluate.evaluator import load_policy
from jrl.setup.run import Run
from jrl.train import build, programs
from jrl.train.batches import sources_of
from jrl.train.memory_check import check_problems, check_slots
from jrl.types import Array, Params, Prompt

_SLOTS = 32


def searched_run(config: Config, width: int, use: str = "") -> Run:
    """The run of a configuration as it is evaluated, where it can be searched this wide.

    Args:
      config: of the run.
      width: of the searches.
      use: what is made of their paths, as ``Kind.check_searched`` takes it.

    Raises:
      UserError: episodes on the device, or searches that do not fit.
    """
    run = programs.as_evaluated(build.setup(config, trains=False))
    run.kind.check_searched(use)
    longest = min(run.network.max_length, run.width + run.kind.new_tokens)
    check_slots("--width", max(_SLOTS, width), longest, run.kind.cached(run.model))
    check_problems(run, "eval.problems", run.kind.made_at_once(config.eval.problems))
    return run


def searcher_of(
    run: Run,
    key: Array,
    params: Params,
    step: int,
    *,
    width: int,
    whole: bool = False,
    step_tokens: int = 64,
    split: str = "eval",
) -> contextlib.AbstractContextManager[Searcher]:
    """A searcher of a run's problems with some weights.

    Args:
      run: from ``searched_run``.
      key: its root key.
      params: the policy's.
      step: of training.
      width: of the search.
      whole: whether a step is a whole completion.
      step_tokens: the most of a step of text, which ends with a line, too. In episodes a step is a
        turn, and this is not read.
      split: "train" or "eval", which an environment is told.

    Raises:
      UserError: limits that no search can keep, or an environment whose state cannot be copied.
    """
    temperature = run.config.eval.temperature or 1.0  # without chance all steps would be alike
    how = SearchHow(max(width, _SLOTS), whole, step_tokens, split, temperature)
    return sources_of(run).searcher(run, key, params, step, how)


def search_once(
    run: Run,
    key: Array,
    params: Params,
    step: int,
    prompts: Sequence[Prompt],
    plan: SearchPlan,
    score: Scorer,
    *,
    step_tokens: int,
    split: str = "eval",
    attempt: int = 0,
) -> Searched:
    """A search of these problems.

    Args:
      run: from ``searched_run``.
      key: its root key.
      params: what samples.
      step: of training.
      prompts: the first problems of a split.
      plan: how to search.
      score: judges paths.
      step_tokens: as in ``searcher_of``.
      split: "train" or "eval".
      attempt: another number samples other tokens.

    Raises:
      UserError: as ``searcher_of``, or no environment has opened.
    """
    # Environments may change with the training, text does not.
    seed_step = run.kind.search_seed(step)
    seeds = prompt_seeds(key, "eval", seed_step, np.arange(len(prompts)), attempt)
    with searcher_of(
        run,
        key,
        params,
        step,
        width=plan.width,
        whole=plan.whole,
        step_tokens=step_tokens,
        split=split,
    ) as search:
        return opened(search(prompts, seeds, plan, by_path(score)))


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

    Problems of one call are searched side by side, by the policy's likelihood; what is sampled for
    the n-th problem of all calls depends on n and the run's seed.

    Args:
      config: of a run with ``data.env`` on the host.
      name: of ``episodes.tree.SEARCHES``.
      width: of the search.
      rounds: at most.
      checkpoint: a training step; None for the newest.
    """
    plan, run = search_plan(name, width, rounds=rounds), searched_run(config, width)
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        with searcher_of(run, key, params, step, width=width, whole=plan.whole) as search:
            count = 0

            def solve(problems: Sequence[str]) -> list[bool]:
                nonlocal count
                numbers = np.arange(count, count + len(problems))
                count += len(problems)
                prompts = [
                    Prompt(int(i), text, np.zeros(0, np.int32), "")
                    for i, text in zip(numbers, problems, strict=True)
                ]
                if not prompts:
                    return []
                seeds = prompt_seeds(key, "eval", step, numbers)
                return opened(search(prompts, seeds, plan, by_path(by_likelihood))).successes()

            yield solve


def opened(searched: Searched) -> Searched:
    """The search.

    Raises:
      UserError: no environment has opened.
    """
    if all(root.ending is not None for root in searched.roots):
        ending = searched.roots[0].ending
        raise UserError(f"no environment opened: {ending.reason if ending else ''}")
    return searched
