"""Evaluation by search: best of N, beams, DVTS and MCTS, with what they cost.

    jrl eval RUN --search beam --width 4 --step-tokens 64

The search goes by the policy's own likelihood, never by the answer; what it takes in the end is
judged as any completion is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jrl.config import Config
from jrl.data.prompts import pad_prompts
from jrl.data.tasks import Task
from jrl.errors import UserError
from jrl.evaluate import load_policy, wilson
from jrl.serving.engine import Engine
from jrl.serving.search import Found, named_search, search
from jrl.train import build
from jrl.train.build import Run
from jrl.train.collect import TextSource
from jrl.train.demonstrations import demonstration_rollout
from jrl.train.fits import check_problems, check_slots
from jrl.train.objective import max_new_tokens
from jrl.types import Array, Prompt, stream

_SLOTS = 32


def search_run(
    config: Config,
    name: str,
    *,
    width: int = 4,
    step_tokens: int = 64,
    rounds: int = 64,
    checkpoint: int | None = None,
) -> dict[str, Any]:
    """Evaluates a run's policy with a search on its held-out problems.

    Args:
      config: a run's configuration.
      name: of ``serving.search.SEARCHES``.
      width: of the search.
      step_tokens: the most tokens of a step. In text a step ends with a line, too.
      rounds: at most.
      checkpoint: a training step; None for the newest.

    Returns:
      ``step``, accuracy with its 95 % interval, and of each problem on average: "expansions" of
      nodes, "steps", "drawn_tokens", and "read_tokens" that were computed again.

    Raises:
      UserError: episodes of environments, nothing to evaluate on, or a search that does not fit.
    """
    run = build.setup(config, trains=False)
    if run.config.episodes or not (run.task is None or isinstance(run.task, Task)):
        raise UserError("--search: episodes in an environment are not searched; leave it out")
    plan = named_search(name, width, rounds=rounds)
    longest = min(run.network.max_length, run.width + max_new_tokens(config, run.task))
    check_slots("--width", max(_SLOTS, width), longest, run.model)
    if run.task is not None:
        check_problems(run, "eval.problems", config.eval.problems)
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        problems, prompts = _problems(run, key)
        most = run.config.sampling.max_new_tokens
        most = run.task.completion_tokens if isinstance(run.task, Task) else most
        longest = max(len(prompt.tokens) for prompt in prompts)
        size = most if plan.whole else min(step_tokens, most)
        engine = Engine(
            run.network,
            params,
            slots=max(_SLOTS, width),
            prompt_tokens=longest
            if plan.whole
            else min(longest + most, run.network.max_length - size),
            max_new_tokens=size,
            stop_tokens=run.tokenizer.stop_ids,
            tokenizer=None if run.task else run.tokenizer,  # steps of a text end with a line
        )
        found = search(
            engine,
            [prompt.tokens.tolist() for prompt in prompts],
            plan,
            end_tokens=run.tokenizer.stop_ids,
            step_tokens=size,
            max_tokens=most,
            stop_strings=("\n",) if run.task is None else (),
            seed=run.config.seed,
            temperature=run.config.eval.temperature or 1.0,
        )
        right = _right(run, problems, prompts, found, most)
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
    }


def _problems(run: Run, key: Array) -> tuple[Any, list[Prompt]]:
    """The held-out problems, and their prompts."""
    count = run.config.eval.problems
    if not isinstance(run.task, Task):
        prompts = run.data.prompts["eval"][:count]
        if not prompts:
            raise UserError("data.eval is missing; name a file of held-out prompts")
        return None, prompts
    task = run.task
    keys = jax.vmap(lambda i: stream(key, "eval_data", i))(np.arange(count))
    problems = jax.device_get(jax.jit(jax.vmap(lambda k: task.generate(k, "eval")))(keys))
    rows = zip(problems.tokens, problems.length, strict=True)
    return problems, [
        Prompt(i, "", np.asarray(tokens[:length], np.int32), "")
        for i, (tokens, length) in enumerate(rows)
    ]


def _right(
    run: Run,
    problems: Any,
    prompts: list[Prompt],
    found: Sequence[Found],
    most: int,
) -> np.ndarray:
    """[N] bool: whether what was found is right."""
    tokens = np.zeros((len(found), most), np.int32)
    lengths = np.array([len(each.tokens) for each in found], np.int32)
    for row, each in zip(tokens, found, strict=True):
        row[: len(each.tokens)] = each.tokens
    if isinstance(run.task, Task):
        points = jax.jit(jax.vmap(run.task.verify))(problems, tokens, np.maximum(lengths, 1))
        return np.asarray(points) >= 1
    rollout = demonstration_rollout(
        *pad_prompts(prompts, run.width), tokens, lengths, np.ones(len(found), bool), 1
    )
    with build.reward_pool(run.config) as pool:
        source = TextSource(
            prompts=prompts,
            width=run.width,
            seed=None,
            program=None,
            sampling_params=None,  # type: ignore[arg-type]  # nothing is drawn
            pool=pool,
            tokenizer=run.tokenizer,
            name="eval",
        )
        rewards = np.asarray(source.judge(prompts, rollout).rewards)
    return rewards[:, 0, list(run.rewards.weights).index(run.rewards.judge)] >= 1
