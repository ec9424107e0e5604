"""Evaluation of a policy on held-out prompts, and samples of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.collect.sources import Groups, join_groups, simple_request, take_groups, to_host
from jrl.config import Config
from jrl.config.stored import is_run
from jrl.errors import UserError
from jrl.evaluate.samples import samples_of
from jrl.evaluate.statistics import CALIBRATION, evaluation_metrics
from jrl.rewards.pool import RewardPool
from jrl.setup.adapters import restore_policy
from jrl.setup.kind import RunData
from jrl.setup.reward_parts import function_of, reward_pool, reward_tables
from jrl.setup.run import Run, question_prompts
from jrl.train import build, programs
from jrl.train.batches import run_source
from jrl.train.memory_check import check_evaluation
from jrl.types import Array, Params, StopReason


class Evaluation(NamedTuple):
    """Result of an evaluation.

    Attributes:
      metrics: accuracy, accuracy_low, accuracy_high (95 %), pass@k, majority, all_variants,
        length, problems; with a reward part "confidence" those of ``statistics.calibration``.
      samples: records as ``RunWriter.write_samples`` takes them.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


def evaluation_names(run: Run) -> set[str] | None:
    """The metrics of an evaluation of a run on prompts; None where its environment adds some.

    Args:
      run: from ``setup``.
    """
    table = run.config.eval
    if run.kind.eval_metrics is None:
        return None
    final = run.kind.final_answers(["1"] * table.samples)
    answers = None if final is None else [final]
    one = np.ones((1, table.samples), int)
    variants = ["1"] if table.variants_of else None
    names = evaluation_metrics(
        one == 1, one, pass_k=table.pass_k, answers=answers, variants_of=variants
    ).keys()
    stated = CALIBRATION if _confidence_part(run) else ()
    return {*names, *stated, *run.kind.eval_metrics}


def _confidence_part(run: Run) -> str | None:
    """The reward part that reads a stated confidence, if any."""
    tables = reward_tables(run.config)
    named = (name for name, table in tables.items() if function_of(name, table) == "confidence")
    return next(named, None)


def episode_metrics(groups: Groups) -> dict[str, float]:
    """Means over evaluated episodes: success (fraction), reward (points) and turns."""
    turns = np.where(groups.rollout.mask, np.asarray(groups.ids["turn"]) + 1, 0).max(-1)
    success, reward = np.asarray(groups.rewards).mean((0, 1)).tolist()
    return {"success": success, "reward": reward, "turns": float(turns.mean())}


def environment_metrics(groups: Groups) -> dict[str, float]:
    """Means per episode of a host environment's counters, such as tool errors."""
    episodes = max(groups.counts.get("episodes", 0.0), 1.0)
    counts = {k.removeprefix("env/"): v for k, v in groups.counts.items() if k.startswith("env/")}
    return {name: float(value) / episodes for name, value in sorted(counts.items())}


# ---------------------------------------------------------------- evaluating a policy


class Evaluator:
    """Evaluates a run's policy on its held-out prompts, always the same ones.

    Args:
      run: from ``setup``.
      pool: the reward functions, for a run on text; a completion is right if its
        ``run.rewards.accuracy_part`` is at least 1. None if there are no functions.

    Raises:
      UserError: the held-out prompts have no column ``eval.variants_of``.
    """

    def __init__(self, run: Run, pool: RewardPool | None) -> None:
        self.run = run = programs.as_evaluated(run)
        self.pool = pool
        self.progress = ""  # how far an evaluation is; read by another thread
        self._source = run_source(run, pool, split="eval") if self.available else None
        run.kind.check_variants(run.config, run.data)

    @property
    def available(self) -> bool:
        """Whether the run has held-out prompts at all."""
        return self.run.kind.held_out(self.run.config, self.run.data).problems > 0

    def __call__(self, key: Array, params: Params) -> Evaluation:
        """Evaluates under the run's mesh.

        Args:
          key: the run's root key.
          params: the policy's.
        """
        groups = self._groups(key, params)
        unjudged = {"verify": 1.0} if self.pool is None else self.run.rewards.weights
        names = self.run.kind.eval_weights(unjudged)
        correct = np.asarray(groups.rewards)[:, :, right_part(self.run, names)] >= 1
        records = samples_of(groups, self.run.tokenizer, self.run.kind.task, names, correct.size)
        answers: Any = self.run.kind.final_answers([r["completion"] for r in records])
        if answers is not None:
            answers = np.array(answers, object).reshape(correct.shape).tolist()
        column = self.run.config.eval.variants_of
        part, stated = _confidence_part(self.run), None
        if part is not None and part in names:
            stated = np.asarray(groups.rewards)[:, :, list(names).index(part)]
        metrics = evaluation_metrics(
            correct,
            np.asarray(groups.rollout.mask).sum(-1),
            pass_k=self.run.config.eval.pass_k,
            answers=answers,
            variants_of=[p.meta.get(column) for p in groups.subject] if column else None,
            confidence=stated,
        )
        if "turn" in groups.ids:
            metrics |= episode_metrics(groups)
        if "episodes" in groups.counts:  # with an environment on the host
            metrics["failed"] = float((groups.rollout.stop >= StopReason.FAILED).mean())
            metrics |= environment_metrics(groups)
        return Evaluation(metrics, [r | {"split": "eval"} for r in records])

    def _groups(self, key: Array, params: Params) -> Groups:
        """All held-out groups in draws of one size, the last one filled up and cut."""
        assert self._source is not None
        source, samples = self._source, self.run.config.eval.samples
        total, size = self.run.kind.held_out(self.run.config, self.run.data)
        parts = []
        for start in range(0, total, size):
            self.progress = f"{start} of {total} prompts done"
            tickets = (start + np.arange(size)).astype(np.int32)
            rows, policy = source.order(tickets), {"policy": params}
            request = simple_request(
                key, policy, np.int32(0), tickets, samples, rows=rows, split="eval"
            )
            parts.append(to_host(source.draw(request)))
        source.finish(complete=True)
        return take_groups(join_groups(parts), slice(0, total))


def right_part(run: Run, names: Iterable[str]) -> int:
    """The column of an evaluation's reward parts, of these names, that says what is right."""
    listed = list(names)
    return listed.index(run.rewards.accuracy_part) if run.rewards.accuracy_part in listed else 0


def load_policy(run: Run, checkpoint: int | None) -> tuple[Array, Params, int]:
    """The root key, the policy and its step: from a run's checkpoint, or as before training.

    Args:
      run: from ``setup``.
      checkpoint: a training step; None for the newest.

    Raises:
      UserError: ``run.dir`` holds a run but no such checkpoint.
    """
    directory = run.config.run.dir
    if directory is None or (checkpoint is None and not is_run(directory)):
        return *programs.new_policy(run), 0
    counters = {
        "step": jax.ShapeDtypeStruct((), np.int32),
        "key": jax.eval_shape(jax.random.key_data, jax.eval_shape(lambda: jax.random.key(0))),
    }
    layout = programs.policy_layout(run)
    policy, restored = restore_policy(
        run.config, run.network, layout, checkpoint=checkpoint, also=counters
    )
    return restored["key"], policy, int(restored["step"])


def evaluate_run(config: Config, *, checkpoint: int | None = None) -> dict[str, Any]:
    """Evaluates a run's checkpoint, or the model it starts from.

    Args:
      config: a run's configuration; with ``run.dir``, its checkpoints are looked for there.
      checkpoint: a training step; None for the newest.

    Returns:
      ``step`` and the evaluation's metrics.

    Raises:
      UserError: nothing to evaluate on, or no such checkpoint.
    """
    run = build.setup(config, trains=False)
    held_out = run.kind.held_out(run.config, run.data).problems > 0
    if held_out:
        check_evaluation(run)
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        if not held_out:
            raise UserError("data.eval is missing; name a file of held-out prompts")
        with reward_pool(config) as pool:
            return {"step": step} | Evaluator(run, pool)(key, params).metrics


def sample_run(
    config: Config,
    *,
    prompts: Sequence[str] | None = None,
    count: int = 4,
    samples: int | None = None,
    checkpoint: int | None = None,
) -> list[dict[str, Any]]:
    """Completions of a run's policy, drawn as in training.

    Args:
      config: a run's configuration.
      prompts: questions in text; None for held-out problems.
      count: held-out problems taken when ``prompts`` is None.
      samples: completions of each prompt; None for ``sampling.group``.
      checkpoint: a training step; None for the newest.

    Returns:
      Records with prompt, completion, length and stop, and with rewards where there is an answer
      to judge by.

    Raises:
      UserError: a prompt that the tokenizer or the task's length does not allow, or no such
        checkpoint.
    """
    held_out = not prompts
    run = build.setup(config, trains=False) if held_out else build.policy_run(config)
    if prompts:
        longest = run.kind.longest_prompt
        kind, listed = run.kind.asked(prompts, partial(question_prompts, run, most=longest))
        data = RunData({"eval": listed}, {}, {})
        run = run._replace(kind=kind, data=data, width=max(run.width, kind.width(data)))
        kind.check_lengths(run.network, run.width)
    elif not run.kind.problems(run.data, count, "eval"):
        raise UserError("data.eval is missing; give prompts, or a file of held-out ones")
    table = run.config.eval.model_copy(
        update={
            "problems": len(prompts) if prompts else count,
            "samples": samples or config.sampling.group,
            "temperature": config.sampling.temperature,
            "variants_of": "",  # of the samples nothing is measured
        }
    )
    run = run._replace(config=config.model_copy(update={"eval": table}))
    check_evaluation(run, keys=("--count", "sampling.group" if samples is None else "-n"))
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(reward_pool(config)) if held_out else None
            records = Evaluator(run, pool)(key, params).samples
    unjudged = ("rewards", "reward", "answer", "split")
    return [
        {"step": step} | {k: v for k, v in r.items() if held_out or k not in unjudged}
        for r in records
    ]
